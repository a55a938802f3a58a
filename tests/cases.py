"""Calls as data: a Case says everything about one call, so the line pytest prints is a complete repro.

    check_attention(Case(dtype=torch.float16, q_len=129, is_causal=True), device)

makes the inputs (seeded by the Case), fills free memory with NaN so that an output nobody wrote shows, calls the overload
that returns what the Case asks for, and compares every output with torch_onnx_attn.reference in float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import torch_onnx_attn  # noqa: F401  (registers the ops)
from torch_onnx_attn import reference

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF_DTYPES = (torch.float16, torch.bfloat16)
NAN, INF = math.nan, math.inf


def _short_repr(self: Any) -> str:
    """Only the fields that differ from their defaults."""
    fields = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value, default in fields if value != default)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    """One call of attention. `kv_len` counts the rows of the incoming K and V; `past` comes on top."""

    dtype: torch.dtype = torch.float32
    v_dtype: torch.dtype | None = None  # None: as Q
    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    q_len: int = 5
    kv_len: int = 9
    head_size: int = 16
    v_head_size: int | None = None  # None: head_size
    layout: str = "bhsd"  # bhsd: contiguous; bshd: views of [batch, row, head, column]; 3d; loose: slices of larger NaN-filled storage
    mask: str | None = None  # "bool", or the name of the type of an additive mask; "same" is Q's type
    mask_axes: str = "bhqk"  # the mask's axes from the left: b, h, q, k, or 1
    mask_columns: int | None = None  # length of the k axis; None: all keys
    past: int | None = None
    lengths: str | None = None  # "ragged" (empty, shorter than q_len, nearly full, full; NaN past the length) or "full"
    is_causal: bool = False
    left_window_size: int = -1
    right_window_size: int = -1
    scale: float | None = None
    softcap: float = 0.0
    softmax_precision: int | None = None
    qk_matmul_output_mode: int | None = None
    lse: bool = False

    __repr__ = _short_repr

    @property
    def total(self) -> int:
        """Keys that a query may see."""
        return self.kv_len + (self.past or 0)

    def attributes(self) -> dict[str, Any]:
        names = ("is_causal", "left_window_size", "right_window_size", "scale", "softcap", "softmax_precision")
        attributes = {name: getattr(self, name) for name in names if getattr(self, name) != Case.__dataclass_fields__[name].default}
        if self.layout == "3d":
            attributes |= {"q_num_heads": self.q_heads, "kv_num_heads": self.kv_heads}
        return attributes


@dataclasses.dataclass(frozen=True, repr=False)
class MhaCase:
    """One call of mha. `kv_len` counts the rows of the incoming key and value; `past` (rows already there) comes on top."""

    dtype: torch.dtype = torch.float32
    batch: int = 2
    num_heads: int = 2
    q_len: int = 5
    kv_len: int = 9
    head_size: int = 16
    v_head_size: int | None = None
    layout: str = "bsnh"  # bsnh; bnsh (key and value with their heads split); packed_kv; packed_qkv
    bias: bool = False
    mask: str | None = None  # "lengths" [batch], "lengths_starts" [3 * batch + 2], "keys" [batch, total], "rows" [batch, q_len, total]
    mask_dtype: torch.dtype = torch.int32
    attention_bias: str | None = None  # which of the axes batch and heads are not 1: "bh", "b", "h" or ""
    past: int | None = None
    capacity: int | None = None  # rows of the shared buffers; None: past and present are separate tensors
    beams: int | None = None
    unidirectional: bool = False
    scale: float = 0.0
    mask_filter_value: float = -10000.0
    qk: bool = False

    __repr__ = _short_repr

    @property
    def total(self) -> int:
        return self.kv_len + (self.past or 0)

    def attributes(self) -> dict[str, Any]:
        names = ("unidirectional", "scale", "mask_filter_value")
        attributes = {name: getattr(self, name) for name in names if getattr(self, name) != MhaCase.__dataclass_fields__[name].default}
        return {"num_heads": self.num_heads} | attributes


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


class Source:
    """Random tensors that depend on the case and on nothing else. Made on the CPU, so that every device sees the same."""

    def __init__(self, case: object, device: str | torch.device) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * spread).to(self.device, dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Numbers in low ... high - 1."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)


def loose(x: Tensor) -> Tensor:
    """The same values as a slice of larger storage that is NaN elsewhere: odd strides on every axis but the last, odd offset."""
    sizes = [n + pad for n, pad in zip(x.shape, (1, 2, 3, 5)[-x.dim() :], strict=True)]
    storage = torch.full(sizes, NAN, dtype=x.dtype, device=x.device)
    view = storage[tuple(slice(n - size, n) for n, size in zip(sizes, x.shape, strict=True))]
    return view.copy_(x)


def with_layout(x: Tensor, layout: str) -> Tensor:
    """A [batch, heads, rows, columns] tensor as `layout` keeps it."""
    if layout == "3d":
        return x.transpose(1, 2).flatten(2)
    if layout == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return loose(x) if layout == "loose" else x


def ragged_lengths(batch: int, kv_len: int, q_len: int) -> Tensor:
    """Lengths at every edge in turn: nearly full, shorter than the queries, empty, one, full."""
    edges = (max(kv_len - 1, 0), min(q_len // 2, kv_len), 0, min(1, kv_len), kv_len)
    return torch.tensor([edges[i % len(edges)] for i in range(batch)], dtype=torch.int64)


def poison_past(cache: Tensor, lengths: Tensor, value: float = NAN) -> Tensor:
    """A copy of a [batch, heads, rows, columns] cache with `value` in the rows from lengths[b] on."""
    tail = torch.arange(cache.shape[2], device=cache.device) >= lengths.to(cache.device)[:, None]
    return cache.masked_fill(tail[:, None, :, None], value)


def make_mask(source: Source, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A bool mask with a dead row, an additive one with -inf cells, or small integers."""
    if kind == "bool":
        mask = source.uniform(*shape) < 0.7
        if mask.dim() >= 2 and mask.shape[-2] > 1:
            mask[..., 1, :] = False
        return mask.to(source.device)
    kind_dtype = dtype if kind == "same" else getattr(torch, kind)
    if not kind_dtype.is_floating_point:
        return source.integers(0 if kind_dtype == torch.uint8 else -3, 4, *shape, dtype=kind_dtype)
    mask = torch.where(source.uniform(*shape) < 0.2, -INF, source.normal(*shape).cpu())
    return mask.to(source.device, kind_dtype)


