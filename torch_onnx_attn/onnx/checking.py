"""`check`: run an exported file next to the model it came from, on the example, on random values, and at other sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_onnx_attn.onnx.requirements import check_program, require_packages

__all__ = ["CheckReport", "Finding", "ONNXCheckError", "check"]

# Of float64 the scale attribute, and in ONNX Runtime the expanded function, are float32.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_CHECKER = "onnx.checker"
_LARGEST_FOR_REFERENCE = 2**28  # bytes of weights: onnx.reference computes with NumPy


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was checked. `status` is "ok", "failed" or "not checked"; `detail` says how close, or why."""

    what: str
    status: str
    detail: str


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """All findings; `print` it."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Nothing failed, and some runtime ran the file and agreed."""
        ran = [finding.status for finding in self.findings if finding.what != _CHECKER]
        return all(finding.status != "failed" for finding in self.findings) and "ok" in ran

    @property
    def unchecked(self) -> tuple[Finding, ...]:
        """What could not be checked here."""
        return tuple(finding for finding in self.findings if finding.status == "not checked")

    def __str__(self) -> str:
        return "\n".join(f"{finding.status:<11}  {finding.what}: {finding.detail}" for finding in self.findings)


class ONNXCheckError(RuntimeError):
    """An exported file is not valid, differs from the model, or could not be run by anything. `report` has the findings."""

    def __init__(self, report: CheckReport) -> None:
        super().__init__(f"the exported model failed its check:\n{report}")
        self.report = report


def check(
    program: torch.onnx.ONNXProgram,
    captured: torch.export.ExportedProgram,
    *,
    path: str | os.PathLike[str] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> CheckReport:
    """Compare an exported model with the program it was made of, which runs on this package's ops.

    onnx.checker looks at the file; then ONNX Runtime on the CPU, or onnx.reference where ONNX Runtime does not take the model, gets the
    same inputs as the program: the example inputs, random values of the same sizes, and random values at other sizes of the dynamic
    axes. Integers and bools of random inputs are drawn from the values of the example, so that token ids and lengths stay valid; where
    every dynamic axis is 1, integers are the smallest of them.

    Args:
        program: what `export` returned.
        captured: what `torch.export.export` made of the model, with its example inputs.
        path: the file, if it is written already; else a temporary one is.
        tolerance: how far outputs may be apart, relative to the largest expected number where that is above 1. None takes 1e-4 for
            float32, 1e-2 for float16, 6e-2 for bfloat16 and 1e-6 for float64, by the coarsest floating type in the graph's outputs
            and inputs. Integers and bools must be equal.
        seed: of the random values.

    Returns:
        CheckReport. What could not be run is "not checked", with the reason; `ok` is false if nothing could.
    """
    require_packages()
    check_program(program)
    with contextlib.ExitStack() as stack:
        if path is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = Path(folder) / "model.onnx"
            program.save(path, external_data=True)
        findings = [_checker(path)]
        runners = _Runners(path, _weight_bytes(program))
        findings += runners.refusals
        generator = torch.Generator().manual_seed(seed)
        for what, leaves in _input_sets(captured, generator):
            findings += _compare(what, captured, leaves, runners, program, tolerance)
        return CheckReport(tuple(findings))


def _checker(path: str | os.PathLike[str]) -> Finding:
    import onnx

    try:
        onnx.checker.check_model(os.fspath(path), full_check=True)
    except Exception as error:
        return Finding(_CHECKER, "failed", _first_line(error))
    return Finding(_CHECKER, "ok", "the file is valid, types and sizes included")


class _Runners:
    """The places that took the model, best first, each as a function of named arrays."""

    def __init__(self, path: str | os.PathLike[str], weight_bytes: int) -> None:
        self.path, self.weight_bytes = path, weight_bytes
        self.refusals: list[Finding] = []
        self._session: Any = None
        self._reference: Any = None
        try:
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            self._name = f"ONNX Runtime {onnxruntime.__version__}"
            self._session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        except ImportError:
            self.refusals.append(Finding("ONNX Runtime", "not checked", "onnxruntime is not installed"))
        except Exception as error:
            self.refusals.append(Finding(self._name, "not checked", f"does not take the model: {_first_line(error)}"))

    def run(self, feeds: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Any] | Exception]]:
        """What each place gives, until one has run the model."""
        if self._session is not None:
            try:
                yield self._name, [_from_array(array) for array in self._session.run(None, dict(feeds))]
                return
            except Exception as error:
                yield self._name, error
        import onnx

        name = f"onnx.reference {onnx.__version__}"
        if self.weight_bytes > _LARGEST_FOR_REFERENCE:
            yield name, RuntimeError("it is too slow for this many weights")
            return
        try:
            if self._reference is None:
                from onnx.reference import ReferenceEvaluator

                self._reference = ReferenceEvaluator(onnx.load(os.fspath(self.path)))
            yield name, [_from_array(array) for array in self._reference.run(None, dict(feeds))]
        except Exception as error:
            yield name, error


