"""Row-wise, table-row-wise, grid or table-wise across two hosts: bytes over the link between them, and time.

    sudo python benchmarks/two_hosts.py [--rate 100mbit] [--dim 64] [--length 8] [--batch 256] [--json FILE]

Two network namespaces joined by a virtual cable are two hosts (`linked_hosts.py`: Linux, root, iproute2). `torchrun`
starts two ranks on each, which connect over the cable, and `tc` limits its speed. torchrun's LOCAL_WORLD_SIZE defines
the ranks that share a host, as in any job. A step is the sparse part: forward, backward, SGD update.

Every result is checked before it is timed: after 2 steps from the same tables, outputs and tables must equal those of
the unsharded module on the global batch. Then the tilings take turns in short rounds; a time is the median over rounds
of a step between two barriers.

Bytes over the link, of the host that sends more, per step
  predicted   from ids, bags and rectangles alone (`predicted` below): the necessary data, and the header of sizes
  counted     by the model's own `traffic()`
  seen        by the network device: TCP and Ethernet headers, acknowledgements and the barriers included

Legend: W ranks, T tables, E rows, D columns, B samples of a rank, L ids per bag at most, N ids, P bags with ids.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from linked_hosts import ADDRESSES, DEVICE, LinkedHosts, why_not  # noqa: E402
from lookup import machine  # noqa: E402

from tilerec.modules.embedding_bag import EmbeddingBagCollection  # noqa: E402
from tilerec.optim.attach import apply_optimizer_in_backward  # noqa: E402
from tilerec.parallel.full_state import full_state_dict  # noqa: E402
from tilerec.parallel.shard import shard  # noqa: E402
from tilerec.parallel.traffic import traffic  # noqa: E402
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor  # noqa: E402
from tilerec.spec.optimizer import SGD  # noqa: E402
from tilerec.spec.plan import ParameterSharding, ShardingType  # noqa: E402
from tilerec.spec.table import EmbeddingBagConfig  # noqa: E402
from tilerec.testing.batches import concat_batches  # noqa: E402

HOSTS = ((0, 1), (2, 3))
W = 4
TILINGS = ("row_wise", "table_row_wise", "grid_shard", "table_wise")
ROUNDS, STEPS = 3, 2


class Piece(NamedTuple):
    """Rows [r0, r1) of `width` columns of a table, on one rank."""

    table: int
    r0: int
    r1: int
    width: int
    owner: int


# ------------------------------------------------------------------------------------------- what should travel


def pieces(tiling: str, tables: int, rows: int, dim: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each column block, by the definitions of the sharding types."""
    for t in range(tables):
        if tiling == "row_wise":
            blocks = [(dim, [0, 1, 2, 3])]
        elif tiling == "table_row_wise":
            blocks = [(dim, list(HOSTS[t % 2]))]
        elif tiling == "grid_shard":
            blocks = [(dim // 2, list(host)) for host in HOSTS]
        else:
            blocks = [(dim, [t % W])]
        for width, ranks in blocks:
            size = -(-rows // len(ranks))
            yield [Piece(t, i * size, min(rows, (i + 1) * size), width, rank) for i, rank in enumerate(ranks)]


def predicted(tiling: str, batches: list[KeyedJaggedTensor], rows: int, dim: int) -> list[dict[str, int]]:
    """Return the bytes that each host sends to the other in one step, by content.

    A home sends a piece its N ids (4 bytes each) and, if any of its P bags there has more than one id, their P lengths.
    If a block has several pieces on the other host, their sums are added there first: U bags (in which any of the
    pieces has an id) of `width` fp32 travel back. A piece that has not all of these bags receives their numbers (4 P).
    Gradients take the same way as rows, in the other direction. Sizes travel first: a flag, P and N of each piece, U
    and the Ps of each sum.
    """
    sent = [dict.fromkeys(("header", "ids", "rows", "gradients"), 0) for _ in HOSTS]
    for home, batch in enumerate(batches):
        here = home // 2
        there = 1 - here
        jagged = batch.to_dict()
        header = dict.fromkeys(HOSTS[there], 1)  # header numbers from this home to each of them
        for block in pieces(tiling, len(batch.keys()), rows, dim):
            far = [piece for piece in block if piece.owner in HOSTS[there]]
            if not far:
                continue
            ids, lengths = jagged[f"f{far[0].table}"].values(), jagged[f"f{far[0].table}"].lengths()
            bag_N = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            bags = [bag_N[(ids >= piece.r0) & (ids < piece.r1)] for piece in far]
            union = len(torch.cat(bags).unique())
            for piece, own in zip(far, bags, strict=True):
                present = len(own.unique())
                sent[here]["ids"] += 4 * len(own)
                if present != len(own):
                    sent[here]["ids"] += 4 * present
                if len(far) > 1 and present != union:
                    sent[here]["ids"] += 4 * present
                header[piece.owner] += 2
            if len(far) > 1:
                # Homes of a host take turns among the other host's ranks.
                header[HOSTS[there][home % 2]] += 1 + len(far)
            sent[there]["rows"] += 4 * union * far[0].width
            sent[here]["gradients"] += 4 * union * far[0].width
        sent[here]["header"] += 4 * sum(header.values())
    return sent


# ------------------------------------------------------------------------------------------------------- a rank


def batch_of(rank: int, step: int, options: argparse.Namespace) -> KeyedJaggedTensor:
    """Make a batch of 0 to L ids in a bag, uniform over the rows."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    keys = [f"f{t}" for t in range(options.tables)]
    lengths = torch.randint(0, options.length + 1, (len(keys) * options.batch,), generator=generator)
    ids = torch.randint(0, options.rows, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys, ids, lengths=lengths)


def collection(options: argparse.Namespace) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(options.rows, options.dim, f"t{t}", feature_names=[f"f{t}"]) for t in range(options.tables)
    ]
    module = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(SGD(lr=0.1), list(module.parameters()))
    return module


def placed(tiling: str, table: int) -> ParameterSharding:
    ranks: dict[str, list[int]] = {"table_row_wise": list(HOSTS[table % 2]), "table_wise": [table % W]}
    return ParameterSharding(ShardingType(tiling), ranks=ranks.get(tiling))


def step(module: Any, batch: KeyedJaggedTensor, scale: float) -> torch.Tensor:
    """Run one step; the loss is the global batch's, of which a rank sees its samples."""
    values: torch.Tensor = module(batch).values()
    (values * values).sum().mul(scale).backward()
    return values.detach()


def check(module: Any, tiling: str, options: argparse.Namespace) -> float:
    """Return the largest difference from the unsharded module, relative to the values' size."""
    base, rank, worst = collection(options), dist.get_rank(), 0.0
    for number in range(2):
        batches = [batch_of(home, number, options) for home in range(W)]
        want = step(base, concat_batches(batches), 1.0).split(options.batch)[rank]
        got = step(module, batches[rank], float(W))
        worst = max(worst, float((got - want).abs().max() / (1 + want.abs().max())))
    state = full_state_dict(module)
    for name, value in base.state_dict().items():
        worst = max(worst, float((state[name] - value).abs().max() / (1 + value.abs().max())))
    worst_of_all = torch.tensor(worst)
    dist.all_reduce(worst_of_all, op=dist.ReduceOp.MAX)
    if not float(worst_of_all) <= 1e-6:
        raise SystemExit(f"{tiling}: differs from the unsharded module by {float(worst_of_all):.2e}")
    return float(worst_of_all)


def bytes_sent() -> int:
    """Return the bytes sent by the cable's end on this host."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == DEVICE:
            return int(counts.split()[8])
    raise SystemExit(f"no device {DEVICE} here; start this program without --rank")


def rank_main(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    local = batch_of(rank, 7, options)
    modules: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {}
    for tiling in options.tilings:
        module: Any = collection(options)
        shard(module, plan={f"t{t}": placed(tiling, t) for t in range(options.tables)})
        if module.plan.hosts != HOSTS:
            raise SystemExit(f"hosts {module.plan.hosts}; wanted {HOSTS}, as torchrun started the ranks")
        modules[tiling] = module
        found[tiling] = {"error": check(module, tiling, options), "ms": [], "counted": {}, "seen": 0}
        traffic(module).reset()
    for _ in range(ROUNDS):
        for tiling, module in modules.items():
            dist.barrier()
            sent, start = bytes_sent(), time.perf_counter()
            for _ in range(STEPS):
                step(module, local, float(W))
            dist.barrier()
            found[tiling]["ms"].append((time.perf_counter() - start) * 1e3 / STEPS)
            found[tiling]["seen"] += (bytes_sent() - sent) / (ROUNDS * STEPS)
    for tiling, module in modules.items():
        between = traffic(module).between(module.plan.hosts)
        found[tiling]["counted"] = {name: count // (ROUNDS * STEPS) for name, count in between.items() if count}
    everyone: list[Any] = [None] * W
    dist.all_gather_object(everyone, found)
    if rank == 0:
        batches = [batch_of(home, 7, options) for home in range(W)]
        report = {}
        for tiling in options.tilings:
            own = [facts[tiling] for facts in everyone]
            names = {name for facts in own for name in facts["counted"]}
            report[tiling] = {
                "error": own[0]["error"],
                "ms": statistics.median(max(times) for times in zip(*(f["ms"] for f in own), strict=True)),
                "predicted": predicted(tiling, batches, options.rows, options.dim),
                "counted": [
                    {name: sum(own[r]["counted"].get(name, 0) for r in host) for name in sorted(names)}
                    for host in HOSTS
                ],
                "seen": [own[host[0]]["seen"] for host in HOSTS],
            }
        Path(options.json).write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------- the two hosts


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the results of the ranks, and the counters of the link."""
    with LinkedHosts(options.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        port = hosts.free_port(0)
        own = [f"--{name}={getattr(options, name)}" for name in ("dim", "length", "batch", "rows", "tables")]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        launched = []
        for host in range(2):
            torchrun = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
                f"--node-rank={host}", f"--master-addr={ADDRESSES[0]}", f"--master-port={port}",
                f"--local-addr={ADDRESSES[host]}", __file__, "--rank", *own, f"--json={report}",
                f"--tilings={','.join(options.tilings)}",
            ]  # fmt: skip
            log = Path(folder) / f"host{host}.log"
            with log.open("w") as out:
                process = hosts.popen(host, torchrun, env=environment, stdout=out, stderr=subprocess.STDOUT)
            launched.append((process, log))
        deadline = time.monotonic() + options.timeout
        waiting = [process for process, _ in launched]
        while waiting and time.monotonic() < deadline and not any(p.returncode for p in waiting):
            for process in list(waiting):
                try:
                    if process.wait(timeout=0.1) == 0:
                        waiting.remove(process)
                except subprocess.TimeoutExpired:
                    continue
        if waiting:
            logs = "\n".join(log.read_text()[-4000:] for _, log in launched)
            raise SystemExit(f"the ranks failed, or were not done in {options.timeout:g} s:\n{logs}")
        link = f"{options.rate} each way" if options.rate and hosts.shaped is None else "not limited"
        if hosts.shaped is not None:
            link += f" ({hosts.shaped})"
        return json.loads(report.read_text()), link


def show(report: dict[str, Any], link: str, options: argparse.Namespace) -> None:
    print(f"{machine()}; torch {torch.__version__}; 2 hosts x 2 ranks, 1 thread each; link {link}")
    print(
        f"{options.tables} tables of {options.rows:,} x {options.dim}, batch {options.batch} per rank, 0 to "
        f"{options.length} ids per bag\n"
    )
    print(f"{'':16}{'ms/step':>9}{'predicted':>12}{'counted':>12}{'seen':>12}   largest difference from unsharded")
    for tiling, facts in report.items():
        most = max(range(2), key=lambda host: sum(facts["predicted"][host].values()))
        print(
            f"{tiling:16}{facts['ms']:9.1f}{sum(facts['predicted'][most].values()):12,}"
            f"{sum(facts['counted'][most].values()):12,}{facts['seen'][most]:12,.0f}   {facts['error']:.1e}"
        )
    order = sorted(report, key=lambda tiling: report[tiling]["ms"])
    print(f"\nfastest on this link: {order[0]}, then {', '.join(order[1:])}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="bandwidth in tc's notation; '' for no limit")
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--tilings", type=lambda text: text.split(","), default=list(TILINGS))
    parser.add_argument("--json", help="write everything that was found to this file")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the ranks")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if options.rank:
        rank_main(options)
        return
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"two_hosts: {reason}")
    report, link = measure(options)
    show(report, link, options)
    if options.json:
        Path(options.json).write_text(json.dumps({"link": link, "tilings": report}))


if __name__ == "__main__":
    main()
