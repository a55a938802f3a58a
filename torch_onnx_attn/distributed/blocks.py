"""Which calls of the op a piece of a split attention needs: plain arithmetic, no tensors, no communication.

A query row at position p of the whole sequence sees the keys at p + offset - left ... p + offset + right, where a bound of -1 is
open, causality makes right 0, and the offset is 0 or, with lengths, ``nonpad_kv_seqlen[b] - q_len`` (known to the device alone).
A call of the op sees local rows and local keys only, so positions are turned into other window sizes, or into other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .sequence import Segment, segments


@dataclass(frozen=True)
class Sight:
    """What position and length leave visible, the same for every head."""

    q_len: int  # of the whole sequence
    kv_len: int
    left: int  # -1 is open
    right: int  # -1 is open; 0 with causality
    has_lengths: bool

    @property
    def is_positional(self) -> bool:
        return self.left >= 0 or self.right >= 0


@dataclass(frozen=True)
class Call:
    """One call of the op on slices of local tensors."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    left: int = -1
    right: int = -1
    length_shift: int | None = None  # with lengths, the call's are those of the whole less this; None: no lengths
    needs_mask: bool = False  # positions that depend on lengths, on keys that are cut: only a mask can say which are seen


def right_bound(is_causal: bool, right_window_size: int) -> int:
    """Causality and the right window as one bound."""
    return 0 if is_causal else right_window_size


def against_all_keys(queries: Sequence[Segment], sight: Sight) -> list[Call]:
    """The calls for local query rows against the keys of the whole sequence; at most one for each segment."""
    if not sight.is_positional:
        rows = sum(segment.rows for segment in queries)
        return [Call(0, rows, 0, sight.kv_len, length_shift=0 if sight.has_lengths else None)]
    if not sight.has_lengths:
        return [call for segment in queries for call in _window(segment, Segment(0, 0, sight.kv_len), sight)]
    return [_with_lengths(segment, sight) for segment in queries]


def against_some_keys(queries: Sequence[Segment], keys: Sequence[Segment], sight: Sight) -> list[Call]:
    """The calls for local query rows against the local keys of some rank, as few as possible; none if nothing is visible."""
    if not sight.is_positional and not sight.has_lengths:
        return [Call(0, _rows(queries), 0, _rows(keys))]
    if queries == keys and (sight.left, sight.right) == (-1, 0) and not sight.has_lengths:
        return [Call(0, _rows(queries), 0, _rows(keys), right=0)]  # segments lie in order, so what is earlier here is earlier there
    if sight.has_lengths:
        rows = queries if sight.is_positional else (Segment(0, 0, _rows(queries)),)
        return [
            Call(row.local, row.local + row.rows, key.local, key.local + key.rows, length_shift=key.start, needs_mask=sight.is_positional)
            for row in rows
            for key in keys
        ]
    return _joined([call for query in queries for key in keys for call in _window(query, key, sight)])


@lru_cache(maxsize=256)
def ring_calls(q_rows: int, k_rows: int, rank: int, ranks: int, order: str, sight: Sight) -> tuple[tuple[Call, ...], ...]:
    """For each step of a ring, the calls of `rank` while it holds the keys of the rank that is `step` places before it.

    There are as many steps on every rank: until none has anything left to see, which is soon with a short window.
    """
    held = [(segments(q_rows, place, ranks, order), segments(k_rows, place, ranks, order)) for place in range(ranks)]
    own, needed = [], 0
    for step in range(ranks):
        calls = [against_some_keys(queries, held[(place - step) % ranks][1], sight) for place, (queries, _) in enumerate(held)]
        own.append(tuple(calls[rank]))
        needed = step + 1 if any(calls) else needed
    return tuple(own[:needed])


def _rows(held: Sequence[Segment]) -> int:
    return sum(segment.rows for segment in held)


def _window(query: Segment, key: Segment, sight: Sight) -> list[Call]:
    """A call without lengths: row i sees key j when low <= j - i <= high, and rows and keys that can see nothing are cut away."""
    rows, keys, first_row, first_key = query.rows, key.rows, 0, 0
    distance = query.start - key.start
    low = distance - sight.left if sight.left >= 0 else -rows
    high = distance + sight.right if sight.right >= 0 else keys
    if high < 0:  # the first rows are before every key
        first_row = -high
        low, high = low - high, 0
    if low > 0:  # the first keys are behind every row's window
        first_key = low
        low, high = 0, high - low
    rows, keys = rows - first_row, keys - first_key
    rows, keys = min(rows, keys - low), min(keys, rows + high)
    if rows <= 0 or keys <= 0:
        return []
    q_begin, k_begin = query.local + first_row, key.local + first_key
    left = -low if low > 1 - rows else -1
    right = high if high < keys - 1 else -1
    return [Call(q_begin, q_begin + rows, k_begin, k_begin + keys, left, right)]


def _with_lengths(query: Segment, sight: Sight) -> Call:
    """A call whose lengths make its offset: the op's is ``length - rows``, which is wrong by the rows that follow this segment."""
    following = sight.q_len - query.start - query.rows
    left, right, shift = sight.left, sight.right, 0
    if right < 0 or right >= following:
        right = right - following if right >= 0 else -1
        left = left + following if left >= 0 else -1
    else:  # no row of this segment sees the last keys: a shorter length leaves them out and moves the offset
        shift = following - right
        left = left + right if left >= 0 else -1
        right = 0
    return Call(query.local, query.local + query.rows, 0, sight.kv_len, left, right, length_shift=shift)


def _joined(calls: list[Call]) -> list[Call]:
    """Unmasked calls that touch along the keys, or else along the queries, as one."""
    joined: list[Call] = []
    for call in calls:
        for index, other in enumerate(joined):
            if (other.left, other.right, call.left, call.right) != (-1, -1, -1, -1):
                continue
            same_rows = (other.q_begin, other.q_end) == (call.q_begin, call.q_end)
            same_keys = (other.k_begin, other.k_end) == (call.k_begin, call.k_end)
            if same_rows and other.k_end == call.k_begin:
                joined[index] = Call(call.q_begin, call.q_end, other.k_begin, call.k_end)
                break
            if same_keys and other.q_end == call.q_begin:
                joined[index] = Call(other.q_begin, call.q_end, call.k_begin, call.k_end)
                break
        else:
            joined.append(call)
    return joined
