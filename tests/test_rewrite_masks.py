"""Rewriting written-out attention: masks of every form, and the ones that are provably causal."""

from __future__ import annotations

import numpy as np
import pytest
from rewrite_models import END, LOWEST, PRODUCT, QKV, arrays, graph, rewritten


@pytest.mark.parametrize("shape", ["l,s", "1,s", "s", "1,l,s", "4,l,s", "b,1,l,s", "b,4,l,s", "b,1,1,s", "1,4,1,s"])
def test_added_mask(shape):
    model = rewritten(graph(PRODUCT + "m = Add(s, mask)\n" + END, f"{QKV}, float[{shape}] mask"))
    assert model.types[-1] == "Attention"
    assert ("Expand" in model.types) == (shape in ("1,s", "s", "b,1,1,s", "1,4,1,s"))  # ONNX Runtime wants rows
    model.agrees_at_all_sizes()


@pytest.mark.parametrize(
    ("where", "keeps", "fill"),
    [
        ("Where(mask, s, fill)", True, -np.inf),
        ("Where(mask, fill, s)", False, -np.inf),
        ("Where(mask, s, fill)", True, LOWEST),
        ("Where(mask, fill, s)", False, LOWEST),
        ("Where(mask, s, fill)", True, -1e9),
    ],
)
@pytest.mark.parametrize("shape", ["l,s", "b,1,l,s", "b,1,1,s"])
def test_replaced_scores(where, keeps, fill, shape):
    """-inf becomes a boolean mask; a row without a key is NaN before, 0 after. A finite minimum stays finite: such a row is a mean."""
    model = rewritten(graph(PRODUCT + f"m = {where}\n" + END, f"{QKV}, bool[{shape}] mask", constants={"fill": fill}))
    assert model.types[-1] == "Attention"
    assert ("Where" in model.types) == (fill != -np.inf)
    for seed, sizes in enumerate(({"b": 2, "l": 5, "s": 7}, {"b": 3, "l": 4, "s": 4})):
        feeds = arrays(model.before, sizes, seed)
        if not keeps:
            feeds["mask"] = ~feeds["mask"]
        model.agrees(feeds, "onnxruntime")
        if fill != -np.inf:
            feeds["mask"][..., :1, :] = not keeps
        model.agrees(feeds, "reference")


def test_guard_against_empty_rows():
    """The guard makes 0 of the NaN of an empty row, which is exactly what Attention does with a boolean mask."""
    body = PRODUCT + "m = Where(mask, s, fill)\nw0 = Softmax(m)\nn = IsNaN(w0)\nw = Where(n, zero, w0)\ny = MatMul(w, v)"
    model = rewritten(graph(body, f"{QKV}, bool[l,s] mask", constants={"fill": -np.inf, "zero": 0.0}))
    assert model.types == ["Attention"]
    model.agrees_at_all_sizes()


def test_mask_steps_in_order():
    """Adding, replacing and adding again, with rows where every key is at the minimum."""
    body = PRODUCT + "a = Add(bias, s)\nc = Where(mask, a, fill)\nm = Add(c, more)\n" + END
    inputs = f"{QKV}, bool[l,s] mask, float[1,4,l,s] bias, float[b,1,l,s] more"
    model = rewritten(graph(body, inputs, constants={"fill": LOWEST}))
    assert model.types.count("Attention") == 1
    for seed, sizes in enumerate(({"b": 2, "l": 5, "s": 7}, {"b": 3, "l": 4, "s": 4})):
        model.agrees(arrays(model.before, sizes, seed, rows_may_be_empty=True), "reference")


def test_a_mask_of_zeros_is_none():
    model = rewritten(graph(PRODUCT + "m = Add(s, zeros)\n" + END, constants={"zeros": np.zeros((1, 1, 1, 1), np.float32)}))
    assert model.types == ["Attention"] and list(model.attention.input) == ["q", "k", "v"]


def test_layers_share_a_mask():
    """The rows of [b, 1, 1, s] are spread once, for both layers, although the second was found on its own."""
    second = PRODUCT.replace("(q,", "(y1,").replace("s =", "s2 =").replace("kt", "kt2")
    body = (
        PRODUCT
        + "m = Add(s, mask)\nw = Softmax(m)\ny1 = MatMul(w, v)\n"
        + second
        + "m2 = Add(s2, mask)\nw2 = Softmax(m2)\ny = MatMul(w2, v)"
    )
    model = rewritten(graph(body, f"{QKV}, float[b,1,1,s] mask"))
    assert sorted(model.types) == ["Attention", "Attention", "Concat", "Expand", "Shape"]
    model.agrees_at_all_sizes()


# ---------------------------------------------------------------------------------------------------------------------
# Causal


SQUARE = "float[b,4,6,8] q, float[b,4,6,8] k, float[b,4,6,8] v"
TRIANGLE = np.triu(np.ones((6, 6), np.float32), 1)
RANGES = (
    "l = Shape<start = 2, end = 3>(q)\nn = Shape<start = 2, end = 3>(k)\nl0 = Squeeze(l)\nn0 = Squeeze(n)\n"
    "r = Range(zero, l0, one)\nc = Range(zero, n0, one)\nrow = Unsqueeze(r, last)\ncolumn = Unsqueeze(c, first)\n"
)
BY_RANGES = {"zero": 0, "one": 1, "last": [1], "first": [0], "nought": 0.0, "fill": LOWEST}


