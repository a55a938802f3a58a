"""Builds the wheel from the sdist, and uses it under several releases of torch, each in an environment of its own.

    python tools/check_wheel.py 2.11.0 2.14.1

The sdist is unpacked and built without CUDA kernels, which takes a minute instead of many; the wheel in dist/ (`make wheel`) is what
the environments install. Needs pip, and some gigabytes while one environment exists.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path, **environment: str) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, check=True, env=clean_environment() | environment)


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder}: {len(found)} files match {pattern}; one was expected (run `make wheel` on a clean tree)")
    return found[0]


def check_sdist(sdist: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder, sdist,
            cwd=Path(folder), TORCH_ONNX_ATTN_CUDA="0")  # fmt: skip
        print(f"{sdist.name} builds {only(Path(folder), '*.whl').name}", flush=True)


def check_wheel(wheel: Path, torch_version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        print(f"==> {wheel.name} under torch {torch_version}", flush=True)
        install = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
        run(*install, f"torch=={torch_version}", "numpy", wheel, cwd=Path(folder))
        run(python, ROOT / "tools" / "wheel_smoke.py", cwd=Path(folder))


def main() -> None:
    check_sdist(only(ROOT / "dist", "*.tar.gz"))
    for torch_version in sys.argv[1:]:
        check_wheel(only(ROOT / "dist", "*-abi3-*.whl"), torch_version)


if __name__ == "__main__":
    main()
