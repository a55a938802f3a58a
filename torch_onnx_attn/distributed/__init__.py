"""The ops on more than one GPU: sharding rules for DTensors, contexts split over ranks, and caches split over ranks.

The engine is ``torch.distributed``: meshes, process groups and DTensors are torch's own. Importing this package registers what the ops do
with DTensors, and a warning for ops inside torch's own ``context_parallel()``, which does not split them. ``docs/distributed.md`` is
the guide.
"""

import torch.distributed as _dist

if not _dist.is_available():
    raise ImportError("torch_onnx_attn.distributed needs a torch that was built with torch.distributed")

from . import sharding as _sharding
from . import watch as _watch
from .context_parallel import context_parallel_attention
from .decode import context_parallel_cached, shard_cache
from .head_counts import refuse_split_hidden
from .merge import merge_over_ranks
from .sequence import gather_sequence, shard_sequence
from .watch import ContextParallelWarning

_sharding.install()
_watch.install()

__all__ = [
    "ContextParallelWarning",
    "context_parallel_attention",
    "context_parallel_cached",
    "gather_sequence",
    "merge_over_ranks",
    "refuse_split_hidden",
    "shard_cache",
    "shard_sequence",
]
