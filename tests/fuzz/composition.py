"""A composition: a model of several collections and a script of what happens to it, run sharded and unsharded.

Nouns
  composition   collections, ranks and hosts, and a script; data alone, so that a failing one can be printed and kept
  script        actions, one after the other: train, evaluate, train ahead, reshard, a batch with a bad id, a backward
                that fails
  trace         the outputs of every action, on one rank or of the unsharded model
  whole         weights of all tables, by name, whole

`run_unsharded` is the specification: it runs the script on the ranks' batches laid end to end. A failed action changes
nothing there; sharded it must raise on every rank and change nothing.

    loss of rank r = W * sum(y_r^2) / 100        averaged over W ranks: the loss of the global batch

Legend: W ranks, B samples, C columns of the output, N ids.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.harness import OPTIMIZERS, Hosts, TableCase
from tilerec.comms.group import Group
from tilerec.errors import TilerecError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.shard import shard
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.cache import CacheParams
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.virtual import run_virtual_ranks

Plan = Mapping[str, Mapping[str, Any]]
"""Per collection and table: a tiling, or a `ParameterSharding`."""


@dataclass(frozen=True)
class Part:
    """One collection of the model. Its tables and features have names of their own."""

    name: str
    tables: tuple[TableCase, ...]
    optimizer: str  # of `OPTIMIZERS`
    pooled: bool = True
    weighted: bool = False
    cached: tuple[str, ...] = ()  # tables behind a cache; they have whole rows
    loose: tuple[str, ...] = ()  # tables that no optimizer is attached to; torch's own steps them

    def is_loose(self, table: str) -> bool:
        return OPTIMIZERS[self.optimizer] is None or table in self.loose


@dataclass(frozen=True)
class Train:
    """One backward over the named collections' forwards, in this order; a name may come twice."""

    order: tuple[str, ...]
    ahead: bool = False  # all batches are routed before the first forward


@dataclass(frozen=True)
class Evaluate:
    """A forward without gradients."""

    order: tuple[str, ...]


@dataclass(frozen=True)
class Reshard:
    """Other tilings, for some tables."""

    plan: Plan


@dataclass(frozen=True)
class BadId:
    """A batch of one collection that has an id outside of its table on one rank."""

    name: str
    rank: int


@dataclass(frozen=True)
class FailedBackward:
    """A forward whose backward fails on every rank before it reaches a table."""

    name: str


Action = Train | Evaluate | Reshard | BadId | FailedBackward


@dataclass(frozen=True)
class Composition:
    """A model, its ranks, and what happens to it."""

    parts: tuple[Part, ...]
    plan: Plan
    hosts: Hosts
    batch_sizes: tuple[int, ...]  # of each rank
    script: tuple[Action, ...]
    exact: bool = False
    seed: int = 0

    @property
    def world_size(self) -> int:
        return len(self.batch_sizes)

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)


# ---------------------------------------------------------------------------------------------------- the model


def build(made: Composition) -> nn.ModuleDict:
    """The unsharded model, the same every time."""
    torch.manual_seed(made.seed)
    model = nn.ModuleDict()
    for part in made.parts:
        if part.pooled:
            collection: Any = EmbeddingBagCollection(
                [
                    EmbeddingBagConfig(
                        t.rows, t.dim, t.name, t.data_type, t.features,
                        pooling=PoolingType.MEAN if t.mean else PoolingType.SUM,
                    )
                    for t in part.tables
                ],
                is_weighted=part.weighted,
            )  # fmt: skip
        else:
            collection = EmbeddingCollection(
                [EmbeddingConfig(t.rows, t.dim, t.name, t.data_type, t.features) for t in part.tables]
            )
        spec = OPTIMIZERS[part.optimizer]
        holders = collection.embedding_bags if part.pooled else collection.embeddings
        attached = [holders[t.name].weight for t in part.tables if not part.is_loose(t.name)]
        if spec is not None and attached:
            apply_optimizer_in_backward(spec, attached)
        model[part.name] = collection
    return model


def batch(made: Composition, part: Part, rank: int, number: int) -> KeyedJaggedTensor:
    """A rank's batch of a collection; `number` counts the script's batches."""
    rows = {feature: table.rows for table in part.tables for feature in table.features}
    # Features that several tables read: ids of the smallest.
    for table in part.tables:
        for feature in table.features:
            rows[feature] = min(rows[feature], table.rows)
    return random_batch(
        sorted(rows), rows, made.batch_sizes[rank], mean_length=1.5, weighted=part.weighted,
        seed=10_000 * made.seed + 100 * number + rank,
    )  # fmt: skip


def values(out: Any) -> list[Tensor]:
    """Pooled `[B, C]`, or per slot `[N, D]`."""
    return [jagged.values() for jagged in out.values()] if isinstance(out, dict) else [out.values()]


