"""The benchmark harness: the list of lines, the arithmetic behind the numbers, the table, and a run on small CPU lines."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import accounting, bench, candidates, check, report
from benchmarks.candidates import Candidate
from benchmarks.inputs import count_sets, make_inputs
from benchmarks.peers import BUILDERS
from benchmarks.shapes import GROUPS, LINES, Line
from benchmarks.timing import METHODS, QUICK, Effort, Timer, turn_order
from torch_onnx_attn import H200, explain, kernel
from torch_onnx_attn.explain import _preference

BY_NAME = {line.name: line for line in LINES}
REQUIRED = """
    d128_512 d128_512c d128_2k d128_2kc d128_8k d128_8kc d128_16kc d64_2k d64_8kc d256_8k d256_8kc d96_2k mla_192_128_4kc
    llama8b_gqa_8kc chunk_gqa_q512_k16k_c whisper_cross_b8 fp16_d128_8kc fp16_d128_2k fp16_gqa_8kc mha_2k_d64_fp16
    gemma2_softcap_window softcap_d128_8kc window1024_d128_16kc bias_1HSS_d64_2k boolmask_B1SS_d128_2k keypad_b32_s512_d64
    mha_keypad_b32_s512_d64 peak_memory_boolmask_16k decode_b1_h32_8_k8192_d128 decode_b1_h32_8_k131072_d128
    decode_b8_h32_8_k8192_d128 decode_b32_h32_8_k4096_d128 decode_b128_h32_8_k2048_d128 decode_b64_h32_32_k2048_d128
    decode_b16_h16_1_k8192_d256 decode_b64_h12_12_k1024_d64 decode_32k_holding_2k_vs_exact decode_log_uniform_32k
    decode_boolmask_vs_plain decode_bias_vs_plain decode_softcap_vs_plain decode_window1024_vs_plain past_present_decode_b8
    past_present_decode_b1 cached_decode_b8 cached_decode_b1 tensor_scatter_b32_2k_of_8k bert_base_b32_s128 host_no_grad
    host_inference_mode fp32_d64_2k fp32_d128_2kc scores_mode0_2k scores_mode2_2kc scores_mode3_2k
