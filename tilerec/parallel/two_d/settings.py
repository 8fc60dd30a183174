"""Settings of 2D parallelism: those of collections with one group size, and those that keep replicas equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.parallel.read_plan import AnyPlan
from tilerec.parallel.two_d.replicated_plan import ReplicatedPlan

AverageHook = Callable[[list[Tensor]], None]
"""Averages tensors over the replica group, in place."""

Sync = Literal["exact", "average"]


@dataclass(frozen=True)
class GroupConfig:
    """Settings for collections that are sharded over groups of one size.

    Args:
        plan: the plan of one sharding group, in any form that `shard` takes; None: the planner makes one.
        group_size: G, the number of ranks of a sharding group.
        node_group_size: number of consecutive members that table_row_wise and grid_shard treat as one host; None: the
            ranks of each machine.
        across_hosts: members are neighbours and replicas are apart; see `RankGrid`.
        paths: paths of the collections; None: all collections that no other config has.
    """

    plan: AnyPlan | ReplicatedPlan | None
    group_size: int
    node_group_size: int | None = None
    across_hosts: bool = False
    paths: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ReplicaSettings:
    """Settings for keeping replicas equal.

    Args:
        sync: "exact" or "average".
        interval: number of updates between two averages; None: only calls of `sync()` average.
        exact: produce the same bits under every plan.
        moment_scale: with "average": factor of a gradient's contribution to the moment of row-wise Adagrad; None:
            1 / R.
        hook: averages tensors over the replica group in place of an all-reduce; None: all-reduce.
        refuse_together: with "average": if one rank refuses a batch, all ranks of the world refuse it.
    """

    sync: Sync = "exact"
    interval: int | None = None
    exact: bool = False
    moment_scale: float | None = None
    hook: AverageHook | None = None
    refuse_together: bool = False

    def described(self) -> dict[str, object]:
        """Return the settings as values that ranks can compare."""
        return {
            "sync": self.sync,
            "sync_interval": self.interval,
            "exact": self.exact,
            "moment_scale": self.moment_scale,
            "hook": self.hook is not None,
            "refuse_together": self.refuse_together,
        }

    def check(self, who: str) -> None:
        """Check the settings.

        Args:
            who: name of the calling function, for errors.

        Raises:
            ConfigError: `sync` is unknown; `interval` is not an integer from 1; `moment_scale` is not above 0; `hook`
                is not callable; `exact` or `refuse_together` is not a bool.
        """
        if self.sync not in ("exact", "average"):
            raise ConfigError(f"{who}: sync: got {self.sync!r}; expected 'exact' or 'average'.")
        interval, scale = self.interval, self.moment_scale
        if interval is not None and (not isinstance(interval, int) or isinstance(interval, bool) or interval < 1):
            raise ConfigError(
                f"{who}: sync_interval: got {interval!r}; expected an integer number of steps from 1, or None to "
                "average only in calls of sync()."
            )
        if scale is not None and not (
            isinstance(scale, (int, float)) and not isinstance(scale, bool) and 0 < scale < float("inf")
        ):
            raise ConfigError(
                f"{who}: moment_scale: got {scale!r}; expected a number above 0, or None for 1 / replicas."
            )
        check_hook(self.hook, who)
        for name in ("exact", "refuse_together"):
            check_bool(getattr(self, name), who, name)

    def words(self, replicas: int) -> str:
        """Return the description of the settings in the printed plan."""
        if replicas == 1:
            return "one: no replicas to keep equal"
        if self.sync == "exact":
            bits = ", the same bits under every plan" if self.exact else ""
            return f"exact: gradients of touched rows are exchanged before every update{bits}"
        every = "when sync() is called" if self.interval is None else f"every {self.interval} updates, and by sync()"
        return f"averaged {every}: weights and optimizer state of the rows touched since"


def check_bool(value: object, who: str, name: str) -> None:
    """Raise if the value is not a bool; the string "no" would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{who}: {name}: got {value!r:.80}; expected True or False.")


def check_hook(hook: object, who: str) -> None:
    """Raise if the hook is not callable."""
    if hook is not None and not callable(hook):
        raise ConfigError(f"{who}: got {hook!r}; expected a function of a list of tensors, or None for an all-reduce.")
