"""Check for tables inside torch's `DistributedDataParallel`, which averages dense `.grad`s only.

A table with an attached optimizer has no `.grad`. Each rank's backward pass would update its copy from that rank's own
batch, and the copies would diverge. `DistributedModelParallel` wraps only the dense parameters, so
`DistributedDataParallel` never reduces its tables.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel

from tilerec.errors import ConfigError
from tilerec.storage.table_rows import TableRows
from tilerec.torch_private import active_ddp, ddp_parameters

_REDUCED: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = weakref.WeakKeyDictionary()
"""Ids of the parameters that each wrapper reduces, empty for a wrapper of one rank. The wrapper keeps them alive."""


def check_not_in_ddp(rows: Sequence[TableRows], attached: Sequence[bool]) -> None:
    """Raise a `ConfigError` if copies of these tables would diverge under the active `DistributedDataParallel`.

    Args:
        rows: of a collection's tables.
        attached: per table, whether this forward's gradients bypass `.grad`.
    """
    wrapper = active_ddp()
    if wrapper is None:
        return
    reduced = _REDUCED.get(wrapper)
    if reduced is None:
        several = wrapper.process_group.size() > 1
        reduced = frozenset(map(id, ddp_parameters(wrapper)) if several else ())
        _REDUCED[wrapper] = reduced
    for own, is_attached in zip(rows, attached, strict=True):
        if is_attached and id(own.leaf) in reduced:
            how = "sparse gradients" if own.spec is None else f"{type(own.spec).__name__} attached"
            raise ConfigError(
                f"Table '{own.name}': got {how} under DistributedDataParallel, which reduces dense .grads only, so the "
                "ranks' copies would diverge; expected a table outside that wrapper. Wrap the model in "
                "DistributedModelParallel (data_parallel() replicates its tables), or attach no optimizer."
            )
