"""Troubles of the field with wrong numbers. Names say the trouble; numbers are threads of meta-pytorch/torchrec."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from tests.troubles.world import KINDS, SIZE, equals_unsharded, flat, sharded
from tilerec.comms.group import Group
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adagrad, RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.testing.batches import random_batch
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


# --------------------------------------------------------------------- 2251: gradients divided by world size


class RowAndBias(nn.Module):
    """The same number from a table's row and from a dense parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(4, 2, "t", feature_names=["f"])])
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return (self.ebc(features).values() + self.bias).sum()


def both_move(kind: str) -> tuple[list[float], list[float]]:
    """How far row 0 and a parameter in DistributedDataParallel move at lr 1, when both ranks add their one sample."""
    torch.manual_seed(0)
    model = RowAndBias()
    apply_optimizer_in_backward(SGD(lr=1.0), [model.ebc.embedding_bags["t"].weight])
    before = model.ebc.embedding_bags["t"].weight[0].detach().clone()
    dmp = DistributedModelParallel(model, plan={"ebc": {"t": ParameterSharding(kind, ranks=[0, 1])}})
    dense = torch.optim.SGD([model.bias], lr=1.0)
    dmp(KeyedJaggedTensor(["f"], torch.tensor([0]), lengths=torch.tensor([1]))).backward()
    dense.step()
    after = full_state_dict(dmp.module)["ebc.embedding_bags.t.weight"][0]
    return (after - before).tolist(), model.bias.tolist()


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "data_parallel"])
def test_2251_tables_and_dense_parameters_average_gradients_alike(kind: str, two_ranks: Ranks) -> None:
    for row, bias in two_ranks.run(both_move, kind):
        assert row == pytest.approx(bias)
        assert bias == [-1.0, -1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_2251_no_sharding_changes_the_scale_of_a_gradient(kind: str) -> None:
    """One sample per rank, all of row 0, loss summed: the ranks' gradients add to 4 and their mean is 1."""
    base = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t", feature_names=["f"])])
    apply_optimizer_in_backward(SGD(lr=1.0), list(base.parameters()))
    before = base.embedding_bags["t"].weight[0].detach().clone()

    def run(group: Group) -> Tensor:
        module = sharded(base, kind, group)
        flat(module(KeyedJaggedTensor(["f"], torch.tensor([0]), lengths=torch.tensor([1])))).sum().backward()
        return full_state_dict(module)["embedding_bags.t.weight"][0] - before

    for moved in run_virtual_ranks(SIZE, run):
        torch.testing.assert_close(moved, torch.full((4,), -1.0))


# -------------------------------------------------------------------------- 3673: dims above 1024 give zeros


@pytest.mark.parametrize("dim", [1024, 1025, 2052, 4096])
def test_3673_rows_wider_than_1024_are_looked_up_and_trained(dim: int) -> None:
    base = EmbeddingBagCollection([EmbeddingBagConfig(5, dim, "t", feature_names=["f"])])
    ids, lengths = torch.tensor([4, 0, 4]), torch.tensor([2, 0, 1])
    rows = base.embedding_bags["t"].weight.detach().clone().requires_grad_()
    want = embedding_bag(ids, rows, torch.tensor([0, 2, 2]), mode="sum")
    got = base(KeyedJaggedTensor(["f"], ids, lengths=lengths)).values()
    torch.testing.assert_close(got, want)
    assert bool((got[0] != 0).all())
    want.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(base.embedding_bags["t"].weight.grad, rows.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_3673_rows_wider_than_1024_are_sharded(kind: str) -> None:
    base = EmbeddingBagCollection([EmbeddingBagConfig(5, 1032, "t", feature_names=["f"])])
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), list(base.parameters()))
    equals_unsharded(base, kind, lambda rank, step: random_batch(["f"], 5, 3, seed=4 * step + rank), steps=1)


# ------------------------------------------------------------------- 3187: half precision comes back as fp32


TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize("given", [torch.float16, DataType.FP16, torch.bfloat16, DataType.BF16])
def test_3187_a_tables_type_is_that_of_its_rows_and_of_the_output(given: torch.dtype | DataType) -> None:
    want = given if isinstance(given, torch.dtype) else TYPES[given.value.lower()]
    base = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "t", feature_names=["f"], data_type=given)])
    assert base.embedding_bags["t"].weight.dtype == want
    features = random_batch(["f"], 5, 3)
    assert base(features).values().dtype == want
    told = EmbeddingBagCollection(
        [EmbeddingBagConfig(5, 4, "t", feature_names=["f"], data_type=given)], output_dtype=torch.float32
    )
    assert told(features).values().dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_3187_half_precision_tables_keep_their_type_sharded(kind: str, name: str) -> None:
    dtype = TYPES[name]
    base = EmbeddingBagCollection([EmbeddingBagConfig(9, 8, t, feature_names=[t], data_type=dtype) for t in ("a", "b")])
    sequence = EmbeddingCollection([EmbeddingConfig(9, 8, "a", feature_names=["a"], data_type=dtype)])
    for each in (base, sequence):
        apply_optimizer_in_backward(SGD(lr=0.5), list(each.parameters()))
    features = [random_batch(["a", "b"], 9, 4, seed=rank) for rank in range(SIZE)]
    bound = 4 * torch.finfo(dtype).eps

    def run(group: Group) -> None:
        for each in (base, sequence):
            module = sharded(each, kind, group)
            assert all(p.dtype == dtype for p in module.parameters())
            got = flat(module(features[group.rank]))
            assert got.dtype == dtype
            want = flat(each(features[group.rank]))
            torch.testing.assert_close(got, want, rtol=bound, atol=bound)
            got.sum().backward()
            assert all(p.dtype == dtype for p in module.parameters())

    run_virtual_ranks(SIZE, run)


# ------------------------------------ 2563: parameters of replicated tables are special


@pytest.mark.parametrize("kind", KINDS)
def test_2563_parameters_are_plain_leaves_and_follow_a_conversion(kind: str) -> None:
    base = EmbeddingBagCollection([EmbeddingBagConfig(9, 8, t, feature_names=[t]) for t in ("a", "b")])
    names = list(base.state_dict())
    features = [random_batch(["a", "b"], 9, 4, seed=rank) for rank in range(SIZE)]

    def run(group: Group) -> None:
        module = sharded(base, kind, group).to(torch.bfloat16)
        parameters = dict(module.named_parameters())
        assert [name for name in parameters if name in names] == names
        assert all(type(p) is nn.Parameter and p.is_leaf for p in parameters.values())
        assert all(p.dtype == torch.bfloat16 for p in parameters.values())
        first = flat(module(features[group.rank]))
        with torch.no_grad():
            for p in parameters.values():
                p.mul_(2)
        # The parameter and what is looked up are one memory.
        assert torch.equal(flat(module(features[group.rank])), 2 * first)

    run_virtual_ranks(SIZE, run)


@pytest.mark.parametrize("kind", KINDS)
def test_an_attached_optimizer_steps_a_table_under_every_sharding_replicated_ones_included(kind: str) -> None:
    """In the backward, by its own learning rate, with state in `fused_optimizer`, and no gradient for a dense one."""
    base = EmbeddingBagCollection([EmbeddingBagConfig(9, 8, t, feature_names=[t]) for t in ("a", "b")])
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.3), list(base.parameters()))
    modules = equals_unsharded(base, kind, lambda rank, step: random_batch(["a", "b"], 9, 4, seed=9 * step + rank))
    for module in modules:
        assert all(p.grad is None for p in module.parameters())
        assert sorted(module.fused_optimizer.params) == [f"embedding_bags.{t}.weight" for t in ("a", "b")]
        assert [group["lr"] for group in module.fused_optimizer.param_groups] == [0.3]


# --------------------------------------------------------------------- 355, 1165: values set before are lost


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_355_weights_set_before_sharding_are_those_after_it(kind: str, pooled: bool) -> None:
    base: EmbeddingBagCollection | EmbeddingCollection
    if pooled:
        base = EmbeddingBagCollection([EmbeddingBagConfig(7, 6, "t", feature_names=["f"])])
    else:
        base = EmbeddingCollection([EmbeddingConfig(7, 6, "t", feature_names=["f"])])
    values = torch.arange(42.0).view(7, 6)
    with torch.no_grad():
        next(base.parameters()).copy_(values)
    features = KeyedJaggedTensor(["f"], torch.arange(7), lengths=torch.ones(7, dtype=torch.int64))

    def run(group: Group) -> None:
        module = sharded(base, kind, group)
        (got,) = full_state_dict(module).values()
        assert torch.equal(got, values)
        assert torch.equal(flat(module(features)).view(7, 6), values)

    run_virtual_ranks(SIZE, run)


