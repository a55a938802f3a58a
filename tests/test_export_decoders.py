"""Decoders with caches: exported with the usual names, and run step by step in ONNX Runtime as in PyTorch."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_support import ort
from torch import Tensor, nn

import torch_onnx_attn
import torch_onnx_attn.onnx
from torch_onnx_attn.nn import KVCache
from torch_onnx_attn.onnx import PastPresent, export_past_present, export_static_cache

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, SIZE, CAPACITY = 50, 32, 2, 4, 2, 8, 24
CACHES = PastPresent(LAYERS, KV_HEADS, SIZE)


class Decoder(nn.Module):
    """What both decoders share: everything but the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(64, HIDDEN)
        self.q = nn.ModuleList(nn.Linear(HIDDEN, HEADS * SIZE) for _ in range(LAYERS))
        self.kv = nn.ModuleList(nn.Linear(HIDDEN, KV_HEADS * SIZE) for _ in range(LAYERS))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def run(self, ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        x = self.tokens(ids) + self.positions(positions)
        for layer in range(LAYERS):
            q, k = (p(x).unflatten(2, (-1, SIZE)).transpose(1, 2) for p in (self.q[layer], self.kv[layer]))
            x = x + attend(layer, q, k, k).transpose(1, 2).flatten(2)
        return x @ self.tokens.weight.T


class GrowingDecoder(Decoder):
    def forward(self, input_ids: Tensor, past_key_values: tuple[tuple[Tensor, Tensor], ...]) -> tuple[Tensor, Any]:
        present = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            past_key, past_value = past_key_values[layer]
            result = torch_onnx_attn.attention(q, k, v, past_key=past_key, past_value=past_value, is_causal=True)
            present.append((result.present_key, result.present_value))
            return result.Y

        positions = past_key_values[0][0].shape[2] + torch.arange(input_ids.shape[1])
        return self.run(input_ids, positions, attend), tuple(present)


class StaticDecoder(Decoder):
    def __init__(self, batch: int = 2, **attributes: Any) -> None:
        super().__init__()
        self.cache, self.attributes = KVCache(LAYERS, batch, KV_HEADS, CAPACITY, SIZE), attributes

    def forward(self, input_ids: Tensor) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.cache.attend(layer, q, k, v, **self.attributes)

        logits = self.run(input_ids, self.cache.positions(input_ids.shape[1]), attend)
        self.cache.advance(input_ids.shape[1])
        return logits


def session(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def sizes(values: Any) -> dict[str, list[Any]]:
    return {value.name: list(value.shape) for value in values}


CACHE_NAMES = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]
STEPS = [torch.tensor([[1, 7, 7, 40], [3, 9, 12, 0]]), torch.tensor([[5], [44]]), torch.tensor([[8], [2]]), torch.tensor([[6, 6], [1, 30]])]


# ------------------------------------------------------------------------------------------------------- past and present


def test_past_and_present(tmp_path: Path) -> None:
    model, path = GrowingDecoder().eval(), tmp_path / "model.onnx"
    program = export_past_present(model, (torch.tensor([[1, 2, 3], [4, 5, 6]]),), CACHES, path, check=True)
    types = [node.op_type for node in program.model_proto.graph.node]
    assert types.count("Attention") == LAYERS and "Softmax" not in types
    running = session(path)
    cache = ["batch_size", KV_HEADS, "past_sequence_length", SIZE]
    assert sizes(running.get_inputs()) == {
        "input_ids": ["batch_size", "sequence_length"],
        **{f"past_key_values.{name}": cache for name in CACHE_NAMES},
    }
    assert [value.name for value in running.get_outputs()] == ["logits", *(f"present.{name}" for name in CACHE_NAMES)]
    assert running.get_outputs()[0].shape == ["batch_size", "sequence_length", VOCABULARY]

    past = CACHES.example(2, 0)
    held = {name: np.zeros((2, KV_HEADS, 0, SIZE), np.float32) for name in CACHES.input_names}
    with torch.no_grad():
        for ids in STEPS:
            expected, past = model(ids, past)
            logits, *present = running.run(None, {"input_ids": ids.numpy(), **held})
            held = dict(zip(CACHES.input_names, present, strict=True))
            torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)
    assert held["past_key_values.0.key"].shape[2] == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_past_and_present_types(dtype: torch.dtype) -> None:
    program = export_past_present(GrowingDecoder().to(dtype).eval(), (torch.tensor([[1, 2, 3]]),), CACHES)
    found = torch_onnx_attn.onnx.report(program)
    name = str(dtype).removeprefix("torch.")
    assert {kind.split()[0] for key, kind in found.inputs.items() if key != "input_ids"} == {name}
    assert {kind.split()[0] for kind in found.outputs.values()} == {name}
    assert [node.outputs for node in found.nodes] == [("Y", "present_key", "present_value")] * LAYERS


