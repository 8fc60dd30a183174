"""Time from the death of a rank to the first step after the restart, under torchrun on this machine.

    python benchmarks/restart.py --mb 100 --nproc 2 --rounds 3

A rank ends itself with SIGKILL. torchrun starts all ranks again, and they continue from the newest checkpoint. Parts:

    detect    from the death to the start of the new processes' Python
    import    of torch and tilerec
    join      process group, data, plan, empty model
    load      of the checkpoint: tables and their optimizer state
    step      the first step, with its compilation of caches and its pipeline
"""

from __future__ import annotations

import time

STARTED = time.time()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

KILL_AT, STEPS, SAVE_EVERY = 25, 30, 10
COLUMNS = 64


def worker(folder: Path, mb: int) -> None:
    """Run on one rank; the last rank of the first start ends itself."""
    from tilerec.checkpoint.manager import CheckpointManager
    from tilerec.recipes.data import SyntheticData
    from tilerec.recipes.model import DLRMConfig
    from tilerec.spec.optimizer import RowWiseAdagrad
    from tilerec.train import Event, RunConfig, TrainConfig, Watcher, run
    from tilerec.train.config import CheckpointConfig

    imported, cpu_imported = time.time(), time.process_time()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    load = CheckpointManager.resume
    loaded: list[float] = []

    def timed(self: CheckpointManager, *args: Any, **options: Any) -> Any:
        begin = time.time(), time.process_time()
        found = load(self, *args, **options)
        loaded[:] = [*begin, time.time(), time.process_time()]
        return found

    CheckpointManager.resume = timed  # type: ignore[method-assign]

    class Times(Watcher):
        def __init__(self) -> None:
            self._first = 0

        def record(self, event: Event) -> None:
            now = time.time()
            if event.kind != "train":
                return
            if not loaded and event.step == KILL_AT and rank == size - 1:
                (folder / "killed").write_text(str(now))
                os.kill(os.getpid(), signal.SIGKILL)
            if loaded and not self._first and not rank:
                self._first = event.step
                cpu = [0.0, cpu_imported, loaded[1], loaded[3], time.process_time()]
                wall = [STARTED, imported, loaded[0], loaded[2], now]
                times = {"wall": wall, "cpu": cpu, "number": event.step}
                (folder / "times").write_text(json.dumps(times))

        def close(self) -> None:
            pass

    rows = mb * 1_000_000 // (4 * COLUMNS) // 4
    run(
        RunConfig(
            name="restart",
            data=SyntheticData(num_rows=(rows,) * 4, num_dense=4, train_rows=1024 * STEPS, held_out_rows=64),
            model=DLRMConfig(embedding_dim=COLUMNS, dense_arch=(64,), over_arch=(64,)),
            train=TrainConfig(batch_size=1024, log_every=1, embedding_optimizer=RowWiseAdagrad(lr=0.05)),
            log_dir=str(folder / "run"),
            checkpoint=CheckpointConfig(every=SAVE_EVERY),
        ),
        watchers=[Times()],
    )


def restart(mb: int, nproc: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of each part of one restart: wall time, and processor time of rank 0."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), "--max-restarts", "1"]
        subprocess.run(
            [sys.executable, "-m", *command, "--monitor-interval", "0.1", __file__, "--worker", name, "--mb", str(mb)],
            check=True,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        killed, times = float((folder / "killed").read_text()), json.loads((folder / "times").read_text())
        assert times["number"] == KILL_AT // SAVE_EVERY * SAVE_EVERY + 1, times
        wall, cpu = [killed, *times["wall"]], [0.0, *times["cpu"]]
        names = ["detect", "import", "join", "load", "step"]
        parts = {name: (wall[i + 1] - wall[i], cpu[i + 1] - cpu[i]) for i, name in enumerate(names)}
        return {**parts, "total": (wall[-1] - killed, cpu[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100, help="size of the tables")
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.mb)
        return
    every = [restart(given.mb, given.nproc) for _ in range(given.rounds)]
    print(
        f"{given.mb} MB of tables, {given.nproc} ranks, gloo; seconds, medians (and the most) of {given.rounds} rounds"
    )
    for part in every[0]:
        wall, cpu = ([one[part][i] for one in every] for i in range(2))
        text = f"{statistics.median(wall):6.2f}  ({max(wall):.2f})  {statistics.median(cpu):6.2f} of processor time"
        print(f"  {part:7s} {text}")


if __name__ == "__main__":
    main()
