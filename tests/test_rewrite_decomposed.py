"""Rewriting written-out attention: each form becomes one Attention node that computes the same, wherever rows are masked as well."""

from __future__ import annotations

import numpy as np
import pytest
from rewrite_models import END, GROUPED, PRODUCT, QKV, TRANSPOSED, arrays, graph, rewritten

SCALE = 0.3


@pytest.mark.parametrize(
    ("body", "constants", "attributes"),
    [
        pytest.param(PRODUCT + "m = Mul(s, c)\n", {"c": SCALE}, {"scale": SCALE}, id="mul after"),
        pytest.param(PRODUCT + "m = Mul(c, s)\n", {"c": [SCALE]}, {"scale": SCALE}, id="mul after, constant first"),
        pytest.param(PRODUCT + "m = Div(s, c)\n", {"c": 4.0}, {"scale": 0.25}, id="div after"),
        pytest.param(PRODUCT + "m = Identity(s)\n", {}, {"scale": 1.0}, id="no scale"),
        pytest.param(TRANSPOSED + "qs = Mul(q, c)\nm = MatMul(qs, kt)\n", {"c": SCALE}, {"scale": SCALE}, id="on Q"),
        pytest.param(TRANSPOSED + "qs = Div(q, c)\nm = MatMul(qs, kt)\n", {"c": 2.0}, {"scale": 0.5}, id="Q divided"),
        pytest.param(TRANSPOSED + "ks = Mul(kt, c)\nm = MatMul(q, ks)\n", {"c": SCALE}, {"scale": SCALE}, id="on K transposed"),
        pytest.param(
            "ks = Mul(k, c)\nkt = Transpose<perm = [0,1,3,2]>(ks)\nm = MatMul(q, kt)\n", {"c": SCALE}, {"scale": SCALE}, id="on K"
        ),
        pytest.param(
            TRANSPOSED + "r = Sqrt(c)\nqs = Mul(q, r)\nks = Mul(kt, r)\nm = MatMul(qs, ks)\n", {"c": SCALE}, {"scale": SCALE}, id="roots"
        ),
        pytest.param(
            TRANSPOSED + "n = Shape<start = 3>(q)\nf = Cast<to = 1>(n)\nr = Sqrt(f)\ns = MatMul(q, kt)\nm = Div(s, r)\n",
            {},
            {"scale": 8**-0.5},
            id="computed from the head size",
        ),
        pytest.param(
            PRODUCT + "a = Mul(s, c)\nd = Div(a, cap)\nt = Tanh(d)\nm = Mul(t, cap)\n",
            {"c": SCALE, "cap": 2.0},
            {"scale": SCALE, "softcap": 2.0},
            id="softcap",
        ),
        pytest.param(
            PRODUCT + "d = Mul(s, c)\nt = Tanh(d)\nm = Mul(cap, t)\n",
            {"c": SCALE / 2, "cap": 2.0},
            {"scale": SCALE, "softcap": 2.0},
            id="softcap with the scale folded in",
        ),
    ],
)
def test_scale_and_softcap(body, constants, attributes):
    model = rewritten(graph(body + END, constants=constants))
    assert model.types == ["Attention"]
    assert model.attributes == attributes
    model.agrees_at_all_sizes()


REPEAT = (
    "k1 = Unsqueeze(k, two)\nk2 = Expand(k1, spread)\nk3 = Reshape(k2, merged)\n"
    "v1 = Unsqueeze(v, two)\nv2 = Expand(v1, spread)\nv3 = Reshape(v2, merged)\n"
)
GROUPED_END = "kt = Transpose<perm = [0,1,3,2]>(k3)\nm = MatMul(q, kt)\nw = Softmax(m)\ny = MatMul(w, v3)"
SIZES_OF_K = "b = Shape<start = 0, end = 1>(k)\nn = Shape<start = 2, end = 3>(k)\n"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            SIZES_OF_K
            + "spread = Concat<axis = 0>(b, two, two, n, eight)\nmerged = Concat<axis = 0>(b, four, n, eight)\n"
            + REPEAT
            + GROUPED_END,
            id="expand",
        ),
        pytest.param(
            SIZES_OF_K
            + "merged = Concat<axis = 0>(b, four, n, eight)\n"
            + REPEAT.replace("Expand", "Tile").replace("spread", "tiles")
            + GROUPED_END,
            id="tile",
        ),
        pytest.param(
            SIZES_OF_K
            + "merged = Concat<axis = 0>(b, four, n, eight)\n"
            + "k1 = Unsqueeze(k, two)\nk2 = Concat<axis = 2>(k1, k1)\nk3 = Reshape(k2, merged)\n"
            + "v1 = Unsqueeze(v, two)\nv2 = Concat<axis = 2>(v1, v1)\nv3 = Reshape(v2, merged)\n"
            + GROUPED_END,
            id="concat of copies",
        ),
        pytest.param("k3 = Gather<axis = 1>(k, pairs)\nv3 = Gather<axis = 1>(v, pairs)\n" + GROUPED_END, id="gather"),
    ],
)
def test_key_value_repeat(body):
    constants = {"two": [2], "four": [4], "eight": [8], "tiles": [1, 1, 2, 1, 1], "pairs": [0, 0, 1, 1]}
    model = rewritten(graph(body, GROUPED, constants=constants))
    assert model.types == ["Attention"]
    assert list(model.attention.input) == ["q", "k", "v"]
    model.agrees_at_all_sizes()