def _compare(
    what: str,
    captured: torch.export.ExportedProgram,
    inputs: Any,
    runners: _Runners,
    program: torch.onnx.ONNXProgram,
    tolerance: float | None,
) -> list[Finding]:
    args, kwargs = inputs
    names = [str(value.name) for value in program.model.graph.inputs]
    output_names = [str(value.name) for value in program.model.graph.outputs]
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if len(tensors) != len(names):
        return [Finding(what, "not checked", f"the model has {len(tensors)} tensor inputs, the graph {len(names)}")]
    feeds = {name: _to_array(tensor) for name, tensor in zip(names, tensors, strict=True)}
    try:
        with torch.inference_mode():
            cloned_args, cloned_kwargs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            outputs = captured.module()(*cloned_args, **cloned_kwargs)
    except Exception as error:
        return [Finding(what, "not checked", f"the model itself refuses these inputs: {_first_line(error)}")]
    expected = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    allowed = tolerance if tolerance is not None else max((TOLERANCES.get(x.dtype, 0.0) for x in (*tensors, *expected)), default=0.0)
    findings = []
    for name, got in runners.run(feeds):
        if isinstance(got, Exception):
            findings.append(Finding(f"{name} on {what}", "not checked", f"does not run: {_first_line(got)}"))
        else:
            findings.append(_judge(f"{name} on {what}", output_names, expected, got, allowed))
    return findings


def _judge(what: str, names: Sequence[str], expected: Sequence[Tensor], got: Sequence[Tensor], allowed: float) -> Finding:
    if len(expected) != len(got):
        return Finding(what, "failed", f"the model has {len(expected)} outputs, the graph {len(got)}")
    worst, worst_name = 0.0, ""
    for name, want, have in zip(names, expected, got, strict=True):
        if want.shape != have.shape or want.dtype != have.dtype:
            wanted, given = (f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (want, have))
            return Finding(what, "failed", f"output {name} is {given}, should be {wanted}")
        distance = _distance(want, have)
        if distance > worst or not worst_name:
            worst, worst_name = distance, name
    status = "ok" if worst <= allowed else "failed"
    return Finding(what, status, f"largest difference {worst:.1e}, in {worst_name or 'nothing'}, allowed {allowed:.0e}")


def _distance(want: Tensor, have: Tensor) -> float:
    """The largest difference relative to the largest number above 1; infinite where only one is a number."""
    want, have = want.detach().cpu(), have.detach().cpu()
    if not want.dtype.is_floating_point:
        return 0.0 if torch.equal(want, have) else float("inf")
    lowest = torch.finfo(want.dtype).min
    a, b = want.double(), have.double()
    # ONNX Runtime writes a number near the type's or float32's lowest where a masked score is -inf.
    same = (a == b) | (a.isnan() & b.isnan()) | ((a == float("-inf")) & (b <= max(lowest, torch.finfo(torch.float32).min) * 0.99))
    gap = torch.where(same, 0.0, (a - b).abs())
    if gap.numel() == 0:
        return 0.0
    size = max(1.0, float(a[a.isfinite()].abs().max())) if bool(a.isfinite().any()) else 1.0
    largest = float(gap.max())
    return largest / size if largest == largest else float("inf")