# ----------------------------------------------------------------- 1298: repeated ids, another sum every run


def trained(base: EmbeddingBagCollection, batches: list[KeyedJaggedTensor]) -> dict[str, Tensor]:
    module = copy.deepcopy(base)
    for features in batches:
        y = module(features).values()
        (y * y).sum().backward()
    return {name: value.clone() for name, value in module.state_dict().items()}


def repeated_ids(seed: int) -> KeyedJaggedTensor:
    """Some 1,300 ids of 3 rows: every row's gradient is a sum of hundreds."""
    return random_batch(["a", "b"], 3, 128, mean_length=5.0, seed=seed)


def test_1298_repeated_ids_give_the_same_bits_in_every_run_and_on_any_number_of_threads() -> None:
    base = EmbeddingBagCollection([EmbeddingBagConfig(3, 24, "t", feature_names=["a", "b"])])
    apply_optimizer_in_backward(Adagrad(lr=0.1), list(base.parameters()))
    batches = [repeated_ids(seed) for seed in range(3)]
    (first,) = trained(base, batches).values()
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        (again,) = trained(base, batches).values()
        assert torch.equal(again, first)


@pytest.mark.parametrize("kind", KINDS)
def test_1298_repeated_ids_give_the_same_bits_in_every_sharded_run(kind: str) -> None:
    base = EmbeddingBagCollection([EmbeddingBagConfig(3, 24, "t", feature_names=["a", "b"])])
    apply_optimizer_in_backward(Adagrad(lr=0.1), list(base.parameters()))

    def run(group: Group) -> Tensor:
        module = sharded(base, kind, group)
        for step in range(2):
            y = flat(module(repeated_ids(4 * step + group.rank)))
            (y * y).sum().backward()
        (whole,) = full_state_dict(module).values()
        return whole

    (first, *_), (again, *_) = run_virtual_ranks(SIZE, run), run_virtual_ranks(SIZE, run)
    assert torch.equal(first, again)


# -------------------------------------- 1130, PR 4159, PR 4459: weights, variable batches, replicated tables


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
def test_1130_weighted_bags_are_right_under_every_sharding(kind: str, mean: bool) -> None:
    pooling = PoolingType.MEAN if mean else PoolingType.SUM
    tables = [
        EmbeddingBagConfig(9, 4, "t", feature_names=["a", "b"], pooling=pooling),
        EmbeddingBagConfig(6, 8, "u", feature_names=["c"], pooling=pooling),
    ]
    base = EmbeddingBagCollection(tables, is_weighted=True)
    apply_optimizer_in_backward(Adagrad(lr=0.1), list(base.parameters()))

    def batch(rank: int, step: int) -> KeyedJaggedTensor:
        return random_batch(["a", "b", "c"], [9, 9, 6], 4, weighted=True, seed=9 * step + rank)

    equals_unsharded(base, kind, batch)


def _one_rank_alike(batch: Callable[..., KeyedJaggedTensor], rank: int, step: int) -> KeyedJaggedTensor:
    """Features of rank 0 happen to have as many bags as there are samples; on the others they differ."""
    if rank:
        return batch(seed=9 * step + rank, variable=True)
    features = batch(seed=9 * step + rank)
    inverse = torch.arange(features.stride()).repeat(len(features.keys()), 1)
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        lengths=features.lengths(),
        stride_per_key_per_rank=[[features.stride()]] * len(features.keys()),
        inverse_indices=(features.keys(), inverse),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_pr_4159_batches_of_a_size_per_feature_are_right_on_replicated_and_on_all_other_tables(
    kind: str,
) -> None:
    tables = [
        EmbeddingBagConfig(9, 4, "t", feature_names=["a", "b"]),
        EmbeddingBagConfig(6, 8, "u", feature_names=["c"]),
    ]
    base = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(Adagrad(lr=0.1), list(base.parameters()))

    def batch(seed: int, variable: bool = False) -> KeyedJaggedTensor:
        return random_batch(["a", "b", "c"], [9, 9, 6], 5, variable=variable, seed=seed)

    equals_unsharded(base, kind, lambda rank, step: _one_rank_alike(batch, rank, step))
