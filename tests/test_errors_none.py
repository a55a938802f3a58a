"""None for a required tensor is refused by the name of the argument, in every op and however the call is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sample_calls import samples
from torch import Tensor
from ways import Through, trace

from torch_onnx_attn import explain
from torch_onnx_attn.autograd import OPERATORS

ops = torch.ops.onnx_attn


def plain(op: Any, arguments: dict[str, Any]) -> Any:
    return op(**arguments)


def inside(context: Callable[[], Any]) -> Callable[[Any, dict[str, Any]], Any]:
    def make(op: Any, arguments: dict[str, Any]) -> Any:
        with context():
            return op(**arguments)

    return make


WAYS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "plain": plain,
    "no_grad": inside(torch.no_grad),
    "inference_mode": inside(torch.inference_mode),
    "autocast": inside(lambda: torch.autocast("cpu", torch.bfloat16)),
    "mode": inside(Through),
    "trace": trace,
    "explain": lambda op, arguments: explain(op, **arguments),
}


def overloads() -> dict[str, Any]:
    found = [getattr(getattr(ops, name), overload) for name in OPERATORS for overload in getattr(ops, name).overloads()]
    return {str(op).removeprefix("onnx_attn."): op for op in found}


def required(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments if isinstance(argument.type, torch.TensorType)]


def legal(op: Any) -> dict[str, Any]:
    sample_of = ops.mha.shared if op is ops.mha.shared_functional else op
    return next(dict(arguments) for sampled, arguments in samples().values() if sampled is sample_of)


CASES = [pytest.param(op, name, id=f"{label}-{name}") for label, op in overloads().items() for name in required(op)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op, name", CASES)
def test_none(op: Any, name: str, way: str) -> None:
    arguments = legal(op)
    attends = op._schema.name.split("::")[1] in ("attention", "attention_cached", "mha")
    with contextlib.nullcontext() if attends or way != "explain" else pytest.raises(RuntimeError, match=r"^op: made no attention call"):
        WAYS[way](op, arguments)
    expected: tuple[type[Exception], str] = (RuntimeError, f"^{name}: is None; a tensor is required$")
    if len(required(op)) == 1 and not any(isinstance(x, Tensor) for key, x in arguments.items() if key != name) and way != "trace":
        expected = (NotImplementedError, "There were no tensor arguments to this function")  # torch's own: it knows no device
    with pytest.raises(expected[0], match=expected[1]):
        WAYS[way](op, arguments | {name: None})
