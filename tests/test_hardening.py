"""Calls that once went wrong at the edges: extreme numbers, tensors sharing memory, tensors of nowhere, writes behind autograd's back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import FLOAT_DTYPES

import torch_onnx_attn
from torch_onnx_attn import H200, explain, kernel, reference

ops = torch.ops.onnx_attn


def qkv(rows: int = 3, **options: object) -> list[torch.Tensor]:
    return [torch.randn(1, 2, rows, 4, **options) for _ in range(3)]  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ strides and extremes


@pytest.mark.parametrize("numbers", [[5, 0, 2, 0], [5, 1, 2, 2, 0, 3, 5, 4, 0, 9, 2, 0, 7, 1, 6, 1]], ids=["lengths", "3B+2"])
def test_mha_lengths_are_read_by_stride(numbers: list[int], device: str) -> None:
    query, key = torch.randn(2, 3, 8, device=device), torch.randn(2, 5, 8, device=device)
    strided = torch.tensor(numbers, dtype=torch.int32, device=device)[::2]
    dense = torch.empty_like(strided, memory_format=torch.contiguous_format).copy_(strided)
    assert not strided.is_contiguous() and dense.is_contiguous()
    results = [ops.mha(query, key, key, None, mask, num_heads=2) for mask in (strided, dense)]
    assert torch.equal(*results)
    expected = reference.mha(query.cpu(), key.cpu(), key.cpu(), None, dense.cpu(), num_heads=2).output
    torch.testing.assert_close(results[0].cpu().double(), expected, atol=2e-3, rtol=0)  # float32 logits near 1e4


@pytest.mark.parametrize("length", [-(2**63), -1, 2**63 - 1])
def test_mha_lengths_may_be_any_number(length: int, device: str) -> None:
    query, key = torch.randn(1, 3, 8, device=device), torch.randn(1, 300, 8, device=device)
    results = [
        ops.mha(query, key, key, None, torch.tensor([number], device=device), num_heads=2) for number in (length, 0 if length < 0 else 300)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("start", [2**63 - 1, 2**62, -(2**63)])
def test_positions_that_overflow_are_refused_on_the_cpu(start: int) -> None:
    Q, K, V = qkv(2)
    caches = torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4)
    with pytest.raises(RuntimeError, match=f"cache_lengths: entry 0 is {start}"):
        ops.attention_cached(Q, K, V, *caches, torch.tensor([start]))
    for scatter in (ops.tensor_scatter, ops.tensor_scatter_):
        with pytest.raises(RuntimeError, match=f"write_indices: entry 0 is {start}"):
            scatter(caches[0], K, torch.tensor([start]))
    assert not caches[0].any() and not caches[1].any()


def test_a_beam_beyond_int32_is_refused() -> None:
    x, cache = torch.randn(2, 1, 8), torch.zeros(2, 2, 4, 4)
    indirection = torch.full((1, 2, 4), 2**32)
    with pytest.raises(RuntimeError, match=f"cache_indirection: .*{2**32}"):
        ops.mha.shared(
            x,
            x,
            x,
            past_key=cache,
            past_value=cache.clone(),
            past_sequence_length=torch.tensor(2),
            cache_indirection=indirection,
            num_heads=2,
        )
    assert not cache.any()


@pytest.mark.parametrize("attribute, value", [("softcap", 1e39), ("softcap", 1e-46), ("scale", 1e39), ("scale", float("inf"))])
def test_attributes_beyond_float32_are_refused(attribute: str, value: float) -> None:
    with pytest.raises(RuntimeError, match=f"^{attribute}: is"):
        ops.attention(*qkv(), **{attribute: value})


def test_an_output_that_does_not_fit_says_so() -> None:
    Q = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**44, 1)
    K = torch.zeros(1, 1, 1, 1)
    with pytest.raises(RuntimeError, match=r"out of memory: .*\[1, 1, 17592186044416, 1\]") as error:
        ops.attention(Q, K, K)
    assert ".cpp" not in str(error.value)


# ------------------------------------------------------------------------------------------------ tensors of nowhere


@pytest.mark.parametrize("position, name", [(1, "K"), (2, "V")])
def test_meta_tensors_beside_real_ones_are_refused(position: int, name: str) -> None:
    inputs = qkv()
    inputs[position] = inputs[position].to("meta")
    with pytest.raises(RuntimeError, match=f"^{name}: is on meta"):
        ops.attention(*inputs)


def test_a_meta_update_of_a_real_cache_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"^update: is on meta"):
        ops.tensor_scatter_(torch.zeros(1, 4, 2), torch.zeros(1, 1, 2, device="meta"))


# ------------------------------------------------------------------------------------------------ autograd


def test_a_write_is_noticed_by_a_backward_pass_that_saved_the_cache() -> None:
    weight, cache = torch.ones(1, 4, 2, requires_grad=True), torch.full((1, 4, 2), 3.0)
    product = (weight * cache).sum()
    ops.tensor_scatter_(cache, torch.zeros(1, 2, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_cache_that_requires_a_gradient_is_refused() -> None:
    cache = torch.ones(1, 4, 2, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match=r"^cache: requires a gradient.*forward only"):
        ops.tensor_scatter_(cache, torch.zeros(1, 2, 2))
    with torch.no_grad():
        ops.tensor_scatter_(cache, torch.zeros(1, 2, 2))
    assert not cache[:, :2].any()


def test_autocast_follows_each_cache() -> None:
    Q, K, V = qkv(1)
    key_cache, value_cache = torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4, dtype=torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        Y = ops.attention_cached(Q, K, V, key_cache, value_cache, torch.tensor([0]))
    assert Y.dtype == torch.float32 and torch.equal(key_cache[:, :, :1], K) and torch.equal(value_cache[:, :, :1], V.half())


# ------------------------------------------------------------------------------------------------ graphs that never run


ILLEGAL = {
    "scale": {"scale": -1.0},
    "softcap": {"softcap": -2.0},
    "left_window_size": {"left_window_size": -5},
    "q_num_heads": {"q_num_heads": 3},
    "attn_mask": {"attn_mask": torch.zeros(3, 9)},
    "softmax_precision": {"softmax_precision": 7},
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_tracing_refuses_what_running_refuses(name: str) -> None:
    Q, K, V = qkv()
    with pytest.raises(RuntimeError, match=f"^{name}: "):
        ops.attention(Q, K, V, **ILLEGAL[name])

    class Model(torch.nn.Module):
        def forward(self, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
            return ops.attention(Q, K, V, **ILLEGAL[name])  # type: ignore[no-any-return]

    with pytest.raises(Exception, match=f"{name}: "):
        torch.export.export(Model(), (Q, K, V))


def test_a_forced_kernel_that_cannot_run_is_an_error_to_explain_too() -> None:
    Q = torch.randn(1, 1, 1, 7)
    with kernel("decode"), pytest.raises(RuntimeError, match="kernel: "):
        explain(ops.attention.default, Q, Q, Q, machine=H200)


def test_exported_lengths_beyond_int32_mean_all_keys() -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    query, key, lengths = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.tensor([3, 2**32 + 1])

    class Model(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return ops.mha(query, key, key, key_padding_mask=lengths, num_heads=2)  # type: ignore[no-any-return]

    program = torch_onnx_attn.onnx.export(Model().eval(), (query, key, lengths))
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    (result,) = session.run(None, {name: value.numpy() for name, value in zip(names, (query, key, lengths), strict=True)})
    torch.testing.assert_close(torch.from_numpy(result), Model()(query, key, lengths), atol=2e-3, rtol=0)


# ------------------------------------------------------------------------------------------------ the package


def test_submodules_come_with_the_package() -> None:
    program = "import torch_onnx_attn as t; t.reference.attention; t.onnx.export; t.nn.Attention"
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)
    with pytest.raises(AttributeError, match="nonsense"):
        torch_onnx_attn.nonsense  # noqa: B018


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_no_heads_are_an_empty_output(dtype: torch.dtype, device: str) -> None:
    empty = torch.empty(2, 0, 3, 4, dtype=dtype, device=device)
    assert ops.attention(empty, empty, empty).shape == reference.attention(empty, empty, empty).Y.shape == (2, 0, 3, 4)


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first program, as a reader would paste it."""
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(blocks[0], {})
    assert (tmp_path / "attention.onnx").exists()
