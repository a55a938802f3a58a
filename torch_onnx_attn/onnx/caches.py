"""Decoders with caches: the two patterns in which an ONNX graph carries keys and values from call to call, under the usual names.

Inputs `past_key_values.0.key`, `past_key_values.0.value`, ... and outputs `present.0.key`, `present.0.value`, ... are what ONNX Runtime
GenAI looks for by default, and what Hugging Face's exports have.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_onnx_attn.nn import KVCache
from torch_onnx_attn.onnx.exporter import export

__all__ = ["PastPresent", "export_past_present", "export_static_cache"]

Pairs = tuple[tuple[Tensor, Tensor], ...]


def _names(prefix: str, layers: int) -> list[str]:
    return [f"{prefix}.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


@dataclasses.dataclass(frozen=True)
class PastPresent:
    """Caches that grow: each call takes every layer's keys and values so far and returns them with its own appended.

    Attributes:
        layers: attention layers.
        kv_heads: key/value heads.
        head_size: columns of keys.
        v_head_size: columns of values; None means head_size.
    """

    layers: int
    kv_heads: int
    head_size: int
    v_head_size: int | None = None

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if (not isinstance(size, int) or size <= 0) and (name, size) != ("v_head_size", None):
                raise ValueError(f"{name}: is {size!r}, must be a positive integer")

    @property
    def input_names(self) -> list[str]:
        """`past_key_values.0.key`, `past_key_values.0.value`, `past_key_values.1.key`, ..."""
        return _names("past_key_values", self.layers)

    @property
    def output_names(self) -> list[str]:
        """`present.0.key`, `present.0.value`, `present.1.key`, ..."""
        return _names("present", self.layers)

    def example(
        self, batch: int, length: int = 2, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> Pairs:
        """Random caches: for each layer keys `[batch, kv_heads, length, head_size]` and values. Length 0 is what generation starts with."""
        widths = (self.head_size, self.head_size if self.v_head_size is None else self.v_head_size)

        def cache(columns: int) -> Tensor:
            return torch.randn(batch, self.kv_heads, length, columns, device=device).to(dtype)

        return tuple((cache(widths[0]), cache(widths[1])) for _ in range(self.layers))

    def dynamic_shapes(self, batch: str = "batch_size", length: str = "past_sequence_length") -> tuple[Any, ...]:
        """The dynamic axes of what `example` returns, under these names."""
        shape = {0: batch, 2: length}
        return tuple((dict(shape), dict(shape)) for _ in range(self.layers))


def export_past_present(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    caches: PastPresent,
    path: str | os.PathLike[str] | None = None,
    *,
    dynamic_shapes: Sequence[Any] | Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] = ("logits",),
    batch: str = "batch_size",
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Export a decoder whose `forward(*args, past_key_values)` returns `(*outputs, present)`.

    `past_key_values` and `present` are one `(keys, values)` pair for each layer; in the model they go through
    `torch_onnx_attn.attention(..., past_key=..., past_value=...)`. One file serves the prompt, with a past of length 0, and every
    further token.

    Args:
        model: in evaluation mode.
        args: example inputs without the caches; the batch is axis 0 of the first tensor. The caches get the dtype of the model's
            first floating parameter.
        caches: how many caches of what size.
        path: where to write the file; None to write none.
        dynamic_shapes: of `args`, as for `export`. None makes axis 0 (`batch`) and axis 1 (`sequence_length`) of each dynamic.
        input_names: of `args`; default the parameter names of `forward`.
        output_names: of the outputs before the caches.
        batch: the name of the batch axis of the caches.
        **options: as for `export`.
    """
    _check_model(model, args)
    if not isinstance(caches, PastPresent):
        raise TypeError(f"caches: is of type {type(caches).__name__}, must be a PastPresent")
    dtype, device = _floating_type(model)
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError("args: has no tensor, so that the batch size of the caches is unknown")
    parameters = list(inspect.signature(model.forward).parameters)
    if len(parameters) <= len(args):
        raise ValueError(f"model: its forward has {len(parameters)} parameters; after {len(args)} inputs it must take past_key_values")
    past = caches.example(tensors[0].shape[0], dtype=dtype, device=device)
    shapes = _shapes_of(model, args, dynamic_shapes, {0: batch, 1: "sequence_length"})
    return export(
        model,
        (*args, past),
        path,
        dynamic_shapes=(*shapes, caches.dynamic_shapes(batch)),
        input_names=[*(_input_names(model, args) if input_names is None else input_names), *caches.input_names],
        output_names=[*output_names, *caches.output_names],
        **options,
    )


