"""The command line in processes of its own: outputs that break, and installations that do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import Source, model_of_node, save

import torch_onnx_attn

pytest.importorskip("rich")
pytest.importorskip("onnxruntime")


def process(*arguments: object, path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(torch_onnx_attn.__file__).parent.parent)
    paths = os.pathsep.join(filter(None, (path, root)))
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths, **environment}, capture_output=True, text=True)


# ---------------------------------------------------------------------------------------------------------------------
# Outputs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def invalid_model(tmp_path: Path) -> Path:
    """One whose node is refused: exit code 1."""
    return save(model_of_node("attention", Source().qkv() | {"attn_mask": np.ones((3, 7), bool)}), tmp_path)


BEFORE_MAIN = """
import os, sys
{}
from torch_onnx_attn.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_does_not_change_the_exit_code(invalid_model: Path, options: list[str]) -> None:
    """The standard output is a pipe whose reader is gone, as behind `head`."""
    before = "read, write = os.pipe(); os.dup2(write, 1); os.close(read); os.close(write)"
    result = process("-c", BEFORE_MAIN.format(before), "verify", invalid_model, *options)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "")


def test_without_an_output_the_exit_code_is_right(invalid_model: Path) -> None:
    before = "sys.stdout = sys.stderr = None"
    assert process("-c", BEFORE_MAIN.format(before), "verify", invalid_model).returncode == 1
    assert process("-c", BEFORE_MAIN.format(before), "verify", "nothing.onnx").returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_one_sentence(invalid_model: Path) -> None:
    before = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    result = process("-c", BEFORE_MAIN.format(before), "inspect", invalid_model)
    assert result.returncode == 2 and result.stderr.startswith("error: the standard output cannot be written: ")
    assert result.stderr.count("\n") == 1


def test_an_encoding_that_lacks_letters(tmp_path: Path) -> None:
    path = save(model_of_node("mha", Source().mha(), num_heads=4), tmp_path, "modèle.onnx")  # the table holds a dash for who refuses
    result = process("-m", "torch_onnx_attn", "verify", path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0 and result.stderr == "" and "mod\\xe8le.onnx" in result.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Broken installations
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken_torch(tmp_path: Path) -> str:
    package = tmp_path / "broken" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise OSError('libtorch_cpu.so: wrong ELF class')")
    return str(package.parent)


def test_info_with_a_broken_torch(broken_torch: str) -> None:
    result = process("-m", "torch_onnx_attn", "info", "--json", path=broken_torch)
    found = json.loads(result.stdout)
    assert result.returncode == 2 and result.stderr == ""
    assert found["torch"]["works"] == found["torch_onnx_attn"]["works"] == "no: OSError: libtorch_cpu.so: wrong ELF class"
    assert found["system"]["python"] == sys.version.split()[0]


def test_other_commands_with_a_broken_torch(broken_torch: str) -> None:
    result = process("-m", "torch_onnx_attn", "verify", "model.onnx", path=broken_torch)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "error: torch_onnx_attn could not be loaded: libtorch_cpu.so: wrong ELF class. The command `info` says more\n"


@pytest.mark.parametrize("content", [b"garbage", None])
def test_info_with_a_broken_library(tmp_path: Path, content: bytes | None) -> None:
    library: Any = tmp_path / "other.so"
    if content is not None:
        library.write_bytes(content)
    result = process("-m", "torch_onnx_attn", "info", TORCH_ONNX_ATTN_LIB=str(library))
    assert result.returncode == 2 and result.stderr == ""
    assert f"no: OSError: Could not load this library: {library}" in result.stdout and "threads" in result.stdout
    assert ("(7 bytes)" if content else "(no such file)") in result.stdout


def test_an_import_of_a_broken_library_is_loud(broken_torch: str) -> None:
    result = process("-c", "import torch_onnx_attn", path=broken_torch)
    assert result.returncode == 1 and "wrong ELF class" in result.stderr


def test_another_library_can_be_loaded() -> None:
    library = torch_onnx_attn.build_info()["library"]
    program = "import torch_onnx_attn; print(torch_onnx_attn.build_info()['library'])"
    result = process("-c", program, TORCH_ONNX_ATTN_LIB=library)
    assert result.stdout.strip() == library
