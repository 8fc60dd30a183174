"""What stops a move is heard on all ranks, and leaves a model that works: before it as it was, midway a mixed plan."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.comms.mesh import group_of
from tilerec.errors import ConfigError, ReshardError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward, set_sparse_grad
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.plan_of import plan_of
from tilerec.parallel.resharding import chunked_transfer as transit
from tilerec.parallel.resharding import end_state, mover, table_move
from tilerec.parallel.resharding import reshard_checks as ready
from tilerec.parallel.resharding.external_optimizers import ExternalOptimizers
from tilerec.parallel.resharding.move_progress import Moving
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.resharding.table_move import TableMove
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import row_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks

reshard_file = sys.modules["tilerec.parallel.resharding.reshard"]  # the package's name for it is the function
NAMES = ["a", "b", "c"]
ROWS, DIM = 40, 8


RULE = RowWiseAdagrad(lr=0.1)


def base(spec: Any = RULE) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    model = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, n, feature_names=[n]) for n in NAMES])
    if spec is not None:
        apply_optimizer_in_backward(spec, model.parameters())
    return model


def halves(first: int, second: int, cut: int = 20) -> Tiling:
    return Tiling.of("t", ROWS, DIM, [(0, cut, 0, DIM, first), (cut, ROWS, 0, DIM, second)])


def columns(first: int, second: int) -> Tiling:
    return Tiling.of("t", ROWS, DIM, [(0, ROWS, 0, 4, first), (0, ROWS, 4, DIM, second)])


BEFORE = {"a": halves(0, 1), "b": columns(0, 1), "c": halves(1, 0, 8)}
AFTER = {"a": columns(1, 0), "b": halves(1, 0), "c": Tiling.of("c", ROWS, DIM, [(0, ROWS, 0, DIM, (0, 1))])}


def batch(rank: int, seed: int = 0) -> KeyedJaggedTensor:
    return random_batch(NAMES, ROWS, 6, seed=10 * seed + rank)


def state_of(model: Any) -> dict[str, Tensor]:
    out = {name: value.clone() for name, value in full_state_dict(model).items()}
    for name, slots in model.fused_optimizer.full_state_dict()["state"].items():
        out.update({f"{name}/{slot}": value.clone() for slot, value in slots.items()})
    return out


def same(model: Any, want: dict[str, Tensor]) -> bool:
    got = state_of(model)
    return all(torch.equal(got[name], value) for name, value in want.items())


def train(model: Any, rank: int, seed: int) -> None:
    (model(batch(rank, seed)).values() ** 2).sum().backward()


def fresh_under(plan: ShardingPlan, model: Any, group: Group) -> Any:
    """A model of that state that was sharded by that plan."""
    twin = shard(base(), plan, group)
    twin.load_state_dict(full_state_dict(model))
    twin.fused_optimizer.load_state_dict(model.fused_optimizer.full_state_dict())
    return twin


# --------------------------------------------------------------------------------------------------------- before it


def refused(plan: Callable[[int], Any], words: str, spec: Any = RULE, **options: Any) -> None:
    """Rank 0 passes plan(0), rank 1 plan(1); both raise, and the model is as it was."""
    model_of = base(spec)

    def live(group: Group) -> str:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        train(model, group.rank, 0)
        kept, exchange = model.plan, model.exchange
        before = {name: value.clone() for name, value in full_state_dict(model).items()}
        with pytest.raises(ConfigError) as caught:
            reshard(model, plan(group.rank), **options)
        assert model.plan is kept
        assert model.exchange is exchange
        assert all(torch.equal(full_state_dict(model)[name], value) for name, value in before.items())
        model.zero_grad()
        train(model, group.rank, 1)
        return str(caught.value)

    texts = run_virtual_ranks(2, live)
    assert any(words in text for text in texts), texts


CHECKS: dict[str, tuple[Callable[[int], Any], str]] = {
    "an unknown table": (lambda _: {"z": halves(0, 1)}, "got table 'z', which module '' lacks"),
    "an unknown module": (
        lambda _: {"deep": {"a": halves(0, 1)}},
        "got module 'deep', which the model lacks",
    ),
    "another size": (
        lambda _: {"a": Tiling.of("a", 41, DIM, [(0, 41, 0, DIM, 0)])},
        "got 41 x 8 cells for table 'a' of module ''; expected 40 x 8",
    ),
    "a rank that is not there": (
        lambda _: {"a": Tiling.of("a", ROWS, DIM, [(0, ROWS, 0, DIM, 2)])},
        "on rank 2; expected ranks 0 to 1",
    ),
    "another world": (
        lambda _: ShardingPlan({"": {}}, 3),  # type: ignore[dict-item]
        "got a plan for 3 ranks; expected one for the 2 ranks",
    ),
    "on one rank alone": (
        lambda rank: {"a": halves(1, 0) if rank else Tiling.of("a", 41, DIM, [(0, 41, 0, DIM, 0)])},
        "got 41 x 8 cells",
    ),
    "other plans": (lambda rank: {"a": halves(1, 0, 20 + rank)}, "differs between ranks"),
    "no plan": (lambda _: 7, "plan: got a int"),
    "a dense kernel over an attached optimizer": (
        lambda _: {"a": ParameterSharding("row_wise", "dense")},
        "is attached to it",
    ),
    "staggered columns under a rule that adds over rows": (
        lambda _: {
            "a": Tiling.of(
                "a", ROWS, DIM, [(0, 5, 0, 4, 0), (5, ROWS, 0, 4, 1), (0, 9, 4, DIM, 0), (9, ROWS, 4, DIM, 1)]
            )
        },
        "needs sums over whole rows",
    ),
}


@pytest.mark.parametrize("what", CHECKS)
def test_a_plan_that_cannot_be_is_refused_on_every_rank_before_anything_moves(what: str) -> None:
    plan, words = CHECKS[what]
    refused(plan, words)


def test_ranks_that_pass_other_plans_or_budgets_are_named() -> None:
    refused(lambda rank: {"a": halves(1, 0, 20 + rank)}, "on rank 1")
    model_of = base()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        with pytest.raises(ConfigError, match=r"budget_bytes.* is 1000000 on rank 0 and 1000001 on rank 1"):
            reshard(model, AFTER, budget_bytes=1_000_000 + group.rank)

    run_virtual_ranks(2, live)


@pytest.mark.parametrize("option", [{"budget_bytes": 0}, {"budget_bytes": 1.5}, {"progress": 3}, {"optimizers": [7]}])
def test_options_that_make_no_sense_are_refused(option: dict[str, Any]) -> None:
    refused(lambda _: AFTER, next(iter(option)), **option)


def test_an_unsharded_model_and_a_part_of_a_sharded_one_are_told_what_to_pass() -> None:
    with pytest.raises(ConfigError, match="no sharded tables; shard it first"):
        reshard(base(), {})
    outer = torch.nn.ModuleDict({"ebc": base()})

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(outer), {"ebc": BEFORE}, group)
        with pytest.raises(ConfigError, match="pass the module that was given to shard"):
            reshard(model["ebc"], AFTER)
        reshard(model, {"ebc": AFTER})

    run_virtual_ranks(2, live)


def test_rounding_wires_are_refused_in_exact_mode() -> None:
    from tilerec.spec.plan import Wire

    model_of = base()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group, exact=True)
        with pytest.raises(ConfigError, match="exact=True"):
            reshard(model, {"a": ParameterSharding("row_wise", wire=Wire("bf16", "bf16"))})

    run_virtual_ranks(2, live)


def test_a_sparse_gradient_cannot_move_and_a_step_later_the_table_can() -> None:
    model_of = base(None)
    set_sparse_grad(model_of.parameters())

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        train(model, group.rank, 0)
        with pytest.raises(ConfigError, match=r"has a sparse \.grad"):
            reshard(model, {"a": AFTER["a"]})
        model.zero_grad()
        reshard(model, {"a": AFTER["a"]})
        train(model, group.rank, 1)
        assert all(p.grad is None or p.grad.is_sparse for p in model.parameters())

    run_virtual_ranks(2, live)


# ------------------------------------------------------------------------------------------------------------ midway


def stops(monkeypatch: pytest.MonkeyPatch, where: str, rank: int, table: int) -> Callable[[Group, Any], dict[str, Any]]:
    """Options with which one rank fails at the given table's move, in the given place."""
    raised: list[int] = []

    def here(group: Group, count: int) -> None:
        if group.rank == rank and count == table and not raised:
            raised.append(1)
            raise MemoryError("no room left")

    def options(group: Group, model: Any) -> dict[str, Any]:
        if where == "progress":
            return {"progress": lambda moving: here(group, moving.tables)}
        return {}

    if where == "allocation":
        real = TableMove.allocate
        seen: dict[int, int] = {}

        def allocate(move: TableMove) -> None:
            group = move.table.tile_rows[0].peers.group
            number = seen[group.rank] = seen.get(group.rank, -1) + 1
            here(group, number)
            real(move)

        monkeypatch.setattr(TableMove, "allocate", allocate)
    return options


