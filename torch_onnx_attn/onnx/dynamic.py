"""Helpers for `dynamic_shapes`: axes named in a line of text, or found by comparing two examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["axes", "differing_axes"]


def axes(**inputs: str) -> dict[str, dict[int, str]]:
    """`dynamic_shapes` from one line of text for each input of `forward`.

    `axes(Q="batch _ rows _", lengths="batch")` is `{"Q": {0: "batch", 2: "rows"}, "lengths": {0: "batch"}}`: a word names a dynamic
    axis, `_` or a number stands for a static one.

    Args:
        **inputs: the text for each parameter of `forward`, in its order; an empty text for an input without dynamic axes.

    Raises:
        ValueError: no text, or a word is neither a name, nor a number, nor `_`.
    """
    named = {}
    for parameter, text in inputs.items():
        if not isinstance(text, str):
            raise ValueError(f"{parameter}: is {text!r}, must be text such as 'batch rows _'")
        words = text.split()
        for word in words:
            if not word.isidentifier() and not word.isdigit():
                raise ValueError(f"{parameter}: {word!r} in {text!r} is neither a name, nor a number, nor _")
        named[parameter] = {axis: word for axis, word in enumerate(words) if word != "_" and not word.isdigit()}
    return named


def differing_axes(args: tuple[Any, ...], other_args: tuple[Any, ...], names: Mapping[tuple[int, int], str] | None = None) -> Any:
    """`dynamic_shapes` from two examples of a model's positional inputs: every axis whose size differs is dynamic.

    Axes that have the same two sizes get the same name, since they probably mean the same thing; choose sizes that tell axes apart
    which do not.

    Args:
        args: example inputs, nested as `forward` takes them.
        other_args: the same with other sizes.
        names: the name of axes of some pair of sizes, such as `{(2, 3): "batch"}`; others are called `size_0`, `size_1`, ...

    Raises:
        ValueError: the examples differ in more than sizes.
    """
    leaves, structure = pytree.tree_flatten(args)
    others, other_structure = pytree.tree_flatten(other_args)
    if structure != other_structure:
        raise ValueError("other_args: is nested in another way than args")
    known = dict(names or {})
    shapes: list[dict[int, str] | None] = []
    for index, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
        if not isinstance(leaf, torch.Tensor):
            shapes.append(None)
            continue
        if not isinstance(other, torch.Tensor) or leaf.dim() != other.dim():
            raise ValueError(f"other_args: tensor {index} has another number of axes than in args, or is no tensor")
        dynamic: dict[int, str] = {}
        for axis, sizes in enumerate(zip(leaf.shape, other.shape, strict=True)):
            if sizes[0] != sizes[1]:
                dynamic[axis] = known.setdefault(sizes, f"size_{len(known)}")
        shapes.append(dynamic or None)
    return pytree.tree_unflatten(shapes, structure)
