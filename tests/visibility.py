"""Which keys does a query see? Read off the result, without the reference.

With Q = 0 all visible keys weigh the same, and with V the identity a row of Y *is* the row of weights: nonzero where the
query sees the key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def probe(
    q_len: int, new_len: int, past: int = 0, batch: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Inputs of one head whose Y shows the weights of past + new keys."""
    total = past + new_len
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    values = torch.eye(total, **options).expand(batch, 1, total, total)
    inputs = {
        "Q": torch.zeros(batch, 1, q_len, 8, **options),
        "K": torch.randn(batch, 1, new_len, 8).to(**options),
        "V": values[:, :, past:],
    }
    if past:
        inputs |= {"past_key": torch.randn(batch, 1, past, 8).to(**options), "past_value": values[:, :, :past]}
    return inputs


def seen(Y: Tensor) -> list[list[str]]:
    """For each batch entry, one line a query: '#' for a key it sees, '.' for one it does not. Weights must be equal and sum to 1 or 0."""
    for row in Y[:, 0].flatten(0, 1):
        visible = row != 0
        count = int(visible.sum())
        if count:
            torch.testing.assert_close(row[visible], torch.full_like(row[visible], 1 / count), atol=1e-2, rtol=1e-2)
    return [["".join("#" if weight else "." for weight in row) for row in entry.tolist()] for entry in (Y[:, 0] != 0)]
