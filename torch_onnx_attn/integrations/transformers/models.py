"""Which models take another attention at all. transformers accepts the name for every model, and says nothing where it has no effect."""

from __future__ import annotations

import inspect
import sys

from transformers import PreTrainedModel

_OWN_TABLE = "attention is looked up in a table of the model file, where no other name is known"
_UNKNOWN = "attention is the model's own, not called through AttentionInterface, and the name would have no effect"
_NO_ATTENTION = "no part of it has attention that is called through AttentionInterface, and the name would have no effect"
_ADDS_MASK = "attention is the model's own and adds the mask to the scores, while ours says which keys to keep"

# What becomes of the bare name there; other models that `_can_set_attn_implementation` denies get a general sentence.
_KNOWN = {
    "Bloom": _ADDS_MASK,
    "Deberta": "attention is the model's own (disentangled), and the name is ignored",
    "Falcon": _OWN_TABLE,
    "GPTNeo": _OWN_TABLE,
    "Mpt": _ADDS_MASK,
}


def refusals(model: PreTrainedModel) -> dict[str, str]:
    """Why `enable` refuses a model: the class names of it or its parts, each with a reason. Empty if it does not."""
    found: dict[str, str] = {}
    if not any(_names_interface(type(part)) for part in parts(model)):
        found[type(model).__name__] = _NO_ATTENTION
    for part in parts(model):
        name = type(part).__name__
        if not _uses_interface(type(part)):
            known = (reason for prefix, reason in _KNOWN.items() if name.startswith(prefix))
            found[name] = next(known, _UNKNOWN)
        elif getattr(part.config, "output_attentions", False):
            found[name] = "config.output_attentions is True, which transformers allows for 'eager' only; give it to the call instead"
    return found


def parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model and the models inside it."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _names_interface(model: type[PreTrainedModel]) -> bool:
    """Whether the file of the class, or of one that it was derived from, looks attention up. Files of mere wrappers need not."""
    for ancestor in model.__mro__:
        module = sys.modules.get(ancestor.__module__)
        if ancestor is PreTrainedModel:
            return False
        try:
            if module is not None and "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(module):
                return True
        except (OSError, TypeError):  # no source, as in a notebook
            continue
    return False


def _uses_interface(model: type[PreTrainedModel]) -> bool:
    """transformers' own answer, read off the model's source. It is private there, hence the guard."""
    ask = getattr(model, "_can_set_attn_implementation", None)
    if ask is None:
        raise RuntimeError("this version of transformers no longer says which models use its AttentionInterface; use register() instead")
    return bool(ask())
