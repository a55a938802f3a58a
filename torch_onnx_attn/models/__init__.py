"""Existing ONNX models: their attention nodes checked, explained, and called from PyTorch. Needs the extra ``torch-onnx-attn[onnx]``.

`verify` runs each node on the values it really sees and compares everybody's answers with float64; `inspect` says what each node
uses, which runtimes take it and which kernel it would take; `load_node` makes a PyTorch callable of one node. The command line
(``python -m torch_onnx_attn``) prints the same.
"""

from ..bad_input import BadInput
from .file import open_model
from .inspect import Inspection, inspect
from .node import AttentionNode, find_nodes
from .node_call import Node, load_node
from .verify import NodeResult, Verification, judge, verify

__all__ = [
    "AttentionNode",
    "BadInput",
    "Inspection",
    "Node",
    "NodeResult",
    "Verification",
    "find_nodes",
    "inspect",
    "judge",
    "load_node",
    "open_model",
    "verify",
]
