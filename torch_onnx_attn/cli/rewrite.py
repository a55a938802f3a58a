"""Turn written-out attention and GroupQueryAttention of a model into Attention nodes.

Only what the graph proves to be attention is replaced; what stays is listed with the reason. Both models then run on the same inputs, at
two sizes where sizes are dynamic, and the new nodes are checked as by `verify`; the file is written only if all agree. Exit code 1: they
do not agree. Exit code 2: there is nothing that could be replaced.
"""

from __future__ import annotations

import argparse
import logging

from . import _output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file")
    parser.add_argument("output", help="where to write the new model")
    _output.add_inputs(parser)
    parser.add_argument(
        "--unpadded",
        action="store_true",
        help="no entry of a batch is ever padded: GroupQueryAttention becomes one node that concatenates past and new rows",
    )


def run(arguments: argparse.Namespace) -> int:
    from torch_onnx_attn.models.rewrite import rewrite_file

    logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)  # it warns of what the report or the error says
    with _output.progress(arguments.json) as progress:
        report = rewrite_file(
            arguments.model,
            arguments.output,
            arguments.inputs,
            sizes=_output.dimensions(arguments.dim),
            unpadded=arguments.unpadded,
            seed=_output.seed(arguments.seed),
            progress=progress,
        )
    if arguments.json:
        _output.print_json(report.as_dict())
    else:
        for line in report.lines():
            _output.say(line)
        _output.say(f"{arguments.output}: {'written' if report.is_written else 'not written'}")
    if report.is_written:
        return 0
    return 1 if report.replaced else 2
