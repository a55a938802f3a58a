"""Builds one ONNX node that holds what was meant and nothing else.

The exporter records calls of onnxscript operators. For an operator with a registered schema the recorder writes every default
and makes every output of the schema; some runtimes refuse a node for an attribute at its default (ONNX Runtime 1.30 and the
window sizes), and an output that exists is computed. So each node gets a schema of its own, cut to its outputs and free of
defaults. The same goes for MultiHeadAttention, which has no registered schema at all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_onnx_attn.onnx.operators import OUTPUTS
from torch_onnx_attn.onnx.requirements import ExportError

__all__ = ["Translated", "Value", "attention", "float_attribute", "helper", "multi_head_attention", "tensor_scatter"]

Value = Any  # an onnx_ir.Value; spelt Any because the exporter evaluates the annotations of translations, without onnx_ir in reach
Translated = Any  # one Value, or a tuple of them: as many as the torch op returns


def attention(opset: int, inputs: Sequence[Value | None], attributes: Mapping[str, Any], outputs: Sequence[str]) -> Translated:
    """ai.onnx::Attention. `outputs` names the meant ones, in ONNX's order."""
    return _node(_operator("Attention", opset, _reach(outputs, OUTPUTS["attention"])), inputs, attributes, outputs, OUTPUTS["attention"])


def multi_head_attention(inputs: Sequence[Value | None], attributes: Mapping[str, Any], outputs: Sequence[str]) -> Translated:
    """com.microsoft::MultiHeadAttention, version 1."""
    return _node(_multi_head_attention_operator(_reach(outputs, OUTPUTS["mha"])), inputs, attributes, outputs, OUTPUTS["mha"])


def tensor_scatter(opset: int, inputs: Sequence[Value | None], attributes: Mapping[str, Any]) -> Translated:
    """ai.onnx::TensorScatter."""
    return _operator("TensorScatter", opset, 1)(*inputs, **attributes)


def helper(name: str, *inputs: Any, **attributes: Any) -> Value:
    """A small node of ai.onnx around an attention node. Numbers among the inputs become constants of the tensors' type."""
    return _operator(name, 18, 1)(*inputs, **attributes)  # 18: the opset the exporter builds in, before it converts the graph


def float_attribute(name: str, value: float) -> float:
    """The value as ONNX will hold it, or an error if float32 has no room for it."""
    stored = float(torch.tensor(value, dtype=torch.float32))
    if value == value and abs(value) != float("inf") and (abs(stored) == float("inf") or (stored == 0) != (value == 0)):
        raise ExportError(f"{name}={value!r} does not fit ONNX's float attributes, which are float32")
    return float(value)


def _reach(outputs: Sequence[str], order: Sequence[str]) -> int:
    return order.index(outputs[-1]) + 1


def _node(
    operator: Any, inputs: Sequence[Value | None], attributes: Mapping[str, Any], meant: Sequence[str], order: Sequence[str]
) -> Translated:
    made = operator(*inputs, **attributes)
    named = dict(zip(order, made if isinstance(made, Sequence) else [made], strict=False))
    for name in named.keys() - set(meant):
        named[name].name = ""  # ONNX's spelling of an optional output that is left out
    return named[meant[0]] if len(meant) == 1 else tuple(named[name] for name in meant)


@functools.cache
def _operator(name: str, opset: int, outputs: int) -> Any:
    """An operator of ai.onnx as of `opset`, with its first `outputs` outputs and without attribute defaults."""
    import onnx
    from onnxscript.values import Op, Opset

    known = onnx.defs.get_schema(name, opset)
    schema = onnx.defs.OpSchema(
        name,
        "",
        known.since_version,
        inputs=list(known.inputs),
        outputs=list(known.outputs)[:outputs],
        type_constraints=[(t.type_param_str, t.allowed_type_strs, t.description) for t in known.type_constraints],
        attributes=[onnx.defs.OpSchema.Attribute(a.name, a.type, a.description, required=False) for a in known.attributes.values()],
    )
    return Op(Opset("", opset), name, schema)


@functools.cache
def _multi_head_attention_operator(outputs: int) -> Any:
    """The operator as ONNX Runtime 1.32 describes it. Not registered with onnx: that would be a change for the whole process."""
    import onnx
    from onnxscript.values import Op, Opset

    parameter = onnx.defs.OpSchema.FormalParameter
    attribute = onnx.defs.OpSchema.Attribute
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    kinds = onnx.defs.OpSchema.AttrType
    inputs = [
        ("key", "T"),
        ("value", "T"),
        ("bias", "T"),
        ("key_padding_mask", "M"),
        ("attention_bias", "T"),
        ("past_key", "T"),
        ("past_value", "T"),
        ("past_sequence_length", "M"),
        ("cache_indirection", "M"),
    ]
    schema = onnx.defs.OpSchema(
        "MultiHeadAttention",
        "com.microsoft",
        1,
        inputs=[parameter("query", "T"), *(parameter(name, kind, param_option=optional) for name, kind in inputs)],
        outputs=[parameter(name, "QK" if name == "qk" else "T") for name in OUTPUTS["mha"][:outputs]],
        type_constraints=[
            ("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], ""),
            ("QK", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], ""),
            ("M", ["tensor(int32)"], ""),
        ],
        attributes=[
            attribute("num_heads", kinds.INT, required=True),
            attribute("scale", kinds.FLOAT, required=False),
            attribute("mask_filter_value", kinds.FLOAT, required=False),
            attribute("unidirectional", kinds.INT, required=False),
        ],
    )
    return Op(Opset("com.microsoft", 1), "MultiHeadAttention", schema)
