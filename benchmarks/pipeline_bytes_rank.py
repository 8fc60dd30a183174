"""One process of `pipeline_bytes.py`: bytes of batches that are alive in a pipeline of either library.

    torchrun --nproc-per-node 2 benchmarks/pipeline_bytes_rank.py {tilerec,torchrec} PIPELINE OUT

The bytes are those that the C library has handed out, in all threads (`mallinfo2`). A first pass over the batches
learns the routes and fills the buffers that stay. In the second pass, what is more than at its start belongs to
batches: as they were read, sorted, on their way, and received. It is counted when a batch has been read, and before and
after the forward; in a pipeline of tilerec also at the end of each stage. The model has next to no activations: it adds
up a few columns of 64 rows for each feature and sample. torch's profiler does not serve here: it misses what threads of
gloo release.

Reads no file and imports the library that it measures only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

KEYS = ["a", "b"]
SAMPLES, LENGTH, ROWS, STEPS, DENSE = 512, 64, 50_000, 10, 13


class MallInfo(ctypes.Structure):
    """Result of `mallinfo2`: ten sizes. `hblkhd` are bytes in mapped blocks, `uordblks` other bytes in use."""

    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


class Meter:
    """Bytes in use beyond those at `start`, by the moment in a step."""

    def __init__(self) -> None:
        self._info = ctypes.CDLL(None).mallinfo2
        self._info.restype = MallInfo
        self.start()

    def start(self) -> None:
        self.found: dict[str, list[int]] = {}
        self._before = self._bytes()

    def _bytes(self) -> int:
        info = self._info()
        return int(info.uordblks + info.hblkhd)

    def note(self, moment: str) -> None:
        self.found.setdefault(moment, []).append(self._bytes() - self._before)

    @contextlib.contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """In place of a pipeline's `StageTimes`."""
        yield
        self.note(stage)


METER = Meter()


class Batch:
    """Lists of ids, numbers and labels of `SAMPLES` samples."""

    def __init__(self, jagged: Any, dense: Tensor, labels: Tensor) -> None:
        self.jagged, self.dense, self.labels = jagged, dense, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        parts = (self.jagged, self.dense, self.labels)
        return Batch(*(part.to(device=device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream: Any) -> None:
        """Nothing: the batches stay on the CPU."""

    def pin_memory(self) -> Batch:
        return self


def made(kjt: Any, seed: int) -> Batch:
    """A new batch: int64 ids, `LENGTH` of them on average per feature and sample."""
    generator = torch.Generator().manual_seed(seed)
    more = torch.randint(-LENGTH // 2, LENGTH // 2, (SAMPLES,), generator=generator, dtype=torch.int32)
    lengths = torch.cat((LENGTH + more, LENGTH - more))  # the same number of ids in every batch
    ids = torch.randint(ROWS, (2 * SAMPLES * LENGTH,), generator=generator)
    jagged = kjt(KEYS, ids, lengths=lengths)
    return Batch(jagged, torch.randn(SAMPLES, DENSE, generator=generator), torch.rand(SAMPLES, generator=generator))


def batch_bytes(kjt: Any) -> int:
    """Bytes of a batch as the model sees it: the offsets belong to it, as features keep them once they are known."""
    one = made(kjt, 0)
    tensors = (one.jagged.values(), one.jagged.lengths(), one.jagged.offsets(), one.dense, one.labels)
    return sum(tensor.nbytes for tensor in tensors)


class Model(nn.Module):
    """Two tables of narrow rows, and a linear layer."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.over = nn.Linear(8 + DENSE, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, None]:
        METER.note("forward begins")
        pooled = self.tables(batch.jagged).values()
        logits = self.over(torch.cat((batch.dense, pooled), dim=1)).squeeze(-1)
        METER.note("forward ends")
        return (logits - batch.labels).square().mean(), None


def options_of(name: str) -> tuple[str, dict[str, Any]]:
    """Return the class and the arguments of a pipeline: "Name" or "Name free_features_storage_early"."""
    kind, *options = name.split()
    return kind, dict.fromkeys(options, True)


def tilerec_side(name: str) -> tuple[Any, Any, type]:
    """The pipeline `name` over tables sharded by rows, what marks its stages, and the class of its features."""
    import tilerec.pipelines as pipelines
    from tilerec.comms.process import ProcessGroupComms
    from tilerec.modules.embedding_bag import EmbeddingBagCollection
    from tilerec.optim.attach import apply_optimizer_in_backward
    from tilerec.parallel.shard import shard
    from tilerec.planner import row_wise
    from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
    from tilerec.spec.optimizer import SGD
    from tilerec.spec.table import EmbeddingBagConfig

    tables = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 4, f"t{key}", feature_names=[key]) for key in KEYS])
    apply_optimizer_in_backward(SGD, tables.parameters(), {"lr": 0.1})
    model = Model(tables)
    shard(model, plan=row_wise(), mesh=ProcessGroupComms())
    dense = torch.optim.SGD(model.over.parameters(), lr=0.1)
    kind, options = options_of(name)
    pipeline = getattr(pipelines, kind)(model, dense, torch.device("cpu"), **options)
    return pipeline, pipeline._pipeline, KeyedJaggedTensor


def torchrec_side(name: str) -> tuple[Any, Any, type]:
    """The same with TorchRec; its pipelines mark their stages themselves."""
    import torchrec
    import torchrec.distributed.train_pipeline as pipelines
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.streamable import Pipelineable

    Pipelineable.register(Batch)  # an abstract class
    configs = [
        torchrec.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=4, name=f"t{key}", feature_names=[key])
        for key in KEYS
    ]
    tables, cpu = torchrec.EmbeddingBagCollection(configs, device=torch.device("cpu")), torch.device("cpu")
    _apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    model, sharder, world = Model(tables), EmbeddingBagCollectionSharder(), dist.get_world_size()
    plan = construct_module_sharding_plan(
        tables, {config.name: row_wise() for config in configs}, sharder, local_size=world, world_size=world,
        device_type="cpu",
    )  # fmt: skip
    wrapped = DistributedModelParallel(
        model, ShardingEnv.from_process_group(dist.group.WORLD), cpu, ShardingPlan({"tables": plan}), [sharder]
    )
    dense = [parameter for key, parameter in wrapped.named_parameters() if "over" in key]
    kind, options = options_of(name)
    pipeline = getattr(pipelines, kind)(wrapped, torch.optim.SGD(dense, lr=0.1), cpu, **options)
    return pipeline, None, torchrec.KeyedJaggedTensor


def run(pipeline: Any, kjt: Any) -> None:
    """One pass over new batches; no other reference to them exists."""

    def batches() -> Iterator[Batch]:
        for step in range(STEPS):
            batch = made(kjt, step)
            METER.note("read")
            yield batch
            del batch

    iterator = batches()
    while True:
        try:
            pipeline.progress(iterator)
        except StopIteration:
            return


def count(side: Callable[[str], tuple[Any, Any, type]], name: str) -> dict[str, float]:
    """Bytes alive by moment, in batches: medians over the steps, as threads of gloo release some messages late."""
    pipeline, stages, kjt = side(name)
    run(pipeline, kjt)
    if stages is not None:
        stages.times = METER
    METER.start()
    run(pipeline, kjt)
    return {moment: round(median(sizes) / batch_bytes(kjt), 2) for moment, sizes in METER.found.items()}


if __name__ == "__main__":
    library, pipeline, out = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    found = count({"tilerec": tilerec_side, "torchrec": torchrec_side}[library], pipeline)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()
