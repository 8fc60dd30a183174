"""Checkpoints made to harm a reader: refused with few bytes of memory, in time linear in their size."""

from __future__ import annotations

import json
import os
import random
import resource
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.document_fuzzer import changed
from tilerec.checkpoint import CheckpointManager, load, save
from tilerec.checkpoint.blocks import BLOCK
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.manifest import parse_manifest
from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
Inner = dict[str, Any]
NIGHTLY = os.environ.get("TILEREC_NIGHTLY") == "1"
FILE = "rank0-0.safetensors"
STATE = {"x": torch.arange(12.0).view(4, 3), "run": {"steps": 3, "pair": (1, "a")}}


def saved(folder: Path) -> Inner:
    """Save a small checkpoint; return the inner part of its manifest."""
    save(folder, STATE)
    return json.loads((folder / "manifest.json").read_bytes())["manifest"]  # type: ignore[no-any-return]


def with_checksum(inner: bytes) -> bytes:
    return b'{"crc32": "%08x", "manifest": ' % zlib.crc32(inner) + inner + b"}"


def write(folder: Path, inner: Inner) -> None:
    (folder / "manifest.json").write_bytes(with_checksum(json.dumps(inner).encode()))


def sparse(folder: Path, inner: Inner, blocks: int) -> None:
    """Replace the data by a file of zeros that takes no space on the disk, with right checksums."""
    os.truncate(folder / FILE, 0)
    os.truncate(folder / FILE, blocks * BLOCK)
    inner["files"][FILE] = {"bytes": blocks * BLOCK, "crc32": f"{zlib.crc32(bytes(BLOCK)):08x}" * blocks}


# ---------------------------------------------------------------------------------------------------- absurd sizes


def one_block_many_times(folder: Path, inner: Inner) -> None:
    """A tensor of 64 GB whose chunks are the same 4 MiB of a file."""
    sparse(folder, inner, 1)
    rows = BLOCK // 4
    chunks = [[FILE, 0, [rows * i], [rows]] for i in range(16_000)]
    inner["tensors"]["x"] = {"dtype": "F32", "shape": [rows * 16_000], "chunks": chunks}


def many_tensors_of_one_block(folder: Path, inner: Inner) -> None:
    """16,000 tensors of 4 MiB that are the same bytes of a file."""
    sparse(folder, inner, 1)
    rows = BLOCK // 4
    tensor = {"dtype": "F32", "shape": [rows], "chunks": [[FILE, 0, [0], [rows]]]}
    inner["tensors"] = {f"x.{i}": tensor for i in range(16_000)}
    inner["state"]["dict"]["x"] = {"dict": {str(i): {"tensor": f"x.{i}"} for i in range(16_000)}}


def file_larger_than_it_is(folder: Path, inner: Inner) -> None:
    """A file of 4 TB by the manifest."""
    inner["files"][FILE] = {"bytes": 1 << 42, "crc32": "00000000" * (1 << 20)}
    inner["tensors"]["x"] = {"dtype": "F32", "shape": [1 << 40], "chunks": [[FILE, 0, [0], [1 << 40]]]}


def overlap_of_many_columns(folder: Path, inner: Inner) -> None:
    """30,000 boxes of one row, of which two are the same: a comparison of all pairs would take minutes."""
    sparse(folder, inner, 1)
    count = 30_000
    chunks = [[FILE, 4 * i, [0, max(0, i - 1)], [1, 1]] for i in range(count)]
    inner["tensors"]["x"] = {"dtype": "F32", "shape": [1, count], "chunks": chunks}


def overlap_of_boxes(folder: Path, inner: Inner) -> None:
    """Four boxes with as many cells as the tensor; two overlap, and a cell is in none."""
    boxes = [[[0, 0], [2, 2]], [[1, 1], [2, 2]], [[3, 0], [1, 3]], [[0, 2], [1, 1]]]
    starts = [0, 16, 32, 44]
    inner["tensors"]["x"]["chunks"] = [[FILE, 200 + s, *box] for s, box in zip(starts, boxes, strict=True)]


def dimensions(folder: Path, inner: Inner) -> None:
    """200,000 dimensions; the product of their sizes has millions of digits."""
    inner["tensors"]["x"].update(shape=[2**62] * 200_000, chunks=[])


def empty_and_huge(folder: Path, inner: Inner) -> None:
    """No cells, and a size that torch cannot multiply."""
    inner["tensors"]["x"].update(shape=[2**62, 0, 2**62], chunks=[])


