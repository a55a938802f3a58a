"""The table of known refusals and defects, row by row, against the runtimes that are installed.

A row that says too much is noticed as well as one that a newer release has made untrue: a sample must show what its row says, and must
be recognised by `judge`; a sample with one more error in it must not be.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from model_files import OUTPUTS, Source, node_of

from torch_onnx_attn.models import imitations, judge
from torch_onnx_attn.models.behaviours import BEHAVIOURS, RUNTIMES, Behaviour, Runtime, behaviours, closest, crash
from torch_onnx_attn.models.facts import facts_of_arrays
from torch_onnx_attn.models.oracles import ORACLES, Answer, ask, installed_version

pytest.importorskip("onnxruntime")
judging = importlib.import_module("torch_onnx_attn.models.verify")  # `models.verify` is the function of that name

F16, F64, BF16 = np.float16, np.float64, ml_dtypes.bfloat16
INSTALLED = {name: closest(name, installed_version(name) or "0") for name in ORACLES}
PRESENTS = ["present_key", "present_value"]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A node that shows one row of the table, which is found by its runtime and the beginning of its reason."""

    runtime: str
    reason: str
    op: str
    arrays: dict[str, Any]
    outputs: tuple[str, ...] = ()
    opset: int = 24
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.runtime}: {self.reason}"

    def node(self) -> Any:
        return node_of(self.op, self.arrays, self.outputs or OUTPUTS[self.op][:1], self.opset, **self.attributes)


def sample(
    runtime: str, reason: str, arrays: dict[str, Any], *outputs: str, op: str = "attention", opset: int = 24, **attributes: Any
) -> Sample:
    return Sample(runtime, reason, op, arrays, (OUTPUTS[op][0], *outputs) if outputs else (), opset, attributes)


def attention(**extra: Any) -> dict[str, Any]:
    return Source().qkv() | extra


def half_attention() -> dict[str, Any]:
    return Source().qkv(dtype=F16)


def overflowing_attention() -> dict[str, Any]:
    """Products far beyond float16 in the first entry only."""
    arrays = half_attention()
    arrays["Q"][0] *= F16(300)
    arrays["K"][0] *= F16(300)
    return arrays


def double_attention() -> dict[str, Any]:
    return Source().qkv(dtype=F64)


def mha(q_len: int = 3, kv_len: int = 5, **extra: Any) -> dict[str, Any]:
    return Source().mha(q_len, kv_len) | extra


def mha_past() -> dict[str, Any]:
    return Source(1).past(heads=4)


def spoilt_cache() -> dict[str, Any]:
    arrays = Source().qkv() | {"nonpad_kv_seqlen": np.array([3, 5])}
    arrays["K"][0, :, 3:], arrays["V"][0, :, 3:] = np.nan, np.inf
    return arrays


def shared_buffer(**extra: Any) -> dict[str, Any]:
    return Source().mha(1, 1) | Source(1).past(9, heads=4) | {"past_sequence_length": np.array([4], np.int32)} | extra


LOWEST = np.finfo(np.float32).min
BEAMS = Source(2).generator.integers(0, 2, (1, 2, 9)).astype(np.int32)
ROW_OF_LOWEST = np.array([[0.0] * 5, [LOWEST] * 5, [0.0] * 5], np.float32)
DEAD_ROW = np.where(np.arange(3)[:, None] == 1, -np.inf, 0.0).astype(np.float32) * np.ones((1, 1, 3, 5), np.float32)
ALL_PADDED = np.array([[0, 0, 0], [1, 1, 1]], np.int32)

