"""The HTML report: one file that stands alone, with everything that `verify` found."""

from __future__ import annotations

import base64
import dataclasses
import html.parser
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import Source, model_of, node_proto, onnx, save

from torch_onnx_attn.models import verify

pytest.importorskip("matplotlib")
pytest.importorskip("onnxruntime")
report: Any = importlib.import_module("torch_onnx_attn.models.report")


class Page(html.parser.HTMLParser):
    """What a browser would see: the text, the pictures, and anything that would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.pictures, self.fetched = "", [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        for name, value in attrs:
            if name == "src" and value.startswith("data:image/png;base64,"):
                self.pictures.append(base64.b64decode(value.partition(",")[2]))
            elif name in ("src", "href"):
                self.fetched.append(value)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    tmp_path = tmp_path_factory.mktemp("report")
    arrays = Source().qkv() | {"attn_mask": Source(1).keep(3, 5)}
    first = node_proto("attention", arrays, ["Y", "qk_matmul_output"], name="<first> & only", qk_matmul_output_mode=2)
    second = onnx.helper.make_node("Attention", ["Y", "K", "V"], ["Z"], name="second")
    path = save(model_of([first, second], arrays, ["Z"]), tmp_path)
    report.write(verify(path, keep_errors=True), tmp_path / "report.html")
    return Page((tmp_path / "report.html").read_text())


def test_the_page_holds_every_node_and_its_verdict(page: Page) -> None:
    assert "<first> & only" in page.text and "second" in page.text
    assert "score mode 2 adds the lowest finite number" in page.text and "Made-up inputs: Q float32[2, 4, 3, 8]" in page.text
    assert "boolean mask" in page.text and "torch_onnx_attn" in page.text and "onnx.reference" in page.text


def test_the_page_has_an_overview_and_maps_of_what_differs(page: Page) -> None:
    assert len(page.pictures) == 2  # the overview, and the maps of the node that differs
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in page.pictures)


def test_the_page_fetches_nothing(page: Page) -> None:
    assert page.fetched == []


def test_error_maps_show_where(tmp_path: Path) -> None:
    arrays = Source().qkv(300, 5) | {"attn_mask": np.zeros((300, 5), np.float32)}
    arrays["attn_mask"][299] = np.finfo(np.float32).min  # a row that ONNX Runtime makes 0
    path = save(model_of([node_proto("attention", arrays, ["Y"])], arrays, ["Y"]), tmp_path)
    (node,) = verify(path, arrays, keep_errors=True).nodes
    errors = node.errors["Y", "onnxruntime"]
    assert errors.shape == (128, 8) and (errors[-1] > 1).any() and (errors[:-1] <= 1).all()
    assert (node.errors["Y", "torch_onnx_attn"] <= 1).all()
    assert verify(path, arrays).nodes[0].errors == {}


def test_a_report_of_many_and_of_odd_nodes(tmp_path: Path) -> None:
    cache = {"past_cache": Source().normal(2, 6, 8), "update": Source().normal(2, 2, 8)}
    nodes = [node_proto("tensor_scatter", cache, ["present_cache"], name=f"write{i}") for i in range(1)]
    bad = Source().qkv() | {"attn_mask": np.ones((3, 7), bool)}
    nodes.append(node_proto("attention", bad, ["Y"], name="refused"))
    path = save(model_of(nodes, cache | bad, ["present_cache", "Y"]), tmp_path)
    report.write(verify(path, keep_errors=True), tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text())
    assert "refuses: attn_mask" in page.text and "write0" in page.text


@pytest.mark.parametrize("name", ["$\\frac$", "_^{$$}", "層", "layer." * 60])
@pytest.mark.filterwarnings("error")
def test_any_name_can_stand_beside_a_plot(tmp_path: Path, name: str) -> None:
    """Dollars are no formula, and a letter that the font lacks is no warning."""
    arrays = Source().qkv()
    result = verify(save(model_of([node_proto("attention", arrays, ["Y"], name=name)], arrays, ["Y"]), tmp_path), keep_errors=True)
    report.write(result, tmp_path / "report.html")
    assert name in Page((tmp_path / "report.html").read_text()).text


def test_a_model_of_very_many_nodes_has_an_overview_of_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = Source().qkv()
    result = verify(save(model_of([node_proto("attention", arrays, ["Y"])], arrays, ["Y"]), tmp_path))
    (node,) = result.nodes
    (output,) = node.outputs
    ours = output.deviations["torch_onnx_attn"]
    worse = dataclasses.replace(output, deviations={"torch_onnx_attn": dataclasses.replace(ours, ratio=5.0)})
    nodes = [dataclasses.replace(node, node=f"node {i}", outputs=(worse if i == 7 else output,)) for i in range(20)]
    monkeypatch.setattr(report, "_MOST_ROWS", 3)
    axes = report._overview(dataclasses.replace(result, nodes=tuple(nodes))).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == 3 and labels[0] == "node 7"
