"""docs/images/*.svg: who sees whom, asked of the float64 reference."""

from __future__ import annotations

from typing import Any

import torch

from torch_onnx_attn import reference

PICTURES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "full": ("no mask", 4, 6, {}),
    "causal": ("is_causal, no past: top-left", 4, 6, {"is_causal": True}),
    "causal_past": ("is_causal, 2 past keys", 4, 4, {"is_causal": True, "past": 2}),
    "causal_lengths": ("is_causal, nonpad_kv_seqlen = 5", 3, 6, {"is_causal": True, "nonpad_kv_seqlen": 5}),
    "window": ("is_causal, left_window_size = 2", 6, 6, {"is_causal": True, "left_window_size": 2}),
    "window_both": ("left_window_size = 2, right_window_size = 1", 6, 6, {"left_window_size": 2, "right_window_size": 1}),
    "window_lengths": ("is_causal, left_window_size = 1, nonpad_kv_seqlen = 5", 2, 6, {
        "is_causal": True, "left_window_size": 1, "nonpad_kv_seqlen": 5,
    }),
    "dead_rows": ("is_causal, nonpad_kv_seqlen = 2: two rows see nothing and are 0", 4, 6, {"is_causal": True, "nonpad_kv_seqlen": 2}),
    "short_mask": ("attn_mask of 4 columns: the rest is not allowed", 4, 6, {"mask_columns": 4}),
}  # fmt: skip


def allowed(rows: int, keys: int, feature: dict[str, Any]) -> list[list[bool]]:
    """Which keys each query sees, from the weights of the reference: all scores are equal, so a key that is seen has a weight."""
    given = dict(feature)
    past = given.pop("past", 0)
    Q, K = torch.zeros(1, 1, rows, 1), torch.zeros(1, 1, keys, 1)
    if past:
        given |= {"past_key": torch.zeros(1, 1, past, 1), "past_value": torch.zeros(1, 1, past, 1)}
    if "nonpad_kv_seqlen" in given:
        given["nonpad_kv_seqlen"] = torch.tensor([given["nonpad_kv_seqlen"]])
    if "mask_columns" in given:
        given["attn_mask"] = torch.ones(rows, given.pop("mask_columns"), dtype=torch.bool)
    weights = reference.attention(Q, K, K, qk_matmul_output_mode=3, **given)[3]
    return (weights[0, 0] > 0).tolist()


def picture(title: str, rows: int, keys: int, feature: dict[str, Any]) -> str:
    cells = allowed(rows, keys, feature)
    size, left, top = 26, 34, 48
    width, height = max(left + size * len(cells[0]) + 12, 9 * len(title) + 12), top + size * rows + 10
    text = 'font-family="sans-serif" font-size="12" fill="#34495e"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="6" y="16" {text}>{title}</text>',
    ]
    for key in range(len(cells[0])):
        parts.append(f'<text x="{left + size * key + 9}" y="{top - 6}" {text}>{key}</text>')
    for query in range(rows):
        parts.append(f'<text x="6" y="{top + size * query + 17}" {text}>q{query}</text>')
        for key, seen in enumerate(cells[query]):
            fill = "#c0392b" if seen else "#ecf0f1"
            place = f'x="{left + size * key}" y="{top + size * query}"'
            parts.append(f'<rect {place} width="{size - 3}" height="{size - 3}" rx="3" fill="{fill}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"
