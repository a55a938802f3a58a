"""The command line: what it prints, its exit codes, and that bad input is one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import Source, model_of, model_of_node, onnx, save

import torch_onnx_attn
from torch_onnx_attn.cli import main

pytest.importorskip("rich")
pytest.importorskip("onnxruntime")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The exit code, the output and the errors of one command."""

    def command(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return code, captured.out, captured.err

    return command


@pytest.fixture
def plain_model(tmp_path: Path) -> Path:
    return save(model_of_node("attention", Source().qkv(dtype=np.float16, size=64), is_causal=1), tmp_path)


@pytest.fixture
def model_with_known_defect(tmp_path: Path) -> Path:
    arrays = Source().qkv() | {"attn_mask": Source(1).keep(3, 5)}
    return save(model_of_node("attention", arrays, ["Y", "qk_matmul_output"], qk_matmul_output_mode=2), tmp_path, "known.onnx")


@pytest.fixture
def invalid_model(tmp_path: Path) -> Path:
    return save(model_of_node("attention", Source().qkv() | {"attn_mask": np.ones((3, 7), bool)}), tmp_path, "invalid.onnx")


# ---------------------------------------------------------------------------------------------------------------------
# verify
# ---------------------------------------------------------------------------------------------------------------------


def test_verify_agrees(run: Run, plain_model: Path) -> None:
    code, out, err = run("verify", plain_model)
    assert code == 0 and err == ""
    assert "agree" in out and "onnxruntime" in out and "1 node: no unexplained deviation" in out
    assert "made-up inputs: Q float16[2, 4, 3, 64]" in out


def test_verify_names_a_known_defect_and_is_strict_if_asked(run: Run, model_with_known_defect: Path) -> None:
    code, out, _ = run("verify", model_with_known_defect)
    assert code == 0 and "onnxruntime differs, as known" in out and "1 with a known defect of an oracle" in out
    assert run("verify", model_with_known_defect, "--strict")[0] == 1


def test_verify_fails_where_something_is_wrong(run: Run, invalid_model: Path) -> None:
    code, out, _ = run("verify", invalid_model)
    assert code == 1 and "torch_onnx_attn refuses" in out and "1 with an unexplained deviation" in out


def test_verify_without_an_oracle(run: Run, model_with_known_defect: Path) -> None:
    code, out, _ = run("verify", model_with_known_defect, "--without", "onnxruntime", "--strict")
    assert code == 0 and "onnxruntime" not in out and "onnx.reference" in out


def test_verify_as_json(run: Run, model_with_known_defect: Path) -> None:
    code, out, err = run("verify", model_with_known_defect, "--json", "--seed", 3)
    found = json.loads(out)
    assert code == 0 and err == ""
    (node,) = found["nodes"]
    assert node["node"] == "layer" and node["status"] == "known" and node["odd_one_out"] == ["onnxruntime"]
    scores = next(output for output in node["outputs"] if output["name"] == "qk_matmul_output")
    assert scores["deviations"]["onnxruntime"]["absolute"] == "inf" and scores["deviations"]["torch_onnx_attn"]["ratio"] < 1
    assert "score mode 2" in scores["known"]["onnxruntime"] and found["failures"] == []


def test_verify_with_inputs_sizes_and_a_report(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arrays = Source().qkv()
    model = model_of_node("attention", arrays)
    for entry in model.graph.input:
        entry.type.tensor_type.shape.dim[2].dim_param = "length"
    np.savez(tmp_path / "inputs.npz", Q=arrays["Q"])
    path = save(model, tmp_path)
    code, out, _ = run("verify", path, "--inputs", tmp_path / "inputs.npz", "--node", "layer", "--report", tmp_path / "report.html")
    assert (
        code == 0
        and "made-up inputs: K float32[2, 2, 3, 8]" in out
        and (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    )
    assert "K float32[2, 2, 6, 8]" in run("verify", path, "--dim", "length=6")[1]


# ---------------------------------------------------------------------------------------------------------------------
# inspect and explain
# ---------------------------------------------------------------------------------------------------------------------


def test_inspect(run: Run, plain_model: Path) -> None:
    code, out, err = run("inspect", plain_model, "--machine", "h200")
    assert code == 0 and err == ""
    for part in (
        "1 attention node, opset 24 (these nodes need 23)",
        "grouped heads 4/2, causal",
        "decode",
        "ONNX Runtime 1.32 CPU",
        "onnx.reference",
    ):
        assert part in out
    assert "kernel (here)" in run("inspect", plain_model)[1]


def test_inspect_of_a_model_whose_opset_is_too_low(run: Run, tmp_path: Path) -> None:
    model = save(model_of_node("attention", Source().qkv(), opset=24, left_window_size=3), tmp_path)
    code, out, _ = run("inspect", model)
    assert code == 0 and "opset 24 (these nodes need 25)" in out and "the model is not valid: opset 24" in out


def test_inspect_as_json(run: Run, plain_model: Path) -> None:
    code, out, _ = run("inspect", plain_model, "--machine", "a100", "--json")
    (node,) = json.loads(out)["nodes"]
    assert code == 0 and node["plan"]["kernel"] == "decode" and node["inputs"]["K"] == "float16[2, 2, 5, 64]"
    assert {view["runtime"]: view["level"] for view in node["runtimes"]}["ONNX Runtime 1.30 CPU"] == "takes"


def test_explain_a_written_call(run: Run) -> None:
    shapes = ("Q=1x32x512x128", "K=1x8x8192x128", "V=1x8x8192x128:bfloat16")
    code, out, _ = run(
        "explain", "attention", *shapes, "is_causal=true", "nonpad_kv_seqlen=1", "softcap=2.5", "--dtype", "bfloat16", "--machine", "h200"
    )
    assert code == 0 and "kernel     forward_sm90" in out and "not        decode: " in out and "workspace  " in out
    code, out, _ = run("explain", "attention", *shapes, "--dtype", "bfloat16", "--machine", "cpu", "--json")
    assert code == 0 and json.loads(out)["plan"]["kernel"] == "cpu" and json.loads(out)["machine"]["is_cuda"] is False
    mha = ("query=2x5x64", "key=2x5x64", "value=2x5x64", "num_heads=4", "--dtype", "float32", "--machine", "h200")
    assert "kernel     forward_float32" in run("explain", "mha", *mha)[1]


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["attention"], "missing"),
        (["attention", "Q=1x2"], "missing"),
        (["attention", "Q"], "Q: must be NAME=VALUE"),
        (["attention", "Q=2y3"], "Q=2y3: is neither a number"),
        (["attention", "Q=2x3:float99"], "Q=2x3:float99: 'float99' is none of float16, bfloat16"),
        (["attention", "Q=2x3:"], "Q=2x3:: '' is none of float16, bfloat16"),
        (["attention", "Q=2x3:quint8"], "'quint8' is none of"),
        (["attention", "Q=99999999999x99999999999x8"], "is more than this machine has memory for"),
        (["attention", "Q=99999999999999999999999x8"], "is more than this machine has memory for"),
        (["attention", "Q=axb"], "must be a shape such as"),
        (["attention", "Q=1x2x3x4", "K=1x2x3x5", "V=1x2x3x4"], "K: "),
        (["attention", "Q=1x2x3x4", "K=1x2x3x4", "V=1x2x3x4", "speed=3"], "speed"),
        (["nonsense"], "nonsense: is neither a file nor one of attention"),
        (["nothing.npz"], "nothing.npz: there is no such file"),
        (["nothing.npz", "a=1"], "a=1: a recorded call brings its own arguments"),
        (["attention", "--machine", "abacus"], "--machine abacus: must be here, cpu, a100, h100, h200"),
    ],
)
def test_explain_refuses(run: Run, arguments: list[str], reason: str) -> None:
    code, out, err = run("explain", *arguments)
    assert code == 2 and out == "" and reason in err and err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------------------
