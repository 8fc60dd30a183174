"""Parts of TorchRec's planner, with their names and arguments, so that scripts that construct them run unchanged.

TorchRec's planner enumerates, proposes and partitions with exchangeable parts. tilerec's search has none of these steps
(docs/planner.md): the parts store their arguments, and `EmbeddingShardingPlanner` accepts them with a warning that they
have no effect. `Topology` reads the last two classes, which describe machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, final

from tilerec.errors import ConfigError
from tilerec.spec.topology import gigabytes_per_second


class SortBy(Enum):
    """Sort keys of TorchRec's greedy partitioner."""

    STORAGE = "storage"
    PERF = "perf"


class IgnoredPart:
    """Base of the parts; the search does not use them.

    Attributes:
        arguments: the arguments of the constructor, by name.
    """

    arguments: dict[str, Any]

    def _keep(self, given: dict[str, Any]) -> None:
        self.arguments = {name: value for name, value in given.items() if name not in ("self", "__class__")}


@final
class EmbeddingEnumerator(IgnoredPart):
    """Enumerator of sharding options; `tilerec plan explain` lists the options that tilerec considers."""

    def __init__(
        self, topology: Any, batch_size: int | None = None, constraints: Any = None, estimator: Any = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:  # fmt: skip
        self._keep(locals())


@final
class GreedyProposer(IgnoredPart):
    """Proposer of options in the order of their cost."""

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._keep(locals())


@final
class UniformProposer(IgnoredPart):
    """Proposer of one sharding type for all tables."""

    def __init__(self, use_depth: bool = True) -> None:
        self._keep(locals())


@final
class GridSearchProposer(IgnoredPart):
    """Proposer of all combinations of options."""

    def __init__(self, max_proposals: int = 10000) -> None:
        self._keep(locals())


@final
class DynamicProgrammingProposer(IgnoredPart):
    """Proposer that solves a knapsack over memory."""

    def __init__(self, hbm_bins_per_device: int = 100) -> None:
        self._keep(locals())


@final
class EmbeddingOffloadScaleupProposer(IgnoredPart):
    """Proposer of cache sizes."""

    def __init__(self, use_depth: bool = True) -> None:
        self._keep(locals())


@final
class GreedyPerfPartitioner(IgnoredPart):
    """Partitioner that places shards by cost."""

    def __init__(self, sort_by: Any = SortBy.STORAGE, balance_modules: bool = False) -> None:
        self._keep(locals())


@final
class MemoryBalancedPartitioner(IgnoredPart):
    """Partitioner that places shards by cost, then balances memory."""

    def __init__(self, max_search_count: int = 10, tolerance: float = 0.02, balance_modules: bool = False) -> None:
        self._keep(locals())


@final
class EmbeddingPerfEstimator(IgnoredPart):
    """Estimator of the cost of shards; docs/planner-cost.md describes tilerec's cost model."""

    def __init__(self, topology: Any, constraints: Any = None, is_inference: bool = False) -> None:
        self._keep(locals())


@final
class EmbeddingStorageEstimator(IgnoredPart):
    """Estimator of the memory of shards."""

    def __init__(
        self, topology: Any, constraints: Any = None, pipeline_type: Any = None,
        run_embedding_at_peak_memory: bool = False, is_inference: bool = False,
    ) -> None:  # fmt: skip
        self._keep(locals())


@final
class NoopPerfModel(IgnoredPart):
    """Rating of plans by their slowest rank."""

    def __init__(self, topology: Any) -> None:
        self._keep(locals())


@final
class NoopStorageModel(IgnoredPart):
    """Rating of plans by their memory."""

    def __init__(self, topology: Any) -> None:
        self._keep(locals())


@final
class EmbeddingStats(IgnoredPart):
    """Printer of plans; in tilerec, use `print(plan.report)`."""

    def __init__(self) -> None:
        self._keep(locals())


@final
class NoopEmbeddingStats(IgnoredPart):
    """Printer without output."""

    def __init__(self) -> None:
        self._keep(locals())


@final
class CustomTopologyData:
    """Memory sizes per rank for `Topology(custom_topology_data=...)`, equivalent to its `hbm_caps` and `ddr_caps`.

    Args:
        data: "hbm_cap" or "ddr_cap" -> bytes of each rank.
        world_size: number of ranks.

    Raises:
        ConfigError: `data` has another key, or a list whose length is not `world_size`.
    """

    supported_fields = ("ddr_cap", "hbm_cap")

    def __init__(self, data: Mapping[str, Sequence[int]], world_size: int) -> None:
        for key, values in data.items():
            if key not in self.supported_fields:
                raise ConfigError(
                    f"CustomTopologyData: data: got key {key!r}; expected one of "
                    f"{list(self.supported_fields)}. Pass other settings to Topology."
                )
            if len(values) != world_size:
                raise ConfigError(
                    f"CustomTopologyData: {key}: got {len(values)} numbers; expected {world_size}, one per rank."
                )
        self._data = {key: list(values) for key, values in data.items()}

    def has_data(self, key: str) -> bool:
        """Return True if `data` has the key."""
        return key in self._data

    def get_data(self, key: str) -> list[int]:
        """Return the bytes of each rank."""
        if key not in self._data:
            raise ConfigError(f"CustomTopologyData: got key {key!r}; expected {list(self._data)}.")
        return list(self._data[key])


@final
class BasicCommsBandwidths:
    """Link bandwidths in bytes per millisecond, for `Topology(generalized_comms_bandwidths=...)`."""

    def __init__(
        self,
        inter_host_bw: float = gigabytes_per_second(12.5),
        intra_host_bw: float = gigabytes_per_second(600),
    ) -> None:
        self.inter_host_bw, self.intra_host_bw = inter_host_bw, intra_host_bw
