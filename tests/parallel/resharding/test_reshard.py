"""After `reshard` a model goes on with the bits of one that has had the new plan since, whatever the two plans are."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.parity.harness import (
    OPTIMIZERS,
    TILINGS,
    WORLDS,
    Case,
    TableCase,
    adds_over_rows,
    aligned,
    batches,
    build,
    loss,
    outputs,
    two_tiles,
)
from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding.reshard import Resharded, reshard
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import row_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adam, RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding, ShardingPlan, Wire
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.testing.virtual import run_virtual_ranks

ATTACHED = [name for name in OPTIMIZERS if name != "none"]
TABLES = (
    TableCase("t0", 10, 4, ("a", "b")),
    TableCase("t1", 7, 3, ("c",)),
    TableCase("t2", 17, 20, ("d", "a")),
)


def tilings(kinds: tuple[str, ...], case: Case) -> dict[str, Tiling]:
    found: dict[str, Tiling] = {}
    for i, (kind, t) in enumerate(zip(kinds, case.tables, strict=True)):
        made = TILINGS[kind](t.rows, t.dim, case.hosts, i)
        if adds_over_rows(case.optimizer) and not aligned(made):
            made = two_tiles(t.rows, t.dim, case.hosts, i)
        found[t.name] = made
    return found


def train(case: Case, module: Any, own: list[KeyedJaggedTensor]) -> list[Tensor]:
    seen = []
    for features in own:
        out = outputs(case, module, features)
        seen += [y.detach().clone() for y in out]
        loss(case, out, float(case.world_size)).backward()
    return seen


def sharded(case: Case, base: Any, cuts: dict[str, Tiling], group: Group) -> Any:
    return shard(copy.deepcopy(base), {"": cuts}, group, topology=case.topology, exact=case.exact)


def assert_same(module: Any, twin: Any) -> None:
    """Tiles, weights, state and whom each concerns."""
    for name, want in twin._tables.items():
        got = module._tables[name]
        assert got.tiling == want.tiling
        assert got.tiles == want.tiles
        assert list(got._parameters) == list(want._parameters)
        for leaf, other in zip(got.leaves(), want.leaves(), strict=True):
            assert leaf.dtype == other.dtype
            assert leaf.requires_grad == other.requires_grad
            assert torch.equal(leaf, other), name
        for rows, other_rows in zip(got.tile_rows, want.tile_rows, strict=True):
            assert (rows.place, rows.peers.columns) == (other_rows.place, other_rows.peers.columns)
            assert rows.takes_gradients == other_rows.takes_gradients
            assert set(rows.state) == set(other_rows.state)
            for slot in rows.state if got.tiles else ():
                assert torch.equal(rows.state[slot], other_rows.state[slot]), (name, slot)


def check_move(case: Case, before: dict[str, Tiling], after: dict[str, Tiling]) -> list[Resharded]:
    """Train, move, train; beside it a model that has the state at the move loaded under the new plan."""
    base = build(case)

    def live(group: Group) -> Resharded:
        module = sharded(case, base, before, group)
        own = batches(case, group.rank)
        train(case, module, own[:2])
        weights, state = full_state_dict(module), module.fused_optimizer.full_state_dict()
        report = reshard(module, {"": after}, progress=False)
        twin = sharded(case, base, after, group)
        twin.load_state_dict(weights)
        twin.fused_optimizer.load_state_dict(state)
        assert_same(module, twin)
        for got, want in zip(train(case, module, own[2:]), train(case, twin, own[2:]), strict=True):
            assert torch.equal(got, want)
        assert_same(module, twin)
        return report

    return run_virtual_ranks(case.world_size, live)


CASES = st.builds(
    lambda world, optimizer, pooled, weighted, exact, types, frozen, seed: Case(
        tuple(replace(t, data_type=kind) for t, kind in zip(TABLES, types, strict=True)),
        {},
        WORLDS[world],
        OPTIMIZERS[optimizer],
        (3, 2, 0, 4)[: sum(map(len, WORLDS[world]))],
        pooled=pooled,
        weighted=pooled and weighted,
        exact=exact,
        frozen=("t1",) if frozen else (),
        steps=4,
        seed=seed,
    ),
    st.sampled_from(["2", "1+1", "3", "2+1", "2+2"]),
    st.sampled_from(ATTACHED),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.tuples(*[st.sampled_from([DataType.FP32, DataType.FP32, DataType.BF16, DataType.FP64])] * 3),
    st.booleans(),
    st.integers(0, 3),
)
KINDS = st.tuples(*[st.sampled_from(sorted(TILINGS))] * 3)


@hypothesis.given(case=CASES, before=KINDS, after=KINDS)
def test_training_goes_on_as_if_the_new_plan_had_been_used_from_that_state(
    case: Case, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    check_move(case, tilings(before, case), tilings(after, case))


@pytest.mark.parametrize("optimizer", ATTACHED)
def test_every_rule_goes_from_columns_to_rows_and_from_copies_to_tiles(optimizer: str) -> None:
    case = Case(TABLES, {}, WORLDS["2+2"], OPTIMIZERS[optimizer], (3, 2, 0, 4), steps=4)
    check_move(
        case,
        tilings(("column_wise", "data_parallel", "grid"), case),
        tilings(("row_wise", "table_wise", "two_copies"), case),
    )


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam", "lamb", "sgd_momentum"])
def test_in_exact_mode_a_model_that_moves_each_step_has_the_bits_of_one_that_never_moves(
    optimizer: str, pooled: bool
) -> None:
    case = Case(TABLES, {}, WORLDS["2"], OPTIMIZERS[optimizer], (3, 2), pooled=pooled, exact=True, steps=5)
    base = build(case)
    ways = [
        ("row_wise", "column_wise", "two_tiles"),
        ("column_wise", "data_parallel", "grid"),
        ("uneven", "some_replicas", "table_wise"),
        ("data_parallel", "two_tiles", "column_wise"),
        ("table_wise", "row_wise", "uneven"),
    ]

    def live(group: Group) -> None:
        still = sharded(case, base, tilings(ways[0], case), group)
        module = sharded(case, base, tilings(ways[0], case), group)
        own = batches(case, group.rank)
        for step, way in enumerate(ways):
            reshard(module, {"": tilings(way, case)})
            for got, want in zip(
                train(case, module, own[step : step + 1]),
                train(case, still, own[step : step + 1]),
                strict=True,
            ):
                assert torch.equal(got, want)
            for name, whole in full_state_dict(still).items():
                assert torch.equal(full_state_dict(module)[name], whole), name
        state, want_state = module.fused_optimizer.full_state_dict(), still.fused_optimizer.full_state_dict()
        for name, slots in want_state["state"].items():
            for slot, value in slots.items():
                assert torch.equal(state["state"][name][slot], value), (name, slot)

    run_virtual_ranks(2, live)


# --------------------------------------------------------------------------------------------- what stays, what changes


class Tied(nn.Module):
    """A bag collection and a sequence collection that share a table, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(9, 6, "a", feature_names=["f"]),
                EmbeddingBagConfig(7, 6, "b", feature_names=["g"]),
            ]
        )
        self.ec = EmbeddingCollection(
            [EmbeddingConfig(9, 6, "a", feature_names=["g"]), EmbeddingConfig(5, 6, "c", feature_names=["f"])]
        )
        self.ec.embeddings["a"] = self.ebc.embedding_bags["a"]
        self.over = nn.Linear(12, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = torch.cat([jagged.values() for jagged in self.ec(features).values()])
        pooled = self.ebc(features).values()
        total: Tensor = self.over(pooled * pooled).sum() + (rows * rows).sum()
        return total


def tied() -> Tied:
    torch.manual_seed(0)
    model = Tied()
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), [*model.ebc.parameters(), *model.ec.parameters()])
    return model


