"""Looks at the attention nodes of a model without running it: what they use, who takes them, and which kernel they would take."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ..bad_input import BadInput
from ..explain import Machine, Plan
from .behaviours import RUNTIMES, behaviours
from .facts import Facts, facts_of_kinds
from .file import open_model
from .inputs import Sizes, input_shapes
from .node import AttentionNode, find_nodes
from .node_call import call_of
from .packages import first_line, onnx
from .shapes import Kind, infer

__all__ = ["Inspection", "NodeFacts", "RuntimeView", "inspect"]

_BATCH, _OTHER = 1, 128  # sizes of symbolic dimensions that nobody names


@dataclasses.dataclass(frozen=True)
class RuntimeView:
    """How one runtime takes a node. `level` is ``takes``, ``expands`` or ``refuses``; the reasons say why, and where it differs."""

    runtime: str
    level: str
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class NodeFacts:
    """What can be said of one node.

    Attributes:
        node: its name.
        operator: such as ``ai.onnx::Attention-24``.
        place: the subgraphs around it.
        inputs: type and shape of each input; "?" where nothing is known.
        features: in words.
        needed_opset: the lowest opset of ai.onnx that can say this, None for MultiHeadAttention.
        runtimes: who takes it.
        plan: the kernel and why not a faster one; None for a node that does not attend, and where `obstacle` says why.
        obstacle: why there is no plan.
    """

    node: str
    operator: str
    place: tuple[str, ...]
    inputs: Mapping[str, str]
    features: tuple[str, ...]
    needed_opset: int | None
    runtimes: tuple[RuntimeView, ...]
    plan: Plan | None
    obstacle: str


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The result for a model. `sizes` are the shapes of its inputs that the plans are made for."""

    model: str
    opset: int
    needed_opset: int | None
    sizes: Mapping[str, tuple[int, ...]]
    nodes: tuple[NodeFacts, ...]


def inspect(
    path: str | os.PathLike[str],
    *,
    machine: Machine | None = None,
    sizes: Sizes | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Inspection:
    """Inspect a model file.

    Args:
        path: the model.
        machine: plan for this machine; by default the kernels for CPU tensors here.
        sizes: sizes of symbolic dimensions of the inputs. Without one, a batch is 1 and others are 128.
        progress: called with what is being done, steps done, and steps in all.

    Raises:
        BadInput: the file cannot be used.
    """
    tell = progress or (lambda text, done, total: None)
    model = open_model(path)
    nodes = find_nodes(model, path)
    shapes = input_shapes(model, sizes or {}, _OTHER, _BATCH)
    tell("shapes", 0, len(nodes) + 1)
    kinds = infer(model, shapes, Path(path).parent)
    found = []
    for number, node in enumerate(nodes):
        tell(node.name, number + 1, len(nodes) + 1)
        found.append(_look_at(node, facts_of_kinds(node, kinds), kinds, machine))
    needed = [node.needed_opset for node in found if node.needed_opset is not None]
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    return Inspection(os.fspath(path), opset, max(needed, default=None), shapes, tuple(found))


def _look_at(node: AttentionNode, facts: Facts, kinds: Mapping[str, Kind], machine: Machine | None) -> NodeFacts:
    plan, obstacle = _plan(node, facts, machine)
    inputs = {formal: str(kinds[value]) if value in kinds else "?" for formal, value in node.inputs.items()}
    runtimes = tuple(_views(facts))
    return NodeFacts(node.name, node.title, node.place, inputs, tuple(facts.features), facts.needed_opset, runtimes, plan, obstacle)


def _views(facts: Facts) -> list[RuntimeView]:
    views = []
    for runtime in RUNTIMES:
        rows = behaviours(runtime, facts)
        refusals = tuple(row.reason for row in rows if row.level in ("refuses", "crashes"))
        differences = tuple(row.reason for row in rows if row.level == "differs")
        expansions = tuple(row.reason for row in rows if row.level == "expands")
        if refusals:
            views.append(RuntimeView(runtime.title, "refuses", refusals))
        else:
            level = "expands" if expansions else "takes"
            views.append(RuntimeView(runtime.title, level, expansions + differences))
    return views


def _plan(node: AttentionNode, facts: Facts, machine: Machine | None) -> tuple[Plan | None, str]:
    if node.op == "tensor_scatter":
        return None, "copies, and takes no attention kernel"
    tensors = {}
    unknown = [formal for formal, kind in facts.kinds.items() if kind is None or not kind.is_known]
    if unknown:
        return None, f"the shape of {', '.join(unknown)} is not known"
    try:
        for formal, kind in facts.kinds.items():
            assert kind is not None
            tensors[formal] = _stand_in(formal, kind, facts)
        return call_of(node, tensors).plan(machine), ""
    except (BadInput, RuntimeError) as error:
        return None, f"{'' if isinstance(error, BadInput) else 'torch_onnx_attn refuses: '}{first_line(error)}"


_DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}


def _stand_in(formal: str, kind: Kind, facts: Facts) -> torch.Tensor:
    """A tensor of that type and shape. Its memory is asked for and not touched, except where values are checked."""
    if kind.dtype not in _DTYPES:
        raise BadInput(f"{formal}: has type {onnx.TensorProto.DataType.Name(kind.dtype)}, which the op does not take")
    assert kind.shape is not None
    shape = [size for size in kind.shape if size is not None]
    if formal == "nonpad_kv_seqlen":
        return torch.full(shape, facts.new_keys or 0, dtype=_DTYPES[kind.dtype])
    if formal in ("past_sequence_length", "cache_indirection"):
        return torch.zeros(shape, dtype=_DTYPES[kind.dtype])
    return torch.empty(shape, dtype=_DTYPES[kind.dtype])
