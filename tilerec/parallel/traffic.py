"""What a sharded model sends."""

from __future__ import annotations

from torch import nn

from tilerec.comms.traffic import Traffic
from tilerec.errors import ConfigError
from tilerec.sharding.embedding import ShardedCollection


def traffic(module: nn.Module) -> Traffic:
    """Bytes that this rank sent for the tables below a module, by what they carried and to whom.

    Counted since `shard`, or since `traffic(module).reset()`; `print` shows a table. Gradients of dense parameters
    are torch's business and not in it.

    Raises:
        ConfigError: nothing below is sharded, or parts of it were sharded by several `shard` calls.
    """
    found = {
        id(part.exchange.group): part.exchange.group
        for part in module.modules()
        if isinstance(part, ShardedCollection)
    }
    if len(found) != 1:
        raise ConfigError(
            "traffic: nothing below this module is sharded; shard it first."
            if not found
            else f"traffic: parts of this module were sharded by {len(found)} shard() calls, which count on their own; "
            "ask the parts."
        )
    return next(iter(found.values())).traffic
