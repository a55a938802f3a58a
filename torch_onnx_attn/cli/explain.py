"""Say which kernel a call takes and why not a faster one: a recorded call, or one written down.

    explain call.npz --machine h200
    explain attention Q=1x32x1x128 K=1x8x8192x128 V=1x8x8192x128 nonpad_kv_seqlen=1 is_causal=true --machine h200

Tensors are shapes, with :dtype where it is not --dtype; names are those of the Python functions. Nothing is computed.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_onnx_attn.bad_input import BadInput

from . import _output

if TYPE_CHECKING:
    import torch

_OPS = ("attention", "attention_cached", "mha")
_DTYPES = ("float16", "bfloat16", "float32", "float64", "bool", "int8", "int16", "int32", "int64", "uint8")
_INTEGERS = {
    "nonpad_kv_seqlen": "int64",
    "cache_lengths": "int64",
    "key_padding_mask": "int32",
    "past_sequence_length": "int32",
    "cache_indirection": "int32",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("call", help=f"an .npz file that `record` wrote, or one of {', '.join(_OPS)}")
    parser.add_argument("arguments", nargs="*", metavar="NAME=VALUE", help="the arguments of the call")
    parser.add_argument("--dtype", default="float16", help="of tensors that do not name one (default float16)")
    _output.add_machine(parser)


def run(arguments: argparse.Namespace) -> int:
    import torch_onnx_attn

    machine = _output.machine(arguments.machine)
    if arguments.call in _OPS:
        tensors, attributes = _parse(arguments.arguments, arguments.dtype)
        function = getattr(torch_onnx_attn, arguments.call)
        description = f"{arguments.call}({', '.join(arguments.arguments)})"
    else:
        if not Path(arguments.call).suffix and not Path(arguments.call).exists():
            raise BadInput(f"{arguments.call}: is neither a file nor one of {', '.join(_OPS)}")
        if arguments.arguments:
            raise BadInput(f"{arguments.arguments[0]}: a recorded call brings its own arguments")
        from torch_onnx_attn.record import load

        call = load(arguments.call).call
        if call.op in ("tensor_scatter", "valid_kv_length"):
            raise BadInput(f"{arguments.call}: holds a call of {call.op}, which does not attend and takes no attention kernel")
        function, tensors, attributes, description = call.prepare(), {}, {}, f"{arguments.call}: {call.op}"
    try:
        plan = torch_onnx_attn.explain(function, machine=machine, **tensors, **attributes)
    except (RuntimeError, TypeError) as error:
        raise BadInput(str(error).splitlines()[0]) from error
    if arguments.json:
        _output.print_json({"call": description, "machine": machine, "plan": plan})
        return 0
    _output.say(f"{description} on {arguments.machine}")
    _output.say(f"kernel     {plan.kernel}")
    for kernel, reason in plan.refusals.items():
        _output.say(f"not        {kernel}: {reason}")
    if plan.separate_append:
        _output.say("append     past or new rows are written by a kernel of their own first")
    if plan.separate_bias:
        _output.say("bias       biased keys and values are stored in the workspace first")
    if plan.separate_scores:
        _output.say("scores     the scores output is written by a kernel of its own afterwards")
    _output.say(f"workspace  {plan.workspace_bytes} bytes")
    return 0


def _parse(pairs: list[str], dtype: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors: dict[str, torch.Tensor] = {}
    attributes: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise BadInput(f"{pair}: must be NAME=VALUE")
        if "x" in value or ":" in value or name in _INTEGERS:
            tensors[name] = _tensor(name, value, dtype)
        elif value.lower() in ("true", "false"):
            attributes[name] = value.lower() == "true"
        else:
            try:
                attributes[name] = float(value) if "." in value or "e" in value else int(value)
            except ValueError as error:
                raise BadInput(f"{pair}: is neither a number, true or false, nor a shape such as 2x8x128x64:bfloat16") from error
    return tensors, attributes


def _tensor(name: str, text: str, dtype: str) -> torch.Tensor:
    """A tensor whose memory is asked for and not touched; counts are 0, which every op allows."""
    import torch

    shape, colon, named = text.partition(":")
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise BadInput(f"{name}={text}: must be a shape such as 2x8x128x64, with :bfloat16 or another type behind it")
    type_name = named if colon else _INTEGERS.get(name, dtype)
    if type_name not in _DTYPES:
        raise BadInput(f"{name}={text}: {type_name!r} is none of {', '.join(_DTYPES)}")
    sizes, chosen = [int(size) for size in shape.split("x")], getattr(torch, type_name)
    try:
        return torch.zeros(sizes, dtype=chosen) if name in _INTEGERS else torch.empty(sizes, dtype=chosen)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise BadInput(f"{name}={text}: is more than this machine has memory for") from error
