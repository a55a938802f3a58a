"""`rewrite in.onnx out.onnx`: what it writes, what it says, and that nothing unchecked or unusable comes out of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from rewrite_models import QKV, by_onnxruntime, graph, onnx

from torch_onnx_attn.bad_input import BadInput
from torch_onnx_attn.cli import main
from torch_onnx_attn.models.rewrite import file, rewrite_file, rewriting

PRODUCT = "kt = Transpose<perm = [0,1,3,2]>(k)\ns = MatMul(q, kt)\n"
WRITTEN_OUT = PRODUCT + "a = Mul(s, c)\nm = Add(a, mask)\nw = Softmax(m)\nx = MatMul(w, v)\ny = MatMul(x, p)"


def model() -> Any:
    weights = np.random.default_rng(0).standard_normal((8, 300)).astype(np.float32)
    return graph(WRITTEN_OUT, QKV + ", float[l,s] mask", constants={"c": 0.3, "p": weights})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    onnx.save(model(), tmp_path / "in.onnx")
    return tmp_path / "in.onnx"


def feeds() -> dict[str, Any]:
    generator = np.random.default_rng(1)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 4, 7, 8), "v": (2, 4, 7, 8), "mask": (5, 7)}
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The only sentence of a run with exit code 2."""
    assert main(["rewrite", *arguments]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert not captured.out and line.startswith("error: ") and "Traceback" not in line
    return line


def test_writes_and_reports(source, capsys):
    destination = source.with_name("out.onnx")
    assert main(["rewrite", str(source), str(destination)]) == 0
    text = capsys.readouterr().out
    assert "1 Attention nodes made, nodes 7 -> 2, opset 18 -> 23" in text
    assert text.count("agree on made-up inputs") == 2, "two sizes"
    assert f"{destination}: written" in text
    proto = onnx.load(destination)
    onnx.checker.check_model(proto, full_check=True)
    np.testing.assert_allclose(by_onnxruntime(proto, feeds())[0], by_onnxruntime(model(), feeds())[0], rtol=1e-5, atol=1e-5)
    assert sorted(entry.name for entry in source.parent.iterdir()) == ["in.onnx", "out.onnx"]


def test_json(source, capsys):
    assert main(["rewrite", str(source), str(source.with_name("out.onnx")), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["replaced"][0]["attributes"] == {"scale": pytest.approx(0.3)}
    assert report["replaced"][0]["inputs"] == ["attn_mask"]
    assert report["is_written"] and [check["agrees"] for check in report["checked"]] == [True, True]
    assert report["nodes_before"] == 7 and report["nodes_after"] == 2 and report["left"] == []


def test_given_inputs_and_sizes(source, tmp_path, capsys):
    np.savez(tmp_path / "inputs.npz", **feeds())
    assert main(["rewrite", str(source), str(tmp_path / "out.onnx"), "--inputs", str(tmp_path / "inputs.npz")]) == 0
    assert "agree on given inputs (q [2, 4, 5, 8], k [2, 4, 7, 8]" in capsys.readouterr().out
    assert main(["rewrite", str(source), str(tmp_path / "out.onnx"), "--dim", "l=3"]) == 0
    assert capsys.readouterr().out.count("q [2, 4, 3, 8]") == 1


def test_in_place(source):
    assert rewrite_file(source, source).is_written
    assert "Attention" in [node.op_type for node in onnx.load(source).graph.node]


@pytest.mark.parametrize("fault", ["scale", "mask"])
def test_a_wrong_rewrite_is_not_written(fault, source, monkeypatch, capsys):
    """The check finds what a defect in the rules would do; an older file stays."""
    destination = source.with_name("out.onnx")
    destination.write_bytes(b"older")

    def wrong(subject: Any, found: Any) -> Any:
        made = replace(subject, found)
        node = next(node for node in subject.graph if node.op_type == "Attention")
        if fault == "scale":
            node.attributes["scale"] = onnx_ir.AttrFloat32("scale", 0.31)
        else:
            node.replace_input_with(3, None)
        return made

    replace = rewriting._replace
    monkeypatch.setattr(rewriting, "_replace", wrong)
    assert main(["rewrite", str(source), str(destination)]) == 1
    text = capsys.readouterr().out
    assert "DIFFER" in text and f"{destination}: not written" in text
    assert destination.read_bytes() == b"older"
    assert sorted(entry.name for entry in source.parent.iterdir()) == ["in.onnx", "out.onnx"]


def test_nodes_that_verify_refuses_are_not_written(source, monkeypatch):
    class Failing:
        def failures(self) -> list[Any]:
            return [type("Node", (), {"node": "w_as_attention", "status": "differs"})()]

    monkeypatch.setattr(file, "verify", lambda *_: Failing())
    report = rewrite_file(source, source.with_name("out.onnx"))
    assert report.unverified == ["w_as_attention: differs"] and not report.is_written
    assert not source.with_name("out.onnx").exists()


def test_nothing_to_prove(tmp_path, capsys):
    """Exit code 2, with the reason, and no file."""
    onnx.save(graph(PRODUCT + "w = Softmax<axis = 1>(s)\ny = MatMul(w, v)"), tmp_path / "in.onnx")
    assert main(["rewrite", str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")]) == 2
    text = capsys.readouterr().out
    assert "left Softmax w: its axis is 1, not the last" in text and "not written" in text
    assert not (tmp_path / "out.onnx").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Weights in files of their own


def save_apart(path: Path) -> None:
    onnx.save(model(), path, save_as_external_data=True, location=f"{path.name}.weights", size_threshold=0)


def test_external_data_stays_external(tmp_path):
    source, destination = tmp_path / "in.onnx", tmp_path / "out" / "new.onnx"
    destination.parent.mkdir()
    save_apart(source)
    assert rewrite_file(source, destination).is_written
    assert sorted(entry.name for entry in destination.parent.iterdir()) == ["new.onnx", "new.onnx.data"]
    np.testing.assert_allclose(
        by_onnxruntime(onnx.load(destination), feeds())[0], by_onnxruntime(model(), feeds())[0], rtol=1e-5, atol=1e-5
    )


def test_external_data_in_place(tmp_path):
    """The weights are read before their file is written again."""
    source = tmp_path / "in.onnx"
    onnx.save(model(), source, save_as_external_data=True, location="in.onnx.data", size_threshold=0)
    assert rewrite_file(source, source).is_written
    np.testing.assert_allclose(by_onnxruntime(onnx.load(source), feeds())[0], by_onnxruntime(model(), feeds())[0], rtol=1e-5, atol=1e-5)


def test_weights_of_another_model_stay_as_they_are(tmp_path):
    """An older model, renamed, still reads new.onnx.data: the new model's weights go elsewhere."""
    source, destination = tmp_path / "old.onnx", tmp_path / "new.onnx"
    onnx.save(model(), source, save_as_external_data=True, location="new.onnx.data", size_threshold=0)
    weights = (tmp_path / "new.onnx.data").read_bytes()
    assert rewrite_file(source, destination).is_written
    assert (tmp_path / "new.onnx.data").read_bytes() == weights and (tmp_path / "new.onnx.1.data").is_file()
    for path in (source, destination):
        np.testing.assert_allclose(by_onnxruntime(onnx.load(path), feeds())[0], by_onnxruntime(model(), feeds())[0], rtol=1e-5, atol=1e-5)


def test_the_weights_are_no_destination(tmp_path, capsys):
    save_apart(tmp_path / "in.onnx")
    weights = (tmp_path / "in.onnx.weights").read_bytes()
    assert "holds the weights of" in refused([str(tmp_path / "in.onnx"), str(tmp_path / "in.onnx.weights")], capsys)
    assert (tmp_path / "in.onnx.weights").read_bytes() == weights


def test_a_large_model_gets_external_data(source, monkeypatch):
    monkeypatch.setattr(file, "_MOST_IN_ONE_FILE", 1000)
    destination = source.with_name("out.onnx")
    assert rewrite_file(source, destination).is_written
    assert destination.with_name("out.onnx.data").stat().st_size >= 8 * 300 * 4


# ---------------------------------------------------------------------------------------------------------------------
# Input that cannot be used


def test_unusable_files(source, tmp_path, capsys):
    out = str(tmp_path / "out.onnx")
    assert "there is no such file" in refused([str(tmp_path / "none.onnx"), out], capsys)
    content = source.read_bytes()
    for name, written, reason in (
        ("cut.onnx", content[: len(content) // 2], "is cut short"),
        ("empty.onnx", b"", "is empty"),
        ("text.onnx", b"this is no model at all, but it is long enough", "is not an ONNX model"),
    ):
        (tmp_path / name).write_bytes(written)
        assert reason in refused([str(tmp_path / name), out], capsys)
    onnx.save(graph("y = Relu(q)", "float[b,4,l,8] q"), tmp_path / "plain.onnx")
    assert "has no attention" in refused([str(tmp_path / "plain.onnx"), out], capsys)
    broken = model()
    del broken.graph.node[1].input[1]  # a MatMul of one matrix
    (tmp_path / "broken.onnx").write_bytes(broken.SerializeToString())
    assert "is not a valid model" in refused([str(tmp_path / "broken.onnx"), out], capsys)
    assert "its folder does not exist" in refused([str(source), str(tmp_path / "none" / "out.onnx")], capsys)
    assert "is a folder" in refused([str(source), str(tmp_path)], capsys)
    assert not os.path.exists(out)


def test_a_damaged_node_beside_an_operator_that_onnx_does_not_know(tmp_path, capsys):
    """onnx.checker gives up at the latter, and what it did not see is looked at node by node."""
    proto = model()
    proto.graph.node.insert(0, onnx.helper.make_node("SomethingOfARuntime", ["q"], ["unused"]))
    reads_outside = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["y"], ["z"])], "g", [], [onnx.ValueInfoProto(name="z")])
    proto.graph.node.append(onnx.helper.make_node("If", ["p"], ["z"], then_branch=reads_outside, else_branch=reads_outside))
    assert not file._is_valid(save_as(proto, tmp_path), proto)
    del proto.graph.node[-1]
    del proto.graph.node[-3].output[:]  # of the Softmax
    assert "is not a valid model" in refused([str(save_as(proto, tmp_path)), str(tmp_path / "out.onnx")], capsys)


def save_as(proto: Any, folder: Path) -> Path:
    """Without the checks of onnx.save."""
    (folder / "in.onnx").write_bytes(proto.SerializeToString())
    return folder / "in.onnx"


def test_unusable_external_data(tmp_path, capsys):
    out = str(tmp_path / "out.onnx")
    save_apart(tmp_path / "in.onnx")
    (tmp_path / "in.onnx.weights").rename(tmp_path / "elsewhere")
    assert "is missing" in refused([str(tmp_path / "in.onnx"), out], capsys)
    inner = tmp_path / "inner"
    inner.mkdir()
    proto = onnx.load(tmp_path / "in.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../elsewhere"
    (inner / "in.onnx").write_bytes(proto.SerializeToString())
    assert "outside the model's folder" in refused([str(inner / "in.onnx"), out], capsys)


def test_unusable_inputs(source, tmp_path, capsys):
    out = str(tmp_path / "out.onnx")
    np.savez(tmp_path / "wrong.npz", nobody=np.zeros(3, np.float32))
    assert "nobody is no input of the model" in refused([str(source), out, "--inputs", str(tmp_path / "wrong.npz")], capsys)
    np.savez(tmp_path / "odd.npz", **(feeds() | {"mask": np.zeros((5, 6), np.float32)}))
    assert "the models cannot be compared with inputs" in refused([str(source), out, "--inputs", str(tmp_path / "odd.npz")], capsys)
    assert "no input has such a dimension" in refused([str(source), out, "--dim", "z=3"], capsys)
    assert not os.path.exists(out)


def test_an_opset_that_nobody_knows(source, tmp_path, capsys):
    proto = model()
    proto.opset_import[0].version = 99
    source.write_bytes(proto.SerializeToString())
    assert "has an opset that is not known here" in refused([str(source), str(tmp_path / "out.onnx")], capsys)


def test_onnx_spelt_out_as_a_domain(source, tmp_path):
    proto = model()
    proto.opset_import[0].domain = "ai.onnx"
    onnx.save(proto, source)
    report = rewrite_file(source, tmp_path / "out.onnx")
    assert report.is_written and (report.opset_before, report.opset_after) == (18, 23)


def test_seeds_and_sizes_that_nothing_can_have(source, tmp_path, capsys):
    out = str(tmp_path / "out.onnx")
    assert "--seed -1: must be 0 or more" in refused([str(source), out, "--seed", "-1"], capsys)
    assert "is larger than any array can be" in refused([str(source), out, "--dim", f"l={10**25}"], capsys)
    assert "not enough memory" in refused([str(source), out, "--dim", f"l={2**46}"], capsys)


@pytest.mark.parametrize("fill", [-np.inf, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("is_kept", [True, False])
def test_made_up_masks_leave_a_key_whichever_way_they_are_meant(tmp_path, fill, is_kept):
    """True is a key that counts, or one that does not, as in torch's key_padding_mask. A row without a key would differ, as documented."""
    choice = "m = Where(mask, s, c)" if is_kept else "m = Where(mask, c, s)"
    body = PRODUCT + choice + "\nw = Softmax(m)\ny = MatMul(w, v)"
    onnx.save(graph(body, QKV + ", bool[b,1,1,s] mask", constants={"c": fill}), tmp_path / "in.onnx")
    assert rewrite_file(tmp_path / "in.onnx", tmp_path / "out.onnx").is_written


def test_an_opset_that_cannot_be_raised(tmp_path):
    """onnx has no adapter for an LSTM of opset 6; the error says which operator it is."""
    body = PRODUCT + "w = Softmax<axis = 3>(s)\ny = MatMul(w, v)\nz = LSTM<hidden_size = 4>(x, weights, weights)"
    inputs = QKV + ", float[t,n,4] x, float[1,16,4] weights"
    onnx.save(graph(body, inputs, "float[b,4,l,8] y, float[t,e,n,f] z", opset=6), tmp_path / "in.onnx")
    with pytest.raises(BadInput, match=r"opset 6 cannot be raised to 23, which Attention needs: .*LSTM"):
        rewrite_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