def _input_sets(captured: torch.export.ExportedProgram, generator: torch.Generator) -> Iterator[tuple[str, Any]]:
    """The example, random values of its sizes, and random values of other sizes."""
    args, keywords = captured.example_inputs or ((), {})
    given: Mapping[str, Any] = keywords
    kwargs = {name: given[name] for name in _keyword_order(captured, given)}
    yield "the example", (args, kwargs)
    leaves, structure = pytree.tree_flatten((args, kwargs))

    def randomised(sizes: Sequence[Sequence[int] | None], smallest: bool = False) -> Any:
        drawn = [
            _random(leaf, leaf.shape if size is None else size, generator, smallest) if isinstance(leaf, Tensor) else leaf
            for leaf, size in zip(leaves, sizes, strict=True)
        ]
        return pytree.tree_unflatten(drawn, structure)

    yield "random values", randomised([None] * len(leaves))
    for change in _Change:
        sizes = _other_sizes(captured, leaves, change)
        if sizes is not None:
            yield f"random values, {change.value}", randomised(sizes, smallest=change is _Change.ONE)


def _keyword_order(captured: torch.export.ExportedProgram, kwargs: Mapping[str, Any]) -> list[str]:
    """The order in which the program, and hence the graph, takes keyword inputs."""
    context = captured.call_spec.in_spec.child(1).context if captured.call_spec.in_spec is not None else None
    return list(context) if context else list(kwargs)


def _random(example: Tensor, shape: Sequence[int], generator: torch.Generator, smallest: bool) -> Tensor:
    """Integers are values of the example; the smallest one where sizes shrink, since lengths must not exceed them."""
    if example.is_floating_point():
        return torch.randn(tuple(shape), generator=generator).to(example.device, example.dtype)
    if example.numel() == 0:
        return example.new_zeros(tuple(shape))
    if smallest and example.dtype != torch.bool:
        return example.min().expand(tuple(shape)).clone()
    picked = torch.randint(example.numel(), tuple(shape), generator=generator)
    return example.flatten()[picked.to(example.device)]


class _Change(enum.Enum):
    LARGER = "every dynamic axis larger by 1"
    ONE = "every dynamic axis 1"


def _other_sizes(captured: torch.export.ExportedProgram, leaves: Sequence[Any], change: _Change) -> list[list[int] | None] | None:
    """Sizes of each input that keep the relations between the dynamic axes; None if there are no dynamic axes."""
    user_inputs = set(captured.graph_signature.user_inputs)
    values = [node.meta.get("val") for node in captured.graph.nodes if node.op == "placeholder" and node.name in user_inputs]
    if len(values) != len(leaves):
        return None
    chosen: dict[Any, int] = {}
    for value, leaf in zip(values, leaves, strict=True):
        if isinstance(leaf, Tensor) and isinstance(value, Tensor):
            for size, actual in zip(value.shape, leaf.shape, strict=True):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    chosen[size.node.expr] = _within(captured, size.node.expr, 1 if change is _Change.ONE else int(actual) + 1)
    if not chosen:
        return None
    return [
        [int(size.node.expr.subs(chosen)) if isinstance(size, torch.SymInt) else int(size) for size in value.shape]
        if isinstance(value, Tensor)
        else None
        for value in values
    ]


def _within(captured: torch.export.ExportedProgram, symbol: Any, size: int) -> int:
    bounds = captured.range_constraints.get(symbol)
    if bounds is None:
        return size
    return int(min(max(size, bounds.lower), bounds.upper))


def _weight_bytes(program: torch.onnx.ONNXProgram) -> int:
    return sum(value.const_value.nbytes for value in program.model.graph.initializers.values() if value.const_value is not None)


def _to_array(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def _from_array(array: Any) -> Tensor:
    import numpy

    array = numpy.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(numpy.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy()).reshape(array.shape)


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
