"""`export`: capture the model once, choose the opset, translate, tidy."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from torch_onnx_attn.diagnostics import logger
from torch_onnx_attn.onnx.reporting import kind_of, report
from torch_onnx_attn.onnx.requirements import (
    CONVERTED_OPSET,
    HIGHEST_OPSET,
    LOWEST_OPSET,
    ExportError,
    Need,
    calls,
    check_program,
    require_packages,
)
from torch_onnx_attn.onnx.translation import translation_table

__all__ = ["export", "tidy"]


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] = (),
    path: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    opset: int | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    custom_translation_table: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
    export_params: bool = True,
    keep_initializers_as_inputs: bool = False,
    external_data: bool = True,
    check: bool = False,
    verbose: bool | None = False,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Export a model whose attention calls become one ONNX node each.

    Args:
        model: The module in evaluation mode, or what `torch.export.export` made of it.
        args: Example inputs. A cache that starts empty may be given as a past of length 0.
        path: Where to write the file; None to write none.
        kwargs: Example keyword inputs.
        opset: 23 to 28. None takes the lowest that can say every call: 23 for plain attention, 24 with `nonpad_kv_seqlen` or a
            cache write, 25 with a window, and the exporter's own default if the model has no ai.onnx attention. ONNX Runtime
            refuses a rotary embedding that the exporter fuses at 23 in Llama-like models of dynamic batch; ask for 24 there.
        dynamic_shapes: As in `torch.onnx.export`; a string makes a dimension dynamic and gives it a name.
        input_names: Names for all of the graph's inputs.
        output_names: Names for all of the graph's outputs.
        custom_translation_table: Translations of other ops, added to those of this package.
        export_params: Write the weights into the file.
        keep_initializers_as_inputs: List the weights among the graph's inputs.
        external_data: Weights go to a file of their own, `path` with `.data` appended, as they must from 2 GB on.
        check: Compare the file with the model before returning: `torch_onnx_attn.onnx.check` says how. What could not be checked, as
            bfloat16 by ONNX Runtime on the CPU, is named in a UserWarning. The findings, and the report, are logged at level INFO.
        verbose: Print the exporter's progress.
        **options: Further arguments of `torch.onnx.export`, such as `optimize` and `report`.

    Returns:
        The program. Call it to run it in ONNX Runtime, or take its `model` (onnx_ir) or `model_proto` (onnx).

    Raises:
        ExportError: The opset asked for, or ONNX altogether, has no form for a call, the model writes a buffer, or names are not as
            many as inputs or outputs. The message names the argument. Nothing has been written then.
        ONNXCheckError: With `check`, the file is not valid, gives other results than the model, or nothing here can run it.
    """
    require_packages()
    _check_opset(opset)
    _check_arguments(model, path, options)
    program = model if isinstance(model, torch.export.ExportedProgram) else _capture(model, args, dict(kwargs or {}), dynamic_shapes)
    opset = _choose_opset(program, opset)
    table = dict(translation_table(CONVERTED_OPSET if opset is None else min(opset, CONVERTED_OPSET)))
    table.update(custom_translation_table or {})
    onnx_program = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=None if opset is None else min(opset, CONVERTED_OPSET),
        dynamic_shapes=dynamic_shapes,  # of a captured program it only uses the names
        input_names=input_names,
        output_names=output_names,
        custom_translation_table=table,
        verbose=verbose,
        **options,
    )
    assert onnx_program is not None
    _check_names(onnx_program, input_names, output_names)
    tidy(onnx_program, opset)
    if path is not None:
        onnx_program.save(
            path,
            include_initializers=export_params,
            keep_initializers_as_inputs=keep_initializers_as_inputs,
            external_data=external_data,
        )
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", report(onnx_program))
    if check:
        _check(onnx_program, program, path if export_params and not keep_initializers_as_inputs else None)
    return onnx_program


