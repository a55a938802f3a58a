"""What is being traced, and what transformers is collecting."""

from __future__ import annotations

import importlib
from typing import Any

import torch

try:
    _collector: Any = importlib.import_module("transformers.utils.output_capturing")._active_collector
except (ImportError, AttributeError):  # transformers before 5.17 or so
    _collector = None


def is_exporting() -> bool:
    """Whether torch.export traces the model. Inside torch.compile, dynamo of torch before 2.14 takes torch's own answer for True."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def is_collecting_weights() -> bool:
    """Whether the caller asked for attention weights, of models that do not pass output_attentions on (GPT-2, OPT).

    transformers then only has hooks on the layers. What they fill is private there, hence the guard above.
    """
    if _collector is None:
        return False
    # Dynamo cannot trace the context variable; transformers keeps a global one for it.
    collected = _collector.global_var if torch.compiler.is_dynamo_compiling() else _collector.get()
    return collected is not None and any("attentions" in key for key in collected)
