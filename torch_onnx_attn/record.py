"""Keeps one call of an op in an .npz file, and runs it again elsewhere.

    with torch_onnx_attn.record.record("call.npz", call=3):
        model(tokens)

    replayed = torch_onnx_attn.record.replay("call.npz", device="cuda")

The file holds everything that the call depended on (tensors with their strides, attributes) and what it returned, as plain arrays and
one JSON text, so that a wrong or slow call of a large program becomes one file to look at, or to send to somebody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import __version__, ops
from .archive import read_archive
from .bad_input import BadInput, check_writable, first_line, writing
from .call import OUTPUTS, Call
from .explain import Plan
from .tolerance import Allowance, Deviation, allowances, deviation, own_arithmetic

__all__ = ["Recorded", "Recorder", "Replayed", "load", "record", "replay"]

_FORMAT = 1
_KIND = "a recorded call (`record` writes them)"
_BITS = {torch.bfloat16: torch.int16}  # types that numpy does not have, and integers that hold their bits
# Overload by overload: the outputs it returns, then those that it writes in place, as (output, argument).
_RETURNS: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {
        "default": ("Y",),
        "kv": ("Y", "present_key", "present_value"),
        "qk": ("Y", "qk_matmul_output"),
        "kv_qk": ("Y", "present_key", "present_value", "qk_matmul_output"),
        "lse": ("Y", "lse"),
    },
    "mha": {
        "default": ("output",),
        "kv": ("output", "present_key", "present_value"),
        "qk": ("output", "qk"),
        "kv_qk": ("output", "present_key", "present_value", "qk"),
        "shared": ("output",),
        "shared_functional": ("output", "present_key", "present_value"),
    },
    "attention_cached": {"default": ("Y",)},
    "tensor_scatter": {"default": ("present_cache",)},
    "tensor_scatter_": {"default": ()},
    "valid_kv_length": {"default": ("lengths",)},
}
_WRITES: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("mha", "shared"): (("present_key", "past_key"), ("present_value", "past_value")),
    ("attention_cached", "default"): (("key_cache", "key_cache"), ("value_cache", "value_cache")),
    ("tensor_scatter_", "default"): (("present_cache", "cache"),),
}


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A call from a file, and what it returned.

    Attributes:
        call: the call, on the CPU, with the strides it had.
        outputs: what it returned or wrote.
        origin: where it was made: ``device``, ``torch``, ``version``, ``index`` among the calls, ``name`` of the overload.
    """

    call: Call
    outputs: dict[str, Tensor]
    origin: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A recorded call that was run again.

    Attributes:
        device: where.
        plan: the kernel that it takes and why not a faster one; None for an op that does not attend.
        milliseconds: median time of the call alone.
        to_reference: deviation of each output from float64.
        to_recorded: deviation of each output from what was recorded.
        same_bits: whether every output has the recorded bits.
    """

    device: str
    plan: Plan | None
    milliseconds: float
    to_reference: dict[str, Deviation]
    to_recorded: dict[str, Deviation]
    same_bits: bool

    @property
    def agrees(self) -> bool:
        return all(found.agrees for found in (*self.to_reference.values(), *self.to_recorded.values()))


# ---------------------------------------------------------------------------------------------------------------------
# Recording
# ---------------------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """What :func:`record` enters. ``calls`` lists the calls seen so far, one line each."""

    def __init__(self, path: str | os.PathLike[str] | None, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path, self.index = path, index
        self.calls: list[str] = []
        self.saved = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op, overload = func._schema.name.removeprefix("onnx_attn::"), func._overloadname
        if func.namespace != "onnx_attn" or overload not in _RETURNS.get(op, ()):
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        given = {name: value for name, value in (dict(zip(names, args, strict=False)) | kwargs).items() if value is not None}
        self.calls.append(_line(op, overload, given))
        if self.path is None or len(self.calls) - 1 != self.index:
            return func(*args, **kwargs)
        before = {name: _snapshot(value) if isinstance(value, Tensor) else value for name, value in given.items()}
        result = func(*args, **kwargs)
        returned = (result,) if isinstance(result, Tensor) else tuple(result or ())
        outputs = dict(zip(_RETURNS[op][overload], returned, strict=True))
        outputs |= {output: given[argument] for output, argument in _WRITES.get((op, overload), ())}
        origin = {
            "name": f"{op}.{overload}",
            "index": self.index,
            "device": str(next(value for value in given.values() if isinstance(value, Tensor)).device),
            "torch": torch.__version__,
            "version": __version__,
        }
        _save(self.path, _call(op, before, tuple(outputs)), outputs, origin)
        self.saved = True
        return result


def _line(op: str, overload: str, given: dict[str, Any]) -> str:
    shown = [
        f"{name}={str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else f"{name}={value}"
        for name, value in given.items()
    ]
    return f"{op}{'' if overload == 'default' else '.' + overload}({', '.join(shown)})"


def _call(op: str, given: dict[str, Any], outputs: tuple[str, ...]) -> Call:
    """The call in the names of the Python functions."""
    if op == "tensor_scatter_":
        op, given = "tensor_scatter", {("past_cache" if name == "cache" else name): value for name, value in given.items()}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    attributes = {name: value for name, value in given.items() if not isinstance(value, Tensor) and name not in ("output_qk", "return_lse")}
    return Call(op, tensors, attributes, outputs)


def _snapshot(tensor: Tensor) -> Tensor:
    """A copy on the CPU with the same strides: the op may write the original, or read it in place."""
    return _with_strides(tensor.detach().cpu(), tensor.stride())


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy with these strides; broadcast axes have stride 0."""
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, strides, strict=True)]
    kept = tensor[tuple(slice(0, size) for size in sizes)]
    copy = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(kept).expand(tensor.shape)


