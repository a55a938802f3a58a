"""Sizes past 2^31: offsets are 64-bit everywhere. On the CPU the large tensors are address space that is mostly never touched."""

from __future__ import annotations

import pytest
import torch
from cases import INF, Case, Source, compare_attention, make_inputs
from torch import Tensor

from torch_onnx_attn import reference

attention = torch.ops.onnx_attn.attention
ops = torch.ops.onnx_attn

FAR = 2**31 + 3  # elements


def spread(x: Tensor, axis: int, stride: int) -> Tensor:
    """The same values with `stride` elements between neighbours on one axis, in storage that is otherwise untouched."""
    order = [a for a in range(x.dim()) if a != axis] + [axis]
    inner = 1
    strides = [0] * x.dim()
    for a in reversed(order[:-1]):
        strides[a] = inner
        inner *= x.shape[a]
    strides[axis] = stride
    storage = torch.empty((x.shape[axis] - 1) * stride + inner, dtype=x.dtype, device=x.device)
    return storage.as_strided(x.shape, strides).copy_(x)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["Q", "K", "V", "past_key", "past_value"])
def test_far_strides(axis: int, name: str, device: str) -> None:
    """Two batch entries, heads or rows that lie more than 2^31 elements apart."""
    sizes = {0: {"batch": 2}, 1: {"q_heads": 2, "kv_heads": 2}, 2: {"q_len": 2, "kv_len": 2}}[axis]
    case = Case(
        **{"dtype": torch.float16, "batch": 1, "q_heads": 1, "kv_heads": 1, "q_len": 1, "kv_len": 1, "past": 2, "head_size": 8} | sizes
    )
    inputs = make_inputs(case, device)
    if not name.startswith("past"):
        inputs = {key: x for key, x in inputs.items() if not key.startswith("past")}
    far = inputs | {name: spread(inputs[name], axis, FAR)}
    actual = ops.attention.kv(**far)[0] if name.startswith("past") else attention(**far)
    compare_attention(inputs, {"Y": actual})


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["bool", "float16"])
def test_far_masks(axis: int, kind: str, device: str) -> None:
    inputs = make_inputs(Case(batch=2, q_heads=2, kv_heads=2, q_len=2, kv_len=5, head_size=8, mask=kind), device)
    shape = [2 if a == axis else 1 for a in range(3)]
    mask = inputs["attn_mask"][: shape[0], : shape[1], : shape[2]]
    compare_attention(inputs | {"attn_mask": mask}, {"Y": attention(**inputs | {"attn_mask": spread(mask, axis, FAR)})})


def test_far_rows_of_a_wide_mask(device: str) -> None:
    """Row r of a bool mask begins at r * columns: past 2^31 from row 46341 on if there are as many columns."""
    columns = 2**31 + 64
    keep = torch.empty(2 * columns, dtype=torch.bool, device=device).view(2, columns)
    inputs = make_inputs(Case(batch=1, q_len=2, kv_len=70, head_size=8), device)
    keep[:, :70] = torch.arange(70, device=device) % 3 > 0
    keep[1, :70] = ~keep[0, :70]
    mask = keep[:, :70]
    compare_attention(inputs | {"attn_mask": mask.clone()}, {"Y": attention(**inputs, attn_mask=mask)})


def test_scatter_far(device: str) -> None:
    cache = torch.zeros(2, 3, 4, dtype=torch.int8, device=device)
    far = spread(cache, 0, FAR)
    update = torch.arange(8, dtype=torch.int8, device=device).view(2, 1, 4)
    indices = torch.tensor([2, 1], device=device)
    ops.tensor_scatter_(far, update, indices, axis=1)
    assert torch.equal(far, reference.tensor_scatter(cache, update, indices, axis=1))
    far_update = spread(update, 0, FAR)
    assert torch.equal(ops.tensor_scatter(cache, far_update, indices, axis=1), reference.tensor_scatter(cache, update, indices, axis=1))


def test_cached_far(device: str) -> None:
    inputs = make_inputs(Case(dtype=torch.float16, batch=2, q_heads=1, kv_heads=1, q_len=1, kv_len=1, head_size=8), device)
    caches = {name: torch.randn(2, 1, 4, 8).to(device, torch.float16) for name in ("key_cache", "value_cache")}
    lengths = torch.tensor([1, 3], device=device)
    expected = reference.attention_cached(**inputs, **caches, cache_lengths=lengths)
    far = {name: spread(x, 0, FAR) for name, x in caches.items()}
    Y = ops.attention_cached(**inputs, **far, cache_lengths=lengths)
    assert torch.equal(far["key_cache"], expected.key_cache) and torch.equal(far["value_cache"], expected.value_cache)
    torch.testing.assert_close(Y.double(), expected.Y, atol=3e-3, rtol=0)