# record and replay
# ---------------------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch, torch_onnx_attn
print("program says", sys.argv[1:])
if __name__ == "__main__":
    Q = torch.randn(2, 4, 3, 8)
    for softcap in (1.0, 2.0):
        torch_onnx_attn.attention(Q, Q, Q, softcap=softcap)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_record_and_replay(run: Run, program: Path, tmp_path: Path) -> None:
    before = list(sys.argv), list(sys.path)
    code, out, _ = run("record", "--list", program, "--epochs", "3")
    assert code == 0 and "program says ['--epochs', '3']" in out
    assert "    0  attention(" in out and "    1  attention(" in out and "softcap=2.0" in out
    path = tmp_path / "call.npz"
    code, out, _ = run("record", "--call", 1, "--output", path, program)
    assert code == 0 and f"{path}: call 1, attention(" in out
    code, out, _ = run("replay", path, "--repeats", 2)
    assert code == 0 and "softcap=2.0" in out and "kernel cpu" in out and "agrees" in out and "the recorded bits" in out
    code, out, _ = run("replay", path, "--repeats", 2, "--device", "cpu", "--json")
    replayed = json.loads(out)
    assert (
        code == 0
        and replayed["agrees"]
        and replayed["same_bits"]
        and replayed["plan"]["kernel"] == "cpu"
        and replayed["origin"]["index"] == 1
    )
    code, out, _ = run("explain", path, "--machine", "h200")
    assert code == 0 and "kernel     forward_float32" in out and "float16" in out
    assert (sys.argv, sys.path) == before


