"""Which models take another attention at all. transformers accepts the name for every model, and says nothing where it has no effect."""

from __future__ import annotations

from transformers import PreTrainedModel

_OWN_TABLE = "attention is looked up in a table of the model file, where no other name is known"
_UNKNOWN = "attention is the model's own, not called through AttentionInterface, and the name would have no effect"
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


def _uses_interface(model: type[PreTrainedModel]) -> bool:
    """transformers' own answer, read off the model's source. It is private there, hence the guard."""
    ask = getattr(model, "_can_set_attn_implementation", None)
    if ask is None:
        raise RuntimeError("this version of transformers no longer says which models use its AttentionInterface; use register() instead")
    return bool(ask())