"""


def small(line: Line) -> Line:
    """The same line at a size for a CPU in a test."""
    kv_len = min(line.kv_len, 32)
    q_len = kv_len if line.q_len == line.kv_len else min(line.q_len, 8)
    lengths = line.lengths if not isinstance(line.lengths, int) else kv_len if line.lengths == line.kv_len else kv_len // 4
    kv_heads = min(line.kv_heads, 2)
    return dataclasses.replace(
        line,
        batch=min(line.batch, 2),
        kv_heads=kv_heads,
        q_heads=kv_heads * min(line.q_heads // line.kv_heads, 2),
        q_len=q_len,
        kv_len=kv_len,
        head_size=32,
        v_head_size=16 if line.v_head_size else 0,
        lengths=lengths,
        past=kv_len - q_len if line.past else 0,
        window=min(line.window, 5),
    )


# The list


def test_names_are_unique_and_the_required_lines_are_there() -> None:
    assert len(BY_NAME) == len(LINES)
    assert not set(REQUIRED.split()) - set(BY_NAME)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_a_line_uses_known_words(line: Line) -> None:
    assert line.group in GROUPS and line.group != "cpu"
    assert line.methods and set(line.methods) <= set(METHODS)
    assert line.peers and set(line.peers) <= set(BUILDERS)
    assert line.unit in ("TFLOP/s", "GB/s", *accounting.LESS_IS_BETTER)
    assert line.q_heads % line.kv_heads == 0
    assert "chained" in line.methods or line.group != "decode"


def test_a_line_may_force_a_kernel_of_ours() -> None:
    line = small(BY_NAME["d128_8k_forward_sm80"])
    assert line.kernel == "forward_sm80"
    with candidates.ours(line, []).context():
        assert _preference.text == "forward_sm80"
    with pytest.raises(RuntimeError, match="kernel: is 'x'"), candidates.ours(dataclasses.replace(line, kernel="x"), []).context():
        pass


def test_what_is_watched_by_sanitizers_takes_the_kernel_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(bench.__file__).parent))  # a script, beside its modules
    import sanitize

    kernels = set()
    for name, what, call in sanitize.calls("cpu"):
        with kernel(name):
            plan = explain(call.func, *call.args, **call.keywords, machine=H200)
        assert name in (None, plan.kernel), what
        kernels.add(plan.kernel)
    assert kernels == {"decode", "forward_short", "forward_sm80", "forward_sm90"}


# The arithmetic


def test_pairs_flops_and_bytes_of_a_full_and_a_causal_square() -> None:
    full = Line("x", "prefill", 2, 4, 2, 3, 3, 8, v_head_size=4)
    assert accounting.pairs(full) == 2 * 9
    assert accounting.flops(full) == 2 * 4 * 18 * (8 + 4)
    q, y, k, v = 2 * 4 * 3 * 8, 2 * 4 * 3 * 4, 2 * 2 * 3 * 8, 2 * 2 * 3 * 4
    assert accounting.moved_bytes(full) == 2 * (q + y + k + v)
    assert accounting.pairs(dataclasses.replace(full, causal=True)) == 2 * (1 + 2 + 3)


def test_pairs_of_windows_lengths_and_pasts() -> None:
    base = Line("x", "prefill", 1, 1, 1, 4, 4, 8, causal=True)
    assert accounting.pairs(dataclasses.replace(base, window=1)) == 1 + 2 + 2 + 2
    bottom_right = dataclasses.replace(base, kv_len=10, lengths=6)  # rows stand at 2, 3, 4, 5 of 6 valid keys
    assert accounting.pairs(bottom_right) == 3 + 4 + 5 + 6
    assert accounting.keys_read(bottom_right) == 6
    assert accounting.keys_read(dataclasses.replace(bottom_right, window=1)) == 5  # keys 1 to 5
    assert accounting.pairs(dataclasses.replace(base, q_len=1, past=3)) == 4


def test_bytes_of_cache_lines_masks_and_scores() -> None:
    decode = Line("x", "decode", 2, 4, 2, 1, 16, 8, lengths=5)
    q_and_y = 2 * (2 * 4 * 8) * 2
    assert accounting.kv_bytes(decode) == 2 * 2 * 5 * 16 * 2
    assert accounting.moved_bytes(decode) == q_and_y + accounting.kv_bytes(decode)
    kv = Line("x", "cache", 2, 4, 2, 1, 16, 8, call="attention.kv", past=15)
    assert accounting.moved_bytes(kv) == q_and_y + 2 * (2 * 2 * 16 * 16 * 2)  # everything read once and written once
    scatter = Line("x", "cache", 3, 2, 2, 4, 16, 8, call="tensor_scatter_")
    assert accounting.moved_bytes(scatter) == 2 * (3 * 2 * 4 * 8) * 2
    scores = Line("x", "scores", 1, 2, 2, 4, 6, 8, dtype="fp32", call="attention.qk", mode=0)
    assert accounting.moved_bytes(scores) == 4 * (2 * 4 * 6 + 2 * 4 * 8)
    assert accounting.mask_bytes(Line("x", "mask", 2, 3, 3, 4, 5, 8, mask="bias:1HQK")) == 3 * 4 * 5 * 2
    assert accounting.mask_bytes(Line("x", "mask", 2, 3, 3, 4, 5, 8, mask="bool:B1QK")) == 2 * 4 * 5
    assert accounting.mask_bytes(Line("x", "mask", 2, 3, 3, 4, 5, 8)) == 0


def test_known_numbers_of_the_page() -> None:
    assert accounting.value(BY_NAME["d128_8k"], 1.0) == pytest.approx(4 * 2 * 16 * 8192**2 * 128 / 1e9)
    assert accounting.kv_bytes(BY_NAME["decode_b1_h32_8_k8192_d128"]) == 33_554_432
    assert accounting.value(BY_NAME["bert_base_b32_s128"], 0.02) == 0.02
    assert accounting.value(BY_NAME["host_no_grad"], 0.008) == pytest.approx(8.0)
    assert count_sets(BY_NAME["decode_b1_h32_8_k8192_d128"]) == 8
    assert count_sets(BY_NAME["decode_b64_h32_32_k2048_d128"]) == 2


def test_log_uniform_lengths_are_fixed_and_in_range() -> None:
    lengths = accounting.lengths_of(BY_NAME["decode_log_uniform_32k"])
    assert lengths == accounting.lengths_of(BY_NAME["decode_log_uniform_32k"])
    assert len(lengths) == 32 and min(lengths) >= 1 and max(lengths) <= 32768
    assert min(lengths) < 100 and max(lengths) > 10000


def test_ratios_are_above_one_when_we_win() -> None:
    assert accounting.ratio_to_best("GB/s", 30.0, {"a": 20.0, "b": 25.0, "c": None}) == (1.2, "b")
    assert accounting.ratio_to_best("ms", 2.0, {"a": 3.0, "b": 4.0}) == (1.5, "a")
    assert accounting.ratio_to_best("bytes", 0.0, {"a": 3.0 * 2**20}) == (3.0, "a")
    assert accounting.ratio_to_best("ms", 2.0, {"a": None}) == (None, None)


def test_fractions_of_the_ceiling() -> None:
    ceilings = {"matmul_bf16_tflops": 600.0, "matmul_tf32_tflops": 360.0, "read_gbs": 4000.0}
    line = BY_NAME["d128_8k"]
    assert accounting.ceiling_fraction(line, accounting.flops(line) / 300e9, ceilings) == pytest.approx(0.5)
    assert accounting.ceiling_of(BY_NAME["fp32_d64_2k"], ceilings) == 120.0
    decode = BY_NAME["decode_b8_h32_8_k8192_d128"]
    assert accounting.ceiling_fraction(decode, accounting.moved_bytes(decode) / 4e9, ceilings) == pytest.approx(1.0)
    assert accounting.ceiling_fraction(BY_NAME["past_present_decode_b8"], 1.0, ceilings) is None  # copy was not measured


# Records and the table


def record(name: str, milliseconds: dict[str, float], refused: dict[str, str] | None = None) -> report.Record:
    return report.make_record(BY_NAME[name], "events", milliseconds, refused or {}, {"ours": 1e-3}, {"matmul_bf16_tflops": 680.0})


def test_a_record_has_the_promised_keys(tmp_path: Path) -> None:
    head = report.header("cpu", quick=True)
    records = [record("d128_8k", {"ours": 1.5, "sdpa_cudnn": 1.6}, {"fa4": "ModuleNotFoundError: No module named 'flash_attn'"})]
    report.write_json(tmp_path / "deep" / "x.json", head, {"copy_gbs": 4250.123456789}, records)
    result = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert {"gpu", "driver", "torch", "cuda", "date", "commit", "ceilings", "lines"} <= set(result)
    (line,) = result["lines"]
    assert {"name", "group", "ours", "unit", "method", "peers", "ratio", "ceiling_fraction"} <= set(line)
    assert line["peers"]["fa4"] is None and "flash_attn" in line["refused"]["fa4"]
    assert line["ratio"] == pytest.approx(1.6 / 1.5, rel=1e-4)
    assert result["ceilings"]["copy_gbs"] == 4250.12


def test_other_methods_get_a_name_of_their_own() -> None:
    made = report.make_record(BY_NAME["decode_b8_h32_8_k8192_d128"], "chained", {"ours": 0.07}, {}, {}, {})
    assert made["name"] == "decode_b8_h32_8_k8192_d128@chained" and "rotated" in made["method"]
    assert made["goals"]["ceiling_fraction"] == 0.95
    first = BY_NAME["decode_b1_h32_8_k8192_d128"]
    assert report.goals(first, "events")["ratio"] == 1.0 and report.goals(first, "chained")["ratio"] > 1.1
    assert report.goals(BY_NAME["decode_bias_vs_plain"], "events")["ratio"] == 0.8


def test_the_table_shows_losses_first() -> None:
    win = record("d128_2k", {"ours": 1.0, "sdpa_cudnn": 1.2, "sdpa_flash": 2.0})
    below_goal = record("bias_1HSS_d64_2k", {"ours": 1.0, "sdpa_cudnn": 1.2})
    loss, worse = record("d128_8k", {"ours": 1.0, "sdpa_cudnn": 0.9}), record("d64_2k", {"ours": 1.0, "sdpa_cudnn": 0.5})
    failed = report.failed_record(BY_NAME["d96_2k"], "RuntimeError: no", ["sdpa_cudnn"])
    near_plain = record("boolmask_B1SS_vs_plain", {"ours": 1.0, "ours_plain": 0.9})
    records = [win, below_goal, loss, near_plain, worse, failed]
    assert [made["name"] for made in report.table_order(records)] == [
        "d96_2k", "d64_2k", "d128_8k", "bias_1HSS_d64_2k", "d128_2k", "boolmask_B1SS_vs_plain",
    ]  # fmt: skip
    marks = [line.split()[0] for line in report.table(records).splitlines()[1:5]]
    assert marks == ["FAIL", "LOSS", "LOSS", "goal"]
    assert "RuntimeError: no" in report.table(records)
    assert report.summary(records).startswith("6 results: 2 lost to a peer, 1 below the design's goal, 1 failed.")


# Timing and checking


def test_every_candidate_starts_and_ends_a_turn() -> None:
    three = [Candidate(name, []) for name in "abc"]
    orders = ["".join(candidate.name for candidate in turn_order(three, turn)) for turn in range(4)]
    assert orders == ["abc", "cba", "bca", "acb"]


def test_a_candidate_that_raises_is_refused_with_its_reason() -> None:
    def broken() -> None:
        raise ValueError("head size 7\nis odd")

    timer = Timer("cpu", Effort(1, 0.1, 3, 1))
    measured, refused = timer.measure([Candidate("good", [lambda: None]), Candidate("bad", [broken])], "events")
    assert set(measured) == {"good"} and refused == {"bad": "ValueError: head size 7 is odd"}


def test_a_refusal_tells_what_the_library_warned_of() -> None:
    def broken() -> None:
        warnings.warn("Flash attention kernel not used because:", stacklevel=1)
        warnings.warn("Expected query to have half precision. (Triggered internally at sdp_utils.cpp:1.)", stacklevel=1)
        warnings.warn("CuDNN attention has been runtime disabled.", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    line = small(BY_NAME["fp32_d64_2k"])
    errors, wrong = bench.verify(line, make_inputs(line, "cpu"), [Candidate("sdpa_flash", [broken])], Timer("cpu", QUICK))
    assert not errors
    assert wrong == {"sdpa_flash": "RuntimeError: No available kernel. Aborting execution. Expected query to have half precision."}


def naive(line: Line, inputs) -> torch.Tensor:
    group = line.q_heads // line.kv_heads
    k, v = (x.double().repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
    scores = inputs.q.double() @ k.transpose(-1, -2) / math.sqrt(line.head_size)
    if line.softcap:
        scores = line.softcap * torch.tanh(scores / line.softcap)
    i, j = torch.arange(line.q_len)[:, None], torch.arange(line.kv_len)
    hidden = (j > i) if line.causal else torch.zeros(line.q_len, line.kv_len, dtype=torch.bool)
    if line.window >= 0:
        hidden = hidden | (j < i - line.window)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def test_the_check_accepts_the_right_result_and_nothing_else() -> None:
    line = small(BY_NAME["gemma2_softcap_window"])
    (inputs,) = make_inputs(line, "cpu")
    right = naive(line, inputs)
    assert check.relative_error(line, inputs, (right,)) < 1e-6
    assert check.relative_error(line, inputs, (naive(dataclasses.replace(line, softcap=0.0, window=-1), inputs),)) > 1e-2
    right[0, 0, 5, 3] = math.nan
    assert check.relative_error(line, inputs, (right,)) == math.inf


def test_the_check_sees_a_cache_that_was_not_written() -> None:
    line = small(BY_NAME["tensor_scatter_b32_2k_of_8k"])
    (inputs,) = make_inputs(line, "cpu")
    inputs.forget_writes()
    assert check.relative_error(line, inputs, (inputs.q,)) == math.inf


# The whole program


def test_list_and_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(line.name in listed for line in LINES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().out


ONE_OF_EACH = """
    d128_512c chunk_gqa_q512_k16k_c mha_keypad_b32_s512_d64 bias_1HSS_d64_2k decode_log_uniform_32k decode_32k_holding_2k_vs_exact
    decode_window1024_vs_plain past_present_decode_b8 cached_decode_b8 tensor_scatter_b32_2k_of_8k host_no_grad scores_mode2_2kc
