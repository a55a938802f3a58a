"""What is written in place has each element in memory of its own, and nothing that is read lies there. Run, and traced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import zeros
from test_errors import cached
from test_errors_mha import shared
from torch import Tensor
from ways import trace

ops = torch.ops.onnx_attn


def scatter() -> dict[str, Any]:
    return {"cache": zeros(2, 2, 10, 8), "update": zeros(2, 2, 3, 8), "write_indices": torch.tensor([0, 4])}


CALLS: dict[str, tuple[Any, Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "attention_cached": (ops.attention_cached.default, cached, ("key_cache", "value_cache")),
    "mha.shared": (ops.mha.shared, shared, ("past_key", "past_value")),
    "tensor_scatter_": (ops.tensor_scatter_.default, scatter, ("cache",)),
}
WRITTEN = [(call, name) for call, (_, _, names) in CALLS.items() for name in names]


def run(op: Any, arguments: dict[str, Any]) -> None:
    op(**arguments)


BOTH = pytest.mark.parametrize("make", [run, trace])


# ------------------------------------------------------------------------------------------------ elements that share memory

# What is made of a [batch, heads, rows, size] cache: strides of those axes. Each axis must step over what the shorter strides span.
SHARING: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "rows overlap": lambda heads, rows, size: (heads * rows * size, rows * size, size // 2, 1),
    "heads overlap": lambda heads, rows, size: (heads * rows * size, (rows - 1) * size, size, 1),
    "entries overlap by an element": lambda heads, rows, size: (heads * rows * size - 1, rows * size, size, 1),
    "heads of one stride with rows": lambda heads, rows, size: (heads * rows * size, size, size, 1),
    "heads inside rows overlap": lambda heads, rows, size: (heads * rows * size, size, heads * size - 1, 1),
    "entries expanded": lambda heads, rows, size: (0, rows * size, size, 1),
    "rows expanded": lambda heads, rows, size: (heads * size, size, 0, 1),
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "a part": lambda cache: padded(cache, 1)[:, 1:, :-1],
    "every second row": lambda cache: cache.repeat_interleave(2, 2)[:, :, ::2],
    "rows outside heads": lambda cache: cache.transpose(1, 2).contiguous().transpose(1, 2),
    "heads outside entries": lambda cache: cache.transpose(0, 1).contiguous().transpose(0, 1),
    "keys of a pair": lambda cache: torch.stack([cache, cache], 1)[:, 0],
    "columns of a wider row": lambda cache: torch.cat([cache, cache], 3)[..., : cache.shape[3]],
}


def padded(cache: Tensor, width: int) -> Tensor:
    batch, heads, rows, size = cache.shape
    return zeros(batch, heads + width, rows + width, size)


def with_strides(cache: Tensor, strides: tuple[int, ...]) -> Tensor:
    return zeros(cache.numel()).as_strided(cache.shape, strides)


@BOTH
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("call, name", WRITTEN)
def test_elements_that_share_memory(call: str, name: str, sharing: str, make: Callable[..., None]) -> None:
    op, legal, _ = CALLS[call]
    arguments = legal()
    make(op, arguments)
    arguments[name] = with_strides(arguments[name], SHARING[sharing](*arguments[name].shape[1:]))
    with pytest.raises(RuntimeError, match=rf"^{name}: is written in place, but axis \d has stride \d+.*share memory"):
        make(op, arguments)


@BOTH
@pytest.mark.parametrize("view", APART)
@pytest.mark.parametrize("call, name", WRITTEN)
def test_views_with_memory_of_their_own(call: str, name: str, view: str, make: Callable[..., None]) -> None:
    op, legal, _ = CALLS[call]
    arguments = legal()
    viewed = APART[view](arguments[name])
    assert viewed.shape == arguments[name].shape
    make(op, arguments | {name: viewed})
    if make is run:
        run(op, arguments)
        assert torch.equal(viewed, arguments[name])


def test_axes_of_one_element_and_empty_caches_share_nothing() -> None:
    one = zeros(8).as_strided((1, 1, 2, 4), (0, 1, 4, 1))
    ops.tensor_scatter_(one, torch.ones(1, 1, 2, 4))
    assert one.sum() == 8
    ops.tensor_scatter_(zeros(1).as_strided((2, 0, 3, 1), (0, 0, 0, 0)), zeros(2, 0, 1, 1))


# ------------------------------------------------------------------------------------------------ what lies in a written tensor


def inside(cache: Tensor, like: Tensor) -> Tensor:
    """The values of `like`, in the middle of the cache's memory."""
    flat = cache.as_strided((cache.numel(),), (1,)).view(like.dtype)
    begin = (flat.numel() - like.numel()) // 2
    flat[begin : begin + like.numel()] = like.flatten()
    return flat[begin : begin + like.numel()].view(like.shape)


