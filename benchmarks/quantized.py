"""Lookups in quantized tables on a CPU beside FBGEMM's, in one run, taking turns; and the accuracy of the row types.

    python benchmarks/quantized.py --peer .venv-peer/bin/python [--quick] [--accuracy]

26 tables of 100,000 x 64, fp32 results, sums. tilerec's side is the whole module: it makes the batch from ids and
lengths, and returns a `KeyedTensor`. The peer's is its bare module with int32 ids and offsets that are ready. Both read
rows of the same bytes, and the results are compared before anything is timed.

With one thread a time is processor time, so that other programs on the machine count little; with two it is wall time.
Each cell has the best and the median over all rounds of both sides' turns. The ratio is tilerec / peer (below 1:
tilerec is faster), of the bests and of the medians. A call of two threads on a busy machine waits for a time slice of
the scheduler: there, compare the bests. Ratios are to FBGEMM's int8.

`--accuracy` trains DLRM on the planted stream and prints the change of normalized entropy by row type.

Legend: B samples, L ids per bag.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from quantized_peer import rounds  # noqa: E402

from tilerec.modules.embedding_bag import EmbeddingBagCollection  # noqa: E402
from tilerec.ops.quantized.row_format import quantize_rows  # noqa: E402
from tilerec.ops.runtime.cpu.library import status  # noqa: E402
from tilerec.quantized import QuantEmbeddingBagCollection  # noqa: E402
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor  # noqa: E402
from tilerec.spec.table import EmbeddingBagConfig  # noqa: E402

TABLES, ROWS, DIM = 26, 100_000, 64
CASES = [(512, 20, "uniform", 1), (64, 20, "zipf", 10), (1, 1, "zipf", 100), (64, 1, "zipf", 30), (1, 20, "zipf", 60)]
"""Samples, ids per bag, distribution, calls per round."""

BITS = {"int8": 8, "int4": 4, "int2": 2}


class Peer:
    """The process under the peer's Python."""

    def __init__(self, python: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("quantized_peer.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the peer process ended (exit code {self.process.wait()}); its messages are above")


def batch_of(samples: int, length: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return ids and lengths of all tables. Zipf's ids are scattered over the rows."""
    generator = torch.Generator().manual_seed(samples + length)
    count = samples * length
    if kind == "uniform":
        ids = torch.randint(0, ROWS, (TABLES * count,), generator=generator)
    else:
        share = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -1.05
        ids = torch.cat(
            [
                torch.randperm(ROWS, generator=generator)[torch.multinomial(share, count, True, generator=generator)]
                for _ in range(TABLES)
            ]
        )
    return ids, torch.full((TABLES * samples,), length)


def collections(rows: Tensor, names: list[str]) -> dict[str, torch.nn.Module]:
    """Return our modules by row type; all tables have the same rows."""
    configs = [EmbeddingBagConfig(ROWS, DIM, f"t{t}", feature_names=[f"f{t}"]) for t in range(TABLES)]
    made: dict[str, torch.nn.Module] = {}
    for name in names:
        bits = BITS.get(name)
        if bits is None:
            floats = EmbeddingBagCollection(configs, device="meta", output_dtype=torch.float32).half()
            made[name] = floats.to_empty(device="cpu").requires_grad_(False)
            values = rows.half()
        else:
            made[name] = QuantEmbeddingBagCollection(configs, [name] * TABLES)
            values = quantize_rows(rows, bits)
        for tensor in made[name].state_dict().values():
            tensor.copy_(values)
    return made


def check(name: str, got: Tensor, want: Tensor) -> None:
    """Raise unless both sides agree up to the order of operations (FBGEMM fuses multiplication and addition)."""
    if not torch.allclose(got, want, rtol=1e-4, atol=1e-5):
        raise RuntimeError(f"{name}: results differ by {float((got - want).abs().max())}")


def measure(options: argparse.Namespace, folder: Path) -> None:
    peer = Peer(options.peer)
    rows = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0)) * 0.01
    ours = collections(rows, ["fp16", *BITS])
    for bits in BITS.values():
        torch.save(quantize_rows(rows, bits), folder / "rows")
        peer.ask("tables", bits=bits, rows=str(folder / "rows"), tables=TABLES, dim=DIM)
    keys = [f"f{t}" for t in range(TABLES)]
    header = (
        "B x L",
        "threads",
        "FBGEMM int8",
        "int4",
        "tilerec fp16",
        "int8",
        "int4",
        "int2",
        "int8 ratio",
        "int4 ratio",
    )
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    for samples, length, kind, inner in CASES:
        ids, lengths = batch_of(samples, length, kind)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        torch.save((ids, offsets), folder / "batch")
        peer.ask("batch", batch=str(folder / "batch"))

        def call(module: torch.nn.Module, ids: Tensor = ids, lengths: Tensor = lengths) -> Callable[[], Any]:
            return lambda: module(KeyedJaggedTensor(keys, ids, lengths=lengths))

        for name, bits in BITS.items():
            peer.ask("result", bits=bits, to=str(folder / "result"))
            check(name, call(ours[name])().values(), torch.load(folder / "result"))
        for threads in options.threads:
            torch.set_num_threads(threads)
            unit = "own" if threads == 1 else "wall"
            times: dict[str, list[float]] = {}
            for turn in range(options.turns + 1):
                count = options.rounds if turn else 2  # the first turn warms up
                for name, module in ours.items():
                    found = rounds(call(module), count, inner)[unit]
                    times.setdefault(name, []).extend(found if turn else [])
                for name in ("int8", "int4"):
                    found = peer.ask("time", bits=BITS[name], threads=threads, rounds=count, inner=inner)[unit]
                    times.setdefault(f"FBGEMM {name}", []).extend(found if turn else [])
            print(line(f"{samples} x {length} {kind}", threads, times), flush=True)