"""


def test_a_run_on_small_lines(tmp_path: Path) -> None:
    pytest.importorskip("torch_onnx_attn")
    lines = [small(BY_NAME[name]) for name in ONE_OF_EACH.split()]
    path = tmp_path / "small.json"
    status = bench.main(["--device", "cpu", "--quick", "--no-plots", "--json", str(path)], lines)
    records = {made["name"]: made for made in json.loads(path.read_text())["lines"]}
    assert status == 0, [made["error"] for made in records.values() if made["error"]]
    assert set(ONE_OF_EACH.split()) <= set(records) and "decode_log_uniform_32k@chained" in records
    assert records["d128_512c"]["peers"]["sdpa_flash"] > 0
    assert all(made["refused"][name] for made in records.values() for name, value in made["peers"].items() if value is None)


@pytest.mark.gpu
def test_events_graphs_chains_and_memory_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.ceilings, "measure", lambda *_: {"read_gbs": 4000.0})
    lines = [small(BY_NAME[name]) for name in (*ONE_OF_EACH.split(), "peak_memory_boolmask_16k")]
    path = tmp_path / "small.json"
    status = bench.main(["--quick", "--no-plots", "--peers", "sdpa|cat|write|index|eager", "--json", str(path)], lines)
    records = {made["name"]: made for made in json.loads(path.read_text())["lines"]}
    assert status == 0, [made["error"] for made in records.values() if made["error"]]
    assert records["d128_512c@graph"]["ours"] > 0 and records["cached_decode_b8@chained"]["ours"] > 0
    assert records["cached_decode_b8@chained"]["ceiling_fraction"] > 0


def test_plots_are_drawn_for_each_group(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [
        record("d128_8k", {"ours": 1.5, "sdpa_cudnn": 1.6}, {"fa4": "not here"}),
        record("boolmask_B1SS_vs_plain", {"ours": 1.0, "ours_plain": 0.9}),
        report.failed_record(BY_NAME["fp32_d64_2k"], "RuntimeError: no", []),
    ]
    report.write_json(tmp_path / "x.json", report.header("cpu", quick=True), {}, records)
    assert [image.name for image in bench.plot.draw(tmp_path / "x.json")] == ["x-prefill.png", "x-mask.png"]
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("x-prefill.png", "x-mask.png"))


def test_a_failing_line_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sometimes(line: Line, sets: list) -> Candidate:
        if line.name == "d128_512":
            raise RuntimeError("no such kernel")
        return Candidate("ours", [lambda: torch.zeros_like(sets[0].q)])

    monkeypatch.setattr(bench, "ours", sometimes)
    lines = [small(BY_NAME[name]) for name in ("d128_512", "d128_2k")]
    assert bench.main(["--device", "cpu", "--quick", "--no-plots", "--peers", "none", "--json", str(tmp_path / "x.json")], lines) == 1
    errors = [made["error"] for made in json.loads((tmp_path / "x.json").read_text())["lines"]]
    assert errors[0] == "RuntimeError: no such kernel" and "wrong result" in errors[1]


def test_peers_can_be_chosen() -> None:
    line = BY_NAME["d128_8k"]
    assert bench.chosen_peers(line, "") == list(line.peers)
    assert bench.chosen_peers(line, "cudnn|fa4") == ["sdpa_cudnn", "fa4"]
    assert bench.chosen_peers(line, "none") == []
    assert bench.chosen_peers(BY_NAME["keypad_vs_plain"], "none") == ["ours_plain"]
