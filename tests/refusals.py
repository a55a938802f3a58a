"""How an illegal call is described, and refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What is changed in a legal call (to a value, or by a function; None leaves the argument out), and what the message then says."""

    name: str
    change: dict[str, Any]
    argument: str  # the message begins with it
    says: tuple[str, ...]  # and contains these, in this order
    call: Callable[..., Any] | None = None  # None: the default overload of the operator

    def __str__(self) -> str:
        return self.name


def check(refusal: Refusal, call: Callable[..., Any], legal: dict[str, Any]) -> None:
    call(**legal)  # so that what is refused is the change
    arguments = dict(legal)
    for name, value in refusal.change.items():
        changed = value(legal[name]) if callable(value) and not isinstance(value, Tensor) else value
        if changed is None:
            arguments.pop(name, None)
        else:
            arguments[name] = changed
    pattern = rf"^{re.escape(refusal.argument)}: " + "".join(rf".*{re.escape(text)}" for text in refusal.says)
    with pytest.raises(RuntimeError, match=pattern):
        call(**arguments)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def reshaped(*shape: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.zeros(shape, dtype=x.dtype)


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)
