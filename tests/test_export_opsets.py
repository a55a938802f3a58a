"""Which opset `export` chooses, what it refuses and why, and plain torch.onnx.export with the table."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_support import ORT_IS_CURRENT, Call, Exported, attributes, export, onnx
from torch import Tensor, nn

import torch_onnx_attn.onnx

OPS = torch.ops.onnx_attn
Function = Callable[[dict[str, Tensor]], dict[str, Tensor]]

Q, K = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
PLAIN = {"Q": Q, "K": K}
LENGTHS = {**PLAIN, "lengths": torch.tensor([2, 5])}
PAST = {**PLAIN, "past": torch.randn(2, 2, 4, 8)}
CACHE = {"cache": torch.randn(2, 2, 9, 8), "K": K, "at": torch.tensor([0, 3])}


def plain(t: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    return {"Y": OPS.attention.default(t["Q"], t["K"], t["K"], **options)}


def with_lengths(t: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    return {"Y": OPS.attention.default(t["Q"], t["K"], t["K"], nonpad_kv_seqlen=t["lengths"], **options)}


def left_window(t: dict[str, Tensor]) -> dict[str, Tensor]:
    return plain(t, left_window_size=2)


def right_window(t: dict[str, Tensor]) -> dict[str, Tensor]:
    return plain(t, right_window_size=0)


def scatter(t: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"cache_out": OPS.tensor_scatter(t["cache"], t["K"], t["at"])}


def with_past(t: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(
        zip(("Y", "keys", "values"), OPS.attention.kv(t["Q"], t["K"], t["K"], past_key=t["past"], past_value=t["past"]), strict=True)
    )


def mixed(t: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"Y": plain(t)["Y"] + left_window(t)["Y"]}


# ------------------------------------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize(
    ("function", "inputs", "opset"),
    [
        pytest.param(plain, PLAIN, 23, id="plain"),
        pytest.param(with_past, PAST, 23, id="past"),
        pytest.param(with_lengths, LENGTHS, 24, id="lengths"),
        pytest.param(scatter, CACHE, 24, id="tensor_scatter"),
        pytest.param(left_window, PLAIN, 25, id="left_window"),
        pytest.param(right_window, PLAIN, 25, id="right_window"),
        pytest.param(mixed, PLAIN, 25, id="the_highest_of_all_calls"),
    ],
)
def test_the_lowest_opset_that_says_it(function: Function, inputs: dict[str, Tensor], opset: int) -> None:
    assert export(function, inputs).opset == opset


@pytest.mark.parametrize("opset", [23, 24, 25, 26, 27, 28])
def test_a_higher_opset_on_request(opset: int) -> None:
    exported = export(plain, PLAIN, opset=opset)
    assert exported.opset == opset
    assert attributes(exported.node("Attention")) == {}
    exported.agrees("reference")
    if opset <= 26 or ORT_IS_CURRENT:
        exported.agrees("ort")


@pytest.mark.parametrize(
    ("function", "inputs", "opset", "message"),
    [
        pytest.param(plain, PLAIN, 22, "opset=22: attention needs opset 23", id="attention"),
        pytest.param(with_lengths, LENGTHS, 23, "opset=23: nonpad_kv_seqlen needs opset 24", id="lengths"),
        pytest.param(scatter, CACHE, 23, "opset=23: tensor_scatter needs opset 24", id="tensor_scatter"),
        pytest.param(left_window, PLAIN, 24, "opset=24: left_window_size needs opset 25", id="left_window"),
        pytest.param(right_window, PLAIN, 23, "opset=23: right_window_size needs opset 25", id="right_window"),
        pytest.param(plain, PLAIN, 29, "opset=29: this package exports to opsets 18 to 28", id="above_all"),
        pytest.param(plain, PLAIN, 17, "opset=17: this package exports to opsets 18 to 28", id="below_all"),
    ],
)
def test_an_opset_too_low_is_refused_by_name(function: Function, inputs: dict[str, Tensor], opset: int, message: str) -> None:
    with pytest.raises(torch_onnx_attn.onnx.ExportError, match=re.escape(message)):
        export(function, inputs, opset=opset)


def test_calls_in_branches_count() -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, flag: Tensor) -> Tensor:
            def windowed(x: Tensor) -> Tensor:
                return OPS.attention.default(x, x, x, left_window_size=1)

            def full(x: Tensor) -> Tensor:
                return OPS.attention.default(x, x, x)

            return torch.cond(flag, windowed, full, (q,))

    program = torch_onnx_attn.onnx.export(Model().eval(), (Q, torch.tensor(True)))
    proto = program.model_proto
    onnx.checker.check_model(proto, full_check=True)
    assert proto.opset_import[0].version == 25
    branches = [attribute.g for node in proto.graph.node if node.op_type == "If" for attribute in node.attribute]
    assert sorted(len(attributes(node)) for graph in branches for node in graph.node if node.op_type == "Attention") == [0, 1]


def test_a_whole_layer_at_opset_28() -> None:
    """Ops of 26 to 28 mean a 25 node no differently, so the import alone is raised; Cast and Range have changed since 25."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            h = self.norm(x) + torch.arange(x.shape[1], dtype=torch.int64)[:, None].float() / 7
            y = OPS.attention.default(h, h, h, keep, q_num_heads=4, kv_num_heads=4, left_window_size=2)
            return x + self.down(torch.nn.functional.gelu(self.up(y))) * keep.to(x.dtype).mean()

    model, inputs = Layer().eval(), (torch.randn(2, 6, 32), torch.rand(6, 6) < 0.8)
    axes = {0: "batch", 1: "rows"}
    program = torch_onnx_attn.onnx.export(model, inputs, opset=28, dynamic_shapes=(axes, {0: "rows", 1: "rows"}))
    assert {entry.domain: entry.version for entry in program.model_proto.opset_import} == {"": 28}
    onnx.checker.check_model(program.model_proto, full_check=True)
    names = [value.name for value in program.model_proto.graph.input]
    exported = Exported(
        program.model_proto, dict(zip(names, inputs, strict=True)), {"y": model(*inputs)}, lambda t: {"y": model(*t.values())}
    )
    exported.eager = {program.model_proto.graph.output[0].name: exported.eager["y"]}
    exported.agrees("reference")
    if ORT_IS_CURRENT:
        exported.agrees("ort")


