"""Tiny random models of transformers: 18 families that `enable` takes, five that it refuses. Their weights make attention matter."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5", reason="needs the package transformers, 5 or newer")
logging.getLogger("transformers").setLevel(logging.ERROR)

# Before, fewer families had an attention interface, and transformers asked for dense masks with any static cache.
IS_CURRENT = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 17)

VOCABULARY, BATCH, LENGTH = 64, 2, 9
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SIZES, **TOKENS, "num_key_value_heads": 2, "max_position_embeddings": 128}
WINDOW = {"sliding_window": 4, "head_dim": 8}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of model: its class, its configuration, and what the tests need to know of it.

    `kind` is "decoder" (generates), "encoder", "encoder-decoder" or "vision". `calls` counts attention calls of a forward pass.
    """

    model: str
    config: str
    options: dict[str, Any]
    kind: str
    calls: int = 2
    extra: Callable[[], dict[str, Tensor]] = dict

    def build(self, implementation: str = "eager") -> Any:
        config = getattr(transformers, self.config)(**self.options)
        config._attn_implementation = implementation
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(config).eval()
        generator = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                parameter.data.normal_(std=1.0 if "sinks" in name else 0.15, generator=generator)
        return model

    def inputs(self, padding: str = "none") -> dict[str, Tensor]:
        """For "left" and "right", three tokens of the first sequence are padding."""
        generator = torch.Generator().manual_seed(1)
        given = self.extra()
        if self.kind == "vision":
            return given
        ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
        if "input_features" in given:
            return {**given, "decoder_input_ids": ids}
        given |= {"input_ids": ids, "attention_mask": attention_mask(padding)}
        if self.kind == "encoder-decoder":
            given["decoder_input_ids"] = torch.randint(3, VOCABULARY, (BATCH, 6), generator=generator)
        return given

    def shallow(self) -> Family:
        """With one layer instead of two."""
        depths = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
        parts = {name: one_layer(part, depths) for name, part in self.options.items() if isinstance(part, dict)}
        return dataclasses.replace(self, options={**one_layer(self.options, depths), **parts}, calls=self.calls // 2)

    @property
    def generates(self) -> bool:
        return self.kind in ("decoder", "encoder-decoder")

    @property
    def is_padded(self) -> bool:
        return self.kind != "vision" and "input_features" not in self.extra()


def one_layer(options: dict[str, Any], depths: tuple[str, ...]) -> dict[str, Any]:
    return {**options, **{name: 1 for name in depths if name in options}}


def attention_mask(padding: str) -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    if padding == "left":
        mask[0, :3] = 0
    if padding == "right":
        mask[0, -3:] = 0
    return mask


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(2))}


def audio() -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, 8, 20, generator=torch.Generator().manual_seed(2))}


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
CLIP_TEXT = {**SIZES, "max_position_embeddings": 32, "eos_token_id": 2}
MODERN_BERT = {**SIZES, **TOKENS, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4, "global_attn_every_n_layers": 2}
GEMMA2 = {**DECODER, **WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
GEMMA3 = {**DECODER, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GPT_OSS = {**DECODER, **WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
OPT = {**SIZES, "ffn_dim": 48, "max_position_embeddings": 128, "word_embed_proj_dim": 32}
DISTILBERT = {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {"vocab_size": VOCABULARY, **SEQ2SEQ, "max_position_embeddings": 128}
WHISPER = {
    "vocab_size": VOCABULARY,
    **SEQ2SEQ,
    **TOKENS,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", DECODER, "decoder"),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**DECODER, **WINDOW}, "decoder"),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", DECODER, "decoder"),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", GEMMA2, "decoder"),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA3, "decoder"),
    "gpt_oss": Family("GptOssForCausalLM", "GptOssConfig", GPT_OSS, "decoder"),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", GPT2, "decoder"),
    "opt": Family("OPTForCausalLM", "OPTConfig", OPT, "decoder"),
    "bert": Family("BertModel", "BertConfig", SIZES, "encoder"),
    "bert_decoder": Family("BertLMHeadModel", "BertConfig", {**SIZES, "is_decoder": True}, "decoder"),
    "roberta": Family("RobertaModel", "RobertaConfig", {**SIZES, "pad_token_id": 0}, "encoder"),
    "modernbert": Family("ModernBertModel", "ModernBertConfig", MODERN_BERT, "encoder"),
    "distilbert": Family("DistilBertModel", "DistilBertConfig", DISTILBERT, "encoder"),
    "t5": Family("T5ForConditionalGeneration", "T5Config", T5, "encoder-decoder", calls=6),
    "bart": Family("BartForConditionalGeneration", "BartConfig", BART, "encoder-decoder", calls=6),
    "whisper": Family("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, "encoder-decoder", calls=6, extra=audio),
    "clip": Family(
        "CLIPModel", "CLIPConfig", {"text_config": CLIP_TEXT, "vision_config": VISION, "projection_dim": 16}, "encoder", 4, pixels
    ),
    "vit": Family("ViTModel", "ViTConfig", VISION, "vision", extra=pixels),
}

GPT_NEO = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
REFUSED = {
    "deberta_v2": Family("DebertaV2Model", "DebertaV2Config", SIZES, "encoder"),
    "falcon": Family("FalconForCausalLM", "FalconConfig", SIZES, "decoder"),
    "gpt_neo": Family("GPTNeoForCausalLM", "GPTNeoConfig", {**GPT_NEO, "window_size": 4, "max_position_embeddings": 128}, "decoder"),
    "bloom": Family("BloomForCausalLM", "BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "decoder"),
    "mpt": Family("MptForCausalLM", "MptConfig", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4}, "decoder"),
}


def result(outputs: Any) -> Tensor:
    """What a model is compared by."""
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if getattr(outputs, name, None) is not None:
            return getattr(outputs, name)
    raise AssertionError(f"no known output in {type(outputs).__name__}")


def run(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    with torch.no_grad():
        return result(model(**inputs, **options))


def given_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The cache under the argument name that this version of transformers has for it."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def kept_rows(values: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Without the rows of padding, where implementations differ and nobody looks."""
    mask = inputs.get("attention_mask")
    return values if mask is None or values.shape[:2] != mask.shape else values[mask.bool()]


class Calls(TorchDispatchMode):
    """Collects the calls of the ops: (overload, arguments by name) each."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "onnx_attn::attention":
            names = [argument.name for argument in func._schema.arguments]
            self.made.append((func._overloadname, dict(zip(names, args, strict=False)) | (kwargs or {})))
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    with Calls() as calls:
        yield calls.made