@pytest.mark.parametrize("table", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["allocation", "progress"])
def test_a_failure_midway_leaves_a_model_under_a_mixed_plan_that_trains_and_moves_on(
    monkeypatch: pytest.MonkeyPatch, where: str, rank: int, table: int
) -> None:
    options = stops(monkeypatch, where, rank, table)
    model_of = base()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        train(model, group.rank, 0)
        want = state_of(model)
        with pytest.raises(ReshardError, match=f"rank {rank} failed .*MemoryError: no room left") as caught:
            # A budget for one table at a time.
            reshard(model, AFTER, budget_bytes=3000, **options(group, model))
        assert isinstance(caught.value.__cause__, MemoryError if group.rank == rank else type(None))
        assert same(model, want)
        now = {name: table.tiling for name, table in model._tables.items()}
        moved = {name for name in NAMES if now[name] == AFTER[name]}
        assert len(moved) == table
        assert all(now[name] == BEFORE[name] for name in set(NAMES) - moved)
        mixed = plan_of(model)
        assert {name: sharding.tiling for _, name, sharding in mixed.tables()} == now
        twin = fresh_under(mixed, model, group)
        for seed in (1, 2):
            train(model, group.rank, seed)
            train(twin, group.rank, seed)
        assert same(model, state_of(twin))
        # The same call again brings the rest.
        reshard(model, AFTER)
        assert {name: table.tiling for name, table in model._tables.items()} == AFTER
        other = fresh_under(plan_of(model), model, group)
        train(model, group.rank, 3)
        train(other, group.rank, 3)
        assert same(model, state_of(other))

    run_virtual_ranks(2, live)


