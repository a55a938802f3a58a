"""A model that knows nothing of this package: its calls of torch's attention functions routed, compiled, and exported to single nodes.

An encoder of torch.nn.TransformerEncoderLayer and a pooling block that calls scaled_dot_product_attention with grouped heads. Nothing in
it is changed: route_attention takes the calls while it is active, and reports them.
"""

from __future__ import annotations

import warnings
from collections import Counter

import torch
from common import OUT, Comparison, OnnxModel, Verdict, compiled, difference, set_up
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import torch_onnx_attn
import torch_onnx_attn.onnx

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, SUMMARY, TOLERANCE = 2, 64, 4, 2, 16, 3, 1e-4


class Pooling(nn.Module):
    """A few learned queries look at the encoder's output; two query heads share a key/value head."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(HEADS, SUMMARY, HEAD_SIZE))
        self.keys, self.values = nn.Linear(HIDDEN, KV_HEADS * HEAD_SIZE), nn.Linear(HIDDEN, KV_HEADS * HEAD_SIZE)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        K, V = (projection(x).unflatten(2, (KV_HEADS, HEAD_SIZE)).transpose(1, 2) for projection in (self.keys, self.values))
        Q = self.queries.expand(x.shape[0], -1, -1, -1)
        Y = scaled_dot_product_attention(Q, K, V, ~padding[:, None, None], enable_gqa=True)
        return Y.transpose(1, 2).flatten(2)


class Summarizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.pooling = Pooling()

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """x [batch, rows, HIDDEN] and padding [batch, rows], True for rows that are none -> [batch, SUMMARY, HIDDEN]."""
        return self.pooling(self.encoder(x, src_key_padding_mask=padding), padding)


def exported_by_torch_alone(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Counter[str]:
    program = torch.onnx.export(model, inputs, dynamo=True, opset_version=24, verbose=False)
    return Counter(node.op_type for node in program.model_proto.graph.node)


def main() -> None:
    set_up()
    model = Summarizer().eval().requires_grad_(False)
    x, padding = torch.randn(2, 64, HIDDEN), torch.zeros(2, 64, dtype=torch.bool)
    padding[1, 50:] = True
    print(f"An encoder of {LAYERS} layers and a pooling block, written for torch alone, with random weights; 64 and 50 rows\n")

    comparison = Comparison(model(x, padding), TOLERANCE)
    comparison.time("torch alone", model, x, padding)
    path, axes = OUT / "sdpa_model.onnx", {0: "batch", 1: "rows"}
    with torch_onnx_attn.route_attention() as of_export:
        torch_onnx_attn.onnx.export(
            model,
            (x, padding),
            path,
            opset=24,
            dynamic_shapes=(axes, axes),
            input_names=["x", "padding"],
            output_names=["summary"],
            check=True,
        )
    exported = OnnxModel(path)
    fast, compiler = compiled(model, fullgraph=True)

    reports = {}
    for label, run in (("routed", model), (f"routed, {compiler}", fast)):
        with torch_onnx_attn.route_attention() as reports[label]:
            run(x, padding)
        with torch_onnx_attn.route_attention():
            comparison.run(label, run, x, padding)
    comparison.run(exported.label, lambda: exported(x, padding)[0])
    print("Compared with the same model on torch's own attention:")
    comparison.show("the result")
    print(f"\nThe report of the eager run:\n{reports['routed']}\n\nThe file {path}:")
    print(torch_onnx_attn.onnx.report(path))

    print()
    verdict, calls = Verdict(), LAYERS + 1
    comparison.judge(verdict, "the numbers of torch alone")
    for label, report in {**reports, "export": of_export}.items():
        verdict.require(report.routed.total() == calls and not report.left, f"{label}: {calls} calls routed, none left")
    nodes = exported.count()
    verdict.require(nodes["Attention"] == calls and nodes["Softmax"] == 0, f"{calls} Attention nodes, no attention was taken apart")
    alone = exported_by_torch_alone(model, (x, padding))
    print(f"       (torch alone exports {alone.total()} nodes, {alone['Attention']} of them Attention; here {nodes.total()})")
    shorter = x[:1, :7], padding[:1, :7]
    verdict.require(difference(exported(*shorter)[0], model(*shorter)) < TOLERANCE, "the same file runs at batch 1 and 7 rows")
    with warnings.catch_warnings(), torch_onnx_attn.route_attention() as of_training:
        warnings.simplefilter("ignore")
        model.train()(x, padding)
    verdict.require(of_training.left.total() >= LAYERS, "in training mode the calls with dropout are left to torch, and reported")
    verdict.finish()


if __name__ == "__main__":
    main()
