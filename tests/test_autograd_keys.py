"""The two ways of a call past autograd: plain tensors skip its keys, and where Python or a transform looks on, only the op is seen."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.cond import cond_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_onnx_attn
from torch_onnx_attn.autograd import OPERATORS, twin_of

ops = torch.ops.onnx_attn
OVERLOADS = [getattr(getattr(ops, name), overload) for name in OPERATORS for overload in getattr(ops, name).overloads()]
FORWARD_ONLY = "onnx_attn is forward only"


class Seen(TorchDispatchMode):
    """The names of the ops that a mode is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def attend(Q: Tensor) -> Tensor:
    return ops.attention.default(Q, Q, Q, is_causal=True)  # type: ignore[no-any-return]


def queries(device: str, requires_grad: bool = False) -> Tensor:
    return torch.randn(2, 2, 4, 8, device=device, requires_grad=requires_grad)


@pytest.mark.parametrize("op", OVERLOADS, ids=str)
def test_plain_calls_skip_autograd(op: Any) -> None:
    """A Python kernel there would nearly double the host time of a call; nothing but speed would tell."""
    name = f"{op._schema.name}.{op._schema.overload_name}".removesuffix(".")
    for key in ("AutogradCPU", "AutogradCUDA"):
        assert torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(name, key), key
    assert str(twin_of(op)._schema) == str(op._schema).replace("onnx_attn::", "onnx_attn::_traced_")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_mode_sees_the_op_once(context: Callable[[], Any], requires_grad: bool, device: str) -> None:
    Q = queries(device, requires_grad)
    with context(), Seen() as seen:
        Y = attend(Q)
    assert seen.ops == ["onnx_attn.attention.default"]
    assert torch.equal(Y, attend(Q))
    assert Y.requires_grad == (requires_grad and context is torch.enable_grad)
    if Y.requires_grad:
        with pytest.raises(RuntimeError, match=FORWARD_ONLY):
            Y.sum().backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_mode_sees_an_op_that_writes(context: Callable[[], Any], device: str) -> None:
    cache, update = torch.zeros(1, 4, 2, device=device), torch.ones(1, 2, 2, device=device)
    before = cache._version
    with context(), Seen() as seen:
        ops.tensor_scatter_(cache, update)
    assert seen.ops == ["onnx_attn.tensor_scatter_.default"]
    assert torch.equal(cache[:, :2], update) and not cache[:, 2:].any()
    assert cache._version > before


def test_autocast_under_a_mode(device: str) -> None:
    Q = queries(device)
    with Seen() as seen, torch.autocast(device, torch.bfloat16):
        Y = attend(Q)
    assert Y.dtype == torch.bfloat16 and seen.ops == ["aten._to_copy.default"] * 3 + ["onnx_attn.attention.default"]


@pytest.mark.parametrize("options", [{}, {"pre_dispatch": True}, {"tracing_mode": "fake"}, {"tracing_mode": "symbolic"}], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tracer_sees_the_op(options: dict[str, Any], requires_grad: bool, device: str) -> None:
    graph = make_fx(attend, **options)(queries(device, requires_grad)).graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == ["onnx_attn.attention.default"]


def test_jit_trace_sees_the_op(device: str) -> None:
    Q = queries(device)
    traced = torch.jit.trace(attend, (Q,))
    assert "onnx_attn::attention" in str(traced.graph) and torch.equal(traced(Q), attend(Q))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_vmap(context: Callable[[], Any], device: str) -> None:
    Q = torch.stack([queries(device) for _ in range(3)])
    with context():
        Y = torch.func.vmap(attend)(Q)
    assert torch.equal(Y, torch.stack([attend(row) for row in Q]))


def test_functionalize(device: str) -> None:
    Q = queries(device)
    assert torch.equal(torch.func.functionalize(attend)(Q), attend(Q))


def test_torch_func_grad(device: str) -> None:
    """Beside the op there are gradients; through it there are none, and a transform must not take them for zero."""
    Q, weight = queries(device), torch.ones((), device=device)
    gradient = torch.func.grad(lambda scale: (attend(Q) * scale).sum())(weight)
    torch.testing.assert_close(gradient, attend(Q).sum())
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: attend(x).sum())(Q)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("way", ["plain", "cond", "vmap", "functionalize", "subclass"])
def test_the_python_dispatcher(way: str, grad: bool, device: str) -> None:
    """Tracers switch it on. It gives each kernel the keyset of a call that begins: the op and its twin must not call each other forever."""

    def branches(x: Tensor) -> Tensor:
        return cond_op(torch.tensor(True), lambda y: (attend(y),), lambda y: (attend(y) + 1,), (x,))[0]  # type: ignore[no-any-return]

    call = {"cond": branches, "vmap": torch.func.vmap(attend, 1, 1), "functionalize": torch.func.functionalize(attend)}.get(way, attend)
    with torch.set_grad_enabled(grad), FakeTensorMode(allow_non_fake_inputs=True) if way != "subclass" else contextlib.nullcontext():
        Q = queries(device) if way != "subclass" else TwoTensor(queries(device), queries(device))
        if way == "vmap":
            Q = Q[:, None].expand(2, 3, 2, 4, 8)
        with enable_python_dispatcher():
            assert call(Q).shape == Q.shape


