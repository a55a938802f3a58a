"""Which runtime takes which node, and where one is known to compute something else: measured facts as one table.

Each row holds for the nodes that its condition picks. A row that refuses says why a runtime stops with an error; a row that differs
names a result that is not the ONNX text's (or, for MultiHeadAttention, not the one decided in docs/design.md), together with an
imitation: what the outputs are when just this defect is present. `verify` takes a deviation for known only if an imitation explains it.

Measured on the CPU with onnx 1.23.2 and ONNX Runtime 1.30.0 and 1.32.0, node by node, in November 2026.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from . import imitations
from .facts import Facts
from .imitations import Imitation

__all__ = ["BEHAVIOURS", "RUNTIMES", "Behaviour", "Runtime", "behaviours", "closest", "crash"]

_FLOAT, _FLOAT16, _DOUBLE, _BFLOAT16 = 1, 10, 11, 16  # TensorProto's numbers


Level = Literal["refuses", "crashes", "differs", "expands"]


@dataclasses.dataclass(frozen=True)
class Runtime:
    """A runtime of a version that was measured."""

    name: str  # as in `oracles.ORACLES`
    version: str

    @property
    def title(self) -> str:
        return {"onnxruntime": "ONNX Runtime {} CPU"}.get(self.name, self.name + " {}").format(self.version)


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """One row of the table.

    Attributes:
        runtime: name of the runtime.
        versions: those it was seen with.
        level: ``refuses``, ``crashes``, ``differs``, or ``expands`` for a function body of many nodes instead of one kernel.
        reason: what happens, in words.
        applies: the nodes it happens to. A condition that needs a size that is not known does not hold.
        imitation: for ``differs``, the outputs with this defect.
        in_kernel: whether this happens in the runtime's kernel for Attention only, and not in the function body.
    """

    runtime: str
    versions: tuple[str, ...]
    level: Level
    reason: str
    applies: Callable[[Facts], bool]
    imitation: Imitation | None = None
    in_kernel: bool = False


_ORT, _REFERENCE = "onnxruntime", "onnx.reference"
_OLD, _NEW = "1.30", "1.32"
_BOTH = (_OLD, _NEW)
_NUMPY = ("1.23",)
RUNTIMES = (Runtime(_ORT, _NEW), Runtime(_ORT, _OLD), Runtime(_REFERENCE, _NUMPY[0]))


# ---------------------------------------------------------------------------------------------------------------------
# Conditions
# ---------------------------------------------------------------------------------------------------------------------


def _attention(facts: Facts) -> bool:
    return facts.op == "attention"


def _mha(facts: Facts) -> bool:
    return facts.op == "mha"


def _has_kernel_types(facts: Facts) -> bool:
    return facts.dtype() in (_FLOAT, _FLOAT16)


def _double(facts: Facts) -> bool:
    return _attention(facts) and facts.dtype() == _DOUBLE


def _uses_kernel(runtime: Runtime, facts: Facts) -> bool:
    """Whether ONNX Runtime takes its kernel for Attention and not the function body: 1.32 up to opset 24, 1.30 wherever it loads."""
    if not _attention(facts) or not _has_kernel_types(facts):
        return False
    return facts.opset <= 24 if runtime.version == _NEW else not _names_window(facts)


def _names_window(facts: Facts) -> bool:
    return facts.attribute("left_window_size") is not None or facts.attribute("right_window_size") is not None


def _wants_present(facts: Facts) -> bool:
    return facts.has("present_key") or facts.has("present_value")


def _past_without_present(facts: Facts) -> bool:
    return facts.has("past_key") and not (facts.has("present_key") and facts.has("present_value"))


def _rowless_mask(facts: Facts) -> bool:
    mask, rows = facts.shape("attn_mask"), facts.rows
    return mask is not None and rows not in (None, 1) and (len(mask) == 1 or mask[-2:-1] == (1,))


def _one_dimensional_mask(facts: Facts) -> bool:
    mask = facts.shape("attn_mask")
    return mask is not None and len(mask) == 1


def _short_mask(facts: Facts) -> bool:
    mask, keys = facts.shape("attn_mask"), facts.keys
    return mask is not None and len(mask) > 0 and mask[-1] is not None and keys is not None and mask[-1] < keys


def _empty(facts: Facts) -> bool:
    return any(kind is not None and kind.shape is not None and 0 in kind.shape for name, kind in facts.kinds.items() if "past" not in name)


def _no_keys(facts: Facts) -> bool:
    return _attention(facts) and facts.keys == 0


def _other_value_type(facts: Facts) -> bool:
    return _attention(facts) and facts.dtype("V") != facts.dtype("Q") and None not in (facts.dtype("V"), facts.dtype("Q"))


def _float_mask(facts: Facts) -> bool:
    return facts.dtype("attn_mask") in (_FLOAT, _FLOAT16, _DOUBLE, _BFLOAT16)


def _scores(facts: Facts, mode: int) -> bool:
    return _attention(facts) and facts.has("qk_matmul_output") and facts.attribute("qk_matmul_output_mode", 0) == mode


def _cause_of_infinities(facts: Facts) -> bool:
    return facts.has("attn_mask") or facts.has("nonpad_kv_seqlen") or bool(facts.attribute("is_causal"))


def _value_head_size_differs(facts: Facts) -> bool:
    past = facts.shape("past_key"), facts.shape("past_value")
    return None not in past and past[0][-1] != past[1][-1]  # type: ignore[index]


def _shares(facts: Facts) -> bool:
    return _mha(facts) and facts.has("past_sequence_length")


def _unidirectional(facts: Facts) -> bool:
    return _mha(facts) and bool(facts.attribute("unidirectional"))


def _has_lengths(facts: Facts) -> bool:
    return _attention(facts) and facts.has("nonpad_kv_seqlen")


def _causal_without_window(facts: Facts) -> bool:
    windows = (facts.attribute(name, -1) for name in ("left_window_size", "right_window_size"))
    return _attention(facts) and bool(facts.attribute("is_causal")) and all(size < 0 for size in windows)


def _other_lengths(facts: Facts) -> bool:
    return facts.rows is not None and facts.new_keys is not None and facts.rows != facts.new_keys


def _packed(facts: Facts) -> bool:
    return any(len(facts.shape(name) or ()) == 5 for name in ("query", "key"))


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------

Condition = Callable[[Facts], bool]
_NEW_ONLY, _OLD_ONLY = (_NEW,), (_OLD,)

_SPREADS = "NaN or inf in the cache past a length spreads: the padding is multiplied by 0 instead of left out"
_OVERFLOWS = "float16 scores beyond 65504 overflow to NaN"
_FLOAT32_SCALE = "float64 is scaled by a float32 number, which costs 1e-8"


def _row(level: Level, reason: str, applies: Condition, versions: tuple[str, ...] = _BOTH, imitation: Imitation | None = None) -> Behaviour:
    return Behaviour(_ORT, versions, level, reason, applies, imitation)


def _kernel_row(
    level: Level, reason: str, applies: Condition, versions: tuple[str, ...] = _BOTH, imitation: Imitation | None = None
) -> Behaviour:
    return Behaviour(_ORT, versions, level, reason, applies, imitation, in_kernel=True)


def _reference_row(level: Level, reason: str, applies: Condition, imitation: Imitation | None = None) -> Behaviour:
    return Behaviour(_REFERENCE, _NUMPY, level, reason, applies, imitation)


_ATTENTION_IN_ORT = (
    _row(
        "expands",
        "no kernel for opset 25 and later: runs the function body, about 60 nodes",
        lambda f: _attention(f) and f.opset >= 25,
        _NEW_ONLY,
    ),
    _row("expands", "no float64 kernel: runs the function body", _double),
    _row("refuses", "no bfloat16: neither a kernel nor the function body loads", lambda f: _attention(f) and f.dtype() == _BFLOAT16),
    _row("refuses", "window attributes are unknown, even at -1", lambda f: _attention(f) and _names_window(f), _OLD_ONLY),
    _row("refuses", "opsets above 26 are unknown", lambda f: f.op != "mha" and f.opset > 26, _OLD_ONLY),
    _kernel_row(
        "refuses", "the kernel wants a mask with as many rows as there are queries: expand it, or use opset 25", _rowless_mask, _NEW_ONLY
    ),
    _kernel_row("refuses", "the kernel wants a mask with as many rows as there are queries: expand it", _rowless_mask, _OLD_ONLY),
    _kernel_row("refuses", "the kernel wants a mask of rank 2 to 4", _one_dimensional_mask),
    _kernel_row("refuses", "the kernel wants a mask with as many columns as there are keys: extend it", _short_mask),
    _kernel_row("refuses", "the kernel wants scale > 0", lambda f: f.attribute("scale", 1.0) <= 0),
    _kernel_row("refuses", "the kernel takes no empty tensors", _empty),
    _kernel_row("refuses", "a past needs both present outputs wired, read or not", _past_without_present),
    _row("refuses", "V must have the type of Q", _other_value_type),
    _row("refuses", "there must be keys", _no_keys),
    _row(
        "refuses",
        "at opset 25 lengths and present outputs exclude each other",
        lambda f: _attention(f) and f.opset >= 25 and f.has("nonpad_kv_seqlen") and _wants_present(f),
        _NEW_ONLY,
    ),
    _row(
        "refuses",
        "float64 with a coarser softmax_precision does not load",
        lambda f: _attention(f) and f.dtype() == _DOUBLE and f.attribute("softmax_precision") in (_FLOAT16, _BFLOAT16),
    ),
    _kernel_row(
        "differs",
        "score mode 2 adds the lowest finite number at masked cells, where the text has -inf",
        lambda f: _scores(f, 2) and _cause_of_infinities(f),
        imitation=imitations.lowest_for_infinity,
    ),
    _kernel_row(
        "differs",
        "a row whose mask holds the lowest finite number everywhere is 0, where the text has a softmax of it",
        _float_mask,
        imitation=imitations.rows_of_lowest_are_zero,
    ),
    _kernel_row(
        "differs",
        "is_causal is skipped for a single query row after a past, so it sees every new key",
        lambda f: bool(f.attribute("is_causal")) and f.has("past_key") and f.rows == 1 and f.new_keys != 1,
        imitation=imitations.causality_skipped,
    ),
    _row("differs", _SPREADS, _has_lengths, imitation=imitations.padding_spreads),
    _kernel_row("differs", _OVERFLOWS, lambda f: f.dtype() == _FLOAT16, imitation=imitations.float16_scores_overflow),
    _row("differs", _FLOAT32_SCALE, _double, imitation=imitations.float32_scale),
    _row(
        "refuses",
        "its float64 function body takes no float64 mask beside causality or lengths",
        lambda f: _double(f) and _float_mask(f) and (bool(f.attribute("is_causal")) or f.has("nonpad_kv_seqlen")),
        _OLD_ONLY,
    ),
    _row(
        "differs",
        "its float64 function body misplaces causality beside lengths",
        lambda f: _double(f) and bool(f.attribute("is_causal")) and f.has("nonpad_kv_seqlen"),
        _OLD_ONLY,
        imitations.everything,
    ),
    _row(
        "differs",
        "its float64 function body makes rows without an allowed key NaN",
        lambda f: _double(f) and _cause_of_infinities(f),
        _OLD_ONLY,
        imitations.dead_rows_are_nan,
    ),
)

_MHA_IN_ORT = (
    _row("refuses", "no bfloat16 kernel on the CPU", lambda f: _mha(f) and f.dtype() == _BFLOAT16),
    _row("refuses", "float64 is not in its schema", lambda f: _mha(f) and f.dtype() == _DOUBLE),
    _row("refuses", "packed QKV and packed KV have no kernel on the CPU", lambda f: _mha(f) and _packed(f)),
    _row("refuses", "with a past, values need the head size of the keys", lambda f: _mha(f) and _value_head_size_differs(f)),
    _row("refuses", "a shared buffer needs both present outputs wired", lambda f: _shares(f) and _past_without_present(f), _NEW_ONLY),
    _row(
        "crashes",
        "the process dies of a shared buffer with beams and without both present outputs",
        lambda f: _shares(f) and f.has("cache_indirection") and _past_without_present(f),
        _OLD_ONLY,
    ),
    _row(
        "differs",
        "without a cache_indirection a shared buffer is taken for a plain past",
        lambda f: _shares(f) and not f.has("cache_indirection"),
        _OLD_ONLY,
        imitations.everything,
    ),
    _row(
        "differs",
        "a past without both present outputs is misread: wire them, read or not",
        lambda f: _mha(f) and _past_without_present(f) and not _shares(f),
        imitation=imitations.everything,
    ),
    _row(
        "differs",
        "unidirectional is aligned top-left, and leaves the last row open, where q_len and the new kv_len differ",
        lambda f: _unidirectional(f) and _other_lengths(f),
        imitation=imitations.causal_top_left,
    ),
    _row(
        "differs",
        "unidirectional adds the lowest finite number instead of excluding, so a row whose visible keys are that low sees the others",
        lambda f: _unidirectional(f) and (f.has("key_padding_mask") or f.has("attention_bias")),
        imitation=imitations.causal_is_added,
    ),
    _row(
        "differs",
        "a row without a finite score is NaN, here 0",
        lambda f: f.has("attention_bias") or (_mha(f) and f.attribute("mask_filter_value", 0.0) == -math.inf),
        imitation=imitations.empty_rows_are_nan,
    ),
    _row(
        "differs",
        "with beams, attention_bias is read at entry / beams",
        lambda f: _mha(f) and f.has("cache_indirection") and f.has("attention_bias"),
        imitation=imitations.bias_of_the_group,
    ),
)

_IN_REFERENCE = (
    _reference_row("refuses", "com.microsoft operators are not part of onnx", _mha),
    _reference_row("refuses", "is_causal with a mask of rank 1", lambda f: _causal_without_window(f) and _one_dimensional_mask(f)),
    _reference_row("refuses", "there must be keys", _no_keys),
    _reference_row(
        "differs",
        "score mode 0 shows the scores after softcap, where the text has the product",
        lambda f: _scores(f, 0) and f.attribute("softcap", 0.0) > 0,
        imitations.capped_product,
    ),
    _reference_row(
        "differs",
        "is_causal with a mask that has no query axis applies the first row's limit to all rows",
        lambda f: _causal_without_window(f) and _rowless_mask(f),
        imitations.rows_after_the_first,
    ),
    _reference_row("differs", _SPREADS, _has_lengths, imitations.padding_spreads),
    _reference_row("differs", _OVERFLOWS, lambda f: _attention(f) and f.dtype() == _FLOAT16, imitations.float16_scores_overflow),
    _reference_row(
        "differs",
        _FLOAT32_SCALE,
        lambda f: _attention(f) and f.dtype() == _DOUBLE and f.attribute("scale") is not None,
        imitations.float32_scale,
    ),
)

BEHAVIOURS = (*_ATTENTION_IN_ORT, *_MHA_IN_ORT, *_IN_REFERENCE)


def behaviours(runtime: Runtime, facts: Facts) -> list[Behaviour]:
    """The rows that hold for a node."""
    rows = [row for row in BEHAVIOURS if row.runtime == runtime.name and runtime.version in row.versions and row.applies(facts)]
    return [row for row in rows if not row.in_kernel or _uses_kernel(runtime, facts)]


def crash(runtime: Runtime, facts: Facts) -> str | None:
    """Why a node must not be given to a runtime in this process, or None."""
    return next((row.reason for row in behaviours(runtime, facts) if row.level == "crashes"), None)


def closest(name: str, version: str) -> Runtime:
    """The measured version that stands for an installed one: the newest that is not newer, or the oldest."""
    measured = sorted((runtime for runtime in RUNTIMES if runtime.name == name), key=lambda runtime: _number(runtime.version))
    return next((runtime for runtime in reversed(measured) if _number(runtime.version) <= _number(version)), measured[0])


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
