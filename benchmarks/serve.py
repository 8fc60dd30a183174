"""A server of a large package: its start, its memory, its latency under load, and a swap of the file meanwhile.

    python benchmarks/serve.py [--rows 100000] [--workers 2] [--rate 20 50] [--seconds 20] [--starts 5]

A DLRM of 26 tables of 100 columns (1.04 GB with 100,000 rows each) with MLPerf's small dense part, exported once.

    start       from the command to the first answer, and the processor time of its processes; in turn, a process that
                only imports what the server imports. The difference is what the package adds: reading it into memory,
                its digests, loading. Medians
    restart     all workers are killed; the time until a successor answers
    memory      of parent and workers after load, shared pages counted once. Weights: the copy in memory. Code: mapped
                libraries. Shared: the interpreter and torch, which workers have from the parent. Own: pages that a
                single process has
    latency     open-loop load of 100 to 700 pairs per request, one id per feature; waiting counts
    swap        the same load while another version is renamed over the file, or written into it (cp): failed requests,
                and versions answered
    load        of the machine, before and after: its mean number of running processes in the last minute
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from statistics import median
from threading import Thread

import torch
from lookup import machine

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tilerec.export import export
from tilerec.export.package_file import open_package
from tilerec.models import DLRM
from tilerec.serve.load import Load, LoadReport, ServedInputs, body_of, offer_load, sample_inputs

TABLES, DIM, DENSE = 26, 100, 13
KEYS = [f"f{i}" for i in range(TABLES)]


def make_package(rows: int, seed: int, path: Path) -> None:
    torch.manual_seed(seed)
    tables = [EmbeddingBagConfig(rows, DIM, f"t{i}", feature_names=[KEYS[i]]) for i in range(TABLES)]
    model = DLRM(EmbeddingBagCollection(tables), DENSE, [512, 256, DIM], [512, 256, 1]).eval()
    lengths = torch.ones(TABLES * 2, dtype=torch.int32)
    batch = KeyedJaggedTensor.from_lengths_sync(KEYS, torch.zeros(TABLES * 2, dtype=torch.int64), lengths)
    export(model, (torch.randn(2, DENSE), batch), path)


class Server:
    """`tilerec serve` of one package, as a process of its own."""

    def __init__(self, package: Path, workers: int) -> None:
        command = [sys.executable, "-m", "tilerec", "serve", str(package), "--port", "0", "--workers", str(workers)]
        self.began = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().rsplit(" ", 1)[-1].strip()

    def wait_for_answer(self, body: tuple[bytes, str]) -> str:
        """Send one request until it is answered; return the version."""
        request = urllib.request.Request(f"{self.address}/v1/predict", body[0], {"content-type": body[1]})
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as found:
                    return str(found.headers["x-model-version"])
            except OSError:
                if self.process.poll() is not None:
                    raise

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in text.split()]

    def memory(self) -> dict[str, float]:
        """Return the memory of parent and workers together, in bytes, by its kind; each page counts once."""
        found = dict.fromkeys(("code", "shared", "own"), 0.0)
        for pid in [self.process.pid, *self.children()]:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            fields = {name: 1024.0 * int(text.split()[0]) for name, text in (line.split(":", 1) for line in lines)}
            own = fields["Private_Clean"] + fields["Private_Dirty"]
            found["own"] += own
            found["code"] += fields["Pss_File"]
            found["shared"] += fields["Pss"] - fields["Pss_File"] - fields["Pss_Shmem"] - own
        return found

    def processor_time(self) -> float:
        """Return the seconds of processor time of parent and workers."""
        total = 0
        for pid in [self.process.pid, *self.children()]:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(words[11]) + int(words[12])
        return total / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate()


def line_of(found: LoadReport) -> str:
    parts = [f"p{percent:g} {found.percentile(percent):7.2f} ms" for percent in (50, 90, 99, 99.9)]
    failed = ", ".join(f"{count} {status}" for status, count in found.failed.items()) or "none"
    return f"{'  '.join(parts)}  {found.pairs / found.seconds:9,.0f} pairs/s  failed: {failed}"


IMPORTS = "import tilerec.cli, tilerec.run_cli.serve, tilerec.serve.server; " + (
    "tilerec.serve.server._import(tilerec.serve.server._LIBRARIES + tilerec.serve.server._IMPORTS)"
)


def imports() -> tuple[float, float]:
    """Return wall and processor time of a process that imports the server's modules."""
    began, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, used


