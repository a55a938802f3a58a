"""A small language model with random weights, whose attention is passed in, and what every decoder made of it must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from common import Comparison, OnnxModel, Verdict
from torch import Tensor, nn

VOCABULARY, HIDDEN, LAYERS, Q_HEADS, KV_HEADS, HEAD_SIZE, LONGEST = 97, 64, 2, 4, 2, 16, 64
HEADS = {"q_num_heads": Q_HEADS, "kv_num_heads": KV_HEADS}  # what the ops must be told about 3-D inputs

# (layer, Q, K, V) -> Y, all [batch, rows, heads * HEAD_SIZE]: the projections as they are, heads side by side
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, Q_HEADS * HEAD_SIZE, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD_SIZE, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD_SIZE, bias=False)
        self.out = nn.Linear(Q_HEADS * HEAD_SIZE, HIDDEN, bias=False)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        h = self.norm(x)
        x = x + self.out(attend(self.index, self.q(h), self.k(h), self.v(h)))
        return x + self.mlp(self.mlp_norm(x))


class TinyDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LONGEST, HIDDEN)
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        for weight in self.parameters():  # larger than usual, so that random weights have decided opinions on the next token
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.25)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [batch, rows, VOCABULARY] for tokens [batch, rows] at positions [batch, rows]."""
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, attend)
        return nn.functional.linear(self.norm(x), self.tokens.weight)


def attend_without_cache(window: int | None = None, softcap: float = 0.0, scale: float | None = None) -> Attend:
    """Causal attention over the whole sequence, written with torch alone: the independent answer. window counts keys."""

    def attend(_layer: int, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        Q, K, V = (x.unflatten(2, (-1, HEAD_SIZE)).transpose(1, 2) for x in (Q, K, V))
        rows = torch.arange(Q.shape[2])
        allowed = rows[None, :] <= rows[:, None]
        if window is not None:
            allowed &= rows[None, :] > rows[:, None] - window
        K, V = (x.repeat_interleave(Q_HEADS // KV_HEADS, 1) for x in (K, V))
        scores = Q @ K.transpose(-1, -2) * (HEAD_SIZE**-0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        Y = torch.softmax(scores.masked_fill(~allowed, float("-inf")), -1) @ V
        return Y.transpose(1, 2).flatten(2)

    return attend


def generate_from_scratch(model: TinyDecoder, prompts: list[list[int]], steps: int) -> Tensor:
    """The logits [prompts, steps, VOCABULARY] that greedy tokens are chosen from, everything computed again for every token."""
    attend, logits = attend_without_cache(), []
    for prompt in prompts:
        sequence = list(prompt)
        for _ in range(steps):
            logits.append(model(torch.tensor([sequence]), torch.arange(len(sequence))[None], attend)[0, -1])
            sequence.append(int(logits[-1].argmax()))
    return torch.stack(logits).unflatten(0, (len(prompts), steps))


def judge_decoder(comparison: Comparison, tokens: dict[str, Tensor], exported: OnnxModel) -> tuple[Verdict, Counter[str]]:
    """Shows how decoders with caches did, and requires what holds whatever their caches are. `tokens`: what each way chose.

    Returns the verdict, to go on with, and how many nodes of each kind the file has.
    """
    print("Compared with the same model computed again from scratch for every token, attention in plain torch:")
    comparison.show("logits", part="step")
    wanted = comparison.want.argmax(-1)
    print(f"\nTokens of the first prompt: {wanted[0].tolist()}")

    print(f"\n{exported.describe()}")
    verdict, nodes = Verdict(), exported.count()
    comparison.judge(verdict, "logits of every step as without a cache")
    verdict.require(all(torch.equal(chosen, wanted) for chosen in tokens.values()), "the same tokens each way")
    verdict.require(nodes["Attention"] == LAYERS, f"{LAYERS} Attention nodes, one for each layer")
    verdict.require(nodes["Softmax"] == 0, "no Softmax node: no attention was taken apart")
    return verdict, nodes
