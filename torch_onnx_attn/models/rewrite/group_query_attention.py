"""com.microsoft::GroupQueryAttention as ai.onnx::Attention.

The contrib operator hides three things in its lengths: where the new keys go, how many keys are valid, and whether the cache is a buffer
with room or grows by the new rows. A graph rarely says which, so the general form is right for all of them:

    start = max(seqlens_k + 1 - rows, 0)          where each entry's new rows go; a prompt starts at 0 even if it is padded on the right
    cache = TensorScatter(past with max(total - past rows, 0) rows added, new rows, start)
    Y     = Attention(Q, cache, cache, nonpad_kv_seqlen = max(seqlens_k + 1, rows), is_causal)

Without a past, or if the caller vouches that no entry is padded, Attention's own past_key does it in one node.
Rotary embedding becomes RotaryEmbedding at positions start, start + 1, ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from torch_onnx_attn.models.rewrite.no_match import NoMatch
from torch_onnx_attn.models.rewrite.report import Replaced
from torch_onnx_attn.models.rewrite.subject import Subject, attribute

__all__ = ["GroupQuery", "find_group_query", "is_group_query", "replace_group_query"]

_REFUSED_INPUTS = {10: "attention_bias", 11: "head_sink", 12: "k_scale", 13: "v_scale"}
_REFUSED_ATTRIBUTES = {"smooth_softmax": (0, -1), "qk_output": (0, -1), "kv_cache_bit_width": (0,)}
_NO_QUANTISATION = (None, "", "NONE", b"NONE", b"")


@dataclasses.dataclass(frozen=True)
class GroupQuery:
    """A GroupQueryAttention that can be written otherwise."""

    node: ir.Node
    q_num_heads: int
    kv_num_heads: int
    head_size: int
    rotary_size: int | None  # None: no rotary embedding
    attributes: dict[str, Any]  # of the Attention node
    grows: bool  # past and new rows are concatenated, for every entry

    @property
    def opset(self) -> int:
        if "left_window_size" in self.attributes:
            return 25
        return 23 if self.grows else 24


def is_group_query(node: ir.Node) -> bool:
    return node.domain == "com.microsoft" and node.op_type == "GroupQueryAttention"


def find_group_query(subject: Subject, node: ir.Node, unpadded: bool) -> GroupQuery:
    """Read a node. Raises NoMatch with what it has that Attention does not."""
    inputs = [*node.inputs, *[None] * 14][:14]
    for index, name in _REFUSED_INPUTS.items():
        if inputs[index] is not None:
            raise NoMatch(f"it has {name}, for which Attention has no equal")
    for name, allowed in _REFUSED_ATTRIBUTES.items():
        if attribute(node, name, 0) not in allowed:
            raise NoMatch(f"{name}={attribute(node, name)}, for which Attention has no equal")
    for name in ("k_quant_type", "v_quant_type"):
        if attribute(node, name) not in _NO_QUANTISATION:
            raise NoMatch(f"{name}={attribute(node, name)}: its cache is quantised")
    if len(node.outputs) > 3 and node.outputs[3].uses():
        raise NoMatch("its scores are an output")
    q_num_heads, kv_num_heads = attribute(node, "num_heads"), attribute(node, "kv_num_heads")
    query, key = inputs[0], inputs[1]
    if query is None or not q_num_heads or not kv_num_heads:
        raise NoMatch("its head counts are not given")
    width = subject.shape(query)[-1]
    heads = q_num_heads if key is not None else q_num_heads + 2 * kv_num_heads
    if not isinstance(width, int) or width % heads or len(subject.shape(query)) != 3:
        raise NoMatch(f"the head size of {query.name} is not known")
    attributes: dict[str, Any] = {"is_causal": 1}
    for name in ("scale", "softcap"):
        if attribute(node, name, 0.0):
            attributes[name] = attribute(node, name)
    window = attribute(node, "local_window_size", -1)
    if window > 0:
        attributes["left_window_size"] = window - 1  # the contrib operator counts the query's own key
    has_past = inputs[3] is not None
    if has_past != (inputs[4] is not None):
        raise NoMatch("it has half a past")
    if unpadded and has_past and _is_buffer(subject, node):
        raise NoMatch("its past and present have the same length, so it is a buffer with room and not concatenated")
    return GroupQuery(
        node,
        q_num_heads,
        kv_num_heads,
        width // heads,
        _rotary_size(subject, node, inputs, width // heads),
        attributes,
        not has_past or unpadded,
    )


def _is_buffer(subject: Subject, node: ir.Node) -> bool:
    past, present = (subject.shapes.shape(value) for value in (node.inputs[3], node.outputs[1] if len(node.outputs) > 1 else None))
    return past is not None and present is not None and past[2] == present[2]


def _rotary_size(subject: Subject, node: ir.Node, inputs: list[ir.Value | None], head_size: int) -> int | None:
    if not attribute(node, "do_rotary", 0):
        return None
    cosines = inputs[7]
    if cosines is None or inputs[8] is None:
        raise NoMatch("do_rotary=1 without cos_cache and sin_cache")
    half = subject.shape(cosines)[-1]
    if not isinstance(half, int) or 2 * half > head_size:
        raise NoMatch(f"the width of {cosines.name} is not known")
    return 2 * half


def replace_group_query(subject: Subject, found: GroupQuery) -> Replaced:
    """Put the nodes in place of the contrib one."""
    return _Writing(subject, found).replace()


class _Writing:
    """The nodes that one GroupQueryAttention becomes."""

    def __init__(self, subject: Subject, found: GroupQuery) -> None:
        self.subject, self.found = subject, found
        self.tape = ir.tape.Tape()
        self.inputs = [*found.node.inputs, *[None] * 14][:14]

    def replace(self) -> Replaced:
        found, node = self.found, self.found.node
        query, key, value = self._separate()
        if found.rotary_size is not None:
            positions = self._positions(query)
            query = self._rotated(query, found.q_num_heads, positions)
            key = self._rotated(key, found.kv_num_heads, positions)
        outputs, names = self._growing(query, key, value) if found.grows else self._scattered(query, key, value)
        for old, new in zip(node.outputs, outputs, strict=False):
            if not old.name:
                continue
            new.name, new.type, new.shape = old.name, old.type, old.shape
            self.subject.shapes.take_over(new, old)
            old.name = f"{old.name}_before"
        self.subject.graph.insert_before(node, self.tape.nodes)
        for old, new in zip(list(node.outputs), outputs, strict=False):
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self.subject.graph.remove(node, safe=True)
        attention = next(made for made in self.tape.nodes if made.op_type == "Attention")
        attention.name = f"{node.name or 'group_query'}_as_attention"
        attributes = {name: one.value for name, one in attention.attributes.items()}
        return Replaced(attention.name, "com.microsoft::GroupQueryAttention", attributes, names)

    def _separate(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        query, key, value = self.inputs[:3]
        assert query is not None
        if key is not None and value is not None:
            return query, key, value
        size, heads = self.found.head_size, (self.found.q_num_heads, self.found.kv_num_heads, self.found.kv_num_heads)
        parts = self.tape.op_multi_out("Split", [query, self._integers([count * size for count in heads])], {"axis": 2}, num_outputs=3)
        return parts[0], parts[1], parts[2]

    def _integers(self, numbers: list[int]) -> ir.Value:
        return self.subject.constant("sizes", np.array(numbers, np.int64))

    def _shared(self, name: str, sources: tuple[Any, ...], make: Callable[[], ir.Value]) -> ir.Value:
        """Layers with the same lengths and sizes share what is computed from them."""
        key = (name, sources)
        if key not in self.subject.built:
            self.subject.built[key] = make()
        return self.subject.built[key]

    def _rows(self) -> ir.Value:
        """How many new rows there are, as one number in a vector."""
        return self._shared("rows", (self._row_count(),), lambda: self.tape.op("Shape", [self.inputs[0]], {"start": 1, "end": 2}))

    def _row_count(self) -> Any:
        query = self.inputs[0]
        assert query is not None
        return self.subject.shape(query)[1]

    def _lengths(self) -> ir.Value:
        """seqlens_k + 1: int64 [batch]."""

        def make() -> ir.Value:
            lengths = self.tape.op("Cast", [self.inputs[5]], {"to": ir.DataType.INT64})
            lengths = self.tape.op("Reshape", [lengths, self._integers([-1])])  # [batch, 1] is allowed
            return self.tape.op("Add", [lengths, self._integers([1])])

        return self._shared("lengths", (self.inputs[5],), make)

    def _start(self) -> ir.Value:
        def make() -> ir.Value:
            return self.tape.op("Max", [self.tape.op("Sub", [self._lengths(), self._rows()]), self._integers([0])])

        return self._shared("start", (self.inputs[5], self._row_count()), make)

    def _positions(self, query: ir.Value) -> ir.Value:
        """int64 [batch, rows]."""
        given = self.inputs[9]

        def make() -> ir.Value:
            if given is not None:
                return self.tape.op("Cast", [given], {"to": ir.DataType.INT64})
            zero, one = (self.subject.constant(name, np.array(number, np.int64)) for name, number in (("zero", 0), ("one", 1)))
            steps = self.tape.op("Range", [zero, self.tape.op("Squeeze", [self._rows()]), one])
            return self.tape.op("Add", [self.tape.op("Unsqueeze", [self._start(), self._integers([1])]), steps])

        return self._shared("positions", (given, self.inputs[5], self._row_count()), make)

    def _rotated(self, value: ir.Value, heads: int, positions: ir.Value) -> ir.Value:
        attributes: dict[str, Any] = {"num_heads": heads}
        if attribute(self.found.node, "rotary_interleaved", 0):
            attributes["interleaved"] = 1
        if self.found.rotary_size != self.found.head_size:
            attributes["rotary_embedding_dim"] = self.found.rotary_size
        return self.tape.op("RotaryEmbedding", [value, self.inputs[7], self.inputs[8], positions], attributes)

    def _growing(self, query: ir.Value, key: ir.Value, value: ir.Value) -> tuple[list[ir.Value], tuple[str, ...]]:
        """Attention concatenates past and new rows itself."""
        attributes = {"q_num_heads": self.found.q_num_heads, "kv_num_heads": self.found.kv_num_heads, **self.found.attributes}
        past = self.inputs[3:5]
        inputs = [query, key, value] if past[0] is None else [query, key, value, None, *past]
        outputs = self.tape.op_multi_out("Attention", inputs, attributes, num_outputs=3)
        return list(outputs), () if past[0] is None else ("past_key", "past_value")

    def _scattered(self, query: ir.Value, key: ir.Value, value: ir.Value) -> tuple[list[ir.Value], tuple[str, ...]]:
        past_key, total = self.inputs[3], self.inputs[6]
        zero = self._integers([0])

        def padding() -> ir.Value:
            wanted = self.tape.op("Reshape", [self.tape.op("Cast", [total], {"to": ir.DataType.INT64}), self._integers([-1])])
            there = self.tape.op("Shape", [past_key], {"start": 2, "end": 3})
            missing = self.tape.op("Max", [self.tape.op("Sub", [wanted, there]), zero])
            return self.tape.op("Concat", [zero, missing], {"axis": 0})

        assert past_key is not None
        pads = self._shared("pads", (total, self.subject.shape(past_key)[2]), padding)
        caches = []
        for past, new in zip(self.inputs[3:5], (key, value), strict=True):
            room = self.tape.op("Pad", [past, pads, None, self._integers([2])])
            caches.append(self.tape.op("TensorScatter", [room, self._split(new, self.found.kv_num_heads), self._start()], {"axis": 2}))
        seen = self._shared("seen", (self.inputs[5], self._row_count()), lambda: self.tape.op("Max", [self._lengths(), self._rows()]))
        inputs = [self._split(query, self.found.q_num_heads), *caches, None, None, None, seen]
        made = self.tape.op("Attention", inputs, self.found.attributes)
        joined = self.tape.op("Transpose", [made], {"perm": [0, 2, 1, 3]})
        joined = self.tape.op("Reshape", [joined, self._integers([0, 0, self.found.q_num_heads * self.found.head_size])])
        return [joined, *caches], ("nonpad_kv_seqlen",)

    def _split(self, value: ir.Value, heads: int) -> ir.Value:
        """[batch, rows, heads * size] to [batch, heads, rows, size]."""
        split = self.tape.op("Reshape", [value, self._integers([0, 0, heads, self.found.head_size])])
        return self.tape.op("Transpose", [split], {"perm": [0, 2, 1, 3]})
