"""Attention written out: Softmax(scale * Q Kᵀ + mask) V, found from its Softmax.

Downwards from the Softmax: casts, the guard that turns NaN into 0, and the product with V. Upwards: mask steps, a softcap, a scale and the
product of Q and K, in this order and no other, because Attention applies them in the opposite one. What does not fit is a NoMatch.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from torch_onnx_attn.models.rewrite.key_value_repeat import unrepeated
from torch_onnx_attn.models.rewrite.mask import Added, Mask, Replaced, Step, plan_mask
from torch_onnx_attn.models.rewrite.merged_heads import split_operand, split_output, split_view
from torch_onnx_attn.models.rewrite.no_match import NoMatch
from torch_onnx_attn.models.rewrite.operand import Operand
from torch_onnx_attn.models.rewrite.sizes import Shape, describe
from torch_onnx_attn.models.rewrite.subject import Subject, attribute, is_operator, producer, unscaled

__all__ = ["Decomposed", "find"]

_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclasses.dataclass(frozen=True)
class Decomposed:
    """One attention, ready to be written as a node."""

    softmax: ir.Node
    output: ir.Value  # the result, which the Attention node takes over
    query: Operand
    key: Operand
    value: Operand
    scale: float
    softcap: float
    mask: Mask
    dtype: ir.DataType


@dataclasses.dataclass(frozen=True)
class _Scores:
    steps: tuple[Step, ...]  # innermost first
    softcap: float
    scale: float
    product: ir.Node
    view: Shape | None = None  # [batch, heads, rows, keys], if the scores were reshaped to or from it on the way


def find(subject: Subject, softmax: ir.Node) -> Decomposed:
    """The attention around a Softmax. Raises NoMatch with the first reason why it is none."""
    weights = softmax.outputs[0]
    shape = subject.shape(weights)
    axis = attribute(softmax, "axis", -1 if subject.opset >= 13 else 1)
    if axis not in (-1, len(shape) - 1):
        raise NoMatch(f"its axis is {axis}, not the last")
    if len(shape) not in (3, 4):
        raise NoMatch(f"its input has rank {len(shape)}, not [batch, heads, rows, keys] or [batch, rows, keys]")
    product, view = _product_with_values(subject, weights)
    if softmax.inputs[0] is None:
        raise NoMatch("it has no input")
    scores = _scores(subject, softmax.inputs[0], is_scaled=False, depth=0)
    query, key, scale = _query_and_key(subject, scores)
    weights, values = _operands(product)
    if len(subject.shape(weights)) != len(subject.shape(values)):
        raise NoMatch("the weights and V have different ranks")
    value, output = Operand(values, None, subject.shape(values)), product.outputs[0]
    view = view or scores.view
    if view is not None:
        query, key, value = (split_operand(subject, operand, view) for operand in (query, key, value))
        output = split_output(subject, output, view)
    key, value = _grouped(subject, query, key, value)
    _check_agreement(query, key, value)
    dtype = query.value.dtype
    if dtype not in _FLOATS or {operand.value.dtype for operand in (key, value)} != {dtype} or output.dtype not in (dtype, None):
        raise NoMatch("Q, K, V and the result are not of one floating type")
    assert dtype is not None
    full = (*query.shape[:-1], key.shape[-2])
    mask = plan_mask(subject, scores.steps, full, dtype)
    return Decomposed(softmax, output, query, key, value, scale, scores.softcap, mask, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# From the Softmax down


def _product_with_values(subject: Subject, weights: ir.Value) -> tuple[ir.Node, Shape | None]:
    """The MatMul of weights and values, and the 4-D shape that the weights were reshaped to or from before it."""
    view: Shape | None = None
    while True:
        if weights.is_graph_output():
            raise NoMatch("the weights are an output of the model")
        users = [user for user, _ in weights.uses()]
        if not users:
            raise NoMatch("nobody reads its result")
        guarded = _nan_guard(subject, weights, users)
        if guarded is not None:
            weights = guarded
            continue
        if len(users) > 1:
            raise NoMatch(f"the weights go into {len(users)} places: " + ", ".join(sorted(user.op_type for user in users)))
        user = users[0]
        if user.graph is not subject.graph:
            raise NoMatch("its result is read inside a branch or loop")
        if is_operator(user, "MatMul"):
            if user.inputs[0] is not weights:
                raise NoMatch("the weights are the right factor of a MatMul, not the left")
            return user, view
        reshaped = split_view(subject, user)
        if reshaped is not None or _passes_on(subject, user):
            view = view or reshaped
            weights = user.outputs[0]
        elif is_operator(user, "Dropout"):
            raise NoMatch("the weights go through a Dropout that may be in training mode")
        elif is_operator(user, "Slice", "Gather", "Split"):
            raise NoMatch(f"a part of the weights is cut off by {user.op_type}, as attention sinks do; Attention has no sinks")
        else:
            raise NoMatch(f"its result goes into {user.op_type}, not into a MatMul with values")


def _nan_guard(subject: Subject, weights: ir.Value, users: list[ir.Node]) -> ir.Value | None:
    """Where(IsNaN(weights), 0, weights): rows without a key become 0, which is what Attention makes of them."""
    for user in users:
        if not is_operator(user, "Where") or user.inputs[2] is not weights or subject.constants.scalar(user.inputs[1]) != 0:
            continue
        test = producer(user.inputs[0], "IsNaN")
        if test is not None and test.inputs[0] is weights and set(users) <= {user, test} and len(test.outputs[0].uses()) == 1:
            return user.outputs[0]
    return None


def _passes_on(subject: Subject, node: ir.Node) -> bool:
    """Whether a node hands on what it gets: casts, and Dropout outside of training."""
    if is_operator(node, "Cast"):
        return attribute(node, "to") in _FLOATS
    if not is_operator(node, "Dropout"):
        return is_operator(node, "Identity")
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    mask_is_read = len(node.outputs) > 1 and bool(node.outputs[1].uses())
    array = None if mode is None else subject.constants.array(mode)
    return not mask_is_read and (mode is None or (array is not None and not array.any()))


# ---------------------------------------------------------------------------------------------------------------------
# From the Softmax up


def _scores(subject: Subject, value: ir.Value, *, is_scaled: bool, depth: int) -> _Scores:
    """Read one step and go on. `is_scaled`: a scale or softcap was passed, further in there may be no mask."""
    _check_only_use(value, depth)
    node = value.producer()
    if node is None:
        raise NoMatch(f"the scores are {value.name}, which no node computes", depth)
    if is_operator(node, "MatMul"):
        return _Scores((), 0.0, 1.0, node)
    if is_operator(node, "Identity", "Cast"):
        _check_cast(node, depth)
        return _scores(subject, _operands(node)[0], is_scaled=is_scaled, depth=depth + 1)
    view = split_view(subject, node)
    if view is not None:
        inner = _scores(subject, _operands(node)[0], is_scaled=is_scaled, depth=depth + 1)
        return dataclasses.replace(inner, view=inner.view or view)
    if is_operator(node, "Mul", "Div"):
        return _scaled_or_capped(subject, value, depth)
    if is_operator(node, "Add", "Where"):
        if is_scaled:
            raise NoMatch("a mask comes before the scale or softcap; Attention adds it after them", depth)
        return _masked(subject, node, depth)
    if is_operator(node, "Concat"):
        raise NoMatch("something is concatenated to the scores, as attention sinks do; Attention has no sinks", depth)
    raise NoMatch(f"the scores come from {node.op_type}, not from a MatMul of queries and keys", depth)


def _check_only_use(value: ir.Value, depth: int) -> None:
    if value.is_graph_output():
        raise NoMatch(f"the scores {value.name} are an output of the model", depth)
    users = {user for user, _ in value.uses()}
    if len(users) > 1:
        raise NoMatch(f"the scores {value.name} are read elsewhere too, by {', '.join(sorted(user.op_type for user in users))}", depth)


def _check_cast(node: ir.Node, depth: int) -> None:
    if not is_operator(node, "Cast"):
        return
    source, target = _operands(node)[0].dtype, attribute(node, "to")
    if not (source == target or (source in _HALVES and target == ir.DataType.FLOAT)):
        name = "an unknown type" if source is None else source.name.lower()
        raise NoMatch(f"the scores are cast from {name} to {ir.DataType(target).name.lower()}", depth)


def _operands(node: ir.Node) -> list[ir.Value]:
    if any(value is None for value in node.inputs):
        raise NoMatch(f"an input of {node.op_type} is missing")
    return [value for value in node.inputs if value is not None]


def _scaled_or_capped(subject: Subject, value: ir.Value, depth: int) -> _Scores:
    node = value.producer()
    assert node is not None
    factor, rest = unscaled(subject, value)
    if rest is value:
        other = next((operand.name for operand in _operands(node) if producer(operand, "MatMul") is None), "")
        raise NoMatch(f"the scores are multiplied or divided by {other}, which is not a constant number", depth)
    tanh = producer(rest, "Tanh")
    if tanh is None:
        inner = _scores(subject, rest, is_scaled=True, depth=depth + 1)
        if inner.softcap:
            raise NoMatch("the scores are scaled after the softcap; Attention scales before it", depth)
        return dataclasses.replace(inner, scale=inner.scale * factor)
    _check_only_use(rest, depth)
    inner = _scores(subject, _operands(tanh)[0], is_scaled=True, depth=depth + 2)
    if inner.softcap or not 0 < factor < float("inf"):
        raise NoMatch("the scores go through a Tanh that is not a softcap: c * Tanh(x / c)", depth)
    # c * tanh(s / c) holds the s / c in the inner scale: s = c * (s / c).
    return dataclasses.replace(inner, softcap=factor, scale=inner.scale * factor)


def _masked(subject: Subject, node: ir.Node, depth: int) -> _Scores:
    operands = _operands(node)
    failures: list[NoMatch] = []
    if is_operator(node, "Add"):
        choices: list[tuple[ir.Value, Step]] = [(operands[0], Added(operands[1])), (operands[1], Added(operands[0]))]
    else:
        condition, kept, other = operands
        choices = []
        for scores, fill, keeps in ((kept, other, True), (other, kept, False)):
            number = subject.constants.scalar(fill)
            if number is not None:
                choices.append((scores, Replaced(condition, keeps, number)))
        if not choices:
            raise NoMatch("scores are replaced by something that is not a constant number", depth)
    for scores, step in choices:
        try:
            inner = _scores(subject, scores, is_scaled=False, depth=depth + 1)
        except NoMatch as failure:
            failures.append(failure)
        else:
            return dataclasses.replace(inner, steps=(*inner.steps, step))
    raise max(failures, key=lambda failure: failure.depth)


# ---------------------------------------------------------------------------------------------------------------------
# Q, K and V


def _query_and_key(subject: Subject, scores: _Scores) -> tuple[Operand, Operand, float]:
    left, right = _operands(scores.product)
    left_factor, left = unscaled(subject, left)
    right_factor, right = unscaled(subject, right)
    rank = len(subject.shape(right))
    key = _transposed(subject, right)
    inner_factor = 1.0
    if key.permutation is None:
        inner_factor, inner = unscaled(subject, key.value)
        key = Operand(inner, None, key.shape)
    scale = scores.scale * left_factor * right_factor * inner_factor
    if not 0 < scale < float("inf"):
        raise NoMatch(f"the scale is {scale:g}, and Attention's must be positive")
    if len(subject.shape(left)) != rank:
        raise NoMatch("Q and K have different ranks")
    return Operand(left, None, subject.shape(left)), key, scale


def _transposed(subject: Subject, value: ir.Value) -> Operand:
    """The K of which this is the transpose [.., size, keys]."""
    shape = subject.shape(value)
    rank = len(shape)
    if rank < 2:
        raise NoMatch(f"K has shape {list(shape)}")
    swapped = (*shape[:-2], shape[-1], shape[-2])
    node = producer(value, "Transpose")
    if node is not None:
        source, permutation = _operands(node)[0], list(attribute(node, "perm", range(rank)[::-1]))
        if sorted(permutation) != list(range(rank)):
            raise NoMatch(f"K is transposed by {permutation}, which does not order {rank} axes")
        permutation[-2:] = permutation[-1], permutation[-2]
        return Operand(source, None if permutation == list(range(rank)) else tuple(permutation), swapped)
    outer = producer(value, "Reshape")
    middle = None if outer is None else producer(outer.inputs[0], "Transpose")
    inner = None if middle is None else producer(middle.inputs[0], "Reshape")
    if rank == 4 and middle is not None and inner is not None and list(attribute(middle, "perm", ())) == [0, 2, 1]:
        # Batch and heads are one axis during the transpose.
        source = _operands(inner)[0]
        flat, before = subject.shape(inner.outputs[0]), subject.shape(source)
        if len(before) == 5 and all(isinstance(size, int) for size in (*before[1:3], swapped[3])):
            before = (before[0], before[1] * before[2], *before[3:])
        if before == swapped and len(flat) == 3 and flat[1:] == swapped[2:]:
            return Operand(source, None, swapped)
    return Operand(value, (*range(rank - 2), rank - 1, rank - 2), swapped)


def _grouped(subject: Subject, query: Operand, key: Operand, value: Operand) -> tuple[Operand, Operand]:
    """K and V before their heads were repeated for the query heads, if both were and alike."""
    if not len(query.shape) == len(key.shape) == len(value.shape) == 4:
        return key, value
    narrow_key, narrow_value = (_without_repeat(subject, operand) for operand in (key, value))
    if narrow_key is None or narrow_value is None or narrow_key.shape[1] != narrow_value.shape[1]:
        return key, value
    if not key.shape[1] == value.shape[1] == query.shape[1]:  # MatMul would broadcast the query heads
        return key, value
    return narrow_key, narrow_value


def _without_repeat(subject: Subject, operand: Operand) -> Operand | None:
    value, permutation = operand.value, operand.permutation
    if permutation is None and unrepeated(subject, value, 1) is None:
        node = producer(value, "Transpose")  # heads may have been repeated before they moved to axis 1
        if node is not None and list(attribute(node, "perm", ())) == [0, 2, 1, 3]:
            value, permutation = _operands(node)[0], (0, 2, 1, 3)
    head_axis = 1 if permutation is None else permutation[1]
    source = unrepeated(subject, value, head_axis)
    if source is None:
        return None
    shape = (operand.shape[0], subject.shape(source)[head_axis], *operand.shape[2:])
    return Operand(source, permutation, shape)


def _check_agreement(query: Operand, key: Operand, value: Operand) -> None:
    """Refuse what MatMul would broadcast and Attention does not."""
    if not len(query.shape) == len(key.shape) == len(value.shape):
        raise NoMatch("Q, K and V have different ranks")
    for name, operand in (("K", key), ("V", value)):
        if operand.shape[0] != query.shape[0]:
            raise NoMatch(f"the batch of {name}, {describe(operand.shape)}, cannot be shown to be that of Q, {describe(query.shape)}")
    if len(query.shape) == 3:
        return
    heads = [operand.shape[1] for operand in (query, key, value)]
    if not all(isinstance(count, int) for count in heads):
        raise NoMatch(f"the numbers of heads are not known: {describe(tuple(heads))}")
    if heads[1] != heads[2]:
        raise NoMatch(f"K has {heads[1]} heads and V has {heads[2]}")
    if heads[0] % heads[1]:
        raise NoMatch(f"{heads[0]} query heads do not divide among {heads[1]} key heads")
