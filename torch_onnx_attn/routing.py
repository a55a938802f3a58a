"""Existing PyTorch code on these ops: ``route_attention`` takes its calls of torch's attention functions while it is active.

A torch function mode sees every call of a torch function, whatever name it was imported by, in eager code, under torch.compile
(inlined into the graph, part of its guards) and in torch.export and torch.onnx.export.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from . import routed_mha, routed_sdpa
from .diagnostics import PerformanceWarning, logger
from .explain import explain


class RoutingReport:
    """What became of the attention calls made inside :func:`route_attention`.

    Attributes:
        routed: how many calls of each function run on these ops.
        left: how many calls of each function were left to torch, by reason: ``left[function, reason]``.
    """

    def __init__(self) -> None:
        self.routed: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()

    def __str__(self) -> str:
        lines = [f"routed {_calls(count)} of {function}" for function, count in self.routed.items()]
        lines += [f"left   {_calls(count)} of {function}: {reason}" for (function, reason), count in self.left.items()]
        return "\n".join(lines) or "no attention call was made (a compiled graph counts when it is captured, not when it runs)"


def _calls(count: int) -> str:
    return f"{count} call" if count == 1 else f"{count} calls"


_active = threading.local()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note(function: str, reason: str | None) -> None:
    """Counts a call in every active report. Called while capturing, not by the graph: a guard on a counter would recompile it."""
    for report in getattr(_active, "reports", ()):
        if reason is None:
            report.routed[function] += 1
        else:
            report.left[function, reason] += 1
    logger.debug("%s: %s", function, "routed" if reason is None else f"left to torch: {reason}")


class _RoutingMode(TorchFunctionMode):
    """Without state: compiled graphs are guarded by the mode's class, so that a second ``with`` reuses them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours: Any
        if func is functional.scaled_dot_product_attention:
            name, ours = "scaled_dot_product_attention", routed_sdpa
        elif func is functional.multi_head_attention_forward:
            name, ours = "multi_head_attention_forward", routed_mha
        elif func is torch.Tensor.unflatten:  # the one function that torch.compile (2.13) cannot call from here by this name
            return args[0].unflatten(*args[1:], **kwargs)
        else:
            return func(*args, **kwargs)
        reason = ours.reason_to_leave(*args, **kwargs)
        _note(name, reason)
        if reason is not None:
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling() and logger.isEnabledFor(logging.DEBUG):
            _log_kernel(name, ours.attend, args, kwargs)
        return ours.attend(*args, **kwargs)


def _log_kernel(name: str, call: Any, args: Any, kwargs: Any) -> None:
    """Which kernel the call takes, and a warning if it is CUDA's general one. Costs a planning call, so only at level DEBUG."""
    plan = explain(call, *args, **kwargs)
    logger.debug("%s: kernel %s", name, plan.kernel)
    if plan.kernel == "general":
        reasons = "; ".join(f"{kernel}: {reason}" for kernel, reason in plan.refusals.items())
        warnings.warn(f"{name} takes the general kernel. {reasons}", PerformanceWarning, stacklevel=4)


_fast_paths = threading.Lock()
_blocks_without_fast_paths = 0
_fast_paths_were_enabled = True


@contextmanager
def _without_fast_paths() -> Iterator[None]:
    """Keeps torch.nn.MultiheadAttention and TransformerEncoderLayer off their fused forward, which calls no attention function.

    In eager code they notice the mode by themselves; under torch.compile they do not. The switch belongs to the process.
    """
    global _blocks_without_fast_paths, _fast_paths_were_enabled
    with _fast_paths:
        if _blocks_without_fast_paths == 0:
            _fast_paths_were_enabled = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _blocks_without_fast_paths += 1
    try:
        yield
    finally:
        with _fast_paths:
            _blocks_without_fast_paths -= 1
            if _blocks_without_fast_paths == 0:
                torch.backends.mha.set_fastpath_enabled(_fast_paths_were_enabled)


@contextmanager
def route_attention() -> Iterator[RoutingReport]:
    """Routes attention of existing PyTorch code to ``torch.ops.onnx_attn.attention`` inside ``with``, in this thread.

    Taken are ``torch.nn.functional.scaled_dot_product_attention`` and ``torch.nn.functional.multi_head_attention_forward``, hence
    ``torch.nn.MultiheadAttention`` and the ``torch.nn.Transformer`` modules, whose fused inference paths are passed by. Results are
    torch's, except that a row that may see no key is 0, where torch gives NaN or 0 depending on version and kernel, and that padded
    rows of ``torch.nn.TransformerEncoder`` are what the layers compute there, where its fused path writes zeros.

    A call is left to torch, with the reason in the report, when it needs what these ops do not do: gradients (they are forward
    only; a graph that is being exported needs none), dropout, nested or distributed tensors, ``add_bias_kv``, ``add_zero_attn``.

    Under torch.compile and export the calls are routed while a graph is captured, and counted then, not when the graph runs; a call
    that torch traces twice, as with dynamic sizes, counts twice. A compiled graph remembers whether it was captured inside: calling it
    outside captures another. A ``with`` inside a compiled function routes but does not count. Inside each other, the blocks act as one
    and each report counts its own. Every torch function called inside costs about a microsecond more of host time.

    Yields:
        RoutingReport, filled as calls are made.

    Warns:
        PerformanceWarning: on leaving the block, if calls were left to torch.
    """
    report = RoutingReport()
    if torch.compiler.is_compiling():
        with _RoutingMode():
            yield report
        return
    reports = _active.__dict__.setdefault("reports", [])
    reports.append(report)
    try:
        if len(reports) == 1:
            with _without_fast_paths(), _RoutingMode():
                yield report
        else:
            yield report
    finally:
        reports.remove(report)
    logger.info("%s", report)
    if report.left:
        left = "\n".join(line for line in str(report).splitlines() if line.startswith("left"))
        warnings.warn(f"torch_onnx_attn.route_attention did not route everything:\n{left}", PerformanceWarning, stacklevel=3)