def tidy(program: torch.onnx.ONNXProgram, opset: int | None = None) -> None:
    """Put right, in place, what the exporter's optimizer does to attention nodes, and raise the opset above 25 if asked to.

    Optional outputs that nobody reads are left out, so that they are not computed. A node with a past keeps its present outputs
    even if nobody reads them: without them ONNX Runtime refuses Attention and computes a wrong MultiHeadAttention. A value inside
    the graph that has the name asked for an input or output (the exporter does not look) gets another one.

    Args:
        program: What `torch.onnx.export` returned.
        opset: 26 to 28 to raise the import of ai.onnx, where the exporter's converter stops at 25. Attention and TensorScatter have
            not changed since. By their schemas (onnx 1.23) the ops that have changed read a 25 node the same, except that opset 28
            no longer takes integers in ReduceLogSum and ReduceLogSumExp; onnx.checker with full_check tells.
    """
    check_program(program)
    model: Any = program.model
    _make_room_for_names(model.graph)
    for graph in (model.graph, *model.functions.values()):
        for node in _all_nodes(graph):
            if (node.domain, node.op_type) in (("", "Attention"), ("com.microsoft", "MultiHeadAttention")):
                _tidy_outputs(node)
            if opset is not None and opset > CONVERTED_OPSET and node.domain == "":
                node.version = opset
        if opset is not None and opset > CONVERTED_OPSET and "" in graph.opset_imports:
            graph.opset_imports[""] = opset


def _check_opset(opset: int | None) -> None:
    import onnx

    if opset is None:
        return
    if not isinstance(opset, int):
        raise ExportError(f"opset={opset!r}: must be an integer")
    if not LOWEST_OPSET <= opset <= HIGHEST_OPSET:
        raise ExportError(f"opset={opset}: this package exports to opsets {LOWEST_OPSET} to {HIGHEST_OPSET}")
    known = onnx.defs.onnx_opset_version()
    if opset > known:
        raise ExportError(f"opset={opset}: the installed onnx {onnx.__version__} knows opsets up to {known}; a newer onnx is needed")


_NOT_HERE = {"f": "give path", "opset_version": "give opset", "dynamo": "leave it out"}


def _check_arguments(model: Any, path: Any, options: Mapping[str, Any]) -> None:
    """What would otherwise be found out after the work, or never."""
    if not isinstance(model, torch.nn.Module | torch.export.ExportedProgram):
        raise TypeError(f"model: is of type {type(model).__name__}, must be a torch.nn.Module or what torch.export.export returned")
    for name, instead in _NOT_HERE.items():
        if name in options:
            raise TypeError(f"{name}: is an argument of torch.onnx.export, not of this export; {instead}")
    if path is None:
        return
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: is of type {type(path).__name__}, must be a str, an os.PathLike or None")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"path: the folder {folder!r} does not exist")
    if not os.fspath(path) or os.path.isdir(path):
        raise IsADirectoryError(f"path: {os.fspath(path)!r} is a folder, or empty; a file name is needed")


def _check_names(program: torch.onnx.ONNXProgram, input_names: Sequence[str] | None, output_names: Sequence[str] | None) -> None:
    """The exporter gives names in order and drops those left over, so that a wrong count means wrong names."""
    graph = program.model.graph
    for argument, names, values in (("input_names", input_names, graph.inputs), ("output_names", output_names, graph.outputs)):
        if names is not None and (isinstance(names, str) or len(names) != len(values)):
            raise ExportError(f"{argument}: is {names!r}, must be a list with a name for each of {len(values)}: {_kinds(values)}")
    clash = {value.name for value in graph.inputs} & {value.name for value in graph.outputs if value not in graph.inputs}
    if clash:
        raise ExportError(f"output_names: {sorted(map(str, clash))[0]!r} is the name of an input as well")


def _kinds(values: Sequence[Any]) -> str:
    return ", ".join(kind_of(value) for value in values[:8]) + (", ..." if len(values) > 8 else "")


def _check(onnx_program: torch.onnx.ONNXProgram, program: torch.export.ExportedProgram, path: str | os.PathLike[str] | None) -> None:
    from torch_onnx_attn.onnx.checking import ONNXCheckError, check

    findings = check(onnx_program, program, path=path)
    logger.info("%s", findings)
    if not findings.ok:
        raise ONNXCheckError(findings)
    if findings.unchecked:
        skipped = "\n".join(f"  {finding.what}: {finding.detail}" for finding in findings.unchecked)
        warnings.warn(f"the exported model passed, but not everything could be checked:\n{skipped}", stacklevel=3)