def test_negated_views_are_read_as_they_are(device: str) -> None:
    Q = queries(device)
    torch.testing.assert_close(attend(torch._neg_view(Q)), attend(-Q), atol=0, rtol=0)


def test_a_refusal_replaces_the_history_of_a_copy(device: str) -> None:
    """The pure scatter clones its cache, which autograd would know how to differentiate, without the rows that were written."""
    cache = torch.ones(1, 4, 2, device=device, requires_grad=True)
    present = ops.tensor_scatter(cache, torch.zeros(1, 2, 2, device=device))
    with pytest.raises(RuntimeError, match=FORWARD_ONLY):
        present.sum().backward()
    assert cache.grad is None


@pytest.mark.parametrize("way", ["plain", "mode"])
def test_a_checkpoint_stops_its_recomputation_at_the_op(way: str, device: str) -> None:
    """It raises an exception from a hook on the last saved tensor, and must get it back as it was."""
    Q, weight = queries(device, requires_grad=True), torch.ones(8, device=device, requires_grad=True)
    with Seen() if way == "mode" else contextlib.nullcontext():
        product, Y = checkpoint(lambda x: (x * weight, attend(x)), Q, use_reentrant=False)
        product.sum().backward()
        torch.testing.assert_close(weight.grad, Q.detach().sum((0, 1, 2)))
        with pytest.raises(RuntimeError, match=FORWARD_ONLY):
            Y.sum().backward()


def test_a_refusal_keeps_no_input_alive(device: str) -> None:
    inputs = queries(device, requires_grad=True) * 1
    alive = weakref.ref(inputs)
    Y = attend(inputs)
    inputs.zero_()  # nor does it mind what becomes of them
    del inputs
    assert alive() is None
    with pytest.raises(RuntimeError, match=FORWARD_ONLY):
        Y.sum().backward()


def test_errors_keep_their_words_while_gradients_are_recorded(device: str) -> None:
    with pytest.raises(RuntimeError, match=r"^Q: has shape"):
        attend(torch.ones(2, device=device, requires_grad=True))


def caches(device: str, **options: Any) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, 1, 6, 8, device=device, **options), torch.zeros(1, 1, 6, 8, device=device, **options)


def test_each_written_cache_is_counted_and_checked(device: str) -> None:
    rows, start = torch.ones(1, 1, 1, 8, device=device), torch.tensor([0], device=device)
    written = caches(device)
    ops.attention_cached(rows, rows, rows, *written, start)
    assert [cache._version for cache in written] == [1, 1]
    with torch.no_grad():  # parameters may be written here, as everywhere in torch
        ops.attention_cached(rows, rows, rows, *caches(device, requires_grad=True), start)
    for name, given in (
        ("key_cache", (caches(device, requires_grad=True)[0], written[1])),
        ("value_cache", (written[0], caches(device, requires_grad=True)[1])),
    ):
        with pytest.raises(RuntimeError, match=rf"^{name}: requires a gradient"):
            ops.attention_cached(rows, rows, rows, *given, start)
    query, length = torch.ones(1, 1, 8, device=device), torch.tensor([0], dtype=torch.int32, device=device)
    shared = dict(zip(("past_key", "past_value"), caches(device), strict=True))
    ops.mha.shared(query, query, query, **shared, past_sequence_length=length, num_heads=1)
    assert [cache._version for cache in shared.values()] == [1, 1]
    with pytest.raises(RuntimeError, match=r"^past_value: requires a gradient"):
        ops.mha.shared(
            query, query, query, **shared | {"past_value": caches(device, requires_grad=True)[1]}, past_sequence_length=length, num_heads=1
        )


def test_inference_tensors_are_written_outside_inference_mode(device: str) -> None:
    with torch.inference_mode():
        written = caches(device)
    rows = torch.ones(1, 1, 1, 8, device=device)
    ops.attention_cached(rows, rows, rows, *written, torch.tensor([2], device=device))
    assert torch.equal(written[0][:, :, 2:3], rows)


def test_a_compiled_step_trains_past_the_op(device: str) -> None:
    Q, weight = queries(device), torch.ones((), device=device, requires_grad=True)
    torch._dynamo.reset()
    step = torch.compile(lambda q, w: (torch_onnx_attn.attention(q, q, q).Y * w).sum(), backend="aot_eager", fullgraph=True)
    step(Q, weight).backward()
    torch.testing.assert_close(weight.grad, ops.attention.default(Q, Q, Q).sum())
