"""What a rewrite did, left and refused, in words and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Checked", "Left", "Replaced", "Report"]


@dataclasses.dataclass(frozen=True)
class Replaced:
    """One node that was put in place of others."""

    name: str
    was: str  # "decomposed attention", "com.microsoft::GroupQueryAttention"
    attributes: dict[str, Any]
    inputs: tuple[str, ...]  # the optional ones it has: "attn_mask", "past_key", ...


@dataclasses.dataclass(frozen=True)
class Left:
    """A Softmax or GroupQueryAttention that stays, and the first reason why."""

    name: str
    op_type: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Checked:
    """One run of both models on the same inputs."""

    inputs: str  # where they came from, with the shapes
    runner: str
    largest_deviation: dict[str, float]  # for each output: the largest difference, relative to the output's largest element
    allowed: float

    @property
    def agrees(self) -> bool:
        return all(deviation <= self.allowed for deviation in self.largest_deviation.values())


@dataclasses.dataclass
class Report:
    """Everything a rewrite has to say."""

    opset_before: int
    opset_after: int
    nodes_before: int
    nodes_after: int
    replaced: list[Replaced] = dataclasses.field(default_factory=list)
    left: list[Left] = dataclasses.field(default_factory=list)
    checked: list[Checked] = dataclasses.field(default_factory=list)
    unverified: list[str] = dataclasses.field(default_factory=list)  # new nodes that `verify` finds fault with
    is_written: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the models were compared and found equal."""
        return bool(self.checked) and all(check.agrees for check in self.checked) and not self.unverified

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"checked": [dataclasses.asdict(check) | {"agrees": check.agrees} for check in self.checked]}

    def lines(self) -> list[str]:
        """For a terminal."""
        opsets = (
            f"opset {self.opset_before}" if self.opset_before == self.opset_after else f"opset {self.opset_before} -> {self.opset_after}"
        )
        lines = [f"{len(self.replaced)} Attention nodes made, nodes {self.nodes_before} -> {self.nodes_after}, {opsets}"]
        for made in self.replaced:
            facts = ", ".join([*(f"{name}={value:.6g}" for name, value in made.attributes.items()), *made.inputs])
            lines.append(f"  made {made.name} from {made.was}: {facts}")
        lines += [f"  left {one.op_type} {one.name}: {one.reason}" for one in self.left]
        for check in self.checked:
            worst = max(check.largest_deviation.values(), default=0.0)
            verdict = "agree" if check.agrees else "DIFFER"
            lines.append(f"  {verdict} on {check.inputs} in {check.runner}: largest deviation {worst:.1e} (allowed {check.allowed:.0e})")
        lines += [f"  verify: {text}" for text in self.unverified]
        return lines
