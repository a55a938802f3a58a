"""Peers outside torch, used when they can be imported: FlashAttention-4, FlashInfer, ONNX Runtime's CUDA provider."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.accounting import lengths_of
from benchmarks.candidates import Candidate, Refused, heads_first, heads_merged
from benchmarks.inputs import Inputs
from benchmarks.shapes import Line

PAGE = 16  # rows in a page of FlashInfer's cache
WORKSPACE_BYTES = 512 << 20


def _rows_first(result: Any) -> tuple[Tensor, ...]:
    """[batch, rows, heads, size], perhaps with a log-sum-exp beside it."""
    return ((result[0] if isinstance(result, tuple) else result).transpose(1, 2),)


def _refuse(line: Line, library: str, *, mask: bool = False, float32: bool = False) -> None:
    if mask and line.mask:
        raise Refused(f"{library} takes no mask tensor")
    if float32 and line.dtype == "fp32":
        raise Refused(f"{library} has no float32")


def fa4(line: Line, sets: list[Inputs]) -> Candidate:
    from flash_attn.cute.interface import flash_attn_func

    _refuse(line, "FA4", mask=True, float32=True)
    options: dict[str, Any] = {"causal": line.causal}
    if line.window >= 0:
        options["window_size"] = (line.window, 0)
    if line.softcap:
        options["softcap"] = line.softcap
    if line.q_len == 1:
        options["num_splits"] = 0  # its own choice
    calls = [partial(flash_attn_func, *(t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v)), **options) for x in sets]
    return Candidate("fa4", calls, _rows_first)


def flashinfer(line: Line, sets: list[Inputs]) -> Candidate:
    """Planned outside the clock, as its users do."""
    import flashinfer  # noqa: F401  names the missing package in the refusal

    _refuse(line, "FlashInfer", mask=True, float32=True)
    return _flashinfer_decode(line, sets) if line.q_len == 1 else _flashinfer_prefill(line, sets)


@lru_cache(maxsize=1)
def _workspace() -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _flashinfer_options(line: Line) -> dict[str, Any]:
    return {"logits_soft_cap": line.softcap or None, "window_left": line.window}


def _flashinfer_decode(line: Line, sets: list[Inputs]) -> Candidate:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    pages_in_row = line.kv_len // PAGE
    if line.kv_len % PAGE or line.head_size != line.v_size:
        raise Refused("needs whole pages and values as wide as the keys")

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    begin, pages, last = [0], [], []
    for row, length in enumerate(lengths_of(line)):
        used = -(-length // PAGE)
        pages += range(row * pages_in_row, row * pages_in_row + used)
        begin.append(len(pages))
        last.append(length - (used - 1) * PAGE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=True)
    dtype = sets[0].q.dtype
    wrapper.plan(int32(begin), int32(pages), int32(last), line.q_heads, line.kv_heads, line.head_size, PAGE,
                 q_data_type=dtype, data_type=dtype, **_flashinfer_options(line))  # fmt: skip

    def paged(x: Tensor) -> Tensor:  # [batch, heads, kv_len, size] -> [pages, PAGE, heads, size]
        return x.unflatten(2, (pages_in_row, PAGE)).permute(0, 2, 3, 1, 4).flatten(0, 1)

    calls = [partial(wrapper.run, x.q[:, :, 0].contiguous(), torch.stack((paged(x.k), paged(x.v)), 1)) for x in sets]
    return Candidate("flashinfer", calls, lambda result: (result[:, :, None],))


def _flashinfer_prefill(line: Line, sets: list[Inputs]) -> Candidate:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    q_begin = torch.arange(line.batch + 1, device="cuda", dtype=torch.int32) * line.q_len
    k_begin = torch.arange(line.batch + 1, device="cuda", dtype=torch.int32) * line.kv_len
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD", backend="fa3")
    wrapper.plan(q_begin, k_begin, line.q_heads, line.kv_heads, line.head_size, head_dim_vo=line.v_size, causal=line.causal,
                 q_data_type=sets[0].q.dtype, **_flashinfer_options(line))  # fmt: skip
    calls = [partial(wrapper.run, *(t.transpose(1, 2).flatten(0, 1) for t in (x.q, x.k, x.v))) for x in sets]
    return Candidate("flashinfer", calls, lambda result: (result.unflatten(0, (line.batch, -1)).transpose(1, 2),))


def ort(line: Line, sets: list[Inputs]) -> Candidate:
    """One ONNX node in ONNX Runtime, inputs and outputs bound to torch's memory."""
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise Refused(f"onnxruntime {onnxruntime.__version__} has no CUDAExecutionProvider")
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    if line.dtype == "bf16":
        raise Refused("its CUDA kernels for these operators are float16 and float32")
    calls = [_ort_call(onnxruntime, line, inputs) for inputs in sets]
    unpack = heads_first(line.q_heads) if line.call == "mha" else tuple
    return Candidate("ort", calls, unpack, own_stream=True)


