"""`compile_model`: `torch.compile` with one graph for all batch sizes.

torch compiles a graph for the first batch size, one for all sizes from 2 on, and one each for 1 and 0: it takes numbers
of 0 and 1 for constants of a program. A rank of a recommender model gets such batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilerec.torch_private import trace_all_sizes


def compile_model(model: nn.Module, **options: Any) -> nn.Module:
    """Return the model compiled as a whole: no graph break, and one graph for batches of any size.

    The result is that of `torch.compile(model, fullgraph=True, dynamic=True)`. While it traces, sizes of 0 and 1 count
    as numbers like others. A model whose own code depends on them is still compiled once more.

    Args:
        options: further arguments of `torch.compile`; they override those above.
    """
    compiled: Any = torch.compile(model, **{"fullgraph": True, "dynamic": True, **options})
    trace_all_sizes(compiled)
    found: nn.Module = compiled
    return found
