"""What torch's context_parallel() leaves alone is warned of, and Hugging Face models split by a plan call the op on each rank's heads."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from distributed_world import World, world

CHECKS = "distributed_neighbours"


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with world(2) as made:
        yield made


def test_inside_torchs_context_parallel(pair: World) -> None:
    pair.run(CHECKS, "check_warning")


@pytest.mark.parametrize("by", ["parallelize_module", "tp_plan"])
def test_hugging_face(pair: World, tmp_path: Path, by: str) -> None:
    needed = ("transformers",) if by == "parallelize_module" else ("transformers", "accelerate")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    if by == "tp_plan" and torch.cuda.is_available():
        pytest.skip("transformers would load onto the GPU, and these processes speak gloo")
    pair.run(CHECKS, "check_hugging_face", str(tmp_path) if by == "tp_plan" else None)
