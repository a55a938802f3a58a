"""Random graphs out of the pieces that attention is made of, right and wrong ones alike: whatever is replaced must compute the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from rewrite_models import LOWEST, by_onnxruntime, by_reference, graph, onnx, onnx_ir

from torch_onnx_attn.models.rewrite import rewrite

BATCHES = range(8)
GRAPHS = 50  # of each batch
CONSTANTS = {
    "c": 0.3,
    "half": 0.5,
    "two": 2.0,
    "minus": -0.7,
    "infinite": -np.inf,
    "lowest": LOWEST,
    "billion": -1e9,
    "thousand": -1e3,
    "zero": 0.0,
    "i0": 0,
    "i1": 1,
    "first": [0],
    "second": [1],
    "third": [2],
    "ax3": [3],
    "turns": [1, 2, 1, 1],
    "pairs": [0, 0, 1, 1],
    "triangle": np.where(np.tri(5, 7, dtype=bool), 0.0, LOWEST),
}
STEPS = {  # what may be done to scores s, and what it makes n of them
    "n = Mul(s, c)": 4,
    "n = Div(s, two)": 2,
    "n = Mul(s, minus)": 1,
    "n = Mul(s, gate)": 1,
    "n = Add(s, bias)": 4,
    "n = Add(rows, s)": 2,
    "n = Add(s, triangle)": 2,
    "n = Where(keep, s, infinite)": 3,
    "n = Where(keep, s, lowest)": 3,
    "n = Where(keep, lowest, s)": 1,
    "n = Where(keep, s, billion)": 2,
    "n = Where(keep, s, thousand)": 1,
    "n = Where(causal, s, infinite)": 2,
    "n = Where(causal, s, lowest)": 2,
    "n = Where(ahead, lowest, s)": 1,
    "t = Tanh(s)\nn = Mul(t, two)": 2,
    "t = Div(s, two)\nu = Tanh(t)\nn = Mul(u, two)": 3,
    "n = Identity(s)": 1,
    "n = Relu(s)": 1,
}
KEYS = {
    "k0 = Identity(kg)\nv0 = Identity(vg)": 1,
    "k0 = Gather<axis = 1>(kg, pairs)\nv0 = Gather<axis = 1>(vg, pairs)": 3,
    "k0 = Tile(kg, turns)\nv0 = Tile(vg, turns)": 2,
    "k0 = Gather<axis = 1>(kg, pairs)\nv0 = Tile(vg, turns)": 2,
    "k0 = Identity(k)\nv0 = Identity(v)": 5,
    "k0 = Mul(k, half)\nv0 = Mul(v, half)": 2,
}
PRODUCTS = {
    "kt = Transpose<perm = [0,1,3,2]>(k0)\ns0 = MatMul(q, kt)": 4,
    "qs = Mul(q, c)\nkt = Transpose<perm = [0,1,3,2]>(k0)\ns0 = MatMul(qs, kt)": 2,
    "kt = Transpose<perm = [0,1,3,2]>(k0)\nks = Div(kt, two)\ns0 = MatMul(q, ks)": 2,
    "k1 = Transpose<perm = [0,2,1,3]>(k0)\nkt = Transpose<perm = [0,2,3,1]>(k1)\ns0 = MatMul(q, kt)": 2,
}
ENDS = {
    "w = Softmax(m)\ny = MatMul(w, v0)": 6,
    "w0 = Softmax(m)\nnan = IsNaN(w0)\nw = Where(nan, zero, w0)\ny = MatMul(w, v0)": 3,
    "w0 = Softmax(m)\nw = Identity(w0)\nx = MatMul(w, v0)\ny = Mul(x, two)": 1,
    "w = Softmax<axis = 2>(m)\ny = MatMul(w, v0)": 1,
    "w0 = Softmax(m)\nw = Mul(w0, half)\ny = MatMul(w, v0)": 1,
}
CAUSAL = (
    "r = Range(i0, ql, i1)\ncc = Range(i0, kl, i1)\nrow = Unsqueeze(r, second)\ncolumn = Unsqueeze(cc, first)\n"
    "causal = LessOrEqual(column, row)\nahead = Greater(column, row)\n"
)
SIZES = "qn = Shape<start = 2, end = 3>(q)\nkn = Shape<start = 2, end = 3>(k)\nql = Squeeze(qn)\nkl = Squeeze(kn)\n"
INPUTS = (
    "float[2,4,5,8] q, float[2,4,7,8] k, float[2,4,7,8] v, float[2,2,7,8] kg, float[2,2,7,8] vg, "
    "bool[{0}] keep, float[{1}] bias, float[{2}] rows, float[1] gate"
)
MASKS = ["5,7", "2,1,5,7", "1,4,5,7", "2,1,1,7", "7", "1,7", "2,4,5,7"]


def pick(generator: random.Random, weighted: dict[str, int]) -> str:
    return generator.choices(list(weighted), list(weighted.values()))[0]


def make(generator: random.Random) -> Any:
    lines = [SIZES + CAUSAL, pick(generator, KEYS), pick(generator, PRODUCTS)]
    count = generator.choice([0, 1, 1, 2, 2, 3, 4])
    for number in range(count):
        step = pick(generator, STEPS)
        for name in "tu":
            step = (
                step.replace(f"{name} =", f"{name}{number} =")
                .replace(f"({name})", f"({name}{number})")
                .replace(f"({name},", f"({name}{number},")
            )
        step = (
            step.replace("n =", f"s{number + 1} =")
            .replace("(s)", f"(s{number})")
            .replace("(s,", f"(s{number},")
            .replace(" s)", f" s{number})")
        )
        lines.append(step.replace(" s,", f" s{number},"))
    lines += [f"m = Identity(s{count})", pick(generator, ENDS)]
    return graph("\n".join(lines), INPUTS.format(*(generator.choice(MASKS) for _ in range(3))), constants=CONSTANTS)


def feeds(model: Any, seed: int) -> dict[str, Any]:
    """Masks with rows in which no key is kept, and some in which one is."""
    generator = np.random.default_rng(seed)
    made = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        array: Any = generator.standard_normal(shape).astype(np.float32)
        if value.name == "keep":
            array = generator.random(shape) < 0.6
            if array.ndim > 1 and shape[-2] > 1:
                array[..., 0, :], array[..., 1, :] = False, True
        made[value.name] = array
    return made


@pytest.mark.parametrize("batch", BATCHES)
def test_random_graphs(batch):
    generator = random.Random(batch)
    replaced = 0
    for number in range(GRAPHS):
        proto = make(generator)
        onnx.checker.check_model(proto)
        model = onnx_ir.from_proto(proto)
        report = rewrite(model)
        assert len(report.replaced) + len(report.left) == 1
        if not report.replaced:
            continue
        replaced += 1
        after = onnx_ir.to_proto(model)
        onnx.checker.check_model(after, full_check=True)
        arrays = feeds(proto, number)
        (want,), (got,) = by_reference(proto, arrays), by_reference(after, {name: arrays[name] for name in used(after)})
        known = ~np.isnan(want)  # the NaN of a row without a key, if nothing guards it, is 0 afterwards
        assert not np.isnan(got).any(), onnx.printer.to_text(proto)
        np.testing.assert_allclose(got[known], want[known], rtol=2e-5, atol=2e-5, err_msg=onnx.printer.to_text(proto))
        assert by_onnxruntime(after, {name: arrays[name] for name in used(after)})[0].shape == want.shape
    assert replaced >= GRAPHS // 5, "most graphs are wrong in some way, but not all"


def used(model: Any) -> list[str]:
    return [value.name for value in model.graph.input]
