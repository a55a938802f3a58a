"""What is known of a node before it runs: the side of a node that runtimes accept or refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..onnx import requirements
from .node import AttentionNode
from .packages import onnx
from .shapes import Kind

__all__ = ["Facts", "facts_of_arrays", "facts_of_kinds"]

_FLOAT, _FLOAT16, _DOUBLE, _BFLOAT16, _BOOL = 1, 10, 11, 16, 9  # TensorProto's numbers


@dataclasses.dataclass(frozen=True)
class Facts:
    """A node with the types and shapes of its inputs, as far as they are known.

    Attributes:
        op: ``attention``, ``mha`` or ``tensor_scatter``.
        opset: version of the node's domain.
        kinds: by ONNX's names of the inputs that are wired; a kind may have unknown dimensions, or be None.
        attributes: as written.
        outputs: ONNX's names of the outputs that are wired.
    """

    op: str
    opset: int
    kinds: Mapping[str, Kind | None]
    attributes: Mapping[str, Any]
    outputs: tuple[str, ...]

    def has(self, name: str) -> bool:
        """Whether that input or output is wired."""
        return name in self.kinds or name in self.outputs

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def dtype(self, name: str | None = None) -> int | None:
        """TensorProto's number of an input's type; of the first input without a name."""
        kind = self.kinds.get(name or next(iter(self.kinds), ""))
        return None if kind is None else kind.dtype

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        kind = self.kinds.get(name)
        return None if kind is None else kind.shape

    @property
    def rows(self) -> int | None:
        """Query rows."""
        return self._length("query" if self.op == "mha" else "Q", 1 if self.op == "mha" else None)

    @property
    def new_keys(self) -> int | None:
        """Rows of the incoming K."""
        if self.op == "mha" and not self.has("key"):
            return self.rows
        return self._length("key" if self.op == "mha" else "K")

    @property
    def keys(self) -> int | None:
        """Keys of the past and of this call."""
        if not self.has("past_key"):
            return self.new_keys
        past, new = self._length("past_key"), self.new_keys
        return None if past is None or new is None else past + new

    def _length(self, name: str, axis: int | None = None) -> int | None:
        shape = self.shape(name)
        if shape is None or len(shape) < 3:  # no rank that the operators allow
            return None
        return shape[axis if axis is not None else 2 if len(shape) == 4 else 1]

    @property
    def is_half(self) -> bool:
        return self.dtype() in (_FLOAT16, _BFLOAT16)

    @property
    def needed_opset(self) -> int | None:
        """The lowest opset of ai.onnx that can say this; None where it does not matter."""
        arguments = {name: True for name in self.kinds} | dict(self.attributes)
        found = requirements.need(self.op, arguments)
        return None if found is None else found.opset

    @property
    def features(self) -> list[str]:
        """What the node uses beyond the plain operator, in words."""
        names = []
        if self.op == "tensor_scatter":
            return [
                name
                for name, used in (("circular", self.attribute("mode") == "circular"), ("write indices", self.has("write_indices")))
                if used
            ]
        q_heads, kv_heads = self._heads()
        if q_heads and kv_heads and q_heads != kv_heads:
            names.append(f"grouped heads {q_heads}/{kv_heads}")
        for attribute, text in (("is_causal", "causal"), ("unidirectional", "causal, bottom-right")):
            if self.attribute(attribute):
                names.append(text)
        left, right = self.attribute("left_window_size", -1), self.attribute("right_window_size", -1)
        if left >= 0 or right >= 0:
            names.append(f"window {left if left >= 0 else 'all'} before, {right if right >= 0 else 'all'} after")
        for name, text in (("attn_mask", "mask"), ("key_padding_mask", "padding mask"), ("attention_bias", "attention bias")):
            if self.has(name):
                names.append(f"{'boolean ' if self.dtype(name) == _BOOL else ''}{text}")
        for name, text in (
            ("bias", "projection bias"),
            ("nonpad_kv_seqlen", "lengths"),
            ("past_sequence_length", "shared buffer"),
            ("cache_indirection", "beams"),
        ):
            if self.has(name):
                names.append(text)
        if self.has("past_key") and not self.has("past_sequence_length"):
            names.append("past and present")
        if self.attribute("softcap", 0.0):
            names.append(f"softcap {self.attribute('softcap'):g}")
        if self.attribute("scale") is not None:
            names.append(f"scale {self.attribute('scale'):g}")
        if self.has("qk_matmul_output"):
            names.append(f"scores, mode {self.attribute('qk_matmul_output_mode', 0)}")
        if self.has("qk"):
            names.append("scores")
        return names

    def _heads(self) -> tuple[int | None, int | None]:
        if self.op == "mha":
            return self.attribute("num_heads"), self.attribute("num_heads")
        q, k = self.shape("Q"), self.shape("K")
        if q is not None and k is not None and len(q) == len(k) == 4:
            return q[1], k[1]
        return self.attribute("q_num_heads"), self.attribute("kv_num_heads")


def facts_of_kinds(node: AttentionNode, kinds: Mapping[str, Kind]) -> Facts:
    """Facts from types and shapes by the names of values."""
    return Facts(
        node.op, node.opset, {formal: kinds.get(value) for formal, value in node.inputs.items()}, node.attributes, tuple(node.outputs)
    )


def facts_of_arrays(node: AttentionNode, arrays: Mapping[str, Any]) -> Facts:
    """Facts from the arrays that the node sees, by ONNX's names of the inputs."""
    kinds = {name: Kind(onnx.helper.np_dtype_to_tensor_dtype(array.dtype), tuple(array.shape)) for name, array in arrays.items()}
    return Facts(node.op, node.opset, kinds, node.attributes, tuple(node.outputs))
