"""The other side of `hash.py`: TorchRec's managed-collision module on CPU, in its own environment.

`hash.py` starts this file with the peer's Python and communicates over a pipe, one JSON object a line. This file
defines the stream of ids, and both sides make it from seeds; only torch is needed for that.

Legend: U ids in the universe, the most frequent first; R rows; N ids of a batch.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ID_BITS = 62  # ids of the benchmark; all sides take them
MULTIPLIERS = (0x7FB5D329728EA185, 0x81DADEF4BC2DD44D - 2**64)


@dataclass(frozen=True)
class Workload:
    """Ids drawn by Zipf's law from a universe; `filled` of them are in the table at the start."""

    rows: int
    universe: int
    filled: int
    batch: int
    exponent: float

    def ids_of(self, ranks_N: Tensor) -> Tensor:
        """Return 62-bit ids, all distinct, whose only common property is their rank."""
        mask = (1 << ID_BITS) - 1
        x = ranks_N & mask
        for multiplier in MULTIPLIERS:  # odd products and xors with shifts are invertible: a permutation
            x = ((x ^ (x >> 31)) * multiplier) & mask
        return x ^ (x >> 31)

    def fill(self) -> list[Tensor]:
        """Return every id that the table is to hold, once, in any order."""
        order = torch.randperm(self.filled, generator=torch.Generator().manual_seed(1))
        return list(self.ids_of(order).split(self.batch))

    def weights(self) -> Tensor:
        """Return the cumulated probabilities of the ranks, from which `batch_ids` draws."""
        rank_U = torch.arange(1, self.universe + 1, dtype=torch.float64)
        return rank_U.pow(-self.exponent).cumsum(0)

    def batch_ids(self, number: int, weights_U: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + number)
        at_N = torch.rand(self.batch, generator=generator, dtype=torch.float64) * weights_U[-1]
        return self.ids_of(torch.searchsorted(weights_U, at_N).clamp(max=self.universe - 1))


class Mch:
    """A sorted table of ids with least-frequently-used eviction; every `interval`-th batch inserts new ids."""

    def __init__(self, work: Workload, interval: int) -> None:
        from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
        from torchrec.sparse.jagged_tensor import JaggedTensor

        self.jagged = JaggedTensor
        self.rows = work.rows
        self.module = MCHManagedCollisionModule(
            zch_size=work.rows,
            device=torch.device("cpu"),
            eviction_policy=LFU_EvictionPolicy(),
            eviction_interval=interval,
            input_hash_size=2**ID_BITS,
        )
        self.module.train()

    def step(self, ids_N: Tensor) -> tuple[float, int]:
        """Return seconds (with the search of rows to reset), and the number of ids that got the shared last row."""
        features = {"f": self.jagged(values=ids_N, lengths=torch.ones(ids_N.numel(), dtype=torch.int32))}
        start = time.perf_counter()
        rows_N = self.module(self.module.preprocess(features))["f"].values()
        self.module.evict()
        seconds = time.perf_counter() - start
        return seconds, int((rows_N == self.rows - 1).sum())


def serve() -> None:
    peer: Mch | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        torch.set_num_threads(request.get("threads", 1))
        if request["do"] == "hello":
            import torchrec

            answer = {"torch": torch.__version__, "torchrec": torchrec.__version__}
        elif request["do"] == "fill":
            work = Workload(**request["work"])
            peer = Mch(work, request["interval"])
            weights_U = work.weights()
            answer = {"seconds": sum(peer.step(ids_N)[0] for ids_N in work.fill())}
        elif request["do"] == "step" and peer is not None:
            seconds, shared = peer.step(work.batch_ids(request["number"], weights_U))
            answer = {"seconds": seconds, "shared": shared}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
