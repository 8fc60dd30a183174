"""Jagged ops, exchanged rows and packed rows on a GPU: time, and the fraction of the memory's speed.

    python benchmarks/gpu_moves.py [--json FILE]
    TRITON_INTERPRET=1 python benchmarks/gpu_moves.py --device cpu --shrink 500     # the script itself, without a GPU

Every result is compared with the plain-PyTorch reference on the same device before it is timed. The reference is timed
beside it, the two taking turns. A time is the median over rounds of a call between two events.

  roofline  bytes that must be moved / (time x copy bandwidth measured in this run)

Legend: N ids, S segments, B bags, D columns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent.parent)]

from tilerec.ops import backends  # noqa: F401, E402
from tilerec.ops.exchange import definition as exchange_reference  # noqa: E402
from tilerec.ops.exchange.triton import backend as exchange  # noqa: E402
from tilerec.ops.jagged.definition import offsets_from_lengths  # noqa: E402
from tilerec.ops.jagged.triton import backend as jagged  # noqa: E402
from tilerec.ops.quantize import definition as quant_reference  # noqa: E402
from tilerec.ops.quantize import triton as quant  # noqa: E402
from tilerec.ops.runtime.library import LIBRARY  # noqa: E402

KERNELS = LIBRARY.taking_arguments(jagged.KERNELS)


class Case(NamedTuple):
    name: str
    run: Callable[[], Any]
    reference: Callable[[], Any]
    bytes: int
    bits: bool = True  # True if both have the same bits on a GPU


def cases(device: torch.device, shrink: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    keys, batch = 26, max(16384 // shrink, 2)
    lengths = torch.randint(0, 20, (keys * batch,), generator=generator).to(device)
    offsets = offsets_from_lengths(lengths)
    total = int(offsets[-1])
    ids = torch.randint(0, 10**6, (total,), generator=generator).to(device)
    starts = offsets[::batch].contiguous()
    order = torch.randperm(keys, generator=generator).to(device)
    out_starts = offsets_from_lengths(starts.diff()[order])
    bag_order = torch.randperm(keys * batch, generator=generator).to(device)
    out_offsets = offsets_from_lengths(lengths[bag_order])
    cuts = torch.arange(0, 10**6 + 1, 125_000, device=device)
    rows = torch.randn(total, 64, device=device)
    padded = torch.randn(keys * batch, 10, 64, device=device)

    def op(name: str, what: str, moved: int, *arguments: Any, bits: bool = True) -> Case:
        return Case(
            f"{name}, {what}",
            lambda: KERNELS[name](*arguments),
            lambda: LIBRARY.references[name](*arguments),
            moved,
            bits,
        )

    yield op("segment_ids", "bags", 8 * total, offsets, total)
    yield op("select_segments", "26 keys of ids", 16 * total, ids, starts, order, out_starts, total)
    yield op("select_segments", "bags of ids", 16 * total, ids, offsets, bag_order, out_offsets, total)
    selected = (rows, offsets, bag_order, out_offsets, total)
    yield op("select_segments", "bags of rows of 64", 512 * total, *selected)
    yield op("select_segments_backward", "bags of rows of 64", 512 * total, *selected)
    yield op("bucketize_by_cuts", "8 buckets", 24 * total, ids, lengths, cuts)
    yield op("jagged_to_padded", "rows of 64, length 10", 512 * 10 * keys * batch, rows, offsets, 10, 0.0)
    yield op("padded_to_jagged", "rows of 64, length 10", 512 * total, padded, offsets, total)
    # torch adds numbers (items of one column) in another order on a GPU.
    yield op("segment_sum", "rows of 64", 256 * total + 256 * keys * batch, rows, offsets)
    yield op("segment_sum", "numbers", 4 * total, rows[:, 0].contiguous(), offsets, bits=False)
    yield op("repeat_segments", "rows of 64", 256 * total, padded[:, 0].contiguous(), offsets, total)

    parts = 8
    wire = [p * keys + k for k in range(keys) for p in range(parts)]
    names = ",".join(["f@t"] * keys)
    cut_lists = [c * 125_000 for c in range(parts + 1)] * keys
    route = (
        ids,
        offsets,
        list(range(keys)),
        [batch],
        cut_lists,
        [parts] * keys,
        wire,
        False,
        torch.int32,
        names,
    )
    yield Case(
        "route_ids, 26 keys to 8 ranks", lambda: exchange.route_ids(*route),
        lambda: exchange_reference._route_ids_reference(*route), 8 * total + 16 * total,
    )  # fmt: skip

    columns = keys * 64
    slots = torch.arange(batch, dtype=torch.int32, device=device).repeat(keys)
    for what, owners in (("26 features", 1), ("26 features from 4 owners, added", 4)):
        segments = [(k, o) for o in range(owners) for k in range(keys)]
        moves = ([batch] * len(segments), [64] * len(segments), [k * batch for k, _ in segments],
                 [k * 64 for k, _ in segments], [columns] * len(segments))  # fmt: skip
        own = torch.randn(len(segments) * batch * 64, device=device)
        adds = [int(owners > 1)] * len(segments)

        def place(function: Callable[..., None], own: Tensor = own, moves: Any = moves, adds: Any = adds) -> Tensor:
            out = torch.empty(batch * columns, device=device)
            function(out, own, slots, *moves, adds, True)
            return out

        size = 4 * (own.numel() + batch * columns)
        yield Case(
            f"place_rows_, {what}", lambda place=place: place(exchange.place_rows_),
            lambda place=place: place(exchange_reference._place_rows_reference_), size,
        )  # fmt: skip
        if owners == 1:
            source = torch.randn(batch * columns, device=device)
            yield Case(
                f"pick_rows, {what}", lambda source=source, moves=moves: exchange.pick_rows(source, slots, *moves),
                lambda source=source, moves=moves: exchange_reference._pick_rows_reference(source, slots, *moves), size,
            )  # fmt: skip
    flat, counts, widths = rows.view(-1), [total], [64]
    for format in ("int8", "fp8"):
        packed = quant.pack_segments(flat, counts, widths, format)
        moved = (256 + 68) * total
        yield Case(
            f"pack {format}, rows of 64", lambda f=format: quant.pack_segments(flat, counts, widths, f),
            lambda f=format: quant_reference.pack_segments_reference(flat, counts, widths, f), moved,
        )  # fmt: skip
        yield Case(
            f"unpack {format}, rows of 64",
            lambda f=format, p=packed: quant.unpack_segments(p, counts, widths, f, torch.float32),
            lambda f=format, p=packed: quant_reference.unpack_segments_reference(p, counts, widths, f, torch.float32),
            moved,
        )  # fmt: skip


def agree(case: Case) -> None:
    """Raise unless both give the same result."""
    results, expecteds = case.run(), case.reference()
    pairs = [(results, expecteds)] if isinstance(results, Tensor) else list(zip(results, expecteds, strict=True))
    for one, other in pairs:
        close = {"rtol": 0.0, "atol": 0.0} if case.bits else {"rtol": 1e-4, "atol": 1e-3}
        torch.testing.assert_close(one, other, **close)


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, on the device's clock."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divide the batch by this")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"
    big = torch.empty(max(2**28 // arguments.shrink, 1024), device=device)
    into = torch.empty_like(big)
    copy = 2 * big.nbytes / statistics.median(seconds(lambda: into.copy_(big), device) for _ in range(20))
    print(f"{name}, torch {torch.__version__}, copy {copy / 1e9:,.0f} GB/s, shrink {arguments.shrink}")
    results = []
    for case in cases(device, arguments.shrink):
        agree(case)
        rounds = arguments.rounds if device.type == "cuda" else 1
        pairs = [(seconds(case.run, device), seconds(case.reference, device)) for _ in range(rounds)]
        own, other = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{case.name:52} {own * 1e3:9.3f} ms {case.bytes / own / 1e9:8.0f} GB/s  roofline "
            f"{case.bytes / own / copy:5.2f}  reference {other * 1e3:9.3f} ms  {other / own:6.2f}x"
        )
        results.append({"case": case.name, "ms": own * 1e3, "reference_ms": other * 1e3, "bytes": case.bytes})
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": name, "copy": copy, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
