"""A Llama of Hugging Face transformers, as small as it gets: attn_implementation="onnx_attn", compiled, exported, in ONNX Runtime.

Padding stays a mask of keys, causality is an attribute, grouped heads are not repeated: one Attention node for each layer.
"""

from __future__ import annotations

import torch
from common import OUT, Comparison, OnnxModel, Verdict, compiled, difference, set_up
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import torch_onnx_attn.onnx
from torch_onnx_attn.integrations.transformers import enable

LAYERS, TOLERANCE = 2, 1e-4
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 500}


class Logits(nn.Module):
    """What the file shall compute: logits of every token, without a cache."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def main() -> None:
    set_up()
    config = LlamaConfig(num_hidden_layers=LAYERS, **SIZES, initializer_range=0.1, attn_implementation="eager")
    model = Logits(LlamaForCausalLM(config)).eval().requires_grad_(False)
    ids, mask = torch.randint(500, (2, 64)), torch.ones(2, 64, dtype=torch.int64)
    mask[1, 50:] = 0
    tokens = mask.bool()
    heads = f"{config.num_attention_heads} query and {config.num_key_value_heads} key/value heads"
    print(f"A Llama of {LAYERS} layers with random weights, {heads}; 2 sequences of 64 and 50 tokens\n")

    want = model(ids, mask)[tokens]
    comparison = Comparison(want, TOLERANCE)
    comparison.time("transformers, eager", model, ids, mask)
    enable(model.model)
    path = OUT / "hugging_face.onnx"
    torch_onnx_attn.onnx.export(
        model,
        (ids, mask),
        path,
        opset=24,
        dynamic_shapes=({0: "batch", 1: "tokens"}, {0: "batch", 1: "tokens"}),
        input_names=["input_ids", "attention_mask"],
        output_names=["logits"],
    )
    exported = OnnxModel(path)
    fast, compiler = compiled(model, fullgraph=True, dynamic=True)

    comparison.run("onnx_attn", lambda: model(ids, mask)[tokens])
    comparison.run(f"onnx_attn, {compiler}", lambda: fast(ids, mask)[tokens])
    comparison.run(exported.label, lambda: exported(ids, mask)[0][tokens])
    print("Compared with transformers' own eager attention, padding left out:")
    comparison.show("logits")

    print(f"\n{exported.describe()}")
    verdict, nodes = Verdict(), exported.count()
    comparison.judge(verdict, "logits as with eager attention")
    unpadded = model(ids, torch.ones_like(mask))[tokens]
    seen = difference(unpadded[:64], want[:64]) < TOLERANCE and difference(model(ids[1:, :50], mask[1:, :50])[0], want[64:]) < TOLERANCE
    verdict.require(seen, "a padded sequence has the logits that it has alone")
    verdict.require(nodes["Attention"] == LAYERS, f"{LAYERS} Attention nodes, one for each layer")
    verdict.require(nodes["Softmax"] == 0, "no Softmax node: no attention was taken apart")
    verdict.require(
        difference(exported(ids[:1, :9], mask[:1, :9])[0], model(ids[:1, :9], mask[:1, :9])) < TOLERANCE, "batch 1, 9 tokens too"
    )
    verdict.finish()


if __name__ == "__main__":
    main()
