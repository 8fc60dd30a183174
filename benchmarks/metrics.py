"""Metrics of a training job, beside TorchRec's: time of an update and of a report, equal values, share of a step.

    python benchmarks/metrics.py [--peer .venv-peer/bin/python] [--rounds 15] [--no-step]

Five metrics (NE, calibration, CTR, MSE, MAE) of 1 and 4 tasks at batch 4,096, with weights, one thread; the window is
10 million samples. TorchRec runs in its three modes, in its own process (`make bench` sets its environment up); the two
take turns in short rounds over the same batches. Times are CPU times of the thread, medians over rounds, so other load
on the machine adds little. A ratio is the median of the rounds' own ratios.

Before it is timed, every value of every mode is compared with TorchRec's, lifetime and window, after 40 batches with a
window of 16 of them. AUC is exact there (`arguments={"exact": True}`); its time is shown for 600,000 samples, exact and
by histogram.

The last part trains the synthetic DLRM recipe at batch 4,096, in one process and on two ranks, and shows the share of
everything that is logged in its time: updates and reports of metrics, counts of ids, times of stages, use of tables,
and the writing of files. Each part is timed where it is called; what costs less than a reading of the clock is timed in
a loop of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BATCH = 4096
FIVE = ("ne", "calibration", "ctr", "mse", "mae")
MODES = ("UNFUSED_TASKS_COMPUTATION", "FUSED_TASKS_COMPUTATION", "FUSED_TASKS_AND_STATES_COMPUTATION")


def batches(tasks: int, count: int) -> list[dict[str, Tensor]]:
    """Return the same outputs of a model in every process."""
    draw = torch.Generator().manual_seed(tasks)
    found = []
    for _ in range(count):
        out = {}
        for task in range(tasks):
            p, y, w = torch.rand(3, BATCH, generator=draw)
            out |= {f"p{task}": p, f"y{task}": (y < p).float(), f"w{task}": w}
        found.append(out)
    return found


class Side:
    """One library: builds a module, updates it, computes values. Both have the same names for all of it."""

    def __init__(self, library: str) -> None:
        torch.set_num_threads(1)
        self.ours = library == "tilerec"
        if self.ours:
            from tilerec import metrics
            from tilerec.metrics import metrics_config
        else:
            from torchrec.metrics import metric_module as metrics
            from torchrec.metrics import metrics_config

            # TorchRec computes over a process group only.
            store = Path(tempfile.mkdtemp()) / "store"
            torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        self.build, self.config = metrics, metrics_config
        self.module: Any = None
        self.outputs: list[dict[str, Tensor]] = []

    def prepare(self, tasks: int, names: list[str], window: int, mode: str, exact: bool) -> None:
        """Build a module with nothing in it."""
        config = self.config
        infos = [
            config.RecTaskInfo(name=f"t{t}", label_name=f"y{t}", prediction_name=f"p{t}", weight_name=f"w{t}")
            for t in range(tasks)
        ]
        arguments = {"auc": {"exact": exact}} if self.ours else {}
        definitions = {
            config.RecMetricEnum(name): config.RecMetricDef(
                rec_tasks=infos, window_size=window, arguments=arguments.get(name)
            )
            for name in names
        }
        settings = config.MetricsConfig(
            rec_tasks=infos, rec_metrics=definitions, rec_compute_mode=config.RecComputeMode[mode]
        )
        group = None if self.ours else torch.distributed.group.WORLD
        self.module = self.build.generate_metric_module(
            self.build.RecMetricModule, settings, BATCH, 1, 0, {}, torch.device("cpu"), group
        )
        self.outputs = batches(tasks, 8)

    def update(self, count: int) -> float:
        """Return CPU seconds per update."""
        start = time.thread_time()
        for at in range(count):
            self.module.update(self.outputs[at % len(self.outputs)])
        return (time.thread_time() - start) / count

    def values(self) -> dict[str, float]:
        """Return all values."""
        return {key: float(value) for key, value in self.module.compute().items()}

    def report(self) -> float:
        """Return CPU seconds of a report."""
        start = time.thread_time()
        self.module.compute()
        return time.thread_time() - start


class Peer:
    """The other side, in its own process: the methods of `Side`, one JSON line each."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-W", "ignore", __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def call(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, *arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"The peer ended in {name}{arguments}.")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Answer calls from the standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints
    warnings.simplefilter("ignore")
    side = Side("torchrec")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(side, name)(*arguments)), file=answers, flush=True)


