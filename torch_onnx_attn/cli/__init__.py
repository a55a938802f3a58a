"""The command line. Each module beside this one whose name has no underscore is a command.

The first line of a command's docstring is its help. It has ``add_arguments(parser)`` and ``run(arguments) -> int``, which returns the
exit code, and imports nothing but the standard library and ``_output`` until it runs, so that `info` works where everything else is
broken.

Exit codes: 0 fine, 1 a deviation was found, 2 the input (or the installation) cannot be used, which is said in one sentence,
130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

import torch_onnx_attn

from . import _output

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    _open_streams()
    commands = _commands()
    parser = argparse.ArgumentParser(prog="python -m torch_onnx_attn", description="Tools around the ONNX attention operators.")
    parser.add_argument("--version", action="version", version=torch_onnx_attn.__version__)
    choices = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in commands.items():
        assert module.__doc__ is not None
        summary, _, rest = module.__doc__.strip().partition("\n")
        command = choices.add_parser(
            name, help=summary, description=f"{summary}\n{rest}", formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    chosen = parser.parse_args(arguments)
    from torch_onnx_attn.bad_input import BadInput

    broken = torch_onnx_attn._load_error
    if broken is not None and chosen.command != "info":
        return _fail(f"torch_onnx_attn could not be loaded: {broken}. The command `info` says more", chosen.json)
    try:
        code: int = commands[chosen.command].run(chosen)
    except (BadInput, ImportError) as error:
        return _fail(str(error), chosen.json)
    except MemoryError:
        return _fail("there is not enough memory for this; smaller sizes may do", chosen.json)
    except KeyboardInterrupt:
        return _fail("interrupted", chosen.json, 128 + signal.SIGINT)
    return code


def _open_streams() -> None:
    """There may be no output (`>&-`), or one of an encoding that lacks a letter of a name or table."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (until the program ends)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fail(sentence: str, as_json: bool, code: int = 2) -> int:
    """Says what is wrong, and returns the exit code."""
    if as_json:
        _output.print_json({"error": sentence})
    print(f"error: {_output.visible(sentence)}", file=sys.stderr)
    return code


def _commands() -> dict[str, ModuleType]:
    names = sorted(entry.name for entry in pkgutil.iter_modules(__path__) if not entry.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}