def rows_on(rows: int, dim: int, *ends: int) -> Tiling:
    """Rows up to each end on one rank after the other."""
    starts = [0, *ends[:-1]]
    return Tiling.of("t", rows, dim, [(a, b, 0, dim, k) for k, (a, b) in enumerate(zip(starts, ends, strict=True))])


def columns_on(rows: int, dim: int, *owners: int) -> Tiling:
    """Columns two by two on these ranks."""
    return Tiling.of("t", rows, dim, [(0, rows, 2 * k, 2 * k + 2, rank) for k, rank in enumerate(owners)])


def whole_on(rows: int, dim: int, *owners: int) -> Tiling:
    return Tiling.of("t", rows, dim, [(0, rows, 0, dim, owners)])


FIRST = {
    "ebc": {"a": rows_on(9, 6, 4, 9), "b": whole_on(7, 6, 1)},
    "ec": {"a": rows_on(9, 6, 4, 9), "c": whole_on(5, 6, 0, 1)},
}
SECOND = {
    "ebc": {"a": columns_on(9, 6, 0, 1, 0), "b": whole_on(7, 6, 0)},
    "ec": {"a": columns_on(9, 6, 0, 1, 0), "c": rows_on(5, 6, 2, 5)},
}


def features(seed: int) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 3, (8,), generator=draw)
    return KeyedJaggedTensor.from_lengths_sync(
        ["f", "g"], torch.randint(0, 5, (int(lengths.sum()),), generator=draw), lengths
    )