@contextlib.contextmanager
def record(path: str | os.PathLike[str] | None, call: int = 0) -> Iterator[Recorder]:
    """Saves one call of the ops of this package that is made inside ``with`` by this thread.

    Args:
        path: the .npz file to write; None only lists the calls.
        call: which one, counted from 0.

    Yields:
        A :class:`Recorder`, whose ``calls`` lists the calls and whose ``saved`` says whether the file was written.

    Raises:
        BadInput: the file cannot be written, or `call` is negative.

    Compiled functions run eagerly meanwhile, so that their calls are seen; replays of a CUDA graph are not.
    """
    if not isinstance(call, int) or call < 0:
        raise BadInput(f"call: is {call!r}; calls are counted from 0")
    if path is not None:
        check_writable(path)
    with torch.compiler.set_stance("force_eager"), Recorder(path, call) as recorder:
        yield recorder


def _save(path: str | os.PathLike[str], call: Call, outputs: dict[str, Tensor], origin: dict[str, Any]) -> None:
    import numpy

    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {"format": _FORMAT, "op": call.op, "attributes": dict(call.attributes), "origin": origin, "tensors": {}}
    for kind, tensors in (("input", call.tensors), ("output", outputs)):
        for name, tensor in tensors.items():
            tensor = tensor.detach().cpu()
            facts["tensors"][f"{kind}.{name}"] = {"dtype": str(tensor.dtype).removeprefix("torch."), "strides": list(tensor.stride())}
            tensor = tensor.contiguous()
            arrays[f"{kind}.{name}"] = tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).numpy()
    with writing(path), open(path, "wb") as file:  # an open file, because numpy.savez adds .npz to other names
        numpy.savez(file, call=numpy.array(json.dumps(facts)), **arrays)


# ---------------------------------------------------------------------------------------------------------------------
# Replaying
# ---------------------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> Recorded:
    """The call in a file that :func:`record` wrote. Raises BadInput for another file."""
    arrays = read_archive(path, _KIND)
    if "call" not in arrays:
        raise BadInput(f"{path}: is not {_KIND}")
    try:
        facts = json.loads(str(arrays["call"]))
        if facts["format"] != _FORMAT:
            raise BadInput(f"has format {facts['format']}; this version reads {_FORMAT}")
        tensors = {name: _restore(arrays[name], facts["tensors"][name]) for name in facts["tensors"]}
        split = {kind: {name.partition(".")[2]: x for name, x in tensors.items() if name.startswith(kind)} for kind in ("input", "output")}
        op, inputs, outputs = facts["op"], split["input"], split["output"]
        if op not in OUTPUTS or not inputs or not outputs or set(outputs) - set(OUTPUTS[op]):
            raise BadInput(f"holds a call of {op!r} that this version does not know")
        call = Call(op, inputs, dict(facts["attributes"]), tuple(outputs))
        inspect.signature(getattr(ops, op)).bind(**inputs, **call.attributes)  # the op itself checks the values
        origin = {name: str(facts["origin"][name]) for name in ("name", "device", "torch", "version")}
        return Recorded(call, outputs, origin | {"index": int(facts["origin"]["index"])})
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    except Exception as error:  # the file may hold anything at all in place of what `record` writes
        raise BadInput(f"{path}: is not a whole recorded call: {first_line(error)}") from error


def _restore(array: Any, facts: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, facts["dtype"])
    tensor = torch.from_numpy(array)
    return _with_strides(tensor.view(dtype) if dtype in _BITS else tensor, tuple(facts["strides"]))


def replay(path: str | os.PathLike[str], device: str | torch.device | None = None, repeats: int = 20) -> Replayed:
    """Runs a recorded call again and compares it with float64 and with what was recorded.

    Args:
        path: a file that :func:`record` wrote.
        device: where; by default the CPU, or CUDA where it is there and the call was made there.
        repeats: calls that are timed.

    Raises:
        BadInput: the file cannot be used.
        RuntimeError: the op refuses the call.
    """
    if not isinstance(repeats, int) or repeats < 1:
        raise BadInput(f"repeats: is {repeats!r}, must be an integer from 1 on")
    recorded = load(path)
    if device is None:
        device = "cuda" if recorded.origin["device"].startswith("cuda") and torch.cuda.is_available() else "cpu"
    call = dataclasses.replace(recorded.call, tensors={name: _moved(x, device) for name, x in recorded.call.tensors.items()})
    results = {name: tensor.cpu() for name, tensor in call.run().items()}
    scale, expected = recorded.call.scale(), recorded.call.expected()
    allowed = allowances(call, own_arithmetic(call), scale)
    return Replayed(
        str(device),
        None if call.op in ("tensor_scatter", "valid_kv_length") else call.plan(),
        _milliseconds(call, repeats),
        {name: deviation(result, expected[name], allowed[name]) for name, result in results.items()},
        {name: deviation(result, recorded.outputs[name].double(), _twice(allowed[name])) for name, result in results.items()},
        all(_same_bits(result, recorded.outputs[name]) for name, result in results.items()),
    )


def _twice(allowed: Allowance) -> Allowance:
    """Two results may each be off by what is allowed, to different sides."""
    return Allowance(2 * allowed.absolute, 2 * allowed.relative, allowed.unit)


def _moved(tensor: Tensor, device: str | torch.device) -> Tensor:
    """On another device with the same strides."""
    return tensor if torch.device(device).type == tensor.device.type else _with_strides(tensor.to(device), tensor.stride())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)) if one.dim() else torch.equal(one, other)


def _milliseconds(call: Call, repeats: int) -> float:
    """Median time of one call, its copies of what it writes in place aside."""
    make = call.prepare()
    make()
    times: list[float] = []
    for _ in range(repeats):
        if call.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            make()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            make()
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)
