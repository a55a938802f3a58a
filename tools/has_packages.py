"""Exit status 0 when this Python has all the modules named, and torch >= 2.11 if torch is among them. Standard library only.

python has_packages.py torch ninja      (checks)
python has_packages.py --site-packages      (prints the folder that torch is installed in)
python has_packages.py --own-site-packages  (prints this interpreter's own package folder)
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path

OLDEST_TORCH = (2, 11)


def has(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        return False
    if name != "torch":
        return True
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= OLDEST_TORCH


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments == ["--own-site-packages"]:
        print(sysconfig.get_path("purelib"))
    elif arguments == ["--site-packages"]:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            sys.exit("torch is not installed")
        print(Path(spec.origin).parent.parent)
    else:
        sys.exit(0 if all(has(name) for name in arguments) else 1)
