"""What is being traced."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Whether torch.export traces the model. Inside torch.compile, dynamo of torch before 2.14 takes torch's own answer for True."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
