"""The planner, a pure function: what each call would run, here and on a GPU that is only described."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ways import Through

import torch_onnx_attn
from torch_onnx_attn import CPU, H200, Machine, explain, kernel

attention = torch.ops.onnx_attn.attention


def qkv(batch=2, q_heads=4, kv_heads=4, q_len=8, kv_len=8, head_size=64, dtype=torch.float16):
    shapes = (q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return [torch.randn(batch, heads, rows, head_size).to(dtype) for heads, rows in shapes]


def test_cpu_tensors_take_the_cpu_kernel():
    assert explain(attention.default, *qkv()) == explain(attention.default, *qkv(), machine=CPU)
    assert explain(attention.default, *qkv()).kernel == "cpu"


@pytest.mark.parametrize("machine", [H200, Machine(True, 80, 108, 166912)])
def test_float64_takes_the_general_kernel(machine):
    assert explain(attention.default, *qkv(dtype=torch.float64), machine=machine).kernel == "general"
    plan = explain(attention.qk, *qkv(dtype=torch.float64), qk_matmul_output_mode=0, machine=machine)
    assert plan.kernel == "general" and not plan.separate_scores and "float64" in plan.refusals["decode"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_a_score_output_does_not_change_the_kernel_of_the_call(dtype, mode):
    inputs = qkv(q_len=300, kv_len=300, dtype=dtype)
    without = explain(attention.default, *inputs, machine=H200)
    plan = explain(attention.qk, *inputs, qk_matmul_output_mode=mode, machine=H200)
    assert plan.kernel == without.kernel == ("forward_float32" if dtype == torch.float32 else "forward_sm90")
    assert not without.separate_scores
    with kernel("general"):
        assert not explain(attention.qk, *inputs, qk_matmul_output_mode=mode, machine=H200).separate_scores


SEPARATE = [
    (0, {}, False),
    (0, {"is_causal": 1}, True),  # keys that no row sees have products too
    (0, {"softcap": 30.0}, True),
    (1, {"softcap": 30.0}, False),
    (2, {"softcap": 30.0, "is_causal": 1}, False),
    (2, {"attn_mask": torch.zeros(300, 304).half()}, True),
    (3, {}, True),
]


@pytest.mark.parametrize(("mode", "attributes", "separate"), SEPARATE, ids=str)
def test_scores_that_enter_the_softmax_leave_while_y_is_made(mode, attributes, separate):
    inputs = qkv(q_len=300, kv_len=304)
    plan = explain(attention.qk, *inputs, **attributes, qk_matmul_output_mode=mode, machine=H200)
    assert (plan.kernel, plan.separate_scores) == ("forward_sm90", separate)


@pytest.mark.parametrize(("kv_len", "head_size"), [(301, 64), (304, 136)])
def test_scores_in_unaligned_rows_or_of_large_heads_are_written_separately(kv_len, head_size):
    plan = explain(attention.qk, *qkv(q_len=300, kv_len=kv_len, head_size=head_size), qk_matmul_output_mode=2, machine=H200)
    assert (plan.kernel, plan.separate_scores) == ("forward_sm90", True)


def test_weights_are_made_from_the_log_sum_exp_in_the_workspace():
    inputs = qkv(q_len=8)
    plans = [explain(attention.qk, *inputs, qk_matmul_output_mode=mode, machine=H200) for mode in (2, 3)]
    assert plans[1].workspace_bytes - plans[0].workspace_bytes >= 2 * 4 * 8 * 4


def test_float32_is_split_in_the_workspace():
    plan = explain(attention.default, *qkv(q_len=100, kv_len=100, dtype=torch.float32), machine=H200)
    assert plan.kernel == "forward_float32" and plan.workspace_bytes >= 2 * (2 * 4 * 100 * 64 * 4)
    large = qkv(q_len=100, kv_len=100, head_size=200, dtype=torch.float32)
    assert explain(attention.default, *large, machine=H200).kernel == "forward_float32"
    plan = explain(attention.default, *large, machine=Machine(True, 86, 84, 101376))
    assert plan.kernel == "general" and "shared memory" in plan.refusals["forward_float32"]


def test_a_scores_output_of_biased_keys_stores_them():
    x, bias = torch.randn(2, 100, 256).half(), torch.randn(768).half()
    plan = explain(torch.ops.onnx_attn.mha.qk, x, x, x, bias, num_heads=4, output_qk=True, machine=H200)
    assert plan.separate_scores and plan.separate_bias


def test_an_empty_output_runs_nothing_but_still_appends():
    Q, K, V = qkv(q_len=0)
    past = torch.randn(2, 4, 3, 64).half()
    assert explain(attention.default, Q, K, V, machine=H200).kernel == "nothing"
    plan = explain(attention.kv, Q, K, V, past_key=past, past_value=past, machine=H200)
    assert plan.kernel == "nothing" and plan.separate_append


def test_the_default_call_needs_no_workspace_on_the_cpu():
    assert explain(attention.default, *qkv()).workspace_bytes == 0


def test_nothing_is_written():
    Q, K, V = qkv(q_len=1, kv_len=1)
    key_cache, value_cache = torch.zeros(2, 4, 5, 64).half(), torch.zeros(2, 4, 5, 64).half()
    explain(torch_onnx_attn.attention_cached, Q, K, V, key_cache, value_cache, torch.tensor([0, 1]))
    assert not key_cache.any() and not value_cache.any()
    explained_scatter = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="no attention call"):
        explain(torch_onnx_attn.tensor_scatter_, explained_scatter, torch.ones(2, 1), axis=1)
    assert not explained_scatter.any()


@pytest.mark.parametrize("context", [contextlib.nullcontext, Through])
def test_no_write_is_counted(context):
    """A backward pass that saved a cache still finds it as it was."""
    Q, K, V = qkv(q_len=1, kv_len=1)
    caches = torch.ones(2, 4, 5, 64).half(), torch.ones(2, 4, 5, 64).half()
    weight = torch.ones(64).half().requires_grad_()
    products = sum((cache * weight).sum() for cache in caches)
    with context():
        explain(torch_onnx_attn.attention_cached, Q, K, V, *caches, torch.tensor([0, 1]))
        x = torch.randn(2, 1, 256).half()
        length = torch.tensor([2])
        explain(torch.ops.onnx_attn.mha.shared, x, x, x, past_key=caches[0], past_value=caches[1], past_sequence_length=length, num_heads=4)
        with pytest.raises(RuntimeError, match="no attention call"):
            explain(torch_onnx_attn.tensor_scatter_, caches[0], K)
        assert [cache._version for cache in caches] == [0, 0]
        products.backward()
        assert bool((weight.grad == 2 * 2 * 4 * 5).all())
        torch_onnx_attn.attention_cached(Q, K, V, *caches, torch.tensor([0, 1]))
    assert [cache._version for cache in caches] == [1, 1]  # calls count again


def test_explain_inside_explain():
    Q, K, V = qkv(q_len=1, kv_len=1)
    caches = torch.zeros(2, 4, 5, 64).half(), torch.zeros(2, 4, 5, 64).half()
    inner = []

    def call(first, refused=False):
        if first:
            torch_onnx_attn.attention_cached(Q, K, V, *caches, torch.tensor([0, 1]))
        inner.append(explain(attention.default, *qkv(dtype=torch.float32), machine=CPU))
        if refused:
            with pytest.raises(RuntimeError, match="V: has 3 heads"):
                explain(attention.default, Q, K, V[:, :3])
            with pytest.raises(RuntimeError, match="no attention call"):
                explain(lambda: None)
        if not first:
            torch_onnx_attn.attention_cached(Q, K, V, *caches, torch.tensor([0, 1]))

    for first, refused in ((True, False), (False, False), (False, True), (True, True)):
        assert explain(call, first, refused, machine=H200).kernel == "decode"
        assert inner.pop().kernel == "cpu"
    assert not any(cache.any() or cache._version for cache in caches)
    torch_onnx_attn.attention_cached(Q, K, V, *caches, torch.tensor([0, 1]))
    assert all(cache.any() for cache in caches)


def test_recording_is_of_one_thread():
    Q, K, V = qkv()

    def call():
        attention.default(Q, K, V)
        with ThreadPoolExecutor(1) as pool:
            assert bool(pool.submit(attention.default, Q, K, torch.ones_like(V)).result().isclose(torch.ones(()).half()).all())

    assert explain(call, machine=H200).kernel != "cpu"


def test_an_illegal_call_raises_and_recording_ends():
    Q, K, V = qkv()
    with pytest.raises(RuntimeError, match="V: has 3 heads"):
        explain(attention.default, Q, K, V[:, :3])
    expected = torch.nn.functional.scaled_dot_product_attention(Q.float(), K.float(), V.float())
    torch.testing.assert_close(attention.default(Q, K, V).float(), expected, atol=2e-3, rtol=0)


def test_a_function_without_a_call_has_no_plan():
    with pytest.raises(RuntimeError, match="no attention call"):
        explain(lambda: None)


# ------------------------------------------------------------------------------------------------ choosing a kernel


def test_a_forced_kernel_is_taken_and_the_others_say_why_not():
    with kernel("general"):
        plan = explain(attention.default, *qkv(), machine=H200)
    assert plan.kernel == "general" and set(plan.refusals.values()) == {"another kernel is forced"}


def test_a_forbidden_kernel_is_not_taken():
    chosen = explain(attention.default, *qkv(), machine=H200).kernel
    assert chosen != "general"
    with kernel(forbid=(chosen,)):
        plan = explain(attention.default, *qkv(), machine=H200)
    assert plan.kernel != chosen and plan.refusals[chosen] == "it is forbidden"


def test_choices_nest_and_end():
    default = explain(attention.default, *qkv(), machine=H200).kernel
    with kernel("general"):
        with kernel(forbid=("general",)):
            assert explain(attention.default, *qkv(), machine=H200).kernel == default
        assert explain(attention.default, *qkv(), machine=H200).kernel == "general"
    assert explain(attention.default, *qkv(), machine=H200).kernel == default


NAMES = "decode, forward_short, forward_sm90, forward_sm80, forward_float32 and general"


def test_an_unknown_kernel_is_an_error_that_names_it():
    for name in ("fastest", "général", "\u0167eneral"):  # the last letter's lowest byte is that of a g
        with pytest.raises(RuntimeError, match=f"^kernel: is '{name}'; there are {NAMES}$"), kernel(name):
            pass


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"name": 3}, "name: is 3, must be the name of a kernel"),
        ({"name": ""}, "name: is '', must be the name of a kernel"),
        ({"name": "decode,general"}, "name: is 'decode,general', must be the name of a kernel"),
        ({"name": " decode"}, "name: is ' decode', must be the name of a kernel"),
        ({"forbid": ("decode ",)}, r"forbid: is \('decode ',\), must be a tuple of names"),
        ({"name": "-decode"}, "name: is '-decode', must be the name of a kernel"),
        ({"forbid": 5}, "forbid: is 5, must be a tuple of names"),
        ({"forbid": ("-decode",)}, r"forbid: is \('-decode',\), must be a tuple of names"),
        ({"forbid": "decode"}, "forbid: is 'decode', must be a tuple of names"),
        ({"forbid": ("decode", 3)}, r"forbid: is \('decode', 3\), must be a tuple of names"),
        ({"name": "general", "forbid": ("general",)}, "forbid: has 'general', which name forces"),
    ],
)
def test_choices_that_are_none_are_named(choice, message):
    with pytest.raises(ValueError, match=f"^{message}"), kernel(**choice):
        pass


def test_explain_names_what_it_cannot_use():
    for op in ("attention", None):
        with pytest.raises(ValueError, match=f"^op: is {op!r}, must be an op of torch.ops.onnx_attn"):
            explain(op, *qkv())
    with pytest.raises(ValueError, match=r"^machine: is 'h200', must be a Machine"):
        explain(attention.default, *qkv(), machine="h200")


def test_a_forced_kernel_that_cannot_run_says_why():
    with kernel("decode"), pytest.raises(RuntimeError, match="float16"):
        explain(attention.default, *qkv(dtype=torch.float64), machine=H200)


def test_the_environment_chooses_for_the_process():
    program = (
        "import torch, torch_onnx_attn as t; Q = torch.randn(1, 2, 8, 64).half();"
        "print(t.explain(torch.ops.onnx_attn.attention.default, Q, Q, Q, machine=t.H200).kernel)"
    )

    def run(value):
        environment = {**os.environ, "TORCH_ONNX_ATTN_KERNEL": value}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    assert run("general").stdout.strip() == "general"
    assert run("-decode, -forward_short ,-forward_sm90,  -forward_sm80,-forward_float32,").stdout.strip() == "general"
    for value, message in {
        "nonsense": f"is 'nonsense'; there are {NAMES}",
        "-decode,nonsense": f"is 'nonsense'; there are {NAMES}",
        "decode,general": "forces 'decode' and 'general'; only one can be forced",
        "-general, general": "forces 'general', which it also forbids",
    }.items():
        refused = run(value)
        assert refused.returncode != 0 and f"RuntimeError: TORCH_ONNX_ATTN_KERNEL: {message}\n" in refused.stderr


def test_the_log_shows_plans():
    program = "import torch, torch_onnx_attn; Q = torch.randn(1, 2, 8, 64); torch.ops.onnx_attn.attention(Q, Q, Q)"
    environment = {**os.environ, "TORCH_ONNX_ATTN_LOG": "1"}
    logged = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert logged.returncode == 0 and '"kernel": "cpu"' in logged.stderr


def test_a_projection_bias_is_stored_only_for_a_kernel_that_cannot_add_it():
    def plan_of(q_len):
        x, bias = torch.randn(2, q_len, 256).half(), torch.randn(768).half()
        return explain(torch.ops.onnx_attn.mha.default, x, x, x, bias, num_heads=4, machine=H200)

    few_rows = plan_of(8)
    assert few_rows.kernel == "decode" and few_rows.separate_bias
    assert few_rows.workspace_bytes >= 2 * 2 * 8 * 256 * 2
    with kernel("forward_sm80"):
        assert not plan_of(128).separate_bias
    with kernel("general"):
        assert not plan_of(8).separate_bias and plan_of(8).workspace_bytes == 0


@pytest.mark.parametrize("machine, expected", [(H200, "forward_sm90"), (Machine(True, 80, 108, 166912), "forward_sm80")])
def test_long_calls_take_the_tensor_cores_of_their_machine(machine, expected):
    plan = explain(attention.default, *qkv(q_len=300, kv_len=300), is_causal=True, machine=machine)
    refusing = {"decode", "forward_short"} | ({"forward_sm90"} if expected == "forward_sm80" else set())
    assert plan.kernel == expected and set(plan.refusals) == refusing


def test_a_decode_step_appends_by_itself():
    Q, K, V = qkv(q_len=1, kv_len=1)
    caches = torch.zeros(2, 4, 256, 64).half(), torch.zeros(2, 4, 256, 64).half()
    plan = explain(torch_onnx_attn.attention_cached, Q, K, V, *caches, torch.tensor([0, 1]), machine=H200)
    assert plan.kernel == "decode" and not plan.separate_append
    with kernel("general"):
        assert explain(torch_onnx_attn.attention_cached, Q, K, V, *caches, torch.tensor([0, 1]), machine=H200).separate_append
