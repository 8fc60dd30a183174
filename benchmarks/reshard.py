"""Live resharding: the cost of a drifting load, the cost of a move, and the speed of moving values.

    python benchmarks/reshard.py [--quick] [--topology topology.json]

Drift. 16 tables of 200,000 x 64 (row-wise Adagrad) on 2 ranks with one thread each, over gloo; batch 2,048 a rank. In
phase A every other table in the plan's order is hot: 20 ids per bag, the others 1. The planner has made the plan for
that. Then the load drifts (phase B): the hot tables lie on rank 0, the others on rank 1. `rebalance` reads the counts
of ids, calls the planner (with the speeds that `tilerec calibrate` measured just before, or those of --topology) and
moves tables if that pays. Output: milliseconds of a step (median of the slower rank's)

    A, its plan      B, that plan      B, after rebalance      B, the planner's plan for B from the start

of four models that take turns, step by step. Also the move: tables, bytes, predicted and measured seconds, and the
number of steps after which it has paid. All this twice: with whole tables only, and with every sharding type allowed.
Before a time is printed, weights and optimizer state after the move are compared bit by bit with those before.

Prices. Six other kinds of moves, each in its own processes: the price that `rebalance` predicts, and the measured time.
A pause before returns memory that other processes have freed to the host (virtual machines).

Bandwidth. One table of 512 MiB (64 MiB with --quick), SGD, moves from one tiling to another, back and forth; bytes that
a rank sends per second of the whole call, checks included. Beside it, in the same run: all-to-alls of 16 MiB between
the same ranks, and copies of that memory by both ranks at once (bytes copied per second, of one rank).

Legend: W ranks, B samples of a rank, L ids per bag.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from cost_model import measured_speeds  # noqa: E402
from lookup import machine  # noqa: E402

from tilerec.comms.process import ProcessGroupComms  # noqa: E402
from tilerec.modules.embedding_bag import EmbeddingBagCollection  # noqa: E402
from tilerec.optim.attach import apply_optimizer_in_backward  # noqa: E402
from tilerec.parallel.plan_of import plan_of  # noqa: E402
from tilerec.parallel.resharding.move_schedule import schedule, seconds_of  # noqa: E402
from tilerec.parallel.resharding.rebalance import rebalance  # noqa: E402
from tilerec.parallel.resharding.rebalance_proposal import move_loads  # noqa: E402
from tilerec.parallel.resharding.reshard import reshard  # noqa: E402
from tilerec.parallel.resharding.running_plan import complete_plan  # noqa: E402
from tilerec.parallel.shard import shard  # noqa: E402
from tilerec.planner.constraints import ParameterConstraints  # noqa: E402
from tilerec.planner.helpers import column_wise, data_parallel, row_wise, table_wise  # noqa: E402
from tilerec.planner.planner import EmbeddingShardingPlanner  # noqa: E402
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor  # noqa: E402
from tilerec.spec.optimizer import SGD, Adam, RowWiseAdagrad  # noqa: E402
from tilerec.spec.table import EmbeddingBagConfig  # noqa: E402
from tilerec.spec.tile import Tiling  # noqa: E402
from tilerec.spec.topology import Topology  # noqa: E402
from tilerec.testing.ranks import Ranks  # noqa: E402

RANKS = 2
DIM, BATCH, HOT, COLD = 64, 2048, 20, 1
BATCHES, WARM = 4, 3
PRICES, PAUSE = 6, 5.0


def names(tables: int) -> list[str]:
    return [f"t{i:02d}" for i in range(tables)]


def module_of(tables: int, rows: int) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    module = EmbeddingBagCollection(
        [EmbeddingBagConfig(rows, DIM, name, feature_names=[name]) for name in names(tables)],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.05), module.parameters())
    return module


def batches_of(hot: set[str], tables: int, rows: int, rank: int, phase: int) -> list[KeyedJaggedTensor]:
    draw = torch.Generator().manual_seed(100 * phase + rank)
    lengths = torch.cat(
        [torch.full((BATCH,), HOT if name in hot else COLD, dtype=torch.int32) for name in names(tables)]
    )
    count = int(lengths.sum())
    return [
        KeyedJaggedTensor(names(tables), torch.randint(rows, (count,), generator=draw), lengths=lengths)
        for _ in range(BATCHES)
    ]


def planner(topology: Topology, hot: set[str], tables: int, whole: bool) -> EmbeddingShardingPlanner:
    kinds = ["table_wise"] if whole else None
    return EmbeddingShardingPlanner(
        topology,
        BATCH,
        constraints={
            name: ParameterConstraints(sharding_types=kinds, pooling_factors=[float(HOT if name in hot else COLD)])
            for name in names(tables)
        },
    )


def step(module: Any, batch: KeyedJaggedTensor) -> None:
    module(batch).values().backward(torch.full((BATCH, DIM * len(batch.keys())), 1e-3))


def timed(group: ProcessGroupComms, phases: dict[str, tuple[Any, list[Any]]], steps: int) -> dict[str, list[float]]:
    """Return the seconds of steps of each (module, batches), in turns."""
    taken: dict[str, list[float]] = {name: [] for name in phases}
    order = list(phases)
    for k in range(-WARM, steps):
        order.append(order.pop(0))
        for name in order:
            module, batches = phases[name]
            group.barrier()
            before = time.perf_counter()
            step(module, batches[k % BATCHES])
            if k >= 0:
                taken[name].append(time.perf_counter() - before)
    return taken


def close(*modules: Any) -> None:
    for module in modules:
        module.exchange.group.close()
        module.exchange.route_group.close()


def own_state(module: Any) -> dict[str, torch.Tensor]:
    """Return whole tables and their state."""
    found = {}
    for name, table in module._tables.items():
        found[name] = table.weight_of().full().clone()
        for slot in table.rows.state:
            found[f"{name}/{slot}"] = table.state_of(slot).full().clone()
    return found


def drift(speeds: dict[str, Any], tables: int, rows: int, steps: int, whole: bool) -> dict[str, Any]:
    """Run on a rank: return times of the phases, and the move."""
    torch.set_num_threads(1)
    group = ProcessGroupComms()
    topology = Topology.from_json(speeds)
    everyone = names(tables)
    hot_a = set(everyone[::2])
    plan_a = planner(topology, hot_a, tables, whole).plan(module_of(tables, rows))
    tilings = {name: sharding.tiling for _, name, sharding in plan_a.tables()}
    # The tables on rank 0 become hot.
    share = {
        name: sum(tile.cells for tile in tiling.tiles_of(0)) if tiling is not None else 0
        for name, tiling in tilings.items()
    }
    hot_b = set(sorted(everyone, key=lambda name: (-share[name], name))[: tables // 2])
    before_drift = batches_of(hot_a, tables, rows, group.rank, 0)
    after_drift = batches_of(hot_b, tables, rows, group.rank, 1)

    def made(hot: set[str]) -> Any:
        plan = planner(topology, hot, tables, whole).plan(module_of(tables, rows))
        return shard(module_of(tables, rows), plan, group, topology=topology, device="cpu")

    module, still, fresh = made(hot_a), made(hot_a), made(hot_b)
    for batch in before_drift:
        step(module, batch)
    calm = rebalance(module, planner(topology, hot_a, tables, whole), horizon=1000)
    for batch in after_drift:
        step(module, batch)
    kept = own_state(module)
    report = rebalance(module, planner(topology, hot_a, tables, whole), horizon=1000, progress=False)
    now = own_state(module)
    assert all(torch.equal(kept[name], value) for name, value in now.items()), "a move changes no bit"
    del kept, now
    phases = {
        "A": (still, before_drift),
        "B": (still, after_drift),
        "after": (module, after_drift),
        "best": (fresh, after_drift),
    }
    found: dict[str, Any] = timed(group, phases, steps)
    found["moved in A"] = len(calm.moved.tables) if calm.moved is not None else 0
    close(module, still, fresh)
    moved = report.moved
    found["report"] = {
        "why": report.why,
        "predicted before": report.before_s,
        "predicted after": report.after_s,
        "move predicted": report.move_s,
        "tables": len(moved.tables) if moved is not None else 0,
        "sent": moved.bytes_sent if moved is not None else 0,
        "seconds": moved.seconds if moved is not None else 0.0,
        "extra": moved.extra_bytes if moved is not None else 0,
        "imbalance": report.load.imbalance,
    }
    return found


WAYS = {
    "row-wise": lambda rows: [(0, rows // 2, 0, DIM, 0), (rows // 2, rows, 0, DIM, 1)],
    "row-wise, swapped": lambda rows: [(0, rows // 2, 0, DIM, 1), (rows // 2, rows, 0, DIM, 0)],
    "column-wise": lambda rows: [(0, rows, 0, DIM // 2, 0), (0, rows, DIM // 2, DIM, 1)],
    "on rank 0": lambda rows: [(0, rows, 0, DIM, 0)],
    "on rank 1": lambda rows: [(0, rows, 0, DIM, 1)],
    "on both": lambda rows: [(0, rows, 0, DIM, (0, 1))],
}
MOVES = (
    ("row-wise", "row-wise, swapped"),
    ("row-wise", "column-wise"),
    ("on rank 0", "on rank 1"),
    ("row-wise", "on both"),
)


def bandwidth(size: int, rounds: int) -> dict[str, Any]:
    """Run on a rank: return the seconds of moves and of bare calls, and the bytes of each."""
    torch.set_num_threads(1)
    group = ProcessGroupComms()
    rows = size // (4 * DIM)
    found: dict[str, Any] = {}
    for first, second in MOVES:
        module = EmbeddingBagCollection(
            [EmbeddingBagConfig(rows, DIM, "t", feature_names=["f"])], device=torch.device("meta")
        )
        apply_optimizer_in_backward(SGD(lr=0.1), module.parameters())
        ways = [Tiling.of("t", rows, DIM, WAYS[name](rows)) for name in (first, second)]
        shard(module, {"t": ways[0]}, group, device="cpu")
        want = {i: leaf.detach().double().sum().item() for i, leaf in enumerate(module.parameters())}
        for k in range(1, 1 + 2 * rounds):
            group.barrier()
            before = time.perf_counter()
            report = reshard(module, {"t": ways[k % 2]}, progress=False)
            taken = time.perf_counter() - before
            found.setdefault(f"{first} -> {second}" if k % 2 else f"{second} -> {first}", []).append(
                (report.busiest_bytes, taken)
            )
        again = {i: leaf.detach().double().sum().item() for i, leaf in enumerate(module.parameters())}
        assert want == again, "back where it was"
        close(module)
        del module
    chunk = 16 << 20
    out, into = torch.ones(2 * chunk, dtype=torch.uint8), torch.zeros(2 * chunk, dtype=torch.uint8)
    splits = [0, chunk] if group.rank == 0 else [chunk, 0]
    for _ in range(1 + rounds):
        group.barrier()
        before = time.perf_counter()
        for _ in range(max(1, size // 2 // chunk)):
            group.all_to_all("bare", into[:chunk], out[:chunk], splits, splits).wait()
        found.setdefault("bare all-to-all", []).append(
            (2 * chunk * max(1, size // 2 // chunk), time.perf_counter() - before)
        )
    a, b = torch.ones(size // 2, dtype=torch.uint8), torch.zeros(size // 2, dtype=torch.uint8)
    for _ in range(1 + rounds):
        group.barrier()
        before = time.perf_counter()
        b.copy_(a)
        found.setdefault("copy", []).append((size // 2, time.perf_counter() - before))
    return found


def small(rows: int) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    module = EmbeddingBagCollection(
        [EmbeddingBagConfig(rows, 32, f"t{i:02d}", feature_names=[f"t{i:02d}"]) for i in range(64)],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.05), module.parameters())
    return module


def with_adam(tables: int, rows: int) -> EmbeddingBagCollection:
    module = module_of(tables, rows)
    apply_optimizer_in_backward(Adam(lr=0.05), module.parameters())
    return module


def price_of(number: int, speeds: dict[str, Any], rows: int) -> tuple[str, float, float, float, int]:
    """Run one move of a model on a rank; return its predicted and measured seconds, and those of a second move."""
    torch.set_num_threads(1)
    group, topology = ProcessGroupComms(), Topology.from_json(speeds)

    def on(rank: int) -> Any:
        return table_wise(rank=rank)

    everyone = names(16)
    apart = {name: on(i % 2) for i, name in enumerate(everyone)}
    few = {name: on(1) for name in everyone[:4]}
    name, module, first, second = (
        lambda: ("one whole table", module_of(16, rows), apart, {everyone[0]: on(1)}),
        lambda: ("five whole tables", module_of(16, rows), apart,
                 {everyone[i]: on(1 - i % 2) for i in (0, 2, 4, 1, 3)}),
        lambda: ("rows to columns", module_of(8, rows), row_wise(), column_wise([0, 1])),
        lambda: ("with Adam's state", with_adam(4, rows), few, {name: on(0) for name in everyone[:2]}),
        lambda: ("whole to copies", module_of(4, rows), few, {everyone[0]: data_parallel()}),
        lambda: ("64 small tables", small(rows // 50), row_wise(), column_wise([0, 1])),
    )[number]()  # fmt: skip
    shard(module, first, group, topology=topology, device="cpu")
    collections = {"": module}
    present = plan_of(module)
    whole, _ = complete_plan(present, collections, second, module.exchange.topology)
    loads = move_loads(collections, [[("", name)] for name in module._tables], present, whole, module.exchange.topology)
    predicted = seconds_of(loads, schedule(loads, group.size, None), topology, topology.speeds)
    taken = []
    time.sleep(PAUSE)
    for plan in (second, first, second):
        group.barrier()
        begun = time.perf_counter()
        report = reshard(module, plan, progress=False)
        taken.append(time.perf_counter() - begun)
    sent = report.bytes_sent
    close(module)
    return name, predicted, taken[0], taken[2], sent


def show_drift(ranks: Ranks, speeds: dict[str, Any], tables: int, rows: int, steps: int) -> None:
    print(f"\ndrift: {tables} tables of {rows:,} x {DIM}, batch {BATCH}, {HOT} or {COLD} ids per bag")
    print(
        f"{'types':>12} | {'A':>7} {'B':>7} {'after':>7} {'best':>7} ms | {'tables':>6} {'MB sent':>8} "
        f"{'move s':>7} {'predicted':>9} {'pays after':>10}"
    )
    for whole in (True, False):
        results = ranks.run(drift, speeds, tables, rows, steps, whole)
        ms = {
            phase: 1e3 * statistics.median(max(step) for step in zip(*(t[phase] for t in results), strict=True))
            for phase in ("A", "B", "after", "best")
        }
        report = results[0]["report"]
        gain = (ms["B"] - ms["after"]) / 1e3
        seconds = max(t["report"]["seconds"] for t in results)
        pays = f"{seconds / gain:,.0f}" if gain > 0 and seconds else "-"
        print(
            f"{'whole tables' if whole else 'all':>12} | {ms['A']:>7.2f} {ms['B']:>7.2f} {ms['after']:>7.2f} "
            f"{ms['best']:>7.2f}    | {report['tables']:>6} {report['sent'] / 1e6:>8.1f} {seconds:>7.3f} "
            f"{report['move predicted']:>9.3f} {pays:>10}"
        )
        print(
            f"{'':>12}   imbalance {report['imbalance']:.2f}; predicted {1e3 * report['predicted before']:.1f} -> "
            f"{1e3 * report['predicted after']:.1f} ms; {report['why']}; moved in phase A: {results[0]['moved in A']}"
        )


def show_prices(speeds: dict[str, Any], rows: int) -> None:
    print("\nprices: moves of a model that has not moved before, and once more")
    print(f"{'':>20} {'MB sent':>8} {'predicted s':>11} {'measured s':>10} {'ratio':>6} {'again s':>8}")
    errors = []
    for number in range(PRICES):
        with Ranks(RANKS, timeout_s=600) as own:  # new processes: no memory but their tables'
            results = own.run(price_of, number, speeds, rows)
        name, predicted, sent = results[0][0], results[0][1], results[0][4]
        taken, again = max(t[2] for t in results), max(t[3] for t in results)
        errors.append(abs(predicted / taken - 1))
        print(
            f"{name:>20} {sent / 1e6:>8.1f} {predicted:>11.3f} {taken:>10.3f} {predicted / taken:>6.2f} {again:>8.3f}"
        )
    print(f"error: median {statistics.median(errors):.0%}, largest {max(errors):.0%}")


def show_bandwidth(ranks: Ranks, size: int, rounds: int) -> None:
    print(f"\nbandwidth: one table of {size >> 20} MiB, best of {rounds}")
    results = ranks.run(bandwidth, size, rounds)
    print(f"{'':>34} {'MB in and out':>13} {'ms':>8} {'GB/s':>6}")
    for name in results[0]:
        worst = [
            (max(b for b, _ in call), max(s for _, s in call)) for call in zip(*(t[name] for t in results), strict=True)
        ]
        count, taken = min(worst, key=lambda call: call[1])
        rate = f"{count / taken / 1e9:.2f}" if count else "-"
        print(f"{name:>34} {count / 1e6:>13.1f} {1e3 * taken:>8.1f} {rate:>6}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--topology", type=Path, help="measured by `tilerec calibrate`; None: measure now")
    parser.add_argument("--only", choices=("drift", "prices", "bandwidth"), help="one of the three parts")
    given = parser.parse_args()
    parts = ("drift", "prices", "bandwidth") if given.only is None else (given.only,)
    tables, rows, steps = (8, 50_000, 15) if given.quick else (16, 200_000, 40)
    size, rounds = ((64 << 20), 2) if given.quick else ((512 << 20), 3)
    print(f"{machine()}, Python {platform.python_version()}, torch {torch.__version__}; {RANKS} ranks x 1 thread")
    with Ranks(RANKS, timeout_s=600) as ranks:
        speeds = json.loads(given.topology.read_text()) if given.topology is not None else ranks.run(measured_speeds)[0]
        if "drift" in parts:
            show_drift(ranks, speeds, tables, rows, steps)
        if "bandwidth" in parts:
            show_bandwidth(ranks, size, rounds)
    if "prices" in parts:
        show_prices(speeds, rows)


if __name__ == "__main__":
    main()