def test_a_table_under_two_names_moves_once_and_stays_one() -> None:
    base = tied()

    def live(group: Group) -> None:
        model, twin = copy.deepcopy(base), copy.deepcopy(base)
        shard(model, FIRST, group)
        model(features(group.rank)).backward()
        report = reshard(model, SECOND)
        assert len(report.tables) == 3
        assert model.ebc.embedding_bags["a"].weight is model.ec.embeddings["a"].weight
        assert model.ebc.embedding_bags["a"].rows is model.ec.embeddings["a"].rows
        shard(twin, SECOND, group)
        weights = full_state_dict(model)
        twin.load_state_dict(weights)
        for path in ("ebc", "ec"):
            faces = [getattr(m, path).fused_optimizer for m in (model, twin)]
            faces[1].load_state_dict(faces[0].full_state_dict())
        for m in (model, twin):
            m(features(5 + group.rank)).backward()
        for name, value in full_state_dict(model).items():
            assert torch.equal(value, full_state_dict(twin)[name]), name

    run_virtual_ranks(2, live)


def test_one_name_of_a_tied_table_speaks_for_both_and_tables_without_a_word_stay() -> None:
    base = tied()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(base), FIRST, group)
        report = reshard(model, {"ec": {"a": SECOND["ec"]["a"]}})
        assert report.tables == ("'a' of module 'ebc'",)
        said = {(path, name): s.tiling for path, name, s in plan_of(model).tables()}
        assert said == {
            ("ebc", "a"): SECOND["ebc"]["a"], ("ec", "a"): SECOND["ebc"]["a"],
            ("ebc", "b"): FIRST["ebc"]["b"], ("ec", "c"): FIRST["ec"]["c"],
        }  # fmt: skip

    run_virtual_ranks(2, live)


def test_objects_that_a_user_holds_stay_and_see_the_new_tiles() -> None:
    base = tied()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(base), FIRST, group)
        optimizer = model.fused_optimizer if hasattr(model, "fused_optimizer") else model.ebc.fused_optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        calls: list[str] = []
        model.ebc.register_forward_hook(lambda *_: calls.append("forward"))
        first = {name: p for name, p in model.named_parameters() if name.endswith("weight")}
        modules = list(model.modules())
        names = list(full_state_dict(model))
        model(features(group.rank)).backward()
        reshard(model, SECOND)
        assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
        after = dict(model.named_parameters())
        assert all(after[name] is p for name, p in first.items())
        assert list(full_state_dict(model)) == names
        assert model.plan is plan_of(model)
        assert model.plan.plan["ebc"]["b"].tiling == SECOND["ebc"]["b"]
        # The handle shows the state of the new tiles, and what is written to it holds.
        state = {name: slots["sum"] for name, slots in optimizer.full_state_dict()["state"].items()}
        fresh = {name: slots["sum"] for name, slots in model.ebc.fused_optimizer.full_state_dict()["state"].items()}
        assert all(torch.equal(state[name], fresh[name]) for name in fresh)
        optimizer.step()
        schedule.step()
        assert {group["lr"] for group in model.ebc.fused_optimizer.param_groups} == {0.05}
        for group_ in optimizer.param_groups:
            group_["lr"] = 0.0
        before = {name: value.clone() for name, value in full_state_dict(model).items()}
        model(features(3 + group.rank)).backward()
        assert all(torch.equal(before[name], value) for name, value in full_state_dict(model).items())
        assert calls == ["forward", "forward"]

    run_virtual_ranks(2, live)


