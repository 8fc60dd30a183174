"""Values that a user's `init_fn` draws: the unsharded table's bits, whatever plan, world size, rank and device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules import initial_values as initial
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.evict import LRU_EvictionPolicy
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.modules.mch import MCHManagedCollisionModule
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    explicit,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.testing.virtual import run_virtual_ranks

ROWS = 37  # with blocks of 8: the last has 5


def offset_normal(rows: Tensor, row_offset: int) -> None:
    rows.normal_(mean=float(row_offset))


def widths(dim: int, pieces: int) -> list[int]:
    """Uneven blocks of columns, one for each of the pieces."""
    return [dim - (pieces - 1) * (dim // pieces), *[dim // pieces] * (pieces - 1)]


def cuts(size: int, dim: int) -> dict[str, Any]:
    """Every sharding type, two hosts where the ranks are even, and replicas of parts."""
    hosts = [0, 1] if size % 2 == 0 else [0]
    pieces, local = min(size, dim), size // len(hosts)
    parts = [(0, 11, 0, 2, range(size)), (11, ROWS, 0, 2, [0]), (0, ROWS, 2, dim, [0, size - 1])]
    return {
        "data_parallel": data_parallel(),
        "table_wise": table_wise(rank=size - 1),
        "row_wise": row_wise(),
        "column_wise": column_wise(ranks=list(range(pieces)), size_per_rank=widths(dim, pieces)),
        "table_row_wise": table_row_wise(host_index=hosts[-1]),
        "table_column_wise": table_column_wise(host_index=hosts[-1], size_per_rank=widths(dim, local)),
        "grid": grid_shard(hosts, size_per_host=widths(dim, len(hosts))),
        "replicas": explicit(parts),
    }


class Model(nn.Module):
    """Two tables of each kind of collection: 257 columns, and 3."""

    def __init__(self, init_fn: Callable[..., Any], device: str | None = None) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS, 257, "wide", init_fn=init_fn), EmbeddingBagConfig(5, 3, "b", init_fn=init_fn)],
            device=device,
        )  # fmt: skip
        self.ec = EmbeddingCollection([EmbeddingConfig(ROWS, 3, "narrow", init_fn=init_fn)], device=device)


def built(init_fn: Callable[..., Any], device: str | None, seed: int = 3) -> Model:
    torch.manual_seed(seed)
    return Model(init_fn, device)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "INIT_BLOCK", 8)


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("init_fn", [nn.init.normal_, offset_normal])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_drawn_values_are_those_of_the_unsharded_tables_under_every_sharding_type(
    size: int, init_fn: Callable[..., Any], device: str | None
) -> None:
    want = built(init_fn, None).state_dict()
    base = built(init_fn, device)
    wide, narrow = cuts(size, 257), cuts(size, 3)
    for kind in wide:

        def run(group: Group, kind: str = kind) -> None:
            model = copy.deepcopy(base)
            world = {"world_size": size, "local_size": size // 2 if size % 2 == 0 else size}
            bags = {"wide": wide[kind], "b": table_wise(rank=0)}
            plan = {
                "ebc": construct_module_sharding_plan(model.ebc, bags, **world),
                "ec": construct_module_sharding_plan(model.ec, {"narrow": narrow[kind]}, **world),
            }
            shard(model, plan=plan, mesh=group)
            for _ in range(2):
                got = full_state_dict(model)
                assert all(torch.equal(got[name], want[name]) for name in want), kind
                # Each replica has them, not only the one that is asked for the whole.
                for part in (model.ebc, model.ec):
                    for name, table in part._tables.items():
                        whole = next(v for k, v in want.items() if k.endswith(f".{name}.weight"))
                        for leaf, tile in zip(table.leaves(), table.tiles, strict=False):  # type: ignore[attr-defined]
                            assert torch.equal(leaf, whole[tile.r0 : tile.r1, tile.c0 : tile.c1]), kind
                        with torch.no_grad():
                            table.weight.fill_(7.0)
                    part.reset_parameters()
            assert group.traffic["initial values"].total == 0

        run_virtual_ranks(size, run)


def test_the_seed_is_rank_0s_and_two_seeds_differ() -> None:
    bases = [built(nn.init.normal_, "meta", seed) for seed in (3, 4)]
    whole = [built(nn.init.normal_, None, seed).state_dict() for seed in (3, 4)]
    assert not any(torch.equal(whole[0][name], whole[1][name]) for name in whole[0])

    def run(group: Group) -> None:
        model = copy.deepcopy(bases[group.rank])
        plan = {
            "ebc": construct_module_sharding_plan(
                model.ebc, {"wide": row_wise(), "b": data_parallel()}, world_size=2, local_size=2
            ),
            "ec": construct_module_sharding_plan(
                model.ec, {"narrow": column_wise(size_per_rank=[2, 1])}, world_size=2, local_size=2
            ),
        }
        shard(model, plan=plan, mesh=group)
        got = full_state_dict(model)
        assert all(torch.equal(got[name], whole[0][name]) for name in got)

    run_virtual_ranks(2, run)


def drawn_after_sharding(rank: int) -> tuple[Tensor, Tensor]:
    """A whole on rank `rank` of processes, and what torch's generator gives next."""
    torch.manual_seed(10 + rank)
    model = Model(nn.init.normal_, "meta")
    after_building = torch.get_rng_state()
    plan = {
        "ebc": construct_module_sharding_plan(
            model.ebc,
            {"wide": column_wise(size_per_rank=[250, 7]), "b": table_wise(1)},
            world_size=2,
            local_size=2,
        ),
        "ec": construct_module_sharding_plan(model.ec, {"narrow": row_wise()}, world_size=2, local_size=2),
    }
    shard(model, plan=plan)
    assert torch.equal(torch.get_rng_state(), after_building)
    return full_state_dict(model)["ebc.embedding_bags.wide.weight"], torch.rand(3)


