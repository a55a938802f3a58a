"""Generation: one captured step at every length from 1 to capacity, torch.compile's own graphs, and memory over many steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_onnx_attn  # noqa: F401

ops = torch.ops.onnx_attn

CAPACITY = 2112  # crosses several of the fixed positions at which keys are split
BATCH, Q_HEADS, KV_HEADS, HEAD_SIZE = 2, 8, 2, 64


def random(*shape: int, device: str = "cuda") -> Tensor:
    return torch.randn(*shape, dtype=torch.float16, device=device)


def step_inputs(device: str = "cuda") -> dict[str, Tensor]:
    heads = {"Q": Q_HEADS, "K": KV_HEADS, "V": KV_HEADS}
    return {name: random(BATCH, count, 1, HEAD_SIZE, device=device) for name, count in heads.items()}


def cache(device: str = "cuda", heads: int = KV_HEADS) -> Tensor:
    return random(BATCH, heads, CAPACITY, HEAD_SIZE, device=device)


class Step:
    """One decode step over tensors that stay where they are. ``length`` [1] on the device holds the number of keys after the step."""

    def __init__(self) -> None:
        self.length = torch.ones(1, dtype=torch.int64, device="cuda")

    def run(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def written(self) -> tuple[Tensor, ...]:
        return ()


class Nonpad(Step):
    def __init__(self) -> None:
        super().__init__()
        self.Q, self.K, self.V = step_inputs()["Q"], cache(), cache()

    def run(self) -> tuple[Tensor, ...]:
        return (ops.attention(self.Q, self.K, self.V, nonpad_kv_seqlen=self.length.expand(BATCH), is_causal=True),)


class Cached(Step):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.key_cache, self.value_cache = step_inputs(), cache(), cache()

    def run(self) -> tuple[Tensor, ...]:
        lengths = (self.length - 1).expand(BATCH)
        return (ops.attention_cached(**self.inputs, key_cache=self.key_cache, value_cache=self.value_cache, cache_lengths=lengths),)

    def written(self) -> tuple[Tensor, ...]:
        return self.key_cache, self.value_cache


class FixedPast(Step):
    """attention.kv has its lengths in its shapes, which a graph fixes: a bool mask on the device says what is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = step_inputs()
        self.past_key, self.past_value = cache()[:, :, 1:], cache()[:, :, 1:]
        self.positions = torch.arange(CAPACITY, device="cuda")

    def run(self) -> tuple[Tensor, ...]:
        attn_mask = (self.positions < self.length - 1) | (self.positions == CAPACITY - 1)
        return tuple(ops.attention.kv(**self.inputs, past_key=self.past_key, past_value=self.past_value, attn_mask=attn_mask[None]))


class PaddedMha(Step):
    def __init__(self) -> None:
        super().__init__()
        self.query = random(BATCH, 1, Q_HEADS * HEAD_SIZE)
        self.key, self.value = (random(BATCH, CAPACITY, Q_HEADS * HEAD_SIZE) for _ in "kv")

    def run(self) -> tuple[Tensor, ...]:
        lengths = self.length.to(torch.int32).repeat(BATCH)
        return (ops.mha(self.query, self.key, self.value, key_padding_mask=lengths, num_heads=Q_HEADS),)


class SharedMha(Step):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (random(BATCH, 1, Q_HEADS * HEAD_SIZE) for _ in "qkv")
        self.past_key, self.past_value = cache(heads=Q_HEADS), cache(heads=Q_HEADS)

    def run(self) -> tuple[Tensor, ...]:
        past_sequence_length = (self.length - 1).to(torch.int32)
        caches = {"past_key": self.past_key, "past_value": self.past_value, "past_sequence_length": past_sequence_length}
        return (ops.mha.shared(self.query, self.key, self.value, **caches, num_heads=Q_HEADS),)

    def written(self) -> tuple[Tensor, ...]:
        return self.past_key, self.past_value


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Nonpad, Cached, FixedPast, PaddedMha, SharedMha])
def test_one_captured_step_at_every_length(kind: type[Step]) -> None:
    """The length grows in place on the device; at each one the replay has the bits of an eager call."""
    step = kind()
    step.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run()
    wrong = torch.zeros(CAPACITY + 1, dtype=torch.bool, device="cuda")
    for length in range(1, CAPACITY + 1):
        step.length.fill_(length)
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        replayed = [x.clone() for x in (*captured, *step.written())]
        # The eager step writes the same row again; clear it, so that it has to.
        for x in step.written():
            x[:, :, length - 1] = float("nan")
        eager = (*step.run(), *step.written())
        for x, y in zip(replayed, eager, strict=True):
            wrong[length] |= (x != y).any()  # NaN differs from itself
    assert not wrong.any(), f"first wrong length: {int(wrong.nonzero()[0])}"


