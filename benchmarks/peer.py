"""The other side of `lookup.py`: FBGEMM's CPU kernels and ATen's `embedding_bag`, in their own environment.

`lookup.py` starts this file with the peer's Python and communicates over a pipe, one JSON object a line: prepare a
case, run it once for its result, time it. While one side works the other waits for its line. The workload's definition
(`Case`, `fill_table`) is here and imported by both sides; only torch is needed for that.

Legend: T tables, E rows, D columns, B samples, L ids per bag, N = T * B * L ids.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LR, EPS = 0.01, 1e-8


@dataclass(frozen=True)
class Case:
    """One point of the grid; `kind` is pooled, sequence, pooled-train or sequence-train."""

    kind: str
    tables: int
    rows: int
    dim: int
    dtype: str
    batch: int
    length: int
    ids: str  # "zipf" or "uniform"
    threads: int
    optimizer: str = ""
    output: str = "fp32"

    @property
    def pooled(self) -> bool:
        return self.kind.startswith("pooled")

    @property
    def train(self) -> bool:
        return self.kind.endswith("train")


PERIOD = 65521  # a prime, so rows of any width all differ


def table_values(number: int, dtype: torch.dtype) -> Tensor:
    """Return the period of a table's elements: multiples of 1/65521 in [-0.5, 0.5), by a linear congruence."""
    at = torch.arange(PERIOD, dtype=torch.int64)
    return (((at * 48271 + number * 7919) % PERIOD).float() / PERIOD - 0.5).to(dtype)


def fill_table(table: Tensor, number: int) -> None:
    """Fill a table with the same values in every process and version."""
    flat = table.detach().view(-1)
    values = table_values(number, table.dtype)
    filled = min(PERIOD, flat.numel())
    flat[:filled] = values[:filled]
    while filled < flat.numel():  # `filled` is a multiple of the period
        more = min(filled, flat.numel() - filled)
        flat[filled : filled + more] = flat[:more]
        filled += more


def timed(stages: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Return mean seconds of each stage over `repeats` runs of all of them in order."""
    total = [0.0] * len(stages)
    for _ in range(repeats):
        before = time.perf_counter()
        for i, stage in enumerate(stages):
            stage()
            now = time.perf_counter()
            total[i] += now - before
            before = now
    # An OpenMP thread spins a little before it sleeps; the pause keeps this out of the other side's time.
    time.sleep(0.01)
    return [t / repeats for t in total]


class Fbgemm:
    """FBGEMM's table-batched embedding on CPU."""

    def __init__(self, case: Case, data: dict[str, Tensor]) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        if case.dtype == "bf16" or case.output == "bf16":
            raise NotImplementedError("FBGEMM has no bf16 on CPU")
        kinds = {"sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ADAGRAD}
        kinds |= {"": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
        if case.optimizer not in kinds:
            raise NotImplementedError(f"FBGEMM has no {case.optimizer} on CPU")
        types = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}
        self.case, self.data, self.out = case, data, torch.empty(0)
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(case.rows, case.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * case.tables,
            optimizer=kinds[case.optimizer],
            learning_rate=LR,
            eps=EPS,
            weights_precision=types[case.dtype],
            output_dtype=types[case.output],
            pooling_mode=PoolingMode.SUM if case.pooled else PoolingMode.NONE,
            stochastic_rounding=False,
        )
        self.tables = self.module.split_embedding_weights()
        for t, table in enumerate(self.tables):
            fill_table(table, t)

    def stages(self) -> list[Callable[[], Any]]:
        def forward() -> None:
            self.out = self.module(self.data["ids"], self.data["offsets"])

        def backward() -> None:
            self.out.backward(self.data["grad"])

        return [forward, backward] if self.case.train else [forward]


class Aten:
    """One `embedding_bag` (or `embedding`) per table, the outputs joined as a model needs them."""

    def __init__(self, case: Case, data: dict[str, Tensor]) -> None:
        if case.output != case.dtype:
            raise NotImplementedError("ATen's embedding_bag gives its table's type")
        if case.optimizer not in ("", "sgd", "adagrad"):
            raise NotImplementedError(f"torch.optim has no sparse {case.optimizer}")
        self.case, self.data, self.out = case, data, torch.empty(0)
        self.tables = [
            torch.nn.Parameter(torch.empty(case.rows, case.dim, dtype=DTYPES[case.dtype]), requires_grad=case.train)
            for _ in range(case.tables)
        ]
        for t, table in enumerate(self.tables):
            fill_table(table, t)
        self.ids = list(data["ids"].chunk(case.tables))
        self.offsets = [data["offsets"][: case.batch]] * case.tables
        make = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}.get(case.optimizer)
        self.optimizer = make(self.tables, lr=LR) if make else None

    def stages(self) -> list[Callable[[], Any]]:
        bag, sparse = torch.nn.functional.embedding_bag, self.case.train

        def forward() -> None:
            if self.case.pooled:
                pooled = [
                    bag(ids, table, offsets, mode="sum", sparse=sparse)
                    for ids, table, offsets in zip(self.ids, self.tables, self.offsets, strict=True)
                ]
                self.out = torch.cat(pooled, dim=1)
            else:
                look = torch.nn.functional.embedding
                rows = [look(i, t, sparse=sparse) for i, t in zip(self.ids, self.tables, strict=True)]
                self.out = torch.cat(rows)

        def backward() -> None:
            self.out.backward(self.data["grad"].to(self.out.dtype))
            assert self.optimizer is not None
            self.optimizer.step()
            self.optimizer.zero_grad()

        return [forward, backward] if self.case.train else [forward]


def result_of(runner: Any, case: Case, rows: list[Tensor] | None) -> list[Tensor]:
    """Run once, from fresh tables: return the output, and after a training step the touched rows of each table."""
    for stage in runner.stages():
        stage()
    out = [runner.out.detach().float()]
    if case.train and rows is not None:
        out += [table.detach()[r].float() for table, r in zip(runner.tables, rows, strict=True)]
    return out


def serve() -> None:
    runner: Any = None
    case: Case | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if request["do"] == "hello":
            import fbgemm_gpu

            answer = {
                "torch": torch.__version__,
                "fbgemm": fbgemm_gpu.__version__,
                "python": sys.version.split()[0],
            }
        elif request["do"] == "prepare":
            runner = None  # frees its tables before the next ones are made
            case = Case(**request["case"])
            torch.set_num_threads(case.threads)
            data = torch.load(request["data"])
            try:
                runner = {"fbgemm": Fbgemm, "aten": Aten}[request["who"]](case, data)
                torch.save(result_of(runner, case, data.get("rows")), request["result"])
            except NotImplementedError as error:
                answer = {"lacks": str(error)}
        elif request["do"] == "time":
            answer = {"seconds": timed(runner.stages(), request["repeats"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
