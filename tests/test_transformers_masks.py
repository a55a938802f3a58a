"""The masks for transformers: compact, and the same as transformers' own dense ones; and what the bridge refuses."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import FAMILIES, REFUSED, run, transformers

from torch_onnx_attn.integrations.transformers import UnsupportedError, attention, enable, make_mask, refusals, register
from torch_onnx_attn.integrations.transformers.masks import read_mask

masking = pytest.importorskip("transformers.masking_utils")
if "q_length" not in inspect.signature(masking.sdpa_mask).parameters:
    pytest.skip("transformers 5.0 calls its mask functions with other arguments", allow_module_level=True)

BATCH = 2
LAYER = torch.nn.Module()  # says nothing about causality or windows: transformers' defaults hold


def config(window: int | None) -> Any:
    return SimpleNamespace(sliding_window=window)


def visible(mask: Tensor | None, q_len: int, kv_len: int, *, is_causal: bool, window: int | None) -> Tensor:
    """Which keys each row sees, [B, L, S], asked of the attention function itself: equal scores, and values that name their key."""
    query = torch.zeros(BATCH, 1, q_len, 8)
    key = torch.zeros(BATCH, 1, kv_len, 8)
    value = torch.eye(kv_len).expand(BATCH, 1, kv_len, kv_len)
    output, _ = attention(LAYER, query, key, value, mask, is_causal=is_causal, sliding_window=window)
    return output[:, :, 0] > 0


def paddings(columns: int) -> list[Tensor | None]:
    left, right, full = (torch.ones(BATCH, columns, dtype=torch.bool) for _ in range(3))
    left[0, : columns // 3] = False
    right[1, columns - columns // 3 :] = False
    return [None, full, left, right]


def cases() -> list[tuple[int, int, int, int, int | None]]:
    """(rows, keys, position of the first row, of the first key, window), with and without room for more keys than there are."""
    plain = [(6, 6, 0, 0), (6, 9, 0, 0), (3, 8, 5, 0), (1, 6, 5, 0), (1, 9, 5, 0), (2, 9, 5, 0)]
    found = [(*sizes, window) for sizes in plain for window in (None, 3, 5)]
    return [*found, (1, 3, 7, 5, 3), (4, 6, 7, 5, 3)]  # a cache that has dropped the keys outside the window


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_same_keys_as_transformers_own_mask(case: tuple[int, int, int, int, int | None], on_device: bool) -> None:
    q_len, kv_len, q_offset, kv_offset, window = case
    function = masking.causal_mask_function if window is None else masking.sliding_window_causal_mask_function(window)
    for padding in paddings(q_offset + q_len):
        arguments = {"batch_size": BATCH, "q_length": q_len, "kv_length": kv_len, "kv_offset": kv_offset, "mask_function": function}
        arguments |= {"attention_mask": padding, "local_size": window}
        dense = masking.sdpa_mask(**arguments, q_offset=q_offset, allow_is_causal_skip=False)[:, 0]
        for allowed in (True, False) if q_len == 1 else (True,):
            position = torch.tensor(q_offset) if on_device else q_offset
            mask = make_mask(**arguments, q_offset=position, allow_is_causal_skip=allowed, config=config(window))
            assert mask is None or mask.dim() != 4 or mask.shape[-2] == 1, "dense"
            assert torch.equal(visible(mask, q_len, kv_len, is_causal=True, window=window), dense), (padding, allowed)


@pytest.mark.parametrize("model_type", ["modernbert", "t5gemma"])
@pytest.mark.parametrize("window", [None, 3, 20])
def test_bidirectional(window: int | None, model_type: str) -> None:
    function = masking.bidirectional_mask_function if window is None else masking.sliding_window_bidirectional_mask_function(window)
    for padding, (q_len, kv_len) in itertools.product(paddings(7), [(7, 7), (3, 7)]):
        arguments = {"batch_size": BATCH, "q_length": q_len, "kv_length": kv_len, "mask_function": function}
        arguments |= {"attention_mask": padding, "local_size": window}
        dense = masking.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
        flags = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
        mask = make_mask(**arguments, **flags, config=SimpleNamespace(sliding_window=window, model_type=model_type))
        if window == 3 and model_type == "modernbert":
            assert mask is None or mask.shape == (BATCH, kv_len)
        elif window != 3:
            assert mask is None or mask.shape == (BATCH, 1, 1, kv_len)
        kept_window = None if window is None else window + 1  # ModernBert's own reading: the window is inclusive
        assert torch.equal(visible(mask, q_len, kv_len, is_causal=False, window=kept_window), dense)


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ({}, None),
        ({"attention_mask": "full"}, None),
        ({"attention_mask": "left"}, (BATCH, 4096)),
        ({"attention_mask": "left", "kv_length": 8192}, (BATCH, 8192)),  # a static cache
        ({"local_size": 512}, None),
        ({"attention_mask": "left", "local_size": 512}, (BATCH, 4096)),
        ({"q_offset": torch.tensor(100), "kv_length": 8192}, (BATCH, 1, 1, 1, 8192)),
        ({"q_offset": torch.tensor(100), "kv_length": 8192, "attention_mask": "left"}, (BATCH, 2, 1, 1, 8192)),
        ({"q_offset": torch.tensor(100), "kv_length": 8192, "q_length": 1, "allow_is_causal_skip": False}, (BATCH, 1, 1, 1, 8192)),
        ({"q_offset": 904, "kv_length": 5000}, (BATCH, 1, 1, 1, 5000)),
        ({"q_offset": 99, "q_length": 1, "kv_length": 100}, None),
        ({"attention_mask": "left", "allow_is_causal_skip": False}, (BATCH, 1, 4096, 4096)),  # an overlay
    ],
    ids=str,
)
def test_lengths_and_padding_never_take_rows_times_keys(given: dict[str, Any], shape: tuple[int, ...] | None) -> None:
    padding = torch.ones(BATCH, 4096, dtype=torch.bool)
    if given.get("attention_mask") == "left":
        padding[0, :5] = False
    if "attention_mask" in given:
        given = {**given, "attention_mask": padding}
    arguments = {"batch_size": BATCH, "q_length": 4096, "kv_length": 4096, **given}
    mask = make_mask(**arguments, config=config(given.get("local_size")))
    assert (mask if mask is None else tuple(mask.shape)) == shape


def test_a_prepared_mask_is_taken_as_it_is() -> None:
    """generate() makes the mask of a static cache first, and hands it to the model as its attention_mask."""
    arguments = {"batch_size": BATCH, "q_length": 1, "kv_length": 9, "q_offset": torch.tensor(4), "allow_is_causal_skip": False}
    mask = make_mask(**arguments)
    assert mask is not None and make_mask(**arguments, attention_mask=mask) is mask
    padded = make_mask(batch_size=BATCH, q_length=6, kv_length=9, attention_mask=paddings(6)[2])
    again = make_mask(batch_size=BATCH, q_length=6, kv_length=9, attention_mask=padded)
    assert padded is not None and again is not None and torch.equal(padded, again)


@pytest.mark.gpu
def test_no_mask_reads_the_device() -> None:
    """Static caches keep their length on the device; nothing waits for it, padded or not, at a prefill or a step."""
    padding = torch.ones(BATCH, 16, dtype=torch.bool, device="cuda")
    offset = torch.tensor(3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for q_length in (1, 5):
            for mask in (None, padding):
                sizes = {"batch_size": BATCH, "q_length": q_length, "kv_length": 16, "q_offset": offset, "device": "cuda"}
                made = read_mask(make_mask(**sizes, attention_mask=mask, allow_is_causal_skip=q_length > 1))
                assert made.lengths is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------

REASONS = {
    "deberta_v2": "the name is ignored",
    "falcon": "a table of the model file",
    "gpt_neo": "a table of the model file",
    "bloom": "adds the mask to the scores",
    "mpt": "adds the mask to the scores",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_ignore_it(name: str) -> None:
    model = REFUSED[name].build()
    with pytest.raises(UnsupportedError, match=f"{type(model).__name__}.*{REASONS[name]}") as raised:
        enable(model)
    assert "'sdpa'" in str(raised.value) and type(model).__name__ in refusals(model)
    assert model.config._attn_implementation == "eager"
    run(model, REFUSED[name].inputs())


def test_every_family_is_accepted() -> None:
    assert not any(refusals(family.build()) for family in FAMILIES.values())


def test_a_part_that_would_ignore_it() -> None:
    """The refusal looks into composite models."""
    model = FAMILIES["llama"].build()
    model.side = REFUSED["bloom"].build()
    with pytest.raises(UnsupportedError, match="model: BloomForCausalLM and BloomModel: "):
        enable(model)


def test_models_without_a_class_of_their_own() -> None:
    class Own(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

        @classmethod
        def _can_set_attn_implementation(cls) -> bool:
            return False

    with pytest.raises(UnsupportedError, match="Own: attention is the model's own, not called through AttentionInterface"):
        enable(Own(transformers.LlamaConfig(**FAMILIES["llama"].options)))
    with pytest.raises(TypeError, match=r"model: is a Linear; a transformers\.PreTrainedModel is expected"):
        enable(torch.nn.Linear(2, 2))  # type: ignore[type-var]


def test_a_model_without_attention() -> None:
    model = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(UnsupportedError, match="model: MambaForCausalLM: no part of it has attention that is called through"):
        enable(model)


def test_weights_in_the_configuration() -> None:
    model = FAMILIES["llama"].build()
    model.config.output_attentions = True
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM.*config\.output_attentions is True"):
        enable(model)


def test_an_unknown_name_is_refused_by_transformers() -> None:
    register()
    with pytest.raises(ValueError, match="onnx_atn"):
        transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**FAMILIES["llama"].options), attn_implementation="onnx_atn")


def tensors(**given: Any) -> dict[str, Any]:
    shapes = {"query": (2, 4, 3, 8), "key": (2, 2, 5, 8), "value": (2, 2, 5, 8)}
    return {"module": LAYER, **{name: torch.randn(shape) for name, shape in shapes.items()}, "attention_mask": None, **given}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dropout": 0.1}, r"dropout: is 0\.1; onnx_attn is forward only.*model\.eval\(\)"),
        ({"indices": torch.zeros(1)}, "indices: block-sparse attention by indices is not supported"),
        ({"block_indices": torch.zeros(1)}, "block_indices: block-sparse"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "cu_seq_lens_q: packed sequences need a mask here"),
        ({"scaling": torch.tensor(0.5)}, "scaling: is a tensor"),
        (
            {"attention_mask": torch.ones(2, 3, 5, dtype=torch.bool)},
            r"attention_mask: is \[2, 3, 5\] of torch\.bool; allowed are bool",
        ),
        ({"attention_mask": torch.ones(5, dtype=torch.bool)}, r"attention_mask: is \[5\] of torch\.bool"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask: is \[2, 5\] of torch\.float32"),
        ({"attention_mask": torch.ones(2, 1, 3, 5, dtype=torch.int64)}, r"attention_mask: is \[2, 1, 3, 5\] of torch\.int64"),
        ({"attention_mask": torch.ones(2, 1, 3, 4, dtype=torch.bool)}, "attention_mask: its last axis is 4, and there are 5 keys"),
        ({"attention_mask": torch.zeros(2, 1, 3, 6)}, "attention_mask: its last axis is 6, and there are 5 keys"),
        ({"attention_mask": object()}, "attention_mask: is a object; a tensor is expected"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_arguments_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        attention(**tensors(**given))


def test_a_mask_that_does_not_fit_is_named() -> None:
    with pytest.raises(RuntimeError, match="attn_mask: last axis is 6, but there are 5 keys"):
        attention(**tensors(attention_mask=torch.ones(2, 6, dtype=torch.bool)))
    with pytest.raises(UnsupportedError, match=r"attention_mask: is \[2, 3, 5\]; allowed are \[batch, tokens\]"):
        make_mask(batch_size=2, q_length=3, kv_length=5, attention_mask=torch.ones(2, 3, 5, dtype=torch.bool))
    for rows in (1, 3):
        with pytest.raises(UnsupportedError, match=f"attention_mask: has {rows} rows for a batch of 2"):
            make_mask(batch_size=2, q_length=5, kv_length=5, attention_mask=torch.ones(rows, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match="q_length: is missing"):
        make_mask(batch_size=2, kv_length=5)


def test_training_with_dropout() -> None:
    config = transformers.LlamaConfig(**FAMILIES["llama"].options, attention_dropout=0.1)
    model = enable(transformers.LlamaForCausalLM(config)).train()
    with pytest.raises(UnsupportedError, match=r"dropout: is 0\.1"):
        model(**FAMILIES["llama"].inputs())
    with pytest.raises(RuntimeError, match="forward only"):
        model.eval()(**FAMILIES["llama"].inputs()).logits.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# Nothing happens by importing
# ---------------------------------------------------------------------------------------------------------------------


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_changes_nothing() -> None:
    python(
        "import sys, torch_onnx_attn, torch_onnx_attn.integrations\n"
        "assert 'transformers' not in sys.modules\n"
        "import torch_onnx_attn.integrations.transformers as bridge\n"
        "from transformers import AttentionInterface\n"
        "from transformers.masking_utils import AttentionMaskInterface\n"
        "assert 'onnx_attn' not in AttentionInterface._global_mapping\n"
        "bridge.register(); bridge.register()\n"
        "assert AttentionInterface._global_mapping['onnx_attn'] is bridge.attention\n"
        "assert AttentionMaskInterface._global_mapping['onnx_attn'] is bridge.make_mask\n"
    )


def test_without_transformers_and_with_an_old_one() -> None:
    program = (
        "import sys, types\n"
        "sys.modules['transformers'] = {module}\n"
        "try:\n"
        "    import torch_onnx_attn.integrations.transformers\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert "needs the package transformers, 5 or newer: pip install" in python(program.format(module="None"))
    old = "types.SimpleNamespace(__version__='4.57.1')"
    assert "needs transformers 5 or newer, and this is 4.57.1" in python(program.format(module=old))
