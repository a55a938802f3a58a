"""Run by check_wheel.py with the Python of a fresh environment: the installed package, its ops against float64, its error, its export."""

from pathlib import Path

import torch

import torch_onnx_attn
from torch_onnx_attn import reference

ops = torch.ops.onnx_attn

installed = Path(torch_onnx_attn.__file__).resolve()
assert "site-packages" in installed.parts, f"not the wheel, but {installed}"
assert (installed.parent / "py.typed").exists()
torch.manual_seed(0)

Q, K, V = torch.randn(2, 8, 5, 32), torch.randn(2, 2, 9, 32), torch.randn(2, 2, 9, 16)
lengths = torch.tensor([9, 6])
Y = ops.attention(Q, K, V, nonpad_kv_seqlen=lengths, is_causal=True, softcap=5.0)
expected = reference.attention(Q, K, V, nonpad_kv_seqlen=lengths, is_causal=True, softcap=5.0)
torch.testing.assert_close(Y.double(), expected[0], atol=2e-6, rtol=2e-6)

key_cache, value_cache = torch.zeros(2, 2, 12, 32), torch.zeros(2, 2, 12, 16)
Y = ops.attention_cached(Q, K[:, :, :5], V[:, :, :5], key_cache, value_cache, torch.tensor([0, 0]), is_causal=True)
expected = reference.attention(Q, K[:, :, :5], V[:, :, :5], is_causal=True)
torch.testing.assert_close(Y.double(), expected[0], atol=2e-6, rtol=2e-6)

query = torch.randn(2, 6, 64)
output = ops.mha(query, query, query, num_heads=4)
heads = query.unflatten(2, (4, 16)).transpose(1, 2)
expected = torch.nn.functional.scaled_dot_product_attention(heads.double(), heads.double(), heads.double())
torch.testing.assert_close(output.double(), expected.transpose(1, 2).flatten(2), atol=2e-6, rtol=2e-6)

try:
    ops.attention(Q, K[:, :1].repeat(1, 3, 1, 1), V)
except RuntimeError as error:
    assert "heads" in str(error), error
else:
    raise AssertionError("an illegal call was taken")


class Model(torch.nn.Module):
    def forward(self, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
        return ops.attention(Q, K, V, is_causal=True)


program = torch.export.export(Model(), (Q, K, V))
assert sum("onnx_attn.attention" in str(node.target) for node in program.graph.nodes) == 1
torch.testing.assert_close(program.module()(Q, K, V), Model()(Q, K, V), atol=0, rtol=0)
print(f"torch {torch.__version__}: {torch_onnx_attn.build_info()}")
