"""The other side of `sharded_step.py`: one rank of TorchRec's sharded `EmbeddingBagCollection`, over gloo.

`sharded_step.py` starts W processes of this file with the peer's Python, and W of its own. It communicates with each
over a pipe, one JSON object a line. The parts that both sides share are here and need only torch: the workload
(`Case`), the initial values of tables, a rank's report of a step, and the loop that serves requests.

    hello    versions
    prepare  make a sharded module, fill its tables, run one step; write its output and the touched rows to a file
    time     run some steps
    drop     free a module

Legend: W ranks, T tables, E rows, D columns, B samples of a rank, L ids per bag, K batches.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peer import LR, PERIOD, table_values
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    tiling: str  # table-wise, column-wise, row-wise, data-parallel, table-row-wise or grid
    dim: int
    length: int
    tables: int
    rows: int
    batch: int
    ranks: int
    hosts: int
    wire: str = "fp32"
    pooled: bool = True

    @property
    def host_ranks(self) -> list[list[int]]:
        """Return the ranks of each host."""
        each = self.ranks // self.hosts
        return [list(range(h * each, (h + 1) * each)) for h in range(self.hosts)]


class Tile(NamedTuple):
    """A rectangle of a table that this rank holds; `values` is its memory."""

    table: int
    row: int
    column: int
    values: Tensor


class Lacks(Exception):
    """Raised if the peer lacks a case; the message gives the reason."""


class Runner:
    """A sharded module and its steps. Each side derives its own."""

    remark = ""

    def __init__(self, case: Case, data: dict[str, Any], rank: int) -> None:
        self.case, self.rank = case, rank
        self.ids = data["ids"][rank]  # K times [T * B * L]
        self.grad = data["grad"][rank]  # [B, T * D], by table
        self.names = [f"f{t}" for t in range(case.tables)]
        self.lengths = torch.full((case.tables * case.batch,), case.length, dtype=torch.int32)
        # Each id of a bag gets the bag's gradient, so both kinds of modules make the same update. Per table [B * L, D].
        parts = [] if case.pooled else self.grad.split(case.dim, dim=1)
        self.id_grads = [part.repeat_interleave(case.length, dim=0) for part in parts]

    def step(self, k: int) -> Any:
        """Run forward, backward and update with batch `k`; return the module's output: `[B, T * D]`, or by table."""
        raise NotImplementedError

    def by_table(self, output: Any) -> Tensor:
        """Return an output with its columns in the order of the tables; unpooled rows are added up by bag."""
        if self.case.pooled:
            return output.detach()
        size = self.case.batch, self.case.length, self.case.dim
        return torch.cat([output[name].values().detach().view(size).sum(1) for name in self.names], dim=1)

    def tiles(self) -> Iterable[Tile]:
        """Yield the memory of this rank's tiles of the tables."""
        raise NotImplementedError

    def sent(self) -> int | None:
        """Return the bytes that this rank sent to others in its last step, if it counts them."""
        return None

    def close(self) -> None:
        """Release resources that are not freed with the object."""


# ------------------------------------------------------------------------------------------------------------ shared


def expected_rows(tile: Tile, dim: int, rows: Tensor) -> Tensor:
    """Return the initial values of some rows of a tile, by the rule of `fill_table`."""
    columns = torch.arange(tile.column, tile.column + tile.values.shape[1])
    return table_values(tile.table, tile.values.dtype)[(rows[:, None] * dim + columns) % PERIOD]


def blocks(tile: Tile) -> Iterator[tuple[slice, Tensor]]:
    """Yield a tile's rows some thousands at a time: their positions in the tile, and their numbers in the table."""
    for at in range(0, tile.values.shape[0], 8192):
        end = min(at + 8192, tile.values.shape[0])
        yield slice(at, end), torch.arange(tile.row + at, tile.row + end)


def fill(tiles: Iterable[Tile], dim: int) -> None:
    """Fill every table with the same initial values in every tiling, process and version."""
    for tile in tiles:
        for here, rows in blocks(tile):
            tile.values[here] = expected_rows(tile, dim, rows)


