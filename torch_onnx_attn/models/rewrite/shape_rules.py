"""The shape of a node's output, operator by operator, from the shapes and contents of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import sympy

from torch_onnx_attn.models.rewrite.sizes import Shape, broadcast, number

if TYPE_CHECKING:
    from torch_onnx_attn.models.rewrite.symbolic import Shapes

__all__ = ["constant_integers", "get_attribute", "shape_rule"]

_ENDLESS = 2**31 - 1  # a bound of Slice that stands for "to the end"


def shape_rule(node: ir.Node) -> Callable[[Shapes, ir.Node], Any] | None:
    """A function that gives the shape of the first output (of Split: of all outputs), with None for sizes it does not know."""
    return (_OF_ONNX if node.domain in ("", "ai.onnx") else _OF_MICROSOFT).get(node.op_type)


def get_attribute(node: ir.Node, name: str, default: Any) -> Any:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def constant_integers(shapes: Shapes, value: ir.Value | None) -> list[int] | None:
    contents = shapes.contents(value)
    if contents is None or not all(isinstance(element, int) for element in contents.reshape(-1)):
        return None
    return [int(element) for element in contents.reshape(-1)]


def _same(shapes: Shapes, node: ir.Node) -> Shape | None:
    return shapes.shape(node.inputs[0])


def _elementwise(shapes: Shapes, node: ir.Node) -> Any:
    operands = [shapes.shape(value) for value in node.inputs]
    return None if any(operand is None for operand in operands) else broadcast(*[operand for operand in operands if operand is not None])


def _matmul(shapes: Shapes, node: ir.Node) -> Any:
    left, right = (shapes.shape(value) for value in node.inputs)
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return None
    return (*broadcast(left[:-2], right[:-2]), left[-2], right[-1]) if len(left) > 2 or len(right) > 2 else (left[0], right[1])


def _transpose(shapes: Shapes, node: ir.Node) -> Any:
    shape = shapes.shape(node.inputs[0])
    if shape is None:
        return None
    return tuple(shape[axis] for axis in get_attribute(node, "perm", range(len(shape))[::-1]))


def _reshape(shapes: Shapes, node: ir.Node) -> Any:
    shape, target = shapes.shape(node.inputs[0]), shapes.contents(node.inputs[1])
    if target is None:
        return None
    sizes: list[Any] = []
    for axis, size in enumerate(target):
        if size == 0 and not get_attribute(node, "allowzero", 0):
            size = None if shape is None or axis >= len(shape) else shape[axis]
        sizes.append(size)
    if -1 in sizes:
        axis = sizes.index(-1)
        others = sizes[:axis] + sizes[axis + 1 :]
        sizes[axis] = None
        if shape is not None and all(size is not None and size != 0 for size in others):
            quotient = sympy.cancel(math.prod(shape) / sympy.sympify(math.prod(others)))
            sizes[axis] = number(quotient) if quotient.is_integer else None
    return tuple(sizes)


def _expand(shapes: Shapes, node: ir.Node) -> Any:
    shape, target = shapes.shape(node.inputs[0]), shapes.contents(node.inputs[1])
    return None if shape is None or target is None else broadcast(shape, tuple(target))


def _tile(shapes: Shapes, node: ir.Node) -> Any:
    shape, repeats = shapes.shape(node.inputs[0]), shapes.contents(node.inputs[1])
    return None if shape is None or repeats is None else tuple(number(size * count) for size, count in zip(shape, repeats, strict=True))


def _unsqueeze(shapes: Shapes, node: ir.Node) -> Any:
    shape, axes = shapes.shape(node.inputs[0]), _axes(shapes, node)
    if shape is None or axes is None:
        return None
    rank = len(shape) + len(axes)
    new = {axis % rank for axis in axes}
    sizes = iter(shape)
    return tuple(1 if axis in new else next(sizes) for axis in range(rank))


def _squeeze(shapes: Shapes, node: ir.Node) -> Any:
    shape, axes = shapes.shape(node.inputs[0]), _axes(shapes, node)
    if shape is None or axes is None:
        return None
    dropped = {axis % len(shape) for axis in axes}
    return tuple(size for axis, size in enumerate(shape) if axis not in dropped)


def _axes(shapes: Shapes, node: ir.Node) -> list[int] | None:
    if "axes" in node.attributes:  # before opset 13
        return list(get_attribute(node, "axes", ()))
    return constant_integers(shapes, node.inputs[1]) if len(node.inputs) > 1 else None


def _concat(shapes: Shapes, node: ir.Node) -> Any:
    parts = [shapes.shape(value) for value in node.inputs]
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    axis = get_attribute(node, "axis", 0) % len(known[0])
    sizes = list(known[0])
    sizes[axis] = number(sum(part[axis] for part in known))
    return tuple(sizes)


def _reduce(shapes: Shapes, node: ir.Node) -> Any:
    shape = shapes.shape(node.inputs[0])
    axes = _axes(shapes, node)
    if shape is None or axes is None or not get_attribute(node, "keepdims", 1):
        return None
    reduced = {axis % len(shape) for axis in axes}
    return tuple(1 if axis in reduced else size for axis, size in enumerate(shape))


def _slice(shapes: Shapes, node: ir.Node) -> Any:
    shape = shapes.shape(node.inputs[0])
    starts, axes, steps = (constant_integers(shapes, value) for value in (node.inputs[1], *_padded(node.inputs[3:], 2)))
    ends = shapes.contents(node.inputs[2])
    if shape is None or starts is None or ends is None:
        return None
    sizes: list[Any] = list(shape)
    for position, axis in enumerate(axes or range(len(starts))):
        step = 1 if steps is None else steps[position]
        stop, start = (_position(bound, shape[axis]) for bound in (ends.reshape(-1)[position], starts[position]))
        sizes[axis] = number(stop - start) if step == 1 else None
        if isinstance(sizes[axis], int) and sizes[axis] < 0:
            sizes[axis] = 0
    return tuple(sizes)


def _padded(values: Sequence[ir.Value | None], length: int) -> list[ir.Value | None]:
    return [*values, *[None] * length][:length]


def _position(bound: Any, size: Any) -> Any:
    """Where a bound of Slice falls on an axis of a size."""
    if isinstance(bound, int) and bound < 0:
        bound = max(bound + size, 0) if isinstance(size, int) else bound + size if bound > -_ENDLESS else 0
    if isinstance(bound, int) and (bound == 0 or bound >= _ENDLESS):
        return size if bound else 0
    return number(sympy.Min(bound, size))


def _split(shapes: Shapes, node: ir.Node) -> list[Shape] | None:
    """The shapes of all parts."""
    shape = shapes.shape(node.inputs[0])
    if shape is None:
        return None
    axis, parts = get_attribute(node, "axis", 0) % len(shape), len(node.outputs)
    sizes = constant_integers(shapes, node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if sizes is None and isinstance(shape[axis], int) and shape[axis] % parts == 0:
        sizes = [shape[axis] // parts] * parts
    if sizes is None:
        return None
    return [(*shape[:axis], part, *shape[axis + 1 :]) for part in sizes]


def _flatten(shapes: Shapes, node: ir.Node) -> Any:
    shape = shapes.shape(node.inputs[0])
    if shape is None:
        return None
    axis = get_attribute(node, "axis", 1)
    return tuple(number(math.prod(part)) for part in (shape[:axis], shape[axis:]))


def _gemm(shapes: Shapes, node: ir.Node) -> Any:
    left, right = (shapes.shape(value) for value in node.inputs[:2])
    if left is None or right is None:
        return None
    return (left[get_attribute(node, "transA", 0)], right[1 - get_attribute(node, "transB", 0)])


def _shape_of_shape(shapes: Shapes, node: ir.Node) -> Any:
    shape = shapes.shape(node.inputs[0])
    return None if shape is None else (len(shape[get_attribute(node, "start", 0) : get_attribute(node, "end", len(shape))]),)


def _gather(shapes: Shapes, node: ir.Node) -> Any:
    data, indices = shapes.shape(node.inputs[0]), shapes.shape(node.inputs[1])
    if data is None or indices is None:
        return None
    axis = get_attribute(node, "axis", 0) % len(data)
    return (*data[:axis], *indices, *data[axis + 1 :])


def _gather_elements(shapes: Shapes, node: ir.Node) -> Shape | None:
    return shapes.shape(node.inputs[1])


def _constant_of_shape(shapes: Shapes, node: ir.Node) -> Any:
    contents = shapes.contents(node.inputs[0])
    return None if contents is None else tuple(contents)


def _range(shapes: Shapes, node: ir.Node) -> Any:
    start, limit, delta = (shapes.contents(value) for value in node.inputs)
    if start is None or limit is None or delta is None or start.item() != 0 or delta.item() != 1:
        return None
    return (limit.item(),)


_OF_ONNX: dict[str, Callable[[Shapes, ir.Node], Any]] = {
    **dict.fromkeys(
        ("Cast", "Identity", "Softmax", "Tanh", "Neg", "Not", "Sqrt", "Dropout", "Trilu", "IsNaN", "LayerNormalization", "Erf", "Relu"),
        _same,
    ),
    **dict.fromkeys(
        ("Sigmoid", "Sin", "Cos", "CumSum", "Reciprocal", "Exp", "Log", "Abs", "Gelu", "RMSNormalization", "CastLike", "Clip"), _same
    ),
    "SimplifiedLayerNormalization": _same,  # ONNX Runtime's own, in ONNX's domain
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Where", "And", "Or", "Equal", "Greater", "GreaterOrEqual"), _elementwise),
    **dict.fromkeys(("Less", "LessOrEqual", "Pow", "Max", "Min", "Mod"), _elementwise),
    "MatMul": _matmul,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Expand": _expand,
    "Tile": _tile,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": _concat,
    "Slice": _slice,
    "Split": _split,
    "Flatten": _flatten,
    "Gemm": _gemm,
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceSumSquare", "ReduceL2"), _reduce),
    "Shape": _shape_of_shape,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
}


def _group_query_attention(shapes: Shapes, node: ir.Node) -> Shape | None:
    return shapes.shape(node.inputs[0]) if node.inputs[1] is not None else None


def _matmul_n_bits(shapes: Shapes, node: ir.Node) -> Any:
    shape, columns = shapes.shape(node.inputs[0]), get_attribute(node, "N", None)
    return None if shape is None or columns is None else (*shape[:-1], columns)


_OF_MICROSOFT: dict[str, Callable[[Shapes, ir.Node], Any]] = {  # of com.microsoft
    **dict.fromkeys(("SkipSimplifiedLayerNormalization", "SkipLayerNormalization", "RotaryEmbedding", "FastGelu", "BiasGelu"), _same),
    **dict.fromkeys(("QuickGelu", "Gelu"), _same),
    "GroupQueryAttention": _group_query_attention,
    "MatMulNBits": _matmul_n_bits,
}
