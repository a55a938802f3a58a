"""What an ONNX file says of its attention, in words: the nodes, the opset and why, and what runtimes are known to make of it."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torch_onnx_attn.bad_input import BadInput
from torch_onnx_attn.onnx.operators import INPUTS, KINDS, OUTPUTS
from torch_onnx_attn.onnx.requirements import Need, need, require_packages

__all__ = ["ExportReport", "NodeReport", "report"]


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """One attention or cache node.

    Attributes:
        name: the node's name in the graph.
        op: `Attention`, `MultiHeadAttention` or `TensorScatter`.
        inputs: the type and sizes of each input that is there, by ONNX's name, such as `{"Q": "float16 [batch, 8, rows, 64]"}`.
        outputs: ONNX's names of the outputs that are there.
        attributes: those that are written.
        needs: the lowest opset of ai.onnx that can say the node, and what asks for it; None for com.microsoft.
        remarks: what runtimes are known to make of it.
    """

    name: str
    op: str
    inputs: dict[str, str]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    needs: Need | None
    remarks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What a file holds; `print` it.

    Attributes:
        opset: of ai.onnx; None if the file imports none.
        why: why this opset, in a sentence.
        inputs, outputs: type and sizes of each, by name.
        nodes: the attention and cache nodes, those in branches and loops included.
        other_nodes: how many nodes of each other type.
        weight_bytes: the size of all weights.
        weight_files: the files beside the model that hold weights.
    """

    opset: int | None
    why: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    nodes: tuple[NodeReport, ...]
    other_nodes: Counter[str]
    weight_bytes: int
    weight_files: tuple[str, ...]

    @property
    def remarks(self) -> dict[str, list[str]]:
        """Each remark on a node, with the names of the nodes that it is about."""
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            for remark in node.remarks:
                found.setdefault(remark, []).append(node.name)
        return found

    def __str__(self) -> str:
        lines = [f"opset {self.opset}, {self.why}", "inputs:", *_table(self.inputs), "outputs:", *_table(self.outputs)]
        lines.append("attention and cache nodes:" if self.nodes else "no attention or cache nodes")
        alike = Counter(_sentence(node) for node in self.nodes)
        lines += [f"  {count} x {sentence}" for sentence, count in alike.items()]
        others = ", ".join(f"{count} {name}" for name, count in self.other_nodes.most_common())
        lines.append(f"other nodes: {others or 'none'}")
        lines.append(f"weights: {_size(self.weight_bytes)}{', in ' if self.weight_files else ''}{', '.join(self.weight_files)}")
        lines += [f"note: {remark} ({len(names)} of {len(self.nodes)} nodes)" for remark, names in self.remarks.items()]
        return "\n".join(lines)


def report(model: torch.onnx.ONNXProgram | str | os.PathLike[str]) -> ExportReport:
    """Describe what was exported, or any ONNX file. Weights are not read.

    Args:
        model: what `export` returned, or the path of a file.

    Raises:
        BadInput: the file is no ONNX model; a ValueError.
    """
    require_packages()
    import onnx_ir

    if not isinstance(model, torch.onnx.ONNXProgram | str | os.PathLike):
        raise TypeError(f"model: is of type {type(model).__name__}, must be what export returned or the path of a file")
    graph_model = model.model if isinstance(model, torch.onnx.ONNXProgram) else _load(model)
    graph = graph_model.graph
    opset = graph.opset_imports.get("")
    nodes, others = [], Counter[str]()
    for node in _all_nodes(graph_model):
        kind = KINDS.get((node.domain, node.op_type))
        if kind is None:
            others[node.op_type if node.domain == "" else f"{node.domain}::{node.op_type}"] += 1
        else:
            nodes.append(_describe(node, kind, opset))
    weights = [value.const_value for value in graph.initializers.values() if value.const_value is not None]
    return ExportReport(
        opset=opset,
        why=_why(opset, [node.needs for node in nodes if node.needs is not None]),
        inputs={str(value.name): kind_of(value) for value in graph.inputs},
        outputs={str(value.name): kind_of(value) for value in graph.outputs},
        nodes=tuple(nodes),
        other_nodes=others,
        weight_bytes=sum(weight.nbytes for weight in weights),
        weight_files=tuple(sorted({str(weight.location) for weight in weights if isinstance(weight, onnx_ir.ExternalTensor)})),
    )


def _load(path: str | os.PathLike[str]) -> Any:
    import onnx_ir
    from google.protobuf.message import DecodeError

    try:
        model = onnx_ir.load(path)
    except DecodeError as error:
        raise BadInput(f"{os.fspath(path)}: is no ONNX model, or a damaged one: {error}") from error
    if not model.graph.opset_imports:  # protobuf takes an empty file, and much else, for a message without fields
        raise BadInput(f"{os.fspath(path)}: is no ONNX model: it names no opset")
    return model


