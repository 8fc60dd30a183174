"""One rank of one side of `train_step.py`: a whole training step, from Parquet files to updated weights.

    PYTHON train_step_rank.py SIDE RANK WORLD RENDEZVOUS THREADS

Both sides run this file, each in its own environment: `DistributedModelParallel` over a DLRM or a DLRM with a cross
network, tables with row-wise Adagrad in the backward pass, dense parameters with `torch.optim.Adagrad`. They differ in
the modules that they import, and in the reader.

    tilerec     `TableDataset` over Parquet, with checks, a shuffle window and a thread that reads ahead
    TorchRec    `read` below: `iter_batches` of the rank's own row groups, one array per column, no shuffle and no loop
                over rows, in a thread that reads two batches ahead

Requests on stdin, answers on stdout: see `serve` in `sharded_peer.py`. `build` makes a model, `losses` trains on the
first batches of the files and returns the losses, `steps` measures some steps, `products` their matrix products alone,
`profile` the operators in them.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
import torch.distributed as dist
from sharded_peer import Case, Tile, fill, serve
from torch import Tensor, nn

TABLE_LR, DENSE_LR = 0.0005, 0.002
EPS = 1e-8
TABLE_SCALE = 0.02  # of the values of `fill`
FIRST_SUM = 0.1  # of squares in Adagrad; from 0, gradients as small as rounding errors make whole steps


@dataclass(frozen=True)
class Job:
    """One model on one kind of data, as both sides build it."""

    model: str  # "DLRM" or "DLRM_DCN"
    files: list[str]
    lengths: list[int]  # ids per sample of each feature
    rows: int  # of each table
    dim: int
    dense: int
    bottom: list[int]  # layers over the dense features
    top: list[int]  # layers over the interactions
    cross: list[int]  # layers of the cross network and their rank
    batch: int  # samples of a rank
    tiling: str
    ranks: int
    onednn: bool  # False: products by MKL on both sides

    @property
    def names(self) -> list[str]:
        return [f"c{t}" for t in range(len(self.lengths))]

    @property
    def case(self) -> Case:
        """Return the tables as `sharded_step.py` describes them, for placements."""
        return Case(self.tiling, self.dim, 1, len(self.lengths), self.rows, self.batch, self.ranks, 1)


# ------------------------------------------------------------------------------------------------- TorchRec's reader


def read(job: Job, rank: int, keyed: Any, batch_type: Any) -> Iterator[Any]:
    """Yield batches for ever from every W-th row group of the files; samples beyond whole batches are left out."""
    dense, names = [f"d{k}" for k in range(job.dense)], job.names
    ones = torch.ones(job.batch * len(names), dtype=torch.int32)
    flat = max(job.lengths) == 1
    while True:
        groups = itertools.count()
        for path in job.files:
            file = parquet.ParquetFile(path)
            own = [g for g in range(file.num_row_groups) if next(groups) % job.ranks == rank]
            for part in file.iter_batches(job.batch, row_groups=own, use_threads=False):
                if part.num_rows < job.batch:
                    continue
                columns = [part.column(name) for name in names]
                if flat:
                    ids, lengths = np.concatenate([c.to_numpy() for c in columns]), ones
                else:
                    ids = np.concatenate([c.flatten().to_numpy() for c in columns])
                    lengths = torch.from_numpy(
                        np.concatenate([np.diff(c.offsets.to_numpy()) for c in columns]).astype(np.int32)
                    )
                yield batch_type(
                    torch.from_numpy(np.stack([part.column(name).to_numpy() for name in dense], axis=1)),
                    keyed(names, torch.from_numpy(ids), lengths=lengths),
                    torch.from_numpy(part.column("label").to_numpy().copy()),
                )


def ahead(items: Iterator[Any], count: int = 2) -> Iterator[Any]:
    """Yield the items, which a thread makes up to `count` ahead."""
    ready: queue.Queue[Any] = queue.Queue(count)

    def run() -> None:
        for item in items:
            ready.put(item)

    threading.Thread(target=run, daemon=True).start()
    while True:
        yield ready.get()


# ------------------------------------------------------------------------------------------------------- both sides


class Side:
    """A library: its model, its batches and its pipeline."""

    keyed: Any
    batch: Any
    pipeline: Any

    def model(self, job: Job) -> tuple[nn.Module, Iterator[Tile]]:
        """Return the wrapped model, and the tiles of its tables."""
        raise NotImplementedError

    def batches(self, job: Job, rank: int) -> Iterator[Any]:
        """Yield batches for ever, read as a user of the library reads them."""
        raise NotImplementedError


class Tilerec(Side):
    def __init__(self) -> None:
        from tilerec.data.batch import Batch
        from tilerec.pipelines import TrainPipelineSparseDist
        from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

        self.keyed, self.batch, self.pipeline = KeyedJaggedTensor, Batch, TrainPipelineSparseDist

    def model(self, job: Job) -> tuple[nn.Module, Iterator[Tile]]:
        from sharded_step import placement, tiles_of

        from tilerec.models import dlrm
        from tilerec.modules.embedding_bag import EmbeddingBagCollection
        from tilerec.optim.attach import apply_optimizer_in_backward
        from tilerec.parallel import DistributedModelParallel
        from tilerec.spec.optimizer import RowWiseAdagrad
        from tilerec.spec.table import EmbeddingBagConfig

        configs = [
            EmbeddingBagConfig(job.rows, job.dim, f"t{t}", feature_names=[name]) for t, name in enumerate(job.names)
        ]
        tables = EmbeddingBagCollection(configs, device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": TABLE_LR, "eps": EPS})
        model = dlrm.DLRMTrain(constructed(job, tables, dlrm))
        path = "model.sparse_arch.embedding_bag_collection"
        plan = {path: {f"t{t}": placement(job.case, t) for t in range(len(configs))}}
        return DistributedModelParallel(model, plan=plan, device="cpu"), tiles_of(tables)

    def batches(self, job: Job, rank: int) -> Iterator[Any]:
        from tilerec.data import Columns, DenseColumn, IdColumn, LabelColumn, ParquetGroups, TableDataset, TableRows

        kind: Any = "single" if max(job.lengths) == 1 else "list"
        columns = Columns(
            labels=(LabelColumn("label"),),
            dense=tuple(DenseColumn(f"d{k}") for k in range(job.dense)),
            ids=tuple(IdColumn(name, kind=kind) for name in job.names),
            tables=tuple(TableRows(name, job.rows, "rows") for name in job.names),
        )
        data = TableDataset(ParquetGroups(job.files), columns, lanes=job.ranks, shuffle_rows=1 << 14)
        for epoch in itertools.count():
            for share in data.train_shares(job.batch * job.ranks, epoch, rank=rank, world_size=job.ranks):
                if share.total == job.batch * job.ranks:
                    yield share.batch


class TorchRec(Side):
    def __init__(self) -> None:
        from torchrec import KeyedJaggedTensor
        from torchrec.datasets.utils import Batch
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        self.keyed, self.batch, self.pipeline = KeyedJaggedTensor, Batch, TrainPipelineSparseDist

    def model(self, job: Job) -> tuple[nn.Module, Iterator[Tile]]:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from sharded_peer import torchrec_placement, torchrec_tiles
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan
        from torchrec.distributed.types import ShardingPlan
        from torchrec.models import dlrm

        configs = [
            EmbeddingBagConfig(num_embeddings=job.rows, embedding_dim=job.dim, name=f"t{t}", feature_names=[name])
            for t, name in enumerate(job.names)
        ]
        tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": TABLE_LR, "eps": EPS}
        sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused)
        plan = construct_module_sharding_plan(
            tables, {f"t{t}": torchrec_placement(job.case, t) for t in range(len(configs))}, sharder=sharder,
            local_size=job.ranks, world_size=job.ranks, device_type="cpu",
        )  # fmt: skip
        path = "model.sparse_arch.embedding_bag_collection"
        model = DistributedModelParallel(
            dlrm.DLRMTrain(constructed(job, tables, dlrm)), device=torch.device("cpu"),
            plan=ShardingPlan({path: plan}), sharders=[sharder],
        )  # fmt: skip
        sharded = model.module.get_submodule(path)
        return model, torchrec_tiles(sharded)

    def batches(self, job: Job, rank: int) -> Iterator[Any]:
        return ahead(read(job, rank, self.keyed, self.batch))


def constructed(job: Job, tables: Any, dlrm: Any) -> nn.Module:
    """Return a model of a library, by the constructors that both libraries have."""
    layers = (tables, job.dense, job.bottom, job.top)
    made: nn.Module = dlrm.DLRM(*layers) if job.model == "DLRM" else dlrm.DLRM_DCN(*layers, *job.cross)
    return made


@torch.no_grad()
def fill_dense(model: nn.Module) -> list[nn.Parameter]:
    """Fill the dense parameters with the same values on both sides; return them."""
    dense = sorted((name, p) for name, p in model.named_parameters() if "embedding_bags" not in name)
    generator = torch.Generator().manual_seed(0)
    for _, parameter in dense:
        bound = (6 / parameter.shape[1]) ** 0.5 if parameter.dim() == 2 else 0.1  # layers keep the scale of their input
        parameter.copy_((torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound)
    return [p for _, p in dense]


class Trainer:
    """A model with its two loops: plain, and with a pipeline."""

    def __init__(self, side: Side, job: Job, rank: int) -> None:
        self.side, self.job, self.rank = side, job, rank
        self.model, tiles = side.model(job)
        for tile in tiles:
            fill([tile], job.dim)
            tile.values.mul_(TABLE_SCALE)
        self.optimizer = torch.optim.Adagrad(
            fill_dense(self.model), lr=DENSE_LR, eps=EPS, initial_accumulator_value=FIRST_SUM
        )
        self.model.train()
        self.pipeline = side.pipeline(self.model, self.optimizer, torch.device("cpu"))
        self.sources = {loop: side.batches(job, rank) for loop in ("plain", "pipeline")}

    def begin(self, loop: str) -> None:
        """Prepare for steps of a loop; TorchRec's pipeline rewrites the model, and gives it back."""
        if loop == "plain":
            self.pipeline.detach()

    def step(self, loop: str, source: Iterator[Any]) -> Tensor:
        """Train on the next batch; return its loss."""
        if loop == "pipeline":
            return self.pipeline.progress(source)[0]
        self.optimizer.zero_grad()
        loss, (detached, *_) = self.model(next(source))
        loss.backward()
        self.optimizer.step()
        return detached

    def losses(self, loop: str, first: int, count: int) -> list[float]:
        """Train on batches of the files in their order, the same on both sides; return this rank's losses.

        Both sides multiply with MKL here, because other roundings grow over the steps.
        """
        torch.backends.mkldnn.set_flags(False)
        given = itertools.islice(read(self.job, self.rank, self.side.keyed, self.side.batch), first, first + count)
        self.begin(loop)
        found = [float(self.step(loop, given)) for _ in range(count)]
        torch.backends.mkldnn.set_flags(self.job.onednn)
        return found

    def products(self) -> list[tuple[Tensor, Tensor, Tensor, list[Tensor]]]:
        """Return the operands of a step's matrix products: (input, weight, gradient, results), per dense matrix."""
        operands = []
        for name, weight in self.model.named_parameters():
            if weight.dim() == 2 and "embedding_bags" not in name:
                (width, features), batch = weight.shape, self.job.batch
                least, most = sorted((width, features))
                sizes = [(batch, features), (batch, width), (batch, width), (batch, features), (least, most)]
                read, grad, *results = (torch.rand(size) for size in sizes)
                operands.append((read, weight.detach(), grad, results))
        return operands

    def close(self) -> None:
        """Release the tables before the next model."""
        self.sources.clear()