ORT, REFERENCE = "onnxruntime", "onnx.reference"
REFUSALS = [
    sample(ORT, "no bfloat16: neither", Source().qkv(dtype=BF16)),
    sample(ORT, "the kernel wants a mask with as many rows", attention(attn_mask=Source(1).keep(2, 1, 1, 5))),
    sample(ORT, "the kernel wants a mask with as many rows", attention(attn_mask=Source(1).keep(1, 5)), opset=23),
    sample(ORT, "the kernel wants a mask of rank", attention(attn_mask=Source(1).keep(5))),
    sample(ORT, "the kernel wants a mask with as many columns", attention(attn_mask=Source(1).keep(3, 4))),
    sample(ORT, "the kernel wants scale", attention(), scale=0.0),
    sample(ORT, "V must have the type of Q", attention(V=Source(1).normal(2, 2, 5, 8, dtype=F16))),
    sample(ORT, "the kernel takes no empty tensors", Source().qkv(0, 5)),
    sample(ORT, "there must be keys", Source().qkv(3, 0), opset=25),
    sample(ORT, "a past needs both present outputs", attention(**Source(1).past())),
    sample(ORT, "a past needs both present outputs", attention(**Source(1).past()), "present_key"),
    sample(ORT, "at opset 25 lengths and present", attention(nonpad_kv_seqlen=np.array([3, 5])), *PRESENTS, opset=25),
    sample(ORT, "float64 with a coarser softmax_precision", double_attention(), softmax_precision=16),
    sample(ORT, "no bfloat16 kernel on the CPU", Source().mha(dtype=BF16), op="mha", num_heads=4),
    sample(ORT, "window attributes are unknown", attention(), opset=25, left_window_size=-1),
    sample(ORT, "its float64 function body takes no", double_attention() | {"attn_mask": Source(1).normal(3, 5, dtype=F64)}, is_causal=1),
    sample(ORT, "opsets above 26", attention(), opset=27),
    sample(ORT, "packed QKV", {"query": Source().normal(2, 3, 4, 3, 8)}, op="mha", num_heads=4),
    sample(ORT, "packed QKV", {"query": Source().normal(2, 3, 32), "key": Source(1).normal(2, 5, 4, 2, 8)}, op="mha", num_heads=4),
    sample(ORT, "a shared buffer needs both", shared_buffer(), op="mha", num_heads=4),
    sample(REFERENCE, "com.microsoft operators", mha(), op="mha", num_heads=4),
    sample(REFERENCE, "is_causal with a mask of rank 1", attention(attn_mask=Source(1).keep(5)), is_causal=1),
    sample(REFERENCE, "there must be keys", Source().qkv(3, 0)),
]
DEFECTS = [
    sample(ORT, "score mode 2", attention(attn_mask=Source(1).keep(3, 5)), "qk_matmul_output", qk_matmul_output_mode=2),
    sample(ORT, "score mode 2", half_attention(), "qk_matmul_output", opset=23, is_causal=1, qk_matmul_output_mode=2),
    sample(ORT, "a row whose mask holds the lowest", attention(attn_mask=ROW_OF_LOWEST)),
    sample(ORT, "a row whose mask holds the lowest", attention(attn_mask=np.full((3, 5), LOWEST)), is_causal=1),
    sample(ORT, "its float64 function body misplaces", double_attention() | {"nonpad_kv_seqlen": np.array([3, 5])}, is_causal=1),
    sample(ORT, "its float64 function body makes rows", double_attention() | {"attn_mask": np.arange(3)[:, None] * np.ones((1, 5)) > 0}),
    sample(ORT, "is_causal is skipped", Source().qkv(1, 5) | Source(1).past(), *PRESENTS, is_causal=1),
    sample(ORT, "NaN or inf in the cache", spoilt_cache()),
    sample(ORT, "NaN or inf in the cache", spoilt_cache(), opset=25),
    sample(ORT, "float16 scores beyond 65504", overflowing_attention(), scale=1.0),
    sample(ORT, "float64 is scaled", double_attention()),
    sample(ORT, "a past without both present", mha(3, 3, **mha_past()), op="mha", num_heads=4),
    sample(ORT, "a past without both present", mha(3, 3, **mha_past()), "present_key", op="mha", num_heads=4),
    sample(ORT, "without a cache_indirection a shared buffer", shared_buffer(), *PRESENTS, op="mha", num_heads=4),
    sample(ORT, "unidirectional is aligned top-left", mha(3, 5), op="mha", num_heads=4, unidirectional=1),
    sample(ORT, "unidirectional is aligned top-left", mha(5, 3, **mha_past()), *PRESENTS, op="mha", num_heads=4, unidirectional=1),
    sample(
        *(ORT, "unidirectional adds the lowest", mha(3, 3, key_padding_mask=ALL_PADDED)),
        op="mha",
        num_heads=4,
        unidirectional=1,
        mask_filter_value=float(LOWEST),
    ),
    sample(ORT, "a row without a finite score", mha(attention_bias=DEAD_ROW), op="mha", num_heads=4),
    sample(
        ORT,
        "with beams, attention_bias",
        shared_buffer(cache_indirection=BEAMS, attention_bias=Source(5).normal(2, 1, 1, 5)),
        *PRESENTS,
        op="mha",
        num_heads=4,
    ),
    sample(REFERENCE, "score mode 0", attention(), "qk_matmul_output", softcap=1.0),
    sample(REFERENCE, "is_causal with a mask that has no query axis", attention(attn_mask=Source(1).keep(2, 1, 1, 5)), is_causal=1),
    sample(
        REFERENCE,
        "is_causal with a mask that has no query axis",
        attention(attn_mask=Source(1).normal(1, 5), nonpad_kv_seqlen=np.array([3, 5])),
        is_causal=1,
    ),
    sample(REFERENCE, "NaN or inf in the cache", spoilt_cache()),
    sample(REFERENCE, "float16 scores beyond 65504", overflowing_attention(), scale=1.0),
    sample(REFERENCE, "float64 is scaled", double_attention(), scale=0.3),
]
EXPANSIONS = [
    sample(ORT, "no kernel for opset 25", attention(), opset=25),
    sample(ORT, "no float64 kernel", double_attention()),
]
# Not to be shown: ours refuses these too, and the last one ends the process.
UNSHOWN = ("float64 is not in its schema", "with a past, values need the head size", "the process dies")