@pytest.mark.parametrize("batch", [65535, 65537, 70000])
def test_many_entries(batch: int, device: str) -> None:
    """Batch or batch * heads beyond what one axis of a CUDA grid holds."""
    source = Source(batch, device)
    Q, K, V = (source.normal(batch, 1, 2, 8, dtype=torch.float16) for _ in range(3))
    compare_attention({"Q": Q, "K": K, "V": V}, {"Y": attention(Q, K, V)})
    Q, K, V = (source.normal(1, batch, 2, 8, dtype=torch.float16) for _ in range(3))
    compare_attention({"Q": Q, "K": K, "V": V}, {"Y": attention(Q, K, V)})


def test_many_rows(device: str) -> None:
    """Few keys and 70000 queries, and the reverse."""
    source = Source("rows", device)
    for q_len, kv_len in ((70000, 3), (2, 70000)):
        Q, K, V = (source.normal(1, 1, rows, 8) for rows in (q_len, kv_len, kv_len))
        compare_attention({"Q": Q, "K": K, "V": V}, {"Y": attention(Q, K, V)})


# ---------------------------------------------------------------------------------------------------------------------
# Large in truth: CUDA only


@pytest.mark.gpu
@pytest.mark.slow
def test_mask_of_more_than_2_to_the_32() -> None:
    """q_len = kv_len = 65600 and a causal bool mask, against is_causal in the last rows."""
    n = 65600
    Q, K, V = (torch.randn(1, 1, n, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    mask = torch.ones(n, n, dtype=torch.bool, device="cuda").tril_()
    by_mask, by_flag = attention(Q, K, V, mask), attention(Q, K, V, is_causal=True)
    torch.testing.assert_close(by_mask[:, :, -300:], by_flag[:, :, -300:], atol=1e-3, rtol=1e-2)
    rows = Q[:, :, -40:]
    visible = torch.arange(n, device="cuda") <= torch.arange(n - 40, n, device="cuda")[:, None]
    compare_attention({"Q": rows, "K": K, "V": V, "attn_mask": visible}, {"Y": by_mask[:, :, -40:]})


@pytest.mark.gpu
@pytest.mark.slow
def test_tensors_of_more_than_2_to_the_31() -> None:
    """2.5e9 elements in Q, K, V and Y each: the last entries are as good as the first."""
    shape = (600, 32, 1024, 128)
    Q = torch.randn(shape, device="cuda", dtype=torch.float16)
    K, V = Q.roll(1, 0), Q.roll(2, 0)
    Y = attention(Q, K, V, is_causal=True)
    for entry in (0, 300, 599):
        part = {name: x[entry : entry + 1, -2:, :] for name, x in {"Q": Q, "K": K, "V": V}.items()}
        compare_attention(part, {"Y": Y[entry : entry + 1, -2:]}, is_causal=True)


@pytest.mark.gpu
@pytest.mark.slow
def test_decode_over_a_cache_of_more_than_2_to_the_31() -> None:
    shape = (4, 8, 600000, 128)
    K = torch.randn(shape, device="cuda", dtype=torch.float16)
    V = K.flip(2)
    Q = torch.randn(4, 8, 1, 128, device="cuda", dtype=torch.float16)
    lengths = torch.tensor([600000, 599999, 5, 0], device="cuda")
    Y = attention(Q, K, V, nonpad_kv_seqlen=lengths)
    for entry in range(4):
        part = {name: x[entry : entry + 1, -1:] for name, x in {"Q": Q, "K": K, "V": V}.items()}
        compare_attention(part | {"nonpad_kv_seqlen": lengths[entry : entry + 1]}, {"Y": Y[entry : entry + 1, -1:]})


@pytest.mark.gpu
@pytest.mark.slow
def test_scores_of_more_than_2_to_the_31() -> None:
    n = 46400
    Q, K, V = (torch.randn(1, 1, n, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    _, scores = attention.qk(Q, K, V, is_causal=True, qk_matmul_output_mode=2)
    exact = Q[0, 0, -3:].double() @ K[0, 0].double().T / 8
    exact = exact.masked_fill(torch.arange(n, device="cuda") > torch.arange(n - 3, n, device="cuda")[:, None], -INF)
    torch.testing.assert_close(scores[0, 0, -3:].double(), exact, atol=1e-2, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.slow
def test_memory_is_linear_in_the_lengths() -> None:
    """A bool mask and grouped heads at 16k: no more than the inputs, the output and a little."""
    Q = torch.randn(1, 32, 16384, 64, device="cuda", dtype=torch.bfloat16)
    K, V = (torch.randn(1, 8, 16384, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask = torch.ones(1, 1, 16384, 16384, dtype=torch.bool, device="cuda").tril_().expand(1, 32, -1, -1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    Y = attention(Q, K, V, mask)
    assert torch.cuda.max_memory_allocated() - before < Y.numel() * 2 + 64 * 2**20
