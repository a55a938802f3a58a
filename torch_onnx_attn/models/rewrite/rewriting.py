"""`rewrite`: find what can be one Attention node, raise the opset if need be, and put the nodes in."""

from __future__ import annotations

import logging
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from torch_onnx_attn.bad_input import BadInput
from torch_onnx_attn.models.rewrite.decomposed import Decomposed, find
from torch_onnx_attn.models.rewrite.group_query_attention import GroupQuery, find_group_query, is_group_query, replace_group_query
from torch_onnx_attn.models.rewrite.heads import joined
from torch_onnx_attn.models.rewrite.no_match import NoMatch
from torch_onnx_attn.models.rewrite.opset import raise_opset
from torch_onnx_attn.models.rewrite.report import Left, Replaced, Report
from torch_onnx_attn.models.rewrite.subject import Subject, is_operator

__all__ = ["rewrite"]

_LOWEST_IR_VERSION = 10  # what exporters of opset 23 write; from 4 on initializers need not be inputs


def rewrite(model: ir.Model, *, unpadded: bool = False) -> Report:
    """Replace decomposed attention and GroupQueryAttention by ai.onnx::Attention nodes, in place.

    Every replacement is one that the graph itself proves to be equal, up to rounding, for finite inputs and any sizes. What cannot
    be proved stays, with the reason in the report. Nothing is run: `rewrite_file` checks the result on numbers as well.

    Args:
        model: An onnx_ir model. Its functions are inlined.
        unpadded: The caller vouches that every batch entry of a GroupQueryAttention is full, that is seqlens_k + 1 is the length of
            its past plus the new rows. Then one node is enough; otherwise each becomes TensorScatter nodes and an Attention.

    Returns:
        The report; its `checked` is empty. If it has no `replaced`, the graph is as it was, but for inlined functions.

    Raises:
        BadInput: There is something to replace, but the model's opset cannot be raised to the one that has Attention; or model is none.
    """
    if not isinstance(model, ir.Model):
        raise BadInput(f"model: is of type {type(model).__name__}, must be an onnx_ir.Model; rewrite_file takes files")
    if "ai.onnx" in model.opset_imports:  # another name of the same domain
        model.opset_imports.setdefault("", model.opset_imports.pop("ai.onnx"))
    opset, nodes = model.opset_imports.get("", 1), _count(model)
    report = Report(opset, opset, nodes, nodes)
    common.InlinePass()(model)
    found = _find_all(model, report, unpadded)[1]
    if not found:
        return report
    needed = max(one.opset if isinstance(one, GroupQuery) else 23 for one in found)
    if opset < needed:
        raise_opset(model, needed)
    subject, found = _find_all(model, report, unpadded)
    for one in found:
        # Earlier replacements took over values that later ones were found with, so each is found again.
        again = _find(subject, one.node if isinstance(one, GroupQuery) else one.softmax, unpadded)
        report.replaced.append(replace_group_query(subject, again) if isinstance(again, GroupQuery) else _replace(subject, again))
    common.TopologicalSortPass()(model)  # what layers share was put in where the first of them needed it
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    model.ir_version = max(model.ir_version, _LOWEST_IR_VERSION)
    report.opset_after, report.nodes_after = model.opset_imports[""], _count(model)
    return report


def _infer_shapes(model: ir.Model) -> None:
    """What onnx can say of shapes and types; it says nothing at all of a graph in which it finds a contradiction."""
    logger = logging.getLogger("onnx_ir.passes.common.shape_inference")  # it logs that with a traceback
    was, logger.disabled = logger.disabled, True
    try:
        common.ShapeInferencePass()(model)
    finally:
        logger.disabled = was


def _count(model: ir.Model) -> int:
    return sum(1 for _ in model.graph.all_nodes())


def _find(subject: Subject, node: ir.Node, unpadded: bool) -> Decomposed | GroupQuery:
    if node.graph is not subject.graph:
        raise NoMatch("it is inside a branch or loop")
    return find_group_query(subject, node, unpadded) if is_group_query(node) else find(subject, node)


def _find_all(model: ir.Model, report: Report, unpadded: bool) -> tuple[Subject, list[Decomposed | GroupQuery]]:
    """What can be replaced; what cannot goes to the report."""
    report.left.clear()
    _infer_shapes(model)
    subject, found = Subject(model), []
    for node in model.graph.all_nodes():
        if not is_operator(node, "Softmax") and not is_group_query(node):
            continue
        try:
            found.append(_find(subject, node, unpadded))
        except NoMatch as reason:
            report.left.append(Left(node.name or node.outputs[0].name or "", node.op_type, reason.reason))
    return subject, found


def _replace(subject: Subject, found: Decomposed) -> Replaced:
    tape = ir.tape.Tape()
    whole = joined(subject, found)
    attributes: dict[str, Any] = {"scale": found.scale}
    if whole is None:
        query, key, value = (operand.build(subject, tape) for operand in (found.query, found.key, found.value))
        output = found.output
        if len(found.query.shape) == 3:
            attributes |= {"q_num_heads": 1, "kv_num_heads": 1}
        rows = (query, len(found.query.shape) - 2, found.query.shape[-2])
    else:
        query, key, value, output = whole.query, whole.key, whole.value, whole.output
        attributes |= {"q_num_heads": whole.q_num_heads, "kv_num_heads": whole.kv_num_heads}
        rows = (query, 1, found.query.shape[-2])
    if found.softcap:
        attributes["softcap"] = found.softcap
    if found.mask.is_causal:
        attributes["is_causal"] = 1
    mask = found.mask.build(subject, tape, found.dtype, len(found.query.shape), rows)
    made = tape.op("Attention", [query, key, value, *([] if mask is None else [mask])], attributes)
    node, old = made.producer(), output.producer()
    assert node is not None and old is not None
    node.name = f"{found.softmax.name or found.softmax.outputs[0].name}_as_attention"
    made.name, made.type = output.name, output.type
    if whole is None or (output.shape is not None and len(output.shape) == 3):
        made.shape = output.shape
        subject.shapes.take_over(made, output)
    output.name = f"{output.name}_before"
    subject.graph.insert_before(old, tape.nodes)
    ir.convenience.replace_all_uses_with(output, made, replace_graph_outputs=True)
    return Replaced(node.name, "decomposed attention", attributes, () if mask is None else ("attn_mask",))