def test_heads_tiled_in_turns_stay_repeated():
    """[k0, k1, k0, k1] is not what Attention does with two heads; the Tile nodes stay, and Attention gets four."""
    body = "k3 = Tile(k, turns)\nv3 = Tile(v, turns)\n" + GROUPED_END
    model = rewritten(graph(body, GROUPED, constants={"turns": [1, 2, 1, 1]}))
    assert sorted(model.types) == ["Attention", "Tile", "Tile"]
    model.agrees_at_all_sizes()


def test_a_gather_in_another_order_stays():
    body = "k3 = Gather<axis = 1>(k, turns)\nv3 = Gather<axis = 1>(v, turns)\n" + GROUPED_END
    model = rewritten(graph(body, GROUPED, constants={"turns": [0, 1, 0, 1]}))
    assert sorted(model.types) == ["Attention", "Gather", "Gather"]
    model.agrees_at_all_sizes()


def test_only_one_of_two_repeated():
    body = "k3 = Gather<axis = 1>(k, pairs)\nv3 = Gather<axis = 1>(v, turns)\n" + GROUPED_END
    model = rewritten(graph(body, GROUPED, constants={"pairs": [0, 0, 1, 1], "turns": [0, 1, 0, 1]}))
    assert sorted(model.types) == ["Attention", "Gather", "Gather"]
    model.agrees_at_all_sizes()


def test_one_head_for_all_queries_by_broadcasting():
    model = rewritten(graph(PRODUCT + "m = Identity(s)\n" + END, "float[b,4,l,8] q, float[b,1,s,8] k, float[b,1,s,8] v"))
    assert model.types == ["Attention"]
    model.agrees_at_all_sizes()


# ---------------------------------------------------------------------------------------------------------------------
# Layouts and types


SPLIT = "{x}1 = Reshape({x}, heads)\n{x}2 = Transpose<perm = [0,2,{a},{b}]>({x}1)\n"
HIDDEN = "float[b,l,32] q, float[b,s,16] k, float[b,s,16] v"


def test_heads_are_split_by_the_node():
    """3-D inputs with head counts: no Reshape and no Transpose is left."""
    body = (
        SPLIT.format(x="q", a=1, b=3) + SPLIT.format(x="k", a=3, b=1) + SPLIT.format(x="v", a=1, b=3)
    ) + "s = MatMul(q2, k2)\nm = Mul(s, c)\nw = Softmax(m)\nx = MatMul(w, v2)\nx1 = Transpose<perm = [0,2,1,3]>(x)\ny = Reshape(x1, joined)"
    inputs = "float[b,l,32] q, float[b,s,32] k, float[b,s,32] v"
    model = rewritten(graph(body, inputs, "float[b,l,32] y", constants={"heads": [0, 0, 4, 8], "joined": [0, 0, -1], "c": SCALE}))
    assert model.types == ["Attention"]
    assert model.attributes == {"scale": SCALE, "q_num_heads": 4, "kv_num_heads": 4}
    model.agrees_at_all_sizes()


def test_a_split_that_others_read_stays():
    body = (
        SPLIT.format(x="q", a=1, b=3) + SPLIT.format(x="k", a=3, b=1) + SPLIT.format(x="v", a=1, b=3)
    ) + "s = MatMul(q2, k2)\nw = Softmax(s)\nx = MatMul(w, v2)\nx1 = Transpose<perm = [0,2,1,3]>(x)\ny = Reshape(x1, joined)"
    inputs = "float[b,l,32] q, float[b,s,32] k, float[b,s,32] v"
    outputs = "float[b,l,32] y, float[b,l,4,8] x1"
    model = rewritten(graph(body, inputs, outputs, constants={"heads": [0, 0, 4, 8], "joined": [0, 0, -1]}))
    assert "Reshape" in model.types and "q_num_heads" not in model.attributes
    model.agrees_at_all_sizes()


