"""Beside torch's own context_parallel() and Hugging Face's tensor-parallel plans. Run inside a world."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from cases import Source
from distributed_world import Ranks
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from torch_onnx_attn.distributed import ContextParallelWarning, context_parallel_attention, shard_sequence


def warned(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(item.message) for item in caught if issubclass(item.category, ContextParallelWarning)]


def check_warning(ranks: Ranks) -> None:
    """Inside torch's context an op warns in any gradient mode; before, after, and in our own function it does not."""
    torch._dynamo.reset()
    mesh, source = ranks.mesh(), Source("warning", ranks.device)
    Q, K, V = (source.normal(1, 4, 16, 8) for _ in range(3))
    ops = torch.ops.onnx_attn
    expected = shard_sequence(ops.attention(Q, K, V, is_causal=True), mesh, order="zigzag")
    assert not warned(lambda: ops.attention(Q, K, V))
    with context_parallel(mesh, buffers=[Q, K, V], buffer_seq_dims=[2, 2, 2]):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                (message,) = warned(lambda: ops.attention(Q, K, V, is_causal=True))
                assert "onnx_attn.attention" in message and "context_parallel_attention" in message
        rows = Q.transpose(1, 2).flatten(2)
        assert len(warned(lambda: ops.mha(rows, rows, rows, num_heads=4))) == 1
        assert len(warned(lambda: ops.attention.lse(Q, K, V, return_lse=True))) == 1
        options: dict[str, Any] = {"mesh": mesh, "method": "ring", "order": "zigzag", "is_causal": True}
        assert not warned(lambda: context_parallel_attention(Q, K, V, **options))
        torch.testing.assert_close(context_parallel_attention(Q, K, V, **options), expected)  # torch deals the rows out like this
        torch.testing.assert_close(torch.compile(context_parallel_attention, backend="aot_eager")(Q, K, V, **options), expected)
    assert not warned(lambda: ops.attention(Q, K, V))


def check_hugging_face(ranks: Ranks, folder: str | None) -> None:
    """A Llama with this package's attention, split by transformers' own plan (loaded from `folder`) or by torch's parallelize_module.

    The logits are those of one process, padding included, and every call of the op is on this rank's heads.
    """
    import transformers

    from torch_onnx_attn.integrations.transformers import enable

    transformers.utils.logging.set_verbosity_error()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
    torch.manual_seed(7)
    whole = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(tokens)
    padding[0, :3] = 0
    with torch.no_grad():
        expected = whole(tokens, attention_mask=padding).logits
        if folder is None:
            model = enable(whole)
            plan: dict[str, Any] = {}
            for layer in range(2):
                plan |= {f"model.layers.{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
                plan[f"model.layers.{layer}.self_attn.o_proj"] = RowwiseParallel()
            parallelize_module(model, ranks.mesh(), plan)
        else:
            if ranks.rank == 0:
                whole.save_pretrained(folder)
            torch.distributed.barrier()
            model = enable(transformers.LlamaForCausalLM.from_pretrained(folder, **_tensor_parallel(ranks)).eval())
        with QueryShapes() as mode:
            found = model(tokens, attention_mask=padding).logits
    assert mode.seen == [torch.Size((2, 8 // ranks.size, 9, 4))] * 2, mode.seen
    kept = padding.bool()
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-4, atol=1e-5)


def _tensor_parallel(ranks: Ranks) -> dict[str, Any]:
    """The model's own plan over all ranks, as this transformers wants to be asked; it reads the launcher's environment."""
    os.environ |= {"RANK": str(ranks.rank), "LOCAL_RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)}
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return {"tp_plan": "auto"}
    return {"distributed_config": DistributedConfig(tp_size=ranks.size, tp_plan="auto")}


class QueryShapes(TorchDispatchMode):
    """The shape of Q in every call of an attention op."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "onnx_attn":
            self.seen.append((args[0] if args else kwargs["Q"]).shape)
        return func(*args, **(kwargs or {}))
