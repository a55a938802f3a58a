"""Runs a model before and after the rewrite on the same arrays and says how far the results are apart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from torch_onnx_attn.bad_input import BadInput
from torch_onnx_attn.models.packages import first_line
from torch_onnx_attn.models.rewrite.report import Checked
from torch_onnx_attn.models.session import run_session

__all__ = ["OriginalDoesNotRun", "compare"]

# Both models compute the same thing in other orders, and rounding grows on the way through a model. Relative to the largest element.
_ALLOWED = {"float64": 1e-5, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}  # float64: the attribute scale is float32


class OriginalDoesNotRun(BadInput):
    """No runtime takes the original model with these arrays, so they say nothing about the rewritten one."""


def compare(original: str | os.PathLike[str], rewritten: str | os.PathLike[str], feeds: Mapping[str, Any], source: str) -> Checked:
    """Both models on the same arrays. `source` says where these came from.

    Raises:
        OriginalDoesNotRun: no runtime runs the original with these arrays.
        BadInput: a runtime runs the original, but none the rewritten model as well.
    """
    shapes = ", ".join(f"{key} {list(np.shape(array))}" for key, array in feeds.items())
    reasons: list[str] = []
    error_type: type[BadInput] = OriginalDoesNotRun
    for name, run in _RUNNERS.items():
        try:
            before = run(original, feeds)
        except Exception as error:
            reasons.append(f"{name}: {first_line(error)[:300]}")
            continue
        try:
            after = run(rewritten, feeds)
        except Exception as error:
            error_type = BadInput
            reasons.append(f"{name} runs the original but not the rewritten model: {first_line(error)[:300]}")
            continue
        deviations = {output: _deviation(want, after[output]) for output, want in before.items()}
        allowed = max((_ALLOWED.get(want.dtype.name, 0.0) for want in before.values()), default=0.0)
        return Checked(f"{source} ({shapes})", name, deviations, allowed)
    raise error_type(f"the models cannot be compared with inputs {shapes}; {'; '.join(reasons)}. Give inputs or sizes that the model takes")


def _deviation(want: Any, got: Any) -> float:
    if want.shape != got.shape or want.dtype != got.dtype:
        return float("inf")
    if want.size == 0:
        return 0.0
    want, got = want.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.abs(want - got)
    difference[(want == got) | (np.isnan(want) & np.isnan(got))] = 0.0
    if not np.isfinite(difference).all():
        return float("inf")
    finite = np.abs(want[np.isfinite(want)])
    return float(difference.max() / max(float(finite.max(initial=0.0)), np.finfo(np.float32).tiny))


def _by_onnxruntime(path: str | os.PathLike[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return run_session(onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"]), feeds)


def _by_reference(path: str | os.PathLike[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
    from onnx.reference import ReferenceEvaluator

    model = onnx.load(os.fspath(path))
    with np.errstate(all="ignore"):
        results: Any = ReferenceEvaluator(model).run(None, dict(feeds))
    return {output.name: np.asarray(result) for output, result in zip(model.graph.output, results, strict=True)}


_RUNNERS = {"ONNX Runtime": _by_onnxruntime, "onnx.reference": _by_reference}
