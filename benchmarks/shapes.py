"""The fixed list of benchmark lines. Names never change their meaning: results of different days are compared by name."""

from __future__ import annotations

from dataclasses import dataclass

GROUPS = ("prefill", "mask", "decode", "cache", "short", "fp32", "scores", "cpu")


@dataclass(frozen=True)
class Line:
    name: str
    group: str  # one of GROUPS
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int  # all keys: past and new ones together, or the capacity of a buffer
    head_size: int
    v_head_size: int = 0  # 0: as head_size
    dtype: str = "bf16"
    call: str = "attention"  # the overload: attention, attention.kv, attention.qk, attention_cached, mha, tensor_scatter_
    causal: bool = False
    window: int = -1  # keys to the left of a query's own, -1: all
    softcap: float = 0.0
    mask: str = ""  # "bool:B1QK", "bias:1HQK", "keys:B11K" (key padding as a bool mask), "lengths:B" (1-D, mha)
    lengths: int | str | None = None  # nonpad_kv_seqlen: the same for every row, or "log-uniform"
    past: int = 0  # rows of past_key and past_value
    mode: int | None = None  # qk_matmul_output_mode
    kernel: str = ""  # of ours, forced; "": the planner chooses
    peers: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("events",)  # the keys of timing.METHODS; the first one keeps the plain name
    unit: str = "TFLOP/s"  # TFLOP/s, GB/s (more is better), ms, us, bytes (less is better)
    ceiling: str = "matmul"  # what bounds the line: matmul (of its type), read, copy, or "" for none
    goal_ratio: float = 1.0  # at least this times the best peer; for lines beside our own calls, the least that is no loss
    goal_ceiling: float = 0.0  # at least this fraction of the ceiling
    goal_value: float = 0.0  # no more than this (units where less is better); 0: no such goal

    @property
    def v_size(self) -> int:
        return self.v_head_size or self.head_size


SDPA = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
PREFILL_PEERS = (*SDPA, "fa4", "flashinfer")


def prefill(name: str, batch: int, heads: tuple[int, int], lens: tuple[int, int], size: int, causal: bool = False, **more) -> Line:
    return Line(name, "prefill", batch, *heads, *lens, size, causal=causal, **{"peers": PREFILL_PEERS, **more})


PREFILL = [
    prefill("d128_512", 32, (16, 16), (512, 512), 128),
    prefill("d128_512c", 32, (16, 16), (512, 512), 128, True),
    prefill("d128_2k", 8, (16, 16), (2048, 2048), 128),
    prefill("d128_2kc", 8, (16, 16), (2048, 2048), 128, True),
    prefill("d128_8k", 2, (16, 16), (8192, 8192), 128),
    # The kernel for Ampere, Ada and Blackwell, beside peers that have the same instructions.
    prefill("d128_8k_forward_sm80", 2, (16, 16), (8192, 8192), 128, kernel="forward_sm80", peers=("sdpa_flash", "sdpa_efficient")),
    prefill("d128_8kc", 2, (16, 16), (8192, 8192), 128, True),
    prefill("d128_16kc", 1, (16, 16), (16384, 16384), 128, True),
    prefill("d64_2k", 8, (32, 32), (2048, 2048), 64),
    prefill("d64_8kc", 2, (32, 32), (8192, 8192), 64, True),
    prefill("d256_8k", 2, (8, 8), (8192, 8192), 256),
    prefill("d256_8kc", 2, (8, 8), (8192, 8192), 256, True),
    prefill("d96_2k", 8, (16, 16), (2048, 2048), 96),
    prefill("mla_192_128_4kc", 4, (16, 16), (4096, 4096), 192, True, v_head_size=128),
    prefill("llama8b_gqa_8kc", 1, (32, 8), (8192, 8192), 128, True),
    prefill("chunk_gqa_q512_k16k_c", 1, (32, 8), (512, 16384), 128, True, lengths=16384),  # lengths: causal is bottom-right
    prefill("whisper_cross_b8", 8, (20, 20), (448, 1500), 64, dtype="fp16"),
    prefill("fp16_d128_8kc", 2, (16, 16), (8192, 8192), 128, True, dtype="fp16", peers=(*PREFILL_PEERS, "ort")),
    prefill("fp16_d128_2k", 8, (16, 16), (2048, 2048), 128, dtype="fp16", peers=(*PREFILL_PEERS, "ort")),
    prefill("fp16_gqa_8kc", 1, (32, 8), (8192, 8192), 128, True, dtype="fp16", peers=(*PREFILL_PEERS, "ort")),
    prefill("mha_2k_d64_fp16", 8, (16, 16), (2048, 2048), 64, dtype="fp16", call="mha", peers=(*SDPA, "fa4", "ort")),
]

