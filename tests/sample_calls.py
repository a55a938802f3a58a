"""A call of every overload, for the tests of what PyTorch expects of an op."""

from __future__ import annotations

from typing import Any

import torch
from cases import Case, MhaCase, make_inputs, make_mha_inputs
from torch import Tensor

ops = torch.ops.onnx_attn
Call = tuple[Any, dict[str, Any]]  # an overload and its arguments


def samples(device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Call]:
    """At least one call of every overload, by name; every layout where there are several."""
    calls: dict[str, Call] = {}

    def add(name: str, op: Any, inputs: dict[str, Tensor], **attributes: Any) -> None:
        calls[name] = (op, inputs | attributes)

    features: dict[str, dict[str, Any]] = {
        "bhsd": {"layout": "bhsd", "mask": "bool"},
        "bshd": {"layout": "bshd", "mask": "same", "mask_axes": "h1k"},
        "3d": {"layout": "3d", "v_head_size": 8},
        "loose": {"layout": "loose", "lengths": "full"},
        "last axis strided": {"layout": "bhsd"},
        "one head": {"layout": "bshd", "q_heads": 1, "kv_heads": 1},
        "one row": {"layout": "bshd", "q_len": 1},
    }
    for feature, extra in features.items():
        case = Case(dtype=dtype, **extra)
        past = Case(**vars(case) | {"past": 4, "lengths": None})
        inputs, with_past = make_inputs(case, device), make_inputs(past, device)
        if feature == "last axis strided":
            for tensors in (inputs, with_past):
                tensors["Q"] = torch.stack([tensors["Q"], tensors["Q"]], -1)[..., 0].transpose(1, 2).contiguous().transpose(1, 2)
                tensors["Q"] = torch.stack([tensors["Q"], tensors["Q"]], -1)[..., 0]
        inputs = {name: x.nan_to_num() if x.is_floating_point() and name != "attn_mask" else x for name, x in inputs.items()}
        attributes = case.attributes()
        add(f"attention {feature}", ops.attention.default, inputs, **attributes, is_causal=True)
        add(f"attention.qk {feature}", ops.attention.qk, inputs, **attributes, qk_matmul_output_mode=1, softcap=2.0)
        add(f"attention.lse {feature}", ops.attention.lse, inputs, **attributes, return_lse=True)
        add(f"attention.kv {feature}", ops.attention.kv, with_past, **attributes)
        add(f"attention.kv_qk {feature}", ops.attention.kv_qk, with_past, **attributes, qk_matmul_output_mode=3)
        caches = {
            "key_cache": torch.zeros(2, case.kv_heads, 20, 16),
            "value_cache": torch.zeros(2, case.kv_heads, 20, case.v_head_size or 16),
        }
        caches = {name: x.to(device, dtype) for name, x in caches.items()}
        cached = {name: inputs[name] for name in "QKV"} | caches | {"cache_lengths": torch.tensor([3, 0], device=device)}
        add(f"attention_cached {feature}", ops.attention_cached.default, cached, **attributes, is_causal=True)

    mha_dtype = torch.float32 if dtype == torch.float64 else dtype
    for layout in ("bsnh", "bnsh", "packed_kv", "packed_qkv"):
        sizes = {"q_len": 5, "kv_len": 5, "dtype": mha_dtype, "layout": layout, "mask": "keys", "attention_bias": "h"}
        inputs = make_mha_inputs(MhaCase(**sizes), device)
        add(f"mha {layout}", ops.mha.default, inputs, num_heads=2)
        add(f"mha.qk {layout}", ops.mha.qk, inputs, num_heads=2, output_qk=True, unidirectional=True)
        if layout.startswith("packed"):
            continue
        with_past = make_mha_inputs(MhaCase(**sizes, past=4, bias=True), device)
        add(f"mha.kv {layout}", ops.mha.kv, with_past, num_heads=2)
        add(f"mha.kv_qk {layout}", ops.mha.kv_qk, with_past, num_heads=2, output_qk=True)
        shared = make_mha_inputs(MhaCase(**sizes, past=4, capacity=12), device)
        shared |= {name: shared[name].nan_to_num(0, 0, 0) for name in ("past_key", "past_value")}
        add(f"mha.shared {layout}", ops.mha.shared, shared, num_heads=2)
    wide = make_mha_inputs(MhaCase(dtype=mha_dtype, v_head_size=24), device)
    add("mha wide values", ops.mha.default, wide, num_heads=2)

    scatter = {"update": torch.randn(2, 3, 2, 4), "write_indices": torch.tensor([0, 3])}
    scatter = {name: x.to(device) for name, x in scatter.items()}
    cache = torch.randn(2, 3, 6, 4).to(device)
    add("tensor_scatter", ops.tensor_scatter.default, {"past_cache": cache} | scatter)
    add(
        "tensor_scatter of a view", ops.tensor_scatter.default, {"past_cache": cache.transpose(1, 2).contiguous().transpose(1, 2)} | scatter
    )
    add("tensor_scatter_", ops.tensor_scatter_.default, {"cache": cache.clone()} | scatter, circular=True)
    add("valid_kv_length", ops.valid_kv_length.default, {"attn_mask": torch.rand(3, 2, 4, 9).to(device) > 0.5})
    add("valid_kv_length of a rank-2 mask", ops.valid_kv_length.default, {"attn_mask": torch.rand(4, 9).to(device) > 0.5})
    return calls


NAMES = list(samples())
FUNCTIONAL = [name for name in NAMES if not samples()[name][0]._schema.is_mutable]


def run(call: Call) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Results, and the tensor arguments after the call; the call's own tensors are left alone."""
    op, arguments = call
    fresh = {name: clone_like(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    result = op(**fresh)
    results = [result] if isinstance(result, Tensor) else list(result or ())
    return results, {name: x for name, x in fresh.items() if isinstance(x, Tensor)}


def clone_like(x: Tensor) -> Tensor:
    """The same values, sizes and strides in storage of its own."""
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, x.storage_offset(), x.size(), x.stride())
