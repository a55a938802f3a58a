"""The name under which transformers finds the ops, and the switch for one model."""

from __future__ import annotations

from typing import TypeVar

from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from .attention import attention
from .errors import UnsupportedError
from .masks import make_mask
from .models import parts, refusals

NAME = "onnx_attn"

Model = TypeVar("Model", bound=PreTrainedModel)


def register() -> None:
    """Makes ``attn_implementation="onnx_attn"`` known to transformers, for this process: the attention and the masks that go with it.

    transformers takes the name for any model from then on, also for those that ignore it: `enable` tells them apart.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)  # without one, transformers would silently hand over no mask at all


def enable(model: Model) -> Model:
    """Switches a model, with everything in it, to the ops of this package. Nothing is changed when it is refused.

    Args:
        model: a transformers model, in evaluation mode when it runs.

    Returns:
        The same model.

    Raises:
        TypeError: it is no transformers model.
        UnsupportedError: the model, or a part of it, would ignore the name or misread the masks. The message says which, and why.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: is a {type(model).__name__}; a transformers.PreTrainedModel is expected")
    found = refusals(model)
    if found:
        raise UnsupportedError(f"model: {_sentence(found)}. Keep 'eager' or 'sdpa' for it")
    register()
    model.set_attn_implementation(NAME)
    for part in parts(model):
        if part.config._attn_implementation != NAME:  # transformers 5.17 leaves out parts whose configuration is a copy (T5)
            part.set_attn_implementation(NAME)
    kept = sorted({type(part).__name__ for part in parts(model) if part.config._attn_implementation != NAME})
    if kept:
        raise UnsupportedError(f"model: transformers did not switch {', '.join(kept)}, which runs on its old attention still")
    return model


def _sentence(found: dict[str, str]) -> str:
    """Each reason once, with the classes it holds for."""
    classes: dict[str, list[str]] = {}
    for name, reason in found.items():
        classes.setdefault(reason, []).append(name)
    return "; ".join(" and ".join(names) + f": {reason}" for reason, names in classes.items())