def line(case: str, threads: int, times: dict[str, list[float]]) -> str:
    cells = [
        f"{min(times[name]):,.0f} / {statistics.median(times[name]):,.0f}"
        for name in ("FBGEMM int8", "FBGEMM int4", "fp16", "int8", "int4", "int2")
    ]
    for name in ("int8", "int4"):
        bests = min(times[name]) / min(times["FBGEMM int8"])
        medians = statistics.median(times[name]) / statistics.median(times["FBGEMM int8"])
        cells.append(f"{bests:.2f} / {medians:.2f}")
    return f"| {case} | {threads} | " + " | ".join(cells) + " |"


def accuracy(steps: int) -> None:
    """Print the change of normalized entropy on the planted stream by row type."""
    from tilerec.quantized import quantize_tables
    from tilerec.recipes.registry import make_run
    from tilerec.train.evaluate import Scores, evaluate
    from tilerec.train.loop import train
    from tilerec.train.override import override_all

    cpu = torch.device("cpu")
    print("\n| dim | NE fp32 | fp16 | bf16 | int8 | int4 | int2 |\n|---|---|---|---|---|---|---|")
    for dim in (16, 64):
        run = override_all(make_run("synthetic"), [f"train.max_steps={steps}", f"model.embedding_dim={dim}"])
        model = train(run).model.eval()
        held_out = list(run.data.open().held_out(8192))

        def ne(row_type: str, model: torch.nn.Module = model, held_out: list[Any] = held_out) -> float:
            scores = evaluate(quantize_tables(model, row_type), held_out, cpu)
            assert isinstance(scores, Scores)
            return scores.ne

        trained = ne("fp32")
        changes = [f"{ne(name) / trained - 1:+.4%}" for name in ("fp16", "bf16", "int8", "int4", "int2")]
        print(f"| {dim} | {trained:.6f} | " + " | ".join(changes) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=os.environ.get("TILEREC_PEER_PYTHON", ".venv-peer/bin/python"))
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--threads", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6, help="per turn")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--steps", type=int, default=1900, help="of training, for --accuracy")
    options = parser.parse_args()
    if options.quick:
        options.turns, options.rounds = 3, 4
    print(f"- machine: {platform.machine()} x {os.cpu_count()}; torch {torch.__version__}; {status()}")
    print(f"- recipe: `{' '.join(['python', *sys.argv])}`, {time.strftime('%Y-%m-%d')}; us, best / median\n")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder, torch.no_grad():
        measure(options, Path(folder))
    if options.accuracy:
        accuracy(options.steps)


if __name__ == "__main__":
    main()
