"""Retrieval and next-item models beside popularity, EASE and item-to-item transitions, over several seeds.

python benchmarks/retrieval.py two_tower --data ml-latest-small --seeds 5
python benchmarks/retrieval.py sasrec --data ratings.csv --seeds 3 --set task.loss=full (any setting of the run)
python benchmarks/retrieval.py two_tower --data ml-latest-small --nproc 2 --set parallel.sharding=row_wise
python benchmarks/retrieval.py sasrec --data ratings.csv --seeds 1 --validate --no-baselines    # to choose settings

Prints mean and standard deviation over the seeds of initial values and of the order of the data. Baselines have no
seed. The weight of EASE is one of `LAMBDAS`, chosen on a validation split: the training part with its own last
interactions held out by the same rule. Settings of the models are not chosen here. With --nproc, each seed trains on
that many processes, as `tilerec train --nproc` does, and the plan of the tables is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch

from tilerec.comms.process import ProcessGroupComms
from tilerec.data.interaction_log import InteractionLog
from tilerec.data.interactions import Interactions
from tilerec.recipes.interactions import InteractionsData
from tilerec.recipes.registry import make_run
from tilerec.retrieval.baselines import baseline_scores
from tilerec.retrieval.ranking_task import RankingTask
from tilerec.train.config import RunConfig
from tilerec.train.loop import train
from tilerec.train.override import override_all
from tilerec.train.ranks import on_ranks
from tilerec.train.run_plan import plan_in
from tilerec.train.world import World

LAMBDAS = (30.0, 100.0, 300.0, 1000.0, 3000.0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run", help="a recipe or a run file with data.kind = 'interactions'")
    options.add_argument("--data")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--set", action="append", default=[])
    options.add_argument("--validate", action="store_true", help="score on the validation split, to choose settings")
    options.add_argument("--no-baselines", action="store_true", help="train only")
    options.add_argument("--nproc", type=int, help="number of processes that train together; tables are sharded")
    given = options.parse_args()
    run = override_all(make_run(given.run, given.data), given.set)
    assert isinstance(run.data, InteractionsData)
    log = run.data.read_log(run.data.path)
    inner = _training_part(run, log)
    scored = inner if given.validate else log
    print(json.dumps({"interactions": len(log.users), "validation": given.validate, "ranks": given.nproc or 1}))
    if not given.no_baselines:
        chosen = max(LAMBDAS, key=lambda weight: _baselines(run, inner, weight)["EASE"]["ndcg@10"])
        print(f"EASE lambda  {chosen:g}")
        for name, scores in _baselines(run, scored, chosen).items():
            numbers = "  ".join(f"{key} {value:.4f}" for key, value in scores.numbers.items())
            print(f"{name:12s}", numbers, scores.samples)
    on_ranks(train_seeds, run, scored, given.seeds, nproc=given.nproc)


def train_seeds(group: ProcessGroupComms | None, run: RunConfig, log: InteractionLog, seeds: int) -> None:
    """Train with each seed, and print the scores on one rank. Collective."""
    assert isinstance(run.data, InteractionsData)
    prints = group is None or group.rank == 0
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        start = time.perf_counter()
        config = override_all(run, [f"train.seed={seed}", f"data.seed={seed}"])
        result = train(replace(config, data=_InMemory.of(config.data, log)), group=group)
        seconds = time.perf_counter() - start
        if not prints:
            continue
        if seed == 0 and group is not None:
            print(plan_in(result.model))
        print(f"seed {seed}:", "  ".join(f"{key} {value:.4f}" for key, value in result.held_out.numbers.items()),
              f"{seconds:.0f} s", flush=True)  # fmt: skip
        for key, value in {**result.held_out.numbers, "seconds": seconds}.items():
            found.setdefault(key, []).append(value)
    for key, values in found.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{key:12s} mean {statistics.mean(values):.4f}  sd {spread:.4f}  least {min(values):.4f}")


def _of_log(data: InteractionsData, log: InteractionLog) -> Interactions:
    return data.of_log(log, data.hold_out, None)


def _training_part(run: RunConfig, log: InteractionLog) -> InteractionLog:
    """Return the training interactions as a log of their own, in order of time."""
    assert isinstance(run.data, InteractionsData)
    data = _of_log(run.data, log)
    user, item = data.histories()
    values = data.vocabularies()["item"].take(item.numpy() - 1)
    times = None if log.times is None else data.training_times()
    return InteractionLog(torch_to_arrow(user), values, times, len(user), "training part")


def torch_to_arrow(numbers: torch.Tensor):
    import pyarrow as pa

    return pa.array(numbers.numpy())


def _baselines(run: RunConfig, log: InteractionLog, weight: float):
    assert isinstance(run.data, InteractionsData)
    data = _of_log(run.data, log)
    task = run.task.build(data, run.train, torch.device("cpu"), World(None))
    assert isinstance(task, RankingTask)
    return baseline_scores(task, data, data.held_out(run.train.eval_batch_size), ease_lambda=weight)


class _InMemory(InteractionsData):
    """Data of a run over a log in memory."""

    @staticmethod
    def of(data: InteractionsData, log: InteractionLog) -> InteractionsData:
        own = _InMemory(**{name: getattr(data, name) for name in data.__dataclass_fields__})
        object.__setattr__(own, "_own", log)
        return own

    def open(self) -> Interactions:
        return _of_log(self, self._own)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
