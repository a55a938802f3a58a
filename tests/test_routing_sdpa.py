"""route_attention and scaled_dot_product_attention: torch's numbers on our op; what is left to torch or refused by it, and why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from routing_support import SDPA, TOLERANCES, K, Q, V, mask, qkv, to
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

from torch_onnx_attn import PerformanceWarning, route_attention

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


def test_autocast() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), route_attention() as report:
        Y = functional.scaled_dot_product_attention(Q, K.bfloat16(), V)
    assert report.routed == {SDPA: 1} and Y.dtype == torch.bfloat16


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


# ------------------------------------------------------------------------------------------------------------ what is left

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


# ---------------------------------------------------------------------------------------------------- torch.compile, export


def test_compile_refuses_a_short_mask_of_dynamic_size() -> None:
    """Torch does by its own guard; the op alone would let the mask disallow the rest."""
    compiled = torch.compile(functional.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), warnings.catch_warnings(), route_attention():
        warnings.simplefilter("ignore", PerformanceWarning)
        got = compiled(Q, K, V, keep := mask(5, 7))
        with pytest.raises(RuntimeError, match=r"expand|broadcast|match"):
            compiled(Q, K, V, mask(5, 6))
    torch.testing.assert_close(got, functional.scaled_dot_product_attention(Q, K, V, keep), rtol=1e-5, atol=1e-5)


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