def test_a_model_sharded_in_parts_keeps_a_plan_for_each_part() -> None:
    base = tied()

    def live(group: Group) -> None:
        model = copy.deepcopy(base)
        model.ec.embeddings["a"] = copy.deepcopy(model.ec.embeddings["a"])
        shard(model.ebc, FIRST["ebc"], group)
        shard(model.ec, FIRST["ec"], group)
        reshard(model, {"ebc": {"b": SECOND["ebc"]["b"]}, "ec": {"c": SECOND["ec"]["c"]}})
        assert model.ebc.plan.plan[""]["b"].tiling == SECOND["ebc"]["b"]
        assert model.ec.plan.plan[""]["c"].tiling == SECOND["ec"]["c"]
        reshard(model.ebc, {"b": FIRST["ebc"]["b"]})
        assert model.ebc.plan.plan[""]["b"].tiling == FIRST["ebc"]["b"]
        model(features(group.rank)).backward()

    run_virtual_ranks(2, live)


def test_a_move_to_where_everything_is_does_nothing() -> None:
    base = tied()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(base), FIRST, group)
        exchange = model.ebc.exchange
        assert reshard(model, FIRST).tables == ()
        assert model.ebc.exchange is exchange
        assert "nothing moved" in str(reshard(model, plan_of(model)))

    run_virtual_ranks(2, live)


def test_the_report_counts_bytes_sent_copied_and_those_of_the_busiest_rank() -> None:
    """12 rows x 4 columns of 4 bytes on rank 0. Rows [4, 8) go to rank 1, rows [8, 12) to rank 2: 64 bytes each."""
    base = EmbeddingBagCollection([EmbeddingBagConfig(12, 4, "t", feature_names=["f"])])
    thirds = Tiling.of("t", 12, 4, [(4 * r, 4 * r + 4, 0, 4, r) for r in range(3)])

    def live(group: Group) -> tuple[tuple[int, int, int], ...]:
        module = shard(copy.deepcopy(base), {"": {"t": Tiling.of("t", 12, 4, [(0, 12, 0, 4, 0)])}}, group)
        apart, turned = (
            reshard(module, {"": {"t": tiling}})
            for tiling in (
                thirds,
                Tiling.of("t", 12, 4, [(4 * r, 4 * r + 4, 0, 4, (r + 1) % 3) for r in range(3)]),
            )
        )
        assert 0 <= apart.seconds < 180, "those of the move, not of the clock"
        return tuple((m.bytes_sent, m.bytes_copied, m.busiest_bytes) for m in (apart, turned))

    # Then every rank sends its 64 bytes to the next and receives as many.
    assert run_virtual_ranks(3, live) == [((128, 64, 128), (192, 0, 128))] * 3


def test_plans_are_taken_in_every_form_that_shard_takes(tmp_path: Any) -> None:
    base = tied()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(base), FIRST, group)
        start = model.plan
        reshard(model, row_wise())
        assert {s.kind.value for _, _, s in model.plan.tables()} == {"row_wise"}
        reshard(model, start)
        assert model.plan == start
        file = tmp_path / f"{group.rank}.json"
        start.replaced("ebc", "b", ParameterSharding("table_wise", ranks=[0])).save(file)
        reshard(model, file)
        assert model.plan.plan["ebc"]["b"].ranks == (0,)
        reshard(model, {"ebc": {"b": ParameterSharding("row_wise", wire=Wire("bf16", "bf16"))}})
        assert model.plan.plan["ebc"]["b"].wire == Wire("bf16", "bf16")
        assert model.ebc.exchange.layout.tables[1].wire == Wire("bf16", "bf16")
        assert model.plan.plan["ebc"]["b"].kernel is not None
        reshard(model, {"ebc": {"b": ParameterSharding("table_wise", ranks=[1])}})
        assert model.plan.plan["ebc"]["b"].wire == Wire("bf16", "bf16"), "what a plan does not name stays"

    run_virtual_ranks(2, live)


def test_a_batch_that_was_routed_before_is_routed_again() -> None:
    base = tied()

    def live(group: Group) -> None:
        model, twin = (shard(copy.deepcopy(base), FIRST, group) for _ in range(2))
        early = model.ebc.route(features(group.rank))
        reshard(model, SECOND)
        reshard(twin, SECOND)
        got, want = model.ebc(early), twin.ebc(features(group.rank))
        assert torch.equal(got.values(), want.values())

    run_virtual_ranks(2, live)


