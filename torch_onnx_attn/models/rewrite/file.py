"""`rewrite_file`: from a file to a file, and nothing is written that was not checked."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from torch_onnx_attn.bad_input import BadInput, check_writable, writing
from torch_onnx_attn.models.file import all_graphs, external_files, open_model
from torch_onnx_attn.models.inputs import input_shapes, read_arrays
from torch_onnx_attn.models.packages import first_line
from torch_onnx_attn.models.rewrite.arrays import made_up, sizings, symbolic_sizes
from torch_onnx_attn.models.rewrite.check import OriginalDoesNotRun, compare
from torch_onnx_attn.models.rewrite.report import Report
from torch_onnx_attn.models.rewrite.rewriting import rewrite
from torch_onnx_attn.models.verify import verify

__all__ = ["rewrite_file"]

_MOST_IN_ONE_FILE = 2**31 - 2**20  # bytes; protobuf's limit, with room for the graph
_STEPS = 3
_NOT_OF_ONNX = "No Op registered"  # what onnx.checker says of an operator that it does not know


def rewrite_file(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    inputs: str | os.PathLike[str] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    unpadded: bool = False,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Rewrite a model file, compare both models on numbers, and write the new one if they agree.

    Args:
        source: an ONNX file.
        destination: where the new model goes; the weights go to a file beside it if they were in one, or if they exceed 2 GiB.
        inputs: an .npz file with arrays by the names of the model's inputs. What is missing is made up; without this argument the
            models are compared at two sizes of every symbolic dimension.
        sizes: sizes of symbolic dimensions by name, for made-up inputs.
        unpadded: see `rewrite`.
        seed: of made-up inputs.
        progress: called with what is being done, steps done, and steps in all.

    Returns:
        The report. The file was written exactly if `report.is_written`.

    Raises:
        BadInput: the file cannot be used, has neither a Softmax nor a GroupQueryAttention, its opset cannot be raised, or no runtime
            can run it with the inputs.
    """
    tell = progress or (lambda text, done, total: None)
    for name, path in (("source", source), ("destination", destination)):
        if not isinstance(path, str | os.PathLike):
            raise BadInput(f"{name}: is of type {type(path).__name__}, must be the path of an ONNX file")
    source, destination = Path(source), Path(destination)
    proto = open_model(source)
    check_writable(destination)
    own_data = external_files(proto, source.parent)
    if Path(os.path.realpath(destination)) in own_data:
        raise BadInput(f"{destination}: holds the weights of {source}")
    tell("reading the graph", 0, _STEPS)
    newest = onnx.defs.onnx_opset_version()
    if any(not entry.domain and entry.version > newest for entry in proto.opset_import):
        raise BadInput(f"{source}: has an opset that is not known here; the newest is {newest}")
    is_valid = _is_valid(source, proto)
    model = _load(source)
    had_external_data = any(isinstance(value.const_value, ir.ExternalTensor) for value in model.graph.initializers.values())
    report = rewrite(model, unpadded=unpadded)
    if not report.replaced:
        if not report.left:
            raise BadInput(f"{source}: has no attention: neither a Softmax nor a com.microsoft::GroupQueryAttention is in it")
        return report
    given = {} if inputs is None else read_arrays(inputs, proto)
    original = _load(source)
    with writing(destination), tempfile.TemporaryDirectory(dir=destination.parent, prefix=".rewrite-") as folder:
        written = Path(folder) / destination.name
        size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
        is_apart = had_external_data or size > _MOST_IN_ONE_FILE
        kept = set() if destination.exists() and destination.samefile(source) else own_data
        ir.save(model, written, external_data=_data_name(destination, kept) if is_apart else None)
        if is_valid:
            onnx.checker.check_model(os.fspath(written))

        tell("comparing both models", 1, _STEPS)
        if given:
            shapes = input_shapes(proto, sizes or {}, 8, 2, given)
            feeds: Mapping[str, Any] = {**made_up(original, shapes, given, seed), **given}
            report.checked.append(compare(source, written, feeds, "given inputs"))
        else:
            feeds = _compare_made_up(proto, original, (source, written), sizes or {}, seed, report)
        if report.agrees:
            tell("verifying the new nodes", 2, _STEPS)
            report.unverified += [f"{node.node}: {node.status}" for node in verify(written, feeds).failures()]
        if report.agrees:
            for file in sorted(Path(folder).iterdir(), key=lambda file: file == written):  # the model last: it needs its data
                os.replace(file, destination.parent / file.name)
            report.is_written = True
    return report


def _load(source: Path) -> ir.Model:
    try:
        return ir.load(source)
    except Exception as error:
        raise BadInput(f"{source}: is not a valid model: {first_line(error.__cause__ or error)}") from error


def _data_name(destination: Path, kept: set[Path]) -> str:
    """A name for the file of weights beside the model; not that of a file of weights that has to stay as it is."""
    names = itertools.chain([f"{destination.name}.data"], (f"{destination.name}.{number}.data" for number in itertools.count(1)))
    return next(name for name in names if Path(os.path.realpath(destination.parent / name)) not in kept)


def _compare_made_up(
    proto: Any, original: ir.Model, paths: tuple[Path, Path], sizes: Mapping[str, int], seed: int, report: Report
) -> Mapping[str, Any]:
    """Compare at several sizes and return the arrays of the first run."""
    feeds: list[Mapping[str, Any]] = []
    failures: list[OriginalDoesNotRun] = []
    for alternatives in sizings(original):
        for sizing in alternatives:
            arrays = made_up(original, input_shapes(proto, symbolic_sizes(original, sizes, sizing), 1, 1), {}, seed + len(feeds))
            try:
                report.checked.append(compare(*paths, arrays, "made-up inputs"))
            except OriginalDoesNotRun as failure:
                failures.append(failure)
            else:
                feeds.append(arrays)
                break
    if len(feeds) < 2:
        raise failures[-1]
    return feeds[0]


def _is_valid(source: Path, proto: Any) -> bool:
    """Whether onnx.checker can judge the model as a whole: ONNX Runtime keeps operators of its own in ONNX's domain."""
    try:
        onnx.checker.check_model(os.fspath(source))
    except Exception as error:
        if _NOT_OF_ONNX not in str(error):
            raise BadInput(f"{source}: is not a valid model: {first_line(error)}") from error
    else:
        return True
    context = onnx.checker.C.CheckerContext()
    context.ir_version, context.opset_imports = proto.ir_version, {entry.domain: entry.version for entry in proto.opset_import}
    for node in (node for graph in all_graphs(proto.graph) for node in graph.node):
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            continue  # its graphs read values that the checker would not know here
        try:
            onnx.checker.check_node(node, context)
        except Exception as error:
            if _NOT_OF_ONNX not in str(error):
                raise BadInput(f"{source}: is not a valid model: {first_line(error)}") from error
    return False
