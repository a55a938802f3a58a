"""attn_implementation="onnx_attn" against "eager": logits, generation, caches, masks of one's own, on 18 families of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import (
    BATCH,
    FAMILIES,
    IS_CURRENT,
    LENGTH,
    VOCABULARY,
    attention_mask,
    given_cache,
    kept_rows,
    run,
    transformers,
    watched,
)

from torch_onnx_attn.integrations.transformers import UnsupportedError, enable, register

TOLERANCE = 2e-5
NEW_TOKENS = 8


def on(device: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in inputs.items()}


def assert_close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}")


def enabled(name: str, device: str = "cpu") -> Any:
    """The model, switched; skipped only where this version of transformers has no interface in that family yet."""
    try:
        return enable(FAMILIES[name].build().to(device))
    except UnsupportedError as reason:
        if IS_CURRENT:
            raise
        pytest.skip(f"transformers {transformers.__version__}: {reason}")


def no_wide_masks(calls: list[tuple[str, dict[str, Any]]]) -> bool:
    return not IS_CURRENT or all(call.get("attn_mask") is None or call["attn_mask"].shape[-2] == 1 for _, call in calls)


# ---------------------------------------------------------------------------------------------------------------------
# Logits and generation
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str, padding: str, device: str) -> None:
    family = FAMILIES[name]
    if padding != "none" and not family.is_padded:
        pytest.skip("takes no attention mask")
    inputs = on(device, family.inputs(padding))
    # CLIP pools a row without any visible key when padded on the left. Eager averages V there; sdpa and ONNX give 0.
    reference = "sdpa" if (name, padding) == ("clip", "left") else "eager"
    expected = run(family.build(reference).to(device), inputs)
    model = enabled(name, device)
    with watched() as calls:
        actual = run(model, inputs)
    assert len(calls) == family.calls
    if name != "t5":  # a position bias
        assert no_wide_masks(calls)
    assert_close(kept_rows(actual, inputs), kept_rows(expected, inputs))


def test_what_the_comparisons_hang_on() -> None:
    """Without padding, window, softcap, sinks or position bias the logits are others by far, so that a lost one is noticed."""
    llama = FAMILIES["llama"]
    padded = llama.inputs("left")
    ignoring = {**padded, "attention_mask": attention_mask("none")}
    assert (run(llama.build(), padded) - run(llama.build(), ignoring)).abs()[0, 3:].max() > 0.1
    for name, change in (
        ("mistral", {"sliding_window": 5}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("modernbert", {"local_attention": 6}),
    ):
        family = FAMILIES[name]
        other = type(family)(family.model, family.config, {**family.options, **change}, family.kind)
        assert (run(family.build(), family.inputs()) - run(other.build(), family.inputs())).abs().max() > 0.01, name
    for name, part in (("gpt_oss", "sinks"), ("t5", "relative_attention_bias")):
        model = FAMILIES[name].build()
        before = run(model, FAMILIES[name].inputs())
        for parameter_name, parameter in model.named_parameters():
            if part in parameter_name:
                parameter.data.fill_(-30.0 if part == "sinks" else 0.0)
        assert (run(model, FAMILIES[name].inputs()) - before).abs().max() > 0.01, name


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.generates])
def test_greedy_generation(name: str, cache: str, device: str) -> None:
    family = FAMILIES[name]
    inputs = {key: x for key, x in on(device, family.inputs("left")).items() if not key.startswith("decoder_")}
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    expected = family.build().to(device).generate(**inputs, **options)
    model = enabled(name, device)
    with watched() as calls:
        actual = model.generate(**inputs, **options)
    assert len(calls) >= 2 * NEW_TOKENS
    assert torch.equal(actual.sequences, expected.sequences)
    assert_close(torch.stack(actual.scores), torch.stack(expected.scores))
    if cache == "static" and family.kind == "decoder":  # windowed layers keep no more than their window: nothing to skip there
        window = family.options.get("sliding_window", 0)
        whole = [call for _, call in calls if call["Q"].shape[2] == 1 and call["K"].shape[2] > window]
        lengths = [call.get("nonpad_kv_seqlen") for call in whole]  # on the device
        assert not IS_CURRENT or all(length is not None for length in lengths)
        assert whole or name == "mistral"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "clip" and (IS_CURRENT or name not in ("gpt2", "opt"))])
def test_attention_weights_at_the_call(name: str) -> None:
    family = FAMILIES[name]
    inputs = family.inputs("right")
    with torch.no_grad():
        expected = family.build()(**inputs, output_attentions=True)
        actual = enabled(name)(**inputs, output_attentions=True)
    found = [key for key in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions") if expected.get(key)]
    assert found
    for key in found:
        for mine, theirs in zip(actual[key], expected[key], strict=True):
            if mine.shape[2:] == (LENGTH, LENGTH):
                mine, theirs = mine[0, :, : LENGTH - 3], theirs[0, :, : LENGTH - 3]
            assert_close(mine, theirs, key)


# ---------------------------------------------------------------------------------------------------------------------
# Caches in several steps
# ---------------------------------------------------------------------------------------------------------------------

Cached = ["llama", "mistral", "gemma3", "gpt_oss"]


def make_cache(kind: str, config: Any) -> Any:
    return transformers.DynamicCache(config=config) if kind == "dynamic" else transformers.StaticCache(config=config, max_cache_len=16)


def in_chunks(model: Any, cache: Any, padding: str, chunks: tuple[int, ...], device: str, with_mask: bool = True) -> Tensor:
    inputs = on(device, FAMILIES["llama"].inputs(padding))
    logits, start = [], 0
    for length in chunks:
        end = start + length
        mask = {"attention_mask": inputs["attention_mask"][:, :end]} if with_mask else {}
        with torch.no_grad():
            logits.append(model(input_ids=inputs["input_ids"][:, start:end], **given_cache(model, cache), **mask).logits)
        start = end
    return torch.cat(logits, 1)


@pytest.mark.parametrize("padding", ["none", "left", "right", "no mask"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", Cached)
def test_prefill_in_chunks(name: str, kind: str, padding: str, device: str) -> None:
    """The rows of a later chunk sit at the end of what the cache holds, also where a shorter window has dropped the first keys."""
    chunks = (3, 3, 1, 2)
    with_mask = padding != "no mask"
    padding = padding if with_mask else "none"
    eager, model = FAMILIES[name].build().to(device), enabled(name, device)
    expected = in_chunks(eager, make_cache(kind, eager.config), padding, chunks, device, with_mask)
    with watched() as calls:
        actual = in_chunks(model, make_cache(kind, model.config), padding, chunks, device, with_mask)
    assert no_wide_masks(calls)
    keep = attention_mask(padding).bool()
    assert_close(actual[keep], expected[keep])


@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_static_cache_used_again(name: str, with_mask: bool, device: str) -> None:
    """After reset() the length 0 is on the device, where nobody reads it. The cache still holds the numbers of before."""
    eager, model = FAMILIES[name].build().to(device), enabled(name, device)
    expected = in_chunks(eager, make_cache("static", eager.config), "none", (5,), device)
    cache = make_cache("static", model.config)
    in_chunks(model, cache, "none", (9,), device)
    cache.reset()
    with watched() as calls:
        actual = in_chunks(model, cache, "none", (5,), device, with_mask)
    assert no_wide_masks(calls)
    assert_close(actual, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Masks that are not plain
# ---------------------------------------------------------------------------------------------------------------------


def test_packed_sequences() -> None:
    """Positions that restart, and no mask: two sequences in one row, which must not see each other."""
    ids = FAMILIES["mistral"].inputs()["input_ids"]
    inputs = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(BATCH, -1)}
    expected = run(FAMILIES["mistral"].build(), inputs, use_cache=False)
    alone = run(FAMILIES["mistral"].build(), {"input_ids": ids[:, 4:]}, use_cache=False)
    actual = run(enabled("mistral"), inputs, use_cache=False)
    assert_close(actual, expected)
    assert_close(actual[:, 4:], alone)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_ones_own_is_complete(kind: str) -> None:
    """4 axes: neither causality nor a window is added."""
    keep = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    keep[:, :, :, 5] = False
    floats = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    ids = FAMILIES["mistral"].inputs()["input_ids"]
    expected = run(FAMILIES["mistral"].build(), {"input_ids": ids, "attention_mask": floats})
    actual = run(enabled("mistral"), {"input_ids": ids, "attention_mask": keep if kind == "bool" else floats})
    assert_close(actual, expected)
    causal = run(FAMILIES["mistral"].build(), {"input_ids": ids})
    assert (causal - expected).abs().max() > 0.1


def test_chunked_attention_is_not_a_window() -> None:
    """Llama 4 gives the size of its chunks where others give a window."""
    options = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "num_hidden_layers": 4}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 4}
    options |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
    family = type(FAMILIES["llama"])("Llama4ForCausalLM", "Llama4TextConfig", options, "decoder", calls=4)
    for padding in ("none", "left"):
        inputs = family.inputs(padding)
        expected = kept_rows(run(family.build(), inputs), inputs)
        assert_close(kept_rows(run(enable(family.build()), inputs), inputs), expected, padding)


def test_a_window_that_only_the_module_knows() -> None:
    """Qwen2-MoE makes masks with a window and does not pass it to the attention function."""
    options = {**FAMILIES["llama"].options, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    options |= {"shared_expert_intermediate_size": 16, "sliding_window": 4, "use_sliding_window": True}
    options |= {"layer_types": ["sliding_attention", "full_attention"], "max_window_layers": 0}
    family = type(FAMILIES["llama"])("Qwen2MoeForCausalLM", "Qwen2MoeConfig", options, "decoder")
    for padding in ("none", "left"):
        inputs = family.inputs(padding)
        expected = run(family.build(), inputs)
        model = enable(family.build())
        with watched() as calls:
            actual = run(model, inputs)
        assert [call.get("left_window_size", -1) for _, call in calls] == [3, -1]
        assert_close(kept_rows(actual, inputs), kept_rows(expected, inputs), padding)


# ---------------------------------------------------------------------------------------------------------------------
# Ways to switch
# ---------------------------------------------------------------------------------------------------------------------


def test_the_plain_string() -> None:
    register()
    config = transformers.LlamaConfig(**FAMILIES["llama"].options)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="onnx_attn").eval()
    with watched() as calls:
        actual = run(model, FAMILIES["llama"].inputs("left"))
    assert len(calls) == 2
    model.set_attn_implementation("eager")
    inputs = FAMILIES["llama"].inputs("left")
    assert_close(kept_rows(actual, inputs), kept_rows(run(model, inputs), inputs))


def test_one_part_of_a_model() -> None:
    register()
    model = FAMILIES["clip"].build()
    model.set_attn_implementation({"vision_config": "onnx_attn", "text_config": "sdpa"})
    with watched() as calls:
        run(model, FAMILIES["clip"].inputs())
    assert len(calls) == 2


def test_the_name_is_not_saved(tmp_path: Any) -> None:
    enabled("llama").save_pretrained(tmp_path)
    assert "onnx_attn" not in (tmp_path / "config.json").read_text()


def test_half_precision_stays_in_its_type() -> None:
    inputs = FAMILIES["gpt_oss"].inputs("left")
    model = enabled("gpt_oss").to(torch.bfloat16)
    actual = run(model, inputs)
    assert actual.dtype == torch.bfloat16
    expected = run(FAMILIES["gpt_oss"].build(), inputs)
    assert (kept_rows(actual, inputs).float() - kept_rows(expected, inputs)).abs().mean() < 0.05 * expected.abs().mean()


def test_heads_are_not_repeated_and_nothing_is_copied() -> None:
    """Two key/value heads reach the op as two, and its result, in the order of Q, needs no copy."""
    model = enabled("llama")
    with watched() as calls:
        run(model, FAMILIES["llama"].inputs())
    for _, call in calls:
        assert call["Q"].shape[1] == 4 and call["K"].shape[1] == 2
        assert torch.ops.onnx_attn.attention(**call).transpose(1, 2).is_contiguous()