def result_of(runner: Runner, touched: list[Tensor]) -> dict[str, Any]:
    """Run one step from fresh tables; return the output, touched rows per tile, and number of other changed rows."""
    case, held, strays = runner.case, [], 0
    tiles = list(runner.tiles())
    fill(tiles, case.dim)
    output = runner.by_table(runner.step(0)).float().clone()
    for tile in tiles:
        rows = touched[tile.table]
        rows = rows[(rows >= tile.row) & (rows < tile.row + tile.values.shape[0])]
        untouched = torch.ones(tile.values.shape[0], dtype=torch.bool)
        untouched[rows - tile.row] = False
        for here, numbers in blocks(tile):
            changed = (tile.values[here] != expected_rows(tile, case.dim, numbers)).any(1)
            strays += int((changed & untouched[here]).sum())
        held.append(
            (
                tile.table,
                tile.column,
                tile.column + tile.values.shape[1],
                rows,
                tile.values[rows - tile.row].clone(),
            )
        )
    return {"output": output, "tiles": held, "strays": strays}


def timed(runner: Runner, steps: int, batches: int) -> float:
    """Return the mean seconds of a step on this rank; ranks begin together."""
    dist.barrier()
    before = time.perf_counter()
    for k in range(steps):
        runner.step(k % batches)
    return (time.perf_counter() - before) / steps


Answer = Callable[[dict[str, Any], "dict[str, Runner]"], dict[str, Any]]


def serve(make: Callable[[Case, dict[str, Any], int], Runner], hello: Answer, more: dict[str, Answer]) -> None:
    """Run one rank: `RANK WORLD RENDEZVOUS THREADS` on the command line, requests on stdin."""
    rank, world, rendezvous, threads = int(sys.argv[-4]), int(sys.argv[-3]), sys.argv[-2], int(sys.argv[-1])
    answers = os.fdopen(os.dup(1), "w")  # output of libraries goes to stderr
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    runners: dict[str, Runner] = {}
    batches = 1

    def prepare(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal batches
        data = torch.load(request["data"])
        batches = len(data["ids"][rank])
        runner = make(Case(**request["case"]), data, rank)
        torch.save(result_of(runner, data["touched"]), f"{request['result']}.{rank}")
        runners[request["name"]] = runner
        return {"remark": runner.remark, "sent": runner.sent()}

    for line in sys.stdin:
        request = json.loads(line)
        do, answer = request["do"], {}
        try:
            if do == "hello":
                answer = hello(request, runners)
            elif do == "prepare":
                try:
                    answer = prepare(request)
                except Lacks as error:
                    answer = {"lacks": str(error)}
            elif do == "time":
                answer = {"seconds": timed(runners[request["name"]], request["steps"], batches)}
            elif do == "drop":
                for runner in runners.values():
                    runner.close()
                runners.clear()
                runner = None  # type: ignore[assignment]
                gc.collect()
            else:
                answer = more[do](request, runners)
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # after a failed rank, the end of a group would wait for calls that never end


# ---------------------------------------------------------------------------------------------------------- TorchRec


class TorchRec(Runner):
    """TorchRec's sharded collection on CPU, by a plan made by hand."""

    def __init__(self, case: Case, data: dict[str, Any], rank: int) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan
        from torchrec.distributed.types import ShardingEnv
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

        super().__init__(case, data, rank)
        if case.hosts > 1:
            raise Lacks("hosts: only ours is run on several")
        if case.wire != "fp32":
            raise Lacks("wire: only ours is run with another")
        self.batch_type = KeyedJaggedTensor
        config = EmbeddingBagConfig if case.pooled else EmbeddingConfig
        configs = [
            config(num_embeddings=case.rows, embedding_dim=case.dim, name=f"t{t}", feature_names=[name])
            for t, name in enumerate(self.names)
        ]
        collection = EmbeddingBagCollection if case.pooled else EmbeddingCollection
        module = collection(tables=configs, device=torch.device("meta"))
        fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
        sharder = (EmbeddingBagCollectionSharder if case.pooled else EmbeddingCollectionSharder)(fused_params=fused)
        plan = construct_module_sharding_plan(
            module,
            {f"t{t}": torchrec_placement(case, t) for t in range(case.tables)},
            sharder=sharder,
            local_size=case.ranks,
            world_size=case.ranks,
            device_type="cpu",
        )
        self.module = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"))
        self.optimizer: torch.optim.Optimizer | None = None
        shards = plan["t0"].sharding_spec.shards if case.tiling != "data-parallel" else []
        self.remark = "; ".join(_remarks(case, shards))
        if case.tiling == "data-parallel":
            # Its replicas have no fused optimizer, so this one updates them.
            self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LR, fused=True)
        self.columns: Tensor | None = None
        self.by_module: Tensor | None = None

    def step(self, k: int) -> Any:
        features = self.batch_type(self.names, self.ids[k], lengths=self.lengths)
        pooled = self.module(features).wait()
        if not self.case.pooled:
            torch.autograd.backward([pooled[name].values() for name in self.names], self.id_grads)
            self._update()
            return pooled
        values = pooled.values()
        if self.by_module is None:
            # Its columns have the order of its shards: permute the given gradient to it once, before any timing.
            D = self.case.dim
            order = [self.names.index(key) for key in pooled.keys()]  # noqa: SIM118 - no dict
            assert pooled.length_per_key() == [D] * len(order)
            columns = torch.cat([torch.arange(t * D, (t + 1) * D) for t in order])
            self.by_module, self.columns = self.grad[:, columns].contiguous(), columns.argsort()
        values.backward(self.by_module)
        self._update()
        return values

    def _update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def by_table(self, output: Any) -> Tensor:
        found = super().by_table(output)
        return found[:, self.columns] if self.case.pooled else found

    def tiles(self) -> Iterator[Tile]:
        yield from torchrec_tiles(self.module)


