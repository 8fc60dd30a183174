"""Models for compiled programs: steps of an eager and of a compiled twin, compared on every rank.

Legend: B samples, D dense features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.harness import TILINGS
from tests.sharding.managed_models import KEYS as MANAGED_KEYS
from tests.sharding.managed_models import build
from tilerec.comms.process import ProcessGroupComms
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.compiled_model import compile_model
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import column_wise, row_wise, table_wise
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.spec.topology import Topology
from tilerec.testing.batches import random_batch

SIZES = (6, 8, 1, 0, 3)
"""Samples of rank 0 in each step: one sample, none. The next ranks have the same sizes, in another order."""
HOSTS: dict[int, Any] = {2: ((0, 1),), 4: ((0, 1), (2, 3))}
KEYS, ROWS, DENSE = ["a", "b", "c"], {"a": 20, "b": 20, "c": 9}, 13


@dataclass(frozen=True)
class Case:
    """A model and how it is compiled.

    Attributes:
        form: sum, mean, weighted, weighted mean, variable, exact, bf16, sequence, or a policy of `managed_models`.
        tiling: of `TILINGS`. With managed collision, "mixed" is the planner's plan, and "cut" has ranges of rows,
            columns and a whole table.
        attached: an optimizer updates the tables in the backward pass; else they get a `.grad`.
    """

    form: str
    tiling: str = "mixed"
    attached: bool = True
    backend: str = "aot_eager"

    @property
    def weighted(self) -> bool:
        return "weighted" in self.form

    @property
    def managed(self) -> bool:
        return self.form.startswith("managed")


class Model(nn.Module):
    """Tables and a dense part; every output element has its own gradient."""

    def __init__(self, tables: nn.Module, columns: int) -> None:
        super().__init__()
        self.tables, self.linear = tables, nn.Linear(DENSE, columns)

    def forward(self, dense_BD: Tensor, features: KeyedJaggedTensor) -> Tensor:
        out = self.tables(features)
        dense = torch.relu(self.linear(dense_BD))
        if isinstance(out, tuple):  # managed collision, with the batch of row numbers
            out, rows = out
            dense = dense * (1 + rows.values().sum() % 3)
        if isinstance(out, dict):
            parts = [(torch.tanh(part.values()) * (1 + i)).sum() for i, part in enumerate(out.values())]
            return dense.sum() + sum(parts)
        return (torch.tanh(out.values()) * dense).sum()


def _tables(case: Case) -> tuple[nn.Module, int]:
    if case.managed:
        return build(case.form.split(": ")[1], weighted=case.weighted), 8 + 8 + 16 + 3
    if case.form == "sequence":
        configs = [
            EmbeddingConfig(20, 8, "ab", feature_names=["a", "b"]),
            EmbeddingConfig(9, 4, "c", feature_names=["c"]),
        ]
        return EmbeddingCollection(configs), 20
    pooling = PoolingType.MEAN if "mean" in case.form else PoolingType.SUM
    bags = [
        EmbeddingBagConfig(20, 8, "ab", feature_names=["a", "b"], pooling=pooling),
        EmbeddingBagConfig(9, 4, "c", feature_names=["c"]),
    ]
    return EmbeddingBagCollection(bags, case.weighted).to(torch.bfloat16 if case.form == "bf16" else None), 20


def model(case: Case, group: ProcessGroupComms) -> Model:
    """Return this rank's part of a case's model."""
    torch.manual_seed(3)
    tables, columns = _tables(case)
    made = Model(tables, columns)
    if case.managed:
        cut: Any = {"user": row_wise(), "item": column_wise([0, group.size - 1]), "plain": table_wise(group.size - 1)}
        plan = {"tables._embedding_module": cut} if case.tiling == "cut" else None
        return shard(made, env=group, plan=plan)  # type: ignore[return-value]
    if case.attached:
        apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    tilings = {
        config.name: TILINGS[case.tiling](config.num_embeddings, config.embedding_dim, HOSTS[group.size], i)
        for i, config in enumerate(tables._configs)  # type: ignore[union-attr, arg-type]
    }
    topology = Topology(group.size, "cpu", hosts=HOSTS[group.size])
    shard_collection(tables, tilings, group, group.split("route"), topology, exact=case.form == "exact")  # type: ignore[arg-type]
    return made


def planned(case: Case, group: ProcessGroupComms) -> Model:
    """Return this rank's part of a case's model, with tables in ranges of rows, by a plan that may change."""
    torch.manual_seed(3)
    tables, columns = _tables(case)
    if case.attached:
        apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    rows: Any = {"tables": {name: ParameterSharding("row_wise") for name in ("ab", "c")}}
    return shard(Model(tables, columns), env=group, plan=rows)  # type: ignore[return-value]


def batch(case: Case, step: int, rank: int) -> tuple[Tensor, KeyedJaggedTensor]:
    """Return a step's dense features and ids; weights require gradients."""
    size, seed = SIZES[(step + rank) % len(SIZES)], 10 * step + rank
    keys, rows = (list(MANAGED_KEYS), MANAGED_KEYS) if case.managed else (KEYS, ROWS)
    features = random_batch(
        keys, rows, size, seed=seed, weighted=case.weighted, variable=case.form == "variable", exponent=0.7
    )
    if case.weighted:
        weights = features.weights().clone().requires_grad_()
        features = KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths())
    return torch.randn(size, DENSE, generator=torch.Generator().manual_seed(seed)), features


def assert_same(case: Case, one: Tensor | None, other: Tensor | None, what: object) -> None:
    """Raise unless two tensors have the same bits; inductor adds some sums of the dense part in another order."""
    assert (one is None) == (other is None), what
    if one is None or other is None or torch.equal(one, other):
        return
    limit = 3e-2 if case.form == "bf16" else 1e-3
    assert case.backend == "inductor", what
    torch.testing.assert_close(one, other, rtol=limit, atol=limit, msg=str((what, one, other)))


def assert_twins(case: Case, eager: nn.Module, compiled: nn.Module) -> None:
    """Raise unless two twins are the same: tables, dense parameters, and gradients."""
    for (name, one), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert_same(case, one, other, name)
        assert_same(case, one.grad, other.grad, name)


def run(case: Case) -> int:
    """Train an eager and a compiled twin on this rank; raise unless they are the same.

    Returns:
        The number of graphs of the compiled model.
    """
    import torch._dynamo.testing
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    group = ProcessGroupComms()
    eager = model(case, group)
    twin = model(case, group)
    assert_twins(case, eager, twin)
    counter = torch._dynamo.testing.CompileCounterWithBackend(case.backend)
    compiled = compile_model(twin, backend=counter)
    for step in range(len(SIZES)):
        losses, weight_grads = [], []
        for forward in (eager, compiled):
            dense_BD, features = batch(case, step, group.rank)
            loss = forward(dense_BD, features)
            loss.backward()
            losses.append(loss.detach())
            weight_grads.append(features.weights().grad if case.weighted else None)
        assert_same(case, *losses, step)
        assert_same(case, *weight_grads, step)
        assert_twins(case, eager, twin)
    assert not counters["graph_break"], counters["graph_break"]
    return int(counter.frame_count)
