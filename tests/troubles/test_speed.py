"""Troubles of the field with work that nobody needed. Names say the trouble; numbers are threads of torchrec."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.troubles.world import KINDS, SIZE, flat, sharded
from tilerec.comms.group import Group
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.traffic import traffic
from tilerec.sharding import distinct_ids
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adam
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks


class Ops(TorchDispatchMode):
    """Counts the operators that run in this thread, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Reads:
    """Counts the calls that hand a tensor's numbers to Python: on a GPU each of them waits for it.

    Those of this thread, which runs the backward pass of CPU tensors too.
    """

    NAMES = ("tolist", "item", "numpy", "nonzero", "__int__", "__float__", "__bool__", "__index__")
    _own = threading.local()

    def __enter__(self) -> Reads:
        self.seen: Counter[str] = Counter()
        self._own.seen = self.seen
        return self

    def __exit__(self, *_: object) -> None:
        self._own.seen = None

    @classmethod
    def watched(cls, name: str) -> Any:
        real = getattr(Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen = getattr(cls._own, "seen", None)
            if seen is not None:
                seen[name] += 1
            return real(*args, **kwargs)

        return call


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Reads.NAMES:
        monkeypatch.setattr(Tensor, name, Reads.watched(name))


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.sum().item()


@pytest.mark.usefixtures("watched")
def test_a_step_that_reads_numbers_is_seen_to_do_so() -> None:
    """In the forward and in the backward: what the tests below rely on."""
    x = torch.ones(3, requires_grad=True)
    with Reads() as reads:
        y = ReadsInBackward.apply(x).sum()
        assert bool(y > 0)
        y.backward()
    assert reads.seen == Counter(__bool__=1, item=1)


def collection(tables: int, *, weighted: bool = False) -> EmbeddingBagCollection:
    base = EmbeddingBagCollection(
        [EmbeddingBagConfig(12, 4, f"t{t}", feature_names=[f"f{t}"]) for t in range(tables)], weighted
    )
    apply_optimizer_in_backward(SGD(lr=0.1), list(base.parameters()))
    return base


def batch(tables: int, seed: int = 0, *, weighted: bool = False) -> KeyedJaggedTensor:
    return random_batch([f"f{t}" for t in range(tables)], 12, 4, weighted=weighted, seed=seed)


# --------------------------------------------------- 4712: gradients of sample weights that nobody asked for


@pytest.mark.parametrize("asked", [False, True])
def test_4712_gradients_of_sample_weights_are_computed_only_if_asked_for(asked: bool) -> None:
    base, features = collection(2, weighted=True), batch(2, weighted=True)
    features.weights().requires_grad_(asked)
    with Ops() as ops:
        base(features).values().sum().backward()
    assert ops.seen["tilerec.sample_weight_grad.default"] == int(asked)
    assert (features.weights().grad is not None) == asked


@pytest.mark.parametrize("asked", [False, True])
def test_4712_and_travel_only_if_asked_for(asked: bool) -> None:
    base = collection(2, weighted=True)

    def run(group: Group) -> int:
        module = sharded(base, "row_wise", group)
        features = batch(2, group.rank, weighted=True)
        # One rank that wants them is enough: the others must take part.
        features.weights().requires_grad_(asked and group.rank == 1)
        flat(module(features)).sum().backward()
        assert (features.weights().grad is not None) == (asked and group.rank == 1)
        return traffic(module)["weight gradients"].calls

    assert run_virtual_ranks(SIZE, run) == [int(asked)] * SIZE


# ---------------------------------------------------------------------- 1990: freezing a table saves nothing


@pytest.mark.parametrize("kind", KINDS)
def test_1990_a_frozen_table_sends_no_gradient_and_has_no_state(kind: str) -> None:
    def run(group: Group, frozen: bool) -> tuple[int, int]:
        torch.manual_seed(0)
        base = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, name, feature_names=[name]) for name in ("a", "b")])
        if frozen:
            base.embedding_bags["a"].weight.requires_grad_(False)
        apply_optimizer_in_backward(Adam(lr=0.1), [p for p in base.parameters() if p.requires_grad])
        module = sharded(base, kind, group)
        y = flat(module(random_batch(["a", "b"], 9, 6, seed=group.rank)))
        forward = traffic(module).total()
        y.sum().backward()
        bytes_of_state = sum(
            value.nbytes for rows in module._leaves.rows() for value in rows.state.values() if value.dim()
        )
        names = set(module.fused_optimizer.params)
        assert names == {f"embedding_bags.{name}.weight" for name in ("ab", "b")[frozen]}
        return traffic(module).total() - forward, bytes_of_state

    both, one = ([sum(part) for part in zip(*run_virtual_ranks(SIZE, run, f), strict=True)] for f in (False, True))
    assert 0.35 < one[0] / both[0] < 0.65
    assert one[1] * 2 == both[1] > 0