# Everything that each op reads, of types that it does not convert, which would read a copy.
READ: dict[str, dict[str, Tensor]] = {
    "attention_cached": {
        **{name: zeros(2, 4 if name == "Q" else 2, 3, 8) for name in "QKV"},
        "cache_lengths": torch.tensor([0, 4]),
        "attn_mask": zeros(3, 10),
    },
    "mha.shared": {
        **{name: zeros(2, 1, 16) for name in ("query", "key", "value")},
        "bias": zeros(48),
        "key_padding_mask": torch.ones(2, 12, dtype=torch.int32),
        "attention_bias": zeros(1, 2, 1, 12),
        "past_sequence_length": torch.tensor([4]),
        "cache_indirection": zeros(1, 2, 12, dtype=torch.int32),
    },
    "tensor_scatter_": {"update": zeros(2, 2, 3, 8), "write_indices": torch.tensor([0, 4])},
}


def test_all_that_is_read_is_tried() -> None:
    for call, (op, _, written) in CALLS.items():
        tensors = {argument.name for argument in op._schema.arguments if "Tensor" in str(argument.type)}
        assert tensors == {*READ[call], *written}


@BOTH
@pytest.mark.parametrize(
    "call, name, read", [pytest.param(c, name, read, id=f"{c}-{name}-{read}") for c, name in WRITTEN for read in READ[c]]
)
def test_what_is_read_lies_elsewhere(call: str, name: str, read: str, make: Callable[..., None]) -> None:
    op, legal, _ = CALLS[call]
    arguments = legal() | READ[call]
    arguments[name] = zeros(*arguments[name].shape)
    make(op, arguments | {read: READ[call][read].clone()})
    arguments[read] = inside(arguments[name], READ[call][read])
    before = arguments[name].clone()
    with pytest.raises(RuntimeError, match=rf"^{re.escape(read)}: overlaps {name}, which is written in place"):
        make(op, arguments)
    assert torch.equal(arguments[name], before)


@BOTH
def test_what_is_read_as_a_copy_may_lie_there(make: Callable[..., None]) -> None:
    arguments = cached()
    arguments["K"] = arguments["key_cache"].as_strided((2, 2, 5, 8), (80, 40, 1, 5))
    make(ops.attention_cached.default, arguments)
    arguments = cached() | {"attn_mask": inside(zeros(2, 2, 10, 8), zeros(3, 10, dtype=torch.int32))}
    make(ops.attention_cached.default, arguments)


@BOTH
def test_what_lies_right_behind_is_elsewhere(make: Callable[..., None]) -> None:
    both = zeros(4, 2, 10, 8)
    make(ops.attention_cached.default, cached() | {"key_cache": both[:2], "value_cache": both[2:]})
    make(ops.tensor_scatter_.default, scatter() | {"cache": both[:2], "update": both[2:, :, :3]})


@BOTH
def test_a_pair_of_caches_lies_apart(make: Callable[..., None]) -> None:
    whole, pair = zeros(2, 2, 20, 8), zeros(2, 2, 2, 10, 8)
    for keys, values in ((whole[:, :, :10], whole[:, :, 5:15]), (pair[:, 0], pair[:, 1]), (pair[0], pair[0])):
        with pytest.raises(RuntimeError, match=r"^value_cache: overlaps key_cache"):
            make(ops.attention_cached.default, cached() | {"key_cache": keys, "value_cache": values})
    arguments = shared()
    with pytest.raises(RuntimeError, match=r"^past_value: overlaps past_key"):
        make(ops.mha.shared, arguments | {"past_value": arguments["past_key"]})