def test_processes_draw_alike_and_their_generators_stay_as_they_were(pool: Callable[[int], Any]) -> None:
    (first, mine), (second, yours) = pool(2).run(both)
    assert torch.equal(first, second)
    assert not torch.equal(mine, yours)


def both() -> tuple[Tensor, Tensor]:
    import torch.distributed as dist

    return drawn_after_sharding(dist.get_rank())


def test_copies_are_alike_also_where_a_function_draws_from_a_generator_of_its_own() -> None:
    def fn(group: Group) -> list[Tensor]:
        own = torch.Generator().manual_seed(group.rank)
        model = Model(lambda rows: rows.normal_(generator=own), "meta")
        parts = explicit([(0, 11, 0, 257, [1]), (11, ROWS, 0, 257, [0, 2])])
        rest = {"b": explicit([(0, 5, 0, 3, [1])]), "narrow": explicit([(0, ROWS, 0, 3, [0, 1, 2])])}
        plan = {
            "ebc": construct_module_sharding_plan(model.ebc, {"wide": parts, "b": rest["b"]}, world_size=3),
            "ec": construct_module_sharding_plan(model.ec, {"narrow": rest["narrow"]}, world_size=3),
        }
        shard(model, plan, mesh=group)
        return [p.detach() for p in model.parameters()]

    first, second, third = run_virtual_ranks(3, fn)
    wide, narrow = [values[0] for values in (first, third)], [values[2] for values in (first, second, third)]
    assert torch.equal(*wide)
    assert wide[0].std() > 0.5
    assert torch.equal(narrow[0], narrow[1])
    assert torch.equal(narrow[0], narrow[2])


def test_a_function_that_fails_on_the_rank_with_the_rows_fails_on_all() -> None:
    def fn(group: Group) -> str:
        ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(5, 3, "t", init_fn=lambda rows: torch.zeros(2, 2))], device="meta"
        )
        with pytest.raises(ConfigError) as caught:
            shard(ebc, {"t": explicit([(0, 5, 0, 3, [0])])}, mesh=group)
        assert type(ebc) is EmbeddingBagCollection, "as it was"
        return str(caught.value)

    own, other = run_virtual_ranks(2, fn)
    assert own.startswith("Table 't': ")
    assert other.startswith("The sharded model: its tables' initial values failed on rank 0 with ConfigError: ")
    assert own[10:50] in other


def test_a_function_that_fails_on_one_rank_fails_before_ids_are_spread() -> None:
    """Ids of managed collision travel after the tables are cut: a rank without tables must not wait there."""

    def fn(group: Group) -> str:
        def init(rows: Tensor) -> None:
            if group.rank == 1:
                raise OSError("no such file")

        ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 3, "t", feature_names=["f"], init_fn=init)], device="meta")
        ids = MCHManagedCollisionModule(8, "cpu", LRU_EvictionPolicy(), 1, buckets=4)
        managed = ManagedCollisionCollection({"t": ids}, ebc.embedding_bag_configs())
        module = ManagedCollisionEmbeddingBagCollection(ebc, managed)
        with pytest.raises((OSError, ConfigError)) as caught:
            shard(module, {"t": explicit([(0, 8, 0, 3, [1])])}, mesh=group)
        return str(caught.value)

    other, own = run_virtual_ranks(2, fn, timeout_s=20)
    assert own == "no such file"
    assert "failed on rank 1 with OSError: no such file" in other
