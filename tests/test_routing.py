"""route_attention: torch's attention functions give torch's numbers on our ops; what is not routed is named, with the reason."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

import torch_onnx_attn
from torch_onnx_attn import PerformanceWarning, RoutingReport, route_attention

OURS = torch.ops.onnx_attn.attention
SDPA, MHA = "scaled_dot_product_attention", "multi_head_attention_forward"
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def qkv(*batch: int, rows: int = 5, keys: int = 7, heads: int = 4, kv_heads: int = 4, v_size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*batch, heads, rows, 8), torch.randn(*batch, kv_heads, keys, 8), torch.randn(*batch, kv_heads, keys, v_size)


def mask(*shape: int) -> Tensor:
    """Bool, with the first key allowed: SDPA is not pinned on rows without any key."""
    keep = torch.rand(*shape) < 0.6
    keep[..., 0] = True
    return keep


# SDPA calls: positional tensors and keyword arguments
ROUTED: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "plain": (qkv(2, v_size=6), {}),
    "causal_is_top_left": (qkv(2), {"is_causal": True}),
    "causal_more_rows_than_keys": (qkv(2, rows=9, keys=4), {"is_causal": True}),
    "scale": (qkv(2), {"scale": 0.3}),
    "scale_zero": (qkv(2), {"scale": 0.0}),
    "gqa": (qkv(2, kv_heads=2), {"enable_gqa": True}),
    "gqa_of_equal_heads": (qkv(2), {"enable_gqa": True}),
    "one_kv_head_broadcasts": (qkv(2, kv_heads=1), {}),
    "one_kv_batch_broadcasts": ((torch.randn(3, 4, 5, 8), torch.randn(1, 4, 7, 8), torch.randn(1, 4, 7, 8)), {}),
    "mask_bool_bhqk": (qkv(2), {"attn_mask": mask(2, 4, 5, 7)}),
    "mask_bool_qk": (qkv(2), {"attn_mask": mask(5, 7)}),
    "mask_bool_b11k": (qkv(2), {"attn_mask": mask(2, 1, 1, 7)}),
    "mask_bool_hqk": (qkv(2), {"attn_mask": mask(4, 5, 7)}),
    "mask_float": (qkv(2), {"attn_mask": torch.randn(2, 1, 5, 7)}),
    "mask_of_one_column": (qkv(2), {"attn_mask": torch.randn(2, 1, 5, 1)}),
    "two_axes": ((torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 8)), {"attn_mask": torch.randn(5, 7)}),
    "three_axes": (qkv(), {"attn_mask": mask(4, 5, 7)}),
    "three_axes_gqa": (qkv(kv_heads=2), {"enable_gqa": True, "is_causal": True}),
    "five_axes": (qkv(2, 3), {"is_causal": True}),
    "five_axes_mask_of_all_batches": (qkv(2, 3), {"attn_mask": torch.randn(1, 1, 4, 1, 7)}),
    "five_axes_mask_of_one_batch_axis": (qkv(2, 3), {"attn_mask": torch.randn(3, 1, 5, 7)}),
    "six_axes_mask": (qkv(2, 1, 3), {"attn_mask": mask(2, 1, 1, 1, 5, 7)}),
    "no_keys": (qkv(2, keys=0), {}),
    "no_heads_gqa": (qkv(2, heads=0, kv_heads=0), {"enable_gqa": True}),
    "empty_batch": (qkv(0), {}),
    "rows_before_heads_in_memory": (tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2)), {}),
}


def to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", ROUTED)
def test_sdpa(name: str, dtype: torch.dtype) -> None:
    tensors, options = ROUTED[name]
    tensors, options = tuple(to(x, dtype) for x in tensors), {key: to(value, dtype) for key, value in options.items()}
    with route_attention() as report:
        Y = functional.scaled_dot_product_attention(*tensors, **options)
    assert report.routed == {SDPA: 1} and not report.left
    expected = functional.scaled_dot_product_attention(
        *(to(x, torch.float64) for x in tensors), **{key: to(value, torch.float64) for key, value in options.items()}
    )
    assert Y.shape == expected.shape and Y.dtype == dtype
    if name == "no_keys":
        expected = torch.zeros_like(expected)  # torch: NaN or 0
    torch.testing.assert_close(Y.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_every_way_to_call_it() -> None:
    q, k, v = qkv(2)
    with route_attention() as report:
        results = [
            functional.scaled_dot_product_attention(q, k, v, None, 0.0, True),
            imported_by_name(q, key=k, value=v, is_causal=True),
            torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=True),
        ]
    assert report.routed == {SDPA: 3}
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_row_without_keys_is_zero() -> None:
    q, k, v = qkv(1)
    keep = torch.ones(5, 7, dtype=torch.bool)
    keep[2] = False
    with route_attention():
        Y = functional.scaled_dot_product_attention(q, k, v, keep)
    assert (Y[:, :, 2] == 0).all() and Y.isfinite().all()


# ------------------------------------------------------------------------------------------------------------ what is left

Q, K, V = qkv(2)
LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "dropout": (lambda: functional.scaled_dot_product_attention(Q, K, V, dropout_p=0.5), "dropout_p is 0.5"),
    "gradient": (lambda: functional.scaled_dot_product_attention(Q.clone().requires_grad_(), K, V), "a gradient may be wanted"),
    "gradient_of_the_mask": (
        lambda: functional.scaled_dot_product_attention(Q, K, V, torch.zeros(5, 7, requires_grad=True)),
        "a gradient may be wanted",
    ),
    "negative_scale": (lambda: functional.scaled_dot_product_attention(Q, K, V, scale=-1.0), "scale is -1.0"),
    "mask_and_causal": (
        lambda: functional.scaled_dot_product_attention(Q, K, V, mask(5, 7), is_causal=True),
        "attn_mask is given with is_",
    ),
    "query_broadcasts": (lambda: functional.scaled_dot_product_attention(Q[:1], K, V), "batch axes of key or value"),
    "scale_beyond_float32": (
        lambda: functional.scaled_dot_product_attention(Q.double() * 1e-30, K.double() * 1e-30, V.double(), scale=1e60),
        "scale is 1e",
    ),
    "values_of_no_columns": (lambda: functional.scaled_dot_product_attention(Q, K, V[..., :0]), "head size is 0"),
    "scale_nan": (lambda: functional.scaled_dot_product_attention(Q, K, V, scale=float("nan")), "scale is nan"),
}
REFUSED_BY_TORCH: dict[str, tuple[Callable[[], Any], str]] = {
    "mask_of_one_axis": (lambda: functional.scaled_dot_product_attention(Q, K, V, mask(7)), "fewer than 2 axes"),
    "dtypes": (lambda: functional.scaled_dot_product_attention(Q, K.double(), V), "different dtypes"),
    "heads": (lambda: functional.scaled_dot_product_attention(Q, K[:, :3], V[:, :3]), "head counts"),
    "gqa_heads": (lambda: functional.scaled_dot_product_attention(Q, K[:, :3], V[:, :3], enable_gqa=True), "head counts"),
    "integers": (lambda: functional.scaled_dot_product_attention(*(x.long() for x in (Q, K, V))), "not float16"),
    "gqa_without_heads": (lambda: functional.scaled_dot_product_attention(Q[0, 0], K[0, 0], V[0, 0], enable_gqa=True), "enable_gqa"),
    "negative_dropout": (lambda: functional.scaled_dot_product_attention(Q, K, V, dropout_p=-0.1), "dropout_p is -0.1"),
    "short_mask": (lambda: functional.scaled_dot_product_attention(Q, K, V, mask(5, 6)), "last axis of attn_mask"),
    "short_floating_mask": (lambda: functional.scaled_dot_product_attention(Q, K, V, torch.zeros(2, 1, 1, 6)), "last axis of attn_mask"),
    "integer_mask": (lambda: functional.scaled_dot_product_attention(Q, K, V, mask(5, 7).long()), "attn_mask is torch.int64"),
    "mask_of_another_type": (
        lambda: functional.scaled_dot_product_attention(Q, K, V, torch.zeros(5, 7).half()),
        "attn_mask is torch.float16",
    ),
    "one_axis": (lambda: functional.scaled_dot_product_attention(Q[0, 0, 0], K[0, 0, 0], V[0, 0, 0]), "number of axes"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_these_ops_cannot_do_is_left(name: str) -> None:
    call, reason = LEFT[name]
    torch.manual_seed(1)
    expected = call()
    torch.manual_seed(1)
    with pytest.warns(PerformanceWarning, match=reason), route_attention() as report:
        got = call()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert not report.routed and report.left.total() == 1
    ((function, why),) = report.left
    assert function == SDPA and reason in why
    assert str(report) == f"left   1 call of {SDPA}: {why}"


@pytest.mark.parametrize("name", REFUSED_BY_TORCH)
def test_what_torch_refuses_raises_its_own_error(name: str) -> None:
    call, reason = REFUSED_BY_TORCH[name]
    with pytest.raises(Exception) as expected:
        call()
    with pytest.warns(PerformanceWarning), route_attention() as report, pytest.raises(type(expected.value)) as got:
        call()
    assert str(got.value) == str(expected.value)
    assert any(reason in why for _, why in report.left)


def test_nested_tensors_are_left() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged).transpose(1, 2)
        with torch.no_grad(), route_attention() as report:
            functional.scaled_dot_product_attention(x, x, x)
    assert [why for _, why in report.left] == ["an argument is a nested or sparse tensor"]


def test_transforms_are_left() -> None:
    def loss(q: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, K, V).sum()

    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "vmap": (lambda: torch.func.vmap(functional.scaled_dot_product_attention)(Q, K, V), "torch.func"),
        "grad": (lambda: torch.func.grad(loss)(Q), "torch.func"),
        "jvp": (lambda: torch.func.jvp(loss, (Q,), (Q,))[1], "torch.func"),
    }
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for name, (call, reason) in calls.items():
            with pytest.warns(PerformanceWarning, match=reason), route_attention() as report:
                got = call()
            assert not report.routed, name
            torch.testing.assert_close(got, call(), rtol=1e-5, atol=1e-5)
        with pytest.warns(PerformanceWarning, match="forward-mode"), route_attention(), torch.autograd.forward_ad.dual_level():
            dual = functional.scaled_dot_product_attention(torch.autograd.forward_ad.make_dual(Q, Q), K, V)
            assert torch.autograd.forward_ad.unpack_dual(dual).tangent is not None


def test_the_older_onnx_exporter_is_left(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")

    class Call(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, q, q)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with route_attention() as report:
            torch.onnx.export(Call().eval(), (Q,), tmp_path / "old.onnx", dynamo=False)
    assert not report.routed and any("dynamo=False" in reason for _, reason in report.left)
    assert "Softmax" in [node.op_type for node in onnx.load(tmp_path / "old.onnx").graph.node]


def test_a_jit_trace_is_left() -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with route_attention() as report:
            traced = torch.jit.trace(lambda q: functional.scaled_dot_product_attention(q, K, V), (Q,))
        assert any("torch.jit.trace" in reason for _, reason in report.left)
        torch.testing.assert_close(traced(Q), functional.scaled_dot_product_attention(Q, K, V))


def test_no_gradient_is_wanted_without_grad_mode() -> None:
    q = Q.clone().requires_grad_()
    for context in (torch.no_grad, torch.inference_mode):
        with context(), route_attention() as report:
            functional.scaled_dot_product_attention(q, K, V)
        assert report.routed == {SDPA: 1}, context


def test_training_goes_on_inside() -> None:
    q = Q.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with route_attention():
            functional.scaled_dot_product_attention(q, K, V).sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0


# -------------------------------------------------------------------------------------------------- nn.MultiheadAttention

MASKS = {
    "none": lambda rows, keys: {},
    "bool": lambda rows, keys: {"attn_mask": ~mask(rows, keys)},
    "float": lambda rows, keys: {"attn_mask": torch.randn(rows, keys)},
    "of_each_head": lambda rows, keys: {"attn_mask": ~mask(2 * 4, rows, keys)},
    "causal": lambda rows, keys: {"attn_mask": torch.ones(rows, keys, dtype=torch.bool).triu(1), "is_causal": True},
}
PADDING = {"none": None, "bool": lambda keys: ~mask(2, keys), "float": lambda keys: torch.randn(2, keys)}


def modules(**options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """A module and its float64 copy."""
    module = nn.MultiheadAttention(16, 4, dropout=0.1, **options).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    exact = nn.MultiheadAttention(16, 4, dropout=0.1, **options).eval().double()
    exact.load_state_dict(module.state_dict())
    return module, exact


@pytest.mark.parametrize("need_weights", [None, "average", "each"])
@pytest.mark.parametrize(("mask_kind", "padding_kind"), list(itertools.product(MASKS, PADDING)))
@pytest.mark.parametrize("layout", ["time_first", "batch_first", "cross", "other_widths"])
def test_multi_head_attention(layout: str, mask_kind: str, padding_kind: str, need_weights: str | None) -> None:
    widths = {"kdim": 12, "vdim": 10} if layout == "other_widths" else {}
    module, exact = modules(batch_first=layout != "time_first", **widths)
    x = torch.randn(2, 5, 16)
    if layout == "other_widths":
        inputs = (x, torch.randn(2, 7, 12), torch.randn(2, 7, 10))
    else:
        inputs = (x, *(2 * (torch.randn(2, 7, 16),) if layout == "cross" else (x, x)))
    rows, keys = 5, inputs[1].shape[1]
    if layout == "time_first":
        x = x.transpose(0, 1)
        inputs = (x, x, x)
    options = {"need_weights": need_weights is not None, "average_attn_weights": need_weights == "average", **MASKS[mask_kind](rows, keys)}
    make_padding = PADDING[padding_kind]
    if make_padding is not None:
        options["key_padding_mask"] = make_padding(keys)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched", UserWarning)
        with route_attention() as report:
            Y, weights = module(*inputs, **options)
        assert report.routed == {MHA: 1} and not report.left
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            expected, expected_weights = exact(*(x.double() for x in inputs), **{k: to(v, torch.float64) for k, v in options.items()})
    torch.testing.assert_close(Y.double(), expected, rtol=1e-5, atol=1e-5)
    assert (weights is None) == (expected_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_without_a_batch(need_weights: bool) -> None:
    module, exact = modules()
    x, options = torch.randn(5, 16), {"need_weights": need_weights, "key_padding_mask": torch.tensor([False, True, False, False, True])}
    with torch.no_grad():
        with route_attention() as report:
            got = module(x, x, x, **options)
        expected = exact(x.double(), x.double(), x.double(), **options)
    assert report.routed == {MHA: 1}
    for actual, wanted in zip(got, expected, strict=True):
        if wanted is not None:
            torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_with_no_keys(need_weights: bool) -> None:
    module, exact = modules(batch_first=True)
    x, keys = torch.randn(2, 5, 16), torch.randn(2, 0, 16)
    with torch.no_grad(), route_attention() as report:
        Y, weights = module(x, keys, keys, key_padding_mask=torch.zeros(2, 0, dtype=torch.bool), need_weights=need_weights)
    assert report.routed == {MHA: 1}
    torch.testing.assert_close(Y.double(), exact.out_proj.bias.expand(2, 5, 16), rtol=1e-6, atol=1e-6)
    assert weights is None or weights.shape == (2, 5, 0)


def test_floating_masks_of_half_modules() -> None:
    """generate_square_subsequent_mask makes float32; torch takes that beside half inputs where no weights are asked for."""
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    module, exact = modules(batch_first=True)
    module, x = module.to(torch.bfloat16), torch.randn(2, 5, 16).to(torch.bfloat16)
    exact.load_state_dict(module.state_dict())
    with torch.no_grad(), route_attention() as report:
        Y, _ = module(x, x, x, attn_mask=causal, need_weights=False)
    assert report.routed == {MHA: 1}
    with torch.no_grad():
        expected, _ = exact(x.double(), x.double(), x.double(), attn_mask=causal.double(), need_weights=False)
    torch.testing.assert_close(Y.double(), expected, rtol=5e-2, atol=5e-2)


WRONG_MASKS: dict[str, dict[str, Tensor]] = {
    "padding_of_one_entry": {"key_padding_mask": torch.zeros(1, 7, dtype=torch.bool)},
    "short_padding": {"key_padding_mask": torch.zeros(2, 6, dtype=torch.bool)},
    "padding_of_one_key": {"key_padding_mask": torch.zeros(2, 1)},
    "mask_of_one_row": {"attn_mask": torch.zeros(1, 7, dtype=torch.bool)},
    "short_mask": {"attn_mask": torch.zeros(5, 6)},
    "mask_of_one_column": {"attn_mask": torch.zeros(5, 1, dtype=torch.bool)},
    "mask_of_each_entry": {"attn_mask": torch.zeros(2, 5, 7, dtype=torch.bool)},
    "mask_of_each_head": {"attn_mask": torch.zeros(4, 5, 7)},
    "padding_float64": {"key_padding_mask": torch.zeros(2, 7, dtype=torch.float64)},
    "mask_float16": {"attn_mask": torch.zeros(5, 7, dtype=torch.float16)},
    "mask_int64": {"attn_mask": torch.zeros(5, 7, dtype=torch.int64)},
}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", WRONG_MASKS)
def test_masks_that_torch_refuses_are_not_broadcast(name: str, need_weights: bool) -> None:
    module, _ = modules(batch_first=True)
    inputs = (torch.randn(2, 5, 16), *(2 * (torch.randn(2, 7, 16),)))
    with torch.no_grad():
        with pytest.raises(Exception) as expected:
            module(*inputs, need_weights=need_weights, **WRONG_MASKS[name])
        with pytest.raises(type(expected.value)) as got, warnings.catch_warnings(), route_attention():
            warnings.simplefilter("ignore")
            module(*inputs, need_weights=need_weights, **WRONG_MASKS[name])
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize(
    ("options", "training", "grad", "reason"),
    [
        pytest.param({"add_bias_kv": True}, False, False, "add_bias_kv", id="add_bias_kv"),
        pytest.param({"add_zero_attn": True}, False, False, "add_zero_attn", id="add_zero_attn"),
        pytest.param({}, True, False, "dropout_p is 0.1 in training", id="dropout"),
        pytest.param({}, False, True, "a gradient may be wanted", id="gradient"),
    ],
)
def test_multi_head_attention_that_is_left(options: dict[str, Any], training: bool, grad: bool, reason: str) -> None:
    module = nn.MultiheadAttention(16, 4, dropout=0.1, **options).train(training)
    x = torch.randn(5, 2, 16)
    with torch.set_grad_enabled(grad), pytest.warns(PerformanceWarning, match=reason), route_attention() as report:
        module(x, x, x)
    assert not report.routed and [(name, reason in why) for name, why in report.left] == [(MHA, True)]


def test_transformer_modules_and_their_fast_paths() -> None:
    """Their fused inference path would pass the attention functions by."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    exact = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False).eval().double()
    exact.load_state_dict(encoder.state_dict())
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        with route_attention() as report:
            Y = encoder(x, src_key_padding_mask=padding)
        assert report.routed == {MHA: 2} and not report.left
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            expected = exact(x.double(), src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(Y.double(), expected, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- entering and leaving


def is_routed() -> bool:
    seen: list[bool] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func is OURS.default)
            return func(*args, **(kwargs or {}))

    with Spy():
        functional.scaled_dot_product_attention(Q, K, V)
    return any(seen)


def test_it_ends_with_the_block_and_with_an_exception() -> None:
    assert torch.backends.mha.get_fastpath_enabled()
    with route_attention():
        assert is_routed() and not torch.backends.mha.get_fastpath_enabled()
    assert not is_routed() and torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(KeyError), route_attention():
        raise KeyError
    assert not is_routed() and torch.backends.mha.get_fastpath_enabled()


def test_a_fast_path_that_was_off_stays_off() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with route_attention():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_blocks_inside_each_other() -> None:
    with route_attention() as outer:
        functional.scaled_dot_product_attention(Q, K, V)
        with warnings.catch_warnings(), route_attention() as inner:
            warnings.simplefilter("ignore")
            functional.scaled_dot_product_attention(Q, K, V)
            functional.scaled_dot_product_attention(Q, K, V, dropout_p=0.5)
        assert is_routed()
        warnings.simplefilter("ignore", PerformanceWarning)
    assert (outer.routed[SDPA], outer.left.total()) == (3, 1)
    assert (inner.routed[SDPA], inner.left.total()) == (1, 1)
    assert not is_routed()


def test_other_threads_are_not_touched() -> None:
    results: dict[str, bool] = {}
    with route_attention() as report:
        thread = threading.Thread(target=lambda: results.update(other=is_routed()))
        thread.start()
        thread.join()
    assert results == {"other": False} and not report.routed


def test_the_report_reads_like_a_report() -> None:
    with pytest.warns(PerformanceWarning), torch.no_grad(), route_attention() as report:
        for _ in range(2):
            functional.scaled_dot_product_attention(Q, K, V)
        functional.scaled_dot_product_attention(Q, K, V, dropout_p=0.25)
    assert str(report).splitlines() == [
        "routed 2 calls of scaled_dot_product_attention",
        "left   1 call of scaled_dot_product_attention: dropout_p is 0.25; these ops have no dropout",
    ]
    assert "no attention call was made" in str(RoutingReport())


def test_autocast() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), route_attention() as report:
        Y = functional.scaled_dot_product_attention(Q, K.bfloat16(), V)
    assert report.routed == {SDPA: 1} and Y.dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------------------- torch.compile, export