def test_record_as_json_is_alone_on_the_output(run: Run, program: Path, tmp_path: Path) -> None:
    code, out, err = run("record", "--output", tmp_path / "call.npz", "--json", program)
    assert code == 0 and len(json.loads(out)["calls"]) == 2 and "program says" in err


def test_replay_of_a_changed_recording_fails(run: Run, program: Path, tmp_path: Path) -> None:
    path = tmp_path / "call.npz"
    run("record", "--output", path, program)
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["output.Y"] += 1
    np.savez(path, **arrays)
    code, out, _ = run("replay", path, "--repeats", 1)
    assert code == 1 and "differs" in out and "not the recorded bits" in out


def test_record_refuses(run: Run, program: Path, tmp_path: Path) -> None:
    code, _, err = run("record", "--output", tmp_path / "call.npz", "--call", 7, program)
    assert code == 2 and "--call 7: the program made 2 calls; --list lists them" in err
    code, _, err = run("record", tmp_path / "nothing.py")
    assert code == 2 and "there is no such program" in err


@pytest.mark.parametrize("error", ["KeyError", "BaseException"])
def test_record_of_a_program_that_fails_shows_its_traceback(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: str
) -> None:
    program.write_text(f"raise {error}('lost')")
    assert main(["record", "--output", str(tmp_path / "call.npz"), str(program)]) == 2
    captured = capsys.readouterr()
    assert f"{error}: " in captured.err and "lost" in captured.err and f"program.py: ended with {error}" in captured.err
    assert captured.err.count("File ") == 1, "the program's frames and no others"


def test_record_shows_the_last_word_of_a_program(run: Run, program: Path) -> None:
    program.write_text("import sys; sys.exit('done so far')")
    code, _, err = run("record", "--list", program)
    assert code == 0 and err == "done so far\n"


@pytest.mark.parametrize(
    "output, reason",
    [("missing/call.npz", "its folder does not exist"), ("", "an empty file name cannot be written to"), ("/", "is a folder")],
)
def test_record_says_before_the_program_runs_that_nothing_can_be_written(run: Run, program: Path, output: str, reason: str) -> None:
    code, out, err = run("record", "--output", output, program)
    assert code == 2 and out == "" and reason in err and err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize("kind", ["missing", "text", "truncated", "without attention", "external data missing", "external data outside"])