def test_what_fails_while_values_are_on_their_way_stops_nobody() -> None:
    """The rank that fails still sends and receives, so that its peers get to the vote."""
    model_of = base(Adam(lr=0.1))

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        train(model, group.rank, 0)
        want = state_of(model)
        calls: list[Moving] = []

        def progress(moving: Moving) -> None:
            calls.append(moving)
            if group.rank == 1 and len(calls) == 3:
                raise ValueError("enough")

        with pytest.raises(ReshardError, match=r"rank 1 failed in the move.*ValueError: enough"):
            reshard(model, AFTER, budget_bytes=8000, progress=progress)
        assert same(model, want)
        train(model, group.rank, 1)

    run_virtual_ranks(2, live)


def test_a_failure_while_packing_columns_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model_of = base()

    def packing(own: Any, message: Any, buffer: Tensor) -> None:
        if own._group.rank == 0:
            raise RuntimeError("cannot pack")

    real = transit.ChunkedTransfer._pack

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        train(model, group.rank, 0)
        want = state_of(model)
        with pytest.raises(ReshardError, match="cannot pack"):
            reshard(model, AFTER)
        assert same(model, want)
        assert {name: table.tiling for name, table in model._tables.items()} == BEFORE
        group.barrier()
        monkeypatch.setattr(transit.ChunkedTransfer, "_pack", real)
        group.barrier()
        reshard(model, AFTER)
        assert same(model, want)

    monkeypatch.setattr(transit.ChunkedTransfer, "_pack", packing)
    run_virtual_ranks(2, live)


