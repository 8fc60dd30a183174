"""TorchRec's proposers: orders in which combinations of options are tried."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

from tilerec.compat.planner.types import Enumerator, Proposer, ShardingOption


class _Listed(Proposer):
    """A proposer whose proposals follow from the options alone; subclasses define `_proposals`."""

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        groups: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            groups.setdefault(option.fqn, []).append(option)
        ordered = [sorted(group, key=lambda option: option.total_perf) for group in groups.values()]
        self._left = iter(self._proposals(ordered)) if ordered else iter(())
        self._now = next(self._left, None)

    def propose(self) -> list[ShardingOption] | None:
        return self._now

    def feedback(
        self, partitionable: bool, plan: list[ShardingOption] | None = None, perf_rating: float | None = None,
        storage_constraint: Any = None,
    ) -> None:  # fmt: skip
        self._now = next(self._left, None)

    @abstractmethod
    def _proposals(self, groups: list[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        """Yield the proposals, given each table's options, the fastest first."""


class GreedyProposer(_Listed):
    """First the fastest option of every table; then the table whose present option is the slowest takes its next one.

    Args:
        use_depth: an option is as slow as its slowest shard; otherwise as the sum of its shards.
        threshold: most proposals; None: until no table has an option left.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth, self._threshold = use_depth, threshold

    def _cost(self, option: ShardingOption) -> float:
        perfs = [shard.perf.total for shard in option.shards if shard.perf is not None] or [0.0]
        return max(perfs) if self._use_depth else sum(perfs)

    def _proposals(self, groups: list[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        return islice(self._walk(groups), self._threshold)

    def _walk(self, groups: list[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        groups = [sorted(group, key=self._cost) for group in groups]
        at = [0] * len(groups)
        while True:
            yield [group[i] for group, i in zip(groups, at, strict=True)]
            open_ = [g for g, group in enumerate(groups) if at[g] + 1 < len(group)]
            if not open_:
                return
            at[max(open_, key=lambda g: self._cost(groups[g][at[g]]))] += 1


class UniformProposer(_Listed):
    """For each sharding type that all tables have: their fastest options of this type."""

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth

    def _proposals(self, groups: list[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        for kind in dict.fromkeys(option.sharding_type for option in groups[0]):
            own = [[option for option in group if option.sharding_type == kind] for group in groups]
            if all(own):
                yield [options[0] for options in own]


class GridSearchProposer(_Listed):
    """All combinations of options, if there are at most `max_proposals`; otherwise none."""

    def __init__(self, max_proposals: int = 10000) -> None:
        self._most = max_proposals

    def _proposals(self, groups: list[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        count = 1
        for group in groups:
            count *= len(group)
        return map(list, product(*groups)) if count <= self._most else iter(())


class DynamicProgrammingProposer(GreedyProposer):
    """TorchRec's knapsack over memory, by name; it proposes as `GreedyProposer` does."""

    def __init__(self, hbm_bins_per_device: int = 100) -> None:
        super().__init__()


class EmbeddingOffloadScaleupProposer(GreedyProposer):
    """TorchRec's proposer of cache sizes, by name; it proposes as `GreedyProposer` does."""

    def __init__(self, use_depth: bool = True) -> None:
        super().__init__(use_depth)


def proposers_to_proposals_list(
    proposers_list: list[Proposer], search_space: list[ShardingOption]
) -> list[list[ShardingOption]]:
    """Return the proposals of all proposers."""
    found = []
    for proposer in proposers_list:
        proposer.load(search_space)
        while (proposal := proposer.propose()) is not None:
            found.append(proposal)
            proposer.feedback(True)
    return found
