"""Item indexes beside FAISS: time of a query, memory and recall, on the same vectors in the same run.

python benchmarks/item_index.py                        # 1,000,000 items of dim 64, in groups as embeddings have
python benchmarks/item_index.py --data gaussian        # without any structure: the worst case of IVF
python benchmarks/item_index.py --items 100000 --rounds 3

Prints for each form: build seconds, bytes, ms per query for one query and for batches of 64 (best and median of the
rounds; all forms take turns within a round), and recall@100 against exact search in float64. For IVF forms, nprobe is
the largest number of lists with at most `--read` of the rows per query, measured on the queries, for each side.

Data "groups": group centers and members in 64 dims whose variances fall by a power of the dim, and sizes of groups by a
power law; queries are items with noise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.runtime.cpu.library import status
from tilerec.retrieval.faiss_index import FaissIndex
from tilerec.retrieval.item_index import ItemIndex

K = 100
BATCH = 64


def data_of(kind: str, items: int, dim: int, queries: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return items and queries of unit length."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        vectors = torch.randn(items, dim, generator=draw)
        query = torch.randn(queries, dim, generator=draw)
    else:
        groups = max(1, items // 500)
        spread = torch.arange(1, dim + 1).float().pow(-0.5)
        centers = torch.randn(groups, dim, generator=draw) * spread
        sizes = torch.arange(1, groups + 1).float().pow(-0.7)
        own = torch.multinomial(sizes, items, replacement=True, generator=draw)
        vectors = centers[own] + 0.6 * torch.randn(items, dim, generator=draw) * spread
        near = torch.randint(0, items, (queries,), generator=draw)
        query = vectors[near] + 0.3 * torch.randn(queries, dim, generator=draw) * spread
    return torch.nn.functional.normalize(vectors, dim=1), torch.nn.functional.normalize(query, dim=1)


def exact_ids(vectors: Tensor, query: Tensor) -> list[set[int]]:
    """Return the K best items of each query by float64 scores."""
    found = []
    for part in query.split(16):
        found += (part.double() @ vectors.double().t()).topk(K, dim=1)[1].tolist()
    return [set(one) for one in found]


def recall(index: Callable[..., Any], query: Tensor, exact: list[set[int]]) -> float:
    """Return the share of the exact results that the index finds."""
    hits = sum(
        len(want & set(own))
        for low in range(0, len(query), BATCH)
        for want, own in zip(exact[low : low + BATCH], index(query[low : low + BATCH], K)[1].tolist(), strict=True)
    )
    return hits / (K * len(query))


def rows_read(index: Any, query: Tensor, nprobe: int) -> float:
    """Return the mean share of the items in the lists that a query reads."""
    if isinstance(index, ItemIndex):
        return float(index.used[index.probed(query, nprobe)].sum(1).float().mean()) / len(index)
    own = index.native
    _, lists = own.quantizer.search(query.numpy(), nprobe)
    sizes = torch.tensor([own.invlists.list_size(i) for i in range(own.nlist)])
    return float(sizes[torch.from_numpy(lists)].sum(1).float().mean()) / len(index)


def set_reads(index: Any, query: Tensor, most: float) -> float:
    """Set the largest nprobe that reads at most a share of the items; return the share."""
    low, high = 1, index.used.numel() if isinstance(index, ItemIndex) else index.native.nlist
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rows_read(index, query, middle) <= most else (low, middle - 1)
    index.nprobe = low
    return rows_read(index, query, low)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--items", type=int, default=1_000_000)
    options.add_argument("--dim", type=int, default=64)
    options.add_argument("--queries", type=int, default=256)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--lists", type=int, default=2000)
    options.add_argument("--read", type=float, default=0.05, help="share of the rows that an IVF query may read")
    options.add_argument("--data", choices=["groups", "gaussian"], default="groups")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--forms", default="exact,int8,ivf,ivf-int8")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    has_faiss = importlib.util.find_spec("faiss") is not None
    if has_faiss:
        import faiss

        faiss.omp_set_num_threads(given.threads)
    vectors, query = data_of(given.data, given.items, given.dim, given.queries, seed=0)
    ids = torch.arange(given.items) * 1_000_003
    exact = [{one * 1_000_003 for one in own} for own in exact_ids(vectors, query)]
    print(json.dumps({
        "items": given.items, "dim": given.dim, "data": given.data, "threads": given.threads,
        "processor": platform.processor() or platform.machine(), "load": os.getloadavg()[0], "native": str(status()),
    }))  # fmt: skip

    made: dict[str, Any] = {}
    for form in given.forms.split(","):
        for name, make in (("tilerec", ItemIndex), ("faiss", FaissIndex)):
            if name == "faiss" and not has_faiss:
                continue
            start = time.perf_counter()
            settings = {"lists": given.lists} if "ivf" in form else {}
            index = make.build(vectors, ids, form=form, **settings)
            seconds = time.perf_counter() - start
            line = f"{name:8s}{form:9s} build {seconds:6.1f} s"
            if isinstance(index, ItemIndex):
                line += f"  {sum(one.nbytes for one in index.buffers()) / 1e6:,.0f} MB"
            if "ivf" in form:
                line += f"  reads {set_reads(index, query, given.read):.2%} with nprobe {index.nprobe}"
            share = recall(index, query, exact)
            assert form != "exact" or share > 0.999, f"{name}: exact search finds {share:.4f} of the best items"
            print(f"{line}  recall@{K} {share:.4f}", flush=True)
            made[f"{name} {form}"] = index

    times: dict[tuple[str, int], list[float]] = {}
    for number in range(given.rounds + 1):
        for name, index in made.items():
            for batch in (1, BATCH):
                part = query[number * batch % (len(query) - batch + 1) :][:batch]
                start = time.perf_counter()
                index(part, K)
                if number:  # the first round warms up
                    times.setdefault((name, batch), []).append((time.perf_counter() - start) * 1e3 / batch)
    for name in made:
        texts = [
            f"batch {batch}: best {min(own):7.3f} median {statistics.median(own):7.3f} ms a query"
            for batch in (1, BATCH)
            for own in [times[name, batch]]
        ]
        print(f"{name:18s}", "   ".join(texts))
    print(json.dumps({"load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