PLACES: tuple[tuple[Any, str], ...] = (
    (ready, "check_options"),
    (reshard_file, "complete_plan"),
    (ready, "ExternalOptimizers"),
    (TableMove, "__init__"),
    (reshard_file, "move_description"),
    (mover.Mover, "__init__"),
    (TableMove, "facts"),
    (TableMove, "settle"),
    (transit, "transfers"),
    (mover, "schedule"),
    (mover.Mover, "_made_progress"),
    (TableMove, "allocate"),
    (transit.ChunkedTransfer, "__init__"),
    (transit.ChunkedTransfer, "_window"),
    (transit.ChunkedTransfer, "_pack"),
    (transit.ChunkedTransfer, "_unpack"),
    (TableMove, "make_ready"),
    (table_move, "new_peers"),
    (mover.Mover, "_ending"),
    (end_state, "_renewed"),
)


@pytest.mark.parametrize(
    ("attached", "kind"), [(True, MemoryError), (True, KeyboardInterrupt), (False, KeyboardInterrupt)]
)
def test_whatever_stops_one_rank_at_any_step_stops_all_and_the_model_goes_on(
    monkeypatch: pytest.MonkeyPatch, attached: bool, kind: type[BaseException]
) -> None:
    """Every function in which a rank can fail before its tables switch, in one model's life; each move is made then."""
    model_of = base(RULE if attached else None)
    armed: list[str] = []
    fired: list[str] = []

    def failing(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if armed == [name] and threading.current_thread().name == "rank 1":
                armed.clear()
                fired.append(name)
                raise kind("no more")
            return real(*args, **options)

        return call

    names = [f"{where.__name__}.{name}" for where, name in PLACES]
    for mark, (where, name) in zip(names, PLACES, strict=True):
        if where is ready and name == "check_options":
            where = reshard_file
        monkeypatch.setattr(where, name, failing(mark, getattr(where, name)))

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        adam = torch.optim.Adam(model.parameters(), lr=0.1) if not attached else None
        for i, mark in enumerate(names):
            plan = AFTER if i % 2 == 0 else BEFORE
            model.zero_grad()
            train(model, group.rank, i)
            if adam is not None:
                adam.step()
            before = full_state_dict(model)
            if group.rank == 1:
                armed.append(mark)
            group.barrier()
            stopped = (ConfigError, ReshardError, kind) if group.rank == 1 else (ConfigError, ReshardError)
            with pytest.raises(stopped, match="no more"):
                reshard(model, plan, progress=False, optimizers=None if adam is None else [adam])
            now = {name: table.tiling for name, table in model._tables.items()}
            assert {name: sharding.tiling for _, name, sharding in plan_of(model).tables()} == now
            assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model).items())
            reshard(model, plan, progress=False, optimizers=None if adam is None else [adam])
            assert {name: table.tiling for name, table in model._tables.items()} == plan
            assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model).items())

    run_virtual_ranks(2, live)
    assert fired == names


def interrupted_on_rank_1() -> str:
    group = group_of(None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    model = shard(base(), BEFORE, group)
    train(model, group.rank, 0)
    want = state_of(model)

    def progress(moving: Moving) -> None:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        reshard(model, AFTER, progress=progress)
        told = "nothing"
    except (ReshardError, KeyboardInterrupt) as error:
        told = f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGINT, before)
    assert {name: table.tiling for name, table in model._tables.items()} == BEFORE
    reshard(model, AFTER)
    assert same(model, want)
    return told


def test_ctrl_c_on_one_process_ends_the_move_on_all_of_them(pool: Any) -> None:
    zero, one = pool(2).run(interrupted_on_rank_1)
    assert "ReshardError: reshard: rank 1 failed" in zero
    assert "KeyboardInterrupt" in zero
    assert one.startswith("KeyboardInterrupt")


