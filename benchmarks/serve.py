"""A server of a large package: its start, its memory, its latency under load, and a swap of the file meanwhile.

    python benchmarks/serve.py [--rows 100000] [--workers 2] [--rate 20 50] [--seconds 20]

A DLRM of 26 tables of 100 columns (1.04 GB with 100,000 rows each) with MLPerf's small dense part, exported once.

    start       from the command to the first answer; then a worker is killed, and the time until its successor
                answers is measured
    memory      resident memory of parent and workers after load, with shared pages counted once (Pss), beside the
                size of the package; "own" are pages that no other process has (they are not of the package)
    latency     open-loop load of 100 to 700 pairs per request, one id per feature; waiting counts
    swap        the same load while the file is replaced by another version: failed requests, and versions answered
"""

from __future__ import annotations

import argparse
import json
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

import torch
from lookup import machine

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tilerec.export import export
from tilerec.export.package_file import open_package
from tilerec.models import DLRM
from tilerec.serve.load import Load, LoadReport, body_of, offer_load, sample_inputs

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

    def memory(self) -> tuple[float, float]:
        """Return Pss, and memory of one process alone, of parent and workers together, in bytes."""
        total, own = 0, 0
        for pid in [self.process.pid, *self.children()]:
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
            total += int(fields["Pss"].split()[0]) << 10
            own += sum(int(fields[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty"))
        return float(total), float(own)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate()


def line_of(found: LoadReport) -> str:
    parts = [f"p{percent:g} {found.percentile(percent):7.2f} ms" for percent in (50, 90, 99, 99.9)]
    failed = ", ".join(f"{count} {status}" for status, count in found.failed.items()) or "none"
    return f"{'  '.join(parts)}  {found.pairs / found.seconds:9,.0f} pairs/s  failed: {failed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rate", type=float, nargs="+", default=[20.0, 50.0])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    print(f"{machine()}; torch {torch.__version__}, Python {platform.python_version()}; {options.workers} workers")
    with tempfile.TemporaryDirectory() as name:
        package, other = Path(name, "model.pt2"), Path(name, "other.pt2")
        make_package(options.rows, 1, package)
        make_package(options.rows, 2, other)
        size = package.stat().st_size
        manifest = open_package(package).manifest
        body = body_of(manifest, sample_inputs(manifest, 2, 1, torch.Generator().manual_seed(0)), "safetensors")
        server = Server(package, options.workers)
        try:
            server.wait_for_answer(body)
            seconds = time.perf_counter() - server.began
            print(f"start    {seconds:6.2f} s to the first answer; package {size / 1e6:,.0f} MB")
            if options.workers > 1:
                before = set(server.children())
                for pid in before:
                    os.kill(pid, signal.SIGKILL)
                began = time.perf_counter()
                while not set(server.children()) - before:
                    time.sleep(0.001)
                server.wait_for_answer(body)
                print(f"restart  {time.perf_counter() - began:6.2f} s to an answer, after all workers were killed")
            for rate in options.rate:
                found = offer_load(server.address, manifest, Load(rate, options.seconds))
                print(f"load     {rate:5g}/s  {line_of(found)}")
            total, own = server.memory()
            print(f"memory   {total / 1e6:,.0f} MB, {total / size:.2f} of the package; own pages {own / 1e6:,.0f} MB")
            incoming = Path(shutil.copy(other, f"{package}.new"))
            swap = threading.Timer(options.seconds / 3, lambda: incoming.replace(package))
            first = server.wait_for_answer(body)
            swap.start()
            found = offer_load(server.address, manifest, Load(options.rate[0], options.seconds))
            swap.join()
            last = server.wait_for_answer(body)
            versions = json.dumps([first, last])
            print(f"swap     {options.rate[0]:5g}/s  {line_of(found)}  versions {versions}")
        finally:
            server.close()


if __name__ == "__main__":
    main()
