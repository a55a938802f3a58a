"""Models as people have them: eager Hugging Face models and PyTorch's own decompositions, exported by both exporters, then rewritten."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch
from rewrite_models import by_onnxruntime, onnx
from torch import Tensor, nn

from torch_onnx_attn.models.rewrite import rewrite_file
from torch_onnx_attn.models.rewrite.symbolic import Shapes

transformers = pytest.importorskip("transformers")

with contextlib.suppress(ImportError, AttributeError):
    # The exporter parses its library of translations anew for every export: half the time of a small model.
    from torch.onnx._internal import _lazy_import

    _lazy_import.onnxscript_apis.get_torchlib_ops = functools.cache(_lazy_import.onnxscript_apis.get_torchlib_ops)

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = ("input_ids", "attention_mask")


@dataclasses.dataclass(frozen=True)
class Family:
    """A model with random weights, and what its attention must become."""

    model: str
    config: str
    settings: dict[str, Any]
    nodes: int
    inputs: tuple[str, ...] = TEXT
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    kv_heads: int = 4
    is_three_dimensional: bool = False  # the node splits the heads


FAMILIES = {
    "bert": Family("BertModel", "BertConfig", SMALL, 2, is_three_dimensional=True),
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False},
        2,
        kv_heads=2,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0, "use_cache": False},
        2,
        attributes={"softcap": 2.0, "scale": 1 / 16},
        kv_heads=2,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False},
        2,
        is_three_dimensional=True,
    ),
    "t5": Family(
        "T5EncoderModel",
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        2,
        attributes={"scale": 1.0},
        is_three_dimensional=True,
    ),
    "vit": Family(
        "ViTModel",
        "ViTConfig",
        {**{key: SMALL[key] for key in SMALL if key != "vocab_size"}, "image_size": 32, "patch_size": 8},
        2,
        inputs=("pixel_values",),
        is_three_dimensional=True,
    ),
    "whisper": Family(
        "WhisperModel",
        "WhisperConfig",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 20,
            "use_cache": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        3,
        inputs=("input_features", "decoder_input_ids"),
        is_three_dimensional=True,
    ),
}


class Positional(nn.Module):
    """The model with positional inputs and its first output."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Tensor:
        first: Tensor = self.model(**dict(zip(self.names, tensors, strict=True)))[0]
        return first


def build(family: Family) -> Positional:
    config = getattr(transformers, family.config)(**family.settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, family.model)(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return Positional(model, family.inputs).eval()


def tensors(family: Family, batch: int, length: int) -> tuple[Tensor, ...]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, -2:] = 0
    made = {
        "input_ids": torch.randint(3, 60, (batch, length)),
        "attention_mask": mask,
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "input_features": torch.randn(batch, 8, 40),
        "decoder_input_ids": torch.randint(3, 60, (batch, length)),
    }
    return tuple(made[name] for name in family.inputs)


def export(
    model: nn.Module, inputs: tuple[Tensor, ...], path: Path, dynamic: dict[int, str] | None, dynamo: bool, names: tuple[str, ...]
) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        if dynamo:
            shapes = None if dynamic is None else {"tensors": tuple(dict(dynamic) for _ in inputs)}
            program = torch.onnx.export(
                model, inputs, dynamo=True, opset_version=18, verbose=False, dynamic_shapes=shapes, input_names=list(names)
            )
            assert program is not None
            program.save(path)
        else:
            axes = None if dynamic is None else {name: dynamic for name in names}
            torch.onnx.export(model, inputs, path, dynamo=False, opset_version=17, input_names=list(names), dynamic_axes=axes)


CASES = [
    pytest.param("bert", True, True, id="bert"),
    pytest.param("bert", False, True, id="bert, older exporter"),
    pytest.param("bert", True, False, id="bert, fixed sizes"),
    pytest.param("llama", True, True, id="llama"),
    pytest.param("llama", False, True, id="llama, older exporter"),
    pytest.param("gemma2", True, True, id="gemma2"),
    pytest.param("gpt2", True, True, id="gpt2"),
    pytest.param("t5", True, True, id="t5"),
    pytest.param("t5", False, True, id="t5, older exporter"),
    pytest.param("vit", True, False, id="vit"),
    pytest.param("vit", False, False, id="vit, older exporter"),
    pytest.param("whisper", True, False, id="whisper"),
]