def multiply(operands: list[tuple[Tensor, Tensor, Tensor, list[Tensor]]], dense: int) -> None:
    """Compute a step's matrix products by MKL, into memory that is there already; `dense` features get no gradient.

    Gradients of weights are computed with their shorter side first, which MKL does faster.
    """
    for read, weight, _, results in operands:
        torch.mm(read, weight.t(), out=results[0])
    for read, weight, grad, results in reversed(operands):
        if read.shape[1] != dense:
            torch.mm(grad, weight, out=results[1])
        left, right = (read, grad) if read.shape[1] < grad.shape[1] else (grad, read)
        torch.mm(left.t(), right, out=results[2])


def main() -> None:
    """Serve requests."""
    side = {"tilerec": Tilerec, "torchrec": TorchRec}[sys.argv[1]]()

    def build(request: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        made["trainer"] = Trainer(side, Job(**request["job"]), dist.get_rank())
        return {}

    def losses(request: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        return {"losses": made["trainer"].losses(request["loop"], request["first"], request["count"])}

    def timed(count: int, step: Callable[[], Any]) -> dict[str, Any]:
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(count):
            step()
        return {
            "wall": 1e3 * (time.perf_counter() - wall) / count,
            "processor": 1e3 * (time.process_time() - processor) / count,
        }

    def steps(request: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        trainer, loop = made["trainer"], request["loop"]
        trainer.begin(loop)
        return timed(request["steps"], lambda: trainer.step(loop, trainer.sources[loop]))

    def products(request: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        trainer = made["trainer"]
        operands = trainer.products()
        multiply(operands, trainer.job.dense)
        return timed(request["steps"], lambda: multiply(operands, trainer.job.dense))

    def profile(request: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        """Return the processor ms per step of rank 0's operators, by name."""
        trainer, loop, count = made["trainer"], request["loop"], request["steps"]
        trainer.begin(loop)
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(count):
                trainer.step(loop, trainer.sources[loop])
        return {"operators": {e.key: e.self_cpu_time_total / 1e3 / count for e in profiler.key_averages()}}

    more: dict[str, Callable[..., dict[str, Any]]] = {
        "build": build, "losses": losses, "steps": steps, "products": products, "profile": profile,
    }  # fmt: skip

    def hello(*_: Any) -> dict[str, Any]:
        found = {"torch": torch.__version__, "pyarrow": pa.__version__}
        if isinstance(side, TorchRec):
            import torchrec

            found["torchrec"] = torchrec.__version__
        return found

    serve(None, hello, more)  # type: ignore[arg-type]  # `prepare` is not used


if __name__ == "__main__":
    import logging
    import warnings

    sys.path.insert(0, str(Path(__file__).parent))
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    main()
