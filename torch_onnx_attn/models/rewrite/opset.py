"""Raises a model's opset, or says why that cannot be done safely.

onnxscript's converter and onnx's own know, for every operator that changed, how to write the old one in the new opset, or fail. After
them every node must be what its new schema allows; `rewrite_file` also runs the model before and after.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnxscript import version_converter

from torch_onnx_attn.bad_input import BadInput

__all__ = ["raise_opset"]

_ONNXSCRIPT_FROM = 18  # below, onnxscript hands the model to onnx's own converter


def raise_opset(model: ir.Model, target: int) -> None:
    """Convert in place. Raises BadInput with the converter's reason."""
    current = model.opset_imports.get("", 1)
    if not any(node.domain in ("", "ai.onnx") for node in model.graph.all_nodes()):
        model.opset_imports[""] = target
        return
    for step in sorted({max(current, _ONNXSCRIPT_FROM), target}):
        with _what_it_logs() as logged:
            try:
                version_converter.convert_version(model, target_version=step, fallback=True)
                _check_nodes(model, step)
            except Exception as error:
                raise BadInput(f"opset {current} cannot be raised to {target}, which Attention needs: {_first_line(error)}") from error
        if model.opset_imports.get("") != step or logged:
            reason = logged[-1] if logged else "the converter gave up"
            raise BadInput(f"opset {current} cannot be raised to {target}, which Attention needs: {reason}")


@contextlib.contextmanager
def _what_it_logs() -> Iterator[list[str]]:
    """The converters report a node that they skip by a warning only."""
    logged: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "onnx C API (" in record.getMessage():  # it says which converter it takes: not a failure
                return
            logged.append(_first_line(record.exc_info[1]) if record.exc_info and record.exc_info[1] else record.getMessage())

    logger, handler = logging.getLogger("onnxscript.version_converter"), Collector(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _check_nodes(model: ir.Model, target: int) -> None:
    """Every node has a form that the operator has in the new opset."""
    for node in model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx"):
            continue
        if not onnx.defs.has(node.op_type):  # ONNX Runtime keeps a few operators of its own in this domain
            continue
        schema = onnx.defs.get_schema(node.op_type, target)
        unknown = set(node.attributes) - set(schema.attributes)
        missing = [name for name, one in schema.attributes.items() if one.required and name not in node.attributes]
        inputs = len(node.inputs)
        if unknown or missing or not schema.min_input <= inputs <= schema.max_input:
            raise BadInput(f"opset {target}: {node.op_type} {node.name} does not have the form that this opset gives it")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
