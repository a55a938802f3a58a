"""Ops on DTensors and modules under torch's own parallel wrappers, against one process. Run inside a world."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from cases import Case, MhaCase, Source, call_attention, call_mha, compare_attention, compare_mha, make_inputs, make_mha_inputs
from distributed_world import Ranks, message
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_onnx_attn
import torch_onnx_attn.distributed
from torch_onnx_attn import reference

Axes = dict[str, int]
CACHES = ("past_key", "past_value")


def distribute(inputs: dict[str, Tensor], axes: Axes, mesh: DeviceMesh) -> dict[str, DTensor]:
    """Each tensor split along its axis, whole on every rank without one."""
    return {name: distribute_tensor(x, mesh, [Shard(axes[name]) if name in axes else Replicate()]) for name, x in inputs.items()}


def gathered(outputs: dict[str, DTensor]) -> dict[str, Tensor]:
    return {name: output.full_tensor() for name, output in outputs.items()}


def assert_placements(outputs: dict[str, DTensor], expected: dict[str, Placement]) -> None:
    found = {name: output.placements[0] for name, output in outputs.items()}
    assert found == {name: expected[name] for name in outputs}, found


def quietly(call: Any) -> Any:
    """The call's result; fails if anything was communicated."""
    with CommDebugMode() as communication:
        result = call()
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Operators


def check_attention(ranks: Ranks, size: int, case: Case, way: str) -> None:
    mesh, inputs = ranks.mesh(size), make_inputs(case, ranks.device)
    heads_axis = 2 if case.layout == "3d" else 1
    shares_keys = case.kv_heads == 1
    whole = dict.fromkeys(("Y", "present_key", "present_value", "qk_matmul_output", "lse"), Replicate())
    expected: dict[str, Placement] = dict(whole)
    axes: Axes = {}
    if way == "batch":
        axes = dict.fromkeys(("Q", "K", "V", "nonpad_kv_seqlen", *CACHES), 0)
        expected = dict.fromkeys(whole, Shard(0))
    elif way == "heads":
        keys = {} if shares_keys else {"K": heads_axis, "V": heads_axis, "past_key": 1, "past_value": 1}
        axes = {"Q": heads_axis} | keys
        kv: Placement = Replicate() if shares_keys else Shard(1)
        others: dict[str, Placement] = {"present_key": kv, "present_value": kv, "qk_matmul_output": Shard(1), "lse": Shard(1)}
        expected = {"Y": Shard(heads_axis), **others}
    sharded = distribute(inputs, axes, mesh)
    outputs = quietly(lambda: call_attention(sharded, case.qk_matmul_output_mode, case.lse, **case.attributes()))
    assert_placements(outputs, expected)
    compare_attention(inputs, gathered(outputs), case.qk_matmul_output_mode, **case.attributes())


def check_mha(ranks: Ranks, size: int, case: MhaCase, way: str) -> None:
    mesh, inputs = ranks.mesh(size), make_mha_inputs(case, ranks.device)
    names = ("query", "key", "value", *CACHES)
    if way == "batch":
        axes, output, present = dict.fromkeys(names, 0), Shard(0), Shard(0)
    else:
        axes = {"query": 2} | dict.fromkeys(("key", "value"), 1 if case.layout == "bnsh" else 2) | dict.fromkeys(CACHES, 1)
        output, present = Shard(2), Shard(1)
    sharded = distribute(inputs, axes, mesh)
    outputs = quietly(lambda: call_mha(sharded, case.qk, **case.attributes()))
    assert_placements(outputs, {"output": output, "present_key": present, "present_value": present, "qk": present})
    compare_mha(inputs, gathered(outputs), **case.attributes())


