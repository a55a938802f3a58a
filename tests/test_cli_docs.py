"""Every code block of docs/command_line.md runs, in order, in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from torch_onnx_attn.cli import main

PAGE = Path(__file__).parent.parent / "docs" / "command_line.md"


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"python", "bash"} and len(blocks) >= 8
    names: dict[str, object] = {"__name__": "page"}
    commands = set()
    for language, block in blocks:
        if language == "python":
            exec(compile(block, str(PAGE), "exec"), names)
            continue
        for line in block.splitlines():
            python, module, package, *arguments = shlex.split(line)
            assert (python, module, package) == ("python", "-m", "torch_onnx_attn"), line
            commands.add(arguments[0])
            assert main(arguments) == 0, f"{line}\n{capsys.readouterr()}"
    assert commands == {"verify", "inspect", "explain", "record", "replay", "info"}
    assert (tmp_path / "report.html").exists() and (tmp_path / "call.npz").exists()