def test_an_optimizer_that_breaks_in_the_switch_leaves_the_tables_moved_and_is_told_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_of = base(None)
    real = ExternalOptimizers.follow

    def follow(own: ExternalOptimizers, name: str, *rest: Any) -> None:
        if threading.current_thread().name == "rank 1" and "b" in name:
            raise RuntimeError("it has groups of its own")
        real(own, name, *rest)

    monkeypatch.setattr(ExternalOptimizers, "follow", follow)

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        before = full_state_dict(model)
        with pytest.raises(ReshardError, match=r"rank 1 failed in the update of opt.*groups of its own.*have moved"):
            reshard(model, AFTER)
        assert {name: table.tiling for name, table in model._tables.items()} == AFTER
        assert {name: s.tiling for _, name, s in plan_of(model).tables()} == AFTER
        assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model).items())
        del adam
        train(model, group.rank, 0)

    run_virtual_ranks(2, live)


def test_no_move_begins_inside_a_backward_pass() -> None:
    model_of = base()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        twin = shard(copy.deepcopy(model_of), BEFORE, group)
        # Its gradient comes after the tables', whose rows are written at the end of the backward.
        scale = torch.ones(1, requires_grad=True)
        scaled = scale * 1
        scale.register_hook(lambda _: reshard(model, AFTER) and None)
        with pytest.raises(ConfigError, match="inside a backward pass"):
            (model(batch(group.rank)).values() * scaled).pow(2).sum().backward()
        assert {name: table.tiling for name, table in model._tables.items()} == BEFORE
        before = full_state_dict(model)
        reshard(model, AFTER)
        assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model).items())
        train(twin, group.rank, 0)

    run_virtual_ranks(2, live)


@pytest.mark.parametrize("attached", [True, False])
def test_a_move_in_inference_mode_leaves_tables_that_train(attached: bool) -> None:
    model_of = base(RULE if attached else None)

    def live(group: Group) -> None:
        models = [shard(copy.deepcopy(model_of), BEFORE, group) for _ in range(2)]
        steps = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models] if not attached else []
        for model in models:
            train(model, group.rank, 0)
        for adam in steps:
            adam.step()
        with torch.inference_mode():
            reshard(models[0], AFTER, optimizers=steps[:1])
        reshard(models[1], AFTER, optimizers=steps[1:])
        assert all(p.requires_grad and not p.is_inference() for p in models[0].parameters())
        for model in models:
            train(model, group.rank, 1)
        for adam in steps:
            adam.step()
        want = full_state_dict(models[1])
        assert all(torch.equal(value, want[name]) for name, value in full_state_dict(models[0]).items())

    run_virtual_ranks(2, live)


def test_a_rank_whose_tiles_have_another_type_is_named() -> None:
    model_of = base()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        if group.rank:
            model.to(torch.bfloat16)
        with pytest.raises(ConfigError, match=r"weight of table 'a' is torch.float32 on rank 0 and torch.bfloat16"):
            reshard(model, AFTER)

    run_virtual_ranks(2, live)


def test_a_table_that_a_module_outside_reads_too_is_not_moved_under_it() -> None:
    model_of = torch.nn.ModuleDict({"x": base(), "y": base()})

    def live(group: Group) -> None:
        model = copy.deepcopy(model_of)
        for part in model.values():
            shard(part, BEFORE, group)
        model["y"].embedding_bags["a"].weight = model["x"].embedding_bags["a"].weight
        with pytest.raises(ConfigError, match="'a' of module '' is shared with a collection that is not below"):
            reshard(model["x"], AFTER)
        reshard(model, {"x": AFTER})
        assert model["y"]._tables["a"].tiling == AFTER["a"]
        (model["y"](batch(group.rank)).values() + model["x"](batch(group.rank)).values()).sum().backward()

    run_virtual_ranks(2, live)


def test_what_is_no_module_is_told_so() -> None:
    with pytest.raises(ConfigError, match="model: got a list"):
        reshard([], AFTER)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ memory


def held_bytes() -> int:
    """Bytes of all storages of float32 tensors that are alive."""
    gc.collect()
    seen: dict[int, int] = {}
    for thing in gc.get_objects():
        # Other tests may have left tracers' tensors, which have no memory.
        if type(thing) in (Tensor, nn.Parameter) and thing.layout is torch.strided and not thing.is_meta:
            storage = thing.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


