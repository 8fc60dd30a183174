"""A step of sharded tables over a link of limited speed, by number format and with repeated ids sent once.

    sudo python benchmarks/wire_link.py [--rates 1gbit,10gbit,] [--rounds 5] [--cases sequence,bags,long]

Two hosts of one rank each are network namespaces joined by a virtual cable (`linked_hosts.py`: Linux, root, iproute2).
`tc` limits its speed; an empty rate is as fast as memory. Models that differ in nothing but `Wire` take turns. A time
is the median over rounds of the slower rank's mean step, in ms: forward, a backward from a given gradient, SGD update.

    sequence   8 tables x 100,000 x 64, row-wise, 1,024 samples of a rank, 20 ids each, unpooled
    bags       26 tables x 100,000 x 128, row-wise, 2,048 samples of a rank, one id per bag
    long       26 tables x 100,000 x 128, row-wise, 2,048 samples of a rank, ten ids per bag

Ids follow a Zipf law of exponent 1.05, scrambled. "raw" is a bare all-to-all of 16 MB, in Gbit/s each way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from distinct_ids import CASES, Steps, made_batches
from linked_hosts import ADDRESSES, DEVICE, LinkedHosts, why_not
from lookup import machine

from tilerec.spec.plan import ShardingType, Wire

WIRES = {
    "fp32, each id": Wire(distinct=False),
    "bf16, each id": Wire("bf16", "bf16", distinct=False),
    "int8, each id": Wire("int8", "int8", distinct=False),
    "fp32": Wire(),
    "bf16": Wire("bf16", "bf16"),
    "int8": Wire("int8", "int8"),
}
NAMES = ("sequence", "bags", "long")


def raw_speed() -> float:
    """Return Gbit/s each way of a bare exchange."""
    sent, received = torch.ones(4 << 20), torch.empty(4 << 20)
    best = 0.0
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        dist.all_to_all_single(received, sent)
        best = max(best, sent.nbytes / 2 * 8e-9 / (time.perf_counter() - began))
    return best


def on_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=options.rendezvous, rank=options.rank, world_size=2)
    report: dict[str, object] = {"raw": raw_speed()}
    for case in options.cases:
        batches = made_batches(case, options.rank, 1.05)
        wires = {name: wire for name, wire in WIRES.items() if case != "long" or "each" in name}
        models = {name: Steps(case, ShardingType.ROW_WISE, wire) for name, wire in wires.items()}
        times: dict[str, list[float]] = {name: [] for name in models}
        sent = dict.fromkeys(models, 0)
        for number in range(options.rounds + 1):
            for name, model in models.items():
                dist.barrier()
                began = time.perf_counter()
                for batch in batches:
                    sent[name] = model.step(batch)
                took = torch.tensor([(time.perf_counter() - began) / len(batches)])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if number:
                    times[name].append(took.item() * 1e3)
        report[case] = {name: (times[name], sent[name]) for name in models}
        del models
    if options.rank == 0:
        Path(options.json).write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def measure(rate: str, options: argparse.Namespace) -> dict[str, dict[str, tuple[list[float], int]]]:
    with LinkedHosts(rate or None) as hosts, tempfile.TemporaryDirectory() as folder:
        if hosts.shaped is not None:
            raise SystemExit(f"wire_link: the link cannot be limited: {hosts.shaped}")
        report = Path(folder) / "report.json"
        rendezvous = f"tcp://{ADDRESSES[0]}:{hosts.free_port(0)}"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        ranks = []
        for rank in range(2):
            command = [
                sys.executable, "-W", "ignore", __file__, f"--rank={rank}", f"--rendezvous={rendezvous}",
                f"--json={report}", f"--rounds={options.rounds}", f"--cases={','.join(options.cases)}",
            ]  # fmt: skip
            ranks.append(hosts.popen(rank, command, env=environment, stderr=subprocess.PIPE, text=True))
        for rank in ranks:
            _, errors = rank.communicate(timeout=options.timeout)
            if rank.returncode:
                raise SystemExit(f"wire_link: a rank ended with code {rank.returncode}:\n{errors[-4000:]}")
        return dict(json.loads(report.read_text()))


def main() -> None:
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=words, default=["1gbit", "10gbit", ""])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", type=words, default=list(NAMES))
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for the ranks of one rate")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    parser.add_argument("--json", help=argparse.SUPPRESS)
    options = parser.parse_args()
    CASES["long"] = (26, 128, 2048, 10)
    if options.rank is not None:
        on_rank(options)
        return
    if why_not() is not None:
        raise SystemExit(f"wire_link: {why_not()}")
    print(f"{machine()}; torch {torch.__version__}; 2 hosts x 1 rank, 1 thread each")
    for rate in options.rates:
        report = measure(rate, options)
        print(f"\nlink {rate or 'not limited'}, raw {report.pop('raw'):.2f} Gbit/s")
        for case, found in report.items():
            first = found["fp32, each id"]
            for name, (times, sent) in found.items():
                ratio = median(own / other for own, other in zip(times, first[0], strict=True))
                print(
                    f"  {case:8} {name:13} {median(times):8.1f} ms  {ratio:5.2f}  {sent / 1e6:7.2f} MB  "
                    f"{sent / first[1]:5.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
