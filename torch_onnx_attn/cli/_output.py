"""What the commands share: tables, JSON, progress bars, and the arguments that several of them have."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_onnx_attn.bad_input import BadInput

__all__ = ["add_machine", "device", "dimensions", "machine", "names", "number", "plain", "print_json", "progress", "say", "short", "table"]


def print_json(value: Any) -> None:
    """One document on the standard output. Infinities and NaN, which JSON does not have, become text."""
    print(json.dumps(plain(value), indent=2))


def plain(value: Any) -> Any:
    """Dataclasses, tuples and numbers as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if field.repr]
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def say(text: str = "") -> None:
    """One line for people."""
    _console().print(text, markup=False, highlight=False, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people, as wide as the terminal, or as wide as it needs where there is none."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    _console().print(made)


def _console() -> Any:
    """Where nobody looks at a terminal the width is that of a log, not the 80 columns that rich would take."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise BadInput("this command needs rich: pip install rich (or the extra torch-onnx-attn[onnx]); --json works without") from error
    return Console(width=None if sys.stdout.isatty() else 160)


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar on the standard error, if that is a terminal and nobody asked for quiet; else None."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the model", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


def number(value: float) -> str:
    """Three digits, and no exponent where it can be helped."""
    if value == 0:
        return "0"
    return f"{value:.3g}" if 1e-2 <= abs(value) < 1e4 or not math.isfinite(value) else f"{value:.1e}"


def short(operator: str) -> str:
    """An operator and its version without the domain, which tables have no room for."""
    return operator.rpartition("::")[2]


def names(some: Sequence[str], total: int) -> str:
    """A few names, or "every node"."""
    if len(some) == total > 1:
        return "every node"
    return ", ".join(some[:3]) + (f" and {len(some) - 3} more" if len(some) > 3 else "")


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


def dimensions(pairs: Sequence[str]) -> dict[str, int]:
    """What --dim NAME=SIZE says."""
    sizes = {}
    for pair in pairs:
        name, equals, size = pair.rpartition("=")
        if not equals or not name or not size.isdecimal():
            raise BadInput(f"--dim {pair}: must be NAME=SIZE, with a size of 0 or more")
        sizes[name] = int(size)
    return sizes


def device(name: str) -> str:
    """A device that is there."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(f"--device {name}: is not available here: {str(error).splitlines()[0]}") from error
    return name


def add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine", default="here", metavar="NAME", help="plan for this machine: here (default), cpu, a100, h100 or h200; no GPU is needed"
    )


def machine(name: str) -> Any:
    """A Machine by its name: the one to plan for."""
    import torch

    from torch_onnx_attn import CPU, H200, Machine

    named = {"cpu": CPU, "a100": Machine(True, 80, 108, 166912), "h100": Machine(True, 90, 132, 232448), "h200": H200}
    if name.lower() in named:
        return named[name.lower()]
    if name.lower() != "here":
        raise BadInput(f"--machine {name}: must be here, {', '.join(named)}")
    if not torch.cuda.is_available():
        return CPU
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(True, 10 * found.major + found.minor, found.multi_processor_count, found.shared_memory_per_block_optin)
