"""Run a recorded call again: the kernel, its time, and the distance from float64 and from what was recorded.

Exit code 1: it is further from one of them than rounding explains.
"""

from __future__ import annotations

import argparse

from torch_onnx_attn.bad_input import BadInput

from . import _output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("call", help="an .npz file that `record` wrote")
    parser.add_argument("--device", help="where: cpu or cuda; by default cuda if the call was made there and there is one")
    parser.add_argument("--repeats", type=int, default=20, help="calls that are timed (default 20)")


def run(arguments: argparse.Namespace) -> int:
    from torch_onnx_attn.record import load, replay

    device = None if arguments.device is None else _output.device(arguments.device)
    if arguments.repeats < 1:
        raise BadInput(f"--repeats {arguments.repeats}: must be at least 1")
    recorded = load(arguments.call)
    try:
        replayed = replay(arguments.call, device, arguments.repeats)
    except RuntimeError as error:
        raise BadInput(f"{arguments.call}: the op refuses the call: {str(error).splitlines()[0]}") from error
    if arguments.json:
        _output.print_json({"origin": recorded.origin, **_output.plain(replayed), "agrees": replayed.agrees})
        return 0 if replayed.agrees else 1
    origin = recorded.origin
    inputs = ", ".join(f"{name} {str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in recorded.call.tensors.items())
    attributes = ", ".join(f"{name}={value}" for name, value in recorded.call.attributes.items())
    _output.say(
        f"{origin['name']}, recorded on {origin['device']} with torch {origin['torch']}: {inputs}{'; ' if attributes else ''}{attributes}"
    )
    kernel = "" if replayed.plan is None else f", kernel {replayed.plan.kernel}"
    _output.say(f"on {replayed.device}{kernel}: {_output.number(replayed.milliseconds)} ms (median of {arguments.repeats})")
    for name, reason in ({} if replayed.plan is None else replayed.plan.refusals).items():
        _output.say(f"not {name}: {reason}")
    rows = []
    for name, found in replayed.to_reference.items():
        other = replayed.to_recorded[name]
        cells = [f"{_output.number(x.units)} of {_output.number(x.allowed_units)}" for x in (found, other)]
        rows.append((name, *cells, "agrees" if found.agrees and other.agrees else "differs"))
    _output.table("units of rounding error, of those allowed", ("output", "from float64", "from the recording", ""), rows)
    _output.say("the recorded bits" if replayed.same_bits else "not the recorded bits")
    return 0 if replayed.agrees else 1