def row_of(case: Sample) -> Behaviour:
    rows = [row for row in BEHAVIOURS if row.runtime == case.runtime and row.reason.startswith(case.reason)]
    rows = [row for row in rows if INSTALLED[case.runtime].version in row.versions] or rows
    assert len(rows) == 1, f"{case}: {len(rows)} rows"
    return rows[0]


def needs_measured_version(case: Sample) -> Behaviour:
    row = row_of(case)
    if INSTALLED[case.runtime].version not in row.versions:
        pytest.skip(f"{case.runtime} {installed_version(case.runtime)}: the row is about {', '.join(row.versions)}")
    return row


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_refusals(case: Sample) -> None:
    row = needs_measured_version(case)
    node = case.node()
    facts = facts_of_arrays(node, case.arrays)
    assert row.level == "refuses" and row in behaviours(INSTALLED[case.runtime], facts)
    assert ask(case.runtime, node, case.arrays).refusal is not None
    result = judge(node, case.arrays)
    known = [f"as known: {other.reason}" for other in behaviours(INSTALLED[case.runtime], facts) if other.level == "refuses"]
    assert result.refusals[case.runtime] in known


@pytest.mark.parametrize("case", DEFECTS, ids=str)
def test_defects_are_recognised(case: Sample) -> None:
    row = needs_measured_version(case)
    node = case.node()
    assert row.level == "differs" and row.imitation is not None
    assert row in behaviours(INSTALLED[case.runtime], facts_of_arrays(node, case.arrays))
    result = judge(node, case.arrays)
    assert result.status == "known" and case.runtime in result.odd_one_out
    reasons = [output.known[case.runtime] for output in result.outputs if case.runtime in output.known]
    assert any(row.reason in reason for reason in reasons)