@pytest.mark.parametrize(("name", "dynamo", "dynamic"), CASES)
def test_family(name, dynamo, dynamic, tmp_path):
    """Every attention of the model becomes a node, and the file still gives what PyTorch gives, for padded batches of other sizes too."""
    family = FAMILIES[name]
    model = build(family)
    source, destination = tmp_path / "in.onnx", tmp_path / "out.onnx"
    export(model, tensors(family, 2, 9), source, {0: "batch", 1: "seq"} if dynamic else None, dynamo, family.inputs)
    report = rewrite_file(source, destination)
    assert report.is_written and not report.left
    assert report.nodes_after < report.nodes_before
    assert len(report.replaced) == family.nodes
    for made in report.replaced:
        assert made.attributes == pytest.approx(made.attributes | family.attributes, rel=1e-5)
        assert ("q_num_heads" in made.attributes) == family.is_three_dimensional
    proto = onnx.load(destination)
    assert sum(node.op_type == "Attention" for node in proto.graph.node) == family.nodes
    assert not any(node.op_type in ("Softmax", "Tanh") and node.name.endswith("softmax") for node in proto.graph.node)
    graph = onnx_ir.from_proto(onnx.shape_inference.infer_shapes(proto)).graph
    shapes = Shapes(graph)
    for node in graph:
        if node.op_type == "Attention" and not family.is_three_dimensional:
            assert [shapes.shape(node.inputs[index])[1] for index in (1, 2)] == [family.kv_heads] * 2, "K and V enter with their own heads"
    for batch, length in ((2, 9), (3, 5)) if dynamic else ((2, 9),):
        inputs = tensors(family, batch, length)
        with torch.no_grad():
            expected = model(*inputs).numpy()
        actual = by_onnxruntime(proto, dict(zip(family.inputs, (tensor.numpy() for tensor in inputs), strict=True)))[0]
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_whisper_decoder_is_causal(tmp_path):
    """The mask of a fixed size is a constant, so it is an attribute; the encoder and the cross attention have none."""
    family = FAMILIES["whisper"]
    export(build(family), tensors(family, 2, 9), tmp_path / "in.onnx", None, True, family.inputs)
    report = rewrite_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert [made.attributes.get("is_causal", 0) for made in report.replaced] == [0, 1, 0]
    assert all(not made.inputs for made in report.replaced)


# ---------------------------------------------------------------------------------------------------------------------
# torch's own decomposition of scaled_dot_product_attention


class ScaledDotProduct(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


SDPA: dict[str, tuple[dict[str, Any], Callable[[], list[Tensor]], dict[str, Any]]] = {
    "plain": ({}, list, {"scale": 8**-0.5}),
    "scale": ({"scale": 0.3}, list, {"scale": 0.3}),
    "causal": ({"is_causal": True}, list, {"scale": 8**-0.5, "is_causal": 1}),
    "bool mask": ({}, lambda: [torch.rand(5, 5) < 0.7], {"scale": 8**-0.5}),
    "float mask": ({}, lambda: [torch.randn(2, 1, 5, 5)], {"scale": 8**-0.5}),
    "grouped": ({"enable_gqa": True}, list, {"scale": 8**-0.5}),
}


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "older exporter"])
@pytest.mark.parametrize("form", SDPA)
def test_scaled_dot_product_attention(form, dynamo, tmp_path):
    options, mask, attributes = SDPA[form]
    if form == "grouped" and not dynamo:
        pytest.skip("the older exporter has no enable_gqa")
    kv_heads = 2 if form == "grouped" else 4
    inputs = (torch.randn(2, 4, 5, 8), torch.randn(2, kv_heads, 5, 8), torch.randn(2, kv_heads, 5, 8), *mask())
    names = ("q", "k", "v", "mask")[: len(inputs)]
    model = ScaledDotProduct(**options)
    export(model, inputs, tmp_path / "in.onnx", None, dynamo, names)
    report = rewrite_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert report.is_written
    (made,) = report.replaced
    assert made.attributes == pytest.approx(attributes, rel=1e-6)
    proto = onnx.load(tmp_path / "out.onnx")
    others = {"Where", "Constant"} if form == "bool mask" else set()  # the decomposition's finite minimum stays a number to add
    assert {node.op_type for node in proto.graph.node} - others == {"Attention"}
    if form == "bool mask":
        inputs[3][:, 0] = True
    actual = by_onnxruntime(proto, dict(zip(names, (tensor.numpy() for tensor in inputs), strict=True)))[0]
    np.testing.assert_allclose(actual, model(*inputs).numpy(), rtol=1e-5, atol=1e-5)


def test_attention_sinks_are_refused(tmp_path):
    """GPT-OSS appends a column of sinks to the scores: the graph says so, and so does the report."""

    class Sinks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = nn.Parameter(torch.randn(4))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.transpose(-1, -2) * 0.3
            column = self.sinks.reshape(1, 4, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
            weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
            return weights @ v

    export(Sinks(), tuple(torch.randn(2, 4, 5, 8) for _ in range(3)), tmp_path / "in.onnx", None, True, ("q", "k", "v"))
    report = rewrite_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert not report.is_written and not (tmp_path / "out.onnx").exists()
    assert "sinks" in report.left[0].reason
