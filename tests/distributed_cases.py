"""Calls whose rows or cache lie on several ranks, as data, and their checks against the whole in float64. Run inside a world."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from cases import (
    INF,
    NAN,
    Case,
    Source,
    _short_repr,
    assert_close,
    compare_attention,
    compute_dtype,
    largest,
    make_inputs,
    poison_past,
    unit_roundoff,
)
from distributed_world import Ranks, message
from torch import Tensor

from torch_onnx_attn import reference
from torch_onnx_attn.distributed import (
    context_parallel_attention,
    context_parallel_cached,
    gather_sequence,
    merge_over_ranks,
    shard_cache,
    shard_sequence,
)


@dataclasses.dataclass(frozen=True, repr=False)
class Rows:
    """One context_parallel_attention: the case is the whole, q_len and kv_len its lengths."""

    case: Case
    method: str
    order: str = "contiguous"
    ranks: int = 2

    __repr__ = _short_repr

    def __str__(self) -> str:
        return f"{self.method}-{self.order}-{self.ranks}-{self.case}"


def check_rows(ranks: Ranks, given: Rows) -> None:
    case, mesh = given.case, ranks.mesh(given.ranks)
    inputs = make_inputs(case, ranks.device)
    Q, K, V = (shard_sequence(inputs[name], mesh, order=given.order) for name in ("Q", "K", "V"))
    mask = inputs.get("attn_mask")
    if mask is not None and mask.dim() >= 2 and mask.shape[-2] > 1:
        mask = shard_sequence(mask, mesh, order=given.order)
    before = [tensor.clone() for tensor in (Q, K, V)]
    Y = context_parallel_attention(
        Q,
        K,
        V,
        mask,
        mesh=mesh,
        method=given.method,
        order=given.order,
        nonpad_kv_seqlen=inputs.get("nonpad_kv_seqlen"),
        **case.attributes(),
    )
    assert Y.shape == (*Q.shape[:3], V.shape[3]) and Y.dtype == Q.dtype
    for tensor, copy in zip((Q, K, V), before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num()), "an input was written"
    whole = gather_sequence(Y, mesh, order=given.order)
    if given.method == "ring":
        compare_merged(inputs, whole, **case.attributes())
    else:
        compare_attention(inputs, {"Y": whole}, **case.attributes())


def compare_merged(inputs: dict[str, Tensor], Y: Tensor, **attributes: Any) -> None:
    """As compare_attention, but where the op computes in float64: parts are weighted by log-sum-exps, which it returns in float32."""
    if compute_dtype(Y.dtype, attributes.get("softmax_precision")) != torch.float64:
        return compare_attention(inputs, {"Y": Y}, **attributes)
    expected = reference.attention(**inputs, **attributes, return_lse=True)
    assert expected.lse is not None
    weight = 2 * unit_roundoff(torch.float32) * largest(expected.lse)
    if Y.dtype != torch.float64:  # and sums are in float32
        weight += unit_roundoff(torch.float32) * (8 + math.sqrt(inputs["K"].shape[2])) + unit_roundoff(Y.dtype)
    return assert_close("Y", Y, expected.Y, weight * largest(inputs["V"]))


@dataclasses.dataclass(frozen=True, repr=False)
class Decoding:
    """Steps of context_parallel_cached. The case's q_len rows are appended at each step."""

    case: Case
    lengths: tuple[int, ...] = (5, 30)
    capacity: int = 48
    block_size: int = 4
    steps: int = 3
    ranks: int = 2
    capture: bool = False  # in one CUDA graph that is replayed

    __repr__ = _short_repr