def test_other_names_and_shapes() -> None:
    class Masked(GrowingDecoder):
        def forward(self, ids: Tensor, mask: Tensor, past_key_values: Any) -> Any:
            logits, present = super().forward(ids, past_key_values)
            return logits * mask[:, -ids.shape[1] :, None], logits.sum(), present

    program = export_past_present(
        Masked().eval(),
        (torch.tensor([[1, 2, 3]]), torch.ones(1, 5)),
        CACHES,
        dynamic_shapes={"ids": {0: "n", 1: "new"}, "mask": {0: "n", 1: "total"}},
        input_names=["input_ids", "attention_mask"],
        output_names=["logits", "sum"],
        batch="n",
    )
    found = torch_onnx_attn.onnx.report(program)
    assert list(found.inputs) == ["input_ids", "attention_mask", *CACHES.input_names]
    assert list(found.outputs) == ["logits", "sum", *CACHES.output_names]
    assert found.inputs["past_key_values.1.value"] == f"float32 [n, {KV_HEADS}, past_sequence_length, {SIZE}]"


def test_mistakes_are_named() -> None:
    model, ids = GrowingDecoder().eval(), torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match="args: has no tensor"):
        export_past_present(model, (), CACHES)
    with pytest.raises(ValueError, match="forward has 2 parameters; after 2 inputs it must take past_key_values"):
        export_past_present(model, (ids, ids), CACHES)
    with pytest.raises(ValueError, match="dynamic_shapes: 'tokens' is none of the inputs given in args: input_ids"):
        export_past_present(model, (ids,), CACHES, dynamic_shapes={"tokens": {0: "batch"}})
    with pytest.raises(ValueError, match="dynamic_shapes: has 2 entries for 1 inputs"):
        export_past_present(model, (ids,), CACHES, dynamic_shapes=(None, None))
    with pytest.raises(ValueError, match=r"has 0 torch_onnx_attn\.nn\.KVCache modules, must have exactly 1"):
        export_static_cache(model, (ids,))
    with pytest.raises(TypeError, match="caches: is of type tuple, must be a PastPresent"):
        export_past_present(model, (ids,), (1, 2, 16))
    with pytest.raises(ValueError, match="kv_heads: is 0, must be a positive integer"):
        PastPresent(layers=1, kv_heads=0, head_size=16)


def test_outputs_without_a_name_do_not_shift_the_names_of_the_caches() -> None:
    class WithHidden(GrowingDecoder):
        def forward(self, input_ids: Tensor, past_key_values: Any) -> Any:
            logits, present = super().forward(input_ids, past_key_values)
            return logits, 2 * logits, present

    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"^output_names: is \['logits', 'present.0.key'.* for each of [0-9]+: float32"):
        export_past_present(WithHidden().eval(), (ids,), CACHES)
    program = export_past_present(WithHidden().eval(), (ids,), CACHES, output_names=("logits", "double"))
    assert [value.name for value in program.model.graph.outputs] == ["logits", "double", *CACHES.output_names]


