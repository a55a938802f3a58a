"""What a call needs from ONNX: the lowest opset that can say it, or the reason why none can."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

__all__ = [
    "CONVERTED_OPSET",
    "HIGHEST_OPSET",
    "LOWEST_OPSET",
    "Call",
    "ExportError",
    "Need",
    "calls",
    "need",
    "refusal",
    "require_packages",
]

LOWEST_OPSET = 18  # what the exporter's own translations are written for
CONVERTED_OPSET = 25  # onnxscript converts a graph up to here; above, `export` raises the number itself
HIGHEST_OPSET = 28

_NAMESPACE = "onnx_attn::"
_CACHE_WRITES = ("tensor_scatter", "tensor_scatter_", "attention_cached")


class ExportError(ValueError):
    """A call that ONNX, or the opset asked for, has no form for. The message names the argument and the way out."""


class Need(NamedTuple):
    """The lowest opset that can say a call, and the argument (or op) that asks for it."""

    opset: int
    argument: str


def need(op: str, arguments: Mapping[str, Any]) -> Need | None:
    """The need of one call of `onnx_attn::<op>` (without overload); None where the opset of ai.onnx does not matter."""
    if op in _CACHE_WRITES:
        least = Need(24, op)
    elif op == "attention":
        least = Need(24, "nonpad_kv_seqlen") if arguments.get("nonpad_kv_seqlen") is not None else Need(23, op)
    else:
        return None
    for window in ("left_window_size", "right_window_size"):
        if arguments.get(window, -1) >= 0:
            return Need(25, window)
    return least


def refusal(op: str, overload: str, float64: bool) -> str | None:
    """Why a call has no ONNX form at any opset, or None if it has one. `float64` tells the type of the first argument."""
    if op == "attention" and overload == "lse":
        return (
            "attention.lse cannot be exported: ai.onnx::Attention has no output for the log-sum-exp. "
            "Export the model without return_lse, or compute it from qk_matmul_output_mode=2 with torch.logsumexp"
        )
    if op == "mha" and float64:
        return "mha: query is float64, and com.microsoft::MultiHeadAttention knows float32, float16 and bfloat16 only. Convert the model"
    return None


class Call(NamedTuple):
    """One call of an onnx_attn op in a captured graph."""

    op: str
    overload: str
    arguments: dict[str, Any]

    @property
    def need(self) -> Need | None:
        return need(self.op, self.arguments)

    @property
    def refusal(self) -> str | None:
        first = next(iter(self.arguments.values()), None)
        value = first.meta.get("val") if isinstance(first, torch.fx.Node) else None
        return refusal(self.op, self.overload, isinstance(value, torch.Tensor) and value.dtype == torch.float64)


def calls(program: torch.export.ExportedProgram) -> Iterator[Call]:
    """Every call of an onnx_attn op in the program, those in branches and loops included."""
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            target = node.target
            if isinstance(target, torch._ops.HigherOrderOperator) and any(_is_ours(argument) for argument in node.args):
                raise ExportError(
                    f"{node.args[0]}: run_decompositions() has wrapped this in-place call, and the exporter cannot look inside. "
                    "Export the module, or the program as torch.export.export returned it"
                )
            if not _is_ours(target):
                continue
            names = [argument.name for argument in target._schema.arguments]
            op = target._schema.name.removeprefix(_NAMESPACE)
            yield Call(op, target._overloadname, dict(zip(names, node.args, strict=False)) | dict(node.kwargs))


def _is_ours(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.startswith(_NAMESPACE)


def require_packages() -> None:
    """A sentence instead of a bare ModuleNotFoundError."""
    missing = []
    for module, package in (("onnx", "onnx"), ("onnxscript", "onnxscript"), ("onnx_ir", "onnx-ir")):
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
    if missing:
        command = f"pip install {' '.join(missing)}"
        raise ImportError(f"torch_onnx_attn.onnx needs {', '.join(missing)}: {command} (or the extra torch-onnx-attn[onnx])")


def check_program(program: Any) -> None:
    if not isinstance(program, torch.onnx.ONNXProgram):
        raise TypeError(f"program: is of type {type(program).__name__}, must be what export or torch.onnx.export returned")