def make_inputs(case: Case, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tensors of a call, by their ONNX names."""
    source = Source(case, device)
    v_dtype, v_head_size = case.v_dtype or case.dtype, case.head_size if case.v_head_size is None else case.v_head_size
    Q = source.normal(case.batch, case.q_heads, case.q_len, case.head_size, dtype=case.dtype)
    K = source.normal(case.batch, case.kv_heads, case.kv_len, case.head_size, dtype=case.dtype)
    V = source.normal(case.batch, case.kv_heads, case.kv_len, v_head_size, dtype=v_dtype)
    inputs = {}
    if case.lengths is not None:
        full = torch.full((case.batch,), case.kv_len, dtype=torch.int64)
        lengths = full if case.lengths == "full" else ragged_lengths(case.batch, case.kv_len, case.q_len)
        inputs["nonpad_kv_seqlen"] = lengths.to(device)
        K, V = poison_past(K, lengths, NAN), poison_past(V, lengths, INF)
    if case.past is not None:
        inputs["past_key"] = source.normal(case.batch, case.kv_heads, case.past, case.head_size, dtype=case.dtype)
        inputs["past_value"] = source.normal(case.batch, case.kv_heads, case.past, v_head_size, dtype=v_dtype)
        if case.layout == "loose":
            inputs["past_key"], inputs["past_value"] = loose(inputs["past_key"]), loose(inputs["past_value"])
    if case.mask is not None:
        columns = case.total if case.mask_columns is None else case.mask_columns
        sizes = {"b": case.batch, "h": case.q_heads, "q": case.q_len, "k": columns, "1": 1}
        inputs["attn_mask"] = make_mask(source, case.mask, [sizes[axis] for axis in case.mask_axes], case.dtype)
    return {"Q": with_layout(Q, case.layout), "K": with_layout(K, case.layout), "V": with_layout(V, case.layout)} | inputs


def make_mha_inputs(case: MhaCase, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tensors of a call, by their ONNX names."""
    source = Source(case, device)
    batch, heads, head_size = case.batch, case.num_heads, case.head_size
    v_head_size = head_size if case.v_head_size is None else case.v_head_size
    if case.layout == "packed_qkv":
        inputs = {"query": source.normal(batch, case.q_len, heads, 3, head_size, dtype=case.dtype)}
    else:
        inputs = {"query": source.normal(batch, case.q_len, heads * head_size, dtype=case.dtype)}
        if case.layout == "packed_kv":
            inputs["key"] = source.normal(batch, case.kv_len, heads, 2, head_size, dtype=case.dtype)
        elif case.layout == "bnsh":
            inputs["key"] = source.normal(batch, heads, case.kv_len, head_size, dtype=case.dtype)
            inputs["value"] = source.normal(batch, heads, case.kv_len, v_head_size, dtype=case.dtype)
        else:
            inputs["key"] = source.normal(batch, case.kv_len, heads * head_size, dtype=case.dtype)
            inputs["value"] = source.normal(batch, case.kv_len, heads * v_head_size, dtype=case.dtype)
    if case.bias:
        inputs["bias"] = source.normal(heads * (2 * head_size + v_head_size), dtype=case.dtype)
    if case.mask is not None:
        inputs["key_padding_mask"] = make_padding_mask(source, case)
    if case.attention_bias is not None:
        shape = (batch if "b" in case.attention_bias else 1, heads if "h" in case.attention_bias else 1, case.q_len, case.total)
        inputs["attention_bias"] = source.normal(*shape, dtype=case.dtype)
    if case.past is not None:
        rows = case.past if case.capacity is None else case.capacity
        past_key = source.normal(batch, heads, rows, head_size, dtype=case.dtype)
        past_value = source.normal(batch, heads, rows, v_head_size, dtype=case.dtype)
        if case.capacity is not None:
            filled = torch.full((batch,), case.past)
            past_key, past_value = poison_past(past_key, filled), poison_past(past_value, filled, INF)
            inputs["past_sequence_length"] = torch.tensor([case.past], dtype=torch.int32, device=device)
        inputs |= {"past_key": past_key, "past_value": past_value}
    if case.beams is not None:
        assert case.capacity is not None
        inputs["cache_indirection"] = source.integers(0, case.beams, batch // case.beams, case.beams, case.capacity, dtype=torch.int32)
    return inputs


def make_padding_mask(source: Source, case: MhaCase) -> Tensor:
    """One of the four forms of key_padding_mask, its first entry fully masked and, as numbers allow it, with negative and large values."""
    if case.mask in ("lengths", "lengths_starts"):
        lengths = source.integers(-1, case.total + 3, case.batch, dtype=case.mask_dtype)
        lengths[0] = 0
        if case.mask == "lengths":
            return lengths
        starts = source.integers(0, 99, 2 * case.batch + 2, dtype=case.mask_dtype)  # cumulative starts of queries and keys: not read
        return torch.cat((lengths, starts))
    shape = (case.batch, case.total) if case.mask == "keys" else (case.batch, case.q_len, case.total)
    mask = source.integers(0, 2, *shape) if case.mask_dtype == torch.bool else source.integers(-1, 3, *shape)
    mask[0] = 0
    return mask.to(case.mask_dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Calls


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """That many CPU threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def poison_memory(device: str | torch.device, outputs: Iterable[Tensor]) -> None:
    """Fill and free blocks as large as the outputs will be, so that the allocator hands NaN to whoever does not write."""
    blocks = []
    for like in outputs:
        for dtype in (torch.float64, torch.float32, torch.float16):
            blocks += [torch.full((like.numel(),), NAN, dtype=dtype, device=device) for _ in range(2)]
    del blocks


def call_attention(inputs: dict[str, Tensor], mode: int | None = None, lse: bool = False, **attributes: Any) -> dict[str, Tensor]:
    """The overload that returns what is asked for; its outputs by name."""
    packet = torch.ops.onnx_attn.attention
    if lse:
        return dict(zip(("Y", "lse"), packet.lse(**inputs, return_lse=True, **attributes), strict=True))
    if mode is not None:
        attributes["qk_matmul_output_mode"] = mode
    if "past_key" in inputs:
        names = ("Y", "present_key", "present_value")
        if mode is not None:
            return dict(zip((*names, "qk_matmul_output"), packet.kv_qk(**inputs, **attributes), strict=True))
        return dict(zip(names, packet.kv(**inputs, **attributes), strict=True))
    if mode is not None:
        return dict(zip(("Y", "qk_matmul_output"), packet.qk(**inputs, **attributes), strict=True))
    return {"Y": packet.default(**inputs, **attributes)}


def call_mha(inputs: dict[str, Tensor], qk: bool = False, **attributes: Any) -> dict[str, Tensor]:
    """The overload that returns what is asked for; its outputs by name. Shared buffers are copied first and returned as present."""
    packet = torch.ops.onnx_attn.mha
    if "past_sequence_length" in inputs and "past_key" in inputs:
        buffers = {name: inputs[name].clone() for name in ("past_key", "past_value")}
        output = packet.shared(**(inputs | buffers), **attributes)
        return {"output": output, "present_key": buffers["past_key"], "present_value": buffers["past_value"]}
    if qk:
        attributes["output_qk"] = True
    if "past_key" in inputs:
        names = ("output", "present_key", "present_value")
        if qk:
            return dict(zip((*names, "qk"), packet.kv_qk(**inputs, **attributes), strict=True))
        return dict(zip(names, packet.kv(**inputs, **attributes), strict=True))
    if qk:
        return dict(zip(("output", "qk"), packet.qk(**inputs, **attributes), strict=True))
    return {"output": packet.default(**inputs, **attributes)}


# ---------------------------------------------------------------------------------------------------------------------
# Comparison


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Allowed errors against float64."""

    output: float  # of Y, absolute
    score: float  # of a score before softmax, absolute, before its rounding to the output type
    weight: float  # of a weight after softmax, relative, likewise
    lse: float  # absolute


def tolerance(
    dtype: torch.dtype,
    *,
    compute: torch.dtype,
    score: float,
    logit: float,
    value: float,
    keys: int,
    softcap: float = 0.0,
    rounded_operands: bool = False,
    fast_tanh: bool = False,
) -> Tolerance:
    """What a good kernel may lose for inputs of `dtype` and sums in `compute`. The head size acts through `score`.

    score: largest |scale| * |q| * |k| of any pair of rows; the rounding errors of a dot product are proportional to it.
    logit: size of the scores that carry weight, after the bias; rounding to `compute` costs that much more.
    value: largest |v|, which scales the result. keys: terms in the sums.
    rounded_operands: q, k and v are sums that were rounded to `dtype` before the product.
    fast_tanh: the hardware's approximate tanh, good to 2^-11, may be used for the softcap of 16-bit inputs.
    """
    u, half = unit_roundoff(compute), unit_roundoff(dtype)
    if compute == torch.float64:
        u *= 2  # the reference rounds as much
    score_error = u * (4 * score + 2 * logit)
    if rounded_operands:
        score_error += 2 * half * score
    if softcap > 0 and fast_tanh and dtype in HALF_DTYPES:
        score_error += 2**-11 * min(score, softcap)
    weight_error = 2 * score_error + u * (8 + math.sqrt(keys))
    relative = weight_error + half  # and the rounding of the result
    if dtype in HALF_DTYPES:
        relative += half  # weights may be rounded to `dtype` before they meet V
    if rounded_operands:
        relative += half
    return Tolerance(value * relative, score_error, weight_error, score_error + u * (8 + math.sqrt(keys) + logit))


def largest(x: Tensor) -> float:
    """Largest finite magnitude, 0 for none."""
    finite = x.double().nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0


def longest_row(x: Tensor) -> float:
    """Largest norm along the last axis, rows with NaN or inf aside."""
    return largest(x.double().square().sum(-1).sqrt())


def assert_close(name: str, actual: Tensor, expected: Tensor, absolute: float | Tensor, relative: float = 0.0) -> None:
    """|actual - expected| <= absolute + relative * |expected| everywhere; infinities and NaN in the same places."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    limit = torch.finfo(actual.dtype)
    relative += unit_roundoff(actual.dtype)
    rounded = expected.to(actual.dtype).double()
    expected = torch.where(rounded.isinf(), rounded, expected)  # beyond the type's range
    got = actual.double()
    allowed = absolute + relative * expected.abs() + limit.smallest_normal * limit.eps
    error = (got - expected).abs()
    agree = (error <= allowed) | (got == expected) | (got.isnan() & expected.isnan())
    if not bool(agree.all()):
        where = tuple(torch.nonzero(~agree)[0].tolist())
        worst = float(torch.where(agree, 0.0, error.nan_to_num(INF, INF)).max())
        raise AssertionError(
            f"{name}: {int((~agree).sum())} of {agree.numel()} differ; at {where} got {float(got[where])!r}, expected "
            f"{float(expected[where])!r}, allowed error {float(allowed[where]):.3g}; worst error anywhere {worst:.3g}"
        )


def assert_same_bits(name: str, actual: Tensor, expected: Tensor) -> None:
    """Equal shape, type and every bit (NaN included)."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    same = actual.contiguous().view(integer) == expected.contiguous().view(integer)
    assert bool(same.all()), f"{name}: {int((~same).sum())} of {same.numel()} elements differ in their bits"


def compute_dtype(dtype: torch.dtype, softmax_precision: int | None = None) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 or softmax_precision == 11 else torch.float32


def compare_attention(inputs: dict[str, Tensor], actual: dict[str, Tensor], mode: int | None = None, **attributes: Any) -> None:
    """Every output of one attention call against the reference."""
    expected = reference.attention(**inputs, **attributes, qk_matmul_output_mode=mode, return_lse=True)
    dtype = inputs["Q"].dtype
    head_size = expected.present_key.shape[3]
    scale = attributes.get("scale")
    factor = 1 / math.sqrt(head_size) if scale is None else scale
    q = inputs["Q"] if inputs["Q"].dim() == 4 else inputs["Q"].unflatten(2, (attributes["q_num_heads"], head_size))
    assert expected.lse is not None
    allowed = tolerance(
        dtype,
        compute=compute_dtype(dtype, attributes.get("softmax_precision")),
        score=factor * longest_row(q) * longest_row(expected.present_key),
        logit=largest(expected.lse),
        value=largest(expected.present_value),
        keys=expected.present_key.shape[2],
        softcap=attributes.get("softcap", 0.0),
        fast_tanh=q.is_cuda,
    )
    assert actual["Y"].dtype == dtype
    assert_close("Y", actual["Y"], expected.Y, allowed.output)
    empty = expected.lse == -INF
    rows = actual["Y"] if actual["Y"].dim() == 4 else actual["Y"].unflatten(2, (empty.shape[1], -1)).transpose(1, 2)
    assert bool((rows[empty] == 0).all()), "Y: a row without an allowed key is not exactly 0"
    if "present_key" in actual:
        assert actual["present_key"].dtype == dtype and actual["present_value"].dtype == inputs["V"].dtype
        assert_close("present_key", actual["present_key"], expected.present_key, 0.0, -unit_roundoff(dtype))
        assert_close("present_value", actual["present_value"], expected.present_value, 0.0, -unit_roundoff(inputs["V"].dtype))
    if "qk_matmul_output" in actual:
        assert actual["qk_matmul_output"].dtype == dtype
        assert expected.qk_matmul_output is not None
        if mode == 3:
            assert_close("qk_matmul_output", actual["qk_matmul_output"], expected.qk_matmul_output, 0.0, allowed.weight)
            assert bool((actual["qk_matmul_output"][empty] == 0).all()), "qk_matmul_output: an empty row is not exactly 0"
        else:
            assert_close("qk_matmul_output", actual["qk_matmul_output"], expected.qk_matmul_output, allowed.score)
    if "lse" in actual:
        assert actual["lse"].dtype == torch.float32
        assert_close("lse", actual["lse"], expected.lse, allowed.lse)


def check_attention(case: Case, device: str | torch.device) -> dict[str, Tensor]:
    """Run one case on one device and compare all that it returns. The inputs must be left alone."""
    inputs = make_inputs(case, device)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    poison_memory(device, inputs.values())
    with threads(2):
        actual = call_attention(inputs, case.qk_matmul_output_mode, case.lse, **case.attributes())
    compare_attention(inputs, actual, case.qk_matmul_output_mode, **case.attributes())
    for name, tensor in inputs.items():
        assert_same_bits(name, tensor, before[name])
    return actual


def compare_mha(inputs: dict[str, Tensor], actual: dict[str, Tensor], **attributes: Any) -> None:
    """Every output of one mha call against the reference."""
    expected = reference.mha(**inputs, **attributes, output_qk=True)
    assert expected.qk is not None
    dtype, num_heads = inputs["query"].dtype, attributes["num_heads"]
    q, k, v = reference._mha_heads(inputs["query"], *(inputs.get(name) for name in ("key", "value", "bias")), num_heads)
    factor = attributes.get("scale", 0.0) or 1 / math.sqrt(q.shape[3])
    allowed = tolerance(
        dtype,
        compute=compute_dtype(dtype),
        score=abs(factor) * longest_row(q) * max(longest_row(k), longest_row(expected.present_key)),
        logit=largest(expected.qk.amax(-1)) if expected.qk.shape[-1] else 0.0,
        value=max(largest(v), largest(expected.present_value)),
        keys=expected.qk.shape[-1],
        rounded_operands="bias" in inputs,
    )
    assert actual["output"].dtype == dtype
    assert_close("output", actual["output"], expected.output, allowed.output)
    for name in ("present_key", "present_value"):
        if name in actual:
            assert actual[name].dtype == dtype
            exact = "bias" not in inputs
            assert_close(name, actual[name], getattr(expected, name), 0.0, -unit_roundoff(dtype) if exact else unit_roundoff(torch.float32))
    if "qk" in actual:
        assert actual["qk"].dtype == dtype
        assert_close("qk", actual["qk"], expected.qk, allowed.score)


def check_mha(case: MhaCase, device: str | torch.device) -> dict[str, Tensor]:
    """Run one case on one device and compare all that it returns. The inputs must be left alone."""
    inputs = make_mha_inputs(case, device)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    poison_memory(device, inputs.values())
    with threads(2):
        actual = call_mha(inputs, case.qk, **case.attributes())
    compare_mha(inputs, actual, **case.attributes())
    for name, tensor in inputs.items():
        assert_same_bits(name, tensor, before[name])
    return actual
