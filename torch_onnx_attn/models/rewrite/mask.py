"""What is done to the scores between their scaling and the softmax, as the attn_mask of an Attention node.

Steps are kept in the order in which the graph applies them. Adding stays adding. A Where that puts a fill in place of a score becomes

* a boolean mask, if the fill is -inf: both leave the key out exactly;
* a number to add, if the fill is so low that a float32 score vanishes beside it: the sum is the fill itself. Rows in which every key
  is filled keep their meaning that way (the mean of the values, where a boolean mask would give 0);
* float32's lowest number to add, if the fill is below what any score can be, such as -1e9, and is all that is done to the scores:
  such keys have no weight beside others, and among themselves they are all alike, whichever number it is;
* nothing we could prove equal, if the fill is -10000 or the like.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from torch_onnx_attn.models.rewrite.causal import is_causal_bias, is_causal_keep
from torch_onnx_attn.models.rewrite.no_match import NoMatch
from torch_onnx_attn.models.rewrite.sizes import Shape, describe, is_cut_of
from torch_onnx_attn.models.rewrite.subject import Subject

__all__ = ["Added", "Mask", "Replaced", "Step", "plan_mask"]

_LOWEST = float(np.finfo(np.float32).min)
_BELOW_SCORES = -1e8  # a score within 100 of this is taken to be impossible
_SWALLOWS = -1e30  # a float32 score of ordinary size added to this, or to anything lower, changes no bit


@dataclasses.dataclass(frozen=True)
class Added:
    """A tensor that is added to the scores."""

    value: ir.Value

    @property
    def operands(self) -> tuple[ir.Value, ...]:
        return (self.value,)


@dataclasses.dataclass(frozen=True)
class Replaced:
    """Scores give way to `fill` where the condition is not `keeps`."""

    condition: ir.Value
    keeps: bool
    fill: float

    @property
    def operands(self) -> tuple[ir.Value, ...]:
        return (self.condition,)


Step = Added | Replaced


@dataclasses.dataclass(frozen=True)
class Mask:
    """What the Attention node gets: is_causal, and the steps that are left for attn_mask, innermost first."""

    is_causal: bool
    steps: tuple[Step, ...]
    spreads_rows: bool  # ONNX Runtime's kernels take no mask that has one row for all queries

    def build(
        self, subject: Subject, tape: ir.tape.Tape, dtype: ir.DataType, rank: int, query_rows: tuple[ir.Value, int, Any]
    ) -> ir.Value | None:
        """The attn_mask. `query_rows` is a value, the axis where it has the query rows, and their number as an expression."""
        if not self.steps:
            return None
        key = ("mask", self.steps, self.spreads_rows and query_rows[2], rank)
        if key not in subject.built:
            subject.built[key] = self._build(subject, tape, dtype, rank, query_rows)
        return subject.built[key]

    def _build(
        self, subject: Subject, tape: ir.tape.Tape, dtype: ir.DataType, rank: int, query_rows: tuple[ir.Value, int, Any]
    ) -> ir.Value:
        mask: ir.Value | None = None
        kind = dtype.numpy()
        if len(self.steps) == 1 and isinstance(self.steps[0], Replaced) and self.steps[0].fill == -np.inf:
            only = self.steps[0]
            mask = only.condition if only.keeps else tape.op("Not", [only.condition])
        else:
            for step in self.steps:
                if isinstance(step, Added):
                    mask = step.value if mask is None else tape.op("Add", [mask, step.value])
                    continue
                before = subject.constant("zero", np.array(0, kind)) if mask is None else mask
                fill = subject.constant("fill", np.array(step.fill, kind))
                mask = tape.op("Where", [step.condition, before, fill] if step.keeps else [step.condition, fill, before])
        assert mask is not None
        if rank == 3:  # [batch, rows, keys]: a mask of rank 3 would mean heads
            shapes = [subject.shape(value) for step in self.steps for value in step.operands]
            if max(len(shape) for shape in shapes) == 3:
                mask = tape.op("Unsqueeze", [mask, subject.constant("axes", np.array([1], np.int64))])
        if self.spreads_rows:
            value, axis, _ = query_rows
            rows = tape.op("Shape", [value], {"start": axis, "end": axis + 1})
            one = subject.constant("one", np.array([1], np.int64))
            target = tape.op("Concat", [one, one, rows, one], {"axis": 0})
            mask = tape.op("Expand", [mask, target])
        return mask


def plan_mask(subject: Subject, steps: tuple[Step, ...], scores: Shape, dtype: ir.DataType) -> Mask:
    """Check that the steps, innermost first, can be an attn_mask for scores of this shape and type."""
    steps = _with_lowest_fills(tuple(step for step in steps if not _adds_nothing(subject, step)), dtype)
    for step in steps:
        for value in step.operands:
            _check_broadcast(subject, value, scores)
        if isinstance(step, Added):
            if step.value.dtype != dtype:
                raise NoMatch(f"the mask {step.value.name} is {_name(step.value.dtype)} while Q is {_name(dtype)}")
        elif not (step.fill == -np.inf or (step.fill <= _SWALLOWS and dtype in _WIDE)):
            raise NoMatch(f"scores are replaced by {step.fill:g}, which is not low enough to be the same as leaving the key out")
    dropped = next((number for number, step in enumerate(steps) if _is_causal(subject, step) and _stays_out(subject, steps, number)), None)
    left = tuple(step for number, step in enumerate(steps) if number != dropped)
    shapes = [subject.shape(value) for step in left for value in step.operands]
    rows = {shape[-2] if len(shape) > 1 else 1 for shape in shapes}
    return Mask(dropped is not None, left, bool(left) and rows == {1} and scores[-2] != 1)


_WIDE = (ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)  # types in which _SWALLOWS is finite


def _name(dtype: ir.DataType | None) -> str:
    return "of unknown type" if dtype is None else dtype.name.lower()


def _check_broadcast(subject: Subject, value: ir.Value, scores: Shape) -> None:
    shape = subject.shape(value)
    fits = 0 < len(shape) <= len(scores) and (shape[-1] == scores[-1] or is_cut_of(shape[-1], scores[-1]))
    for size, wanted in zip(shape[::-1], scores[::-1], strict=False):
        fits = fits and (size in (1, wanted) or is_cut_of(size, wanted))
    if not fits:
        raise NoMatch(
            f"the mask {value.name} has shape {describe(shape)}, which cannot be shown to spread over scores of shape {describe(scores)}"
        )


def _with_lowest_fills(steps: tuple[Step, ...], dtype: ir.DataType) -> tuple[Step, ...]:
    """Fills like -1e9 made float32's lowest, if nothing else could tell the difference."""
    fills = {step.fill for step in steps if isinstance(step, Replaced) and step.fill != -np.inf}
    if dtype not in _WIDE or len(fills) != 1 or not _SWALLOWS < min(fills) <= _BELOW_SCORES:
        return steps
    if any(isinstance(step, Added) for step in steps):
        return steps
    return tuple(dataclasses.replace(step, fill=_LOWEST) if step.fill in fills else step for step in steps if isinstance(step, Replaced))


def _adds_nothing(subject: Subject, step: Step) -> bool:
    array = subject.constants.array(step.value) if isinstance(step, Added) else None
    return array is not None and not array.any()


def _is_causal(subject: Subject, step: Step) -> bool:
    if isinstance(step, Added):
        return is_causal_bias(subject, step.value)
    return is_causal_keep(subject, step.condition, step.keeps)


def _stays_out(subject: Subject, steps: tuple[Step, ...], number: int) -> bool:
    """Whether the keys that step `number` leaves out have no weight after the other steps either.

    It does if it is the only one. Beside others it must leave them out by -inf: next to a finite fill, a row that others fill too
    would give them weight. And no later step may put another number in place of the -inf.
    """
    if len(steps) == 1:
        return True
    if any(isinstance(later, Replaced) and later.fill != -np.inf for later in steps[number + 1 :]):
        return False
    step = steps[number]
    if isinstance(step, Replaced):
        return step.fill == -np.inf
    array = subject.constants.array(step.value)
    return array is not None and bool(np.isneginf(array[array != 0]).all())
