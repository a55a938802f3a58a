"""The Python functions and the modules."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import Case, MhaCase, assert_close, assert_same_bits, make_inputs, make_mha_inputs
from torch import Tensor

import torch_onnx_attn
from torch_onnx_attn import reference

ops = torch.ops.onnx_attn


# ---------------------------------------------------------------------------------------------------------------------
# The Python functions


def test_attention_function(device: str) -> None:
    inputs = make_inputs(Case(past=3, mask="same"), device)
    plain = {name: inputs[name] for name in "QKV"}
    output = torch_onnx_attn.attention(**plain)
    assert isinstance(output, torch_onnx_attn.AttentionOutput)
    assert output[1:] == (None, None, None)
    assert_same_bits("Y", output.Y, ops.attention(**plain))
    output = torch_onnx_attn.attention(**inputs, is_causal=True)
    assert output.qk_matmul_output is None
    for actual, expected in zip(output[:3], ops.attention.kv(**inputs, is_causal=True), strict=True):
        assert_same_bits("output", actual, expected)
    output = torch_onnx_attn.attention(**plain, qk_matmul_output_mode=0)
    assert output.present_key is None and output.present_value is None
    assert_same_bits("qk_matmul_output", output.qk_matmul_output, ops.attention.qk(**plain, qk_matmul_output_mode=0)[1])
    for actual, expected in zip(
        torch_onnx_attn.attention(**inputs, qk_matmul_output_mode=3), ops.attention.kv_qk(**inputs, qk_matmul_output_mode=3), strict=True
    ):
        assert_same_bits("output", actual, expected)


def test_attention_function_replaces_the_one_of_torch(device: str) -> None:
    """Every argument of torch.onnx.ops.attention, by position and by name; where that one is right, the same numbers."""
    import inspect

    theirs = list(inspect.signature(torch.onnx.ops.attention).parameters.values())
    ours = inspect.signature(torch_onnx_attn.attention).parameters
    assert all(ours[parameter.name].kind == parameter.kind for parameter in theirs)
    positional = [parameter.name for parameter in theirs if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    inputs = make_inputs(Case(q_len=5, kv_len=9, past=3), device)
    arguments = (inputs["Q"], inputs["K"], inputs["V"], None, inputs["past_key"], inputs["past_value"])
    options = {"kv_num_heads": 0, "q_num_heads": 0, "scale": 0.2, "softcap": 0.0, "softmax_precision": None, "is_causal": False}
    expected = torch.onnx.ops.attention(*arguments, **options, qk_matmul_output_mode=0)
    actual = torch_onnx_attn.attention(*arguments, **options, qk_matmul_output_mode=0)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_mha_function(device: str) -> None:
    inputs = make_mha_inputs(MhaCase(past=3, bias=True, mask="keys"), device)
    plain = {name: inputs[name] for name in ("query", "key", "value")}
    output = torch_onnx_attn.mha(**plain, num_heads=2)
    assert isinstance(output, torch_onnx_attn.MultiHeadAttentionOutput) and output[1:] == (None, None, None)
    assert_same_bits("output", output.output, ops.mha(**plain, num_heads=2))
    output = torch_onnx_attn.mha(**plain, num_heads=2, output_qk=True)
    assert output.present_key is None and output.qk is not None
    for actual, expected in zip(
        torch_onnx_attn.mha(**inputs, num_heads=2, output_qk=True), ops.mha.kv_qk(**inputs, num_heads=2, output_qk=True), strict=True
    ):
        assert_same_bits("output", actual, expected)
    assert torch_onnx_attn.mha(**inputs, num_heads=2).qk is None
    shared = make_mha_inputs(MhaCase(past=3, capacity=20), device)
    output = torch_onnx_attn.mha(**shared, num_heads=2)
    assert output[1:] == (None, None, None)
    filled = shared["past_key"][:, :, 3:12]
    assert_same_bits("past_key", filled, shared["key"].unflatten(2, (2, 16)).transpose(1, 2).contiguous())
    # Without a past the length and the indirection mean nothing, as in ONNX Runtime.
    unused = {"past_sequence_length": torch.tensor([1]), "cache_indirection": torch.zeros(1, 2, 9, dtype=torch.int32)}
    assert_same_bits("output", torch_onnx_attn.mha(**plain, **unused, num_heads=2).output, ops.mha(**plain, num_heads=2))


def test_cache_functions(device: str) -> None:
    cache, update, index = (
        torch.randn(2, 3, 6, 4, device=device),
        torch.randn(2, 3, 2, 4, device=device),
        torch.tensor([5, 1], device=device),
    )
    present = torch_onnx_attn.tensor_scatter(cache, update, index, circular=True)
    assert_same_bits("present", present, reference.tensor_scatter(cache, update, index, circular=True))
    assert torch_onnx_attn.tensor_scatter_(cache, update, index, circular=True) is None
    assert_same_bits("cache", cache, present)
    mask = torch.rand(3, 2, 4, 9, device=device) > 0.5
    assert torch.equal(torch_onnx_attn.valid_kv_length(mask), reference.valid_kv_length(mask))
    step = make_inputs(Case(q_len=1, kv_len=1), device)
    caches = [{name: torch.zeros(2, 2, 4, 16, device=device) for name in ("key_cache", "value_cache")} for _ in range(2)]
    lengths = torch.tensor([0, 2], device=device)
    Y = torch_onnx_attn.attention_cached(**step, **caches[0], cache_lengths=lengths, softcap=3.0)
    assert_same_bits("Y", Y, ops.attention_cached(**step, **caches[1], cache_lengths=lengths, softcap=3.0))


def test_threads_may_call_at_once() -> None:
    """No state is shared between calls."""
    calls = [
        make_inputs(Case(q_len=rows, kv_len=200, head_size=64, dtype=dtype))
        for rows in (3, 40)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    expected = [ops.attention(**call, is_causal=True) for call in calls]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for actual, wanted in zip(pool.map(lambda call: ops.attention(**call, is_causal=True), calls), expected, strict=True):
                assert_same_bits("Y", actual, wanted)


# ---------------------------------------------------------------------------------------------------------------------
# nn


def test_attention_module(device: str) -> None:
    module = torch_onnx_attn.nn.Attention(64, 4, 2, is_causal=True, softcap=5.0, left_window_size=3, device=device)
    hidden = torch.randn(2, 7, 64, device=device)
    mask = torch.rand(7, 7, device=device) > 0.2
    Q, K, V = (projection(hidden).unflatten(2, (-1, 16)).transpose(1, 2) for projection in (module.q_proj, module.k_proj, module.v_proj))
    assert Q.shape[1] == 4 and K.shape[1] == 2
    exact = reference.attention(Q.detach(), K.detach(), V.detach(), mask, is_causal=True, softcap=5.0, left_window_size=3).Y
    expected = module.out_proj(exact.float().transpose(1, 2).flatten(2))
    with torch.no_grad():
        torch.testing.assert_close(module(hidden, mask), expected, atol=1e-5, rtol=1e-5)
        lengths = torch.tensor([7, 4], device=device)
        changed = hidden.clone()
        changed[1, 4:] = 100.0
        torch.testing.assert_close(module(changed, nonpad_kv_seqlen=lengths)[1, :4], module(hidden, nonpad_kv_seqlen=lengths)[1, :4])


def test_attention_module_with_caches(device: str) -> None:
    """Token by token over static caches, the module gives what it gives for the whole sequence."""
    module = torch_onnx_attn.nn.Attention(64, 4, 2, head_size=24, bias=False, is_causal=True, device=device).eval()
    hidden = torch.randn(2, 6, 64, device=device)
    caches = {name: torch.zeros(2, 2, 8, 24, device=device) for name in ("key_cache", "value_cache")}
    lengths = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.no_grad():
        whole = module(hidden)
        for token in range(6):
            step = module(hidden[:, token : token + 1], **caches, cache_lengths=lengths)
            torch.testing.assert_close(step, whole[:, token : token + 1], atol=1e-5, rtol=1e-5)
            lengths += 1
        with pytest.raises(ValueError, match="together"):
            module(hidden, key_cache=caches["key_cache"])
        with pytest.raises(ValueError, match="nonpad_kv_seqlen"):
            module(hidden, nonpad_kv_seqlen=lengths, **caches, cache_lengths=lengths)


def test_mha_module(device: str) -> None:
    module = torch_onnx_attn.nn.MultiHeadAttention(32, 4, device=device)
    assert module.in_proj_bias is not None
    torch.nn.init.normal_(module.in_proj_bias)
    query, key = torch.randn(2, 5, 32, device=device), torch.randn(2, 9, 32, device=device)
    mask = torch.rand(2, 9, device=device) > 0.3
    projected = [module.q_proj(query), module.k_proj(key), module.v_proj(key)]
    exact = reference.mha(*(x.detach() for x in projected), module.in_proj_bias.detach(), mask, num_heads=4).output
    with torch.no_grad():
        assert_close("output", module(query, key, key_padding_mask=mask), module.out_proj(exact.float()).double(), 1e-4)
        torch.testing.assert_close(module(query), module(query, query, query))
    assert torch_onnx_attn.nn.MultiHeadAttention(32, 4, bias=False).in_proj_bias is None


def test_mha_module_is_the_one_of_torch(device: str) -> None:
    """The same weights in torch.nn.MultiheadAttention give the same numbers; its padding mask says True for *drop*."""
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True, device=device)
    ours = torch_onnx_attn.nn.MultiHeadAttention(32, 4, device=device)
    with torch.no_grad():
        theirs.in_proj_bias.normal_()
        for projection, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), theirs.in_proj_weight.chunk(3), strict=True):
            projection.weight.copy_(weight)
        ours.in_proj_bias.copy_(theirs.in_proj_bias)
        ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
        query = torch.randn(2, 6, 32, device=device)
        drop = torch.tensor([[False] * 6, [False] * 4 + [True] * 2], device=device)
        expected = theirs(query, query, query, key_padding_mask=drop, need_weights=False)[0]
        torch.testing.assert_close(ours(query, key_padding_mask=~drop), expected, atol=1e-5, rtol=1e-5)


def test_modules_refuse_sizes_that_do_not_fit() -> None:
    nn = torch_onnx_attn.nn
    with pytest.raises(ValueError, match=r"num_kv_heads: is 3.*4"):
        nn.Attention(64, 4, 3)
    with pytest.raises(ValueError, match=r"embed_dim: is 65.*4"):
        nn.Attention(65, 4)
    with pytest.raises(ValueError, match=r"embed_dim: is 33.*4"):
        nn.MultiHeadAttention(33, 4)
    hidden = torch.randn(2, 5, 64)
    for wrong in (hidden[..., :63], hidden[0], [[1.0]], None):
        with pytest.raises(ValueError, match=r"^hidden: is .*must be a tensor \[batch, rows, embed_dim = 64\]"):
            nn.Attention(64, 4)(wrong)
        with pytest.raises(ValueError, match=r"^query: is .*must be a tensor \[batch, rows, embed_dim = 64\]"):
            nn.MultiHeadAttention(64, 4)(wrong)
    for key, value, name in ((hidden[..., :63], None, "key"), (hidden, "value", "value")):
        with pytest.raises(ValueError, match=rf"^{name}: is .*must be a tensor"):
            nn.MultiHeadAttention(64, 4)(hidden, key, value)


@pytest.mark.parametrize("autocast", [False, True])
def test_modules_compile(autocast: bool, device: str) -> None:
    attention = torch_onnx_attn.nn.Attention(64, 4, 2, is_causal=True, device=device).eval()
    mha = torch_onnx_attn.nn.MultiHeadAttention(64, 4, device=device).eval()
    hidden = torch.randn(2, 7, 64, device=device)

    def function(hidden: Tensor) -> Tensor:
        return mha(attention(hidden))

    torch._dynamo.reset()
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(hidden)
        torch.testing.assert_close(compiled, function(hidden))
        assert compiled.dtype == (torch.bfloat16 if autocast else torch.float32)
