"""`python -m torch_onnx_attn`: the command line."""

import sys

from torch_onnx_attn.cli import main

sys.exit(main())
