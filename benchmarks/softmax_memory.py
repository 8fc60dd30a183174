"""Time and memory of cross entropy over all items: chunked, and torch's on the whole matrix of scores.

python benchmarks/softmax_memory.py --items 50000 --positions 6400

Each side runs in a process of its own, interleaved; memory is the growth of the peak resident set over a step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilerec.retrieval.softmax import softmax_losses


def _chunked(state: Tensor, table: Tensor, target: Tensor) -> Tensor:
    positive = (state * table[target]).sum(1)
    ids = torch.arange(table.shape[0])
    return softmax_losses(state, positive, table, target_P=target, candidate_C=ids).mean()


def _whole(state: Tensor, table: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(state @ table.t(), target)


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"chunked": _chunked, "whole": _whole}


def _measure(side: str, items: int, positions: int, dim: int, results: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    state = torch.randn(positions, dim, requires_grad=True)
    table = torch.randn(items, dim, requires_grad=True)
    target = torch.randint(items, (positions,))
    SIDES[side](state[:8], table, target[:8]).backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    SIDES[side](state, table, target).backward()
    seconds = time.process_time() - start
    results.put((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--items", type=int, default=50_000)
    options.add_argument("--positions", type=int, default=6_400)
    options.add_argument("--dim", type=int, default=64)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for _ in range(given.rounds):
        for side in SIDES:
            results = context.Queue()
            process = context.Process(target=_measure, args=(side, given.items, given.positions, given.dim, results))
            process.start()
            found[side].append(results.get())
            process.join()
    for side, values in found.items():
        seconds, megabytes = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"{side:8s} CPU seconds {seconds:.2f}   growth of the peak {megabytes:,.0f} MB")


if __name__ == "__main__":
    main()
