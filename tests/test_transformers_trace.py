"""transformers models on the ops under torch.compile, in a CUDA graph, and in ONNX: one Attention node for each attention of the model."""

from __future__ import annotations

from typing import Any

import export_support
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers_models import BATCH, FAMILIES, LENGTH, given_cache, kept_rows, result, run, transformers

import torch_onnx_attn.onnx
from torch_onnx_attn.integrations.transformers import enable
from torch_onnx_attn.integrations.transformers.models import parts

TOLERANCE = 2e-5


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile
# ---------------------------------------------------------------------------------------------------------------------


class Backend:
    """Runs the captured graph as it is, and counts the calls of the ops in it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, _inputs: Any) -> Any:
        targets = [str(node.target) for node in module.graph.nodes]
        self.calls += [target for target in targets if target.startswith("onnx_attn.attention")]
        return module


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "modernbert", "t5"])
def test_compiled(name: str, padding: str) -> None:
    family, inputs = FAMILIES[name], FAMILIES[name].inputs(padding)
    options = {"use_cache": False} if name == "t5" else {}  # dynamo of torch 2.11 cannot trace how transformers makes its caches
    expected = run(family.build(), inputs)
    backend = Backend()
    torch._dynamo.reset()
    actual = run(torch.compile(enable(family.build()), fullgraph=True, backend=backend), inputs, **options)
    assert backend.calls == ["onnx_attn.attention.lse" if name == "gpt_oss" else "onnx_attn.attention.default"] * family.calls
    close(kept_rows(actual, inputs), kept_rows(expected, inputs))


def static_cache(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=16)


def fill(model: Any, cache: Any, inputs: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **given_cache(model, cache))


@pytest.mark.parametrize("padding", ["none", "left"])
def test_compiled_steps_of_a_static_cache(padding: str) -> None:
    """One graph for all steps: the lengths are on the device."""
    family, inputs = FAMILIES["llama"], FAMILIES["llama"].inputs(padding)
    eager, model = family.build(), enable(family.build())
    caches = [static_cache(eager), static_cache(model)]
    fill(eager, caches[0], inputs)
    fill(model, caches[1], inputs)
    backend = Backend()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 16 - LENGTH), value=1)
    for token in range(3, 6):
        step = {"input_ids": torch.full((BATCH, 1), token), "attention_mask": mask}
        close(run(compiled, step, **given_cache(model, caches[1])), run(eager, step, **given_cache(eager, caches[0])))
    assert len(backend.calls) == family.calls


def test_compiled_for_any_length() -> None:
    model = enable(FAMILIES["llama"].build())
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 5, 7):
        inputs = {name: x[:, :length] for name, x in FAMILIES["llama"].inputs("left").items()}
        close(kept_rows(run(compiled, inputs), inputs), kept_rows(run(model, inputs), inputs))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_compiles_its_steps(name: str) -> None:
    """On a GPU transformers compiles the steps of a static cache by itself; here it is told to. The masks come from outside the graph."""
    inputs = FAMILIES[name].inputs("left")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    expected = FAMILIES[name].build().generate(**inputs, **options, disable_compile=True)
    how = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    how._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(enable(FAMILIES[name].build()).generate(**inputs, **options, compile_config=how), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if name == "llama" else 2)  # windowed layers: filling, and full


# ---------------------------------------------------------------------------------------------------------------------
# CUDA graphs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("padding", ["none", "left", "no mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_captured_step(name: str, dtype: torch.dtype, padding: str) -> None:
    """One step is captured and replayed: the cache, its length and the positions advance on the device, as in as many eager steps."""
    family = FAMILIES[name]
    model = enable(family.build()).to("cuda", dtype)
    prompt = {key: x.cuda() for key, x in family.inputs("left" if padding == "left" else "none").items()}
    tokens = torch.arange(3, 9, device="cuda")[:, None, None].expand(-1, BATCH, 1)
    step: dict[str, Tensor] = {"input_ids": tokens[0].clone()}
    if padding != "no mask":
        step["attention_mask"] = torch.nn.functional.pad(prompt["attention_mask"], (0, 16 - LENGTH), value=1)

    def used_cache() -> Any:
        """Allocated, and with a length on the device."""
        cache = static_cache(model)
        fill(model, cache, prompt)
        run(model, step, **given_cache(model, cache))
        cache.reset()
        fill(model, cache, prompt)
        return cache

    cache = used_cache()
    expected = [run(model, {**step, "input_ids": token}, **given_cache(model, cache)) for token in tokens]
    cache = used_cache()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(model, step, **given_cache(model, cache))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run(model, step, **given_cache(model, cache))
    cache.reset()
    fill(model, cache, prompt)
    for token, wanted in zip(tokens, expected, strict=True):
        step["input_ids"].copy_(token)
        graph.replay()
        tolerance = TOLERANCE if dtype == torch.float32 else 0.02
        torch.testing.assert_close(logits, wanted, rtol=tolerance, atol=tolerance)
    assert (expected[0] - expected[-1]).abs().max() > 0.1  # the steps differ by far


# ---------------------------------------------------------------------------------------------------------------------
# ONNX
# ---------------------------------------------------------------------------------------------------------------------

ROTARY = ("llama", "qwen2")  # at opset 23 ONNX Runtime refuses the rotary embedding that the exporter fuses
WINDOWED = {"mistral": [3], "gemma2": [3, -1], "gemma3": [3, -1], "modernbert": [-1, 2]}
TWO_KINDS_OF_LAYERS = ("gemma2", "gemma3", "gpt_oss", "modernbert")
CAUSAL = {"bert": 0, "roberta": 0, "modernbert": 0, "distilbert": 0, "vit": 0, "t5": 1, "bart": 1, "whisper": 1, "clip": 1, "gpt_oss": 0}


def dynamic_shapes(inputs: dict[str, Tensor]) -> dict[str, Any]:
    shapes: dict[str, Any] = {}
    for name, x in inputs.items():
        rows = "decoder_rows" if name.startswith("decoder") else "rows"
        shapes[name] = {0: "batch"} if x.dim() > 2 else {0: "batch", 1: rows}
    return shapes


@pytest.mark.parametrize("name", FAMILIES)
def test_exported(name: str) -> None:
    """One Attention node for each attention, and nothing of attention besides; other batch sizes and lengths in ONNX Runtime."""
    family = FAMILIES[name] if name in TWO_KINDS_OF_LAYERS else FAMILIES[name].shallow()  # half the time
    inputs = family.inputs("right")
    model = enable(family.build())
    for part in parts(model):
        part.config.use_cache = False
    if name == "whisper":  # without one, and while tracing, transformers makes a dense mask: the positions might be packed sequences
        inputs["decoder_attention_mask"] = torch.ones_like(inputs["decoder_input_ids"])
    if name == "gpt_oss":
        model.set_experts_implementation("batched_mm")  # the exporter has no translation of the default one
    program = torch_onnx_attn.onnx.export(
        model,
        kwargs=inputs,
        dynamic_shapes=dynamic_shapes(inputs),
        opset=24 if name in ROTARY else None,
    )
    proto = program.model_proto
    export_support.onnx.checker.check_model(proto)
    types = [node.op_type for node in proto.graph.node]
    attributes = [export_support.attributes(node) for node in proto.graph.node if node.op_type == "Attention"]
    assert len(attributes) == family.calls
    assert types.count("Softmax") == (2 if name == "gpt_oss" else 0)  # the routers of its experts
    assert sum(given.get("is_causal", 0) for given in attributes) == CAUSAL.get(name, family.calls)
    windows = WINDOWED.get(name, [-1] * family.calls)
    assert [given.get("left_window_size", -1) for given in attributes] == windows
    assert [given.get("right_window_size", -1) for given in attributes] == (windows if name == "modernbert" else [-1] * family.calls)
    if name == "gemma2":
        assert [given["softcap"] for given in attributes] == [2.0, 2.0]
    if name in WINDOWED and not export_support.ORT_IS_CURRENT:
        return
    for current in (inputs, smaller(inputs)):
        with torch.no_grad():
            outputs = model(**current)
        expected = result(outputs)
        position = next(i for i, leaf in enumerate(tree_leaves(outputs)) if leaf is expected)
        actual = export_support.run(proto, current, "ort")[position]
        close(kept_rows(actual, current), kept_rows(expected, current))


def smaller(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The second entry alone, one token shorter."""
    return {name: x[1:] if x.dim() > 2 else x[1:, :-1] for name, x in inputs.items()}