class Model(nn.Module):
    """Both kinds of calls, with weights that want gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.mha = nn.Linear(16, 16), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k = (y.unflatten(2, (4, 4)).transpose(1, 2) for y in (self.query(x), x))
        y = functional.scaled_dot_product_attention(q, k, k, keep[:, None, None]).transpose(1, 2).flatten(2)
        return y + self.mha(y, y, y, key_padding_mask=~keep, need_weights=False)[0]


def model_inputs(batch: int = 2, rows: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, rows, 16), mask(batch, rows)


def attention_calls(graph: torch.fx.Graph) -> list[Any]:
    names = ("attention", "scaled_dot_product", "multi_head", "_native_multi")
    return [node.target for node in graph.nodes if node.op == "call_function" and any(name in str(node.target) for name in names)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _example: Any) -> Any:
        graphs.append(module.graph)
        return module

    model = Model().eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep))
    with torch.no_grad():
        inputs = model_inputs()
        with route_attention() as report:
            Y = compiled(*inputs)
        assert attention_calls(graphs[0]) == [OURS.default, OURS.default]
        assert set(report.routed) == {SDPA, MHA} and not report.left
        assert dynamic or report.routed.total() == 2  # with dynamic sizes torch.compile traces twice
        torch.testing.assert_close(Y, model(*inputs), rtol=1e-5, atol=1e-5)
        with route_attention():  # another block runs the same graph
            compiled(*inputs)
        assert len(graphs) == 1
        compiled(*inputs)  # outside of it another one is captured
        assert len(graphs) == 2 and OURS.default not in attention_calls(graphs[1])
        with route_attention():
            compiled(*inputs)
        assert len(graphs) == 2


def test_compile_of_tensor_methods_that_torch_writes_in_python() -> None:
    """torch.compile inlines what the mode calls; of these, torch 2.13 cannot inline unflatten."""
    calls = {
        "unflatten": lambda x: x.unflatten(-1, (2, 4)),
        "split": lambda x: x.split(2, -1)[1],
        "norm": lambda x: x.norm(dim=-1),
        "operators": lambda x: 1 - x + 2 / x + 2**x + x**2 + x // 2,
        "slices": lambda x: x[:, None, 1:3],
    }
    for name, call in calls.items():
        with route_attention():
            got = torch.compile(call, fullgraph=True, backend="aot_eager")(Q)
        assert torch.equal(got, call(Q)), name


def test_compile_refuses_a_short_mask_of_dynamic_size() -> None:
    """Torch does by its own guard; the op alone would let the mask disallow the rest."""
    compiled = torch.compile(functional.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), warnings.catch_warnings(), route_attention():
        warnings.simplefilter("ignore", PerformanceWarning)
        got = compiled(Q, K, V, keep := mask(5, 7))
        with pytest.raises(RuntimeError, match=r"expand|broadcast|match"):
            compiled(Q, K, V, mask(5, 6))
    torch.testing.assert_close(got, functional.scaled_dot_product_attention(Q, K, V, keep), rtol=1e-5, atol=1e-5)


def test_compile_of_an_encoder_whose_causality_is_read_off_the_mask() -> None:
    """The hint is then a number of the graph, of which nothing is known while capturing."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False).eval()
    exact = copy.deepcopy(encoder).double()
    x, causal = torch.randn(2, 5, 16), nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        with route_attention() as report:
            Y = torch.compile(encoder, fullgraph=True, backend="aot_eager")(x, mask=causal)
        expected = exact(x.double(), mask=causal.double())
    assert report.routed == {MHA: 2} and not report.left
    torch.testing.assert_close(Y.double(), expected, rtol=1e-5, atol=1e-5)


