"""Parts of TorchRec's planner, by their public names and arguments, so that a script that sets them up runs.

Its planner lists options, proposes and partitions with exchangeable parts. The search here has none of these steps
(docs/planner.md): the parts keep their arguments, `EmbeddingShardingPlanner` takes them, and warns that they change
nothing. What describes machines (the last two) is read by `Topology`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, final

from tilerec.errors import ConfigError
from tilerec.spec.topology import gigabytes_per_second


class SortBy(Enum):
    """What a greedy partitioner of TorchRec orders tables by."""

    STORAGE = "storage"
    PERF = "perf"


class PlannerErrorType(Enum):
    """Reasons of TorchRec's planner to fail. `PlannerError.error_type` is INSUFFICIENT_STORAGE or STRICT_CONSTRAINTS;
    the others are plain `ConfigError`s here.
    """

    INSUFFICIENT_STORAGE = "insufficient_storage"
    STRICT_CONSTRAINTS = "strict_constraints"
    PARTITION = "partition"
    OTHER = "other"
    PLANNER_INPUT_CONTEXT_MISMATCH = "planner_input_context_mismatch"
    PLAN_LOADING_FAILED = "plan_loading_failed"
    INVALID_RANK_ASSIGNMENT = "invalid_rank_assignment"
    INPUT_VALIDATION = "input_validation"
    MISSING_MODULE_IN_PLAN = "missing_module_in_plan"
    INVALID_COMPUTE_KERNEL = "invalid_compute_kernel"


class Part:
    """A part that the search does not use; `arguments` are those it was made with."""

    arguments: dict[str, Any]

    def _keep(self, given: dict[str, Any]) -> None:
        self.arguments = {name: value for name, value in given.items() if name not in ("self", "__class__")}


@final
class EmbeddingEnumerator(Part):
    """Lists the options of tables; see `tilerec plan explain` for those considered here."""

    def __init__(
        self, topology: Any, batch_size: int | None = None, constraints: Any = None, estimator: Any = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:  # fmt: skip
        self._keep(locals())


@final
class GreedyProposer(Part):
    """Proposes options by their cost."""

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._keep(locals())


@final
class UniformProposer(Part):
    """Proposes one sharding type for all tables."""

    def __init__(self, use_depth: bool = True) -> None:
        self._keep(locals())


@final
class GridSearchProposer(Part):
    """Proposes all combinations."""

    def __init__(self, max_proposals: int = 10000) -> None:
        self._keep(locals())


@final
class DynamicProgrammingProposer(Part):
    """Proposes by a knapsack over memory."""

    def __init__(self, hbm_bins_per_device: int = 100) -> None:
        self._keep(locals())


@final
class EmbeddingOffloadScaleupProposer(Part):
    """Proposes cache sizes."""

    def __init__(self, use_depth: bool = True) -> None:
        self._keep(locals())


@final
class GreedyPerfPartitioner(Part):
    """Places shards by cost."""

    def __init__(self, sort_by: Any = SortBy.STORAGE, balance_modules: bool = False) -> None:
        self._keep(locals())


@final
class MemoryBalancedPartitioner(Part):
    """Places shards by cost, then evens out memory."""

    def __init__(
        self, max_search_count: int = 10, tolerance: float = 0.02, balance_modules: bool = False
    ) -> None:
        self._keep(locals())


@final
class EmbeddingPerfEstimator(Part):
    """Estimates the cost of shards; docs/planner-cost.md has the model used here."""

    def __init__(self, topology: Any, constraints: Any = None, is_inference: bool = False) -> None:
        self._keep(locals())


@final
class EmbeddingStorageEstimator(Part):
    """Estimates the memory of shards."""

    def __init__(
        self, topology: Any, constraints: Any = None, pipeline_type: Any = None,
        run_embedding_at_peak_memory: bool = False, is_inference: bool = False,
    ) -> None:  # fmt: skip
        self._keep(locals())


@final
class NoopPerfModel(Part):
    """Rates plans by their slowest rank."""

    def __init__(self, topology: Any) -> None:
        self._keep(locals())


@final
class NoopStorageModel(Part):
    """Rates plans by their memory."""

    def __init__(self, topology: Any) -> None:
        self._keep(locals())


@final
class EmbeddingStats(Part):
    """Prints a plan; `print(plan.report)` does here."""

    def __init__(self) -> None:
        self._keep(locals())


@final
class NoopEmbeddingStats(Part):
    """Prints nothing."""

    def __init__(self) -> None:
        self._keep(locals())


@final
class CustomTopologyData:
    """How much memory each rank has, for `Topology(custom_topology_data=...)`; `hbm_caps` and `ddr_caps` say the same.

    Args:
        data: "hbm_cap" or "ddr_cap" -> bytes of each rank.
        world_size: number of ranks.

    Raises:
        ConfigError: another key, or another number of numbers.
    """

    supported_fields = ("ddr_cap", "hbm_cap")

    def __init__(self, data: Mapping[str, Sequence[int]], world_size: int) -> None:
        for key, values in data.items():
            if key not in self.supported_fields:
                raise ConfigError(
                    f"CustomTopologyData: {key!r} is none of {list(self.supported_fields)}; say it to the Topology."
                )
            if len(values) != world_size:
                raise ConfigError(
                    f"CustomTopologyData: {key} has {len(values)} numbers for {world_size} ranks; give one for each."
                )
        self._data = {key: list(values) for key, values in data.items()}

    def has_data(self, key: str) -> bool:
        """Whether it says something of `key`."""
        return key in self._data

    def get_data(self, key: str) -> list[int]:
        """Bytes of each rank."""
        if key not in self._data:
            raise ConfigError(f"CustomTopologyData: it has no {key!r}; it has {list(self._data)}.")
        return list(self._data[key])


@final
class BasicCommsBandwidths:
    """Links, bytes per millisecond, for `Topology(generalized_comms_bandwidths=...)`."""

    def __init__(
        self,
        inter_host_bw: float = gigabytes_per_second(12.5),
        intra_host_bw: float = gigabytes_per_second(600),
    ) -> None:
        self.inter_host_bw, self.intra_host_bw = inter_host_bw, intra_host_bw
