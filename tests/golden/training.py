"""Three training steps of one collection, on one rank or on ranks that are threads, and the hashes of what they leave.

Nouns
  run      a collection, how its tables are cut, an optimizer, a world: a `Run`
  marks    the hashes of a run: outputs of every rank and step, whole weights, whole optimizer state

The batches and the gradients of the outputs are small multiples of 1/8. Gradients are elementwise functions of the
outputs, so no operation of torch whose sums depend on the machine takes part.

Legend: W ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tests.golden import inputs
from tests.golden.digest import digest
from tests.golden.optimizers import OPTIMIZERS
from tilerec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    Topology,
    apply_optimizer_in_backward,
    shard,
)
from tilerec.comms import Group
from tilerec.parallel import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, full_state_dict
from tilerec.planner import (
    Wire,
    column_wise,
    data_parallel,
    explicit,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tilerec.testing import run_virtual_ranks

STEPS = 3
Marks = dict[str, str]
Hosts = tuple[tuple[int, ...], ...]

# ---------------------------------------------------------------------------------------------------- the axes

WORLDS: dict[str, Hosts] = {
    "1": ((0,),),
    "2": ((0, 1),),
    "1+1": ((0,), (1,)),
    "2+1": ((0, 1), (2,)),
    "2+2": ((0, 2), (1, 3)),
    "2+2+2+2": ((0, 1), (2, 3), (4, 5), (6, 7)),
}
"""Ranks of each host. In "2+2" neighbours are on different hosts."""

SAMPLES = {1: (6,), 2: (5, 3), 3: (4, 0, 3), 4: (5, 3, 0, 2), 8: (2, 1, 0, 3, 1, 2, 0, 2)}
"""Samples of each rank, by the number of ranks."""

FORMS = ("sum", "mean", "weighted", "weighted_mean", "variable", "sequence")

TYPES: dict[str, tuple[DataType, DataType, DataType]] = {
    "fp32": (DataType.FP32,) * 3,
    "fp16": (DataType.FP16,) * 3,
    "bf16": (DataType.BF16,) * 3,
    "fp64": (DataType.FP64,) * 3,
    "fp8": (DataType.FP8,) * 3,
    "types": (DataType.BF16, DataType.FP32, DataType.FP16),
}
"""Data types of the three tables."""

WIRES: dict[str, Wire | None] = {
    "as_is": None,
    "exact": None,
    "wire_fp16": Wire("fp16", "fp16"),
    "wire_bf16": Wire("bf16", "bf16"),
    "wire_int8": Wire("int8", "int8"),
    "wire_fp8": Wire("fp8", "bf16"),
    "wire_back": Wire("fp32", "fp8"),
}
"""Number formats of rows and of their gradients; "exact" is `shard(exact=True)`."""


@dataclass(frozen=True)
class Table:
    """One of the tables of every run."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]


TABLES = (Table("t0", 10, 4, ("a", "b")), Table("t1", 7, 3, ("c",)), Table("t2", 17, 20, ("d", "a")))
"""Two features read one table, and two tables one feature. Widths are below, beside and above blocks of 8 columns."""


def _uneven(index: int, table: Table, hosts: Hosts) -> Any:
    """A small, a large and a middling range of rows."""
    ranks = [rank for host in hosts for rank in host]
    cuts = sorted({0, 1 + index, table.rows - 2, table.rows})
    return explicit(
        [
            (first, last, 0, table.dim, ranks[(piece + index) % len(ranks)])
            for piece, (first, last) in enumerate(pairwise(cuts))
        ]
    )


def _checkerboard(index: int, table: Table, hosts: Hosts) -> Any:
    """Two ranks with two tiles each, which do not touch. Columns are cut inside a block of 8."""
    ranks = sorted(rank for host in hosts for rank in host)
    one, other = ranks[0], ranks[-1]
    row, column = table.rows // 3, table.dim // 2
    corners = [(0, row, 0, column), (row, table.rows, 0, column)]
    corners += [(0, row, column, table.dim), (row, table.rows, column, table.dim)]
    return explicit([(*corner, owner) for corner, owner in zip(corners, (one, other, other, one), strict=True)])