def check_shared_functional(ranks: Ranks, size: int, way: str) -> None:
    """What mha.shared means without writing."""
    case = MhaCase(batch=4, num_heads=8, q_len=1, kv_len=1, past=5, capacity=9)
    inputs = make_mha_inputs(case, ranks.device)
    axes = dict.fromkeys(("query", "key", "value"), 0 if way == "batch" else 2) | dict.fromkeys(CACHES, 0 if way == "batch" else 1)
    sharded = distribute(inputs, axes, ranks.mesh(size))
    results = quietly(lambda: torch.ops.onnx_attn.mha.shared_functional(**sharded, num_heads=8))
    outputs = dict(zip(("output", "present_key", "present_value"), results, strict=True))
    compare_mha(inputs, gathered(outputs), num_heads=8)


def check_backward(ranks: Ranks) -> None:
    """A backward pass through DTensors is refused with the package's own message."""
    Q = distribute_tensor(torch.randn(2, 4, 5, 8, device=ranks.device), ranks.mesh(), [Shard(1)]).requires_grad_()
    Y = torch.ops.onnx_attn.attention(Q, Q, Q)
    assert "onnx_attn is forward only" in message(lambda: Y.sum().backward())


def check_cached(ranks: Ranks, size: int, way: str, kv_heads: int) -> None:
    """attention_cached writes into the parts that the ranks hold."""
    mesh, source = ranks.mesh(size), Source(("cached", way, kv_heads), ranks.device)
    Q, K, V = (source.normal(4, heads, 3, 8) for heads in (8, kv_heads, kv_heads))
    caches = [source.normal(4, kv_heads, 16, 8) for _ in range(2)]
    lengths = torch.tensor([0, 5, 9, 13], device=ranks.device)
    expected = reference.attention_cached(Q, K, V, *caches, lengths, is_causal=True)
    inputs = {"Q": Q, "K": K, "V": V, "key_cache": caches[0], "value_cache": caches[1], "cache_lengths": lengths}
    keys = dict.fromkeys(("K", "V", "key_cache", "value_cache"), 1) if kv_heads > 1 else {}
    axes = dict.fromkeys(inputs, 0) if way == "batch" else {"Q": 1} | keys
    sharded = distribute(inputs, axes, mesh)
    Y = quietly(lambda: torch.ops.onnx_attn.attention_cached(**sharded, is_causal=True))
    assert Y.placements == (Shard(0 if way == "batch" else 1),)
    torch.testing.assert_close(Y.full_tensor().double(), expected.Y, rtol=1e-5, atol=1e-5)
    assert torch.equal(sharded["key_cache"].full_tensor(), expected.key_cache)
    assert torch.equal(sharded["value_cache"].full_tensor(), expected.value_cache)


def check_scatter(ranks: Ranks, size: int, axis: int, sharded_axis: int) -> None:
    mesh, source = ranks.mesh(size), Source(("scatter", axis, sharded_axis), ranks.device)
    cache = source.normal(4, 4, 8, 4)
    update = source.normal(4, *(3 if dimension == axis else cache.shape[dimension] for dimension in range(1, 4)))
    start = torch.tensor([0, 1, 1, 0], device=ranks.device)
    expected = reference.tensor_scatter(cache, update, start, axis=axis)
    inputs = {"past_cache": cache, "update": update, "write_indices": start}
    axes = {"past_cache": sharded_axis, "update": sharded_axis} | ({"write_indices": 0} if sharded_axis == 0 else {})
    sharded = distribute(inputs, axes, mesh)
    present = quietly(lambda: torch.ops.onnx_attn.tensor_scatter(**sharded, axis=axis))
    assert present.placements == (Shard(sharded_axis),) and torch.equal(present.full_tensor(), expected)
    written = sharded["past_cache"].clone()
    quietly(lambda: torch.ops.onnx_attn.tensor_scatter_(written, sharded["update"], sharded["write_indices"], axis=axis))
    assert torch.equal(written.full_tensor(), expected)
    assert torch.equal(sharded["past_cache"].full_tensor(), cache)


def check_valid_kv_length(ranks: Ranks, size: int) -> None:
    mask = Source("valid", ranks.device).uniform(4, 2, 3, 9).to(ranks.device) < 0.3
    expected = reference.valid_kv_length(mask)
    for axis, placement in ((0, Shard(0)), (1, Replicate()), (3, Replicate())):
        found = torch.ops.onnx_attn.valid_kv_length(distribute_tensor(mask, ranks.mesh(size), [Shard(axis)]))
        assert found.placements == (placement,) and torch.equal(found.full_tensor(), expected)


