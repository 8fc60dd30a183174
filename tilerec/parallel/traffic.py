"""`traffic`: byte counts of a sharded model's communication."""

from __future__ import annotations

from torch import nn

from tilerec.comms.traffic import Traffic
from tilerec.errors import ConfigError
from tilerec.sharding.embedding import ShardedCollection


def traffic(module: nn.Module) -> Traffic:
    """Return the bytes that this rank sent for the tables below a module, by kind of content and receiving rank.

    Counts begin at `shard`, or at `traffic(module).reset()`. `print` shows them as a table. They do not include
    gradients of dense parameters, which torch sends.

    Raises:
        ConfigError: no collection below is sharded, or several `shard` calls sharded parts of the module.
    """
    found = {
        id(part.exchange.group): part.exchange.group for part in module.modules() if isinstance(part, ShardedCollection)
    }
    if len(found) != 1:
        raise ConfigError(
            "traffic: this module has no sharded collection; shard it first."
            if not found
            else f"traffic: {len(found)} shard() calls sharded parts of this module, each with its own counts; call "
            "traffic() for each part."
        )
    return next(iter(found.values())).traffic
