"""tools/check_kernels.py sees what it is there to see."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

NAME = "_ZN9onnx_attn7forwardI6__halfNS0_9TileShapeILi256ELi256ELi{keys}ELi2ELb{hold}ELb0ELb0EEELNS0_9ScoreWorkE0EEEvNS0_13ForwardParamsE"
PRODUCT = ("HGMMA.64x80x16.F32", " R24, gdesc[UR16], R24")
ONE_LEFT, NONE_LEFT = ("WARPGROUP.DEPBAR.LE", " gsb0, 0x1 "), ("WARPGROUP.DEPBAR.LE", " gsb0, 0x0 ")
EXPONENTIAL = ("MUFU.EX2", " R0, R0")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_kernels", Path(__file__).parent.parent / "tools" / "check_kernels.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_good_kernel(tool: ModuleType) -> None:
    step = [PRODUCT, PRODUCT, ONE_LEFT, *[EXPONENTIAL] * 40, NONE_LEFT]
    assert tool.check_function(NAME.format(keys=80, hold=1), step) == []


def test_exponentials_after_the_wait(tool: ModuleType) -> None:
    """A fault where they are meant to be held, a choice elsewhere."""
    step = [PRODUCT, ONE_LEFT, *[EXPONENTIAL] * 39, NONE_LEFT, EXPONENTIAL]
    assert "exponentials" in tool.check_function(NAME.format(keys=80, hold=1), step)[0]
    assert tool.check_function(NAME.format(keys=80, hold=0), step) == []


def test_local_memory_and_no_product(tool: ModuleType) -> None:
    faults = tool.check_function(NAME.format(keys=80, hold=0), [("STL.64", " [R1], R2"), ("LDL", " R2, [R1]")])
    assert [fault.split(": ")[1] for fault in faults] == ["LDL in local memory", "STL.64 in local memory", "no warpgroup product"]


def test_short_kernels(tool: ModuleType) -> None:
    name = "_ZN9onnx_attn20forward_short_kernel7forwardI6__halfNS0_9TileShapeILi64EEELb1EEEvNS0_13ForwardParamsE"
    assert tool.check_function(name, [PRODUCT, NONE_LEFT]) == []
    assert tool.check_function(name, [("LDL", " R2, [R1]"), NONE_LEFT]) == [
        "forward_short 64, key row 1: LDL in local memory",
        "forward_short 64, key row 1: no warpgroup product",
    ]


def test_passes_for_scores(tool: ModuleType) -> None:
    name = "_ZN9onnx_attn19forward_sm90_kernel10score_passI6__halfNS0_14ScorePassShapeILi64EEELNS0_9ScoreWorkE1ELb1EEEvNS0_13ForwardParamsE"
    assert tool.check_function(name, [PRODUCT, NONE_LEFT]) == []
    assert tool.check_function(name, [EXPONENTIAL]) == ["score_pass 64, score work 1, weights 1: no warpgroup product"]


def test_log(tool: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text("ptxas info : (C7512) Potential Performance Loss\n8 bytes stack frame, 16 bytes spill stores, 4 bytes spill loads\n")
    assert len(tool.check_log(log)) == 2
