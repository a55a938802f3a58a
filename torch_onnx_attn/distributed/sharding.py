"""What the ops do with DTensors: split as their arguments lie, with no communication where that is possible.

The rules are torch_dispatch rules and not sharding strategies (``register_sharding``), for two reasons. Strategies are cached under a
key without bool and float arguments; and they cannot divide head counts, which the layouts that carry one need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .watch import expected_call
from .ways import WAYS, Given, Part, Way, Ways, is_open

WHOLE = Way(1, {}, (None,) * 8)


def install() -> None:
    """Registers a rule for every op."""
    for name, ways in WAYS.items():
        torch.library.register_torch_dispatch(f"onnx_attn::{name}", DTensor, Rule(name, ways))
    torch.library.register_torch_dispatch("onnx_attn::_refuse_backward", DTensor, _refuse_backward)


class Rule:
    """What an op does with DTensors."""

    def __init__(self, name: str, ways: Callable[[Given], Ways]) -> None:
        packet, _, overload = name.partition(".")
        self.ways = ways
        arguments = getattr(getattr(torch.ops.onnx_attn, packet), overload or "default")._schema.arguments
        self.names = [argument.name for argument in arguments]
        self.written = {argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write}

    def __call__(self, _class: type, op: Any, _types: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        given = dict(zip(self.names, args, strict=False)) | (kwargs or {})
        given = {name: value for name, value in given.items() if value is not None}
        with torch.no_grad(), expected_call():  # derivatives are the autograd kernel's, which is above
            tensors = _on_one_mesh({name: value for name, value in given.items() if isinstance(value, Tensor)})
            mesh = next(iter(tensors.values())).device_mesh
            ways = {name: way for name, way in self.ways(given).items() if is_open(way, given)}
            chosen = _choose(op, ways, tensors, mesh, self.written)
            local = given | {name: _local(tensor, [_placement(way, name) for way in chosen]) for name, tensor in tensors.items()}
            for way in {id(way): way for way in chosen}.values():
                local = way.localize(local, _part(way, chosen, mesh))
            results = op(**local)
            if isinstance(results, (tuple, list)):
                return tuple(_wrap(result, index, chosen, mesh) for index, result in enumerate(results))
            return None if results is None else _wrap(results, 0, chosen, mesh)


def _refuse_backward(_class: type, op: Any, _types: Any, args: Sequence[Any], _kwargs: dict[str, Any] | None) -> Any:
    """The backward pass of the autograd kernel: an error, except while a compiler traces it."""
    gradients, inputs = ([x.to_local() if isinstance(x, DTensor) else x for x in tensors] for tensors in args)
    pairs = zip(op(gradients, inputs), args[1], strict=True)
    return [DTensor.from_local(x, like.device_mesh, like.placements) if isinstance(like, DTensor) else x for x, like in pairs]


# ---------------------------------------------------------------------------------------------------------------------
# The choice


def _on_one_mesh(tensors: dict[str, Any]) -> dict[str, DTensor]:
    mesh = next(tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor))
    if mesh.get_coordinate() is None:
        raise RuntimeError(f"{' and '.join(tensors)}: lie on {mesh}, which rank {torch.distributed.get_rank()} is not in")
    distributed = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            if tensor.dim() > 0 and not DTensor._op_dispatcher._allow_implicit_replication:
                raise RuntimeError(
                    f"{name}: is a plain tensor beside DTensors; distribute it with distribute_tensor (Replicate() if every rank has "
                    "all of it), or call inside torch.distributed.tensor.experimental.implicit_replication()"
                )
            tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if tensor.device_mesh != mesh:
            raise RuntimeError(f"{name}: lies on {tensor.device_mesh}, others on {mesh}; all DTensors must lie on one mesh")
        distributed[name] = tensor
    return distributed


def _choose(op: Any, ways: Ways, tensors: dict[str, DTensor], mesh: DeviceMesh, written: set[str]) -> list[Way]:
    """For each mesh dimension the way that moves the fewest elements; whole on every rank if nothing is sharded."""
    chosen: list[Way] = []
    for dimension in range(mesh.ndim):
        costs: list[tuple[int, Way]] = []
        for way in (WHOLE, *ways.values()):
            pieces = mesh.size(dimension)
            for earlier, taken in enumerate(chosen):
                pieces *= mesh.size(earlier) if taken is way else 1
            if way.divisor is not None and way.divisor % pieces:
                continue
            moved = _moved(way, dimension, tensors, written)
            if moved is not None:
                costs.append((moved, way))
        if not costs:
            names = " and ".join(sorted(written))
            found = ", ".join(f"{name} {tensors[name].placements}" for name in sorted(written))
            raise RuntimeError(
                f"{names}: cannot be written in place as sharded ({found}) on mesh dimension {dimension} of size {mesh.size(dimension)}; "
                f"{op} splits along {' or '.join(ways) or 'nothing, as sizes disagree'}, with the same placement for every cache"
            )
        chosen.append(min(costs, key=lambda cost: cost[0])[1])
    return chosen


def _moved(way: Way, dimension: int, tensors: dict[str, DTensor], written: set[str]) -> int | None:
    """Elements that have to be communicated; None where an argument that is written in place would have to move."""
    moved = 0
    for name, tensor in tensors.items():
        current, wanted = tensor.placements[dimension], _placement(way, name)
        if current == wanted:
            continue
        if name in written:
            return None
        if not current.is_replicate():
            moved += tensor.numel()
    return moved


def _placement(way: Way, name: str) -> Placement:
    return Shard(way.inputs[name]) if name in way.inputs else Replicate()


# ---------------------------------------------------------------------------------------------------------------------
# Into and out of local tensors


def _local(tensor: DTensor, placements: Sequence[Placement]) -> Tensor:
    moved = tensor if list(tensor.placements) == list(placements) else tensor.redistribute(tensor.device_mesh, placements)
    return moved.to_local()


def _part(way: Way, chosen: Sequence[Way], mesh: DeviceMesh) -> Part:
    """This rank's piece where mesh dimensions split the same way: the first outermost, as DTensor nests them."""
    index, count, begin, size = 0, 1, 0, way.size
    for dimension, taken in enumerate(chosen):
        if taken is way:
            ranks, coordinate = mesh.size(dimension), mesh.get_local_rank(dimension)
            index, count = index * ranks + coordinate, count * ranks
            piece = -(-size // ranks)
            first = min(piece * coordinate, size)
            begin, size = begin + first, min(piece, size - first)
    return Part(index, count, begin, begin + size, way.size)


def _wrap(result: Tensor, index: int, chosen: Sequence[Way], mesh: DeviceMesh) -> DTensor:
    placements: list[Placement] = []
    shape = list(result.shape)
    for dimension, way in enumerate(chosen):
        axis = way.outputs[index]
        placements.append(Replicate() if axis is None else Shard(axis))
        if axis is not None and way.divisor is not None:
            shape[axis] *= mesh.size(dimension)
        elif axis is not None:
            shape[axis] = way.size
    stride, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda axis: (result.stride(axis), -axis)):
        stride[axis], step = step, step * shape[axis]
    return DTensor.from_local(result, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))
