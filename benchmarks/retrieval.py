"""Retrieval and next-item models beside popularity, EASE and item-to-item transitions, over several seeds.

python benchmarks/retrieval.py two_tower --data ml-latest-small --seeds 5
python benchmarks/retrieval.py sasrec --data ratings.csv --seeds 3 --set data.path=... (any setting of the run)

Prints mean and standard deviation over the seeds of initial values and of the order of the data. Baselines have no
seed. The weight of EASE is one of `LAMBDAS`, chosen on a validation split: the training part with its own last
interactions held out by the same rule. Settings of the models are not chosen here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch

from tilerec.data.interaction_log import InteractionLog
from tilerec.data.interactions import Interactions
from tilerec.recipes.interactions import InteractionsData
from tilerec.recipes.registry import make_run
from tilerec.retrieval.baselines import baseline_scores
from tilerec.retrieval.ranking_task import RankingTask
from tilerec.train.config import RunConfig
from tilerec.train.loop import train
from tilerec.train.override import override_all
from tilerec.train.world import World

LAMBDAS = (30.0, 100.0, 300.0, 1000.0, 3000.0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("run", help="a recipe or a run file with data.kind = 'interactions'")
    options.add_argument("--data")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--set", action="append", default=[])
    options.add_argument("--validate", action="store_true", help="score on the validation split, to choose settings")
    given = options.parse_args()
    run = override_all(make_run(given.run, given.data), given.set)
    assert isinstance(run.data, InteractionsData)
    log = run.data.read_log(run.data.path)
    inner = _training_part(run, log)
    chosen = max(LAMBDAS, key=lambda weight: _baselines(run, inner, weight)["EASE"]["ndcg@10"])
    scored = inner if given.validate else log
    print(json.dumps({"interactions": len(log.users), "EASE lambda": chosen, "validation": given.validate}))
    for name, scores in _baselines(run, scored, chosen).items():
        print(f"{name:12s}", "  ".join(f"{key} {value:.4f}" for key, value in scores.numbers.items()), scores.samples)
    found: dict[str, list[float]] = {}
    for seed in range(given.seeds):
        start = time.perf_counter()
        config = override_all(run, [f"train.seed={seed}", f"data.seed={seed}"])
        result = train(replace(config, data=_InMemory.of(config.data, scored)))
        seconds = time.perf_counter() - start
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