def _copies(index: int, table: Table, hosts: Hosts) -> Any:
    """The first rows on the first and the last rank, the others on one rank."""
    ranks = sorted(rank for host in hosts for rank in host)
    cut, both = table.rows // 2, tuple(sorted({ranks[0], ranks[-1]}))
    return explicit([(0, cut, 0, table.dim, both), (cut, table.rows, 0, table.dim, ranks[index % len(ranks)])])


def _column_widths(index: int, table: Table, hosts: Hosts) -> Any:
    """Columns in a narrow and a wide block, cut inside a block of 8."""
    ranks = [rank for host in hosts for rank in host]
    return column_wise([ranks[index % len(ranks)], ranks[-1]], [1, table.dim - 1])


def _grid(index: int, table: Table, hosts: Hosts) -> Any:
    """Two blocks of columns, on neighbouring hosts; on one host where hosts differ in size.

    Hosts of unlike sizes cut the rows of the blocks at different places, which rules that add over rows refuse.
    """
    alike = len({len(host) for host in hosts}) == 1
    first, second = index % len(hosts), (index + alike) % len(hosts)
    return grid_shard([first, second], [2, table.dim - 2])


CUTS: dict[str, Callable[[int, Table, Hosts], Any]] = {
    "data_parallel": lambda i, table, hosts: data_parallel(),
    "table_wise": lambda i, table, hosts: table_wise((2 * i + 1) % sum(map(len, hosts))),
    "column_wise": lambda i, table, hosts: column_wise(),
    "column_widths": _column_widths,
    "row_wise": lambda i, table, hosts: row_wise(),
    "table_row_wise": lambda i, table, hosts: table_row_wise(i % len(hosts)),
    "table_column_wise": lambda i, table, hosts: table_column_wise((i + 1) % len(hosts)),
    "grid_shard": _grid,
    "uneven": _uneven,
    "checkerboard": _checkerboard,
    "copies": _copies,
}
_MIXED = ("row_wise", "data_parallel", "column_wise")
TILINGS = (*CUTS, "mixed")
"""How tables are cut: "mixed" cuts each of them in another way."""


@dataclass(frozen=True)
class Run:
    """One run: a choice on each axis."""

    tiling: str
    optimizer: str
    form: str = "sum"
    world: str = "2"
    data_type: str = "fp32"
    wire: str = "as_is"

    @property
    def name(self) -> str:
        """The choices, with dashes between them."""
        return "-".join([self.tiling, self.optimizer, self.form, self.world, self.data_type, self.wire])

    @property
    def hosts(self) -> Hosts:
        return WORLDS[self.world]

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def topology(self) -> Topology:
        return Topology(self.size, "cpu", hosts=self.hosts)

    @property
    def plan(self) -> dict[str, Any]:
        """What `shard` takes, table by table."""
        return self.plan_of(self.tiling)

    def plan_of(self, tiling: str) -> dict[str, Any]:
        """The plan with all tables cut in one way, or each in another."""
        kinds = _MIXED if tiling == "mixed" else (tiling,) * len(TABLES)
        return {t.name: CUTS[kind](i, t, self.hosts) for i, (t, kind) in enumerate(zip(TABLES, kinds, strict=True))}


# ---------------------------------------------------------------------------------------------------- a run


def build(run: Run) -> Any:
    """Return the unsharded collection; its seed is drawn from torch's default generator."""
    torch.manual_seed(11)
    types = TYPES[run.data_type]
    if run.form == "sequence":
        made: Any = EmbeddingCollection(
            [EmbeddingConfig(t.rows, t.dim, t.name, kind, t.features) for t, kind in zip(TABLES, types, strict=True)]
        )
    else:
        pooling = PoolingType.MEAN if run.form.endswith("mean") else PoolingType.SUM
        made = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(t.rows, t.dim, t.name, kind, t.features, pooling=pooling)
                for t, kind in zip(TABLES, types, strict=True)
            ],
            is_weighted=run.form.startswith("weighted"),
        )
    spec = OPTIMIZERS[run.optimizer]
    if spec is not None:
        apply_optimizer_in_backward(spec, list(made.parameters()))
    return made


def features(run: Run, rank: int, step: int) -> KeyedJaggedTensor:
    """Return a rank's batch. The second step's ids are int32."""
    rows: dict[str, int] = {}
    for table in TABLES:
        for feature in table.features:
            rows[feature] = min(rows.get(feature, table.rows), table.rows)
    made = inputs.batch(
        rows, SAMPLES[run.size][rank], rank, step, weighted=run.form.startswith("weighted"),
        variable=run.form == "variable", dtype=torch.int32 if step == 1 else torch.int64,
    )  # fmt: skip
    if made.weights_or_none() is not None:
        made.weights().requires_grad_()
    return made


