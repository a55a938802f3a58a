"""route_attention and nn.MultiheadAttention: torch's numbers on our op, in nn.Transformer modules too; what is left to torch, and why."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from routing_support import MHA, mask, to
from torch import Tensor, nn

from torch_onnx_attn import PerformanceWarning, route_attention

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