def _all_nodes(model: Any) -> Iterator[Any]:
    import onnx_ir

    for graph in (model.graph, *model.functions.values()):
        yield from onnx_ir.traversal.RecursiveGraphIterator(graph)


def _describe(node: Any, kind: str, opset: int | None) -> NodeReport:
    inputs = {name: value for name, value in zip(INPUTS[kind], node.inputs, strict=False) if value is not None}
    outputs = tuple(name for name, value in zip(OUTPUTS[kind], node.outputs, strict=False) if value.name)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return NodeReport(
        name=node.name or node.outputs[0].name,
        op=node.op_type,
        inputs={name: kind_of(value) for name, value in inputs.items()},
        outputs=outputs,
        attributes=attributes,
        needs=need(kind, {**dict.fromkeys(inputs, True), **attributes}),
        remarks=tuple(_remarks(kind, opset or 0, inputs, outputs, attributes)),
    )


def _why(opset: int | None, needs: list[Need]) -> str:
    if not needs:
        return "which no attention node asks for"
    highest = max(needs, key=lambda entry: entry.opset)
    what = {"attention": "Attention", "tensor_scatter": "TensorScatter"}.get(highest.argument, highest.argument)
    lowest = f"{highest.opset} is the lowest that has {what}"
    if opset is None or opset < highest.opset:
        return f"too low, {lowest}"
    return lowest if opset == highest.opset else f"more than needed, {lowest}"


def _remarks(kind: str, opset: int, inputs: dict[str, Any], outputs: Iterable[str], attributes: dict[str, Any]) -> Iterator[str]:
    """ONNX Runtime 1.32 on the CPU and onnx 1.23, as far as this package's tests pin them."""
    first = next(iter(inputs.values()))
    if first.dtype is not None and first.dtype.name == "BFLOAT16" and kind != "tensor_scatter":
        yield "ONNX Runtime has no bfloat16 kernel for it on the CPU"
    if kind == "attention":
        yield from _attention_remarks(opset, inputs, tuple(outputs), attributes)
    if kind == "mha":
        if attributes.get("unidirectional") and "past_key" not in inputs:
            yield "ONNX Runtime's CPU kernel aligns unidirectional top-left where query and key lengths differ"
        if len(first.shape or ()) == 5 or ("key" in inputs and len(inputs["key"].shape or ()) == 5):
            yield "ONNX Runtime has no packed layouts on the CPU"


def _attention_remarks(opset: int, inputs: dict[str, Any], outputs: tuple[str, ...], attributes: dict[str, Any]) -> Iterator[str]:
    if opset >= 25:
        yield "ONNX Runtime on the CPU runs Attention of opset 25 and up as an expanded function; opsets 23 and 24 have a kernel"
    if "nonpad_kv_seqlen" in inputs:
        yield "ONNX Runtime multiplies keys past nonpad_kv_seqlen by zero: caches must not hold NaN there"
    mask = inputs.get("attn_mask")
    if mask is not None and mask.shape is not None and opset < 25 and (len(mask.shape) == 1 or mask.shape[-2] == 1 != _rows(inputs["Q"])):
        yield "ONNX Runtime's kernels of opsets 23 and 24 refuse a mask of one row; opset 25, or an expanded mask, runs"
    if attributes.get("qk_matmul_output_mode") == 2:
        yield "ONNX Runtime writes a finite number for -inf in score mode 2"
    if not attributes.get("qk_matmul_output_mode", 0) and "qk_matmul_output" in outputs and attributes.get("softcap"):
        yield "onnx.reference caps score mode 0, which ONNX leaves uncapped"
    if "scale" in attributes and attributes["scale"] <= 0:
        yield "ONNX Runtime's kernels refuse scale <= 0"


def _rows(Q: Any) -> Any:
    return None if Q.shape is None else Q.shape[-2]


def kind_of(value: Any) -> str:
    dtype = "?" if value.dtype is None else value.dtype.name.lower().replace("float", "float32" if value.dtype.name == "FLOAT" else "float")
    dtype = "float64" if dtype == "double" else dtype
    shape = "[?]" if value.shape is None else f"[{', '.join(str(size) for size in value.shape)}]"
    return f"{dtype} {shape}"


def _sentence(node: NodeReport) -> str:
    attributes = "".join(
        f", {name}={value:.6g}" if isinstance(value, float) else f", {name}={value}" for name, value in node.attributes.items()
    )
    inputs = ", ".join(f"{name} {kind}" for name, kind in node.inputs.items())
    return f"{node.op}({inputs}{attributes}) -> {', '.join(node.outputs)}"


def _table(entries: dict[str, str]) -> list[str]:
    width = max((len(name) for name in entries), default=0)
    return [f"  {name:<{width}}  {kind}" for name, kind in entries.items()]


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