MASK_PEERS = ("sdpa_cudnn", "sdpa_efficient", "flex")
KEYPAD = dict(batch=32, q_heads=12, kv_heads=12, q_len=512, kv_len=512, head_size=64, dtype="fp16")
BOOLMASK = dict(batch=4, q_heads=16, kv_heads=16, q_len=2048, kv_len=2048, head_size=128, mask="bool:B1QK")
CAPPED_PEERS = ("flex", "fa4", "flashinfer")

MASK = [
    Line("gemma2_softcap_window", "mask", 1, 16, 8, 8192, 8192, 256, causal=True, window=4096, softcap=50.0, peers=CAPPED_PEERS,
         goal_ratio=1.1),
    Line("softcap_d128_8kc", "mask", 2, 16, 16, 8192, 8192, 128, causal=True, softcap=50.0, peers=CAPPED_PEERS),
    Line("window1024_d128_16kc", "mask", 1, 16, 16, 16384, 16384, 128, causal=True, window=1024, peers=CAPPED_PEERS, goal_ratio=1.1),
    Line("bias_1HSS_d64_2k", "mask", 8, 16, 16, 2048, 2048, 64, mask="bias:1HQK", peers=MASK_PEERS, goal_ratio=1.3),
    Line("boolmask_B1SS_d128_2k", "mask", **BOOLMASK, peers=MASK_PEERS, goal_ratio=1.3),
    Line("boolmask_B1SS_vs_plain", "mask", **BOOLMASK, peers=("ours_plain",), unit="ms", goal_ratio=0.8),
    # Key padding counts every key, padded ones too, so that a kernel which skips them shows what it gains.
    Line("keypad_b32_s512_d64", "mask", **KEYPAD, mask="keys:B11K", peers=(*MASK_PEERS, "sdpa_math"), goal_ratio=1.3),
    Line("keypad_vs_plain", "mask", **KEYPAD, mask="keys:B11K", peers=("ours_plain",), unit="ms", goal_ratio=0.8),
    Line("mha_keypad_b32_s512_d64", "mask", **KEYPAD, mask="lengths:B", call="mha", peers=(*MASK_PEERS, "ort"), goal_ratio=1.3),
    Line("peak_memory_boolmask_16k", "mask", 1, 32, 8, 16384, 16384, 128, mask="bool:11QK", peers=("sdpa_cudnn", "flex"),
         methods=("memory",), unit="bytes", ceiling=""),
]  # fmt: skip


def decode(name: str, batch: int, heads: tuple[int, int], kv_len: int, size: int = 128, **more) -> Line:
    defaults = dict(peers=("sdpa_flash", "sdpa_cudnn", "fa4", "flashinfer"), methods=("events", "chained"), unit="GB/s", ceiling="read")
    return Line(name, "decode", batch, *heads, 1, kv_len, size, **{**defaults, **more})


def beside_plain(name: str, **more) -> Line:
    """A decode step with something added, relative to the same step without it."""
    return decode(name, 8, (32, 8), 8192, peers=("ours_plain",), unit="ms", goal_ratio=0.8, **more)


DECODE = [
    decode("decode_b1_h32_8_k8192_d128", 1, (32, 8), 8192, goal_ratio=1 / 0.85),
    decode("decode_b1_h32_8_k131072_d128", 1, (32, 8), 131072, goal_ceiling=0.95),
    decode("decode_b8_h32_8_k8192_d128", 8, (32, 8), 8192, goal_ceiling=0.95),
    decode("decode_b32_h32_8_k4096_d128", 32, (32, 8), 4096, goal_ceiling=0.95),
    decode("decode_b128_h32_8_k2048_d128", 128, (32, 8), 2048, goal_ceiling=0.95),
    decode("decode_b64_h32_32_k2048_d128", 64, (32, 32), 2048, goal_ceiling=0.95),
    decode("decode_b16_h16_1_k8192_d256", 16, (16, 1), 8192, 256, goal_ceiling=0.95),
    decode("decode_b64_h12_12_k1024_d64", 64, (12, 12), 1024, 64, goal_ceiling=0.95),
    decode("decode_32k_holding_2k_vs_exact", 16, (32, 8), 32768, lengths=2048, peers=("ours_exact",), unit="ms", goal_ratio=1 / 1.05),
    decode("decode_log_uniform_32k", 32, (32, 8), 32768, lengths="log-uniform", peers=("sdpa_cudnn", "flex", "flashinfer"),
           goal_ceiling=0.95),
    decode("decode_boolmask", 8, (32, 8), 8192, mask="bool:B11K", peers=("sdpa_cudnn",)),
    beside_plain("decode_boolmask_vs_plain", mask="bool:B11K"),
    beside_plain("decode_bias_vs_plain", mask="bias:B11K"),
    beside_plain("decode_softcap_vs_plain", softcap=50.0),
    beside_plain("decode_lengths_vs_plain", lengths=8192),
    beside_plain("decode_window1024_vs_plain", lengths=8192, causal=True, window=1024),
]  # fmt: skip

