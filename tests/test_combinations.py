"""Features together. A covering array meets every pair of values of any two axes in some call; each runs for every type.

Everything composes, so a bug that needs two features at once has nowhere to hide here; one that needs three may.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from cases import FLOAT_DTYPES, Case, MhaCase, check_attention, check_mha

Row = dict[str, Any]


def covering_array(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Row]:
    """Few rows such that any two values of any two axes meet in one of them. Greedy and deterministic.

    Each row starts from a pair that is still missing and takes, axis by axis in random order, the value that meets the most
    missing pairs with what the row has already; the best of several tries is kept.
    """
    chooser = random.Random(seed)
    names = list(axes)
    missing = {((a, i), (b, j)) for a, b in combinations(names, 2) for i in range(len(axes[a])) for j in range(len(axes[b]))}
    position = {name: index for index, name in enumerate(names)}

    def pair(a: tuple[str, int], b: tuple[str, int]) -> tuple[tuple[str, int], tuple[str, int]]:
        return (a, b) if position[a[0]] < position[b[0]] else (b, a)

    rows = []
    while missing:
        best: dict[str, int] = {}
        best_count = 0
        ordered = sorted(missing)
        for _ in range(20):
            row = dict(chooser.choice(ordered))
            count = 1
            rest = [name for name in names if name not in row]
            chooser.shuffle(rest)
            for name in rest:
                gains = [sum(pair((name, i), other) in missing for other in row.items()) for i in range(len(axes[name]))]
                top = max(gains)
                row[name] = chooser.choice([i for i, gain in enumerate(gains) if gain == top])
                count += top
            if count > best_count:
                best, best_count = row, count
        missing -= {pair(a, b) for a, b in combinations(best.items(), 2)}
        rows.append({name: axes[name][best[name]] for name in names})
    return rows


def fields(row: Row) -> Row:
    """The parts of a row as the arguments of one case: values that are dicts bring several fields."""
    merged: Row = {}
    for name, value in row.items():
        merged |= value if isinstance(value, dict) else {name: value}
    return merged


# ---------------------------------------------------------------------------------------------------------------------
# attention

ATTENTION_AXES: dict[str, list[Any]] = {
    "layout": ["bhsd", "bshd", "3d", "loose"],
    "batch": [1, 5],
    "heads": [{"q_heads": q, "kv_heads": kv} for q, kv in ((1, 1), (3, 3), (6, 2), (5, 1))],
    "head_size": [1, 37, 64, 96, 128, 200, 300],
    "values": [{}, {"v_head_size": 1}, {"v_head_size": 72}, {"v_head_size": 260}],
    "v_dtype": [None, torch.float32, torch.bfloat16],
    "q_len": [0, 1, 2, 64, 127, 128, 129],
    "kv_len": [0, 1, 3, 63, 128, 129, 260],
    "mask": [
        {},
        {"mask": "bool", "mask_axes": "bhqk"},
        {"mask": "bool", "mask_axes": "k"},
        {"mask": "bool", "mask_axes": "b11k", "mask_columns": 1},
        {"mask": "same", "mask_axes": "bhqk"},
        {"mask": "same", "mask_axes": "hqk"},
        {"mask": "float32", "mask_axes": "b1qk"},
        {"mask": "float16", "mask_axes": "1h1k"},
        {"mask": "int64", "mask_axes": "qk"},
        {"mask": "same", "mask_axes": "bh1k", "mask_columns": 1},
    ],
    "is_causal": [False, True],
    "window": [
        {},
        {"left_window_size": 0},
        {"left_window_size": 3, "right_window_size": 0},
        {"right_window_size": 2},
        {"left_window_size": 130, "right_window_size": 64},
    ],
    "softcap": [0.0, 0.7, 30.0],
    "scale": [None, 0.0, 0.3],
    "softmax_precision": [None, 1, 10, 11],
    "cache": [{}, {"past": 0}, {"past": 3}, {"past": 130}, {"lengths": "ragged"}, {"lengths": "full"}],
    "outputs": [
        {},
        {"qk_matmul_output_mode": 0},
        {"qk_matmul_output_mode": 1},
        {"qk_matmul_output_mode": 2},
        {"qk_matmul_output_mode": 3},
        {"lse": True},
    ],
}


def attention_case(row: Row, dtype: torch.dtype) -> Case:
    case = Case(dtype=dtype, **fields(row))
    changes: Row = {}
    if case.lse and case.past is not None:  # lse does not come with presents: the pair is met without them
        changes["lse"] = False
    if case.mask_columns is not None and case.mask_columns > case.total:
        changes["mask_columns"] = None
    return Case(**vars(case) | changes)


ATTENTION_ROWS = covering_array(ATTENTION_AXES)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("row", ATTENTION_ROWS, ids=range(len(ATTENTION_ROWS)))
def test_attention(row: Row, dtype: torch.dtype, device: str) -> None:
    check_attention(attention_case(row, dtype), device)


# ---------------------------------------------------------------------------------------------------------------------
# mha

MHA_AXES: dict[str, list[Any]] = {
    "layout": ["bsnh", "bnsh", "packed_kv", "packed_qkv"],
    "batch": [2, 4],
    "num_heads": [1, 3],
    "head_size": [1, 37, 64, 96, 128, 200, 300],
    "values": [{}, {"v_head_size": 24}, {"v_head_size": 260}],
    "q_len": [0, 1, 2, 64, 129],
    "kv_len": [0, 1, 2, 64, 129],
    "bias": [False, True],
    "mask": [
        {},
        *({"mask": form, "mask_dtype": dtype} for form in ("lengths", "lengths_starts") for dtype in (torch.int32, torch.int64)),
        *({"mask": form, "mask_dtype": dtype} for form in ("keys", "rows") for dtype in (torch.int32, torch.bool)),
    ],
    "attention_bias": [None, "", "b", "h", "bh"],
    "unidirectional": [False, True],
    "scale": [0.0, 0.3, -0.2],
    "mask_filter_value": [-10000.0, -0.75, torch.finfo(torch.float32).min, -float("inf")],
    "cache": [{}, {"past": 0}, {"past": 70}, {"past": 3, "spare": 1}, {"past": 70, "spare": 60}, {"past": 3, "spare": 9, "beams": 2}],
    "qk": [False, True],
}


def mha_case(row: Row, dtype: torch.dtype) -> MhaCase:
    """What the operator does not allow together gives way: the packed layouts have no past, the past no v_head_size of its own."""
    row = fields(row)
    spare = row.pop("spare", None)
    packed = row["layout"].startswith("packed")
    if packed:
        for name in ("past", "beams"):
            row.pop(name, None)
    if packed or row["layout"] == "bnsh" or "past" in row:
        row.pop("v_head_size", None)
    if row["layout"] == "packed_kv":
        row["bias"] = False
    if row["layout"] == "packed_qkv":
        row["kv_len"] = row["q_len"]
    if "past" in row and spare is not None:
        row |= {"capacity": row["past"] + row["kv_len"] + spare, "qk": False}
        if "beams" in row and row["q_len"] == 1:
            row |= {"capacity": row["past"] + 1 + spare, "kv_len": 1}
    return MhaCase(dtype=dtype, **row)


MHA_ROWS = covering_array(MHA_AXES)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("row", MHA_ROWS, ids=range(len(MHA_ROWS)))
def test_mha(row: Row, dtype: torch.dtype, device: str) -> None:
    check_mha(mha_case(row, dtype), device)


# ---------------------------------------------------------------------------------------------------------------------
# attention_cached


CACHED_AXES: dict[str, list[Any]] = {
    "layout": ["bhsd", "bshd", "3d"],
    "heads": [{"q_heads": q, "kv_heads": kv} for q, kv in ((2, 2), (6, 2), (8, 1))],
    "sizes": [{"head_size": 64}, {"head_size": 128, "v_head_size": 64}, {"head_size": 37}, {"head_size": 300}],
    "rows": [{"q_len": 1, "kv_len": 1}, {"q_len": 4, "kv_len": 4}, {"q_len": 70, "kv_len": 70}, {"q_len": 5, "kv_len": 2}],
    "mask": [{}, {"mask": "bool", "mask_axes": "b11k"}, {"mask": "same", "mask_axes": "hqk"}],
    "is_causal": [False, True],
    "window": [{}, {"left_window_size": 60}],
    "softcap": [0.0, 5.0],
    "capacity": [100, 700],
}
CACHED_ROWS = covering_array(CACHED_AXES)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("row", CACHED_ROWS, ids=range(len(CACHED_ROWS)))
def test_cached(row: Row, dtype: torch.dtype, device: str) -> None:
    from test_cache import check_cached

    row = fields(row)
    capacity = row.pop("capacity")
    case = Case(dtype=dtype, batch=4, mask_columns=capacity, **row)
    check_cached(case, capacity, torch.tensor([0, 1, capacity // 2 - 30, capacity - case.kv_len]), device)


# ---------------------------------------------------------------------------------------------------------------------
# The array itself


@pytest.mark.parametrize(
    ("axes", "rows"),
    [(ATTENTION_AXES, ATTENTION_ROWS), (MHA_AXES, MHA_ROWS), (CACHED_AXES, CACHED_ROWS)],
    ids=["attention", "mha", "cached"],
)
def test_every_pair_is_met(axes: dict[str, list[Any]], rows: list[Row]) -> None:
    for a, b in combinations(axes, 2):
        met = {(repr(row[a]), repr(row[b])) for row in rows}
        assert len(met) == len(axes[a]) * len(axes[b]), (a, b)
    assert rows == covering_array(axes), "the array depends on more than its axes"
    assert len(rows) < 110
