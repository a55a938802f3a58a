"""docs/support.md: which kernel takes which feature, asked of the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_onnx_attn.explain import CPU, H200, Machine, explain

from . import MADE

ops = torch.ops.onnx_attn
AMPERE = Machine(True, 80, 108, 166912)
GPUS = {"CUDA, 8.0 and later": AMPERE, "CUDA, 9.0 (Hopper)": H200}


def attention_call(rows: int, **changes: Any) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """A call with 8 query heads; ``changes`` are the feature that a row of the table is about."""

    def make() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        given = dict(changes)
        dtype, size, v_size = given.pop("dtype", torch.bfloat16), given.pop("head_size", 128), given.pop("v_head_size", None)
        kv_heads, keys = given.pop("kv_heads", 8), given.pop("keys", 512)
        Q = torch.zeros(2, 8, rows, size, dtype=dtype)
        K, V = torch.zeros(2, kv_heads, keys, size, dtype=dtype), torch.zeros(2, kv_heads, keys, v_size or size, dtype=dtype)
        if given.pop("lengths", False):
            given["nonpad_kv_seqlen"] = torch.full((2,), keys)
        if "mask" in given:
            shape, mask_dtype = given.pop("mask")
            given["attn_mask"] = torch.ones([{"B": 2, "H": 8, "L": rows, "S": keys}.get(axis, 1) for axis in shape], dtype=mask_dtype)
        if given.pop("past", False):
            past = {"past_key": K[:, :, :100], "past_value": V[:, :, :100]}
            return ops.attention.kv, (Q, K[:, :, :rows], V[:, :, :rows]), past | given
        if given.pop("cached", False):
            return ops.attention_cached, (Q, K[:, :, :rows], V[:, :, :rows], K.clone(), V.clone(), torch.zeros(2, dtype=torch.int64)), given
        if given.pop("lse", False):
            return ops.attention.lse, (Q, K, V), given | {"return_lse": True}
        mode = given.pop("mode", None)
        if mode is not None:
            return ops.attention.qk, (Q, K, V), given | {"qk_matmul_output_mode": mode}
        return ops.attention.default, (Q, K, V), given

    return make


def mha_call(rows: int, **changes: Any) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    def make() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        given = dict(changes)
        query, key = torch.zeros(2, rows, 512, dtype=torch.float16), torch.zeros(2, 512, 512, dtype=torch.float16)
        if given.pop("bias", False):
            given["bias"] = torch.zeros(3 * 512, dtype=torch.float16)
        if given.pop("lengths", False):
            given["key_padding_mask"] = torch.full((2,), 512, dtype=torch.int32)
        if given.pop("key_rows", False):
            given["key_padding_mask"] = torch.ones(2, 512, dtype=torch.int32)
        if given.pop("attention_bias", False):
            given["attention_bias"] = torch.zeros(1, 8, rows, 512, dtype=torch.float16)
        return ops.mha.default, (query, key, key), given | {"num_heads": 8}

    return make


Feature = tuple[str, Callable[..., Any], dict[str, Any]]
FEATURES: list[Feature] = [
    ("float16, bfloat16", attention_call, {}),
    ("float32", attention_call, {"dtype": torch.float32}),
    ("float64", attention_call, {"dtype": torch.float64}),
    ("128 keys", attention_call, {"keys": 128}),
    ("head size 64", attention_call, {"head_size": 64}),
    ("head size 80", attention_call, {"head_size": 80}),
    ("head size 256", attention_call, {"head_size": 256}),
    ("head size 37", attention_call, {"head_size": 37}),
    ("head size 512", attention_call, {"head_size": 512}),
    ("head size 192, values of 128", attention_call, {"head_size": 192, "v_head_size": 128}),
    ("grouped heads (8 on 2)", attention_call, {"kv_heads": 2}),
    ("causal", attention_call, {"is_causal": True}),
    ("window", attention_call, {"is_causal": True, "left_window_size": 99}),
    ("softcap", attention_call, {"softcap": 30.0}),
    ("`nonpad_kv_seqlen`", attention_call, {"lengths": True}),
    ("bool mask `[B, 1, L, S]`", attention_call, {"mask": ("B1LS", torch.bool)}),
    ("bool mask `[B, 1, 1, S]`", attention_call, {"mask": ("B11S", torch.bool)}),
    ("bfloat16 bias `[1, H, L, S]`", attention_call, {"mask": ("1HLS", torch.bfloat16)}),
    ("float32 bias `[1, H, L, S]`", attention_call, {"mask": ("1HLS", torch.float32)}),
    ("everything of these at once", attention_call, {
        "kv_heads": 2, "is_causal": True, "left_window_size": 99, "softcap": 30.0, "lengths": True, "mask": ("B1LS", torch.bool),
    }),
    ("past and present (`attention.kv`)", attention_call, {"past": True}),
    ("static cache (`attention_cached`)", attention_call, {"cached": True}),
    ("log-sum-exp (`attention.lse`)", attention_call, {"lse": True}),
    ("scores, modes 0 to 2 (`attention.qk`)", attention_call, {"mode": 2}),
    ("weights, mode 3 (`attention.qk`)", attention_call, {"mode": 3}),
    ("`mha`", mha_call, {}),
    ("`mha`, projection bias", mha_call, {"bias": True}),
    ("`mha`, lengths `[B]`", mha_call, {"lengths": True}),
    ("`mha`, key rows `[B, S]`", mha_call, {"key_rows": True}),
    ("`mha`, `attention_bias`", mha_call, {"attention_bias": True}),
    ("`mha`, unidirectional", mha_call, {"unidirectional": True}),
]  # fmt: skip


def cell(make: Callable[..., Any], rows: int, changes: dict[str, Any], machine: Machine) -> str:
    op, args, kwargs = make(rows, **changes)()
    plan = explain(op, *args, machine=machine, **kwargs)
    before = [name for name, needed in (("rows stored first", plan.separate_append), ("sums stored first", plan.separate_bias)) if needed]
    return f"`{plan.kernel}`" + (f" ({', '.join(before)})" if before and machine.is_cuda else "")


def page() -> str:
    columns = [("CPU", 128, CPU)]
    columns += [(f"{name}: {what}", rows, machine) for name, machine in GPUS.items() for what, rows in (("prefill", 128), ("decode", 1))]
    lines = [
        "# What runs where",
        MADE + "\n",
        "Every feature runs on every device, and all features combine. What differs is the kernel, and with it the speed. This table asks",
        "the planner: a bfloat16 call with 8 heads of size 128, 512 keys, and 128 query rows (prefill) or one (decode), changed by one",
        "feature a line. `torch_onnx_attn.explain` answers for your own call, and says why a faster kernel does not take it.\n",
        "| feature | " + " | ".join(name for name, _, _ in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for label, make, changes in FEATURES:
        lines.append(f"| {label} | " + " | ".join(cell(make, rows, changes, machine) for _, rows, machine in columns) + " |")
    lines.append(
        "\nOn devices after Hopper the kernels for 8.0 and later run through PTX. *Rows stored first*: new or past rows are written by a"
        "\nkernel of their own. *Sums stored first*: biased keys and values go through the workspace."
    )
    return "\n".join(lines) + "\n"
