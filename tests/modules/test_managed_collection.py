"""Ids of a batch become rows: order, weights, variable batches, dropped ids, bad input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilerec.errors import ConfigError, InputError
from tilerec.modules.evict import HashZchEvictionConfig
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.batches import random_batch

CONFIGS = (
    EmbeddingBagConfig(48, 4, "user", feature_names=["u", "v"]),
    EmbeddingBagConfig(20, 4, "item", feature_names=["i"]),
    EmbeddingBagConfig(10, 4, "plain", feature_names=["p"]),
)


def made(**options: Any) -> ManagedCollisionCollection:
    modules = {
        "user": HashZchManagedCollisionModule(48, "cpu", 4, **options),
        "item": HashZchManagedCollisionModule(20, "cpu", 4, **options),
    }
    return ManagedCollisionCollection(modules, CONFIGS)


def batch(seed: int = 0, size: int = 5, **options: Any) -> KeyedJaggedTensor:
    return random_batch(["p", "v", "i", "u"], {"u": 200, "v": 200, "i": 90, "p": 10}, size, seed=seed, **options)


def test_tables_have_maps_of_their_own_and_others_keep_their_ids() -> None:
    mcc = made()
    features = batch()
    out = mcc(features)
    assert out.keys() == features.keys()
    assert torch.equal(out.lengths(), features.lengths())
    assert torch.equal(out["p"].values(), features["p"].values())
    assert int(out["u"].values().max()) < 48
    assert int(out["i"].values().max()) < 20
    assert mcc.table_to_number_buckets() == {"user": 4, "item": 4}
    same = features["u"].values()[0]
    assert mcc.inspect("u", int(same)).row == mcc.inspect("v", int(same)).row == int(out["u"].values()[0])


def test_ids_take_rows_in_the_order_of_the_tables_features_whatever_the_keys_order() -> None:
    one, other = made(), made()
    features = batch(size=40)
    turned = features.permute([3, 2, 1, 0])
    assert torch.equal(one(features)["v"].values(), other(turned)["v"].values())
    assert one.stats() == other.stats()


@given(st.integers(0, 50), st.booleans(), st.booleans(), st.booleans())
def test_a_dropped_id_leaves_its_bag_with_its_weight(seed: int, weighted: bool, variable: bool, small: bool) -> None:
    mcc = made(when_full="reject")
    features = batch(
        seed,
        9,
        weighted=weighted,
        variable=variable,
        mean_length=4.0,
        lengths_dtype=torch.int32 if small else torch.int64,
    )
    keeps = made()  # shares rows: nothing is dropped, and live ids have the same places
    keeps.load_state_dict(keeps.state_dict())
    out = mcc(features)
    assert out.lengths().dtype == features.lengths().dtype
    assert out.stride_per_key() == features.stride_per_key()
    assert out.inverse_indices_or_none() == features.inverse_indices_or_none()
    again = mcc.eval()(features)
    assert torch.equal(out.values(), again.values())
    at = 0
    for key in features.keys():  # noqa: SIM118
        part, own = features[key], out[key]
        for bag in range(part.lengths().numel()):
            ids = part.values()[part.offsets()[bag] : part.offsets()[bag + 1]].tolist()
            want, kept = [], []
            for n, id_ in enumerate(ids):
                row = id_ if key == "p" else mcc.inspect(key, id_).row
                if row is not None:
                    want.append(row)
                    kept.append(n)
            span = slice(int(own.offsets()[bag]), int(own.offsets()[bag + 1]))
            assert own.values()[span].tolist() == want
            if weighted:
                before = part.weights()[part.offsets()[bag] : part.offsets()[bag + 1]]
                assert torch.equal(own.weights()[span], before[kept])
            at += len(ids)
    assert at == features.values().numel()
    rejected = sum(stats.total.rejections for stats in mcc.stats().values())
    assert out.values().numel() == at - rejected


def test_gradients_reach_the_weights_that_are_kept() -> None:
    weights = torch.ones(4, requires_grad=True)
    mcc = ManagedCollisionCollection(
        {"t": HashZchManagedCollisionModule(2, "cpu", 1, when_full="reject")},
        [EmbeddingBagConfig(2, 4, "t", feature_names=["a"])],
    )
    features = KeyedJaggedTensor(["a"], torch.tensor([5, 6, 7, 5]), weights, torch.tensor([2, 2]))
    mcc(features).weights().sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [1, 1, 0, 1]


def test_batches_of_nothing_pass() -> None:
    mcc = made(when_full="reject")
    for features in (batch(size=0), batch(size=3, mean_length=1.0, empty=1.0 - 1e-9)):
        out = mcc(features)
        assert out.keys() == features.keys()
        assert out.stride() == features.stride()
    assert all(stats.live <= 3 * 3 for stats in mcc.stats().values())


def test_int32_batches_are_widened() -> None:
    features = batch(values_dtype=torch.int32)
    assert made()(features).values().dtype == torch.int64


def test_keeping_lengths_is_refused_where_ids_are_dropped() -> None:
    with pytest.raises(ConfigError, match="mutate_miss_lengths=False"):
        made(when_full="reject")(batch(), mutate_miss_lengths=False)
    features = batch(size=60)
    out = made()(features, mutate_miss_lengths=False)
    assert torch.equal(out.lengths(), features.lengths())


def test_a_wrong_batch_changes_nothing() -> None:
    mcc = made()
    before = copy.deepcopy(mcc.state_dict())
    with pytest.raises(InputError, match="feature 'i' of table 'item' is not in the batch"):
        mcc(KeyedJaggedTensor.from_lengths_sync(["u", "v"], torch.tensor([1, 2]), torch.tensor([1, 1])))
    with pytest.raises(InputError, match="expected a KeyedJaggedTensor"):
        mcc({"u": torch.tensor([1])})
    for name, value in mcc.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("modules", "configs", "words"),
    [
        ({"z": 48}, CONFIGS, "a module for table 'z'; expected a table of embedding_configs"),
        ({"user": 52}, CONFIGS, "table 'user' has 48 rows, but its module has 52"),
        (
            {"user": 48},
            [CONFIGS[0], EmbeddingBagConfig(9, 4, "other", feature_names=["u"])],
            "feature 'u' belongs to tables 'user' and 'other'.*two names",
        ),
    ],
)
def test_modules_that_do_not_fit_their_tables_are_refused(modules: Any, configs: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ManagedCollisionCollection(
            {name: HashZchManagedCollisionModule(rows, "cpu", 4) for name, rows in modules.items()}, configs
        )


def test_one_module_for_two_tables_is_refused() -> None:
    module = HashZchManagedCollisionModule(48, "cpu", 4)
    configs = [EmbeddingBagConfig(48, 4, name, feature_names=["f" + name]) for name in ("a", "b")]
    with pytest.raises(ConfigError, match=r"already maps|share one module"):
        ManagedCollisionCollection({"a": module, "b": module}, configs)
    with pytest.raises(ConfigError, match="got a Linear"):
        ManagedCollisionCollection({"a": torch.nn.Linear(1, 1)}, configs)  # type: ignore[dict-item]


def test_a_state_that_is_not_for_one_table_loads_for_none() -> None:
    mcc = made()
    mcc(batch())
    before = copy.deepcopy(mcc.state_dict())
    state = copy.deepcopy(made().state_dict())
    own = "_managed_collision_modules.item."
    other = HashZchManagedCollisionModule(20, "cpu", 2)
    other.bind("item", ["i"])
    state.update({own + name: value for name, value in other.state_dict().items()})
    with pytest.raises(ConfigError, match="Table 'item': got a state of 2 buckets"):
        mcc.load_state_dict(state)
    for name, value in mcc.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("clock", [lambda: 1.5, lambda: True, lambda: 2**62])
def test_a_clock_of_no_whole_numbers_is_refused_before_any_table_changes(clock: Any) -> None:
    mcc = made(eviction_policy_name="SINGLE_TTL_EVICTION", eviction_config=HashZchEvictionConfig([], 2))
    mcc.modules_by_table["item"]._clock = clock
    with pytest.raises(ConfigError, match=r"Table 'item': got .* from its clock"):
        mcc(batch())
    assert [(module.step, module.stats().live) for module in mcc.modules_by_table.values()] == [(0, 0)] * 2


def test_ids_are_asked_for_as_whole_numbers_of_any_kind() -> None:
    mcc = made()
    mcc(batch())
    assert mcc.inspect("u", torch.tensor(7)) == mcc.inspect("u", 7)  # type: ignore[arg-type]
    for wrong in ("7", 7.0, True, None):
        with pytest.raises(InputError, match="expected an integer"):
            mcc.inspect("u", wrong)  # type: ignore[arg-type]


def test_rows_that_changed_hands_are_told_once() -> None:
    mcc = made(eviction_policy_name="LRU_EVICTION")
    for seed in range(4):
        mcc(batch(seed, 20))
    told = mcc.evict()
    assert {table: rows is not None for table, rows in told.items()} == {"user": True, "item": True}
    rows = told["user"]
    assert rows is not None
    assert rows.numel() == mcc.stats()["user"].total.evictions
    assert mcc.evict() == {"user": None, "item": None}
    assert set(mcc.open_slots()) == {"user", "item"}
