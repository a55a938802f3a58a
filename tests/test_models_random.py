"""Random nodes: nobody differs for a reason that is not known, and nobody refuses for one.

So the tolerance raises no false alarm on any mixture of features, and the table of known behaviours misses nothing that these nodes meet.
"""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from model_files import Source, node_of

from torch_onnx_attn.models import judge
from torch_onnx_attn.onnx.operators import INPUTS

pytest.importorskip("onnxruntime")

HALF_AND_SINGLE = [np.float32, np.float16, ml_dtypes.bfloat16]
LOWEST = float(np.finfo(np.float32).min)


def attention(seed: int) -> tuple[dict[str, Any], list[str], int, dict[str, Any]]:
    choose, source = random.Random(seed), Source(seed)
    dtype: Any = choose.choice([*HALF_AND_SINGLE, np.float64])
    rows, new, size, amplitude = (choose.choice(sizes) for sizes in ([1, 2, 5, 17], [1, 3, 5, 33], [8, 64], [0.1, 1, 1, 4]))
    opset, outputs, attributes = choose.choice([23, 24, 25]), ["Y"], {}
    arrays = source.qkv(rows, new, dtype=np.float64, size=size)
    arrays = {name: (x * (choose.choice([1, 100]) if name == "V" else amplitude)).astype(dtype) for name, x in arrays.items()}
    past = 0
    if choose.random() < 0.3:
        past = choose.choice([1, 4])
        arrays |= {name: (x * amplitude).astype(dtype) for name, x in source.past(past, size=size).items()}
        outputs += ["present_key", "present_value"]
    elif choose.random() < 0.3 and opset > 23:
        arrays["nonpad_kv_seqlen"] = source.generator.integers(0, new + 1, 2)
    if choose.random() < 0.5:
        keys = past + new
        shape = choose.choice([(rows, keys), (4, rows, keys), (2, 1, rows, keys), (1, 4, rows, keys), (2, 1, 1, keys), (1, keys), (keys,)])
        keep, low = source.keep(*shape), -1e4 if dtype == np.float16 else -1e9
        kinds = [keep, source.normal(*shape).astype(dtype), np.where(keep, 0, low).astype(dtype), np.where(keep, 0, -np.inf).astype(dtype)]
        arrays["attn_mask"] = kinds[choose.randrange(4)]
    options = {"is_causal": 1, "softcap": choose.choice([1.0, 30.0]), "scale": 0.5} | ({"left_window_size": 3} if opset == 25 else {})
    attributes |= {name: value for name, value in options.items() if choose.random() < 0.35}
    if choose.random() < 0.3:
        outputs.append("qk_matmul_output")
        attributes["qk_matmul_output_mode"] = choose.randrange(4)
    return arrays, outputs, opset, attributes


def mha(seed: int) -> tuple[dict[str, Any], list[str], int, dict[str, Any]]:
    choose, source = random.Random(seed), Source(seed)
    dtype: Any = choose.choice(HALF_AND_SINGLE)
    rows, heads, past = choose.choice([1, 2, 5, 17]), choose.choice([2, 4]), 0
    new = choose.choice([rows, rows, 1, 3, 33])
    arrays = {name: x.astype(dtype) for name, x in source.mha(rows, new, dtype=np.float64).items()}
    outputs, attributes = ["output"], {"num_heads": heads}
    if choose.random() < 0.3:
        arrays |= {name: arrays[name].reshape(2, new, heads, -1).transpose(0, 2, 1, 3).copy() for name in ("key", "value")}
    elif choose.random() < 0.4:
        past = choose.choice([1, 4])
        arrays |= {name: source.normal(2, heads, past, 32 // heads, dtype=dtype) for name in ("past_key", "past_value")}
    keys = past + new
    if choose.random() < 0.4:
        arrays["bias"] = source.normal(96, dtype=dtype)
    if choose.random() < 0.5:
        whole = source.generator.integers
        masks = [whole(0, keys + 1, 2), whole(0, keys + 1, 8), whole(0, 2, (2, keys)), whole(0, 2, (2, rows, keys))]
        arrays["key_padding_mask"] = masks[choose.randrange(4)].astype(np.int32)
    if choose.random() < 0.4:
        arrays["attention_bias"] = source.normal(*choose.choice([(1, 1), (2, heads), (2, 1)]), rows, keys, dtype=dtype)
    filters = [-1e4, -1.0] if rows != new else [-1e4, LOWEST]  # the lowest beside a misaligned causality: two defects in one element
    options = {"unidirectional": 1, "scale": 0.5, "mask_filter_value": choose.choice(filters)}
    attributes |= {name: value for name, value in options.items() if choose.random() < 0.35}
    outputs += ["present_key", "present_value"] if choose.random() < 0.5 else []
    outputs += ["qk"] if choose.random() < 0.3 else []
    return arrays, outputs, 24, attributes


def in_onnx_order(arrays: dict[str, Any], op: str) -> dict[str, Any]:
    return {name: arrays[name] for name in INPUTS[op] if name in arrays}


@pytest.mark.parametrize("op, make", [("attention", attention), ("mha", mha)])
@pytest.mark.parametrize("block", range(4))
def test_random_nodes(op: str, make: Any, block: int) -> None:
    statuses = set()
    for seed in range(30 * block, 30 * (block + 1)):
        arrays, outputs, opset, attributes = make(seed)
        arrays = in_onnx_order(arrays, op)
        result = judge(node_of(op, arrays, outputs, opset, **attributes), arrays)
        assert result.status in ("agree", "known"), (seed, result)
        assert all(reason.startswith("as known") for reason in result.refusals.values()), (seed, result.refusals)
        statuses.add(result.status)
    assert statuses == {"agree", "known"}  # both kinds are met