def check(own: Side, peer: Peer) -> None:
    """Compare all values with the peer's, after 40 batches with a window of 16 of them."""
    names = [*FIVE, "accuracy", "precision", "recall", "auc"]
    worst = 0.0
    for mode in MODES:
        # AUC has no state to fuse at TorchRec, which refuses it in the third mode.
        here = names if mode != MODES[2] else names[:-1]
        for side in (own.prepare, lambda *a: peer.call("prepare", *a)):
            side(3, here, 16 * BATCH, mode, True)
        own.update(40)
        peer.call("update", 40)
        ours, theirs = own.values(), peer.call("values")
        for key, value in theirs.items():
            difference = abs(ours[key] - value)
            worst = max(worst, difference)
            if not difference < 1e-6:
                raise SystemExit(f"{key} in mode {mode}: {ours[key]} here, {value} in TorchRec.")
    print(f"values: {len(theirs)} keys equal TorchRec's in {len(MODES)} modes; largest difference {worst:.1e}\n")


def timed(own: Side, peer: Peer | None, rounds: int) -> None:
    """Print times of updates and reports."""
    print(f"{'':34}{'update ms':>12}{'ratio':>8}{'report ms':>12}{'ratio':>8}")
    for tasks in (1, 4):
        for mode in MODES if peer is not None else MODES[:1]:
            row(own, peer, rounds, tasks, list(FIVE), mode, f"five metrics, {tasks} task(s)", False)
    for exact in (True, False):
        row(own, peer, rounds, 1, ["auc"], MODES[0], "AUC, exact" if exact else "AUC, histogram", exact)


def row(
    own: Side,
    peer: Peer | None,
    rounds: int,
    tasks: int,
    names: list[str],
    mode: str,
    title: str,
    exact: bool,
) -> None:
    """Print one case: tilerec's times, then TorchRec's and the ratios TorchRec / tilerec."""
    arguments = (tasks, names, 600_000 if names == ["auc"] else 10_000_000, mode, exact)
    own.prepare(*arguments)
    own.update(146)  # 600,000 samples
    if peer is not None:
        peer.call("prepare", *arguments)
        peer.call("update", 146)
    times: list[tuple[float, ...]] = []
    for _ in range(rounds):
        mine = own.update(20), own.report()
        times.append((*mine, *((peer.call("update", 20), peer.call("report")) if peer is not None else ())))
    middle = [statistics.median(column) * 1e3 for column in zip(*times, strict=True)]
    print(f"{title:26}{'tilerec':>8}{middle[0]:12.3f}{'':8}{middle[1]:12.3f}")
    if peer is not None:
        ratios = [statistics.median(t[side + 2] / t[side] for t in times) for side in (0, 1)]
        short = {"UNF": "unfused", "FUSED_TASKS_C": "tasks", "FUSED_TASKS_A": "states"}
        shown = next(value for key, value in short.items() if mode.startswith(key))
        print(f"{'':18}TorchRec {shown:>7}{middle[2]:12.3f}{ratios[0]:8.1f}{middle[3]:12.3f}{ratios[1]:8.1f}")


class Spent:
    """CPU seconds of this thread in some functions, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.calls[part] = self.calls.get(part, 0) + 1

    def wrap(self, part: str, owner: Any, name: str) -> None:
        """Count the time of a method."""
        inner = getattr(owner, name)

        def outer(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return inner(*arguments, **named)
            finally:
                self.add(part, time.thread_time() - start)

        setattr(owner, name, outer)

    def wrap_context(self, part: str, owner: Any, name: str) -> None:
        """Count the time in which a context manager begins and ends."""
        inner = getattr(owner, name)

        @contextlib.contextmanager
        def outer(*arguments: Any) -> Any:
            context = inner(*arguments)
            start = time.thread_time()
            context.__enter__()
            self.add(part, time.thread_time() - start)
            yield
            start = time.thread_time()
            context.__exit__(None, None, None)
            self.add(part, time.thread_time() - start)

        setattr(owner, name, outer)


def _per_call(function: Any, count: int = 20_000) -> float:
    """Return CPU seconds per call of a function that takes about a microsecond; the least of five loops."""
    found = []
    for _ in range(5):
        start = time.thread_time()
        for _ in range(count):
            function()
        found.append((time.thread_time() - start) / count)
    return min(found)


def _span_seconds() -> float:
    """Return CPU seconds of a timed stage."""
    from tilerec.pipelines import StageTimes

    times = StageTimes()

    def one() -> None:
        with times.span("stage"):
            pass

    return _per_call(one)


def _hook_seconds() -> float:
    """Return CPU seconds by which two empty hooks make the call of a module slower."""
    bare, hooked = torch.nn.Identity(), torch.nn.Identity()
    hooked.register_forward_pre_hook(lambda *_: None)
    hooked.register_forward_hook(lambda *_: None)
    return _per_call(lambda: hooked(None)) - _per_call(lambda: bare(None))


def _board_seconds(values: int) -> float:
    """Return CPU seconds of the process, with TensorBoard's thread, for an event of so many values."""
    from tilerec.train.run_logger import Event, TensorBoard

    with tempfile.TemporaryDirectory() as folder:
        board = TensorBoard(Path(folder))
        event = Event("train", 1, 1, {f"value/{index}": 0.5 for index in range(values)})
        board.record(event)
        start = time.process_time()
        for _ in range(50):
            board.record(event)
        board.close()
        return (time.process_time() - start) / 50