def _ort_call(onnxruntime: Any, line: Line, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    node, feeds, fetches = _ort_node(line, inputs)
    model = _ort_model(node, feeds, fetches)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CUDAExecutionProvider"])
    binding = session.io_binding()
    for name, tensor in feeds.items():
        binding.bind_input(name, "cuda", 0, _numpy_type(tensor), tuple(tensor.shape), tensor.data_ptr())
    for name, tensor in fetches.items():
        binding.bind_output(name, "cuda", 0, _numpy_type(tensor), tuple(tensor.shape), tensor.data_ptr())

    def call() -> tuple[Tensor, ...]:
        session.run_with_iobinding(binding)
        return tuple(fetches.values())

    call.keeps_alive = (feeds, fetches)  # type: ignore[attr-defined]  the session holds bare pointers
    return call


def _numpy_type(tensor: Tensor) -> Any:
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype.type


def _ort_node(line: Line, inputs: Inputs) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """The node, its inputs and its outputs by name."""
    from onnx import helper

    y = torch.empty(line.batch, line.q_heads, line.q_len, line.v_size, dtype=inputs.q.dtype, device=inputs.q.device)
    if line.call == "mha":
        feeds = dict(zip("qkv", (heads_merged(x) for x in (inputs.q, inputs.k, inputs.v)), strict=True))
        if inputs.key_lengths is not None:
            feeds["padding"] = inputs.key_lengths
        names = ["q", "k", "v", *(["", "padding"] if "padding" in feeds else [])]
        node = helper.make_node("MultiHeadAttention", names, ["y"], domain="com.microsoft", num_heads=line.q_heads)
        return node, feeds, {"y": y.transpose(1, 2).flatten(2).contiguous()}

    feeds, fetches = {"q": inputs.q, "k": inputs.k, "v": inputs.v}, {"y": y}
    ins, outs, attributes = ["q", "k", "v"], ["y"], {"is_causal": int(line.causal), "softcap": line.softcap}
    if line.call == "attention.kv":
        feeds |= {"past_k": inputs.past_key, "past_v": inputs.past_value}
        ins += ["", "past_k", "past_v"]
        fetches |= {"k_out": y.new_empty(line.batch, line.kv_heads, line.kv_len, line.head_size)}
        fetches |= {"v_out": y.new_empty(line.batch, line.kv_heads, line.kv_len, line.v_size)}
        outs += ["k_out", "v_out"]
    if line.call == "attention.qk":
        fetches["scores"] = y.new_empty(line.batch, line.q_heads, line.q_len, line.kv_len)
        outs += ["", "", "scores"]
        attributes["qk_matmul_output_mode"] = line.mode
    return helper.make_node("Attention", ins, outs, **attributes), feeds, fetches


def _ort_model(node: Any, feeds: dict[str, Tensor], fetches: dict[str, Tensor]) -> Any:
    from onnx import TensorProto, helper

    types = {torch.float16: TensorProto.FLOAT16, torch.float32: TensorProto.FLOAT, torch.int32: TensorProto.INT32}

    def infos(tensors: dict[str, Tensor]) -> list[Any]:
        return [helper.make_tensor_value_info(name, types[t.dtype], list(t.shape)) for name, t in tensors.items()]

    graph = helper.make_graph([node], "line", infos(feeds), infos(fetches))
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)
