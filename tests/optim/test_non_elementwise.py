"""Rules that look at whole parameters: what is said of them over tiles, and that ranks without rows step along."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.non_elementwise import needs_elements, warn_of_tiled_params
from tilerec.optim.rowwise_adagrad import RowWiseAdagrad
from tilerec.optim.wrapper import KeyedOptimizerWrapper
from tilerec.sharding.shard_collection import shard_collection
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

CUTS: dict[str, list[tuple[Any, ...]]] = {
    "everywhere": [(0, 7, 0, 6, (0, 1))],
    "one": [(0, 7, 0, 6, 0)],
    "cut": [(0, 6, 0, 6, 0), (6, 7, 0, 6, 1)],
}
BASE = EmbeddingBagCollection([EmbeddingBagConfig(7, 6, name, feature_names=[name]) for name in CUTS])


class Leaves(dict[str, Tensor]):
    """Parameters by name; with their module, as tables know of their tiles only while it lives."""

    module: EmbeddingBagCollection


def leaves(group: Group, *names: str, attached: bool = False) -> Leaves:
    own: Any = copy.deepcopy(BASE)
    if attached:
        apply_optimizer_in_backward(SGD(lr=0.1), own.parameters())
    tilings = {name: Tiling.of(name, 7, 6, tiles) for name, tiles in CUTS.items()}
    shard_collection(own, tilings, group, group.split("route"), Topology(group.size, "cpu"))
    found = Leaves({name: p for name, p in own.named_parameters() if name.split(".")[1] in names})
    found.module = own
    return found


def said(optimizer: torch.optim.Optimizer, params: dict[str, Tensor]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_tiled_params(optimizer, params)
    return [str(warning.message) for warning in caught]


class Lamb(torch.optim.SGD):
    """As other libraries call theirs."""


class MyMuon(torch.optim.Muon):
    pass


def test_parts_of_tables_under_a_rule_of_wholes_are_warned_of_once() -> None:
    one = [torch.nn.Parameter(torch.ones(2, 2))]
    wholes: list[Any] = [torch.optim.Muon(one), MyMuon(one), torch.optim.Adafactor(one), Lamb(one)]
    others: list[Any] = [torch.optim.Adam(one), torch.optim.SGD(one), RowWiseAdagrad(one)]

    for own in run_virtual_ranks(2, lambda group: leaves(group, *CUTS)):
        for rule in wholes:
            (text,) = said(rule, own)
            assert "is not element-wise" in text
            assert "tiles of embedding_bags.cut.weight, not the tables" in text
            assert not said(rule, {name: p for name, p in own.items() if ".cut." not in name})
        assert not any(said(rule, own) for rule in others)
        # One direction over all parameters of a rank: it matters where any table is.
        (text,) = said(torch.optim.LBFGS(one), own)
        assert all(name in text for name in own)
    assert not said(torch.optim.Muon(one), {"p": one[0]})
    for own in run_virtual_ranks(2, lambda group: leaves(group, *CUTS, attached=True)):
        assert not said(torch.optim.Muon(one), own)


def test_only_adafactor_needs_rows() -> None:
    one = [torch.nn.Parameter(torch.ones(2, 2))]
    assert needs_elements(torch.optim.Adafactor(one))
    assert not needs_elements(torch.optim.Muon(one))
    empty = torch.nn.Parameter(torch.ones(0, 2))
    empty.grad = torch.zeros(0, 2)
    torch.optim.Muon([empty]).step()
    with pytest.raises(ZeroDivisionError):  # the day torch takes them, so may we
        torch.optim.Adafactor([empty]).step()


@pytest.mark.parametrize("by_closure", [False, True])
def test_adafactor_steps_on_ranks_without_rows(by_closure: bool) -> None:
    want = torch.nn.Parameter(next(BASE.parameters()).detach().clone())
    with torch.no_grad():
        want.copy_(BASE.embedding_bags["one"].weight)
    want.grad = torch.ones_like(want)
    torch.optim.Adafactor([want], lr=0.1).step()

    def run(group: Group) -> Tensor:
        own = leaves(group, "one", "everywhere")
        optimizer = KeyedOptimizerWrapper(own, lambda p: torch.optim.Adafactor(p, lr=0.1))

        def closure() -> float:
            for p in own.values():
                p.grad = torch.ones_like(p)
            return 2.0

        if by_closure:
            assert optimizer.step(closure) == 2.0
        else:
            closure()
            optimizer.step()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in own.values())
        optimizer.init_state()
        return own["embedding_bags.one.weight"].detach()

    first, second = run_virtual_ranks(2, run)
    assert torch.equal(first, want)
    assert second.shape == (0, 6)


def test_the_state_of_adafactor_is_refused_alike_on_every_rank() -> None:
    def run(group: Group) -> None:
        own = leaves(group, "one", "everywhere")
        optimizer = KeyedOptimizerWrapper(own, torch.optim.Adafactor)
        for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({"state": {}})):
            with pytest.raises(
                ConfigError,
                match=r"'embedding_bags.one.weight': got Adafactor, which has state per column.*data_parallel",
            ):
                call()
        alone = KeyedOptimizerWrapper({name: p for name, p in own.items() if "one" not in name}, torch.optim.Adafactor)
        shapes = {key: tuple(v.shape) for key, v in next(iter(alone.state_dict()["state"].values())).items()}
        assert shapes == {"step": (), "row_var": (7, 1), "col_var": (1, 6)}

    run_virtual_ranks(2, run)


def test_lbfgs_over_tiles_is_warned_of_and_has_no_state_dict() -> None:
    def run(group: Group) -> None:
        own = leaves(group, *CUTS)
        optimizer = KeyedOptimizerWrapper(own, torch.optim.LBFGS)
        with pytest.raises(ConfigError, match=r"LBFGS: got a step\(\) that requires a closure.*another optimizer"):
            optimizer.state_dict()

    with pytest.warns(UserWarning, match="LBFGS is not element-wise"):
        run_virtual_ranks(2, run)


def test_a_group_that_comes_late_is_warned_of() -> None:
    def run(group: Group) -> tuple[Leaves, KeyedOptimizerWrapper, dict[str, Tensor]]:
        own = leaves(group, *CUTS)
        late = {name: own.pop(name) for name in list(own) if ".cut." in name}
        return own, KeyedOptimizerWrapper(own, torch.optim.Muon), late

    # Warnings are caught around the ranks: two threads cannot both have the process's list of them.
    for _, optimizer, late in run_virtual_ranks(2, run):
        with pytest.warns(UserWarning, match="Muon is not element-wise"):
            optimizer.add_param_group({"params": late})


def test_every_optimizer_over_cut_tiles_is_warned_of() -> None:
    def run(group: Group) -> None:
        own = leaves(group, *CUTS)
        KeyedOptimizerWrapper(own, torch.optim.Adafactor)

    with pytest.warns(UserWarning, match="Adafactor is not element-wise"):
        run_virtual_ranks(2, run)