def test_onnxruntime_genai_generates_the_same_tokens(tmp_path: Path) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    model = GrowingDecoder().eval()
    model.tokens.weight.data[VOCABULARY - 1] = 0  # so that the end token does not win
    export_past_present(model, (torch.tensor([[1, 2, 3]]),), CACHES, tmp_path / "model.onnx")
    decoder = {
        "session_options": {"provider_options": []},
        "filename": "model.onnx",
        "head_size": SIZE,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "inputs": {"input_ids": "input_ids", "past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"},
        "outputs": {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"},
    }
    tokens = {"bos_token_id": 1, "eos_token_id": VOCABULARY - 1, "pad_token_id": 0, "context_length": 64, "vocab_size": VOCABULARY}
    config = {"model": {**tokens, "type": "llama", "decoder": decoder}, "search": {"max_length": 16, "past_present_share_buffer": False}}
    (tmp_path / "genai_config.json").write_text(json.dumps(config))
    running = genai.Model(str(tmp_path))
    options = genai.GeneratorParams(running)
    options.set_search_options(max_length=16, do_sample=False)
    generator = genai.Generator(running, options)
    generator.append_tokens([3, 7, 11])
    while not generator.is_done():
        generator.generate_next_token()
    sequence = [3, 7, 11]
    with torch.no_grad():
        while len(sequence) < 16:
            sequence.append(int(model(torch.tensor([sequence]), CACHES.example(1, 0))[0][0, -1].argmax()))
    assert [int(token) for token in generator.get_sequence(0)] == sequence


# ------------------------------------------------------------------------------------------------------------ static cache


@pytest.mark.parametrize("capacity", [None, "capacity"])
def test_static_cache(capacity: str | None, tmp_path: Path) -> None:
    model, path = StaticDecoder().eval(), tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*not everything could be checked", UserWarning)
        program = export_static_cache(model, (STEPS[0],), path, capacity=capacity, check=True)
    assert model.cache.lengths.tolist() == [0, 0] and not model.cache.key(0).any()  # exporting leaves the cache alone
    types = [node.op_type for node in program.model_proto.graph.node]
    assert (types.count("Attention"), types.count("TensorScatter"), types.count("Softmax")) == (LAYERS, 2 * LAYERS, 0)
    assert {entry.domain: entry.version for entry in program.model_proto.opset_import} == {"": 24}
    for node in program.model_proto.graph.node:
        if node.op_type == "Attention":
            assert list(node.input)[1].startswith("present.") and list(node.input)[3:6] == ["", "", ""] and node.input[6]
    assert all(str(CAPACITY) not in str(list(i.dims)) for i in program.model_proto.graph.initializer)  # no cache among the weights

    running = session(path)
    cache = ["batch_size", KV_HEADS, capacity or CAPACITY, SIZE]
    names = [f"past_key_values.{name}" for name in CACHE_NAMES]
    assert sizes(running.get_inputs()) == {
        "input_ids": ["batch_size", "sequence_length"],
        "past_lengths": ["batch_size"],
        **{name: cache for name in names},
    }
    assert [value.name for value in running.get_outputs()] == ["logits", "present_lengths", *(f"present.{name}" for name in CACHE_NAMES)]


def test_static_cache_steps(tmp_path: Path) -> None:
    model, path = StaticDecoder().eval(), tmp_path / "model.onnx"
    export_static_cache(model, (STEPS[0],), path)
    running = session(path)
    names = ["past_lengths", *(f"past_key_values.{name}" for name in CACHE_NAMES)]
    state = [np.zeros(2, np.int64), *(np.zeros((2, KV_HEADS, CAPACITY, SIZE), np.float32) for _ in CACHE_NAMES)]
    with torch.no_grad():
        for step, ids in enumerate(STEPS):
            logits, *state = running.run(None, {"input_ids": ids.numpy(), **dict(zip(names, state, strict=True))})
            torch.testing.assert_close(torch.from_numpy(logits), model(ids), rtol=1e-4, atol=1e-4)
            if step == 0:  # the second prompt had 3 tokens and padding
                model.cache.lengths.copy_(torch.tensor([4, 3]))
                state[0] = np.array([4, 3])
            np.testing.assert_array_equal(state[0], model.cache.lengths.numpy())
    for layer in range(LAYERS):
        np.testing.assert_allclose(state[1 + 2 * layer], model.cache.key(layer).numpy(), rtol=1e-5, atol=1e-5)


def test_static_cache_with_a_window_needs_opset_25() -> None:
    program = export_static_cache(StaticDecoder(left_window_size=3).eval(), (STEPS[0],))
    assert program.model_proto.opset_import[0].version == 25


def test_a_model_that_writes_a_kv_cache_says_how_to_export_it() -> None:
    with pytest.raises(torch_onnx_attn.onnx.ExportError, match=r"writes the buffer 'cache\.key_0'.*export_static_cache"):
        torch_onnx_attn.onnx.export(StaticDecoder().eval(), (STEPS[0],))


def test_inputs_that_are_nested_get_numbered_names() -> None:
    class Model(StaticDecoder):
        def forward(self, pair: tuple[Tensor, Tensor], scale: Tensor) -> Tensor:
            return super().forward(pair[0] + pair[1]) * scale[:, None, None]

    ids = STEPS[0]
    shapes = (({0: "batch_size", 1: "sequence_length"},) * 2, {0: "batch_size"})
    found = torch_onnx_attn.onnx.report(export_static_cache(Model().eval(), ((ids, ids * 0), torch.ones(2)), dynamic_shapes=shapes))
    assert list(found.inputs)[:4] == ["pair_0", "pair_1", "scale", "past_lengths"]