@pytest.mark.parametrize("case", [case for case in DEFECTS if row_of(case).imitation is not imitations.everything], ids=str)
def test_a_defect_excuses_nothing_else(case: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more wrong element in the same output is not covered. (A misread past spoils everything.)"""
    needs_measured_version(case)
    node = case.node()
    known = next(output for output in judge(node, case.arrays).outputs if case.runtime in output.known)
    excused = [judging.call_of(node, case.arrays)]

    def spoilt(oracle: str, node: Any, arrays: Any) -> Answer:
        answer = ask(oracle, node, arrays)
        if oracle != case.runtime or answer.outputs is None:
            return answer
        array = np.array(answer.outputs[known.name])
        wanted = excused[0].expected()[known.name].numpy()
        finite = np.argwhere(np.isfinite(array) & np.isfinite(wanted))
        place = tuple(finite[-1])  # in the last row of the last entry, which no sample spoils
        array[place] = wanted[place] + 0.5
        return Answer({**answer.outputs, known.name: array})

    monkeypatch.setattr(judging, "ask", spoilt)
    result = judge(node, case.arrays)
    assert result.status == "differs" and case.runtime in result.odd_one_out


@pytest.mark.parametrize("case", EXPANSIONS, ids=str)
def test_expansions_run(case: Sample) -> None:
    row = needs_measured_version(case)
    assert row.level == "expands" and row.applies(facts_of_arrays(case.node(), case.arrays))
    assert ask(case.runtime, case.node(), case.arrays).outputs is not None


def test_every_row_is_shown() -> None:
    cases = (*REFUSALS, *DEFECTS, *EXPANSIONS)
    shown = [row for row in BEHAVIOURS if any(row.runtime == case.runtime and row.reason.startswith(case.reason) for case in cases)]
    missing = [row.reason for row in BEHAVIOURS if row not in shown]
    assert [reason for reason in missing if not reason.startswith(UNSHOWN)] == []


def test_a_node_that_would_kill_the_process_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = shared_buffer(cache_indirection=BEAMS)
    node = node_of("mha", arrays, num_heads=4)
    facts = facts_of_arrays(node, arrays)
    assert crash(Runtime(ORT, "1.32"), facts) is None
    assert "the process dies" in str(crash(Runtime(ORT, "1.30"), facts))
    monkeypatch.setattr(judging, "closest", lambda name, version: Runtime(ORT, "1.30"))
    monkeypatch.setattr(judging, "ask", lambda oracle, node, arrays: pytest.fail("asked") if oracle == ORT else ask(oracle, node, arrays))
    assert judge(node, arrays).refusals[ORT].startswith("not asked: the process dies")


PLAIN = [
    ("attention", attention(attn_mask=Source(1).keep(3, 5)), {"is_causal": 1}),
    ("attention", attention(attn_mask=Source(1).normal(2, 1, 3, 5)), {}),
    ("attention", attention(attn_mask=Source(1).keep(4, 3, 5)), {"softcap": 2.0}),
    ("attention", attention(nonpad_kv_seqlen=np.array([2, 5])), {"is_causal": 1}),
    ("attention", half_attention(), {"scale": 0.25}),
    ("mha", mha(), {"num_heads": 4}),
    ("mha", mha(3, 3), {"num_heads": 4, "unidirectional": 1}),
]


@pytest.mark.parametrize("op, arrays, attributes", PLAIN)
@pytest.mark.parametrize("opset", [24, 25])
def test_the_table_refuses_nothing_that_runs(op: str, arrays: dict[str, Any], attributes: dict[str, Any], opset: int) -> None:
    node = node_of(op, arrays, opset=opset, **attributes)
    facts = facts_of_arrays(node, arrays)
    for name in ORACLES:
        refuses = any(row.level == "refuses" for row in behaviours(INSTALLED[name], facts))
        assert refuses == (ask(name, node, arrays).outputs is None), name


@pytest.mark.parametrize(
    "name, version, expected",
    [(ORT, "1.32.0", "1.32"), (ORT, "1.31.2", "1.30"), (ORT, "1.40.0", "1.32"), (ORT, "1.20.1", "1.30"), (REFERENCE, "1.23.2", "1.23")],
)
def test_an_installed_version_is_judged_by_the_closest_measured_one(name: str, version: str, expected: str) -> None:
    assert closest(name, version) == Runtime(name, expected)


def test_what_is_known_of_the_older_onnxruntime_only() -> None:
    old = Runtime(ORT, "1.30")
    assert old in RUNTIMES
    window = facts_of_arrays(node_of("attention", attention(), opset=25, left_window_size=1), attention())
    assert [row.reason for row in behaviours(old, window) if row.level == "refuses"] == ["window attributes are unknown, even at -1"]
    assert not [row for row in behaviours(Runtime(ORT, "1.32"), window) if row.level == "refuses"]
    mask = attention(attn_mask=Source(1).keep(2, 1, 1, 5))
    rowless = facts_of_arrays(node_of("attention", mask, opset=25), mask)
    assert [row.level for row in behaviours(old, rowless)] == ["refuses"]
    assert [row.level for row in behaviours(Runtime(ORT, "1.32"), rowless)] == ["expands"]
    late = facts_of_arrays(node_of("attention", attention(), opset=27), attention())
    assert [row.reason for row in behaviours(old, late) if row.level == "refuses"] == ["opsets above 26 are unknown"]