@pytest.mark.gpu
@pytest.mark.parametrize("kv_len", [300, 2100])
def test_lines_that_are_dealt_out_have_the_bits_that_they_have_alone(kv_len: int) -> None:
    """Five heads of K for each multiprocessor: a part of them is taken by whoever is done, at every replay by others."""
    batch = 5 * torch.cuda.get_device_properties(0).multi_processor_count // KV_HEADS + 1
    Q, K, V = random(batch, Q_HEADS, 1, HEAD_SIZE), random(batch, KV_HEADS, kv_len, HEAD_SIZE), random(batch, KV_HEADS, kv_len, HEAD_SIZE)
    alone = {b: ops.attention(Q[b : b + 1], K[b : b + 1], V[b : b + 1]) for b in range(0, batch, 7)}
    ops.attention(Q, K, V)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.attention(Q, K, V)
    for _ in range(5):
        captured.fill_(float("nan"))
        graph.replay()
        for b, Y in alone.items():
            assert torch.equal(captured[b : b + 1], Y), f"batch entry {b}"


class CachedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HEAD_SIZE, HEAD_SIZE, dtype=torch.float16, device="cuda")
        self.register_buffer("key_cache", cache())
        self.register_buffer("value_cache", cache())
        self.register_buffer("lengths", torch.zeros(BATCH, dtype=torch.int64, device="cuda"))

    def forward(self, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        Y = ops.attention_cached(self.project(Q), K, V, self.key_cache, self.value_cache, self.lengths, is_causal=True)
        self.lengths.add_(1)
        return Y


class PlainLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HEAD_SIZE, HEAD_SIZE, dtype=torch.float16, device="cuda")
        self.register_buffer("lengths", torch.full((BATCH,), 300, dtype=torch.int64, device="cuda"))

    def forward(self, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        return ops.attention(self.project(Q), K, V, nonpad_kv_seqlen=self.lengths, is_causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("layer_type", [PlainLayer, CachedLayer])
def test_reduce_overhead_uses_graphs_without_a_skip(layer_type: type[nn.Module]) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    torch._dynamo.reset()
    counters.clear()
    layer = layer_type().eval()
    inputs = step_inputs() if layer_type is CachedLayer else {"Q": step_inputs()["Q"], "K": cache(), "V": cache()}
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    state = {name: x.clone() for name, x in layer.state_dict().items()}
    results = []
    with torch.no_grad():
        for call in (layer, compiled):
            layer.load_state_dict(state)
            outputs = []
            for _ in range(6):
                torch.compiler.cudagraph_mark_step_begin()
                outputs.append(call(**inputs).clone())
            results.append(outputs)
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None and manager.roots, "no CUDA graph was recorded"
    for eager, graphed in zip(*results, strict=True):
        torch.testing.assert_close(graphed, eager, atol=2e-3, rtol=2e-3)  # the projection is inductor's own


def own_bytes() -> int:
    """The process's own memory, swapped out or not. Pages of files are left out: they come and go with what else the machine does."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap")) * 1024


def calls_of_a_step(device: str) -> Callable[[], Any]:
    inputs, caches = step_inputs(device), {"key_cache": cache(device), "value_cache": cache(device)}
    lengths = torch.full((BATCH,), 7, dtype=torch.int64, device=device)
    mha = [random(BATCH, 1, Q_HEADS * HEAD_SIZE, device=device) for _ in "qkv"]
    past = {"past_key": cache(device, Q_HEADS), "past_value": cache(device, Q_HEADS)}
    past_sequence_length = torch.full((1,), 5, dtype=torch.int32)

    def call() -> None:
        ops.attention_cached(**inputs, **caches, cache_lengths=lengths, is_causal=True)
        ops.attention.kv(**inputs, past_key=caches["key_cache"][:, :, :3], past_value=caches["value_cache"][:, :, :3])
        ops.mha.shared(*mha, **past, past_sequence_length=past_sequence_length.to(device), num_heads=Q_HEADS)
        ops.tensor_scatter_(caches["key_cache"], inputs["K"], lengths)

    return call


def test_memory_does_not_grow_over_ten_thousand_steps(device: str) -> None:
    """Neither the device's allocator nor the process: a tensor handle that leaks at each call would be 2 MB and more.

    The process may grow for other reasons, once; a leak grows in each of three rounds.
    """
    call = calls_of_a_step(device)

    def growth(count: int) -> int:
        before = own_bytes()
        with torch.no_grad():
            for _ in range(count):
                call()
        if device == "cuda":
            torch.cuda.synchronize()
        gc.collect()
        return own_bytes() - before

    growth(2000)
    if device == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert min(growth(10_000) for _ in range(3)) < 1_000_000
    if device == "cuda":
        assert torch.cuda.memory_allocated() == allocated
        assert torch.cuda.memory_reserved() == reserved