def check_decoding(ranks: Ranks, given: Decoding) -> None:
    """Every step against attention_cached of the reference, on the result and on what the caches hold afterwards."""
    case, mesh = given.case, ranks.mesh(given.ranks)
    source = Source(given, ranks.device)
    heads, rows = case.kv_heads, case.q_len
    lengths = torch.tensor(given.lengths, device=ranks.device)
    filled = [source.normal(case.batch, heads, given.capacity, case.head_size, dtype=case.dtype) for _ in range(2)]
    whole = [poison_past(cache, lengths) for cache in filled]
    mine = [shard_cache(cache, mesh, block_size=given.block_size).contiguous() for cache in whole]
    mask = None
    if case.mask is not None:
        columns = given.capacity if case.mask_columns is None else case.mask_columns
        sizes = {"b": case.batch, "h": case.q_heads, "q": rows, "k": columns, "1": 1}
        shape = [sizes[axis] for axis in case.mask_axes]
        mask = source.uniform(*shape).to(ranks.device) < 0.7 if case.mask == "bool" else source.normal(*shape, dtype=case.dtype)

    def fresh(heads: int) -> Tensor:
        return source.normal(case.batch, heads, rows, case.head_size, dtype=case.dtype)

    static = [fresh(case.q_heads), fresh(heads), fresh(heads), lengths.clone()]

    def step() -> Tensor:
        Q, K, V, used = static
        options = {"mesh": mesh, "block_size": given.block_size, "attn_mask": mask}
        return context_parallel_cached(Q, K, V, *mine, used, **options, **case.attributes())

    run = _captured(step, mine) if given.capture else step
    for _ in range(given.steps):
        for tensor in static[:3]:
            tensor.copy_(source.normal(*tensor.shape, dtype=case.dtype))
        Q, K, V, used = (tensor.clone() for tensor in static)
        Y = run()
        whole = list(reference.attention_cached(Q, K, V, *whole, used, attn_mask=mask, **case.attributes())[1:])
        inputs = {"Q": Q, "K": whole[0], "V": whole[1], "nonpad_kv_seqlen": used + rows}
        compare_merged(inputs if mask is None else inputs | {"attn_mask": mask}, Y, **case.attributes())
        positions = shard_cache(torch.arange(given.capacity, device=ranks.device).reshape(1, 1, -1, 1), mesh, block_size=given.block_size)
        for cache, expected in zip(mine, whole, strict=True):
            part = shard_cache(expected, mesh, block_size=given.block_size)
            free = positions.flatten() >= (used + rows)[:, None]  # [B, C]
            next_free = free & (free.cumsum(1) == 1)  # may hold a row that fell to another rank
            same = (cache.nan_to_num(7.0) == part.nan_to_num(7.0)).all(3).all(1)
            assert bool((same | next_free).all()), "the cache holds something else"
        static[3] += rows
        same = [torch.empty_like(Y) for _ in range(given.ranks)]
        dist.all_gather(same, Y.contiguous(), group=mesh.get_group())
        assert all(torch.equal(same[0], other) for other in same), "the ranks have different bits"


def _captured(step: Any, caches: list[Tensor]) -> Any:
    """The step as a graph; capturing it must leave the caches as they were."""
    saved = [cache.clone() for cache in caches]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        Y = step()
    for cache, copy in zip(caches, saved, strict=True):
        cache.copy_(copy)

    def replay() -> Tensor:
        graph.replay()
        return Y

    return replay


def check_rows_in_a_graph(ranks: Ranks, method: str) -> None:
    """A captured prefill, replayed with other values: the same bits as an eager call."""
    mesh = ranks.mesh()
    case = Case(dtype=torch.bfloat16, batch=1, q_heads=8, kv_heads=4, q_len=512, kv_len=512, head_size=64, is_causal=True)
    inputs = make_inputs(case, ranks.device)
    Q, K, V = (shard_sequence(inputs[name], mesh, order="zigzag") for name in ("Q", "K", "V"))
    graph = torch.cuda.CUDAGraph()
    options: dict[str, Any] = {"mesh": mesh, "method": method, "order": "zigzag", "is_causal": True}
    context_parallel_attention(Q, K, V, **options)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        Y = context_parallel_attention(Q, K, V, **options)
    for tensor in (Q, K, V):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    eager = context_parallel_attention(Q, K, V, **options)
    assert torch.equal(Y, eager)


def check_decoding_after_prefill(ranks: Ranks, size: int) -> None:
    """Rows of a contiguous prefill stay where they are: blocks of as many rows as a rank has continue them."""
    mesh, source, rows = ranks.mesh(size), Source("continue", ranks.device), 6
    prompt = [source.normal(1, heads, rows * size, 16) for heads in (4, 2, 2)]
    Q, K, V = (shard_sequence(tensor, mesh) for tensor in prompt)
    compare_attention(
        dict(zip("QKV", prompt, strict=True)),
        {"Y": gather_sequence(context_parallel_attention(Q, K, V, mesh=mesh, method="ring", is_causal=True), mesh)},
        is_causal=True,
    )
    caches = [torch.nn.functional.pad(tensor, (0, 0, 0, 2 * rows), value=NAN) for tensor in (K, V)]
    whole = [torch.nn.functional.pad(tensor, (0, 0, 0, 2 * rows * size), value=NAN) for tensor in prompt[1:]]
    used = torch.tensor([rows * size], device=ranks.device)
    for _ in range(2 * rows):
        new = [source.normal(1, heads, 1, 16) for heads in (4, 2, 2)]
        Y = context_parallel_cached(*new, *caches, used, mesh=mesh, block_size=rows)
        whole = list(reference.attention_cached(*new, *whole, used)[1:])
        used += 1
        compare_attention({"Q": new[0], "K": whole[0], "V": whole[1], "nonpad_kv_seqlen": used}, {"Y": Y})