def starts(package: Path, workers: int, body: tuple[bytes, str], rounds: int) -> None:
    """Print the medians of starts, and of imports alone, in turn."""
    whole, alone = [], []
    for _ in range(rounds):
        alone.append(imports())
        server = Server(package, workers)
        try:
            server.wait_for_answer(body)
            whole.append((time.perf_counter() - server.began, server.processor_time()))
        finally:
            server.close()
    for column, name in enumerate(("wall", "processor")):
        total, base = (median(pair[column] for pair in pairs) for pairs in (whole, alone))
        least = min(pair[column] for pair in whole)
        print(
            f"start    {total:6.2f} s {name} time to the first answer (least {least:.2f}): imports {base:.2f}, "
            f"the package {total - base:.2f}"
        )


def restart(server: Server, body: tuple[bytes, str]) -> None:
    before = set(server.children())
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    began = time.perf_counter()
    while not set(server.children()) - before:
        time.sleep(0.001)
    server.wait_for_answer(body)
    print(f"restart  {time.perf_counter() - began:6.2f} s to an answer, after all workers were killed")


def swap(server: Server, load: Load, body: tuple[bytes, str], how: str, replace: Thread) -> None:
    """Print the latency of a load during which a thread replaces the file."""
    first = server.wait_for_answer(body)
    timer = threading.Timer(load.seconds / 3, replace.start)
    timer.start()
    found = offer_load(server.address, load)
    timer.join()
    replace.join()
    while (last := server.wait_for_answer(body)) == first:
        time.sleep(0.1)
    print(f"swap, {how} {load.rate:5g}/s  {line_of(found)}  versions {first}, {last}")


def load_of_machine() -> str:
    return f"load of the machine {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rate", type=float, nargs="+", default=[20.0, 50.0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--starts", type=int, default=5)
    options = parser.parse_args()
    print(f"{machine()}; torch {torch.__version__}, Python {platform.python_version()}; {options.workers} workers")
    with tempfile.TemporaryDirectory() as name:
        package, other, third = (Path(name, f"{own}.pt2") for own in ("model", "other", "third"))
        make_package(options.rows, 1, package)
        make_package(options.rows, 2, other)
        shutil.copy(package, third)
        size = package.stat().st_size
        manifest = open_package(package).manifest
        served = ServedInputs(manifest.signature.inputs, manifest.tables)
        body = body_of(served, sample_inputs(served, 2, 1, torch.Generator().manual_seed(0)), "safetensors")
        print(f"package  {size / 1e6:,.0f} MB; {load_of_machine()}")
        starts(package, options.workers, body, options.starts)
        server = Server(package, options.workers)
        try:
            server.wait_for_answer(body)
            restart(server, body)
            for rate in options.rate:
                found = offer_load(server.address, Load(rate, options.seconds))
                print(f"latency  {rate:5g}/s  {line_of(found)}")
            parts = server.memory()
            total = size + sum(parts.values())
            text = ", ".join(f"{kind} {value / 1e6:,.0f}" for kind, value in {"weights": size, **parts}.items())
            print(f"memory   {total / 1e6:,.0f} MB, {total / size:.2f} of the package: {text}")
            load = Load(options.rate[0], options.seconds)
            swap(server, load, body, "mv", Thread(target=lambda: other.replace(package)))
            swap(server, load, body, "cp", Thread(target=lambda: write_into(package, third)))
            print(load_of_machine())
        finally:
            server.close()


def write_into(package: Path, other: Path) -> None:
    with other.open("rb") as source, package.open("wb") as target:
        shutil.copyfileobj(source, target)


if __name__ == "__main__":
    main()
