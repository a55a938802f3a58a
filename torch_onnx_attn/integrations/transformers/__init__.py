"""Hugging Face transformers (5 and newer) on the ops of this package: ``attn_implementation="onnx_attn"``.

::

    from torch_onnx_attn.integrations.transformers import enable

    model = enable(AutoModelForCausalLM.from_pretrained(...).eval())

`enable` refuses a model that would ignore the name or misread its masks. `register` alone makes the name known, so that it can be
given to ``from_pretrained`` or to ``set_attn_implementation``; transformers accepts it there for any model, without such a check.
Importing this module registers nothing.
"""

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        "torch_onnx_attn.integrations.transformers needs the package transformers, 5 or newer: pip install 'transformers>=5' "
        "(or the extra torch-onnx-attn[transformers])"
    ) from error

if int(_transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"torch_onnx_attn.integrations.transformers needs transformers 5 or newer, and this is {_transformers.__version__}: "
        "its attention and mask interfaces are other ones"
    )

from .attention import attention
from .errors import UnsupportedError
from .masks import make_mask
from .models import refusals
from .registration import NAME, enable, register

__all__ = ["NAME", "UnsupportedError", "attention", "enable", "make_mask", "refusals", "register"]
