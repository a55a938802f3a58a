"""Reads what ptxas printed while the kernels were built, and the machine code of the Hopper kernels. Needs no GPU.

    python tools/check_kernels.py [build folder]

Fails on spills, stack frames and serialised wgmma (C75xx) in the logs; and in the machine code of the forward_sm90, forward_short and
score_pass kernels where there is no wgmma, where registers live in local memory, or where exponentials that should run beside a
product come after it.
Prints one line for each source. The machine code is read with cuobjdump and nvdisasm of a CUDA toolkit, or of the packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm; without them it is a failure, unless there is no Hopper kernel. Standard library only.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
SERIALISED = re.compile(r"C75\d\d")

FUNCTION = re.compile(r"Function : (\S+)")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*);")
# In a mangled name: TileShape<head size, value size, keys, warpgroups, hold exponentials, has mask, writes scores>, ScoreWork
SHAPE = re.compile(r"TileShapeILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELb([01])ELb[01]ELb([01])E.*?ScoreWorkE(\d)")
SHORT_SHAPE = re.compile(r"forward_short_kernel.*?TileShapeILi(\d+)EEELb([01])E")  # TileShape<head size>, has a key row
PASS_SHAPE = re.compile(r"ScorePassShapeILi(\d+)EEE.*?ScoreWorkE(\d)ELb([01])E")  # ScorePassShape<head size>, ScoreWork, makes weights
SHAPES = SHAPE, SHORT_SHAPE, PASS_SHAPE
HOPPER = "forward_sm90_", "forward_short_", "score_pass_"  # sources of kernels that have such names


def check_log(log: Path) -> list[str]:
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


def tool_folders() -> Iterator[Path]:
    """Where a disassembler may be, beside PATH."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin"
    yield Path("/usr/local/cuda/bin")
    packages = Path(sysconfig.get_path("purelib"))
    yield from sorted(packages.glob("nvidia/**/bin"))
    yield packages / "triton/backends/nvidia/bin"


def tool_path() -> str | None:
    """A PATH with cuobjdump and nvdisasm, which it calls; None if they are not to be found."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, tool_folders())])
    return path if shutil.which("cuobjdump", path=path) and shutil.which("nvdisasm", path=path) else None


def functions(compiled: Path, path: str) -> dict[str, list[tuple[str, str]]]:
    """(opcode, operands) of every instruction, for each function of an object file."""
    command = [shutil.which("cuobjdump", path=path) or "cuobjdump", "-sass", str(compiled)]
    text = subprocess.run(command, env={**os.environ, "PATH": path}, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in text.splitlines():
        if match := FUNCTION.search(line):
            current = found.setdefault(match.group(1), [])
        elif match := INSTRUCTION.match(line):
            current.append((match.group(1), match.group(2)))
    return found


def overlapped_exponentials(instructions: list[tuple[str, str]]) -> int:
    """The most exponentials that a step computes after its scores have come and before it waits for the product beside them."""
    most, count, is_overlapped = 0, 0, False
    for opcode, operands in instructions:
        if opcode.startswith("WARPGROUP.DEPBAR"):
            is_overlapped, count = operands.strip().endswith("0x1"), 0
        elif opcode == "MUFU.EX2" and is_overlapped:
            count += 1
            most = max(most, count)
    return most


def check_opcodes(label: str, instructions: list[tuple[str, str]]) -> list[str]:
    """What no Hopper forward kernel may have, and what it must have."""
    opcodes = [opcode for opcode, _ in instructions]
    faults = [f"{label}: {opcode} in local memory" for opcode in sorted({o for o in opcodes if o.startswith(("LDL", "STL"))})]
    if not any(opcode.startswith("HGMMA") for opcode in opcodes):
        faults.append(f"{label}: no warpgroup product")
    return faults


def check_function(name: str, instructions: list[tuple[str, str]]) -> list[str]:
    """The faults of one Hopper forward kernel."""
    if short := SHORT_SHAPE.search(name):
        return check_opcodes(f"forward_short {short.group(1)}, key row {short.group(2)}", instructions)
    if second := PASS_SHAPE.search(name):
        return check_opcodes(f"score_pass {second.group(1)}, score work {second.group(2)}, weights {second.group(3)}", instructions)
    shape = SHAPE.search(name)
    if not shape:
        return []
    head_size, value_size, keys, warpgroups, holds, writes, work = map(int, shape.groups())
    label = f"forward_sm90 {head_size}/{value_size}, {warpgroups * 64}x{keys}, score work {work}{', scores' if writes else ''}"
    faults = check_opcodes(label, instructions)
    expected = keys // 2  # of a lane: 64 rows by `keys` scores over 128 lanes
    if holds and overlapped_exponentials(instructions) < expected:
        faults.append(f"{label}: fewer than {expected} exponentials run beside a product")
    return faults


def check_machine_code(objects: list[Path]) -> list[str]:
    path = tool_path()
    if objects and not path:
        return ["no cuobjdump or nvdisasm: install a CUDA toolkit, or the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm"]
    faults = []
    for compiled in objects:
        found = functions(compiled, path or "")
        kernels = {name: code for name, code in found.items() if any(shape.search(name) for shape in SHAPES)}
        overlapped = [overlapped_exponentials(code) for code in kernels.values()]
        products = sum(opcode.startswith("HGMMA") for code in kernels.values() for opcode, _ in code)
        print(f"{compiled.stem:28} kernels {len(kernels):4}   products {products:5}   exponentials beside them {sum(overlapped):5}")
        faults += [fault for name, code in kernels.items() for fault in check_function(name, code)]
        if not kernels:
            faults.append(f"{compiled.stem}: no kernel")
    return faults


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build")
    logs = sorted(folder.glob("**/cuda/*.log"))
    if not logs:
        print(f"no ptxas logs under {folder}: the build had no nvcc")
        return 1
    faults = [fault for log in logs for fault in check_log(log)]
    faults += check_machine_code([path for path in sorted(folder.glob("**/cuda/*.o")) if path.stem.startswith(HOPPER)])
    for fault in faults:
        print(fault)
    print(f"{len(logs)} sources, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