def check_sequence_orders(ranks: Ranks, size: int) -> None:
    """Which rows lie where, spelled out."""
    mesh = ranks.mesh(size)
    whole = torch.arange(4 * size * 3, device=ranks.device).reshape(4 * size, 3)
    me = dist.get_rank(mesh.get_group())
    contiguous = whole[4 * me : 4 * me + 4]
    zigzag = torch.cat((whole[2 * me : 2 * me + 2], whole[4 * size - 2 * me - 2 : 4 * size - 2 * me]))
    assert torch.equal(shard_sequence(whole, mesh, axis=0), contiguous)
    assert torch.equal(shard_sequence(whole, mesh, axis=0, order="zigzag"), zigzag)
    assert torch.equal(gather_sequence(contiguous, mesh, axis=0), whole)
    assert torch.equal(gather_sequence(zigzag, mesh, axis=0, order="zigzag"), whole)
    for dtype in (torch.int16, torch.bool, torch.complex64):  # gloo itself sends none of them
        typed = (whole % 2).to(dtype)
        assert torch.equal(gather_sequence(shard_sequence(typed, mesh, axis=0), mesh, axis=0), typed)
    for order in ("contiguous", "zigzag"):
        assert gather_sequence(whole[:0], mesh, axis=0, order=order).shape == (0, 3)


