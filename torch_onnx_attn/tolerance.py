"""How far a result may be from float64: the rounding errors that honest arithmetic makes, in words and numbers.

A deviation counts in units: one unit is the rounding error of the output's own type, 2^-24 for float32, 2^-11 for float16 and 2^-8
for bfloat16, at the size that the output can have. That size is the largest ``|v|`` of the head for Y, which is a mean of the
values, and the element itself for everything else.

What is allowed follows from the arithmetic an implementation may use:

* A score is a sum of products, rounded in ``arithmetic``: 4 rounding errors at the size of ``|scale| |q| |k|``, and 2 at the size of
  the score after its bias (none where the bias swallows the score). A score that is off by ``e`` makes its weight off by ``1 + 2e``.
* The weights' own sum is good to ``8 + sqrt(keys)`` rounding errors of ``arithmetic``.
* A score that is shown is rounded after its bias, here and in the reference, 2 rounding errors of ``arithmetic``, then to its type.
* The result is rounded to its type: 1 unit. In 16-bit types the weights may be rounded before they meet V: 1 more. A projection bias
  that is added to q, k and v first is rounded too: 1 more, and 2 at the size of the score.
* Copied outputs (presents, caches, lengths) are exact, and within 2 units where a bias was added to them.

Scores and sums of this package are float32 whatever the inputs' type, so its own results are judged with float32 arithmetic. The ONNX
text lets an implementation compute in the inputs' type, or in ``softmax_precision`` if that is coarser: others are judged by that.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .call import Call, Scale

__all__ = ["Allowance", "Deviation", "allowances", "deviation", "fast_arithmetic", "own_arithmetic", "ratios", "roundoff"]

_HALF_TYPES = (torch.float16, torch.bfloat16)
_PRECISIONS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}  # TensorProto's numbers


@dataclasses.dataclass(frozen=True)
class Allowance:
    """|result - expected| may be up to ``absolute + relative * |expected|``.

    Attributes:
        absolute: broadcasts to the output, with the heads of a 3-D Y split off: ``[batch, heads, rows, columns]``.
        relative: a number, or likewise.
        unit: likewise: the size of one unit. None for units relative to the element.
    """

    absolute: Tensor
    relative: float | Tensor
    unit: Tensor | None


@dataclasses.dataclass(frozen=True)
class Deviation:
    """The distance of one output from float64.

    Attributes:
        absolute: largest ``|result - expected|``; infinite where one is NaN or infinite and the other is not, or shapes differ.
        units: the largest error in units of the output type's rounding.
        allowed_units: what is allowed there.
        ratio: the largest error divided by what is allowed at its place; at most 1 is agreement.
        where: index of that element, None for an empty output.
    """

    absolute: float
    units: float
    allowed_units: float
    ratio: float
    where: tuple[int, ...] | None

    @property
    def agrees(self) -> bool:
        return self.ratio <= 1


def roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to a type, 0 for integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def own_arithmetic(call: Call) -> torch.dtype:
    """What this package computes scores and sums in."""
    dtype = _input_dtype(call)
    return torch.float64 if dtype == torch.float64 or call.attributes.get("softmax_precision") == 11 else torch.float32


def fast_arithmetic(call: Call) -> torch.dtype:
    """The coarsest type that the ONNX text lets an implementation compute scores and sums in."""
    dtypes = [_input_dtype(call), *([_PRECISIONS[p]] if (p := call.attributes.get("softmax_precision")) in _PRECISIONS else [])]
    return max((dtype for dtype in dtypes if dtype.is_floating_point), key=roundoff, default=torch.float32)


def _input_dtype(call: Call) -> torch.dtype:
    return next(iter(call.tensors.values())).dtype


def allowances(call: Call, arithmetic: torch.dtype, scale: Scale | None = None) -> dict[str, Allowance]:
    """What each wanted output of a call may be off by when scores and sums are computed in ``arithmetic``."""
    scale = call.scale() if scale is None else scale
    if scale is None:
        return {name: Allowance(torch.zeros(()), 0.0, None) for name in call.outputs}
    u = roundoff(arithmetic) * (2 if arithmetic == torch.float64 else 1)  # the reference itself is float64
    result = roundoff(_input_dtype(call))
    biased = "bias" in call.tensors
    score = 4 * u * scale.score
    # A bias so large that it swallows the scores of its row leaves no doubt about the rounded sum, if it is rounded as the reference does.
    swallowed = (2 * scale.score < u * scale.logit) if arithmetic == own_arithmetic(call) else torch.zeros_like(score, dtype=torch.bool)
    score = torch.where(swallowed, score, score + 2 * u * scale.logit)
    if biased:
        score = score + 2 * result * scale.score
    softcap = call.attributes.get("softcap", 0.0)
    if softcap > 0 and call.device.type == "cuda" and _input_dtype(call) in _HALF_TYPES:
        score = score + 2**-11 * scale.score.clamp(max=softcap)  # the hardware's tanh is good to 2^-11
    sums = u * (8 + math.sqrt(scale.keys))
    weight = 2 * score + sums
    roundings = 1 + (_input_dtype(call) in _HALF_TYPES) + biased
    made = {}
    for name in call.outputs:
        if name in ("Y", "output"):
            value = scale.value[:, :, None]
            made[name] = Allowance((value * (weight + roundings * result))[..., None], 0.0, (value * result)[..., None])
        elif name in ("qk_matmul_output", "qk"):
            if call.attributes.get("qk_matmul_output_mode") == 3:
                made[name] = Allowance(torch.zeros(()), weight[..., None] + result, None)
            else:
                shown = score + 4 * u * (scale.product - scale.score)
                made[name] = Allowance(shown[..., None], result + 2 * u, None)
        elif name == "lse":
            made[name] = Allowance(score + sums + u * scale.logit, roundoff(torch.float32), None)
        else:
            made[name] = Allowance(torch.zeros(()), 2 * result if biased else 0.0, None)
    return made


def deviation(result: Tensor, expected: Tensor, allowance: Allowance, ignored: Tensor | None = None) -> Deviation:
    """The distance of a result from what is expected. Elements where ``ignored`` is True do not count."""
    if result.shape != expected.shape:
        return Deviation(math.inf, math.inf, 0.0, math.inf, None)
    if result.numel() == 0:
        return Deviation(0.0, 0.0, 0.0, 0.0, None)
    error, allowed, unit = _measure(result, expected, allowance)
    if ignored is not None:
        error = error.masked_fill(ignored.to(error.device), 0.0)
    ratio = _over(error, allowed)
    worst = int(ratio.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ratio.shape))
    units, allowed_units = ((x / unit).flatten()[worst] for x in (error, allowed))
    return Deviation(float(error.max()), float(units), float(allowed_units), float(ratio.flatten()[worst]), place)


def ratios(result: Tensor, expected: Tensor, allowance: Allowance) -> Tensor:
    """Every element's error divided by what is allowed there; the shapes must agree."""
    error, allowed, _ = _measure(result, expected, allowance)
    return _over(error, allowed)


