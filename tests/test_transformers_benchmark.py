"""benchmarks/llama.py runs in small, keeps its promises about the result file, and says what it lacks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import llama


def test_a_tiny_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    path = tmp_path / "deep" / "llama.json"
    assert llama.main(["--tiny", "--layers", "1", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert {"gpu", "driver", "torch", "cuda", "transformers", "date", "commit", "model", "lines"} <= set(result)
    assert [line["name"] for line in result["lines"]] == [line.name for line in llama.LINES]
    for line in result["lines"]:
        assert not line["refused"] and all(line[name] > 0 for name in llama.IMPLEMENTATIONS)
        assert max(line["difference_from_eager"].values()) < 0.1


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = importlib.util.find_spec

    def without_transformers(name: str, *rest: Any) -> Any:
        return None if name == "transformers" else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_transformers)
    assert llama.main([]) == 2
    assert "needs the package transformers, 5 or newer, which is not installed" in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", found)
    if found("transformers") is not None:
        assert llama.main([]) == 2
        assert "needs a CUDA GPU, and there is none here; --tiny" in capsys.readouterr().out