def trained(ranks: int) -> str:
    """Train the synthetic recipe on this rank, and return the share of everything that is logged."""
    from tilerec.comms.process import ProcessGroupComms
    from tilerec.metrics.module import MetricModule
    from tilerec.recipes.registry import RECIPES
    from tilerec.train import lookup_counts
    from tilerec.train.loop import train
    from tilerec.train.override import override_all
    from tilerec.train.run_logger import JsonLines
    from tilerec.train.table_stats import TableStats

    spent = Spent()
    spent.wrap("metrics, updates", MetricModule, "update")
    spent.wrap("metrics, reports", MetricModule, "compute")
    spent.wrap("ids of tables, hooks", lookup_counts._Collection, "_begin")
    spent.wrap("ids of tables, hooks", lookup_counts._Collection, "_end")
    spent.wrap("use of tables", TableStats, "values")
    spent.wrap_context("use of tables", TableStats, "paused")
    spent.wrap("JSONL", JsonLines, "record")
    config = RECIPES["synthetic"]()
    sizes = ["data.train_rows=819200", "train.batch_size=4096", "train.threads=1", "parallel.sharding=row_wise"]
    config = override_all(config, [*sizes, "data.held_out_rows=4096", "train.log_every=50"])
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(config, log_dir=str(Path(folder) / "log"))
        group = ProcessGroupComms() if ranks > 1 else None
        start = time.thread_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = train(config, group=group)
        whole = time.thread_time() - start
        log = Path(folder) / "log" / "metrics.jsonl"
        values = len(json.loads(log.read_text().splitlines()[0])) - 3 if log.exists() else 0
    steps, events = result.steps, result.steps // 50
    spent.add("times of stages", 9 * steps * _span_seconds())
    spent.add("ids of tables, hooks", steps * _hook_seconds())
    if values:
        spent.add(f"TensorBoard, {values} values", events * _board_seconds(values))
    lines = [
        f"synthetic recipe, batch {BATCH}, {ranks} process(es): {steps} steps of {whole / steps * 1e3:.1f} ms CPU time "
        f"of a rank, evaluation included; {events} events"
    ]
    for part, seconds in spent.seconds.items():
        lines.append(f"  {part:26}{seconds / steps * 1e6:9.1f} us a step{seconds / whole:9.2%}")
    logs = sum(seconds for part, seconds in spent.seconds.items() if not part.startswith("metrics"))
    lines.append(f"  {'all but metrics':26}{logs / steps * 1e6:9.1f} us a step{logs / whole:9.2%}")
    total = sum(spent.seconds.values())
    lines.append(f"  {'all':26}{total / steps * 1e6:9.1f} us a step{total / whole:9.2%}")
    return "\n".join(lines)


def step_share() -> None:
    """Train the synthetic recipe and print the share of everything that is logged."""
    from tilerec.testing.ranks import run_ranks

    for ranks in (1, 2):
        print(f"\n{run_ranks(ranks, trained, ranks, timeout_s=900.0)[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=os.environ.get("TILEREC_PEER_PYTHON", ".venv-peer/bin/python"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-step", action="store_true", help="leave out the training run")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    own = Side("tilerec")
    peer = Peer(options.peer) if Path(options.peer).exists() else None
    if peer is None:
        print(f"{options.peer} does not exist: tilerec alone. `make bench` sets it up.\n")
    else:
        check(own, peer)
    timed(own, peer, options.rounds)
    if peer is not None:
        peer.close()
    if not options.no_step:
        step_share()


if __name__ == "__main__":
    main()
