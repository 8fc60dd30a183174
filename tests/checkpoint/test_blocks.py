"""Blocks of files: parts in any order are read into their memory, and every byte of a touched block is verified."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tilerec.checkpoint import blocks
from tilerec.checkpoint.blocks import BlockReader, BlockWriter, Part
from tilerec.errors import InputError

SIZE, BLOCK = 1_000, 64


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", BLOCK)


class CountingFile(io.BytesIO):
    """A file that counts the bytes that are read."""

    bytes_read = 0

    def readinto(self, buffer: object) -> int:
        count = super().readinto(buffer)  # type: ignore[arg-type]
        self.bytes_read += count
        return count


def written() -> tuple[bytes, list[int]]:
    """Return the bytes of a file, and the checksums of its blocks."""
    data, file = random.Random(0).randbytes(SIZE), io.BytesIO()
    with BlockWriter(file) as writer:
        for first in range(0, SIZE, 77):
            writer.write(data[first : first + 77])
    assert writer.size == SIZE
    return data, writer.crcs


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no such advice")
def test_large_writes_to_a_local_file_begin_their_way_to_the_disk_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, first, count, advice: begun.append((first, count, advice)))
    with (tmp_path / "a").open("xb") as file, BlockWriter(file) as writer:
        for size in (BLOCK, BLOCK - 1, 3 * BLOCK):
            writer.write(bytes(size))
    advice = os.POSIX_FADV_DONTNEED
    assert begun == [(0, BLOCK, advice), (2 * BLOCK - 1, 3 * BLOCK, advice)]
    written()  # a file in memory has no way to a disk
    assert len(begun) == 2


def ranges(draw: random.Random, *, ordered: bool) -> list[tuple[int, int]]:
    found = [(first, draw.randrange(0, min(200, SIZE - first) + 1)) for first in draw.choices(range(SIZE), k=12)]
    return sorted(found) if ordered else found


@pytest.mark.parametrize("ordered", [True, False])
def test_parts_with_gaps_and_overlaps_get_their_bytes(ordered: bool) -> None:
    data, crcs = written()
    for seed in range(50):
        wanted = ranges(random.Random(seed), ordered=ordered)
        outs = [bytearray(size) for _, size in wanted]
        done: list[int] = []
        with BlockReader(io.BytesIO(data), "f", SIZE, crcs) as reader:
            reader.read(
                Part(first, memoryview(out), partial(done.append, i))
                for i, ((first, _), out) in enumerate(zip(wanted, outs, strict=True))
            )
        assert done == list(range(12))
        assert outs == [data[first : first + size] for first, size in wanted]


def test_a_part_has_its_bytes_when_it_is_reported() -> None:
    """So a buffer can be copied, and freed, before the next one is made."""
    data, crcs = written()
    seen: list[bytes] = []

    def parts() -> Iterator[Part]:
        for first in range(10, 900, 90):
            out = bytearray(90)
            yield Part(first, memoryview(out), lambda out=out: seen.append(bytes(out)))

    with BlockReader(io.BytesIO(data), "f", SIZE, crcs) as reader:
        reader.read(parts())
    assert b"".join(seen) == data[10:910]


def test_a_whole_file_in_parts_is_read_once() -> None:
    data, crcs = written()
    file = CountingFile(data)
    outs = [bytearray(min(90, SIZE - first)) for first in range(0, SIZE, 90)]
    with BlockReader(file, "f", SIZE, crcs) as reader:
        reader.read(Part(90 * i, memoryview(out)) for i, out in enumerate(outs))
    assert b"".join(outs) == data
    assert file.bytes_read == SIZE


def test_small_reads_of_one_block_read_it_once() -> None:
    data, crcs = written()
    file, out = CountingFile(data), bytearray(200)
    with BlockReader(file, "f", SIZE, crcs) as reader:
        for first in range(0, BLOCK, 4):
            reader.read_into(first, memoryview(out)[first : first + 4])
        assert file.bytes_read == BLOCK
        assert out[:BLOCK] == data[:BLOCK]
        reader.read_into(30, memoryview(out))
        assert out == data[30:230]


@pytest.mark.parametrize("flipped", [0, 63, 64, 500, SIZE - 1])
def test_a_flipped_bit_of_a_touched_block_is_found_and_others_do_not_matter(flipped: int) -> None:
    data, crcs = written()
    bad = bytearray(data)
    bad[flipped] ^= 1
    block = flipped // BLOCK * BLOCK
    with BlockReader(io.BytesIO(bad), "f", SIZE, crcs) as reader:
        for first in (block, min(block + 10, SIZE - 3)):
            with pytest.raises(InputError, match=rf"checksum .* of bytes {block} to "):
                reader.read([Part(first, memoryview(bytearray(3)))])
        other = (block + 2 * BLOCK) % SIZE // BLOCK * BLOCK
        reader.read([Part(other, memoryview(bytearray(5)))])


def test_a_file_that_ends_early_and_a_part_behind_its_end_are_errors() -> None:
    data, crcs = written()
    with BlockReader(io.BytesIO(data[:700]), "f", SIZE, crcs) as reader:
        with pytest.raises(InputError, match="got end at byte 700; expected 1,000 bytes"):
            reader.read([Part(0, memoryview(bytearray(SIZE)))])
        for read in (lambda out: reader.read([Part(SIZE - 5, out)]), lambda out: reader.read_into(SIZE + 70, out)):
            with pytest.raises(InputError, match="got end at byte"):
                read(memoryview(bytearray(10)))
