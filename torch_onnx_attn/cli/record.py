"""Run a Python program and keep one of its calls of this package's ops in an .npz file.

    record --list train.py --epochs 1        # list the calls
    record --call 12 --output call.npz train.py --epochs 1

The program runs to its end as `python train.py --epochs 1` would. Compiled functions run eagerly; replays of CUDA graphs
are not seen.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
import traceback

from torch_onnx_attn.bad_input import BadInput

from . import _output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="call.npz", metavar="FILE.npz", help="where to write the call (default call.npz)")
    parser.add_argument("--call", type=int, default=0, metavar="N", help="which call to keep, counted from 0 (the default)")
    parser.add_argument("--list", action="store_true", help="write nothing; run to the end and list the calls")
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(arguments: argparse.Namespace) -> int:
    from torch_onnx_attn.record import record

    if not os.path.isfile(arguments.program):
        raise BadInput(f"{arguments.program}: there is no such program")
    path = None if arguments.list else arguments.output
    # What the program prints goes to the standard error with --json, whose document is alone on the standard output.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext(), record(path, arguments.call) as recorder:
        _run_program(arguments.program, arguments.arguments)
    if path is not None and not recorder.saved:
        raise BadInput(f"--call {arguments.call}: the program made {len(recorder.calls)} calls; --list lists them")
    if arguments.json:
        _output.print_json({"calls": recorder.calls, "saved": path})
    elif arguments.list:
        for number, line in enumerate(recorder.calls):
            _output.say(f"{number:5}  {line}")
    else:
        _output.say(f"{path}: call {arguments.call}, {recorder.calls[arguments.call]}")
    return 0


def _run_program(program: str, arguments: list[str]) -> None:
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [program, *arguments], os.path.dirname(os.path.abspath(program))
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):  # a last word, which Python would print
            print(ended.code, file=sys.stderr)
    except (BadInput, KeyboardInterrupt):
        raise
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != program:  # ours and Python's
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames))
        raise BadInput(f"{program}: ended with {type(error).__name__}") from error
    finally:
        sys.argv, sys.path[0] = before
