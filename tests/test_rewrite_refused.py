"""Near misses: what looks like attention and is not, or cannot be shown to be. The model stays as it is, and the report says why."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir
import pytest
from rewrite_models import GROUPED, LOWEST, QKV, graph, onnx

from torch_onnx_attn.models.rewrite import rewrite

TRANSPOSED = "kt = Transpose<perm = [0,1,3,2]>(k)\n"
PRODUCT = TRANSPOSED + "s = MatMul(q, kt)\n"
SOFTMAX = "w = Softmax(m)\n"
END = SOFTMAX + "y = MatMul(w, v)"
SQUARE = "float[b,4,7,8] q, float[b,4,7,8] k, float[b,4,7,8] v"


@pytest.mark.parametrize(
    ("body", "options", "reason"),
    [
        pytest.param(PRODUCT + "w = Softmax<axis = 2>(s)\ny = MatMul(w, v)", {"inputs": SQUARE}, "its axis is 2, not the last", id="axis"),
        pytest.param(PRODUCT + "w = Softmax<axis = 1>(s)\ny = MatMul(w, v)", {}, "its axis is 1, not the last", id="over heads"),
        pytest.param(
            PRODUCT + "m = Mul(s, c)\n" + END,
            {"outputs": "float[b,h,l,d] y, float[b,4,l,s] s"},
            "the scores s are an output",
            id="scores are an output",
        ),
        pytest.param(
            PRODUCT + "m = Mul(s, c)\nz = Relu(s)\n" + END,
            {"outputs": "float[b,h,l,d] y, float[b,4,l,s] z"},
            "the scores s are read elsewhere too, by Mul, Relu",
            id="scores are read elsewhere",
        ),
        pytest.param(
            PRODUCT + "m = Mul(s, c)\n" + END,
            {"outputs": "float[b,h,l,d] y, float[b,4,l,s] w"},
            "the weights are an output",
            id="weights are an output",
        ),
        pytest.param(
            PRODUCT + "m = Mul(s, c)\n" + END + "\nz = ReduceMax(w)",
            {"outputs": "float[b,h,l,d] y, float[a,e,f,g] z"},
            "the weights go into 2 places: MatMul, ReduceMax",
            id="weights are read elsewhere",
        ),
        pytest.param(
            PRODUCT + "m = Mul(s, scale)\n" + END,
            {"inputs": QKV + ", float[1] scale"},
            "multiplied or divided by scale, which is not a constant number",
            id="scale is an input",
        ),
        pytest.param(
            PRODUCT + "m = Mul(s, gate)\n" + END,
            {"inputs": QKV + ", float[l,s] gate"},
            "multiplied or divided by gate, which is not a constant number",
            id="gated scores",
        ),
        pytest.param(PRODUCT + "m = Mul(s, minus)\n" + END, {}, "the scale is -0.3", id="negative scale"),
        pytest.param(
            PRODUCT + "a = Add(s, mask)\nm = Mul(a, c)\n" + END,
            {"inputs": QKV + ", float[l,s] mask"},
            "a mask comes before the scale or softcap",
            id="scale after the mask",
        ),
        pytest.param(
            PRODUCT + "a = Add(s, mask)\nt = Tanh(a)\nm = Mul(t, c)\n" + END,
            {"inputs": QKV + ", float[l,s] mask"},
            "a mask comes before the scale or softcap",
            id="softcap after the mask",
        ),
        pytest.param(PRODUCT + "m = Tanh(s)\n" + END, {}, "the scores come from Tanh", id="bare tanh"),
        pytest.param(PRODUCT + "t = Tanh(s)\nm = Mul(t, minus)\n" + END, {}, "a Tanh that is not a softcap", id="negative softcap"),
        pytest.param(
            PRODUCT + "t1 = Tanh(s)\na = Mul(t1, c)\nt2 = Tanh(a)\nm = Mul(t2, c)\n" + END,
            {},
            "a Tanh that is not a softcap",
            id="two softcaps",
        ),
        pytest.param(PRODUCT + "m = Relu(s)\n" + END, {}, "the scores come from Relu", id="relu"),
        pytest.param(PRODUCT + "w = Softmax(s)\nw2 = Mul(w, c)\ny = MatMul(w2, v)", {}, "its result goes into Mul", id="scaled weights"),
        pytest.param(
            PRODUCT + "w = Softmax(s)\nw2 = Dropout(w, ratio, training)\ny = MatMul(w2, v)",
            {"constants": {"ratio": 0.5, "training": True}},
            "a Dropout that may be in training mode",
            id="dropout in training",
        ),
        pytest.param(
            PRODUCT + "w = Softmax(s)\nw2 = Dropout(w, ratio, training)\ny = MatMul(w2, v)",
            {"inputs": QKV + ", bool[] training", "constants": {"ratio": 0.5}},
            "a Dropout that may be in training mode",
            id="dropout by an input",
        ),
        pytest.param(
            PRODUCT + "w = Softmax(s)\nvt = Transpose<perm = [0,1,3,2]>(v)\ny = MatMul(vt, w)",
            {"inputs": SQUARE},
            "the weights are the right factor",
            id="weights on the right",
        ),
        pytest.param(
            "w = Softmax(q)\ny = MatMul(w, v)",
            {"inputs": QKV.replace("8] q", "s] q")},
            "the scores are q, which no node computes",
            id="no product",
        ),
        pytest.param("w = Softmax(q)\ny = Relu(w)", {}, "its result goes into Relu", id="a classifier"),
        pytest.param(
            PRODUCT + "c4 = Concat<axis = 3>(s, sink)\nw = Softmax(c4)\nw1 = Slice(w, from, to, axis)\ny = MatMul(w1, v)",
            {"inputs": QKV + ", float[b,4,l,1] sink", "constants": {"from": [0], "to": [-1], "axis": [3]}},
            "cut off by Slice, as attention sinks do",
            id="sinks",
        ),
        pytest.param(
            PRODUCT + "c4 = Concat<axis = 3>(s, sink)\nw = Softmax(c4)\nv1 = Concat<axis = 2>(v, more)\ny = MatMul(w, v1)",
            {"inputs": QKV + ", float[b,4,l,1] sink, float[b,4,1,8] more"},
            "something is concatenated to the scores, as attention sinks do",
            id="sinks with values",
        ),
        pytest.param(
            PRODUCT + "m = Where(mask, s, fill)\n" + END,
            {"inputs": QKV + ", bool[l,s] mask", "constants": {"fill": -1e4}},
            "replaced by -10000, which is not low enough",
            id="a fill that is not low",
        ),
        pytest.param(
            PRODUCT + "a = Add(s, bias)\nm = Where(mask, a, fill)\n" + END,
            {"inputs": QKV + ", bool[l,s] mask, float[l,s] bias", "constants": {"fill": -1e9}},
            "replaced by -1e\\+09, which is not low enough",
            id="a fill that a bias may be lower than",
        ),
        pytest.param(
            PRODUCT + "a = Where(mask, s, lowest)\nm = Where(more, a, fill)\n" + END,
            {"inputs": QKV + ", bool[l,s] mask, bool[l,s] more", "constants": {"fill": -1e9, "lowest": LOWEST}},
            "replaced by -1e\\+09, which is not low enough",
            id="two fills of which one is lower",
        ),
        pytest.param(
            PRODUCT + "m = Where(mask, s, other)\n" + END,
            {"inputs": QKV + ", bool[l,s] mask, float[b,4,l,s] other"},
            "replaced by something that is not a constant number",
            id="a fill that is data",
        ),
        pytest.param(
            PRODUCT + "m = Add(s, mask)\n" + END,
            {"inputs": QKV + ", float[l,1] mask"},
            r"the mask mask has shape \[l, 1\], which cannot be shown to spread",
            id="a mask of one column",
        ),
        pytest.param(
            PRODUCT + "m = Add(s, mask)\n" + END,
            {"inputs": QKV + ", float[x,z] mask"},
            r"the mask mask has shape \[x, z\], which cannot be shown to spread",
            id="a mask of unknown sizes",
        ),
        pytest.param(
            "n = NonZero(mask)\nt = Transpose(n)\nz = Shape<start = 0, end = 1>(t)\nbias = Expand(c, z)\n"
            + PRODUCT
            + "m = Add(s, bias)\n"
            + END,
            {"inputs": QKV + ", float[l,s] mask"},
            "the mask bias has shape .*, which cannot be shown to spread",
            id="a mask whose size is data",
        ),
        pytest.param(
            PRODUCT + "m = Add(s, mask)\n" + END,
            {"inputs": "float[1,4,l,8] q, float[1,4,s,8] k, float[1,4,s,8] v, float[b,1,l,s] mask"},
            "cannot be shown to spread",
            id="a mask with more batch entries than the scores",
        ),
        pytest.param(
            PRODUCT + "m = Identity(s)\n" + END,
            {"inputs": QKV.replace("b,4,s,8] k", "1,4,s,8] k")},
            r"the batch of K, \[1, 4, s, 8\], cannot be shown to be that of Q",
            id="K is broadcast over the batch",
        ),
        pytest.param(
            PRODUCT + "m = Identity(s)\n" + END,
            {"inputs": QKV.replace("b,4,s,8] v", "n,4,s,8] v")},
            r"the batch of V, \[n, 4, s, 8\], cannot be shown to be that of Q",
            id="V of another batch",
        ),
        pytest.param(
            PRODUCT + "m = Identity(s)\n" + END,
            {"inputs": QKV.replace("b,4,l", "b,1,l")},
            "1 query heads do not divide among 4",
            id="one query head",
        ),
        pytest.param(
            PRODUCT + "m = Identity(s)\n" + END,
            {"inputs": QKV.replace("b,4,s,8] v", "b,1,s,8] v")},
            "K has 4 heads and V has 1",
            id="heads differ",
        ),
        pytest.param(
            PRODUCT + "m = Identity(s)\n" + END,
            {"inputs": QKV.replace("4,", "h,")},
            r"the numbers of heads are not known",
            id="heads unknown",
        ),
        pytest.param(
            PRODUCT + "d = Cast<to = 11>(s)\nw = Softmax(d)\nw1 = Cast<to = 1>(w)\ny = MatMul(w1, v)",
            {},
            "the scores are cast from float to double",
            id="softmax in double",
        ),
        pytest.param(
            PRODUCT + "d = Cast<to = 10>(s)\nw = Softmax(d)\nw1 = Cast<to = 1>(w)\ny = MatMul(w1, v)",
            {},
            "the scores are cast from float to float16",
            id="softmax in less",
        ),
        pytest.param(
            PRODUCT + "w = Softmax(s)\nn = IsNaN(w)\nw1 = Where(n, one, w)\ny = MatMul(w1, v)",
            {"constants": {"one": 1.0}},
            "the weights go into 2 places: IsNaN, Where",
            id="a guard that makes 1 of NaN",
        ),
    ],
)
def test_refused(body, options, reason):
    options.setdefault("constants", {})
    options["constants"] = {"c": 0.3, "minus": -0.3} | options["constants"]
    model = onnx_ir.from_proto(graph(body, **options))
    before = onnx_ir.to_proto(model).graph.node
    report = rewrite(model)
    assert not report.replaced
    assert [left.op_type for left in report.left] == ["Softmax"]
    assert report.nodes_before == report.nodes_after and report.opset_before == report.opset_after
    assert re.search(reason, report.left[0].reason), report.left[0].reason
    assert [str(node) for node in onnx_ir.to_proto(model).graph.node] == [str(node) for node in before]


def test_an_initializer_that_is_an_input_is_no_constant():
    """Whoever runs the model may give another scale."""
    proto = graph(PRODUCT + "m = Mul(s, c)\n" + END, QKV + ", float[] c", constants={"c": 0.3})
    report = rewrite(onnx_ir.from_proto(proto))
    assert "multiplied or divided by c, which is not a constant number" in report.left[0].reason


def test_inside_a_branch():
    branch = "kt = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, kt) w = Softmax(s) x = MatMul(w, v)"
    other = "else_branch = e () => (float[b,4,l,8] z) { z = Identity(q) }"
    body = f"y = If(flag) <then_branch = a () => (float[b,4,l,8] x) {{ {branch} }}, {other}>"
    report = rewrite(onnx_ir.from_proto(graph(body, QKV + ", bool[] flag")))
    assert not report.replaced and report.left[0].reason == "it is inside a branch or loop"


def test_read_inside_a_branch():
    """The Softmax stands outside, the product with V in a branch: the node could stand in neither place."""
    branches = "then_branch = a () => (float[b,4,l,8] x) { x = MatMul(w, v) }, else_branch = e () => (float[b,4,l,8] z) { z = Identity(q) }"
    report = rewrite(onnx_ir.from_proto(graph(PRODUCT + f"w = Softmax(s)\ny = If(flag) <{branches}>", QKV + ", bool[1] flag")))
    assert not report.replaced and report.left[0].reason == "its result is read inside a branch or loop"


def test_one_of_two_is_left():
    """What can be proved is replaced, the rest is reported."""
    body = PRODUCT + "m = Add(s, mask)\n" + END.replace("y =", "y1 =") + "\nw2 = Softmax<axis = 1>(y1)\ny = MatMul(w2, t)"
    model = onnx_ir.from_proto(graph(body, QKV + ", float[l,s] mask, float[b,4,8,8] t"))
    report = rewrite(model)
    assert len(report.replaced) == 1 and [left.reason for left in report.left] == ["its axis is 1, not the last"]


def test_scores_of_a_wholly_masked_row_in_float16_stay_finite():
    """A float32 fill does not fit float16, so as a mask it would be -inf and leave the row empty: not the same."""
    body = PRODUCT + "s1 = Cast<to = 1>(s)\nm1 = Where(mask, s1, fill)\nw1 = Softmax(m1)\nw = Cast<to = 10>(w1)\ny = MatMul(w, v)"
    inputs = QKV.replace("float[", "float16[") + ", bool[l,s] mask"
    report = rewrite(onnx_ir.from_proto(graph(body, inputs, "float16[b,h,l,d] y", constants={"fill": np.float32(LOWEST)})))
    assert not report.replaced and "not low enough" in report.left[0].reason


def test_weights_of_one_axis_against_values_of_two():
    """[batch * heads, rows, keys] by [batch, heads, keys, size]: MatMul takes the first axis for heads. With one entry it even runs."""
    body = (
        "qf = Concat<axis = 0>(all, l, eight)\nkf = Concat<axis = 0>(all, n, eight)\nwf = Concat<axis = 0>(all, l, n)\n"
        "sf = Concat<axis = 0>(b, heads, l, n)\nq3 = Reshape(q, qf)\nk3 = Reshape(k, kf)\nkt = Transpose<perm = [0,2,1]>(k3)\n"
        "s3 = MatMul(q3, kt)\ns = Reshape(s3, sf)\nm = Add(s, mask)\nm3 = Reshape(m, wf)\nw3 = Softmax(m3)\ny = MatMul(w3, v)"
    )
    sizes = "b = Shape<start = 0, end = 1>(q)\nl = Shape<start = 2, end = 3>(q)\nn = Shape<start = 2, end = 3>(k)\n"
    proto = graph(sizes + body, QKV + ", float[b,1,l,s] mask", constants={"all": [-1], "eight": [8], "heads": [4]})
    report = rewrite(onnx_ir.from_proto(proto))
    assert not report.replaced and report.left[0].reason == "the weights and V have different ranks"


def test_a_merge_in_another_order_is_no_repeat():
    """[.., heads, copies, ..] transposed before it is merged gives [k0, k1, k0, k1]: the node gets the repeated heads."""
    body = (
        "b = Shape<start = 0, end = 1>(k)\nn = Shape<start = 2, end = 3>(k)\n"
        "spread = Concat<axis = 0>(b, two, two, n, eight)\nmerged = Concat<axis = 0>(b, four, n, eight)\n"
        "k1 = Unsqueeze(k, one)\nk2 = Expand(k1, spread)\nk3 = Reshape(k2, merged)\n"
        "v1 = Unsqueeze(v, one)\nv2 = Expand(v1, spread)\nv3 = Reshape(v2, merged)\n"
        "kt = Transpose<perm = [0,1,3,2]>(k3)\ns = MatMul(q, kt)\nw = Softmax(s)\ny = MatMul(w, v3)"
    )
    proto = graph(body, GROUPED, constants={"one": [1], "two": [2], "four": [4], "eight": [8]})
    model = onnx_ir.from_proto(proto)
    rewrite(model)
    assert sum(node.op_type == "Expand" for node in model.graph) == 2


def test_a_transpose_that_is_no_order_of_the_axes():
    """A damaged file: its shapes are what they were, and its permutation is not."""
    proto = graph(PRODUCT.replace("0,1,3,2", "0,1,3,9") + "w = Softmax(s)\ny = MatMul(w, v)")
    for name, shape in (("kt", ["b", 4, 8, "s"]), ("s", ["b", 4, "l", "s"]), ("w", ["b", 4, "l", "s"])):
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 1, shape))
    report = rewrite(onnx_ir.from_proto(proto))
    assert not report.replaced and report.left[0].reason == "K is transposed by [0, 1, 3, 9], which does not order 4 axes"