def _over(error: Tensor, allowed: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / allowed)


def _measure(result: Tensor, expected: Tensor, allowance: Allowance) -> tuple[Tensor, Tensor, Tensor]:
    """Errors, what is allowed, and the size of a unit: float64, in the shape of the result."""
    got, want = result.double(), expected.to(result.device).double()
    if result.dtype.is_floating_point:
        rounded = want.to(result.dtype).double()
        want = torch.where(rounded.isinf(), rounded, want)  # beyond the type's range
    error = (got - want).abs().nan_to_num(math.inf, math.inf)
    error = error.masked_fill((got == want) | (got.isnan() & want.isnan()), 0.0)
    size = want.abs().nan_to_num(0.0, 0.0, 0.0)

    def fit(x: Tensor | float) -> Tensor:
        """Numbers of [batch, heads, rows, 1] in the shape of the result, which may be [batch, rows, heads * size]."""
        x = torch.as_tensor(x, dtype=torch.float64, device=error.device)
        if error.dim() == 3 and x.dim() == 4:
            heads = x.shape[1]
            return x.expand(-1, -1, -1, error.shape[2] // heads).transpose(1, 2).flatten(2)
        return x.expand_as(error)

    allowed = fit(allowance.absolute) + fit(allowance.relative) * size
    unit = roundoff(result.dtype) * size if allowance.unit is None else fit(allowance.unit)
    if result.dtype.is_floating_point:
        smallest = torch.finfo(result.dtype).smallest_normal * torch.finfo(result.dtype).eps
        return error, torch.where(allowed > 0, allowed + smallest, 0.0), unit.clamp(min=smallest)
    return error, allowed, torch.ones_like(error)