def test_one_head_of_rank_3():
    body = "kt = Transpose<perm = [0,2,1]>(k)\ns = MatMul(q, kt)\na = Mul(s, c)\nm = Add(a, mask)\nw = Softmax(m)\ny = MatMul(w, v)"
    inputs = "float[b,l,8] q, float[b,s,8] k, float[b,s,6] v, float[b,l,s] mask"
    model = rewritten(graph(body, inputs, "float[b,l,6] y", constants={"c": SCALE}))
    assert model.types == ["Unsqueeze", "Attention"]
    model.agrees_at_all_sizes()


def test_keys_stored_transposed():
    """A cache of [b, h, d, s]: the product is the same, so K is transposed for the node."""
    model = rewritten(graph("s = MatMul(q, k)\nw = Softmax(s)\ny = MatMul(w, v)", QKV.replace("4,s,8] k", "4,8,s] k")))
    assert model.types == ["Transpose", "Attention"]
    model.agrees_at_all_sizes()


def test_square_keys_that_are_not_transposed():
    """With as many keys as channels shapes cannot tell; the math is Q K, not Q K^T, and stays so."""
    inputs = "float[b,4,l,8] q, float[b,4,8,8] k, float[b,4,8,8] v"
    model = rewritten(graph("s = MatMul(q, k)\nw = Softmax(s)\ny = MatMul(w, v)", inputs))
    assert model.types == ["Transpose", "Attention"]
    model.agrees_at_all_sizes()


def test_a_result_that_a_branch_reads():
    """The Transpose and Reshape behind the product stand in a branch, so the heads stay apart; the branch reads the new node."""
    body = (
        (SPLIT.format(x="q", a=1, b=3) + SPLIT.format(x="k", a=3, b=1) + SPLIT.format(x="v", a=1, b=3))
        + "s = MatMul(q2, k2)\nw = Softmax(s)\nx = MatMul(w, v2)\n"
        + "y = If(flag) <then_branch = a () => (float[b,l,32] t2) { t1 = Transpose<perm = [0,2,1,3]>(x) t2 = Reshape(t1, joined) }, "
        + "else_branch = e () => (float[b,l,32] z) { z = Identity(q) }>"
    )
    inputs = "float[b,l,32] q, float[b,s,32] k, float[b,s,32] v"
    constants = {"heads": [0, 0, 4, 8], "joined": [0, 0, -1], "flag": True}
    model = rewritten(graph(body, inputs, "float[b,l,32] y", constants=constants))
    assert "q_num_heads" not in model.attributes
    model.agrees_at_all_sizes()


def test_float16_with_a_float32_softmax():
    body = PRODUCT + "a = Mul(s, c)\nm = Add(a, mask)\nm1 = Cast<to = 1>(m)\nw1 = Softmax(m1)\nw = Cast<to = 10>(w1)\ny = MatMul(w, v)"
    inputs = (QKV + ", float[b,1,l,s] mask").replace("float[", "float16[")
    model = rewritten(graph(body, inputs, "float16[b,h,l,d] y", constants={"c": np.array(SCALE, np.float16)}))
    assert model.types == ["Attention"]
    for seed, sizes in enumerate(({"b": 2, "l": 5, "s": 7}, {"b": 3, "l": 4, "s": 4})):
        model.agrees(arrays(model.before, sizes, seed), "onnxruntime", tolerance=5e-3)


def test_dropout_of_inference_is_passed():
    model = rewritten(graph(PRODUCT + "w0 = Softmax(s)\nw = Dropout(w0, ratio)\ny = MatMul(w, v)", constants={"ratio": 0.5}))
    assert model.types == ["Attention"]
    model.agrees_at_all_sizes()


def test_other_users_of_a_shared_product_operand():
    """K transposed is read elsewhere too: that reader keeps it."""
    model = rewritten(graph(PRODUCT + "m = Identity(s)\n" + END, outputs="float[b,h,l,d] y, float[b,4,8,s] kt"))
    assert sorted(model.types) == ["Attention", "Transpose"]
    model.agrees_at_all_sizes()


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 21, 22, 23, 24, 25])
def test_opsets(opset):
    body = (
        TRANSPOSED
        + "s = MatMul(q, kt)\nm = Mul(s, c)\n"
        + "w = Softmax<axis = 3>(m)\nx = MatMul(w, v)\ny = ReduceMean<axes = [1], keepdims = 1>(x)"
    )
    if opset >= 18:
        body = body.replace("ReduceMean<axes = [1], keepdims = 1>(x)", "ReduceMean<keepdims = 1>(x, one)")
    model = rewritten(graph(body, opset=opset, constants={"c": SCALE} | ({"one": [1]} if opset >= 18 else {})))
    assert model.types.count("Attention") == 1 and "Softmax" not in model.types
    assert [entry.version for entry in model.after.opset_import if not entry.domain] == [max(opset, 23)]
    model.agrees_at_all_sizes()


