"""Runs every attention node of a model on the values it really sees, in several places, and says who is the odd one out.

The judge is `torch_onnx_attn.reference`, in float64. `torch_onnx_attn.tolerance` says what a result may be off by, and why.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bad_input import BadInput
from ..call import Call
from ..tolerance import Allowance, Deviation, allowances, deviation, fast_arithmetic, own_arithmetic, ratios
from .arrays import to_tensor
from .behaviours import behaviours, closest, crash
from .facts import Facts, facts_of_arrays
from .file import open_model
from .imitations import Outcome
from .inputs import Sizes, graph_inputs, input_shapes, make_up, read_arrays
from .node import AttentionNode, find_node, find_nodes
from .node_call import call_of
from .oracles import ORACLES, Answer, ask, installed_version
from .packages import first_line, numpy
from .running import observe
from .shapes import infer

__all__ = ["OURS", "REFERENCE", "Errors", "NodeResult", "OutputResult", "Verification", "judge", "verify"]

OURS, REFERENCE = "torch_onnx_attn", "float64 reference"
_BATCH, _OTHER = 2, 8  # sizes of symbolic dimensions of made-up inputs
_MAP = 128  # rows and columns of an error map

Errors = dict[tuple[str, str], Any]  # (output, implementation) -> [rows, columns], error over what is allowed


@dataclasses.dataclass(frozen=True)
class OutputResult:
    """One output of a node: the deviation of each implementation that gave it, by name. `known` names explained ones with the reason."""

    name: str
    deviations: Mapping[str, Deviation]
    known: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class NodeResult:
    """What was found at one node.

    Attributes:
        node: its name.
        operator: such as ``ai.onnx::Attention-24``.
        status: ``agree``; ``known`` if all that differs is a known defect of an oracle; ``differs``; ``refused`` if this package does
            not take the node, or the node is not valid; ``not executed`` if the model never got there.
        odd_one_out: who differs from float64; ``float64 reference`` where everybody else agrees on something else. Empty if nobody.
        verdict: the same in a sentence.
        inputs: type and shape of each input, by ONNX's names.
        features: in words.
        outputs: the deviations; of the worst execution if the node ran several times.
        refusals: implementations that did not take the node, with the reason.
        executions: how many times it ran and was checked; the first ``running.MOST_EXECUTIONS`` of a loop.
        errors: error maps, if they were asked for.
    """

    node: str
    operator: str
    status: str
    odd_one_out: tuple[str, ...]
    verdict: str
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    features: tuple[str, ...] = ()
    outputs: tuple[OutputResult, ...] = ()
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    executions: int = 0
    errors: Errors = dataclasses.field(default_factory=dict, repr=False)

    @property
    def worst(self) -> float:
        """Largest deviation over what is allowed, of anybody."""
        return max((found.ratio for output in self.outputs for found in output.deviations.values()), default=0.0)


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result for a model. `made_up` names the inputs that were not given; `runner` is who ran the model, "" if nobody had to."""

    model: str
    device: str
    runner: str
    made_up: Mapping[str, str]
    versions: Mapping[str, str | None]
    nodes: tuple[NodeResult, ...]

    def failures(self, strict: bool = False) -> list[NodeResult]:
        """The nodes where somebody differs for no known reason; when strict, for any reason, and nodes that were not executed."""
        fine = ("agree",) if strict else ("agree", "known", "not executed")
        return [node for node in self.nodes if node.status not in fine]