@pytest.mark.real_empty
def test_memory_while_tables_change_places_is_within_the_budget() -> None:
    torch.manual_seed(0)
    rows, dim, count = 8192, 64, 6  # 2 MiB a table, 6 MiB with Adam's state
    names = [f"t{i}" for i in range(count)]
    table = rows * dim * 4 * 3

    def on(rank: int) -> Tiling:
        return Tiling.of("t", rows, dim, [(0, rows, 0, dim, rank)])

    model_of = EmbeddingBagCollection(
        [EmbeddingBagConfig(rows, dim, name, feature_names=[name]) for name in names], device="meta"
    )
    apply_optimizer_in_backward(Adam(lr=0.1), model_of.parameters())
    peaks: list[int] = []
    looked: set[int] = set()
    reports: list[Any] = []

    def live(group: Group) -> None:
        own = copy.deepcopy(model_of)
        shard(own, {name: on(i % 2) for i, name in enumerate(names)}, group)
        group.barrier()
        start = held_bytes()
        group.barrier()

        def look(moving: Moving) -> None:
            # New memory is there from a table's first message on.
            if group.rank == 0 and moving.tables not in looked:
                looked.add(moving.tables)
                peaks.append(held_bytes() - start)

        reports.append(reshard(own, {name: on(1 - i % 2) for i, name in enumerate(names)}, progress=look))
        group.barrier()
        assert held_bytes() - start <= 1 << 20
        group.barrier()

    run_virtual_ranks(2, live)
    assert len(peaks) == count // 2, "tables change places in pairs: each rank gets one tile, and gives one"
    assert reports[0].extra_bytes <= table + (2 << 20)
    # Both ranks live in this process.
    assert table <= max(peaks) <= 2 * reports[0].extra_bytes


def test_small_tables_share_storages_of_a_few_mib_which_are_free_when_they_have_moved() -> None:
    names = [f"t{i}" for i in range(24)]  # 600 KiB a table
    model_of = EmbeddingBagCollection(
        [EmbeddingBagConfig(600, 256, name, feature_names=[name]) for name in names], device="meta"
    )

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), {name: ParameterSharding("data_parallel") for name in names}, group)
        sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        assert 1 < len(sizes) < len(names)
        assert max(sizes.values()) <= 5 << 20

    run_virtual_ranks(2, live)


def test_a_budget_that_is_too_small_is_refused_with_what_it_takes_and_that_much_does() -> None:
    model_of = base(Adam(lr=0.1))

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        train(model, group.rank, 0)
        want = state_of(model)
        with pytest.raises(ConfigError, match=r"a rank needs [0-9,]+ bytes beside its tables") as caught:
            reshard(model, AFTER, budget_bytes=100)
        assert same(model, want)
        least = int(str(caught.value).split("needs ")[1].split(" ")[0].replace(",", ""))
        report = reshard(model, AFTER, budget_bytes=least)
        assert report.extra_bytes <= least
        assert same(model, want)

    run_virtual_ranks(2, live)


def test_progress_counts_up_to_all_tables_and_bytes() -> None:
    model_of = base()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        seen: list[Moving] = []
        reshard(model, AFTER, budget_bytes=3000, progress=seen.append)
        assert [moving.bytes for moving in seen] == sorted(moving.bytes for moving in seen)
        assert seen[-1].bytes == seen[-1].all_bytes > 0
        assert seen[-1].tables == 2
        assert seen[-1].all_tables == 3

    run_virtual_ranks(2, live)


def test_a_bar_is_drawn_on_rank_0_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    model_of = base()

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), BEFORE, group)
        reshard(model, row_wise(), progress=True)

    run_virtual_ranks(2, live)
    captured = capsys.readouterr()
    assert captured.out == ""


@pytest.mark.parametrize("size", [1, 3])
def test_copies_and_other_worlds_of_ranks_move_too(size: int) -> None:
    model_of = base()
    everywhere = Tiling.of("t", ROWS, DIM, [(0, ROWS, 0, DIM, tuple(range(size)))])

    def live(group: Group) -> None:
        model = shard(copy.deepcopy(model_of), dict.fromkeys(NAMES, everywhere), group)
        train(model, group.rank, 0)
        want = state_of(model)
        reshard(model, row_wise())
        assert same(model, want)
        reshard(model, dict.fromkeys(NAMES, everywhere))
        assert same(model, want)

    run_virtual_ranks(size, live)
