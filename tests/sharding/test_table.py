"""A sharded table: leaves under the unsharded names, one key of logical shape, conversions, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.sharding.one_table import (
    DIM,
    KEY,
    TILINGS,
    batch,
    collection,
    sharded,
    step,
    table_of,
    trained,
)
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.spec.optimizer import SGD, Adagrad
from tilerec.testing.virtual import run_virtual_ranks


def test_leaves_have_the_tables_name_and_further_tiles_a_number() -> None:
    def run(group: Group) -> list[tuple[str, tuple[int, ...]]]:
        own = sharded(collection(), group, "two tiles")
        assert all(p.is_leaf for p in own.parameters())
        return [(name, tuple(p.shape)) for name, p in own.named_parameters()]

    first, second = run_virtual_ranks(2, run)
    assert first == [(KEY, (7, 2)), (f"{KEY}.1", (7, 2))]
    assert second == [(KEY, (7, 2))]
    held = run_virtual_ranks(2, lambda g: list(sharded(collection(), g, "one rank").named_parameters()))
    assert held[0][0][1].shape == (0, DIM)


@pytest.mark.parametrize("tiling", TILINGS)
def test_a_whole_tensor_loads_into_any_tiling(tiling: str) -> None:
    whole = torch.arange(42.0).view(7, 6)

    def run(group: Group) -> None:
        own = sharded(collection(), group, tiling)
        assert str(own.load_state_dict({KEY: whole})) == "<All keys matched successfully>"
        assert torch.equal(table_of(own).weight_of().full(), whole)
        own.load_state_dict({KEY: whole.double() * 2}, assign=True)
        assert torch.equal(table_of(own).weight_of().full(), 2 * whole)
        assert all(p.dtype == torch.float32 for p in own.parameters())

    run_virtual_ranks(2, run)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "Missing key"),
        ({KEY: torch.zeros(7, 6), f"{KEY}.1": torch.zeros(7, 2)}, "Unexpected key"),
        ({KEY: torch.zeros(7, 6), "embedding_bags.u.weight": torch.zeros(7, 2)}, "Unexpected key"),
        ({KEY: torch.zeros(5, 6)}, r"size mismatch for embedding_bags.t.weight: copying a param with shape "
            r"torch.Size\(\[5, 6\]\) from checkpoint, the shape in current model is torch.Size\(\[7, 6\]\)."),
        ({KEY: [1.0]}, "expected torch.Tensor"),
    ],
)  # fmt: skip
def test_keys_and_shapes_are_checked_in_torchs_words(given: Mapping[str, Any], says: str) -> None:
    def run(group: Group) -> None:
        own = sharded(collection(), group, "two tiles")
        with pytest.raises(RuntimeError, match=says):
            own.load_state_dict(given)

    run_virtual_ranks(2, run)


def test_loading_goes_on_without_the_keys_that_are_missing_if_it_is_not_strict() -> None:
    def run(group: Group) -> None:
        own = sharded(collection(), group, "5 + 2 rows")
        before = [p.detach().clone() for p in own.parameters()]
        result = own.load_state_dict({"other": torch.zeros(1)}, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == ([KEY], ["other"])
        assert all(torch.equal(a, b) for a, b in zip(before, own.parameters(), strict=True))

    run_virtual_ranks(2, run)


def test_a_state_dict_is_the_live_table_where_every_rank_holds_it() -> None:
    def run(group: Group) -> None:
        own = sharded(collection(), group, "everywhere")
        value = own.state_dict()[KEY]
        assert type(value) is Tensor
        assert not value.requires_grad
        assert value.data_ptr() == table_of(own).weight.data_ptr()
        assert own.state_dict(keep_vars=True)[KEY] is table_of(own).weight

    run_virtual_ranks(2, run)


def test_threads_are_told_how_to_get_whole_tables() -> None:
    def run(group: Group) -> None:
        with pytest.raises(ConfigError, match="full_state_dict"):
            sharded(collection(), group, "two tiles").state_dict()

    run_virtual_ranks(2, run)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("tiling", TILINGS)
def test_a_conversion_keeps_parameter_and_table_one_thing(tiling: str, attached: bool, before: bool) -> None:
    """The next step is visible in the next forward; before sharding or after, the result is the same."""
    base = collection()
    if attached:
        apply_optimizer_in_backward(SGD(lr=0.5, stochastic_rounding=False), list(base.parameters()))
    if before:
        base = base.to(torch.bfloat16)
    want = trained(copy.deepcopy(base).to(torch.bfloat16), 2) if attached else None

    def run(group: Group) -> Tensor:
        own = sharded(base, group, tiling).to(torch.bfloat16)
        leaves = list(own.parameters())
        dense = None if attached else torch.optim.SGD(leaves, lr=0.5)
        for s in range(2):
            seen = own(batch(group.rank, s)).values().detach().clone()
            own.zero_grad()
            step(own, batch(group.rank, s), 2.0)
            if dense is not None:
                assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in leaves if p.numel())
                dense.step()
            else:
                assert all(p.grad is None for p in leaves)
            after = own(batch(group.rank, s)).values()
            assert not torch.equal(seen, after) or not after.numel()
        assert all(a is b for a, b in zip(leaves, own.parameters(), strict=True))
        assert {p.dtype for p in own.parameters()} == {torch.bfloat16}
        return table_of(own).weight_of().full()

    first, second = run_virtual_ranks(2, run)
    assert torch.equal(first, second)
    if want is not None:
        torch.testing.assert_close(first, want.state_dict()[KEY], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("tiling", TILINGS)
def test_a_copy_trains_on_its_own(tiling: str) -> None:
    base = collection()
    apply_optimizer_in_backward(Adagrad(lr=0.1), list(base.parameters()))
    want = trained(base, 2)

    def run(group: Group) -> None:
        own = sharded(base, group, tiling)
        step(own, batch(group.rank, 0), 2.0)
        twin = copy.deepcopy(own)
        before = table_of(own).weight_of().full()
        step(twin, batch(group.rank, 1), 2.0)
        assert torch.equal(table_of(own).weight_of().full(), before)
        got = table_of(twin)
        torch.testing.assert_close(got.weight_of().full(), want.state_dict()[KEY], rtol=1e-5, atol=1e-6)
        assert int(got.state_of("step").full()) == 2
        assert int(table_of(own).state_of("step").full()) == 1

    run_virtual_ranks(2, run)


def test_a_sharded_module_is_not_pickled_and_says_what_to_do() -> None:
    def run(group: Group) -> None:
        with pytest.raises(pickle.PicklingError, match=r"checkpoint"):
            pickle.dumps(sharded(collection(), group, "5 + 2 rows"))

    run_virtual_ranks(2, run)


def test_a_parameter_of_another_shape_is_refused() -> None:
    def run(group: Group) -> None:
        table = table_of(sharded(collection(), group, "5 + 2 rows"))
        with pytest.raises(ConfigError, match=r"this rank's tile"):
            table.weight = nn.Parameter(torch.zeros(7, 6))

    run_virtual_ranks(2, run)


def test_sharded_tables_of_one_tiling_can_be_tied() -> None:
    base = collection()
    apply_optimizer_in_backward(SGD(lr=0.5), list(base.parameters()))

    def run(group: Group) -> None:
        one, other = sharded(base, group, "5 + 2 rows"), sharded(base, group, "5 + 2 rows")
        table_of(other).weight = table_of(one).weight
        assert table_of(other).rows is table_of(one).rows
        before = table_of(one).weight_of().full()
        step(other, batch(group.rank), 2.0)
        assert not torch.equal(table_of(one).weight_of().full(), before)
        apart = sharded(base, group, "two tiles")
        with pytest.raises(ConfigError, match=r"cut differently|this rank's tile"):
            table_of(apart).weight = table_of(one).weight

    run_virtual_ranks(2, run)