def check_values_that_are_not_finite(ranks: Ranks) -> None:
    """Not-a-number and infinity come out as in one process, however the keys are split: never hidden by the merging of parts."""
    mesh, source = ranks.mesh(), Source("not finite", ranks.device)
    whole = [source.normal(1, heads, 8 * ranks.size, 8) for heads in (4, 2, 2)]
    for changed, position, value in ((1, 3, NAN), (1, 8 * ranks.size - 2, NAN), (2, 0, INF), (2, 9, INF), (2, 5, NAN)):
        tensors = [tensor.clone() for tensor in whole]
        tensors[changed][:, 0, position] = value
        for is_causal in (False, True):
            seeing = slice(position if is_causal else 0, None)  # what 0 times a value that nobody sees is, is left to each kernel
            expected = torch.ops.onnx_attn.attention(*tensors, is_causal=is_causal)[:, :, seeing]
            assert not bool(expected.isfinite().all())
            for method in METHODS:
                parts = [shard_sequence(tensor, mesh) for tensor in tensors]
                Y = context_parallel_attention(*parts, mesh=mesh, method=method, is_causal=is_causal)
                torch.testing.assert_close(gather_sequence(Y, mesh)[:, :, seeing], expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        Q = tensors[0][:, :, -1:]
        caches = [shard_cache(tensor, mesh, block_size=1) for tensor in tensors[1:]]
        found = merge_over_ranks(*torch.ops.onnx_attn.attention.lse(Q, *caches, return_lse=True), mesh)
        torch.testing.assert_close(found, torch.ops.onnx_attn.attention(Q, *tensors[1:]), rtol=1e-5, atol=1e-6, equal_nan=True)


def check_forward_only(ranks: Ranks) -> None:
    """A backward pass through what communicates is refused; it would miss what went through the other ranks."""
    mesh = ranks.mesh()
    Q, K, V = (torch.randn(1, 4, 4, 8, device=ranks.device, requires_grad=name == "K") for name in "QKV")
    results = [context_parallel_attention(Q, K, V, mesh=mesh, method=method) for method in METHODS]
    caches = [torch.zeros(1, 4, 64, 8, device=ranks.device) for _ in range(2)]
    lengths = torch.zeros(1, dtype=torch.int64, device=ranks.device)
    results.append(context_parallel_cached(Q, K, V, *caches, lengths, mesh=mesh))
    results += [gather_sequence(K, mesh), merge_over_ranks(K, torch.zeros(1, 4, 4, device=ranks.device), mesh)]
    for result in results:
        assert "onnx_attn is forward only" in message(lambda result=result: result.sum().backward())
    with torch.no_grad():
        assert not context_parallel_attention(Q, K, V, mesh=mesh).requires_grad


# ---------------------------------------------------------------------------------------------------------------------
# The lists

PREFILL = Case(q_heads=4, kv_heads=4, q_len=24, kv_len=24, head_size=8)
METHODS = ("allgather", "ulysses", "ring")


def _with(**fields: Any) -> Case:
    return dataclasses.replace(PREFILL, **fields)


FEATURES = {
    "plain": PREFILL,
    "causal": _with(is_causal=True),
    "causal float64": _with(is_causal=True, dtype=torch.float64),
    "causal bfloat16": _with(is_causal=True, dtype=torch.bfloat16),
    "layout": _with(is_causal=True, layout="bshd"),
    "strides": _with(is_causal=True, layout="loose"),
    "left window": _with(is_causal=True, left_window_size=5),
    "short window": _with(is_causal=True, left_window_size=0),
    "both windows": _with(left_window_size=4, right_window_size=3),
    "right window": _with(right_window_size=7),
    "open right": _with(left_window_size=9),
    "lengths": _with(batch=5, lengths="ragged"),
    "lengths causal": _with(batch=5, lengths="ragged", is_causal=True),
    "lengths windows": _with(batch=5, lengths="ragged", left_window_size=6, right_window_size=2),
    "lengths left window": _with(batch=5, lengths="ragged", left_window_size=6),
    "lengths right window": _with(batch=5, lengths="ragged", right_window_size=14),
    "lengths full causal": _with(lengths="full", is_causal=True, left_window_size=7),
    "softcap scale": _with(is_causal=True, softcap=2.0, scale=0.7),
    "softmax precision": _with(softmax_precision=11, scale=0.0),
    "cross": _with(q_len=16, kv_len=40),
    "cross causal": _with(q_len=40, kv_len=16, is_causal=True),
    "cross causal longer keys": _with(q_len=16, kv_len=40, is_causal=True, left_window_size=10),
    "cross lengths causal": _with(batch=5, q_len=16, kv_len=40, lengths="ragged", is_causal=True),
    "value size": _with(v_head_size=16, is_causal=True),
    "bool mask": _with(mask="bool"),
    "bool mask of heads, causal": _with(mask="bool", mask_axes="1hqk", is_causal=True),
    "float mask": _with(mask="same", mask_axes="qk", left_window_size=11),
    "integer mask": _with(mask="int64", mask_axes="b1qk"),
    "mask of keys": _with(mask="bool", mask_axes="b11k", is_causal=True),
    "mask of heads and keys": _with(mask="same", mask_axes="1h1k"),
    "mask rank 1": _with(mask="same", mask_axes="k"),
    "short mask": _with(mask="bool", mask_columns=9),
    "short float mask": _with(mask="same", mask_columns=14, is_causal=True),
    "no rows": _with(q_len=0, kv_len=16, mask="bool", lengths="full", is_causal=True),
    "no keys": _with(q_len=16, kv_len=0, mask="same", lengths="full", left_window_size=2),
    "nothing": _with(q_len=0, kv_len=0, mask="bool", mask_axes="1k"),
    "no batch": _with(batch=0, is_causal=True),
    "16-bit integers": _with(mask="int16"),
    "16-bit integers of rows": _with(mask="int16", mask_axes="1qk", is_causal=True),
    "softmax precision windows": _with(softmax_precision=11, mask="same", left_window_size=5, scale=1.3),
    "mask and lengths causal": _with(batch=5, mask="bool", lengths="ragged", is_causal=True),
    "float mask and lengths windows": _with(
        batch=5, mask="same", mask_columns=20, lengths="ragged", left_window_size=8, right_window_size=5
    ),
    "integer mask and lengths causal": _with(batch=5, mask="int32", mask_columns=20, lengths="ragged", is_causal=True),
}
GROUPED = {
    "grouped": _with(q_heads=8, kv_heads=4, is_causal=True),
    "grouped 2": _with(q_heads=8, kv_heads=2, is_causal=True),
    "multi-query": _with(q_heads=8, kv_heads=1, is_causal=True, left_window_size=8),
}
ROWS = [
    Rows(case, method, order, ranks)
    for case in (*FEATURES.values(), *GROUPED.values())
    for method in METHODS
    for order in ("contiguous", "zigzag")
    for ranks in (2, 4)
]
STEP = Case(q_heads=4, kv_heads=2, q_len=1, head_size=16)


def _step(**fields: Any) -> Case:
    return dataclasses.replace(STEP, **fields)


DECODING = [
    Decoding(case, **more)
    for case, more in (
        (STEP, {}),
        (STEP, {"block_size": 1}),
        (STEP, {"block_size": 12, "lengths": (23, 35)}),
        (STEP, {"lengths": (0, 11), "steps": 6, "block_size": 2}),
        (STEP, {"lengths": (39, 45), "block_size": 12}),  # the first ranks are full
        (_step(q_len=3), {"lengths": (36, 39)}),
        (_step(is_causal=True, softcap=3.0, scale=0.4), {}),
        (_step(q_len=5, is_causal=True), {}),
        (_step(q_len=5), {"lengths": (0, 33)}),
        (_step(q_len=5, is_causal=True, left_window_size=6), {"block_size": 3}),
        (_step(left_window_size=6), {}),
        (_step(q_len=3, left_window_size=6, right_window_size=1), {"block_size": 1}),
        (_step(mask="bool"), {}),
        (_step(q_len=2, mask="same", mask_axes="1hqk", is_causal=True), {}),
        (_step(mask="bool", mask_axes="b11k", mask_columns=25), {"block_size": 2}),
        (_step(mask="same", mask_axes="k", mask_columns=25, left_window_size=12), {}),
        (_step(dtype=torch.bfloat16, q_heads=8, kv_heads=1, head_size=64), {}),
        (_step(dtype=torch.float64), {}),
    )
]