def torchrec_tiles(module: torch.nn.Module) -> Iterator[Tile]:
    """Yield the tiles of a sharded collection with tables t0, t1, …"""
    for name, value in module.state_dict().items():
        table = int(name.split(".")[-2][1:])
        if not hasattr(value, "local_shards"):  # replicas are plain tensors
            yield Tile(table, 0, 0, value.detach())
            continue
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            yield Tile(table, row, column, shard.tensor.detach())


def torchrec_placement(case: Case, table: int) -> Any:
    """Return the entry of a table in TorchRec's plan."""
    from torchrec.distributed import sharding_plan

    if case.tiling == "table-wise":
        return sharding_plan.table_wise(rank=table % case.ranks, compute_kernel="fused")
    if case.tiling == "column-wise":
        return sharding_plan.column_wise(ranks=list(range(case.ranks)), compute_kernel="fused")
    if case.tiling == "row-wise":
        return sharding_plan.row_wise(compute_kernel="fused")
    if case.tiling == "data-parallel":
        return sharding_plan.data_parallel()
    raise Lacks(f"{case.tiling}: only ours is run")


def _remarks(case: Case, shards: list[Any]) -> Iterator[str]:
    """Yield remarks on the peer's side of a row; the planner itself is called where possible."""
    if case.tiling == "data-parallel":
        yield "TorchRec: no optimizer in the backward of replicas; torch.optim.SGD(fused=True) is timed with it"
        return
    sizes = sorted({tuple(shard.shard_sizes) for shard in shards})
    if case.tiling == "column-wise":
        if len(shards) != case.ranks:
            yield f"TorchRec: {len(shards)} shards of {sizes}"
        widest = _planner_shards(case, "column_wise")
        if widest == 1:
            yield "TorchRec: plan by hand; its planner leaves such tables whole (table-wise)"
    elif case.tiling == "row-wise":
        assert len(shards) == case.ranks
        if _planner_shards(case, "row_wise") is None:
            yield "TorchRec: plan by hand; its planner refuses row_wise on CPU"


def _planner_shards(case: Case, kind: str) -> int | None:
    """Return the number of shards that TorchRec's planner makes of such a table by a type; None: it refuses."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

    config = EmbeddingBagConfig(num_embeddings=case.rows, embedding_dim=case.dim, name="t0", feature_names=["f0"])
    module = torch.nn.ModuleDict({"m": EmbeddingBagCollection(tables=[config], device=torch.device("meta"))})
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=case.ranks, compute_device="cpu"),
        constraints={"t0": ParameterConstraints(sharding_types=[kind])},
    )
    try:
        plan = planner.plan(module, [EmbeddingBagCollectionSharder()])
    except Exception:
        return None
    return len(plan.plan["m"]["t0"].sharding_spec.shards)


def _hello(*_: Any) -> dict[str, Any]:
    import fbgemm_gpu
    import torchrec

    return {
        "torchrec": torchrec.__version__,
        "fbgemm": fbgemm_gpu.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


if __name__ == "__main__":
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    serve(TorchRec, _hello, {})
