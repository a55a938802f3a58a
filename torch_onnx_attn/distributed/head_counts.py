"""Refuses the one mistake of tensor parallelism that no op can see: a part of the hidden axis with the head counts of the whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class refuse_split_hidden(TorchDispatchMode):  # noqa: N801  (used like a function)
    """Inside, a 3-D input that is this rank's piece of a hidden axis is an error, whatever head counts come with it.

    In the layouts ``[batch, rows, heads * size]`` head counts are attributes. A rank's piece of the hidden axis with the head counts
    of the whole makes heads that are too narrow: nothing is inconsistent, and the result is wrong. Run one step of a parallelized model
    under this in a test::

        with torch_onnx_attn.distributed.refuse_split_hidden():
            model(example)

    It follows what becomes a local tensor of a DTensor that is sharded along its last axis, through views and through ops that keep
    the last axis (biases, norms, rotations). It cannot know of weights that were cut without DTensors. Every op in it runs through
    Python: it is for tests, not for production, and not for compiled code.

    Raises:
        RuntimeError: naming the argument. 4-D tensors ``[batch, heads, rows, size]``, or DTensors given to the op, are what is allowed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pieces: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if func.namespace == "onnx_attn" and not any(isinstance(value, DTensor) for value in given):
            self._check(func, args, kwargs)
        result = func(*args, **kwargs)
        widths = {value.shape[-1] for value in given if value.dim() and self._is_piece(value)}
        for value in (*given, *pytree.tree_leaves(result)):
            if isinstance(value, DTensor):
                self._note(value.to_local(), any(place.is_shard(value.dim() - 1) for place in value.placements))
            elif isinstance(value, Tensor) and value.dim() and value.shape[-1] in widths:
                self._note(value, True)
        return result

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        names = (argument.name for argument in func._schema.arguments)
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if (
                isinstance(value, Tensor)
                and value.dim() == 3
                and name in ("Q", "K", "V", "query", "key", "value")
                and self._is_piece(value)
            ):
                raise RuntimeError(
                    f"{name}: has shape {list(value.shape)} and is this rank's piece of a hidden axis, so that head counts of the whole "
                    "would be wrong without an error; give [batch, heads, rows, head size], or DTensors (use_local_output=False)"
                )

    def _is_piece(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, DTensor) and StorageWeakRef(tensor.untyped_storage()) in self._pieces

    def _note(self, tensor: Tensor, is_piece: bool) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        if is_piece:
            self._pieces.add(reference)
        else:
            self._pieces.discard(reference)