def huge_numbers(folder: Path, inner: Inner) -> None:
    inner["tensors"]["x"]["shape"] = [10**4000, 3]


def many_files(folder: Path, inner: Inner) -> None:
    """20,000 files that are not there."""
    inner["files"] |= {f"f{i}.safetensors": {"bytes": 0, "crc32": ""} for i in range(20_000)}


def checksums_of_few_blocks(folder: Path, inner: Inner) -> None:
    inner["files"][FILE]["crc32"] = ""


def other_checksums(folder: Path, inner: Inner) -> None:
    inner["files"][FILE]["crc32"] = "00000000"


# ---------------------------------------------------------------------------------------- names, links and odd files


def parent_names(folder: Path, inner: Inner) -> None:
    _renamed(inner, "../rank0-0.safetensors")


def absolute_names(folder: Path, inner: Inner) -> None:
    _renamed(inner, "/etc/passwd.safetensors")


def names_with_zero_bytes(folder: Path, inner: Inner) -> None:
    _renamed(inner, "a\x00.safetensors")


def windows_names(folder: Path, inner: Inner) -> None:
    _renamed(inner, "..\\rank0-0.safetensors")


def _renamed(inner: Inner, name: str) -> None:
    inner["files"][name] = inner["files"].pop(FILE)
    for tensor in inner["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk[0] = name


def link_to_another_file(folder: Path, inner: Inner) -> None:
    (folder / FILE).rename(folder.parent / "elsewhere")
    (folder / FILE).symlink_to(folder.parent / "elsewhere")


def link_in_place_of_the_manifest(folder: Path, inner: Inner) -> None:
    write(folder, inner)
    (folder / "manifest.json").rename(folder.parent / "elsewhere.json")
    (folder / "manifest.json").symlink_to(folder.parent / "elsewhere.json")
    inner.clear()


def pipe_in_place_of_the_manifest(folder: Path, inner: Inner) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    inner.clear()


def pipe_in_place_of_a_file(folder: Path, inner: Inner) -> None:
    """Empty, as its size in the manifest."""
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)
    inner["files"][FILE] = {"bytes": 0, "crc32": ""}
    inner["tensors"] = {}
    inner["state"]["dict"]["x"] = 1


def folder_in_place_of_a_file(folder: Path, inner: Inner) -> None:
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    inner["files"][FILE]["bytes"] = (folder / FILE).lstat().st_size


# -------------------------------------------------------------------------------------------------------- JSON bombs


def deep_lists(folder: Path, inner: Inner) -> bytes:
    text = json.dumps(inner).encode()
    return text.replace(b'"steps": 3', b'"steps": ' + b"[" * 200_000 + b"]" * 200_000)


def deep_tree(folder: Path, inner: Inner) -> bytes:
    text = json.dumps(inner).encode()
    return text.replace(b'"steps": 3', b'"steps": ' + b'{"dict": {"a": ' * 20_000 + b"1" + b"}}" * 20_000)


def not_a_number(folder: Path, inner: Inner) -> bytes:
    return json.dumps(inner).encode().replace(b'"steps": 3', b'"steps": NaN')


def long_number(folder: Path, inner: Inner) -> bytes:
    return json.dumps(inner).encode().replace(b'"steps": 3', b'"steps": ' + b"9" * 4_000)


def not_text(folder: Path, inner: Inner) -> bytes:
    return json.dumps(inner).encode().replace(b'"steps": 3', b'"\xff": 3')


HOSTILE: list[Callable[[Path, Inner], bytes | None]] = [
    one_block_many_times, many_tensors_of_one_block, file_larger_than_it_is, overlap_of_many_columns, overlap_of_boxes,
    dimensions, empty_and_huge, huge_numbers, many_files, checksums_of_few_blocks, other_checksums, parent_names,
    absolute_names, names_with_zero_bytes, windows_names, link_to_another_file, link_in_place_of_the_manifest,
    pipe_in_place_of_the_manifest, pipe_in_place_of_a_file, folder_in_place_of_a_file, deep_lists, deep_tree,
    not_a_number, long_number, not_text,
]  # fmt: skip
LEAST = 1 << 28


