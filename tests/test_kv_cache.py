"""nn.KVCache: steps through the cache give what attention over the whole sequence gives, on the device and without a host read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FLOAT_DTYPES
from torch import Tensor

from torch_onnx_attn import reference
from torch_onnx_attn.nn import KVCache

BATCH, HEADS, KV_HEADS, SIZE, CAPACITY, LAYERS = 2, 4, 2, 8, 16, 2
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def new_cache(device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any) -> KVCache:
    return KVCache(LAYERS, BATCH, KV_HEADS, CAPACITY, SIZE, **options, device=device, dtype=dtype)


def rows(count: int, device: str = "cpu", dtype: torch.dtype = torch.float32, v_size: int = SIZE) -> tuple[Tensor, Tensor, Tensor]:
    def random(heads: int, columns: int) -> Tensor:
        return torch.randn(BATCH, heads, count, columns).to(device, dtype)

    return random(HEADS, SIZE), random(KV_HEADS, SIZE), random(KV_HEADS, v_size)


def exact(Q: Tensor, K: Tensor, V: Tensor, **attributes: Any) -> Tensor:
    """Causal attention over whole sequences in float64."""
    return reference.attention(*(x.double().cpu() for x in (Q, K, V)), is_causal=True, **attributes)[0]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("attributes", [{}, {"scale": 0.3, "softcap": 2.0}, {"left_window_size": 3}], ids=["plain", "softcap", "window"])
def test_steps_are_slices_of_the_whole(dtype: torch.dtype, attributes: dict[str, Any], device: str) -> None:
    cache = new_cache(device, dtype, v_head_size=6)
    layers = [rows(10, device, dtype, v_size=6) for _ in range(LAYERS)]
    for layer in range(LAYERS):  # what is past the lengths must not matter
        cache.key(layer).fill_(float("nan"))
        cache.value(layer).fill_(float("nan"))
    expected = [exact(*tensors, **attributes) for tensors in layers]
    start = 0
    for count in (5, 1, 1, 3):
        step = slice(start, start + count)
        for layer, tensors in enumerate(layers):
            Y = cache.attend(layer, *(x[:, :, step] for x in tensors), **attributes)
            assert Y.shape == (BATCH, HEADS, count, 6) and Y.dtype == dtype
            torch.testing.assert_close(Y.double().cpu(), expected[layer][:, :, step], rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        cache.advance(count)
        start += count
    assert cache.lengths.tolist() == [10, 10]


def test_prompts_of_different_lengths(device: str) -> None:
    """Padded on the right; the padding's rows are overwritten by the next step."""
    cache, lengths = new_cache(device), [3, 5]
    Q, K, V = rows(5, device)
    K[0, :, 3:], V[0, :, 3:] = 1e3, 1e3
    Y = cache.attend(0, Q, K, V)
    cache.advance(torch.tensor(lengths, device=device))
    q, k, v = rows(1, device)
    step = cache.attend(0, q, k, v)
    assert cache.positions(1).tolist() == [[3], [5]]
    for entry, length in enumerate(lengths):
        whole = [torch.cat((x[entry : entry + 1, :, :length], y[entry : entry + 1]), 2) for x, y in ((Q, q), (K, k), (V, v))]
        expected = exact(*whole).float().to(device)
        torch.testing.assert_close(Y[entry : entry + 1, :, :length], expected[:, :, :length], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(step[entry : entry + 1], expected[:, :, length:], rtol=1e-5, atol=1e-5)


def test_append_then_attend_is_attend_with_keys(device: str) -> None:
    """A layer that borrows another's cache attends to rows that are written and not yet counted."""
    one, two = new_cache(device), new_cache(device)
    for count in (4, 1):
        Q, K, V = rows(count, device)
        expected = one.attend(0, Q, K, V)
        two.append(0, K, V)
        torch.testing.assert_close(two.attend(0, Q), expected, rtol=0, atol=0)
        for cache in (one, two):
            cache.advance(count)
    assert torch.equal(one.key(0), two.key(0)) and torch.equal(one.value(0), two.value(0))


def test_a_mask_spans_the_capacity(device: str) -> None:
    cache = new_cache(device)
    Q, K, V = rows(4, device)
    keep = torch.rand(BATCH, 1, 4, CAPACITY, device=device) < 0.7
    Y = cache.attend(0, Q, K, V, attn_mask=keep)
    expected = exact(Q, K, V, attn_mask=keep[..., :4].cpu()).float().to(device)
    torch.testing.assert_close(Y, expected, rtol=1e-5, atol=1e-5)


def test_without_causality_every_valid_row_counts(device: str) -> None:
    cache = new_cache(device)
    Q, K, V = rows(3, device)
    expected = reference.attention(*(x.double().cpu() for x in (Q, K, V)))[0].float().to(device)
    torch.testing.assert_close(cache.attend(0, Q, K, V, is_causal=False), expected, rtol=1e-5, atol=1e-5)


def test_reorder_continues_other_sequences(device: str) -> None:
    cache = new_cache(device)
    Q, K, V = rows(4, device)
    cache.attend(0, Q, K, V)
    cache.advance(torch.tensor([2, 4], device=device))
    cache.reorder(torch.tensor([1, 1], device=device))
    assert cache.lengths.tolist() == [4, 4]
    q, k, v = rows(1, device)
    Y = cache.attend(0, q, k, v)
    whole = [torch.cat((x[[1, 1]], y), 2) for x, y in ((Q, q), (K, k), (V, v))]
    torch.testing.assert_close(Y, exact(*whole)[:, :, 4:].float().to(device), rtol=1e-5, atol=1e-5)


def test_reset(device: str) -> None:
    cache = new_cache(device)
    cache.attend(0, *rows(4, device))
    cache.advance(4)
    cache.reset(torch.tensor([1], device=device))
    assert cache.lengths.tolist() == [4, 0]
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    Q, K, V = rows(2, device)
    torch.testing.assert_close(cache.attend(0, Q, K, V), exact(Q, K, V).float().to(device), rtol=1e-5, atol=1e-5)


def test_buffers_follow_the_module_and_stay_out_of_its_state() -> None:
    cache = new_cache()
    assert cache.state_dict() == {}
    cache.advance(3)
    cache.to(torch.bfloat16)
    assert cache.key(1).dtype == cache.value(0).dtype == torch.bfloat16
    assert cache.lengths.dtype == torch.int64 and cache.lengths.tolist() == [3, 3]
    assert cache.to("meta").key(0).device.type == "meta"
    assert (new_cache(v_head_size=5).value(0).shape, new_cache().key(1).shape) == ((2, 2, 16, 5), (2, 2, 16, 8))


# ------------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("name", ["layers", "batch", "kv_heads", "capacity", "head_size", "v_head_size"])
def test_sizes_must_be_positive(name: str) -> None:
    sizes = {"layers": 1, "batch": 1, "kv_heads": 1, "capacity": 1, "head_size": 8, "v_head_size": 8} | {name: 0}
    with pytest.raises(ValueError, match=f"^{name}: is 0, must be a positive integer"):
        KVCache(**sizes)
    for wrong in (-1, 1.5, "3", True):
        with pytest.raises(ValueError, match=f"^{name}: is {wrong!r}, must be a positive integer"):
            KVCache(**(sizes | {name: wrong}))


def test_other_mistakes_are_named() -> None:
    cache = new_cache()
    Q, K, V = rows(3)
    with pytest.raises(ValueError, match=r"dtype: is torch\.int8, must be float16"):
        new_cache(dtype=torch.int8)
    with pytest.raises(IndexError, match="layer: is 2, must be 0 to 1"):
        cache.key(2)
    with pytest.raises(ValueError, match="K, V: must be given together"):
        cache.attend(0, Q, K)
    for wrong in (Q[0], "Q", None):
        with pytest.raises(ValueError, match=r"^Q: is .*must be a tensor \[batch, heads, rows, head_size\]"):
            cache.attend(0, wrong, K, V)
    with pytest.raises((RuntimeError, TypeError), match=r"'K'"):
        cache.attend(0, Q, [1], V)
    for wrong in (None, "K", K[0]):
        with pytest.raises(ValueError, match=r"^K: is .*must be torch\.float32 \[2, 2, rows, 8\]"):
            cache.append(0, wrong, V)
    with pytest.raises(ValueError, match=r"^K: has 17 rows, must have at most the capacity of 16"):
        cache.append(0, *rows(17)[1:])
    for wrong in (-3, "x", 1.5):
        with pytest.raises(ValueError, match=f"^rows: is {wrong!r}, must be an integer from 0 on"):
            cache.positions(wrong)
    for wrong in ([0, 2], [-3, 0]):
        with pytest.raises(IndexError, match=r"^entries: .*must be 0 to 1"):
            cache.reorder(torch.tensor(wrong))
        with pytest.raises(IndexError, match=r"^entries: .*must be 0 to 1"):
            cache.reset(torch.tensor(wrong))
    for layer in (-1, "0", 0.0, True):
        with pytest.raises(IndexError, match=f"layer: is {layer!r}, must be 0 to 1"):
            cache.attend(layer, Q, K, V)
    with pytest.raises(ValueError, match=r"K: has 2 rows, must have the 3 of Q"):
        cache.attend(0, Q, K[:, :, :2], V[:, :, :2])
    with pytest.raises(ValueError, match=r"entries: is torch\.int64 \[3\], must be an int64 tensor of shape \[batch\] = \[2\]"):
        cache.reorder(torch.zeros(3, dtype=torch.int64))
    for wrong in ([1, 0], torch.ones(2), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"^entries: is .*must be an int64 tensor"):
            cache.reorder(wrong)
    for wrong in ([0], 0, torch.tensor([True, False]), torch.zeros(1, 1, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"^entries: is .*must be an int64 tensor of one axis"):
            cache.reset(wrong)
    for wrong in (-1, 1.5, True, [1, 1], torch.ones(3, dtype=torch.int64), torch.ones(2), torch.ones(2, 1, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"^rows: is "):
            cache.advance(wrong)
    assert cache.lengths.tolist() == [0, 0]
    with pytest.raises(RuntimeError, match=r"^K: is torch\.float16|^K: .*float16"):
        cache.attend(0, Q, K.half(), V)
    with pytest.raises(RuntimeError, match=r"value_cache: has shape \[2, 2, 16, 8\]"):
        cache.attend(0, Q, K, V[..., :4])
    assert all(bool((cache.key(layer) == 0).all()) for layer in range(LAYERS))


@pytest.mark.parametrize("wrong", ["rows", "columns", "heads", "batch", "axes", "dtype"])
def test_append_writes_both_or_neither(wrong: str) -> None:
    cache = new_cache()
    _, K, V = rows(3)
    bad = {"rows": V[:, :, :2], "columns": V[..., :4], "heads": V[:, :1], "batch": V[:1], "axes": V[0], "dtype": V.half()}[wrong]
    with pytest.raises(ValueError, match=r"^V: is .*must be torch\.float32 \[2, 2, 3, 8\]"):
        cache.append(0, K, bad)
    assert not cache.key(0).any() and not cache.value(0).any()


def test_a_sequence_that_outgrows_the_capacity(device: str) -> None:
    cache = new_cache(device)
    cache.advance(torch.tensor([2, CAPACITY - 1], device=device))
    cache.check()
    if device == "cpu":
        with pytest.raises(RuntimeError, match="cache_lengths"):
            cache.attend(0, *rows(2))
    else:
        cache.attend(0, *rows(2, device))
    cache.advance(2)
    with pytest.raises(RuntimeError, match="lengths: entry 1 has 17 rows, the capacity is 16"):
        cache.check()


# ------------------------------------------------------------------------------------------------------ compile and graphs


class Step(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.cache = new_cache(device)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        first = self.cache.attend(0, Q, K, V, left_window_size=6)
        second = self.cache.attend(1, first, K, V)
        self.cache.advance(Q.shape[2])
        return second


def test_compiled_steps(device: str) -> None:
    plain, step = Step(device), Step(device)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        for count in (4, 1, 1, 3):
            inputs = rows(count, device)
            torch.testing.assert_close(compiled(*inputs), plain(*inputs), rtol=1e-6, atol=1e-6)
    assert step.cache.lengths.tolist() == [9, 9]
    for layer in range(LAYERS):
        torch.testing.assert_close(step.cache.key(layer), plain.cache.key(layer), rtol=0, atol=0)


def test_compiled_steps_write_the_caches_in_place() -> None:
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _example: Any) -> Any:
        graphs.append(module.graph)
        return module

    with torch.no_grad():
        torch.compile(Step("cpu"), fullgraph=True, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep))(*rows(1))
    targets = [str(node.target) for node in graphs[0].nodes]
    assert not any("tensor_scatter" in target for target in targets)
    assert sum("attention_cached" in target or "auto_functionalized" in target for target in targets) == 2


@pytest.mark.gpu
def test_a_captured_step_follows_the_lengths() -> None:
    plain, step = Step("cuda"), Step("cuda")
    steps = [rows(1, "cuda") for _ in range(5)]
    inputs = tuple(x.clone() for x in steps[0])
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = step(*inputs)
        step.cache.reset()
        for tensors in steps:
            for static, tensor in zip(inputs, tensors, strict=True):
                static.copy_(tensor)
            graph.replay()
            torch.testing.assert_close(output, plain(*tensors), rtol=1e-5, atol=1e-5)
    assert step.cache.lengths.tolist() == [5, 5]


@pytest.mark.gpu
def test_no_host_read() -> None:
    cache = new_cache("cuda")
    entries, inputs = torch.tensor([1, 0], device="cuda"), rows(2, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.attend(0, *inputs)
        cache.append(1, *inputs[1:])
        cache.attend(1, inputs[0])
        cache.positions(2)
        cache.advance(2)
        cache.reorder(entries)
        cache.reset(entries)
    finally:
        torch.cuda.set_sync_debug_mode("default")