@pytest.mark.parametrize("fill", [-np.inf, LOWEST, -1e32, -1e9])
def test_constant_causal_bias(fill):
    bias = np.where(TRIANGLE > 0, np.float32(fill), np.float32(0)).reshape(1, 1, 6, 6)
    model = rewritten(graph(PRODUCT + "m = Add(s, bias)\n" + END, SQUARE, constants={"bias": bias}))
    assert model.types == ["Attention"] and model.attributes["is_causal"] == 1
    assert list(model.attention.input) == ["q", "k", "v"]
    model.agrees_at_all_sizes()


@pytest.mark.parametrize(
    ("change", "fill"), [((0, 5), LOWEST), ((3, 1), LOWEST), (None, -1e4)], ids=["a key ahead", "a key behind", "not low enough"]
)
def test_almost_causal_bias_stays_a_mask(change, fill):
    bias = np.where(TRIANGLE > 0, np.float32(fill), np.float32(0))
    if change is not None:
        bias[change] = 1.0
    model = rewritten(graph(PRODUCT + "m = Add(s, bias)\n" + END, SQUARE, constants={"bias": bias}))
    assert model.types == ["Attention"] and "is_causal" not in model.attributes
    assert list(model.attention.input) == ["q", "k", "v", "bias"]
    model.agrees_at_all_sizes()


@pytest.mark.parametrize(
    "condition",
    [
        "keep = LessOrEqual(column, row)\n",
        "keep = GreaterOrEqual(row, column)\n",
        "drop = Greater(column, row)\nkeep = Not(drop)\n",
        "row1 = Add(row, one)\nkeep = Less(column, row1)\n",
        "le = LessOrEqual(column, row)\nkeep = And(true, le)\n",
        "ones = Expand(true, both)\nkeep = Trilu<upper = 0>(ones)\n",
    ],
)
@pytest.mark.parametrize("form", ["added", "replaced"])
def test_causal_of_any_size(condition, form):
    mask = "bias = Where(keep, nought, fill)\nm = Add(s, bias)\n" if form == "added" else "m = Where(keep, s, fill)\n"
    both = "both = Concat<axis = 0>(l, n)\n"
    model = rewritten(graph(PRODUCT + RANGES + both + condition + mask + END, constants={**BY_RANGES, "true": True}))
    assert model.types == ["Attention"] and model.attributes["is_causal"] == 1
    model.agrees_at_all_sizes()


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param("keep = Less(column, row)\n", id="strictly before"),
        pytest.param("keep = GreaterOrEqual(column, row)\n", id="after"),
        pytest.param("row1 = Add(row, one)\nkeep = LessOrEqual(column, row1)\n", id="one ahead"),
        pytest.param("d = Sub(n0, l0)\nrow1 = Add(row, d)\nkeep = LessOrEqual(column, row1)\n", id="bottom right"),
        pytest.param("twice = Add(row, row)\nkeep = LessOrEqual(column, twice)\n", id="twice the row"),
        pytest.param("ones = Expand(true, both)\nkeep = Trilu<upper = 0>(ones, one)\n", id="a diagonal more"),
        pytest.param("ones = Expand(true, both)\nkeep = Trilu<upper = 1>(ones)\n", id="upper"),
    ],
)
def test_other_conditions_stay_a_mask(condition):
    both = "both = Concat<axis = 0>(l, n)\n"
    mask = "m = Where(keep, s, fill)\n"
    model = rewritten(graph(PRODUCT + RANGES + both + condition + mask + END, constants={**BY_RANGES, "true": True}))
    assert "is_causal" not in model.attributes and len(model.attention.input) == 4
    for seed, sizes in enumerate(({"b": 2, "l": 5, "s": 7}, {"b": 3, "l": 4, "s": 4})):
        model.agrees(arrays(model.before, sizes, seed), "reference")


def test_causal_beside_a_finite_mask_stays():
    """A row whose visible keys are all at the minimum is a mean over the hidden ones too: is_causal would leave those out."""
    body = PRODUCT + RANGES + "keep = LessOrEqual(column, row)\nc1 = Where(keep, s, fill)\nm = Where(mask, c1, fill)\n" + END
    model = rewritten(graph(body, f"{QKV}, bool[l,s] mask", constants=BY_RANGES))
    assert "is_causal" not in model.attributes
    model.agrees(arrays(model.before, {"b": 2, "l": 5, "s": 7}, rows_may_be_empty=True), "reference")


def test_a_later_fill_brings_causally_excluded_keys_back():
    """-inf gives way to the lowest number, which in a row of lowest numbers has weight again."""
    body = PRODUCT + RANGES + "keep = LessOrEqual(column, row)\nc1 = Where(keep, s, infinite)\nm = Where(mask, c1, fill)\n" + END
    model = rewritten(graph(body, f"{QKV}, bool[l,s] mask", constants={**BY_RANGES, "infinite": -np.inf}))
    assert "is_causal" not in model.attributes
    model.agrees(arrays(model.before, {"b": 2, "l": 5, "s": 7}, rows_may_be_empty=True), "reference")


def test_causal_by_minus_infinity_beside_a_mask():
    body = PRODUCT + RANGES + "keep = LessOrEqual(column, row)\nc1 = Where(keep, s, fill)\nm = Add(c1, mask)\n" + END
    model = rewritten(graph(body, f"{QKV}, float[b,1,l,s] mask", constants={**BY_RANGES, "fill": -np.inf}))
    assert model.types == ["Attention"] and model.attributes["is_causal"] == 1
    assert list(model.attention.input) == ["q", "k", "v", "mask"]
    model.agrees_at_all_sizes()