def verify(
    path: str | os.PathLike[str],
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    device: str | torch.device = "cpu",
    sizes: Sizes | None = None,
    only: Iterable[str] = (),
    oracles: Sequence[str] = ORACLES,
    seed: int = 0,
    keep_errors: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Verification:
    """Check the attention nodes of a model file.

    Args:
        path: the model.
        inputs: an .npz file or a mapping with arrays by the names of the model's inputs. What is missing is made up.
        device: where this package's op runs. The oracles run on the CPU.
        sizes: sizes of symbolic dimensions of made-up inputs.
        only: names of the nodes to check; all by default.
        oracles: who else is asked, of ``onnxruntime`` and ``onnx.reference``, which is slow for long 16-bit sequences.
        seed: of made-up inputs.
        keep_errors: keep maps of the errors, for the report.
        progress: called with what is being done, steps done, and steps in all.

    Raises:
        BadInput: a file cannot be used, or the model does not run with these inputs.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # AssertionError: torch without CUDA
        raise BadInput(f"device: is {device!r}, which cannot be used here: {first_line(error)}") from error
    tell = progress or (lambda text, done, total: None)
    model = open_model(path)
    nodes = find_nodes(model, path)
    chosen = [find_node(nodes, name) for name in only] or nodes
    folder = Path(path).parent
    given = _given(inputs, model)
    shapes = input_shapes(model, sizes or {}, _OTHER, _BATCH, given)
    needs = [entry.name for entry in graph_inputs(model) if entry.name not in given]
    kinds = {name: kind.shape for name, kind in infer(model, shapes, folder).items()} if needs else {}
    made = make_up(model, nodes, given, shapes, kinds, seed)
    tell("running the model", 0, len(chosen) + 1)
    observed = observe(model, chosen, {**given, **made}, folder)
    results = []
    for number, node in enumerate(chosen):
        tell(node.name, number + 1, len(chosen) + 1)
        executions = observed.seen.get(node.name, [])
        judged = [judge(node, arrays, device, keep_errors, oracles) for arrays in executions]
        worst = max(
            judged, key=lambda result: (_SEVERITY.index(result.status), result.worst), default=_not_executed(node, observed.obstacle)
        )
        results.append(dataclasses.replace(worst, executions=len(executions)))
    tell("", len(chosen) + 1, len(chosen) + 1)
    return Verification(
        os.fspath(path),
        str(device),
        observed.runner,
        {name: f"{array.dtype}{list(array.shape)}" for name, array in made.items()},
        {name: installed_version(name) for name in oracles},
        tuple(results),
    )


_SEVERITY = ("not executed", "agree", "known", "refused", "differs")


def _given(inputs: str | os.PathLike[str] | Mapping[str, Any] | None, model: Any) -> dict[str, Any]:
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping):
        return read_arrays(inputs, model)
    for name, array in inputs.items():
        if not isinstance(array, numpy.ndarray | numpy.generic):
            raise BadInput(f"inputs: {name!r} is of type {type(array).__name__}, must be a NumPy array")
    return dict(inputs)


def _not_executed(node: AttentionNode, obstacle: str) -> NodeResult:
    where = f" (in {' / '.join(node.place)})" if node.place else ""
    return NodeResult(node.name, node.title, "not executed", (), f"{obstacle or 'not executed with these inputs'}{where}")


def judge(
    node: AttentionNode,
    arrays: Mapping[str, Any],
    device: str | torch.device = "cpu",
    keep_errors: bool = False,
    oracles: Sequence[str] = ORACLES,
) -> NodeResult:
    """Everybody's answer to one execution of a node, compared with float64."""
    facts = facts_of_arrays(node, arrays)
    described: dict[str, Any] = {
        "node": node.name,
        "operator": node.title,
        "inputs": {name: str(kind) for name, kind in facts.kinds.items()},
        "features": tuple(facts.features),
        "executions": 1,
    }
    if facts.needed_opset is not None and facts.needed_opset > facts.opset:
        verdict = f"the node is not valid: what it says needs opset {facts.needed_opset} of ai.onnx, and the model has {facts.opset}"
        return NodeResult(**described, status="refused", odd_one_out=(OURS,), verdict=verdict)
    try:
        call = call_of(node, arrays)
        own = {name: tensor.cpu() for name, tensor in call.to(device).run().items()}
        expected = call.expected()
    except (BadInput, RuntimeError) as error:
        return NodeResult(**described, status="refused", odd_one_out=(OURS,), verdict=f"{OURS} refuses: {first_line(error)}")
    answers = {OURS: own}
    refusals = {}
    for oracle in oracles:
        deadly = _deadly(oracle, facts)
        answer = ask(oracle, node, arrays) if deadly is None else Answer(None, f"not asked: {deadly}")
        if answer.outputs is None:
            refusals[oracle] = _known_refusal(oracle, facts, answer)
        else:
            answers[oracle] = {name: to_tensor(name, array) for name, array in answer.outputs.items()}
    scale = call.scale()
    on_device = dataclasses.replace(call, tensors={name: tensor.to(device) for name, tensor in call.tensors.items()})
    tight, loose = allowances(on_device, own_arithmetic(call), scale), allowances(call, fast_arithmetic(call), scale)
    outputs: list[OutputResult] = []
    errors: Errors = {}
    for name, want in expected.items():
        allowed = {who: tight[name] if who == OURS else loose[name] for who in answers}
        deviations = {who: deviation(made[name], want, allowed[who]) for who, made in answers.items()}
        known = {
            who: reason
            for who, found in deviations.items()
            if who != OURS
            and not found.agrees
            and (reason := _known(who, facts, call, expected, answers[who], name, loose[name])) is not None
        }
        outputs.append(OutputResult(name, deviations, known))
        if keep_errors:
            errors |= {(name, who): _error_map(made[name], want, allowed[who]) for who, made in answers.items()}
    status, odd, verdict = _verdict(outputs, answers, loose)
    return NodeResult(
        **described, status=status, odd_one_out=odd, verdict=verdict, outputs=tuple(outputs), refusals=refusals, errors=errors
    )


def _verdict(
    outputs: list[OutputResult], answers: Mapping[str, Mapping[str, Tensor]], allowed: Mapping[str, Allowance]
) -> tuple[str, tuple[str, ...], str]:
    different = [(output, who) for output in outputs for who, found in output.deviations.items() if not found.agrees]
    unknown = [(output.name, who) for output, who in different if who not in output.known]
    if not different:
        return "agree", (), "agree"
    if not unknown:
        reasons = dict.fromkeys(f"{who} differs, as known: {output.known[who]}" for output, who in different)
        return "known", tuple(dict.fromkeys(who for _, who in different)), "; ".join(reasons)
    for name in dict.fromkeys(name for name, _ in unknown):
        if len(answers) > 1 and all((name, who) in unknown for who in answers) and _are_alike(name, answers, allowed[name]):
            return "differs", (REFERENCE,), f"all agree on {name}, but the {REFERENCE} differs from them"
    odd = tuple(dict.fromkeys(who for _, who in unknown))
    return "differs", odd, "; ".join(f"{who} differs in {', '.join(name for name, other in unknown if other == who)}" for who in odd)


def _are_alike(name: str, answers: Mapping[str, Mapping[str, Tensor]], allowed: Allowance) -> bool:
    pairs = itertools.combinations((made[name] for made in answers.values()), 2)
    return all(deviation(one, other.double(), allowed).ratio <= 2 for one, other in pairs)


# ---------------------------------------------------------------------------------------------------------------------
# Known defects
# ---------------------------------------------------------------------------------------------------------------------


def _deadly(oracle: str, facts: Facts) -> str | None:
    version = installed_version(oracle)
    return None if version is None else crash(closest(oracle, version), facts)


def _known_refusal(oracle: str, facts: Facts, answer: Answer) -> str:
    """Why an oracle refuses, from the table where it says so, else in the oracle's words."""
    version = installed_version(oracle)
    if version is not None:
        for row in behaviours(closest(oracle, version), facts):
            if row.level == "refuses":
                return f"as known: {row.reason}"
    return answer.refusal or "no reason given"


def _known(
    oracle: str, facts: Facts, call: Call, expected: Mapping[str, Tensor], made: Mapping[str, Tensor], name: str, allowed: Allowance
) -> str | None:
    """The known defects that explain a deviation: one if one is enough, else all that apply together.

    Every element must be right, or what one of the defects makes of it; what two of them make of one element is not looked for.
    """
    version = installed_version(oracle)
    if version is None or made[name].shape != expected[name].shape:
        return None
    outcomes = {
        row.reason: outcome
        for row in behaviours(closest(oracle, version), facts)
        if row.imitation is not None and (outcome := row.imitation(call, expected).get(name)) is not None
    }
    right = ratios(made[name], expected[name], allowed) <= 1

    def defective(outcome: Outcome, absolute: float) -> Tensor:
        widened = Allowance(allowed.absolute + absolute, allowed.relative, allowed.unit)
        alike = ratios(made[name], outcome.value, widened) <= 1
        return alike if outcome.anything is None else alike | outcome.anything

    for reason, outcome in outcomes.items():
        if bool((right | defective(outcome, outcome.absolute)).all()):
            return reason
    explained = right
    for outcome in outcomes.values():
        explained = explained | defective(outcome, sum(other.absolute for other in outcomes.values()))
    return "; ".join(outcomes) if bool(explained.all()) else None


def _error_map(made: Tensor, want: Tensor, allowed: Allowance) -> Any:
    """[rows, columns]: the largest error over what is allowed, of any batch entry and head, in at most `_MAP` steps each way."""
    if made.shape != want.shape or made.dim() < 2 or made.numel() == 0:
        return numpy.zeros((1, 1))
    ratio = ratios(made, want, allowed)
    flat = ratio.reshape(-1, *ratio.shape[-2:]).amax(0)[None, None]
    target = [min(size, _MAP) for size in flat.shape[-2:]]
    return torch.nn.functional.adaptive_max_pool2d(flat.clamp(max=1e30), target)[0, 0].numpy()