PAST_PRESENT = dict(q_heads=32, kv_heads=8, q_len=1, kv_len=8192, head_size=128, past=8191, dtype="fp16", call="attention.kv",
                    peers=("cat_sdpa", "cat_cudnn", "ort"), unit="GB/s", ceiling="copy")  # fmt: skip
IN_PLACE = dict(q_heads=32, kv_heads=8, q_len=1, kv_len=8192, head_size=128, lengths=8192, call="attention_cached",
                peers=("write_flash", "write_cudnn"), methods=("events", "chained"), unit="GB/s", ceiling="read")  # fmt: skip

CACHE = [
    Line("past_present_decode_b8", "cache", batch=8, **PAST_PRESENT, goal_ceiling=0.85),
    Line("past_present_decode_b1", "cache", batch=1, **PAST_PRESENT),
    Line("cached_decode_b8", "cache", batch=8, **IN_PLACE),
    Line("cached_decode_b1", "cache", batch=1, **IN_PLACE),
    Line("tensor_scatter_b32_2k_of_8k", "cache", 32, 8, 8, 2048, 8192, 128, call="tensor_scatter_", peers=("index_put", "scatter"),
         unit="GB/s", ceiling="copy"),
]  # fmt: skip

SHORT = [
    Line("bert_base_b32_s128", "short", 32, 12, 12, 128, 128, 64, dtype="fp16", peers=PREFILL_PEERS, methods=("events", "graph"),
         unit="ms", ceiling="copy"),
    Line("bert_base_b8_s128", "short", 8, 12, 12, 128, 128, 64, dtype="fp16", peers=PREFILL_PEERS, unit="ms", ceiling="copy"),
    Line("bert_base_b128_s128", "short", 128, 12, 12, 128, 128, 64, dtype="fp16", peers=PREFILL_PEERS, unit="ms", ceiling="copy"),
    Line("bert_base_b32_s128_keypad", "short", 32, 12, 12, 128, 128, 64, dtype="fp16", mask="keys:B11K", peers=SDPA, unit="ms",
         ceiling="copy"),
    Line("bert_base_b32_s64", "short", 32, 12, 12, 64, 64, 64, dtype="fp16", peers=PREFILL_PEERS, unit="ms", ceiling="copy"),
    Line("bert_base_b32_s256", "short", 32, 12, 12, 256, 256, 64, dtype="fp16", peers=PREFILL_PEERS, unit="ms", ceiling="copy"),
    Line("minilm_b32_s128", "short", 32, 12, 12, 128, 128, 32, dtype="fp16", peers=PREFILL_PEERS, unit="ms", ceiling="copy"),
    Line("d128_b32_s128c", "short", 32, 16, 16, 128, 128, 128, causal=True, peers=PREFILL_PEERS, unit="ms", ceiling="copy"),
    Line("host_no_grad", "short", 1, 1, 1, 1, 1, 64, peers=("sdpa",), methods=("host_no_grad",), unit="us", ceiling="", goal_value=8.0),
    Line("host_inference_mode", "short", 1, 1, 1, 1, 1, 64, peers=("sdpa",), methods=("host_inference_mode",), unit="us", ceiling="",
         goal_value=8.0),
]  # fmt: skip

FP32_PEERS = (*SDPA, "sdpa_math")
FP32 = [
    Line("fp32_d64_2k", "fp32", 4, 16, 16, 2048, 2048, 64, dtype="fp32", peers=FP32_PEERS, goal_ratio=2.0),
    Line("fp32_d128_2kc", "fp32", 4, 16, 16, 2048, 2048, 128, dtype="fp32", causal=True, peers=FP32_PEERS, goal_ratio=2.0),
]


def scores(name: str, mode: int, **more) -> Line:
    """Bandwidth counts the bytes written: the scores and Y."""
    return Line(name, "scores", 4, 16, 16, 2048, 2048, 128, dtype="fp16", call="attention.qk", mode=mode,
                peers=("eager_scores", "ort"), unit="GB/s", ceiling="copy", goal_ceiling=0.75, **more)  # fmt: skip


SCORES = [
    scores("scores_mode0_2k", 0),
    scores("scores_mode1_softcap_2k", 1, softcap=30.0),
    scores("scores_mode2_2kc", 2, causal=True),
    scores("scores_mode3_2k", 3),
]

LINES: tuple[Line, ...] = (*PREFILL, *MASK, *DECODE, *CACHE, *SHORT, *FP32, *SCORES)