def _capture(model: torch.nn.Module, args: Any, kwargs: dict[str, Any], dynamic_shapes: Any) -> torch.export.ExportedProgram:
    """What `torch.onnx.export` does first, done here because the opset depends on the result."""
    if model.training:
        warnings.warn("exporting a model in training mode; call model.eval() first", stacklevel=3)
    if not isinstance(args, torch.Tensor | tuple | list):
        raise TypeError(f"args: is of type {type(args).__name__}, must be a tuple of example inputs")
    if isinstance(dynamic_shapes, str):
        raise TypeError(f"dynamic_shapes: is {dynamic_shapes!r}, must give the axes of each input, as axes() makes them")
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    shapes = pytree.tree_map(lambda size: torch.export.Dim.DYNAMIC if isinstance(size, str) else size, dynamic_shapes)
    with _sizes_of_one_are_not_special():
        try:
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception:
            with contextlib.suppress(Exception):
                return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=True)
            raise


def _sizes_of_one_are_not_special() -> contextlib.AbstractContextManager[Any]:
    """A dynamic dimension that is 0 or 1 in the example stays dynamic. The exporter captures with the same (private) switch."""
    from torch.fx.experimental import _config

    config: Any = _config
    if not hasattr(config, "backed_size_oblivious"):
        return contextlib.nullcontext()
    switch: contextlib.AbstractContextManager[Any] = config.patch(backed_size_oblivious=True)
    return switch


def _choose_opset(program: torch.export.ExportedProgram, asked: int | None) -> int | None:
    needed: Need | None = None
    _refuse_written_buffers(program)
    for call in calls(program):
        if call.refusal is not None:
            raise ExportError(call.refusal)
        if call.need is not None and (needed is None or call.need.opset > needed.opset):
            needed = call.need
    if asked is None:
        return None if needed is None else needed.opset
    if needed is not None and asked < needed.opset:
        raise ExportError(f"opset={asked}: {needed.argument} needs opset {needed.opset}. Leave opset out to have it chosen")
    return asked


def _refuse_written_buffers(program: torch.export.ExportedProgram) -> None:
    """By storage, since a write may go through views."""
    signature = program.graph_signature
    held = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    storages = {_storage(node): held[node.name] for node in program.graph.nodes if node.op == "placeholder" and node.name in held}
    storages.pop(None, None)
    for node in program.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        given = {argument.name: value for argument, value in zip(node.target._schema.arguments, node.args, strict=False)} | node.kwargs
        for argument in node.target._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = given.get(argument.name) if written else None
            if isinstance(value, torch.fx.Node) and _storage(value) in storages:
                raise ExportError(
                    f"{argument.name}: {node.target._opname} writes the buffer {storages[_storage(value)]!r}, and an ONNX graph keeps "
                    "nothing from call to call. Pass it as an input and return it, or hold caches in a torch_onnx_attn.nn.KVCache and "
                    "export with export_static_cache"
                )


def _storage(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, torch.Tensor) and value.layout == torch.strided else None


def _all_nodes(graph: Any) -> Iterator[Any]:
    import onnx_ir

    return iter(onnx_ir.traversal.RecursiveGraphIterator(graph))


def _make_room_for_names(graph: Any) -> None:
    outer = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    for node in _all_nodes(graph):
        for value in node.outputs:
            if value.name and outer.get(value.name, value) is not value:
                value.name = f"{value.name}_of_{node.name or node.op_type}"


def _tidy_outputs(node: Any) -> None:
    past = 4 if node.domain == "" else 6  # the index of past_key
    has_past = len(node.inputs) > past and node.inputs[past] is not None
    if has_past and len(node.outputs) < 3:
        node.resize_outputs(3)
    for index, name in ((1, "present_key"), (2, "present_value"), (3, "qk")):
        if index >= len(node.outputs):
            break
        output = node.outputs[index]
        if has_past and index < 3:
            if not output.name:
                output.name = f"{node.outputs[0].name}_{name}"
        elif not output.uses() and not output.is_graph_output():
            output.name = ""
    used = max(index for index, output in enumerate(node.outputs) if index == 0 or output.name)
    node.resize_outputs(used + 1)
