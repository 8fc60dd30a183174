"""`calibrate`: measures the `Speeds` of a machine, on all ranks at once, in less than a minute.

    far    random rows of a table much larger than the caches
    near   random rows of a table that fits into the fastest cache

Rates per row are differences of two measurements: rows in memory and in a cache, bags of one id and of ten, many ids of
few rows. All ranks start each measurement together, so they share memory and links as they do in a step. A time is the
second least of several. A speed is the median of three passes, then the mean over ranks.

Afterwards, whole steps of small models are timed, which gives the cost of a step beside its rows (whole_steps.py).

Legend: N ids, P bags, D columns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilerec.comms.agreement import on_all_ranks
from tilerec.comms.group import Group
from tilerec.ops.hot.definition import finder_of
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.whole_steps import fitted, wait
from tilerec.spec.optimizer import SGD
from tilerec.spec.speeds import PER_WIDTH, SINGLE, WIDTHS, Speeds
from tilerec.spec.topology import DDR_CAP, Topology
from tilerec.storage.flat_storage import flat_memory
from tilerec.storage.row_file import drop, file_of, row_blocks, tensor_in_file

_FAR_BYTES, _NEAR_BYTES = 96 * 2**20, 2**20  # of the tables with far and near rows
_FLUSH_BYTES = 48 * 2**20  # written before a measurement with cold caches
_FRESH_BYTES = 64 * 2**20  # of new memory that is timed
_FILE_BYTES, _FILE_ROWS = 256 * 2**20, 8192  # of the table in a file; rows of one read
_IDS = 20_480  # per measurement
_LONG = 10  # ids of a long bag
_HOT = 1_000  # hot ids of a table, among which ids are searched
_REPEATS, _PASSES = 9, 3  # calls per measurement; passes over all measurements
_ROUNDS, _STEPS = 4, 9  # rounds over the models of whole steps; steps of each model per round
_CACHE = "/sys/devices/system/cpu/cpu0/cache/index{}/size"


def calibrate(
    group: Group, topology: Topology, device: torch.device | str = "cpu", folder: str | None = None
) -> Topology:  # fmt: skip
    """Return the topology with measured speeds, the same on every rank. Collective.

    Args:
        group: the ranks that are measured, on one host. Links between hosts keep their default speeds.
        device: of the tables.
        folder: of tables in files, on a local disk, which is measured too; None: it is not.

    Raises:
        FileError: the folder does not exist, cannot be written or has no space for a file of 256 MiB per rank.
    """
    with on_all_ranks(group, "the measured speeds", "its file"):
        file_row = None if folder is None else _file_row(folder)
    speeds = _Bench(group, torch.device(device), topology).speeds()
    if file_row is not None:
        every: Any = group.all_gather_object(file_row)
        speeds = replace(speeds, file_row=sum(every) / len(every))
    return replace(topology, speeds=speeds)


def _file_row(folder: str) -> float:
    """Return the seconds to read one row of a file at random that is not in the page cache, while all ranks do so."""
    rows = _FILE_BYTES // 512
    table, lines = (
        tensor_in_file(folder, (rows, 128), torch.float32, "of the measurement"),
        torch.empty(_FILE_ROWS, 128),
    )
    file = file_of(table)
    assert file is not None
    for block in row_blocks(table):
        block.fill_(1.0)
    taken = []
    for turn in range(_PASSES):
        chosen = torch.randint(rows, (_FILE_ROWS,), generator=torch.Generator().manual_seed(turn)).unique()
        drop(table)
        before = time.perf_counter()
        torch.ops.tilerec.read_rows_([lines], torch.arange(len(chosen)), chosen, file.descriptor, 512, 0)
        taken.append((time.perf_counter() - before) / len(chosen))
    return statistics.median(taken)


def machine(ranks: int, device: str = "cpu") -> Topology:
    """Return a topology of so many ranks on this machine, with equal parts of its memory."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not known on this system
        whole = DDR_CAP * ranks
    kind = torch.device(device).type
    if kind == "cpu":
        return Topology(ranks, kind, ddr_cap=whole // ranks)
    return Topology(ranks, kind, hbm_cap=torch.cuda.mem_get_info()[1], ddr_cap=whole // ranks)


class _Bench:
    """The measurements on one rank."""

    def __init__(self, group: Group, device: torch.device, topology: Topology) -> None:
        self.group, self.device, self.topology = group, device, topology
        self.generator = torch.Generator().manual_seed(group.rank)
        self.sinks = torch.empty(0, dtype=torch.int64)
        self.others = torch.ones(_FLUSH_BYTES // 4, device=self.device)

    def speeds(self) -> Speeds:
        default = default_speeds(self.topology)
        passes = [self._pass(default) for _ in range(_PASSES)]
        # The median leaves out a pass that was disturbed.
        mine = {name: statistics.median(found[name] for found in passes) for name in passes[0]}
        mine["fresh"] = self._fresh()
        if self.device.type == "cpu":  # on a GPU the price is per feature
            mine["hot_id"] = self._hot_id()
        everyone: Any = self.group.all_gather_object(mine)
        mean = {name: sum(found[name] for found in everyone) / len(everyone) for name in mine}
        rates = {name: tuple(mean[f"{name} {dim}"] for dim in WIDTHS) for name in PER_WIDTH}
        numbers = {name: mean[name] for name in SINGLE}
        origin = f"measured, {self.group.size} {self.device.type} ranks, torch {torch.__version__}"
        cache = _cache(self.group.size, default.cache) if self.device.type == "cpu" else default.cache
        numbers |= {name: mean[name] for name in ("fresh", "hot_id") if name in mean}
        alone: Speeds = replace(default, **rates, **numbers, cache=cache, widths=WIDTHS, origin=origin)  # type: ignore[arg-type]
        return fitted(self.group, self.topology, alone, self.device, _ROUNDS, _STEPS)

    def _pass(self, default: Speeds) -> dict[str, float]:
        """Measure every number once; the key of a rate is "name width"."""
        found = {name: getattr(default, name) for name in SINGLE}
        for dim in WIDTHS:
            for measured in (self._lookup(dim), self._update(dim), self._place(dim)):
                found |= {f"{name} {dim}": seconds for name, seconds in measured.items()}
        found["route"] = self._route()
        found["copy"] = self._copy()
        found |= self._links(default)
        return found

    # ---------------------------------------------------------------------------------------------- timing

    def _seconds(self, work: Callable[[], object], repeats: int = _REPEATS, *, cold: bool = False) -> float:
        """Return the seconds of one call, which all ranks start together.

        Args:
            cold: fill the caches with other data first.
        """
        work()
        taken = []
        for _ in range(repeats):
            if cold:
                self.others.mul_(1.0)
            wait(self.device)
            self.group.barrier()
            before = time.perf_counter()
            work()
            wait(self.device)
            taken.append(time.perf_counter() - before)
        return sorted(taken)[1]

    def _ids(self, rows: int, count: int = _IDS) -> Tensor:
        ids = torch.randint(rows, (count,), generator=self.generator, dtype=torch.int32)
        return ids.to(self.device)

    def _offsets(self, length: int, count: int = _IDS) -> Tensor:
        return torch.arange(0, count + 1, length, device=self.device)

    def _tables(self, dim: int) -> tuple[Tensor, Tensor]:
        """Return a table with far rows and one with near rows."""
        # Ones, because memory that was never written is a single page of zeros, which is cached.
        large, small = (torch.ones(size // (4 * dim), dim, device=self.device) for size in (_FAR_BYTES, _NEAR_BYTES))
        return large, small

    # ---------------------------------------------------------------------------------------------- rates per row

    def _lookup(self, dim: int) -> dict[str, float]:
        large, small = self._tables(dim)

        def run(table: Tensor, length: int, count: int = _IDS) -> float:
            ids, offsets = self._ids(table.shape[0], count), self._offsets(length, count)
            bags = count // length
            return self._seconds(
                lambda: torch.ops.tilerec.pooled_lookup(
                    [table], self.sinks, ids, offsets, None, [0], [0], [0], [bags, 0], torch.float32, "f@t"
                ),
                cold=table is large,
            )

        call = run(small, 1, 1)
        far, near, pooled, far_pooled = (
            max(run(table, length) - call, 1e-9) / _IDS
            for table, length in ((large, 1), (small, 1), (small, _LONG), (large, _LONG))
        )
        bag = max((near - pooled) / (1 - 1 / _LONG), 0.0)
        near_id = max(pooled - bag / _LONG, 1e-10)
        # Cache misses overlap more in long bags than in short ones: take the mean of both.
        far_id = 0.5 * ((far - bag) + (far_pooled - bag / _LONG))
        return {"lookup_bag": bag, "lookup_near": near_id, "lookup_far": max(far_id, near_id)}

    def _update(self, dim: int) -> dict[str, float]:
        large, small = self._tables(dim)
        hyper = SGD(0.0).hyper()

        def run(table: Tensor, ids: Tensor, length: int) -> float:
            count = ids.numel()
            bags = count // length
            offsets = None if length == 1 else self._offsets(length, count)
            grad = torch.zeros(bags * dim, device=self.device)
            return self._seconds(
                lambda: torch.ops.tilerec.update_rows_(
                    [table], [], grad, ids, offsets, None, [0], [0], [bags], [0], [dim], [0], "sgd", hyper, [1],
                    [0, 0], [0], [0],
                ),
                cold=table is large,
            )  # fmt: skip

        def different(table: Tensor) -> Tensor:
            ids = torch.randperm(table.shape[0], generator=self.generator, dtype=torch.int32)
            return ids[: min(_IDS, table.shape[0])].to(self.device)

        call = run(small, self._ids(8, 1), 1)
        # Ids of few rows in bags of one and of ten take n (id + bag) and n (id + bag / 10). Then each row occurs once.
        few = self._ids(16)
        short, long = (max(run(small, few, length) - call, 1e-9) / _IDS for length in (1, _LONG))
        bag = max((short - long) / (1 - 1 / _LONG), 0.0)
        per_id = max(short - bag, 1e-10)
        near_ids, far_ids = different(small), different(large)
        near, far = (
            max((run(table, ids, 1) - call) / ids.numel() - short, 1e-10)
            for table, ids in ((small, near_ids), (large, far_ids))
        )
        return {"update_id": per_id, "update_bag": bag, "update_near": near, "update_far": max(far, near)}

    def _place(self, dim: int) -> dict[str, float]:
        # An odd number, since rows of the output at distances of a power of two would share cache sets.
        slots = (13 * 2**18 // (2048 * dim)) | 1
        out = torch.zeros(2048, slots * dim, device=self.device)
        rows = torch.zeros(2048 * slots * dim, device=self.device)
        none = torch.empty(0, dtype=torch.int32, device=self.device)
        segments = (
            [2048] * slots, [dim] * slots, [-1] * slots, [s * dim for s in range(slots)], [slots * dim] * slots,
        )  # fmt: skip
        count = 2048 * slots
        # Rows are written, or added to others if a table is split by rows: take the mean of both.
        put = torch.ops.tilerec.place_rows_
        written = self._seconds(lambda: put(out, rows, none, *segments, [0] * slots), 5)
        added = self._seconds(lambda: put(out, rows, none, *segments, [1] * slots), 5)
        place = 0.5 * (written + added)
        pick = self._seconds(lambda: torch.ops.tilerec.pick_rows_(rows, out, none, *segments), 5)
        return {"place": place / count, "pick": pick / count}

    # ---------------------------------------------------------------------------------------------- ids, copies, links

    def _route(self) -> float:
        """Measure routing: every second table is whole, the others have two ranges of rows."""
        features, length = 8, 2
        bags = _IDS // (features * length)
        offsets, ids = self._offsets(length), self._ids(10_000).long()
        ranges = [1, 2] * (features // 2)
        cuts = [0, 10_000, 0, 5_000, 10_000] * (features // 2)
        arguments = (
            list(range(features)), [bags], cuts, ranges, list(range(sum(ranges))), False, torch.int32,
            ",".join(["f@t"] * features),
        )  # fmt: skip
        return self._seconds(lambda: torch.ops.tilerec.route_ids(ids, offsets, *arguments)) / _IDS

    def _hot_id(self) -> float:
        """Measure a search for ids among hot ones. Every second id is hot."""
        rows, hot = 100 * _HOT, torch.arange(_HOT) * 100
        some, ids = hot[self._ids(_HOT, _IDS).long()], self._ids(rows, _IDS).long()
        ids[::2] = some[::2]
        offsets, finder = self._offsets(1, _IDS), finder_of(hot.numpy())
        arguments = (ids, offsets, [0], [_IDS], [hot], [finder], [rows], "f@t")
        return self._seconds(lambda: torch.ops.tilerec.hot_ids(*arguments)) / _IDS

    def _copy(self) -> float:
        source, target = (torch.zeros(2**22, device=self.device) for _ in range(2))
        return self._seconds(lambda: target.copy_(source)) / (4 * source.numel())

    def _fresh(self) -> float:
        """Measure seconds per byte of memory that is new to the process; it stays in use until the end."""
        taken, kept = [], []
        for _ in range(3):
            wait(self.device)
            self.group.barrier()
            before = time.perf_counter()
            kept.append(flat_memory([(_FRESH_BYTES // 256, 64)], torch.float32, self.device)[0].fill_(1.0))
            wait(self.device)
            taken.append(time.perf_counter() - before)
        return statistics.median(taken) / _FRESH_BYTES

    def _links(self, default: Speeds) -> dict[str, float]:
        size = self.group.size
        if size == 1:
            return {}

        def run(each: int) -> float:
            output, input = (torch.zeros(each * size, device=self.device) for _ in range(2))
            splits = [each] * size
            return self._seconds(lambda: self.group.all_to_all("calibrate", output, input, splits, splits).wait())

        call = run(16)
        each = 2**20 // size
        per_byte = max(run(each) - call, 1e-9) / (4 * each * (size - 1))
        if default.duplex:
            return {"call": call, "link_in": per_byte, "link_out": per_byte}
        return {"call": call, "link_in": per_byte / 2, "link_out": per_byte / 2}


def _cache(ranks: int, default: int) -> int:
    """Return the bytes of cache per rank: that of its core, and its part of the cache that cores share."""
    sizes = []
    for level in (2, 3):
        try:
            text = Path(_CACHE.format(level)).read_text().strip()
        except OSError:
            return default
        unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return sizes[0] + sizes[1] // ranks
