"""What every test file shares: the devices to run on, the markers, and a fixed seed."""

from __future__ import annotations

import os
import sys

import pytest

# Before torch is imported, and for every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}  # they would outlive the code they were made from
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo asks for this machine's name otherwise, which may have no address

import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default=None, help="run on this device only; by default on every one there is")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: runs on a CUDA device")
    config.addinivalue_line("markers", "slow: takes seconds or gigabytes")


def _devices(config: pytest.Config) -> list[str]:
    only = config.getoption("--device")
    if only is not None:
        return [only]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        marks = {"cpu": (), "cuda": (pytest.mark.gpu,)}
        devices = [pytest.param(device, marks=marks[device]) for device in _devices(metafunc.config)]
        metafunc.parametrize("device", devices, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu need a device; with --device cpu they are not wanted even if there is one."""
    if torch.cuda.is_available() and config.getoption("--device") != "cpu":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The many small products of the reference are fastest on one thread; cases.py calls the ops on two."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_terminal() -> None:
    """What the environment says of the terminal that pytest writes to does not hold for the pipes that tests read."""
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Whatever ran before: the same numbers, and nothing compiled yet."""
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
