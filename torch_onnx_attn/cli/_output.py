"""What the commands share: tables, JSON, progress bars, and the arguments that several of them have.

A reader of the standard output that has had enough, such as `head`, ends no command: the rest goes nowhere, so that the exit code is right.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_onnx_attn.bad_input import BadInput, first_line

__all__ = [
    *("add_inputs", "add_machine", "device", "dimensions", "machine", "names", "number", "plain", "print_json", "progress", "say", "seed"),
    *("short", "table", "visible", "write"),
]

_NARROWEST_COLUMN = 10  # characters; a table with less for a column is no help


def print_json(value: Any) -> None:
    """One document on the standard output. Infinities and NaN, which JSON does not have, become text."""
    write(json.dumps(plain(value), indent=2))


def write(text: str) -> None:
    """Text and a line break on the standard output."""
    with _output_may_end():
        print(text, flush=True)


@contextlib.contextmanager
def _output_may_end() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        _discard()
    except OSError as error:
        _discard()
        raise BadInput(f"the standard output cannot be written: {error.strerror}") from error


def _discard() -> None:
    """What was and will be written to the standard output goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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


def visible(text: str) -> str:
    """The text with what would break a line or steer a terminal written out. Names in models can hold anything."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def say(text: str = "") -> None:
    """One line for people."""
    with _output_may_end():
        _console().print(visible(text), markup=False, highlight=False, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people, as wide as the terminal, or as wide as it needs where there is none; lines if the terminal is narrow."""
    from rich.table import Table
    from rich.text import Text

    console = _console()
    if console.width < _NARROWEST_COLUMN * len(columns):
        say(title)
        for row in rows:
            for column, cell in zip(columns, row, strict=True):
                say(f"  {column}: {cell}")
            say()
        return
    made = Table(title=visible(title), title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text(visible(cell)) for cell in row))
    with _output_may_end():
        console.print(made)


def _console() -> Any:
    """Where nobody looks at a terminal the width is that of a log, not the 80 columns that rich would take."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise BadInput("this command needs rich: pip install rich (or the extra torch-onnx-attn[onnx]); --json works without") from error

    class Lasting(Console):
        def on_broken_pipe(self) -> None:  # rich would end the program, with the exit code of a deviation
            _discard()

    return Lasting(width=None if sys.stdout.isatty() else 160)


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
    """A device that is there and that the ops run on."""
    import torch

    try:
        kind = torch.device(name).type
        torch.empty(0, device=name)
    except Exception as error:  # each kind of device has its own way to be absent
        raise BadInput(f"--device {name}: is not available here: {first_line(error)}") from error
    if kind not in ("cpu", "cuda"):
        raise BadInput(f"--device {name}: must be cpu or cuda")
    return name


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """What a model is run with."""
    parser.add_argument("--inputs", metavar="FILE.npz", help="arrays by the names of the model's inputs; what is missing is made up")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help="size of a symbolic dimension of made-up inputs")
    parser.add_argument("--seed", type=int, default=0, help="of made-up inputs")


def seed(value: int) -> int:
    """What --seed says."""
    if value < 0:
        raise BadInput(f"--seed {value}: must be 0 or more")
    return value


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
