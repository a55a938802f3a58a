"""export(check=True): agreement is measured, a wrong or unrunnable file fails, and what was not checked is said."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from export_support import ORT_IS_CURRENT, needs_current_ort
from torch import Tensor, nn

import torch_onnx_attn.onnx
from torch_onnx_attn.onnx import ONNXCheckError, check

OPS = torch.ops.onnx_attn


class Layer(nn.Module):
    """Attention of lengths and a mask, with projections."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.kv, self.out, self.attributes = nn.Linear(32, 16), nn.Linear(32, 32), attributes

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        heads = {"q_num_heads": 4, "kv_num_heads": 2}
        k = self.kv(x)
        return self.out(OPS.attention.default(x, k, k, nonpad_kv_seqlen=lengths, is_causal=True, **heads, **self.attributes))


SHAPES = ({0: "batch", 1: "rows"}, {0: "batch"})


def layer_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 5, 32).to(dtype), torch.tensor([5, 2, 1])


def export(model: nn.Module, args: tuple[Any, ...], path: Path | None = None, **options: Any) -> Any:
    return torch_onnx_attn.onnx.export(model.eval(), args, path, **options)


def found(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("write", [False, True])
def test_a_right_file_passes(dtype: torch.dtype, write: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torch_onnx_attn"):
        export(Layer().to(dtype), layer_inputs(dtype), tmp_path / "m.onnx" if write else None, dynamic_shapes=SHAPES, check=True)
    lines = found(caplog).splitlines()
    assert lines[0].startswith("opset 24, ") and any(line.startswith("ok           onnx.checker") for line in lines)
    ran = [line for line in lines if line.startswith("ok           ONNX Runtime")]
    for what in ("the example", "random values", "every dynamic axis larger by 1", "every dynamic axis 1"):
        assert any(what in line for line in ran), what
    assert "failed" not in found(caplog)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["m.onnx", "m.onnx.data"] if write else [])


def test_bfloat16_is_not_passed_over_in_silence() -> None:
    with pytest.warns(UserWarning, match=r"not everything could be checked:\n  ONNX Runtime .* does not take the model") as caught:
        export(Layer().bfloat16(), layer_inputs(torch.bfloat16), check=True)
    (message,) = [str(warning.message) for warning in caught if "could be checked" in str(warning.message)]
    assert "NOT_IMPLEMENTED" in message


@pytest.mark.parametrize("opset", [24, 25, 26, 27, 28])
def test_every_opset(opset: int, caplog: pytest.LogCaptureFixture) -> None:
    if opset > 24 and not ORT_IS_CURRENT:
        pytest.skip("needs ONNX Runtime 1.32")
    with caplog.at_level(logging.INFO, logger="torch_onnx_attn"):
        export(Layer(softcap=3.0), layer_inputs(), opset=opset, dynamic_shapes=SHAPES, check=True)
    assert found(caplog).startswith(f"opset {opset}, ") and "not checked" not in found(caplog)


@needs_current_ort
def test_a_window(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torch_onnx_attn"):
        export(Layer(left_window_size=1), layer_inputs(), check=True)
    assert found(caplog).startswith("opset 25, ") and "not checked" not in found(caplog)


def test_what_onnxruntime_refuses_runs_on_the_reference() -> None:
    """A mask of one row at opset 23."""

    class Masked(nn.Module):
        def forward(self, q: Tensor, keep: Tensor) -> Tensor:
            return OPS.attention.default(q, q, q, keep)

    inputs = (torch.randn(2, 2, 4, 8), torch.ones(2, 1, 1, 4, dtype=torch.bool))
    with pytest.warns(UserWarning, match="on the example: does not run"):
        export(Masked(), inputs, opset=23, check=True)


def test_masked_scores_of_onnxruntime_count_as_minus_infinity() -> None:
    class Scores(nn.Module):
        def forward(self, q: Tensor) -> tuple[Tensor, Tensor]:
            return OPS.attention.qk(q, q, q, is_causal=True, qk_matmul_output_mode=2)

    for dtype in (torch.float32, torch.float16):
        export(Scores(), (torch.randn(1, 2, 4, 8).to(dtype),), check=True)


def test_keyword_inputs() -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, *, k: Tensor, keep: Tensor) -> Tensor:
            return OPS.attention.default(q, k, k, keep)

    kwargs = {"keep": torch.rand(3, 5) < 0.5, "k": torch.randn(1, 2, 5, 8)}
    export(Model(), (torch.randn(1, 2, 3, 8),), kwargs=kwargs, check=True)


@pytest.mark.parametrize("option", [{"export_params": False}, {"keep_initializers_as_inputs": True}], ids=str)
def test_a_file_without_its_weights_inside_is_checked_with_them(option: dict[str, bool], tmp_path: Path) -> None:
    export(Layer(), layer_inputs(), tmp_path / "model.onnx", check=True, **option)


# ----------------------------------------------------------------------------------------------------------------- failures


def captured_and_exported(model: nn.Module, args: tuple[Any, ...]) -> tuple[Any, Any]:
    captured = torch.export.export(model.eval(), args)
    return captured, torch_onnx_attn.onnx.export(captured)


def attention_of(program: Any) -> Any:
    return next(node for node in program.model.graph if node.op_type == "Attention")


def test_a_wrong_attribute_fails() -> None:
    captured, program = captured_and_exported(Layer(), layer_inputs())
    assert check(program, captured).ok
    attention_of(program).attributes.pop("is_causal")
    report = check(program, captured)
    assert not report.ok
    assert [finding.status for finding in report.findings] == ["ok", "failed", "failed"]
    assert "allowed 1e-04" in report.findings[1].detail


def test_the_tolerance_decides() -> None:
    captured, program = captured_and_exported(Layer(), layer_inputs())
    report = check(program, captured, tolerance=0.0)
    assert any(finding.status == "failed" for finding in report.findings) and not report.ok


def test_an_invalid_file_fails() -> None:
    captured, program = captured_and_exported(Layer(), layer_inputs())
    attention_of(program).attributes.pop("q_num_heads")
    attention_of(program).op_type = "NoSuchOp"
    report = check(program, captured)
    assert report.findings[0].status == "failed" and "NoSuchOp" in report.findings[0].detail
    assert not report.ok


def test_a_wrong_translation_makes_export_raise() -> None:
    library = torch.library.Library("check_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    class Model(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return torch.ops.check_test.twice(OPS.attention.default(q, q, q))

    def thrice(x: Any) -> Any:
        from onnxscript import opset18

        return opset18.Add(x, opset18.Add(x, x))

    with pytest.raises(ONNXCheckError, match=r"failed its check:\nok +onnx\.checker.*\nfailed +ONNX Runtime") as error:
        export(Model(), (torch.randn(1, 1, 2, 8),), check=True, custom_translation_table={torch.ops.check_test.twice.default: thrice})
    assert not error.value.report.ok


def test_a_file_that_nothing_here_can_run_fails() -> None:
    """ONNX Runtime has no bfloat16 MultiHeadAttention on the CPU, onnx.reference none at all."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return OPS.mha.default(x, x, x, num_heads=2)

    with pytest.raises(ONNXCheckError, match="not checked") as error:
        export(Model(), (torch.randn(1, 3, 16).bfloat16(),), check=True)
    assert {finding.status for finding in error.value.report.findings} == {"ok", "not checked"}


def test_sizes_that_the_model_refuses_are_not_checked() -> None:
    class Full(nn.Module):
        """A cache that is written to its end."""

        def forward(self, cache: Tensor, rows: Tensor) -> Tensor:
            return OPS.tensor_scatter(cache, rows, torch.zeros(2, dtype=torch.int64))

    shapes = (None, {2: "rows"})
    with pytest.warns(UserWarning, match="larger by 1: the model itself refuses these inputs"):
        export(Full(), (torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8)), dynamic_shapes=shapes, check=True)


# ----------------------------------------------------------------------------------------------------------------- refusals


def test_a_written_buffer_is_refused_with_the_way_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(1, 1, 8, 8))

        def forward(self, rows: Tensor, at: Tensor) -> Tensor:
            OPS.tensor_scatter_(self.cache, rows, at)
            return self.cache + 1

    with pytest.raises(torch_onnx_attn.onnx.ExportError, match=r"cache: tensor_scatter_ writes the buffer 'cache'.*export_static_cache"):
        export(Model(), (torch.randn(1, 1, 2, 8), torch.tensor([1])))


class Held(nn.Module):
    """Writes what it holds: through a slice, through a view, or its lengths."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("cache", torch.zeros(1, 1, 8, 8))
        self.register_buffer("lengths", torch.zeros(1, dtype=torch.int64))
        self.no_buffer = torch.zeros(1, 1, 8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        if self.how == "slice":
            self.cache[:, :, :2] = rows
        elif self.how == "view":
            OPS.tensor_scatter_(self.cache.transpose(0, 1), rows, self.lengths)
        elif self.how == "lengths":
            self.lengths.add_(1)
        elif self.how == "no_buffer":
            self.no_buffer[:, :, :2] = rows
        else:
            own = self.cache.clone()
            own[:, :, :2] = rows
            return OPS.attention.default(rows, own, own)
        return OPS.attention.default(rows, self.cache, self.cache, nonpad_kv_seqlen=self.lengths + 2)


@pytest.mark.parametrize(("how", "name"), [("slice", "cache"), ("view", "cache"), ("lengths", "lengths"), ("no_buffer", "no_buffer")])
def test_a_buffer_may_be_written_by_no_op_and_through_no_view(how: str, name: str) -> None:
    with pytest.raises(torch_onnx_attn.onnx.ExportError, match=f"writes the buffer '{name}', and an ONNX graph keeps nothing"):
        export(Held(how).eval(), (torch.randn(1, 1, 2, 8),))


def test_a_copy_of_a_buffer_may_be_written() -> None:
    program = export(Held("clone").eval(), (torch.randn(1, 1, 2, 8),), check=True)
    assert [node.op for node in torch_onnx_attn.onnx.report(program).nodes] == ["Attention"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        pytest.param({"input_names": ["x"]}, ValueError, r"input_names: is \['x'\].* for each of 2: float32 \[3, 5, 32\], int64", id="few"),
        pytest.param({"input_names": list("abc")}, ValueError, "input_names: .* for each of 2", id="many"),
        pytest.param({"input_names": "ab"}, ValueError, "input_names: is 'ab', must be a list", id="text"),
        pytest.param({"output_names": ["y", "z"]}, ValueError, "output_names: .* for each of 1", id="outputs"),
        pytest.param({"input_names": ["x", "n"], "output_names": ["x"]}, ValueError, "output_names: 'x' is the name of an", id="both"),
        pytest.param({"opset": "24"}, ValueError, "opset='24': must be an integer", id="opset"),
        pytest.param({"opset_version": 24}, TypeError, "opset_version: .* give opset", id="opset_version"),
        pytest.param({"f": "model.onnx"}, TypeError, "f: .* give path", id="f"),
        pytest.param({"dynamo": False}, TypeError, "dynamo: .* leave it out", id="dynamo"),
        pytest.param({"path": 3}, TypeError, "path: is of type int", id="path"),
        pytest.param({"path": ""}, OSError, "path: '' is a folder, or empty", id="no_path"),
        pytest.param({"path": "nowhere/model.onnx"}, FileNotFoundError, "path: the folder .*nowhere' does not exist", id="folder"),
    ],
)
def test_arguments_that_do_not_fit_write_nothing(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        export(Layer().eval(), layer_inputs(), **({"path": tmp_path / "model.onnx"} | options))
    assert not list(tmp_path.iterdir())


def test_what_is_no_module_is_named() -> None:
    with pytest.raises(TypeError, match=r"model: is of type function, must be a torch\.nn\.Module"):
        torch_onnx_attn.onnx.export(lambda q: q, (torch.randn(2),))


def test_an_opset_that_the_installed_onnx_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx.defs, "onnx_opset_version", lambda: 26)
    with pytest.raises(torch_onnx_attn.onnx.ExportError, match=r"opset=28: the installed onnx .* knows opsets up to 26"):
        export(Layer(), layer_inputs(), opset=28)


# -------------------------------------------------------------------------------------------------------------- over 2 GB


@pytest.mark.slow
def test_weights_beyond_2_gb(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 5 * 2**30:
        pytest.skip(f"needs 5 GiB of free disk in {tmp_path}")

    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.full((1, 1), 0.5, dtype=torch.float16).expand(2**25 + 2**20, 32)  # 2.06 GiB when written
            self.table = nn.Parameter(table, requires_grad=False)
            self.kv = nn.Linear(32, 32).half()

        def forward(self, ids: Tensor) -> Tensor:
            x = nn.functional.embedding(ids, self.table)
            k = self.kv(x)
            return OPS.attention.default(x, k, k, is_causal=True, q_num_heads=4, kv_num_heads=4)

    path = tmp_path / "big.onnx"
    export(Big(), (torch.randint(2**25, (2, 5)),), path, check=True, dynamic_shapes=({0: "batch", 1: "rows"},))
    found = torch_onnx_attn.onnx.report(path)
    assert found.weight_bytes > 2**31 and found.weight_files == ("big.onnx.data",)
    assert path.stat().st_size < 2**20 and path.with_name("big.onnx.data").stat().st_size > 2**31
    (tmp_path / "big.onnx.data").unlink()
