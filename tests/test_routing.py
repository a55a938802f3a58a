"""The block of route_attention: where it begins and ends, models captured inside of it, its report, its logs and its warnings."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from routing_support import MHA, OURS, SDPA, K, Model, Q, V, attention_calls, model_inputs
from torch import Tensor
from torch.nn import functional

import torch_onnx_attn
from torch_onnx_attn import PerformanceWarning, RoutingReport, route_attention


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


# ---------------------------------------------------------------------------------------------------- torch.compile, export


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
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=1200, check=True)
    assert "routed 1 call of scaled_dot_product_attention" in result.stderr
    strict = [
        sys.executable,
        "-c",
        "import warnings\nfrom torch_onnx_attn import PerformanceWarning\nwarnings.simplefilter('error', PerformanceWarning)" + code,
    ]
    result = subprocess.run(
        strict, capture_output=True, text=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, timeout=1200, check=False
    )
    assert result.returncode == 1 and "PerformanceWarning: torch_onnx_attn.route_attention did not route everything" in result.stderr


def test_importing_the_package_does_not_import_torchs_compiler() -> None:
    """Which takes seconds; route_attention needs it."""
    code = "import sys, torch, torch_onnx_attn; assert 'torch._dynamo' not in sys.modules; torch_onnx_attn.route_attention"
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, timeout=1200, check=True)


def test_no_handlers_of_our_own() -> None:
    assert torch_onnx_attn.diagnostics.logger.handlers == [] or "TORCH_LOGS" in os.environ
