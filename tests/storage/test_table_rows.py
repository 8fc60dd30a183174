"""What rows count, and what they say about gradients that go past them."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.cached_tables import cache_tables
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops import backends
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adam
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.storage import table_rows
from tilerec.storage.shared_param_group import SharedParamGroup
from tilerec.storage.table_rows import NonFiniteGradientError, rows_of
from tilerec.testing.virtual import run_virtual_ranks

BATCH = KeyedJaggedTensor.from_lengths_sync(["t"], torch.tensor([1, 2]), torch.tensor([1, 1]))


def attached(**kwargs) -> EmbeddingBagCollection:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(4, 3, "t")])
    apply_optimizer_in_backward(Adam(lr=0.1, **kwargs), ebc.parameters())
    return ebc


def test_an_update_that_failed_is_not_counted() -> None:
    ebc = attached()
    table = ebc.embedding_bags["t"]
    whole = table.rows.state["exp_avg"]
    table.rows.state["exp_avg"] = torch.zeros(2, 3)  # the op refuses it
    with pytest.raises(Exception, match=r"slot|shape"):
        ebc(BATCH).values().sum().backward()
    assert table.rows.updates == 0
    table.rows.state["exp_avg"] = whole
    ebc(BATCH).values().sum().backward()
    assert table.rows.updates == 1
    torch.testing.assert_close(table.rows.state["exp_avg"][1], torch.full((3,), 0.1))


def test_an_update_that_left_out_rows_is_counted() -> None:
    ebc = attached()
    scale = torch.tensor([[float("inf")], [1.0]])
    with pytest.raises(NonFiniteGradientError, match="row 1 is not finite"):
        (ebc(BATCH).values() * scale).sum().backward()
    assert ebc.embedding_bags["t"].rows.updates == 1
    assert ebc.embedding_bags["t"].rows.state["exp_avg"][2].all()


def test_a_dense_gradient_that_nobody_steps_is_told_once() -> None:
    ebc = attached()
    weight = ebc.embedding_bags["t"].weight
    with pytest.warns(UserWarning, match=r"Table 't': its weight has a \.grad, which the attached Adam does not read"):
        (ebc(BATCH).values().sum() + (weight**2).sum()).backward()
    assert weight.grad is not None
    assert ebc.embedding_bags["t"].rows.updates == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (ebc(BATCH).values().sum() + (weight**2).sum()).backward()


def test_rows_are_found_by_their_own_parameter_alone() -> None:
    ebc = attached()
    weight = ebc.embedding_bags["t"].weight
    assert rows_of(weight) is ebc.embedding_bags["t"].rows
    for stranger in (
        weight.detach(),
        copy.deepcopy(weight),
        pickle.loads(pickle.dumps(weight)),
        torch.zeros(1),
    ):
        assert rows_of(stranger) is None


def test_a_copied_group_keeps_additions_and_its_check() -> None:
    group = SharedParamGroup.of(Adam(lr=0.1))
    group["initial_lr"] = 0.5
    for twin in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert dict(twin) == dict(group)
        twin["lr"] = 0.2
        assert twin.spec() == Adam(lr=0.2)
    assert group.spec() == Adam(lr=0.1)


def test_a_whole_table_rounds_at_random_as_a_tile_of_all_its_rows_does() -> None:
    """Random bits belong to a row's and column's number in the table: both begin at row 0 and column 0."""
    torch.manual_seed(0)
    plain = EmbeddingBagCollection([EmbeddingBagConfig(4, 12, "t", "BF16")])
    apply_optimizer_in_backward(SGD(lr=1e-4), plain.parameters())

    def trained(group: Group) -> torch.Tensor:
        module: Any = copy.deepcopy(plain)
        shard(module, {"t": ParameterSharding("table_wise", ranks=[0])}, group)
        module(BATCH).values().sum().backward()
        return module.embedding_bags["t"].weight.detach()

    (tile,) = run_virtual_ranks(1, trained)
    before = plain.embedding_bags["t"].weight.detach().clone()
    plain(BATCH).values().sum().backward()
    whole = plain.embedding_bags["t"].weight.detach()
    assert torch.equal(whole, tile)
    moved = whole != before
    assert 0 < int(moved.sum()) < 24, "steps far below a bf16's: some round up, some down"


def test_a_shallow_copy_of_cached_rows_has_a_cache_of_its_own() -> None:
    ebc: Any = cache_tables(attached(), 1.0)
    rows = ebc.embedding_bags["t"].rows
    ebc(BATCH).values().sum().backward()
    twin = copy.copy(rows)
    assert twin.cache is not rows.cache
    assert twin.cache.params == rows.cache.params
    assert twin.cache.stats == rows.cache.stats


@pytest.mark.parametrize(
    ("served", "device", "change", "sorts"),
    [
        (True, "cuda:1", {}, True),
        (False, "cuda:1", {}, False),  # the reference finds rows in its own way
        (True, "cpu", {}, False),
        (True, "cuda:1", {"cache": "a cache"}, False),
        (True, "cuda:1", {"device": "cuda:0"}, False),
        (True, "cuda:1", {"dtype": torch.float64}, False),  # fp64 is for the reference
    ],
)
def test_orders_are_made_only_for_kernels_that_read_them(
    served: bool, device: str, change: dict[str, Any], sorts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(cache: Any = None, device: str = device, dtype: torch.dtype = torch.float32) -> Any:
        return SimpleNamespace(cache=cache, leaf=SimpleNamespace(device=torch.device(device), dtype=dtype))

    monkeypatch.setattr(backends, "TRITON", served)
    several = [table(), table(**change)]
    assert table_rows._sorted_there(several, torch.device(device)) is sorts


@pytest.mark.parametrize(("tables", "others"), [(1, ""), (2, r" \(and 1 more\)"), (3, r" \(and 2 more\)")])
def test_a_captured_update_by_numbers_of_the_host_is_refused(
    tables: int, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays would repeat the learning rate and the count; the first of its tables is named."""
    ebc: Any = EmbeddingBagCollection([EmbeddingBagConfig(4, 3, name) for name in "abc"[:tables]])
    apply_optimizer_in_backward(Adam(lr=0.1), ebc.parameters())
    rows = [table.rows for table in ebc.embedding_bags.values()]
    monkeypatch.setattr(table_rows, "capturing", lambda: True)
    with pytest.raises(ConfigError, match=rf"^Table 'a'{others}: its update by Adam is captured.*capturable"):
        table_rows.counting(rows, rows[0].rule(), torch.device("cpu"))
    assert [own.updates for own in rows] == [0] * tables


@pytest.mark.parametrize("first", ["shared", "attached"])
def test_optimizer_state_of_tables_in_shared_memory_is_shared(first: str) -> None:
    """Processes that train on one table see one state."""
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(4, 3, "t")])
    if first == "shared":
        ebc.share_memory()
    apply_optimizer_in_backward(Adam(lr=0.1), ebc.parameters())
    slots: list[torch.Tensor] = ebc.embedding_bags["t"].rows.slots
    if first == "attached":
        assert not any(slot.is_shared() for slot in slots)
        ebc.share_memory()
    assert all(slot.is_shared() for slot in ebc.embedding_bags["t"].rows.slots)
