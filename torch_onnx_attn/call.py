"""One call of an operator as data: what it computes here, in float64, and what it would run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import ops, reference
from .explain import Machine, Plan, explain

__all__ = ["OUTPUTS", "Call", "Scale"]

OUTPUTS = {
    "attention": ("Y", "present_key", "present_value", "qk_matmul_output", "lse"),
    "attention_cached": ("Y", "key_cache", "value_cache"),
    "mha": ("output", "present_key", "present_value", "qk"),
    "tensor_scatter": ("present_cache",),
    "valid_kv_length": ("lengths",),
}
_MOST_SCORES = 2**26  # half a gigabyte of float64; the reference needs a few times that
_WRITTEN = {"attention_cached": ("key_cache", "value_cache"), "mha": ("past_key", "past_value")}


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes in a call that rounding errors are proportional to. For each query row, so that one row with a huge bias does not
    excuse the others.

    Attributes:
        score: ``[batch, q_heads, q_len]``, largest ``|scale| * |q| * |k|`` over the keys that may carry weight.
        product: likewise over all keys, those past a length included, which scores show.
        logit: ``[batch, q_heads, q_len]``, size of the scores that carry weight, after the bias.
        value: ``[batch, q_heads]``, largest ``|v|``.
        keys: terms in the sums.
    """

    score: Tensor
    product: Tensor
    logit: Tensor
    value: Tensor
    keys: int


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        op: ``attention``, ``attention_cached``, ``mha``, ``tensor_scatter`` or ``valid_kv_length``.
        tensors: the tensors by the names of the Python functions of this package, absent ones left out.
        attributes: the other arguments by the same names.
        outputs: the outputs that are wanted, of ``OUTPUTS[op]``. What an op writes in place counts as an output.
    """

    op: str
    tensors: Mapping[str, Tensor]
    attributes: Mapping[str, Any]
    outputs: tuple[str, ...]

    def to(self, device: str | torch.device) -> Call:
        """The same call with its tensors on another device."""
        return dataclasses.replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def prepare(self) -> Callable[[], dict[str, Tensor]]:
        """A function that makes the call. What the op writes in place is copied once, here; calling again writes the copies again.

        Raises:
            RuntimeError: when the function is called and the op refuses its arguments.
        """
        tensors: dict[str, Any] = dict(self.tensors)
        if "past_sequence_length" in tensors or self.op != "mha":
            tensors |= {name: tensors[name].clone() for name in _WRITTEN.get(self.op, ()) if name in tensors}
        make = getattr(self, f"_make_{self.op}")

        def call() -> dict[str, Tensor]:
            made = make(tensors)
            return {name: made[name] for name in self.outputs}

        return call

    def run(self) -> dict[str, Tensor]:
        """The wanted outputs, by this package's kernels on the tensors' device."""
        return self.prepare()()

    def plan(self, machine: Machine | None = None) -> Plan:
        """Which kernel the call takes there. Raises RuntimeError for an op that does not attend."""
        return explain(self.prepare(), machine=machine)

    def _make_attention(self, tensors: dict[str, Any]) -> dict[str, Any]:
        if "lse" in self.outputs:
            Y, lse = torch.ops.onnx_attn.attention.lse(**tensors, return_lse=True, **self.attributes)
            return {"Y": Y, "lse": lse}
        made = ops.attention(**tensors, **self.attributes)._asdict()
        for present, name in (("present_key", "K"), ("present_value", "V")):
            if made[present] is None and present in self.outputs:  # without a past it is what came in, its heads split
                made[present] = _heads(tensors[name], self.attributes.get("kv_num_heads", 0)).clone()
        return made

    def _make_attention_cached(self, tensors: dict[str, Any]) -> dict[str, Any]:
        Y = ops.attention_cached(**tensors, **self.attributes)
        return {"Y": Y, "key_cache": tensors["key_cache"], "value_cache": tensors["value_cache"]}

    def _make_mha(self, tensors: dict[str, Any]) -> dict[str, Any]:
        heads, added = self.attributes["num_heads"], {}
        wanted = {"present_key", "present_value"} & set(self.outputs)
        if "past_key" not in tensors and wanted and heads > 0 and tensors["query"].dim() in (3, 5):  # else the op says what is wrong
            if self._value_has_another_head_size():  # no past can be like that: presents are what came in
                added = _projected(tensors, heads)
            else:
                head_size = tensors["query"].shape[-1] // (heads if tensors["query"].dim() == 3 else 1)
                past = tensors["query"].new_empty(tensors["query"].shape[0], heads, 0, head_size)
                tensors = tensors | {"past_key": past, "past_value": past}
        made = ops.mha(**tensors, output_qk="qk" in self.outputs, **self.attributes)._asdict() | added
        if made["present_key"] is None:  # a buffer that past and present share
            made |= {"present_key": tensors.get("past_key"), "present_value": tensors.get("past_value")}
        return made

    def _value_has_another_head_size(self) -> bool:
        key, value = self.tensors.get("key"), self.tensors.get("value")
        return key is not None and value is not None and key.dim() == value.dim() == 3 and key.shape[2] != value.shape[2]

    def _make_tensor_scatter(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"present_cache": ops.tensor_scatter(**tensors, **self.attributes)}

    def _make_valid_kv_length(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"lengths": ops.valid_kv_length(**tensors)}

    # ------------------------------------------------------------------------------------------------ float64

    def expected(self) -> dict[str, Tensor]:
        """The wanted outputs by ``torch_onnx_attn.reference``, in float64 where they are computed and as given where they are copied."""
        return {name: tensor for name, tensor in self._reference.items() if name in self.outputs}

    @functools.cached_property
    def _reference(self) -> dict[str, Tensor]:
        if self.op == "attention" and self._scores() > _MOST_SCORES:
            return self._reference_by_heads()
        function = getattr(reference, self.op)
        if self.op == "tensor_scatter":
            return {"present_cache": function(**self.tensors, **self.attributes)}
        if self.op == "valid_kv_length":
            return {"lengths": function(**self.tensors)}
        extra = {"attention": {"return_lse": True}, "mha": {"output_qk": True}}.get(self.op, {})
        made = function(**self.tensors, **self.attributes, **extra)._asdict()
        return {name: tensor for name, tensor in made.items() if tensor is not None}

    def _scores(self) -> int:
        """Number of scores of an attention."""
        Q, K = (_heads(self.tensors[name], self.attributes.get("q_num_heads" if name == "Q" else "kv_num_heads", 1)) for name in ("Q", "K"))
        past = self.tensors["past_key"].shape[2] if "past_key" in self.tensors else 0
        return Q.shape[0] * Q.shape[1] * Q.shape[2] * (K.shape[2] + past)

    def _reference_by_heads(self) -> dict[str, Tensor]:
        """One batch entry and kv head after the other, so that not all scores are in memory at once."""
        q_heads, kv_heads = self.attributes.get("q_num_heads", 0), self.attributes.get("kv_num_heads", 0)
        split = {name: _heads(x, q_heads if name == "Q" else kv_heads) for name, x in self.tensors.items() if name in ("Q", "K", "V")}
        batch, q_heads, kv_heads = split["Q"].shape[0], split["Q"].shape[1], split["K"].shape[1]
        group = q_heads // kv_heads
        attributes = {name: value for name, value in self.attributes.items() if not name.endswith("_num_heads")}
        entries = []
        for entry in range(batch):
            parts = []
            for head in range(kv_heads):
                query_heads = slice(head * group, (head + 1) * group)
                tensors: dict[str, Any] = {
                    name: x[entry : entry + 1, query_heads if name == "Q" else slice(head, head + 1)] for name, x in split.items()
                }
                tensors |= {name: x[entry : entry + 1, head : head + 1] for name, x in self.tensors.items() if name.startswith("past")}
                if "attn_mask" in self.tensors:
                    mask = self.tensors["attn_mask"]
                    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
                    mask = mask[entry : entry + 1] if mask.shape[0] > 1 else mask
                    tensors["attn_mask"] = mask[:, query_heads] if mask.shape[1] > 1 else mask
                if "nonpad_kv_seqlen" in self.tensors:
                    tensors["nonpad_kv_seqlen"] = self.tensors["nonpad_kv_seqlen"][entry : entry + 1]
                made = reference.attention(**tensors, **attributes, return_lse=True)._asdict()
                parts.append({name: x for name, x in made.items() if x is not None})
            entries.append({name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]})
        made = {name: torch.cat([part[name] for part in entries]) for name in entries[0]}
        return made | ({"Y": made["Y"].transpose(1, 2).flatten(2)} if self.tensors["Q"].dim() == 3 else {})

    def scale(self) -> Scale | None:
        """The sizes that rounding errors of this call are proportional to; None for an op that only copies."""
        if self.op in ("tensor_scatter", "valid_kv_length"):
            return None
        if self.op == "mha":
            return self._mha_scale()
        return self._attention_scale() if self.op == "attention" else self._as_attention().scale()

    def _as_attention(self) -> Call:
        """An `attention_cached` as the attention to the caches that it has written."""
        arguments: dict[str, Any] = {**self.tensors, **self.attributes}
        written = reference.attention_cached(**arguments)
        caches = {"K": written.key_cache, "V": written.value_cache}
        Q, new = _heads(self.tensors["Q"], self.attributes.get("q_num_heads", 0)), self.tensors["K"]
        lengths = self.tensors["cache_lengths"].long() + new.shape[2 if new.dim() == 4 else 1]
        masks = {name: mask for name, mask in self.tensors.items() if name == "attn_mask"}
        attributes = {name: value for name, value in self.attributes.items() if not name.endswith("_num_heads")}
        return Call("attention", {"Q": Q, **caches, **masks, "nonpad_kv_seqlen": lengths}, attributes, ("Y",))

    def _attention_scale(self) -> Scale:
        q = _heads(self.tensors["Q"], self.attributes.get("q_num_heads", 0)).double()
        k, v, lse = (self._reference[name] for name in ("present_key", "present_value", "lse"))
        given = self.attributes.get("scale")
        scale = 1 / math.sqrt(q.shape[3]) if given is None else given
        if "nonpad_kv_seqlen" not in self.tensors:
            return _scale(q, k, v, scale, lse)
        padding = torch.arange(k.shape[2], device=k.device) >= self.tensors["nonpad_kv_seqlen"][:, None]
        used_k, used_v = (x.masked_fill(padding[:, None, :, None], 0.0) for x in (k, v))
        return dataclasses.replace(_scale(q, used_k, used_v, scale, lse), product=_scale(q, k, v, scale, lse).product)

    def _mha_scale(self) -> Scale:
        keys, values, logits = (self._reference[name] for name in ("present_key", "present_value", "qk"))
        heads, query, bias = self.attributes["num_heads"], self.tensors["query"], self.tensors.get("bias")
        q = query[:, :, :, 0].transpose(1, 2).double() if query.dim() == 5 else _heads(query, heads).double()
        if bias is not None:
            q = q + bias[: heads * q.shape[3]].double().reshape(heads, 1, -1)
        length = logits.shape[-1]
        largest = logits.amax(-1) if length else logits.new_zeros(logits.shape[:-1])
        scale = self.attributes.get("scale", 0.0) or 1 / math.sqrt(q.shape[3])
        return _scale(q, keys[:, :, :length], values[:, :, :length], scale, largest)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[batch, heads, length, size] whichever layout x has."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2) if x.dim() == 3 else x


def _projected(tensors: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The presents of a MultiHeadAttention without a past: key and value with their bias, split into heads."""
    key, value, bias = tensors["key"], tensors["value"], tensors.get("bias")
    if bias is not None:
        size, v_size = key.shape[2], value.shape[2]
        key, value = key + bias[bias.numel() - v_size - size : -v_size], value + bias[-v_size:]
    return {"present_key": _heads(key, heads), "present_value": _heads(value, heads)}


def _scale(q: Tensor, k: Tensor, v: Tensor, scale: float, logits: Tensor) -> Scale:
    """Shapes: q [batch, q_heads, q_len, size]; k, v [batch, kv_heads, kv_len, size]; logits [batch, q_heads, q_len]."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    lengths = (x.square().sum(-1).sqrt().nan_to_num(0.0, 0.0) for x in (q, k))
    score = abs(scale) * next(lengths) * _largest(next(lengths))[..., None]
    return Scale(score, score, logits.nan_to_num(0.0, 0.0, 0.0).abs(), _largest(v.flatten(2)), k.shape[2])


def _largest(x: Tensor) -> Tensor:
    """Largest finite magnitude along the last axis, 0 for none."""
    finite = x.nan_to_num(0.0, 0.0, 0.0).abs()
    return finite.amax(-1) if finite.shape[-1] else finite.new_zeros(finite.shape[:-1])
