"""Reads what ptxas printed while the kernels were built and fails on spills, stack frames and serialised wgmma (C75xx).

    python tools/check_kernels.py [build folder]

Prints one line for each source: how many kernels, the most registers and shared memory among them. Standard library only.
"""

import re
import sys
from pathlib import Path

SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
SERIALISED = re.compile(r"C75\d\d")


def check(log: Path) -> list[str]:
    """The faults in one source's log; prints its summary line."""
    text = log.read_text()
    faults = [f"{log.stem}: {line.strip()}" for line in text.splitlines() if SERIALISED.search(line) or "warning" in line.lower()]
    frames = [tuple(map(int, match)) for match in SPILL.findall(text)]
    faults += [f"{log.stem}: {stores} bytes of spill stores, {loads} of spill loads" for _, stores, loads in frames if stores or loads]
    registers = [int(count) for count in REGISTERS.findall(text)]
    shared = [int(count) for count in SHARED.findall(text)]
    most = f"most registers {max(registers, default=0):4}   most static shared {max(shared, default=0):7}"
    print(f"{log.stem:28} kernels {len(registers):4}   {most}")
    return faults


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build")
    logs = sorted(folder.glob("**/cuda/*.log"))
    if not logs:
        print(f"no ptxas logs under {folder}: the build had no nvcc")
        return 1
    faults = [fault for log in logs for fault in check(log)]
    for fault in faults:
        print(fault)
    print(f"{len(logs)} sources, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