# --------------------------------------------------------------------------------------------------------------- refusals


def test_lse_is_refused_with_the_reason() -> None:
    def call(t: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(("Y", "lse"), OPS.attention.lse(t["Q"], t["K"], t["K"], return_lse=True), strict=True))

    with pytest.raises(torch_onnx_attn.onnx.ExportError, match=r"lse cannot be exported: ai\.onnx::Attention has no output"):
        export(call, PLAIN)


def test_a_float64_program_of_mha_is_refused_with_the_reason() -> None:
    """The op refuses float64 itself; a program from elsewhere may still hold such a call."""
    from torch_onnx_attn.onnx.requirements import refusal

    reason = refusal("mha", "", float64=True)
    assert reason is not None and "float64" in reason and "com.microsoft::MultiHeadAttention" in reason
    assert refusal("mha", "kv", float64=False) is None and refusal("attention", "", float64=True) is None


def test_an_unknown_option_is_not_swallowed() -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        export(plain, PLAIN, no_such_option=1)


# ------------------------------------------------------------------------------------------------------ the rest of export


def test_what_is_returned_and_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    program = torch_onnx_attn.onnx.export(Call(["Q", "K"], plain).eval(), (Q, K), path)
    assert onnx.load(path).graph.node[0].op_type == "Attention"
    (got,) = program(Q, K)
    torch.testing.assert_close(got, plain(PLAIN)["Y"], rtol=1e-5, atol=1e-5)


