"""Tensor parallel: two processes hold half of the heads each, and each exports an ordinary ONNX file of its half.

PyTorch splits the model by itself (parallelize_module). A rank's own weights make an ordinary module again, whose attention has half the
heads; its file knows nothing of other ranks. Whoever runs the files adds up their outputs after every block, here with gloo. The model's
blocks share their weights, as in ALBERT, so that one file serves all of them.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from common import OUT, Comparison, OnnxModel, Verdict, difference, set_up
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_onnx_attn
import torch_onnx_attn.onnx

RANKS, VOCABULARY, HIDDEN, BLOCKS, Q_HEADS, KV_HEADS, HEAD_SIZE, ROWS = 2, 97, 64, 3, 8, 4, 8, 24
PLAN = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {name: RowwiseParallel() for name in ("out", "down")}
TOLERANCE = 1e-4


class Block(nn.Module):
    """Attention and feed-forward side by side. What it returns is added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, Q_HEADS * HEAD_SIZE, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD_SIZE, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD_SIZE, bias=False)
        self.out = nn.Linear(Q_HEADS * HEAD_SIZE, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, rows, HIDDEN] to the same shape."""
        x = self.norm(hidden)
        # Head counts follow from the width, which is a rank's own: they may not be constants.
        Q, K, V = (projected.unflatten(2, (-1, HEAD_SIZE)).transpose(1, 2) for projected in (self.q(x), self.k(x), self.v(x)))
        attended = torch_onnx_attn.attention(Q, K, V, is_causal=True).Y.transpose(1, 2).flatten(2)
        return self.out(attended) + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.block = Block()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, rows, VOCABULARY]."""
        hidden = self.tokens(tokens)
        for _ in range(BLOCKS):
            hidden = hidden + self.block(hidden)
        return nn.functional.linear(self.norm(hidden), self.tokens.weight)


class Summed(nn.Module):
    """A rank's half of a block in the place of the whole: the ranks' results are added up."""

    def __init__(self, half: OnnxModel) -> None:
        super().__init__()
        self.half = half

    def forward(self, hidden: Tensor) -> Tensor:
        part = self.half(hidden)[0].clone()
        dist.all_reduce(part)
        return part


def with_torch_alone(block: Block, hidden: Tensor) -> Tensor:
    """The same block, whole, its attention written out: the independent answer."""
    x = block.norm(hidden)
    Q, K, V = (linear(x).unflatten(2, (-1, HEAD_SIZE)).transpose(1, 2) for linear in (block.q, block.k, block.v))
    K, V = (y.repeat_interleave(Q_HEADS // KV_HEADS, 1) for y in (K, V))
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    weights = (Q @ K.transpose(-1, -2) * HEAD_SIZE**-0.5).masked_fill(later, float("-inf")).softmax(-1)
    return block.out((weights @ V).transpose(1, 2).flatten(2)) + block.down(nn.functional.gelu(block.up(x)))


def own_part(block: Block) -> Block:
    """An ordinary module of a parallelized block's weights on this rank."""
    part = Block()
    for name, parameter in list(block.named_parameters()):
        module, _, leaf = name.rpartition(".")
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        setattr(part.get_submodule(module), leaf, nn.Parameter(local.detach().clone(), requires_grad=False))
    return part.eval()


def run(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    set_up()
    model = Model().eval().requires_grad_(False)  # the same random weights on every rank
    tokens = torch.randint(VOCABULARY, (2, ROWS))
    reference = copy.deepcopy(model)
    reference.block.forward = lambda hidden: with_torch_alone(model.block, hidden)
    comparison = Comparison(reference(tokens), TOLERANCE)

    parallel = copy.deepcopy(model)
    parallelize_module(parallel.block, init_device_mesh("cpu", (RANKS,)), PLAN)
    half = own_part(parallel.block)
    path = OUT / f"tensor_parallel_rank{rank}.onnx"
    example = torch.randn(2, 5, HIDDEN)
    shapes = ({0: "batch", 1: "rows"},)
    torch_onnx_attn.onnx.export(half, (example,), path, dynamic_shapes=shapes, input_names=["hidden"], output_names=["part"])
    exported = OnnxModel(path)
    by_files = copy.deepcopy(model)
    by_files.block = Summed(exported)

    for label, candidate in (("PyTorch, one process", model), ("PyTorch, split", parallel), (f"{exported.label}, a file each", by_files)):
        comparison.run(f"rank {rank}, {label}", candidate, tokens)
    facts = {
        "comparison": comparison,
        "short": difference(by_files(tokens[:1, :3]), model(tokens[:1, :3])),
        "nodes": exported.count(),
        "heads": half.q.weight.shape[0] // HEAD_SIZE,
        "file": exported.describe(),
    }
    found: list[dict[str, Any]] = [{} for _ in range(RANKS)]
    dist.all_gather_object(found, facts)
    if rank == 0:
        report(found)
    dist.destroy_process_group()


def report(found: list[dict[str, Any]]) -> None:
    print(f"A model of {BLOCKS} blocks with {Q_HEADS} query and {KV_HEADS} key heads, split over {RANKS} processes\n")
    print("Compared with the same model in one process, attention in plain torch:")
    found[0]["comparison"].show("logits")
    for facts in found:
        print(f"\n{facts['file']}")
    verdict = Verdict()
    for rank, facts in enumerate(found):
        facts["comparison"].judge(verdict, "the same logits")
        verdict.require(facts["short"] < TOLERANCE, f"rank {rank}: the same file runs at batch 1 and 3 tokens")
        verdict.require(facts["heads"] == Q_HEADS // RANKS, f"rank {rank}: {Q_HEADS // RANKS} query heads")
        verdict.require(facts["nodes"]["Attention"] == 1, f"rank {rank}: one Attention node")
        verdict.require(facts["nodes"]["Softmax"] == 0, f"rank {rank}: no Softmax node: no attention was taken apart")
    verdict.finish()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, args=(f"{folder}/store",), nprocs=RANKS)


if __name__ == "__main__":
    main()