class _CachesAsInputs(torch.nn.Module):
    """The model as a function of what its KVCache holds: an ONNX graph has inputs and outputs and no state."""

    def __init__(self, model: torch.nn.Module, prefix: str, buffers: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.buffers_in_order = [f"{prefix}{name}" for name in buffers]

    def forward(self, inputs: Sequence[Any], state: Sequence[Tensor]) -> tuple[Any, ...]:
        held = dict(zip(self.buffers_in_order, state, strict=True))
        outputs = torch.func.functional_call(self.model, held, tuple(inputs))
        return outputs, *held.values()


def export_static_cache(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str] | None = None,
    *,
    dynamic_shapes: Sequence[Any] | Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] = ("logits",),
    batch: str | None = "batch_size",
    capacity: str | None = None,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Export a decoder that holds a :class:`torch_onnx_attn.nn.KVCache`, its caches becoming inputs and outputs of the graph.

    The graph takes `args`, then `past_lengths` (int64 `[batch]`) and `past_key_values.{layer}.key` and `.value`, each
    `[batch, kv_heads, capacity, head_size]`. It returns the model's outputs, `present_lengths` and `present.{layer}.key` and
    `.value`, which go into the next call; a runtime may bind both to the same memory. Each write is a TensorScatter node, each
    attention an Attention node, at opset 24 (25 with a window). Caches start at zero.

    Args:
        model: in evaluation mode, with exactly one KVCache among its modules, which it advances itself.
        args: example inputs of the size of the cache's batch.
        path: where to write the file; None to write none.
        dynamic_shapes: of `args`, as for `export`. None makes axis 0 (`batch`) and axis 1 (`sequence_length`) of each dynamic.
        input_names: of `args`; default the parameter names of `forward`.
        output_names: of the model's own outputs.
        batch: the name of the batch axis of lengths and caches; None makes it static.
        capacity: a name to make the capacity dynamic as well.
        **options: as for `export`.
    """
    _check_model(model, args)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, KVCache)]
    if len(found) != 1:
        raise ValueError(f"model: has {len(found)} torch_onnx_attn.nn.KVCache modules, must have exactly 1 (with all layers)")
    name, cache = found[0]
    names = ["lengths", *(f"{kind}_{layer}" for layer in range(cache.layers) for kind in ("key", "value"))]
    prefix = f"{name}." if name else ""
    state = [getattr(cache, name).clone() for name in names]
    if not bool(state[0].any()):  # an example in which something is cached, for the check
        state[0] += torch.arange(len(state[0]), device=state[0].device).clamp(max=cache.capacity // 4)
    lengths_shape = {0: batch} if batch else {}
    cache_shape = {**lengths_shape, **({2: capacity} if capacity else {})}
    shapes = _shapes_of(model, args, dynamic_shapes, {**lengths_shape, 1: "sequence_length"})
    wrapped = _CachesAsInputs(model, prefix, names)
    wrapped.train(model.training)
    return export(
        wrapped,
        (tuple(args), tuple(state)),
        path,
        dynamic_shapes=(tuple(shapes), (lengths_shape, *(dict(cache_shape) for _ in state[1:]))),
        input_names=[
            *(_input_names(model, args) if input_names is None else input_names),
            "past_lengths",
            *_names("past_key_values", cache.layers),
        ],
        output_names=[*output_names, "present_lengths", *_names("present", cache.layers)],
        **options,
    )


def _check_model(model: Any, args: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: is of type {type(model).__name__}, must be a torch.nn.Module")
    if not isinstance(args, tuple | list):
        raise TypeError(f"args: is of type {type(args).__name__}, must be a tuple of example inputs")


def _floating_type(model: torch.nn.Module) -> tuple[torch.dtype, torch.device | None]:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype, parameter.device
    return torch.float32, None


def _input_names(model: torch.nn.Module, args: tuple[Any, ...]) -> list[str]:
    """The names of forward's parameters for the tensors of args; with an index where a parameter holds several."""
    names = []
    parameters = inspect.signature(model.forward).parameters.values()
    for parameter, arg in zip(_spread(list(parameters), len(args)), args, strict=True):
        tensors = [leaf for leaf in pytree.tree_leaves(arg) if isinstance(leaf, Tensor)]
        if isinstance(arg, Tensor) and parameter.kind is not parameter.VAR_POSITIONAL:
            names.append(parameter.name)
        else:
            names += [f"{parameter.name}_{index}" for index in range(len(tensors))]
    return names


def _spread(parameters: list[inspect.Parameter], count: int) -> list[inspect.Parameter]:
    if len(parameters) < count:
        raise ValueError(f"args: has {count} inputs, forward takes {len(parameters)}")
    return parameters[:count]


def _shapes_of(
    model: torch.nn.Module, args: tuple[Any, ...], given: Sequence[Any] | Mapping[str, Any] | None, usual: Mapping[int, str]
) -> list[Any]:
    """One entry of dynamic_shapes for each of args."""
    if given is None:
        return [
            pytree.tree_map(
                lambda leaf: {axis: name for axis, name in usual.items() if axis < leaf.dim()} if isinstance(leaf, Tensor) else None, arg
            )
            for arg in args
        ]
    if isinstance(given, Mapping):
        parameters = list(inspect.signature(model.forward).parameters)[: len(args)]
        unknown = [name for name in given if name not in parameters]
        if unknown:
            raise ValueError(f"dynamic_shapes: {unknown[0]!r} is none of the inputs given in args: {', '.join(parameters)}")
        return [given.get(name) for name in parameters]
    if len(given) != len(args):
        raise ValueError(f"dynamic_shapes: has {len(given)} entries for {len(args)} inputs; the caches have theirs already")
    return list(given)