def test_keyword_inputs_and_names() -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, *, mask: Tensor | None = None) -> Tensor:
            return OPS.attention.default(q, q, q, mask)

    axes = {"q": {0: "batch", 2: "rows"}, "mask": {0: "rows", 1: "rows"}}
    program = torch_onnx_attn.onnx.export(Model().eval(), (Q,), kwargs={"mask": torch.ones(3, 3, dtype=torch.bool)}, dynamic_shapes=axes)
    inputs = program.model_proto.graph.input
    assert [value.name for value in inputs] == ["q", "mask"]
    assert [dim.dim_param for dim in inputs[0].type.tensor_type.shape.dim] == ["batch", "", "rows", ""]


def test_a_captured_program_is_taken_as_it_is() -> None:
    captured = torch.export.export(Call(["Q", "K"], left_window).eval(), (Q, K))
    proto = torch_onnx_attn.onnx.export(captured).model_proto
    assert [node.op_type for node in proto.graph.node] == ["Attention"] and proto.opset_import[0].version == 25


def test_a_program_decomposed_before_is_refused_with_the_reason() -> None:
    class Model(nn.Module):
        def forward(self, cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
            OPS.tensor_scatter_(cache, rows, at)
            return cache

    captured = torch.export.export(Model().eval(), tuple(CACHE.values()))
    assert [node.op_type for node in torch_onnx_attn.onnx.export(captured).model_proto.graph.node] == ["TensorScatter"]
    decomposed = torch.export.export(Model().eval(), tuple(CACHE.values())).run_decompositions()
    with pytest.raises(torch_onnx_attn.onnx.ExportError, match=r"tensor_scatter_.*run_decompositions\(\) has wrapped"):
        torch_onnx_attn.onnx.export(decomposed)


def test_names_asked_for_win_over_names_inside() -> None:
    """The exporter renames an output without looking; two values of one name are not a valid model."""
    embedding = nn.Embedding(5, 8)

    def call(t: dict[str, Tensor]) -> dict[str, Tensor]:
        x = embedding(t["ids"]).unsqueeze(1)
        return {"embedding": OPS.attention.default(x, x, x).sum(-1)}

    export(call, {"ids": torch.tensor([[1, 2, 3]])}).agrees("ort")


def test_translations_of_other_ops_can_be_added() -> None:
    library = torch.library.Library("export_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    def twice(x: Any) -> Any:
        from onnxscript import opset18

        return opset18.Add(x, x)

    def call(t: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"Y": torch.ops.export_test.twice(plain(t)["Y"])}

    exported = export(call, PLAIN, custom_translation_table={torch.ops.export_test.twice.default: twice})
    assert exported.types == ["Attention", "Add"]


def test_a_model_without_attention_exports_as_ever() -> None:
    exported = export(lambda t: {"y": t["x"] * 2}, {"x": torch.randn(3)})
    assert exported.types == ["Mul"] and exported.opset >= 18


def test_packet_calls_and_python_functions_choose_the_same_overloads() -> None:
    def packet(t: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"Y": OPS.attention(t["Q"], t["K"], t["K"], past_key=t["past"], past_value=t["past"])[0]}

    def function(t: dict[str, Tensor]) -> dict[str, Tensor]:
        result = torch_onnx_attn.attention(t["Q"], t["K"], t["K"], past_key=t["past"], past_value=t["past"], qk_matmul_output_mode=3)
        return {"Y": result.Y, "qk": result.qk_matmul_output}

    assert len(export(packet, PAST).node("Attention").output) == 3
    assert len(export(function, PAST).node("Attention").output) == 4


# ------------------------------------------------------------------------------------- torch.onnx.export with the table


def plain_export(function: Function, inputs: dict[str, Tensor], opset: int, **options: Any) -> Any:
    return torch.onnx.export(
        Call(list(inputs), function).eval(),
        tuple(inputs.values()),
        dynamo=True,
        opset_version=opset,
        custom_translation_table=torch_onnx_attn.onnx.translation_table(opset),
        input_names=list(inputs),
        verbose=False,
        **options,
    )


@pytest.mark.parametrize("opset", [23, 24, 25])
def test_the_table_alone_gives_minimal_nodes(opset: int) -> None:
    proto = plain_export(plain, PLAIN, opset).model_proto
    onnx.checker.check_model(proto, full_check=True)
    (node,) = proto.graph.node
    assert (node.op_type, list(node.input), len(node.output), len(node.attribute)) == ("Attention", ["Q", "K", "K"], 1, 0)
    assert proto.opset_import[0].version == opset


@pytest.mark.parametrize("opset", [23, 24, 25])
def test_tidy_after_the_table_alone(opset: int) -> None:
    """The exporter's optimizer removes unread presents and names unread outputs."""

    def past_unread(t: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"Y": with_past(t)["Y"]}

    program = plain_export(past_unread, PAST, opset)
    torch_onnx_attn.onnx.tidy(program)
    assert len(program.model_proto.graph.node[0].output) == 3

    def scores(t: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(("Y", "qk"), OPS.attention.qk(t["Q"], t["K"], t["K"], qk_matmul_output_mode=0), strict=True))

    program = plain_export(scores, PLAIN, opset)
    torch_onnx_attn.onnx.tidy(program)
    assert [bool(name) for name in program.model_proto.graph.node[0].output] == [True, False, False, True]


def test_the_table_alone_without_the_optimizer() -> None:
    proto = plain_export(plain, PLAIN, 25, optimize=False).model_proto
    assert [len(node.attribute) for node in proto.graph.node if node.op_type == "Attention"] == [0]


@pytest.mark.parametrize(
    ("function", "inputs", "opset", "message"),
    [
        pytest.param(with_lengths, LENGTHS, 23, "nonpad_kv_seqlen needs opset 24", id="lengths"),
        pytest.param(left_window, PLAIN, 24, "left_window_size needs opset 25", id="window"),
        pytest.param(scatter, CACHE, 23, "tensor_scatter needs opset 24", id="tensor_scatter"),
    ],
)
def test_the_table_alone_names_what_an_opset_lacks(function: Function, inputs: dict[str, Tensor], opset: int, message: str) -> None:
    with pytest.raises(Exception, match=message):
        plain_export(function, inputs, opset)


def test_the_table_ends_where_the_exporter_does() -> None:
    with pytest.raises(torch_onnx_attn.onnx.ExportError, match=r"opset=26: .*torch_onnx_attn\.onnx\.export reaches 28"):
        torch_onnx_attn.onnx.translation_table(26)


def test_every_op_has_a_translation_or_a_pure_form() -> None:
    """A new overload must not be forgotten here."""
    in_place = {"onnx_attn::tensor_scatter_", "onnx_attn::attention_cached", "onnx_attn::mha.shared"}
    translated = {op.name() for op in torch_onnx_attn.onnx.translation_table(25)}
    public = {schema for schema in torch._C._dispatch_get_all_op_names() if schema.startswith("onnx_attn::") and "::_" not in schema}
    assert public - in_place == translated


# -------------------------------------------------------------------------------------------------------------- imports


def python(code: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=1200, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_needs_torch_only() -> None:
    out = python("""
        import sys
        import torch_onnx_attn, torch_onnx_attn.onnx
        print(sorted({name.split(".")[0] for name in sys.modules} & {"onnx", "onnxscript", "onnx_ir", "onnxruntime", "ml_dtypes"}))
    """)
    assert out.strip() == "[]"


def test_a_missing_package_is_said_in_a_sentence() -> None:
    out = python("""
        import sys
        sys.modules["onnxscript"] = None
        import torch, torch_onnx_attn.onnx
        for call in (lambda: torch_onnx_attn.onnx.export(torch.nn.Linear(2, 2).eval(), (torch.randn(2),)),
                     lambda: torch_onnx_attn.onnx.translation_table(24)):
            try:
                call()
            except ImportError as error:
                print(error)
    """)
    line = "torch_onnx_attn.onnx needs onnxscript: pip install onnxscript (or the extra torch-onnx-attn[onnx])"
    assert out.strip().splitlines() == [line, line]
