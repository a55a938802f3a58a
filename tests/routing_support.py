"""What the tests of route_attention share: names, inputs, a model that calls torch's attention both ways, and what a graph calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import torch_onnx_attn  # noqa: F401 (registers the ops)

OURS = torch.ops.onnx_attn.attention
SDPA, MHA = "scaled_dot_product_attention", "multi_head_attention_forward"
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def qkv(*batch: int, rows: int = 5, keys: int = 7, heads: int = 4, kv_heads: int = 4, v_size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*batch, heads, rows, 8), torch.randn(*batch, kv_heads, keys, 8), torch.randn(*batch, kv_heads, keys, v_size)


def mask(*shape: int) -> Tensor:
    """Bool, with the first key allowed: SDPA is not pinned on rows without any key."""
    keep = torch.rand(*shape) < 0.6
    keep[..., 0] = True
    return keep


def to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


Q, K, V = qkv(2)


class Model(nn.Module):
    """Both kinds of calls, with weights that want gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.mha = nn.Linear(16, 16), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k = (y.unflatten(2, (4, 4)).transpose(1, 2) for y in (self.query(x), x))
        y = functional.scaled_dot_product_attention(q, k, k, keep[:, None, None]).transpose(1, 2).flatten(2)
        return y + self.mha(y, y, y, key_padding_mask=~keep, need_weights=False)[0]


def model_inputs(batch: int = 2, rows: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, rows, 16), mask(batch, rows)


def attention_calls(graph: torch.fx.Graph) -> list[Any]:
    names = ("attention", "scaled_dot_product", "multi_head", "_native_multi")
    return [node.target for node in graph.nodes if node.op == "call_function" and any(name in str(node.target) for name in names)]
