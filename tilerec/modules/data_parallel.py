"""Tables under torch's `DistributedDataParallel`, which averages `.grad`s and sees no other gradient.

A table with an attached optimizer has no `.grad`: each rank's backward pass would move its copy by that rank's own
batch, and the copies would drift apart. `DistributedModelParallel` wraps the dense parameters alone, so its tables are
none of those that `DistributedDataParallel` reduces.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel

from tilerec.errors import ConfigError
from tilerec.storage.table_rows import TableRows
from tilerec.torch_private import active_ddp, ddp_parameters

_REDUCED: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = weakref.WeakKeyDictionary()
"""The parameters (by id) that each wrapper of several ranks reduces; it keeps them alive."""


def refuse_data_parallel(rows: Sequence[TableRows], attached: Sequence[bool]) -> None:
    """Raise a `ConfigError` if the running `DistributedDataParallel` would let copies of these tables drift apart.

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
                "ranks' copies would drift apart; expected tables that it does not hold. Wrap the model in "
                "DistributedModelParallel (data_parallel() replicates its tables), or attach no optimizer."
            )