def test_a_bad_model_is_one_sentence_and_exit_code_2(run: Run, tmp_path: Path, command: str, kind: str) -> None:
    path = tmp_path / "model.onnx"
    if kind == "text":
        path.write_text("no model")
    elif kind == "truncated":
        content = model_of_node("attention", Source().qkv()).SerializeToString()
        path.write_bytes(content[:-40])
    elif kind == "without attention":
        save(model_of([onnx.helper.make_node("Relu", ["x"], ["y"])], {"x": np.zeros(2, np.float32)}, ["y"]), tmp_path)
    elif kind.startswith("external"):
        weight = onnx.TensorProto(name="K", data_type=1, dims=[2, 2, 5, 8], data_location=onnx.TensorProto.EXTERNAL)
        weight.external_data.add(key="location", value="../weights.bin" if kind.endswith("outside") else "weights.bin")
        node = onnx.helper.make_node("Attention", ["Q", "K", "K"], ["Y"])
        save(model_of([node], {"Q": Source().qkv()["Q"]}, ["Y"], initializer=[weight]), tmp_path)
    code, out, err = run(command, path)
    assert code == 2 and out == "" and err.startswith(f"error: {path}: ") and err.count("\n") == 1
    code, out, _ = run(command, path, "--json")
    assert code == 2 and json.loads(out)["error"].startswith(str(path))


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["verify", "MODEL", "--inputs", "nothing.npz"], "nothing.npz: there is no such file"),
        (["verify", "MODEL", "--dim", "rows"], "--dim rows: must be NAME=SIZE"),
        (["verify", "MODEL", "--dim", "rows=3"], "--dim rows: no input has such a dimension; there are none"),
        (["verify", "MODEL", "--node", "other"], "no attention node 'other'; there are layer"),
        (["verify", "MODEL", "--device", "abacus"], "--device abacus: is not available here"),
        (["verify", "MODEL", "--device", "hpu"], "--device hpu: is not available here"),
        (["verify", "MODEL", "--device", "meta"], "--device meta: must be cpu or cuda"),
        (["verify", "MODEL", "--seed", "-1"], "--seed -1: must be 0 or more"),
        (["verify", "MODEL", "--report", "nowhere/report.html"], "nowhere/report.html: its folder does not exist"),
        (["verify", "MODEL", "--report", "/"], "/: is a folder"),
        (["inspect", "MODEL", "--machine", "abacus"], "--machine abacus: must be"),
        (["inspect", "MODEL", "--dim", "x=-1"], "--dim x=-1: must be NAME=SIZE"),
        (["replay", "nothing.npz"], "nothing.npz: there is no such file"),
        (["replay", "nothing.npz", "--repeats", "0"], "--repeats 0: must be at least 1"),
        (["replay", "MODEL"], "is not a recorded call"),
    ],
)
def test_bad_arguments(run: Run, plain_model: Path, arguments: list[str], reason: str) -> None:
    code, out, err = run(*(plain_model if argument == "MODEL" else argument for argument in arguments))
    assert code == 2 and out == "" and reason in err and err.count("\n") == 1


def test_unknown_commands_and_help(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["paint"], 2), ([], 2), (["--help"], 0), (["verify", "--help"], 0), (["--version"], 0)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
    out = capsys.readouterr().out
    assert all(name in out for name in ("explain", "info", "inspect", "record", "replay", "verify")) and torch_onnx_attn.__version__ in out


# ---------------------------------------------------------------------------------------------------------------------
# Terminals, pipes and interruptions
# ---------------------------------------------------------------------------------------------------------------------


def test_names_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    model = model_of_node("attention", Source().qkv())
    model.graph.node[0].name = "\x1b[2Jgone\nnext [bold]line[/bold]"
    path = save(model, tmp_path)
    for command in ("verify", "inspect"):
        code, out, err = run(command, path)
        assert code == 0 and "\x1b" not in out and "\\x1b[2Jgone\\nnext" in "".join(out.split(" ")) + out
    code, out, err = run("verify", path, "--node", "\x1b[31mred\n")
    assert code == 2 and "\x1b" not in err and err.count("\n") == 1


def test_a_narrow_terminal_gets_lines(run: Run, plain_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    code, out, _ = run("verify", plain_model)
    assert code == 0 and "  node: layer\n" in out and "  verdict: agree\n" in out and "┃" not in out


def test_an_interruption_is_one_line(run: Run, plain_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_onnx_attn.cli.inspect.run", interrupted)
    assert run("inspect", plain_model) == (130, "", "error: interrupted\n")
    code, out, _ = run("inspect", plain_model, "--json")
    assert code == 130 and json.loads(out) == {"error": "interrupted"}


def test_too_little_memory_is_one_line(run: Run, tmp_path: Path) -> None:
    model = model_of_node("attention", Source().qkv())
    for entry in model.graph.input:
        entry.type.tensor_type.shape.dim[2].dim_param = "rows"
    code, _, err = run("verify", save(model, tmp_path), "--dim", f"rows={2**46}")
    assert code == 2 and "not enough memory" in err and err.count("\n") == 1


def test_info(run: Run) -> None:
    code, out, _ = run("info")
    assert code == 0 and "works                       yes" in out and "TORCH_ONNX_ATTN_KERNEL" in out
    code, out, _ = run("info", "--json")
    found = json.loads(out)
    assert code == 0 and found["torch_onnx_attn"]["works"] == "yes" and found["packages"]["onnx"] == onnx.__version__
    assert found["torch_onnx_attn"]["library"].endswith(".so")
