"""Ways to make a call other than plainly."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Through(TorchDispatchMode):
    """Passes every op on: the call is dispatched from Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def trace(op: Any, arguments: dict[str, Any]) -> Any:
    """With fake tensors in place of the given ones."""
    mode = FakeTensorMode()
    with mode:
        return op(**{name: mode.from_tensor(value) if isinstance(value, Tensor) else value for name, value in arguments.items()})