# ---------------------------------------------------------------------------------------------------------------------
# Batch and heads as one axis


APART = "four = Shape(q)\nb = Shape<start = 0, end = 1>(q)\nl = Shape<start = 2, end = 3>(q)\nn = Shape<start = 2, end = 3>(k)\n"
MERGED = (
    APART + "qf = Concat<axis = 0>(all, l, eight)\nkf = Concat<axis = 0>(all, n, eight)\n"
    "q3 = Reshape(q, qf)\nk3 = Reshape(k, kf)\nv3 = Reshape(v, kf)\nkt = Transpose<perm = [0,2,1]>(k3)\ns3 = MatMul(q3, kt)\n"
    "sf = Concat<axis = 0>(b, heads, l, n)\nwf = Concat<axis = 0>(all, l, n)\n"
)
MERGED_CONSTANTS = {"all": [-1], "eight": [8], "heads": [4]}


def test_merged_heads_with_a_mask():
    """bmm of [batch * heads, ...]; the mask is added to a view of four axes. Nothing of it is left."""
    body = MERGED + (
        "s = Reshape(s3, sf)\nm = Add(s, mask)\nm3 = Reshape(m, wf)\nw3 = Softmax(m3)\nw = Reshape(w3, sf)\nw4 = Reshape(w, wf)\n"
        "y3 = MatMul(w4, v3)\ny = Reshape(y3, four)"
    )
    model = rewritten(graph(body, f"{QKV}, float[b,1,l,s] mask", constants=MERGED_CONSTANTS))
    assert model.types == ["Attention"] and list(model.attention.input) == ["q", "k", "v", "mask"]
    assert model.attributes == {"scale": 1.0}
    model.agrees_at_all_sizes()


def test_merged_heads_of_q_and_k_only():
    """As baddbmm has them: V and the result are apart all the time."""
    body = MERGED + "s = Reshape(s3, sf)\nm = Add(s, mask)\nw = Softmax(m)\ny = MatMul(w, v)"
    model = rewritten(graph(body, f"{QKV}, float[b,1,l,s] mask", constants=MERGED_CONSTANTS))
    assert model.types == ["Attention"] and list(model.attention.input) == ["q", "k", "v", "mask"]
    model.agrees_at_all_sizes()


def test_merged_heads_without_a_mask():
    """Without a mask each head of each entry may as well be a batch entry of one head."""
    model = rewritten(graph(MERGED + "w3 = Softmax(s3)\ny3 = MatMul(w3, v3)\ny = Reshape(y3, four)", constants=MERGED_CONSTANTS))
    assert model.attributes == {"scale": 1.0, "q_num_heads": 1, "kv_num_heads": 1}
    model.agrees_at_all_sizes()


@pytest.mark.parametrize(
    ("end", "outputs"),
    [
        ("y = MatMul(w3, v3)", "float[n,l,d] y"),
        ("y3 = MatMul(w3, v3)\ny = Relu(y3)", "float[n,l,d] y"),
        ("v3x = Relu(v3)\ny3 = MatMul(w3, v3x)\ny = Reshape(y3, four)", "float[b,h,l,d] y"),
    ],
)
def test_merged_heads_that_are_not_taken_apart(end, outputs):
    """Q, K, V or the result exist with one axis only, so the mask of four axes has nothing to be added to: it stays as it is."""
    body = MERGED + "s = Reshape(s3, sf)\nm = Add(s, mask)\nm3 = Reshape(m, wf)\nw3 = Softmax(m3)\n" + end
    model = rewritten(graph(body, f"{QKV}, float[b,1,l,s] mask", outputs, constants=MERGED_CONSTANTS))
    assert "Attention" not in model.types and "batch and heads in one axis" in model.report.left[0].reason


def test_a_mask_of_merged_heads_stays():
    """A mask of [batch * heads, 1, keys], as alibi biases have, added before the axis is taken apart."""
    body = MERGED + (
        "m3 = Add(s3, alibi)\ns = Reshape(m3, sf)\nm = Add(s, mask)\nw = Softmax(m)\n"
        "w3 = Reshape(w, wf)\ny3 = MatMul(w3, v3)\ny = Reshape(y3, four)"
    )
    inputs = f"{QKV}, float[b,1,l,s] mask, float[n,1,s] alibi"
    model = rewritten(graph(body, inputs, constants=MERGED_CONSTANTS))
    assert "Attention" not in model.types and "the mask alibi" in model.report.left[0].reason