def test_a_backward_after_the_move_of_a_lookup_before_it_is_refused_on_every_rank() -> None:
    base = tied()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(base), FIRST, group)
        out = model.ebc(features(group.rank)).values().sum()
        looked = model.ebc.lookup(model.ebc.route(features(group.rank)))
        before = {name: value.clone() for name, value in full_state_dict(model).items()}
        reshard(model, SECOND)
        with pytest.raises(RuntimeError, match="were resharded"):
            out.backward()
        with pytest.raises(ConfigError, match="were resharded"):
            model.ebc.combine(looked)
        assert all(torch.equal(before[name], value) for name, value in full_state_dict(model).items())

    run_virtual_ranks(2, live)


def test_one_rank_reshards_with_itself() -> None:
    base = tied()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(base), row_wise(), group)
        model(features(0)).backward()
        before = {name: value.clone() for name, value in full_state_dict(model).items()}
        reshard(model, {"ebc": {"b": whole_on(7, 6, 0)}})
        assert all(torch.equal(before[name], value) for name, value in full_state_dict(model).items())
        model(features(1)).backward()

    run_virtual_ranks(1, live)


def test_hosts_of_the_new_plan_hold_for_tables_that_stay_too() -> None:
    """Who reads for whom, and who tells whom its row sums, depends on the hosts."""
    base = tied()
    copied = Tiling.of("b", 7, 6, [(0, 7, 0, 2, (0, 1)), (0, 7, 2, 6, (2, 3))])
    tiles = {
        "ebc": {"a": rows_on(9, 6, 2, 4, 6, 9), "b": copied},
        "ec": {"a": rows_on(9, 6, 2, 4, 6, 9), "c": whole_on(5, 6, 0, 1, 2, 3)},
    }
    hosts = ((0, 3), (1, 2))

    def live(group: Group) -> None:
        model, twin = copy.deepcopy(base), copy.deepcopy(base)
        shard(model, tiles, group)
        now = model.plan
        shard(twin, ShardingPlan(now.plan, 4, hosts), group)
        before = model.ebc.embedding_bags["b"].rows.peers
        reshard(model, ShardingPlan(now.plan, 4, hosts))
        assert model.ebc.exchange.topology.host_ranks == hosts
        peers, wanted = (m.ebc.embedding_bags["b"].rows.peers for m in (model, twin))
        assert (
            (peers.columns, peers.listeners)
            == (wanted.columns, wanted.listeners)
            != (
                before.columns,
                before.listeners,
            )
        )
        for step in range(2):
            for m in (model, twin):
                m(features(10 * step + group.rank)).backward()
        for name, value in full_state_dict(model).items():
            assert torch.equal(value, full_state_dict(twin)[name]), name

    run_virtual_ranks(4, live)


@pytest.mark.parametrize("spec", [SGD(lr=0.1), Adam(lr=0.1)])
def test_tables_of_one_column_and_of_257_move(spec: Any) -> None:
    torch.manual_seed(0)
    base = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(1, 1, "one", feature_names=["f"]),
            EmbeddingBagConfig(3, 257, "wide", feature_names=["g"]),
        ]
    )
    apply_optimizer_in_backward(spec, base.parameters())
    wide = Tiling.of("wide", 3, 257, [(0, 3, 0, 100, 0), (0, 1, 100, 257, 1), (1, 3, 100, 257, 2)])

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(base), {"one": whole_on(1, 1, 2), "wide": whole_on(3, 257, 0)}, group)
        batch = KeyedJaggedTensor.from_lengths_sync(["f", "g"], torch.tensor([0, 0, 2, 1]), torch.tensor([2, 0, 1, 1]))
        model(batch).values().sum().backward()
        before = {name: value.clone() for name, value in full_state_dict(model).items()}
        reshard(model, {"one": whole_on(1, 1, 0, 1), "wide": wide})
        assert all(torch.equal(before[name], value) for name, value in full_state_dict(model).items())
        model(batch).values().sum().backward()

    run_virtual_ranks(3, live)


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "resharding.md"
    if not page.exists():
        pytest.skip("the pages are part of the repository, not of the wheel")
    source = page.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(source, str(page), "exec"), {})
    assert capsys.readouterr().out.startswith("1 table moved: 33.2 KiB sent, 33.2 KiB copied")