def check_moved(ranks: Ranks, size: int) -> None:
    """Placements that no rule splits along are gathered, and the result is right; uneven batches and sharded masks too."""
    mesh = ranks.mesh(size)
    case = Case(batch=3, q_heads=8, kv_heads=4, q_len=8, kv_len=8, mask="bool", is_causal=True)
    inputs = make_inputs(case, ranks.device)
    for axes in (
        {"K": 2, "V": 2},
        {"Q": 2, "K": 1, "V": 1},
        {"Q": 3, "attn_mask": 3},
        {"Q": 0, "K": 0, "V": 0, "attn_mask": 0},
        {"Q": 1, "K": 1, "V": 1, "attn_mask": 1},
        {"Q": 1},
        {"K": 0},
    ):
        compare_attention(inputs, gathered(call_attention(distribute(inputs, axes, mesh), **case.attributes())), **case.attributes())
    three = Case(batch=1, q_heads=6, kv_heads=3, layout="3d")  # 3 heads on 2 or 4 ranks
    inputs = make_inputs(three, ranks.device)
    outputs = call_attention(distribute(inputs, {"Q": 2, "K": 2, "V": 2}, mesh), **three.attributes())
    compare_attention(inputs, gathered(outputs), **three.attributes())


def check_flags_do_not_stick(ranks: Ranks) -> None:
    """A call without causality first: nothing of its placements may be remembered for the causal one."""
    mesh = ranks.mesh()
    base = Case(q_heads=4, kv_heads=4, q_len=8, kv_len=8)
    for axes in ({"Q": 2}, {"Q": 1, "K": 1, "V": 1}):
        for case in (base, dataclasses.replace(base, is_causal=True), dataclasses.replace(base, softcap=1.0, scale=2.0), base):
            inputs = make_inputs(case, ranks.device)
            compare_attention(inputs, gathered(call_attention(distribute(inputs, axes, mesh), **case.attributes())), **case.attributes())


def check_two_dimensions(ranks: Ranks) -> None:
    """Batch over one mesh dimension and heads over the other; heads over both."""
    mesh = init_device_mesh(ranks.device, (2, 2), mesh_dim_names=("data", "model"))
    case = Case(batch=3, q_heads=8, kv_heads=4, layout="3d", is_causal=True, qk_matmul_output_mode=2, past=4)
    inputs = make_inputs(case, ranks.device)
    for first, y in ((Shard(0), Shard(0)), (Shard(2), Shard(2))):
        caches = first if first == Shard(0) else Shard(1)
        sharded = {
            name: distribute_tensor(x, mesh, [caches, Shard(1)] if name in CACHES else [first, Shard(2)]) for name, x in inputs.items()
        }
        outputs = quietly(lambda sharded=sharded: call_attention(sharded, case.qk_matmul_output_mode, **case.attributes()))
        assert outputs["Y"].placements == (y, Shard(2)) and outputs["present_key"].placements == (caches, Shard(1))
        compare_attention(inputs, gathered(outputs), case.qk_matmul_output_mode, **case.attributes())
    mixed = MhaCase(batch=4, num_heads=8, bias=True, mask="lengths_starts")
    inputs = make_mha_inputs(mixed, ranks.device)
    sharded = {
        name: distribute_tensor(x, mesh, [Shard(0), Shard(2)] if x.dim() == 3 else [Replicate(), Replicate()]) for name, x in inputs.items()
    }
    compare_mha(inputs, gathered(quietly(lambda: call_mha(sharded, **mixed.attributes()))), **mixed.attributes())