def outcomes(folder: str, names: list[str]) -> dict[str, str]:
    """Load each checkpoint with 256 MiB of memory beyond that of this process; return the errors."""
    found = {}
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LEAST, before[1]))
    try:
        for name in names:
            try:
                load(f"{folder}/{name}", dict.fromkeys(STATE))
                SavedContents(f"{folder}/{name}").verify()
                found[name] = "loaded"
            except TilerecError as error:
                found[name] = str(error)
            except BaseException as error:  # a report from this process
                found[name] = f"!{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return found


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of a process from /proc")
def test_hostile_checkpoints_are_refused_before_memory_is_taken(pool: Pool, tmp_path: Path) -> None:
    for make in HOSTILE:
        folder = tmp_path / make.__name__
        inner = saved(folder)
        text = make(folder, inner)
        if text is not None:
            (folder / "manifest.json").write_bytes(with_checksum(text))
        elif inner:
            write(folder, inner)
    (found,) = pool(1).run(outcomes, str(tmp_path), [make.__name__ for make in HOSTILE])
    wrong = {name: text[:200] for name, text in found.items() if f"Checkpoint {tmp_path / name}" not in text}
    assert not wrong


@pytest.mark.parametrize("count", [20_000, 40_000])
def test_the_memory_of_reading_a_manifest_is_linear_in_its_size(tmp_path: Path, count: int) -> None:
    inner = saved(tmp_path / "a")
    inner["state"]["dict"]["run"] = [{}] * count
    text = with_checksum(json.dumps(inner, separators=(",", ":")).encode())
    tracemalloc.start()
    try:
        parse_manifest(text, "a")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 60 * len(text)


def test_boxes_in_any_order_that_hold_each_cell_once_are_read(tmp_path: Path) -> None:
    save(tmp_path / "a", STATE)
    inner = json.loads((tmp_path / "a" / "manifest.json").read_bytes())["manifest"]
    start = inner["tensors"]["x"]["chunks"][0][1]
    rows = [[FILE, start + 12 * i, [i, 0], [1, 3]] for i in (2, 0, 3, 1)]
    inner["tensors"]["x"]["chunks"] = [*rows, [FILE, start, [1, 1], [0, 2]]]
    write(tmp_path / "a", inner)
    assert torch.equal(load(tmp_path / "a", {"x": None})["x"], STATE["x"])


# ----------------------------------------------------------------------------------------------- changes at random


def test_manifests_changed_at_random_are_refused_or_read_as_whole_values(tmp_path: Path) -> None:
    inner = saved(tmp_path / "a")
    draw = random.Random(0)
    refused = read = 0
    count = 20_000 if NIGHTLY else 150
    for _ in range(count):
        text = changed(inner, draw)
        (tmp_path / "a" / "manifest.json").write_bytes(with_checksum(text))
        try:
            values = load(tmp_path / "a", dict.fromkeys(STATE))
        except TilerecError as error:
            refused += len(str(error)) < 3000
        else:
            read += 1
            assert set(values) == set(STATE)
    assert refused + read == count
    assert refused > read > 0


# -------------------------------------------------------------------------------------- what cannot be read, is not


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[[[[[[[1]]]]]]]], None),
        ("deep", "nested more than 64 deep"),
        ("deepest", "nested more than 1,000 deep"),
        ({2**70: 1}, "a number below 2\\^63"),
        ("half of a pair: \ud800", "surrogate"),
    ],
)
def test_a_state_that_no_reader_would_take_is_refused_by_save(tmp_path: Path, value: Any, message: str | None) -> None:
    if value in ("deep", "deepest"):
        depth, value = (40 if value == "deep" else 5_000), 1
        for _ in range(depth):
            value = {"a": value}
    if message is None:
        save(tmp_path / "a", {"run": value})
        assert load(tmp_path / "a", {"run": None}) == {"run": value}
        return
    with pytest.raises(ConfigError, match=message):
        save(tmp_path / "a", {"run": value})
    assert not list(tmp_path.iterdir())


def test_a_manifest_larger_than_readers_take_is_refused_by_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilerec.checkpoint.manifest.MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="Keep long lists as tensors"):
        save(tmp_path / "a", {"run": list(range(1000))})
    assert not list(tmp_path.iterdir())


def test_a_hostile_checkpoint_is_passed_over(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, STATE)
    folder = tmp_path / "step-2"
    inner = saved(folder)
    pipe_in_place_of_the_manifest(folder, inner)
    with pytest.raises(FileError, match="not a file"):
        load(folder, dict.fromkeys(STATE))
    with pytest.warns(UserWarning, match="step-2"):
        found = CheckpointManager(tmp_path).resume(dict.fromkeys(STATE))
    assert found is not None
    assert found[0] == 1