# ------------------------------- per-key loops and hidden waits: work that grows with the number of features


def ops_of(tables: int) -> Counter[str]:
    base, features = collection(tables), batch(tables)
    base(features).values().sum().backward()  # what is kept from batch to batch is kept now
    features = batch(tables, 1)
    with Ops() as ops:
        base(features).values().sum().backward()
    return ops.seen


def test_a_step_runs_as_many_operators_for_300_features_as_for_3() -> None:
    few, many = ops_of(3), ops_of(300)
    for ops in (few, many):
        del ops["aten.detach.default"]  # another handle of the same tensor, twice per table: no kernel runs
        del ops["aten._local_scalar_dense.default"]  # a table's update count, on the host: 0.2 µs
    assert few == many


def reads_of(tables: int) -> tuple[Counter[str], Counter[str]]:
    """In the forward, and in the backward."""
    base, features = collection(tables), batch(tables)
    with Reads() as forward:
        out = base(features).values().sum()
    with Reads() as backward:
        out.backward()
    return forward.seen, backward.seen


@pytest.mark.usefixtures("watched")
def test_a_step_reads_as_few_numbers_for_300_features_as_for_3() -> None:
    """None in the forward. In the backward two that live on the host, and whether a gradient was not finite."""
    for tables in (3, 300):
        forward, backward = reads_of(tables)
        assert forward == Counter()
        # Counts of updates live on the host and are read as what they are; so does the ticket, which NumPy writes.
        assert backward == Counter(tolist=3, item=tables, numpy=1)


def sharded_reads(tables: int, kind: str) -> list[tuple[int, Counter[str], Counter[str]]]:
    base = collection(tables)

    def run(group: Group) -> tuple[int, Counter[str], Counter[str]]:
        module = sharded(base, kind, group)
        flat(module(batch(tables, group.rank))).sum().backward()
        features = batch(tables, SIZE + group.rank)
        with Reads() as routed:
            handle = module.route(features)
        with Reads() as rest:
            out: Tensor = flat(module(handle))
            out.sum().backward()
        return group.rank, routed.seen, rest.seen

    return run_virtual_ranks(SIZE, run)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_step_reads_sizes_once_in_route_and_one_number_after_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of what travels, on two hosts of two ranks, for 4 features and for 60."""
    monkeypatch.setattr(distinct_ids, "GAIN", 1.0)  # as on a GPU, where the host does not wait for counts of ids
    few, many = sharded_reads(4, kind), sharded_reads(60, kind)
    for rank, routed, rest in [*few, *many]:
        assert routed == Counter(tolist=1)
        del rest["item"]  # counts of updates, on the host
        if kind == "data_parallel":
            # Sizes of the replicas' messages: 4. A dense sum of whole gradients adds 3 and the touched rows of all
            # tables, sums by shares 6, rows that are added up before the counts travel 2. Never a number per table.
            assert (rest["tolist"], rest["nonzero"]) in ((4, 0), (7, 1), (10, 0), (13, 1), (15, 1))
            continue
        # Under column cuts a look at all gradients at once, which a GPU goes without: it has no branch there.
        assert rest.pop("__bool__", 0) == (kind in ("column_wise", "table_column_wise", "grid_shard"))
        # Whether a gradient was not finite; nothing on ranks 0 and 2, which hold no whole table.
        assert rest == Counter(tolist=int(kind != "table_wise" or rank % 2 == 1))


def test_rows_of_a_sequence_are_not_cut_into_pieces_and_joined_again() -> None:
    """PR 216: one slice per feature in the backward doubled its time."""

    def run(tables: int) -> Counter[str]:
        base = EmbeddingCollection([EmbeddingConfig(12, 4, f"t{t}", feature_names=[f"f{t}"]) for t in range(tables)])
        apply_optimizer_in_backward(SGD(lr=0.1), list(base.parameters()))
        features = batch(tables)
        out = [jagged.values() for jagged in base(features).values()]
        loss = torch.stack([rows.sum() for rows in out]).sum()
        with Ops() as ops:
            loss.backward()
        return ops.seen

    few, many = run(2), run(40)
    assert many["tilerec.update_rows_.default"] == few["tilerec.update_rows_.default"] == 1
    assert not [name for name in many if "slice" in name or "select_backward" in name]