def check_errors(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    inputs = make_inputs(Case(q_heads=4, kv_heads=4, q_len=8, kv_len=8, mask="bool"), ranks.device)
    sharded = distribute(inputs, {"Q": 1, "K": 1, "V": 1}, mesh)
    mixed = sharded | {"attn_mask": inputs["attn_mask"]}
    assert "attn_mask: is a plain tensor beside DTensors" in message(lambda: call_attention(mixed))
    with implicit_replication():
        compare_attention(inputs, gathered(call_attention(mixed)))
    cache, rows = torch.zeros(4, 4, 8, 8), torch.ones(4, 4, 1, 8)
    placed = distribute_tensor(cache.to(ranks.device), mesh, [Shard(2)])
    new = distribute_tensor(rows.to(ranks.device), mesh, [Replicate()])
    lengths = distribute_tensor(torch.zeros(4, dtype=torch.int64, device=ranks.device), mesh, [Replicate()])
    told = message(lambda: torch.ops.onnx_attn.attention_cached(new, new, new, placed, placed.clone(), lengths))
    assert "key_cache and value_cache: cannot be written in place as sharded" in told


def check_sizes_that_disagree(ranks: Ranks) -> None:
    """What is illegal for the whole is an error on every rank, also where the part of some rank would be legal by itself."""
    mesh = ranks.mesh(2)

    def zeros(*shape: int, axis: int) -> DTensor:
        return distribute_tensor(torch.zeros(shape, device=ranks.device), mesh, [Shard(axis)])

    attention, mha = torch.ops.onnx_attn.attention, torch.ops.onnx_attn.mha
    hidden = zeros(2, 6, 64, axis=2)
    counts = {"q_num_heads": 8, "kv_num_heads": 8}
    for width, heads in ((63, 8), (65, 2)):  # pieces of 32 and 31, 33 and 32 columns
        x = zeros(2, 6, width, axis=2)
        expected = f"Q: last axis is {width}, which is not a multiple of q_num_heads = {heads}"
        assert message(lambda x=x, n=heads: attention(x, x, x, q_num_heads=n, kv_num_heads=n)) == expected
        assert f"query: last axis is {width}" in message(lambda x=x, n=heads: mha(x, x, x, num_heads=n))
    for rows in (2, 3):  # pieces of 1 serve every head; pieces of 2 and 1 serve those of the second rank
        mask = zeros(rows, 6, 6, axis=0)
        expected = f"attn_mask: axis 0 of shape [{rows}, 6, 6] is {rows}, but there are 8 query heads; it must be 1 or 8"
        assert message(lambda mask=mask: attention(hidden, hidden, hidden, mask, **counts)) == expected
    Q, batches = zeros(4, 4, 6, 8, axis=0), zeros(3, 4, 6, 8, axis=0)
    assert message(lambda: attention(Q, batches, batches)) == "K: has batch 3, but Q has 4"
    mask = zeros(2, 1, 1, 6, axis=0)
    assert "attn_mask: axis 0 of shape [2, 1, 1, 6] is 2, but there are 4 batch entries" in message(lambda: attention(Q, Q, Q, mask))
    heads = zeros(2, 3, 6, 8, axis=1)
    assert message(lambda: attention(zeros(2, 4, 6, 8, axis=1), zeros(2, 4, 6, 8, axis=1), heads)) == "V: has 3 heads, but K has 4"
    for bias in (torch.zeros(70), torch.zeros(2, 192)):
        whole = distribute_tensor(bias.to(ranks.device), mesh, [Replicate()])
        assert message(lambda whole=whole: mha(hidden, hidden, hidden, whole, num_heads=8)).startswith("bias: has shape")
    for count in (0, -4):
        assert message(lambda count=count: mha(hidden, hidden, hidden, num_heads=count)) == f"num_heads: is {count}; it must be positive"
    nothing = distribute_tensor(torch.zeros((), device=ranks.device), mesh, [Replicate()])
    assert "past_cache: has shape []" in message(lambda: torch.ops.onnx_attn.tensor_scatter(nothing, nothing))


def check_ranks_outside(ranks: Ranks) -> None:
    """DTensors of a mesh that this rank is not in."""
    inner = DeviceMesh(ranks.device, [0, 1])
    Q = distribute_tensor(torch.zeros(2, 4, 6, 8, device=ranks.device), inner, [Shard(1)])
    if ranks.rank < 2:
        assert torch.ops.onnx_attn.attention(Q, Q, Q).shape == Q.shape
    else:
        assert f"which rank {ranks.rank} is not in" in message(lambda: torch.ops.onnx_attn.attention(Q, Q, Q))


def check_partial(ranks: Ranks) -> None:
    """A pending sum is added up first."""
    mesh, source = ranks.mesh(2), Source("partial", ranks.device)
    Q, K, V = (source.normal(2, 4, 6, 8) for _ in range(3))
    mine = K if mesh.get_local_rank() == 0 else torch.zeros_like(K)
    pending = DTensor.from_local(mine, mesh, [Partial()], run_check=False)
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        Y = torch.ops.onnx_attn.attention(distribute_tensor(Q, mesh, [placement]), pending, distribute_tensor(V, mesh, [placement]))
        torch.testing.assert_close(Y.full_tensor(), torch.ops.onnx_attn.attention(Q, K, V), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Modules

HIDDEN, ROWS = 32, 6
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def parallelized(module: nn.Module, mesh: DeviceMesh, local: bool) -> nn.Module:
    plan: dict[str, Any] = {name: ColwiseParallel(use_local_output=local) for name in PROJECTIONS}
    return parallelize_module(module, mesh, plan | {"out_proj": RowwiseParallel()})


def make_module(kind: str, device: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "attention":
        return torch_onnx_attn.nn.Attention(HIDDEN, 8, 4, is_causal=True, softcap=5.0, device=device).eval()
    return torch_onnx_attn.nn.MultiHeadAttention(HIDDEN, 8, bias=kind == "mha with bias", unidirectional=True, device=device).eval()


def check_tensor_parallel(ranks: Ranks, size: int, kind: str, local: bool, compiled: bool) -> None:
    """parallelize_module on the package's own modules, local tensors or DTensors between the projections."""
    torch._dynamo.reset()
    module, x = make_module(kind, ranks.device), Source(kind, ranks.device).normal(2, ROWS, HIDDEN)
    with torch.no_grad():
        expected = module(x)
        parallel = parallelized(module, ranks.mesh(size), local)
        run = torch.compile(parallel, fullgraph=True, backend="aot_eager") if compiled else parallel
        torch.testing.assert_close(run(x), expected, rtol=1e-5, atol=1e-5)
    if not compiled:
        torch.testing.assert_close(parallel(x), expected, rtol=1e-5, atol=1e-5)  # and where gradients are recorded


def check_whole_bias_beside_split_heads(ranks: Ranks) -> None:
    """MultiHeadAttention's one bias for three projections is not split by parallelize_module: an error, not a wrong result."""
    x = Source("bias", ranks.device).normal(2, ROWS, HIDDEN)
    for local, expected in ((True, "bias: has shape [96]"), (False, "bias: is a plain tensor beside DTensors")):
        module = parallelized(make_module("mha with bias", ranks.device), ranks.mesh(), local)
        with torch.no_grad():
            assert expected in message(lambda module=module: module(x))


class Flat(nn.Module):
    """Attention whose Q, K and V stay 3-D: head counts are given with them."""

    def __init__(self, q_heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads = {"q_num_heads": q_heads, "kv_num_heads": kv_heads}
        self.q_proj, self.out_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.k_proj, self.v_proj = nn.Linear(HIDDEN, HIDDEN // 2), nn.Linear(HIDDEN, HIDDEN // 2)

    def forward(self, x: Tensor) -> Tensor:
        Q, K, V = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj(torch.ops.onnx_attn.attention(Q * 1.5 + 0.1, K, V, is_causal=True, **self.heads))


def flat(mesh: DeviceMesh | None, local: bool = True) -> nn.Module:
    torch.manual_seed(3)
    module = Flat(8, 4)
    return module if mesh is None else parallelized(module, mesh, local)


def check_head_counts_of_the_whole(ranks: Ranks) -> None:
    """A piece of the hidden axis with the head counts of the whole raises."""
    module, x = flat(ranks.mesh(2)), Source("hidden", ranks.device).normal(2, ROWS, HIDDEN)
    with torch.no_grad():
        assert "q_num_heads" in message(lambda: module(x))


def check_split_hidden(ranks: Ranks) -> None:
    """A piece of the hidden axis with the head counts of the whole is an error under refuse_split_hidden, and where sizes disagree."""
    mesh, x = ranks.mesh(2), Source("hidden", ranks.device).normal(2, ROWS, HIDDEN)
    with torch.no_grad():
        module, expected = flat(mesh), flat(None)(x)
        with torch_onnx_attn.distributed.refuse_split_hidden():
            assert "Q: has shape [2, 6, 16] and is this rank's piece" in message(lambda: module(x))
            torch.testing.assert_close(flat(mesh, local=False)(x), expected, rtol=1e-5, atol=1e-5)  # DTensors reach the op
            four = parallelized(make_module("attention", ranks.device), mesh, True)
            four(x)
        # What the op sees by itself: K whole beside a piece of Q, and heads that do not fit.
        for name, counts in (("K: has head size", (8, 4)), ("Q", (3, 3))):
            Q = torch.randn(2, ROWS, HIDDEN // 2)
            assert name in message(lambda Q=Q, n=counts: torch.ops.onnx_attn.attention(Q, x, x, q_num_heads=n[0], kv_num_heads=n[1]))


def check_fsdp(ranks: Ranks, kind: str, compiled: bool) -> None:
    torch._dynamo.reset()
    module, x = make_module(kind, ranks.device), Source(kind, ranks.device).normal(2, ROWS, HIDDEN)
    with torch.no_grad():
        expected = module(x)
        fully_shard(module, mesh=ranks.mesh())
        if compiled:
            module.compile(backend="aot_eager")
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def check_compiled_operators(ranks: Ranks) -> None:
    """Both operators over DTensors in one graph, head counts divided."""
    torch._dynamo.reset()
    mesh = ranks.mesh()

    def call(query: Tensor, key: Tensor) -> Tensor:
        Y = torch.ops.onnx_attn.attention(query * 1, key, key, is_causal=True, q_num_heads=8, kv_num_heads=4)
        return torch.ops.onnx_attn.mha(Y, Y, Y, num_heads=8) * 2

    source = Source("compiled", ranks.device)
    query, key = source.normal(2, ROWS, 64), source.normal(2, ROWS, 32)
    expected = call(query, key)
    sharded = [distribute_tensor(x, mesh, [Shard(2)]) for x in (query, key)]
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*sharded)
    assert found.placements == (Shard(2),)
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-5)


def check_export(ranks: Ranks, size: int) -> None:
    """torch.export of a rank's own part: the op once, with local sizes."""
    module, x = make_module("attention", ranks.device), Source("export", ranks.device).normal(2, ROWS, HIDDEN)
    expected = module(x)
    me, share = ranks.mesh(size).get_local_rank(), HIDDEN // size
    state = module.state_dict()
    part = torch_onnx_attn.nn.Attention(HIDDEN, 8 // size, 4 // size, 4, is_causal=True, softcap=5.0, device=ranks.device).eval()
    rows = {
        name: slice(me * share, (me + 1) * share) if "q" in name else slice(me * share // 2, (me + 1) * share // 2) for name in PROJECTIONS
    }
    cut = {f"{name}.{kind}": state[f"{name}.{kind}"][rows[name]] for name in PROJECTIONS for kind in ("weight", "bias")}
    cut |= {"out_proj.weight": state["out_proj.weight"][:, rows["q_proj"]], "out_proj.bias": state["out_proj.bias"] / size}
    part.load_state_dict(cut)
    program = torch.export.export(part, (x,))
    assert sum(str(node.target).startswith("onnx_attn") for node in program.graph.nodes) == 1
    partial = program.module()(x).detach()
    torch.distributed.all_reduce(partial, group=ranks.mesh(size).get_group())
    torch.testing.assert_close(partial, expected.detach(), rtol=1e-5, atol=1e-5)
