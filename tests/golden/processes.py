"""Cases on ranks that are processes: 2D parallelism, and the names of sharded state.

The functions that ranks run are at the top of this file, so that processes find them.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.golden.digest import digest
from tests.golden.training import STEPS, Marks, Run, build, features, step_of
from tilerec import DistributedModelParallel, DMPCollection, Topology, reshard
from tilerec.parallel import full_state_dict
from tilerec.testing import Ranks

WORLD = 4


@functools.cache
def _pool() -> Ranks:
    """Four processes, started at the first case that needs them."""
    made = Ranks(WORLD, hosts=2)
    atexit.register(made.close)
    return made


class Model(nn.Module):
    """A collection at the path `tables`, and one dense parameter."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.tables = build(run)
        self.scale = nn.Parameter(torch.ones(1))


def trained(model: Any, run: Run, steps: range) -> list[Any]:
    """Train the collection of a sharded model on this rank's batches; return the outputs."""
    rank = torch.distributed.get_rank()
    return [step_of(model.module.tables, features(run, rank, step), float(WORLD)) for step in steps]


def two_d(run: Run, size: int, then: str | None, options: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Train in sharding groups of `size` ranks; `then`: resharded in the middle. Runs on every rank."""
    topology = Topology(WORLD, "cpu", local_world_size=2)
    group = Run(run.tiling, run.optimizer, run.form, {1: "1", 2: "2", 4: "2+2"}[size], run.data_type)
    model = DMPCollection(
        Model(run),
        "cpu",
        {"tables": group.plan},
        WORLD,
        size,
        topology=topology,
        init_data_parallel=False,
        **options,
    )
    outputs = trained(model, run, range(2))
    if then is not None:
        reshard(model, {"tables": group.plan_of(then)}, progress=False)
    outputs += trained(model, run, range(2, STEPS + 1))
    if options.get("sync") == "average":
        model.sync()
    state = model.fused_optimizer.full_state_dict()
    return [(digest(outputs), digest(full_state_dict(model)), digest(state))]


def _two_d(run: Run, size: int, then: str | None, options: dict[str, Any]) -> Marks:
    found = [rank[0] for rank in run_on_ranks(two_d, run, size, then, options)]
    assert len({rank[1:] for rank in found}) == 1, "ranks have different whole state"
    return {"outputs": digest([rank[0] for rank in found]), "weights": found[0][1], "state": found[0][2]}


def names(tiling: str, optimizer: str, form: str) -> list[str]:
    """The names of a sharded model's state, with the type and shape that they stand for. Runs on every rank."""
    run = Run(tiling, optimizer, form, "2+2")
    model = DistributedModelParallel(Model(run), plan={"tables": run.plan}, init_data_parallel=False)
    trained(model, run, range(1))
    lines = [f"state_dict {name} {list(value.shape)}" for name, value in model.state_dict().items()]
    lines += [f"parameter {name}" for name, _ in model.named_parameters()]
    lines += [f"buffer {name}" for name, _ in model.named_buffers()]
    return lines + optimizer_lines(model.fused_optimizer.state_dict())


def run_on_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function at the top of a module on the four ranks."""
    return _pool().run(function, *arguments)


def optimizer_lines(state: Any, path: str = "optimizer") -> list[str]:
    """A line for each entry of an optimizer's state dict."""
    if isinstance(state, dict):
        return [line for key in state for line in optimizer_lines(state[key], f"{path}/{key}")]
    if isinstance(state, list):
        return [line for i, item in enumerate(state) for line in optimizer_lines(item, f"{path}/{i}")]
    return [f"{path} {list(state.shape)}" if isinstance(state, Tensor) else f"{path} {type(state).__name__}"]


def names_of_ranks(tiling: str, optimizer: str, form: str) -> list[str]:
    """`names` of all ranks; a line that is not every rank's says whose it is."""
    ranks = run_on_ranks(names, tiling, optimizer, form)
    lines = dict.fromkeys(line for rank in ranks for line in rank)
    found = []
    for line in lines:
        own = [r for r, rank in enumerate(ranks) if line in rank]
        found.append(line if len(own) == WORLD else f"{line} on {own}")
    return found


CASES: dict[str, Callable[[], Marks]] = {
    f"two_d/{run.name}-{size}{'-' + then if then else ''}-{'-'.join(map(str, options.values()))}": partial(
        _two_d, run, size, then, options
    )
    for run, size, then, options in (
        (Run("row_wise", "rowwise_adagrad", "sum", "2+2"), 2, None, {"sync": "exact"}),
        (Run("column_wise", "adam", "sequence", "2+2", "types"), 2, None, {"sync": "exact", "exact": True}),
        (Run("mixed", "lamb", "weighted", "2+2", "bf16"), 2, "row_wise", {"sync": "exact"}),
        (Run("table_wise", "sgd_momentum", "mean", "2+2"), 1, None, {"sync": "exact"}),
        (Run("row_wise", "rowwise_adagrad_l2", "sum", "2+2"), 2, None, {"sync": "average"}),
        (Run("column_wise", "adagrad", "variable", "2+2", "types"), 2, None, {"sync": "average", "sync_interval": 2}),
        (
            Run("mixed", "rowwise_adagrad", "sequence", "2+2"), 1, None,
            {"sync": "average", "sync_interval": 1, "moment_scale": 0.5},
        ),
        (
            Run("table_wise", "partial_rowwise_adam", "sum", "2+2"), 2, "column_wise",
            {"sync": "average", "use_inter_host_allreduce": True},
        ),
        (Run("row_wise", "adamw", "sum", "2+2"), 4, None, {"sync": "exact"}),
    )
}  # fmt: skip