class _Fails(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("this backward fails")


def loss(outs: Sequence[Tensor], scale: float) -> Tensor:
    total = sum(y.double().square().sum() for y in outs)
    assert isinstance(total, Tensor)
    return total * (scale / 100)


# ---------------------------------------------------------------------------------------------------- running


class Runner:
    """Runs a script on one rank, or on the unsharded model (`group=None`)."""

    def __init__(self, made: Composition, model: nn.ModuleDict, group: Group | None) -> None:
        self.made, self.model, self.group = made, model, group
        self.numbers = itertools.count()
        self.trace: list[list[Tensor]] = []
        loose = [
            p
            for part in made.parts
            for name, p in model[part.name].named_parameters()
            if part.is_loose(name.split(".")[1])  # embeddings.<table>.weight, or weight.1 of a further tile
        ]
        self.dense = torch.optim.SGD(loose, lr=0.05, momentum=0.5, foreach=False) if loose else None

    def batches(self, order: Sequence[str]) -> list[KeyedJaggedTensor]:
        found = []
        for name in order:
            part, number = self.made.part(name), next(self.numbers)
            ranks = range(self.made.world_size) if self.group is None else [self.group.rank]
            local = [batch(self.made, part, rank, number) for rank in ranks]
            found.append(concat_batches(local) if self.group is None else local[0])
        return found

    def forward(self, order: Sequence[str], ahead: bool = False) -> list[Tensor]:
        features: list[Any] = self.batches(order)
        if ahead and self.group is not None:
            features = [self.model[name].route(own) for name, own in zip(order, features, strict=True)]
        outs = [y for name, own in zip(order, features, strict=True) for y in values(self.model[name](own))]
        self.trace.append([y.detach().clone() for y in outs])
        return outs

    def act(self, action: Action) -> None:
        scale = 1.0 if self.group is None else float(self.made.world_size)
        if isinstance(action, Train):
            loss(self.forward(action.order, action.ahead), scale).backward()
            if self.dense is not None:
                self.dense.step()
                self.dense.zero_grad(set_to_none=True)
        elif isinstance(action, Evaluate):
            with torch.no_grad():
                self.forward(action.order)
        elif isinstance(action, Reshard):
            if self.group is not None:
                reshard(self.model, action.plan, progress=False)
        elif isinstance(action, FailedBackward):
            try:
                loss([_Fails.apply(y) for y in self.forward((action.name,))], scale).backward()
            except ArithmeticError:
                return
            raise AssertionError("a backward that fails did not raise")
        else:
            self.refused(action)

    def refused(self, action: BadId) -> None:
        (features,) = self.batches((action.name,))
        if self.group is None:
            return
        if self.group.rank == action.rank:
            features = with_bad_id(features)
        try:
            self.model[action.name](features)
        except TilerecError:
            return
        raise AssertionError(f"rank {self.group.rank}: a batch with a bad id was taken")

    def run(self) -> list[list[Tensor]]:
        for action in self.made.script:
            self.act(action)
        return self.trace


def with_bad_id(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same keys; the first one's first bag has one id far outside of every table."""
    keys = features.keys()
    bags = max(features.stride(), 1)
    lengths = torch.zeros(len(keys) * bags, dtype=torch.int64)
    lengths[0] = 1
    weights = torch.ones(1) if features.weights_or_none() is not None else None
    return KeyedJaggedTensor(keys, torch.tensor([10**6]), weights, lengths)


def whole_of(made: Composition, model: nn.ModuleDict) -> dict[str, Tensor]:
    """Weights, whole, by name."""
    return {name: value.detach().clone() for name, value in full_state_dict(model).items()}


def run_unsharded(made: Composition) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    model = build(made)
    trace = Runner(made, model, None).run()
    return trace, whole_of(made, model)


def run_rank(group: Group, made: Composition, base: nn.ModuleDict) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    model: Any = copy.deepcopy(base)
    topology = Topology(made.world_size, "cpu", hosts=made.hosts)
    shard(
        model,
        {name: dict(tables) for name, tables in made.plan.items()},
        group,
        topology=topology,
        exact=made.exact,
    )
    trace = Runner(made, model, group).run()
    return trace, whole_of(made, model)


# ---------------------------------------------------------------------------------------------------- comparing


def pieces(
    made: Composition, names: Sequence[str], numbers: Sequence[int], step: Sequence[Tensor]
) -> list[list[Tensor]]:
    """What each rank must have of an unsharded action's outputs."""
    per_rank: list[list[Tensor]] = [[] for _ in range(made.world_size)]
    at = 0
    for name, number in zip(names, numbers, strict=True):
        part = made.part(name)
        slots = [None] if part.pooled else [f for t in part.tables for f in t.features]
        local = [batch(made, part, rank, number) for rank in range(made.world_size)]
        for feature in slots:
            sizes = list(made.batch_sizes) if feature is None else [own[feature].values().numel() for own in local]
            for rank, piece in enumerate(step[at].split(sizes)):
                per_rank[rank].append(piece)
            at += 1
    return per_rank


def check(made: Composition) -> None:
    """Run both, and assert that every rank's outputs and the whole tables are equal to rounding."""
    want_trace, want_whole = run_unsharded(made)
    ranks = run_virtual_ranks(made.world_size, run_rank, made, build(made), timeout_s=60.0)
    numbers = itertools.count()
    step = 0
    for action in made.script:
        if isinstance(action, Reshard):
            continue
        order = action.order if isinstance(action, Train | Evaluate) else (action.name,)
        own = [next(numbers) for _ in order]
        if isinstance(action, BadId):
            continue
        for rank, wanted in enumerate(pieces(made, order, own, want_trace[step])):
            got = ranks[rank][0][step]
            for a, b in zip(got, wanted, strict=True):
                assert a.dtype == b.dtype
                assert a.shape == b.shape
                torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4, msg=f"action {step}, rank {rank}: {action}")
        step += 1
    for rank, (_, whole) in enumerate(ranks):
        assert whole.keys() == want_whole.keys()
        for name, value in want_whole.items():
            torch.testing.assert_close(whole[name], value, rtol=2e-4, atol=2e-4, msg=f"rank {rank}: {name}")


def table_kind(kind: str, ranks: Sequence[int]) -> ParameterSharding:
    """A cached table's part of a plan."""
    own = list(ranks[:1]) if kind == "table_wise" else list(ranks)
    return ParameterSharding(kind, "fused_uvm_caching", ranks=own, cache_params=CacheParams("lru", 0.3))