def test_compile_counts_each_captured_call_once() -> None:
    def call(q: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, K, V) + functional.scaled_dot_product_attention(q, K, V, dropout_p=0.5)

    with torch.no_grad(), pytest.warns(PerformanceWarning), route_attention() as report:
        torch.compile(call, fullgraph=True, backend="aot_eager")(Q)
    assert report.routed == {SDPA: 1} and report.left.total() == 1


def test_a_block_inside_a_compiled_function() -> None:
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _example: Any) -> Any:
        graphs.append(module.graph)
        return module

    def call(q: Tensor) -> Tensor:
        with route_attention():
            y = functional.scaled_dot_product_attention(q, K, V)
        return y + functional.scaled_dot_product_attention(q, K, V)

    got = torch.compile(call, fullgraph=True, backend=keep)(Q)
    assert [target is OURS.default for target in attention_calls(graphs[0])] == [True, False]
    torch.testing.assert_close(got, 2 * functional.scaled_dot_product_attention(Q, K, V), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export(strict: bool) -> None:
    model = Model().eval()
    rows = torch.export.Dim.DYNAMIC
    with route_attention() as report:
        program = torch.export.export(model, model_inputs(), strict=strict, dynamic_shapes=({0: rows, 1: rows}, {0: rows, 1: rows}))
    assert attention_calls(program.graph) == [OURS.default, OURS.default]
    assert set(report.routed) == {SDPA, MHA} and not report.left
    with torch.no_grad():
        for sizes in ((2, 5), (3, 8)):
            inputs = model_inputs(*sizes)
            torch.testing.assert_close(program.module()(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["torch.onnx.export", "torch_onnx_attn.onnx.export"])
@pytest.mark.parametrize("opset", [23, 24, 25])
def test_onnx_export(how: str, opset: int) -> None:
    support = pytest.importorskip("export_support")
    import torch_onnx_attn.onnx

    model, names = Model().eval(), {0: "batch", 1: "rows"}
    options: dict[str, Any] = {"dynamic_shapes": (names, names), "input_names": ["x", "keep"]}
    with route_attention() as report:
        if how == "torch.onnx.export":
            table = torch_onnx_attn.onnx.translation_table(opset)
            options |= {"dynamo": True, "verbose": False, "opset_version": opset, "custom_translation_table": table}
            program = torch.onnx.export(model, model_inputs(), **options)
        else:
            program = torch_onnx_attn.onnx.export(model, model_inputs(), opset=opset, **options)
    assert report.routed == {SDPA: 1, MHA: 1} and not report.left
    proto = program.model_proto
    types = [node.op_type for node in proto.graph.node]
    assert types.count("Attention") == 2 and "Softmax" not in types
    if opset == 25 and not support.ORT_IS_CURRENT:
        return
    for sizes in ((2, 5), (1, 1), (3, 9)):
        inputs = model_inputs(*sizes)
        (Y,) = support.run(proto, dict(zip(("x", "keep"), inputs, strict=True)), "ort")
        with torch.no_grad():
            torch.testing.assert_close(Y, model(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gqa_of_equal_heads", "three_axes", "five_axes", "mask_of_one_column", "one_kv_head_broadcasts"])
def test_calls_that_the_stock_exporter_takes_apart_or_refuses_are_one_node(name: str) -> None:
    support = pytest.importorskip("export_support")
    import torch_onnx_attn.onnx

    tensors, options = ROUTED[name]
    tensors += tuple(value for value in options.values() if isinstance(value, Tensor))
    flags = {key: value for key, value in options.items() if not isinstance(value, Tensor)}

    class Call(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, keep, **flags)

    with route_attention():
        program = torch_onnx_attn.onnx.export(Call().eval(), tensors)
    types = [node.op_type for node in program.model_proto.graph.node]
    assert types.count("Attention") == 1 and set(types) <= {"Attention", "Reshape", "Unsqueeze", "Expand", "Squeeze"}
    feeds = dict(zip([value.name for value in program.model_proto.graph.input], tensors, strict=True))
    (Y,) = support.run(program.model_proto, feeds, "ort")
    torch.testing.assert_close(Y, functional.scaled_dot_product_attention(*tensors, **flags), rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------------------------- logs and warnings


def test_the_logger_says_what_was_decided(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="torch_onnx_attn"), route_attention():
        functional.scaled_dot_product_attention(Q, K, V)
    assert [record.getMessage() for record in caplog.records] == [
        f"{SDPA}: routed",
        f"{SDPA}: kernel cpu",
        f"routed 1 call of {SDPA}",
    ]


def test_logging_does_not_disturb_capturing(caplog: pytest.LogCaptureFixture) -> None:
    model = Model().eval()
    with caplog.at_level(logging.DEBUG, logger="torch_onnx_attn"), torch.no_grad(), route_attention():
        torch.compile(model, fullgraph=True, backend="aot_eager")(*model_inputs())
        torch.export.export(model, model_inputs())


@pytest.mark.gpu
def test_the_general_kernel_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = (x.cuda().double() for x in (Q, K, V))
    with (
        caplog.at_level(logging.DEBUG, logger="torch_onnx_attn"),
        pytest.warns(PerformanceWarning, match="general kernel"),
        route_attention(),
    ):
        functional.scaled_dot_product_attention(q, k, v)


def test_torch_logs_and_warning_filters_know_us() -> None:
    code = """
import torch, torch_onnx_attn
q = torch.randn(1, 1, 2, 8)
with torch_onnx_attn.route_attention():
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
"""
    root = Path(__file__).resolve().parent.parent
    environment = os.environ | {"TORCH_LOGS": "+torch_onnx_attn", "PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=300, check=True)
    assert "routed 1 call of scaled_dot_product_attention" in result.stderr
    strict = [
        sys.executable,
        "-c",
        "import warnings\nfrom torch_onnx_attn import PerformanceWarning\nwarnings.simplefilter('error', PerformanceWarning)" + code,
    ]
    result = subprocess.run(
        strict, capture_output=True, text=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, timeout=300, check=False
    )
    assert result.returncode == 1 and "PerformanceWarning: torch_onnx_attn.route_attention did not route everything" in result.stderr


def test_importing_the_package_does_not_import_torchs_compiler() -> None:
    """Which takes seconds; route_attention needs it."""
    code = "import sys, torch, torch_onnx_attn; assert 'torch._dynamo' not in sys.modules; torch_onnx_attn.route_attention"
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, timeout=300, check=True)


@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_hugging_face_models_on_sdpa(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="sdpa")
    model = getattr(transformers, f"{family}Model")(config).eval()
    ids, keep = torch.randint(50, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    keep[0, 5:] = 0
    with torch.no_grad():
        with route_attention() as report:
            got = model(input_ids=ids, attention_mask=keep)[0]
        expected = model(input_ids=ids, attention_mask=keep)[0]
    assert report.routed == {SDPA: 2} and not report.left
    torch.testing.assert_close(got[keep.bool()], expected[keep.bool()], rtol=1e-4, atol=1e-5)


def test_no_handlers_of_our_own() -> None:
    assert torch_onnx_attn.diagnostics.logger.handlers == [] or "TORCH_LOGS" in os.environ