def values_of(out: Any) -> list[Tensor]:
    """The output of a lookup: `[B, C]`, or `[N, D]` for each feature of a sequence."""
    return [part.values() for part in out.values()] if isinstance(out, dict) else [out.values()]


def back(values: Sequence[Tensor], batch: KeyedJaggedTensor, scale: float) -> list[Tensor]:
    """Go back with the gradient `scale * y + scale / 8`; return the outputs and the gradient of sample weights."""
    torch.autograd.backward(list(values), [y.detach() * scale + scale / 8 for y in values])
    seen = [y.detach().clone() for y in values]
    weights = batch.weights_or_none()
    if weights is not None and weights.grad is not None:
        seen.append(weights.grad.clone())
    return seen


def step_of(module: nn.Module, batch: KeyedJaggedTensor, scale: float) -> list[Tensor]:
    """Look up a batch and go `back`."""
    return back(values_of(module(batch)), batch, scale)


def _steps(run: Run, module: Any, rank: int, steps: range, gradients: list[Any]) -> list[list[Tensor]]:
    """Train; without an attached optimizer take the gradients and step by an eighth of them."""
    seen = []
    for step in steps:
        seen.append(step_of(module, features(run, rank, step), float(run.size)))
        if run.optimizer == "none":
            for name, leaf in module.named_parameters():
                if leaf.grad is not None:
                    gradients.append((name, leaf.grad.clone()))
                    with torch.no_grad():
                        leaf.copy_(leaf.double() - leaf.grad.double() * 0.125)
                    leaf.grad = None
    return seen


def state_of(module: Any) -> Any:
    """The whole optimizer state of a collection or a model, sharded or not."""
    optimizer = module.fused_optimizer
    return optimizer.full_state_dict() if hasattr(optimizer, "full_state_dict") else optimizer.state_dict()


def marks_of(outputs: Any, weights: Mapping[str, Tensor], state: Any, gradients: Sequence[Any]) -> Marks:
    """The hashes of a run, by what they are of."""
    marks = {"outputs": digest(outputs), "weights": digest(weights)}
    if state is not None:
        marks["state"] = digest(state)
    if gradients:
        marks["gradients"] = digest(gradients)
    return marks


def unsharded(run: Run) -> Marks:
    """Train the collection of rank 0 alone."""
    module, gradients = build(run), []
    outputs = _steps(run, module, 0, range(STEPS), gradients)
    state = None if run.optimizer == "none" else state_of(module)
    return marks_of(outputs, module.state_dict(), state, gradients)


def sharded(run: Run, then: str | None = None) -> Marks:
    """Train on ranks that are threads.

    Args:
        then: how tables are cut after the second step (`reshard`); None: as before.
    """
    base = build(run)
    return joined(run_virtual_ranks(run.size, _rank, run, base, then))


def _rank(group: Group, run: Run, base: Any, then: str | None) -> tuple[Any, Any, Any, list[Any]]:
    sharder = EmbeddingCollectionSharder if run.form == "sequence" else EmbeddingBagCollectionSharder
    wire = WIRES[run.wire]
    module = shard(
        copy.deepcopy(base), {"": run.plan}, group, topology=run.topology, exact=run.wire == "exact",
        sharder=None if wire is None else sharder(qcomm_codecs_registry=wire),
    )  # fmt: skip
    gradients: list[Any] = []
    outputs = _steps(run, module, group.rank, range(STEPS), gradients)
    state = None if run.optimizer == "none" else state_of(module)
    return outputs, full_state_dict(module), state, gradients


def joined(ranks: Sequence[tuple[Any, Any, Any, list[Any]]]) -> Marks:
    """The hashes over all ranks. Whole weights and state must be the same on every rank."""
    outputs = [rank[0] for rank in ranks]
    weights, state = ranks[0][1], ranks[0][2]
    for _, other, other_state, _ in ranks[1:]:
        assert digest(other) == digest(weights), "ranks have different whole weights"
        assert digest(other_state) == digest(state), "ranks have different whole optimizer state"
    gradients = [rank[3] for rank in ranks]
    return marks_of(outputs, weights, state, gradients if any(gradients) else [])
