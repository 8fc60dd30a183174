"""A copy of a package is the file's bytes, all checked, and nothing that happens to the file changes it."""

from __future__ import annotations

import gc
import os
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.conftest import package_bytes
from tilerec.errors import ConfigError
from tilerec.export.archive import WEIGHTS_AT
from tilerec.export.exporting import PreparedExport
from tilerec.export.package_file import open_package
from tilerec.serve import package_copy
from tilerec.serve.package_copy import copy_package
from tilerec.serve.package_source import FileWatch

CODE = b"stands for the compiled code"


@pytest.fixture(scope="module")
def data(made: PreparedExport, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A package whose compiled part is not one; it is copied and checked as all packages are."""
    path = tmp_path_factory.mktemp("code") / "code.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data/aotinductor/model/a.wrapper.so", CODE)
        archive.writestr("model/data/aotinductor/model/a.wrapper_metadata.json", "{}")
    return package_bytes(made, path)


@pytest.fixture
def path(data: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "model.pt2"
    path.write_bytes(data)
    return path


def bytes_of(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def test_a_copy_is_the_file_and_stays_so(path: Path, data: bytes, made: PreparedExport) -> None:
    copy = copy_package(path)
    assert bytes_of(copy.fd) == data
    path.write_bytes(b"other")
    os.truncate(path, 0)
    path.unlink()
    found = open_package(f"/proc/self/fd/{copy.fd}").weights
    assert all(np.array_equal(found[name], weight.numpy()) for name, weight in made.weights.items())
    for changed in (lambda: os.pwrite(copy.fd, b"x", 0), lambda: os.ftruncate(copy.fd, 0)):
        with pytest.raises(PermissionError):
            changed()
    copy.close()
    assert all(np.array_equal(found[name], weight.numpy()) for name, weight in made.weights.items())


def test_weights_that_take_many_reads_are_whole(path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_copy, "CHUNK_BYTES", 7)
    copy = copy_package(path)
    assert bytes_of(copy.fd) == data
    copy.close()


def memories() -> list[str]:
    """Return the descriptors of memory of packages."""
    gc.collect()  # an exception keeps its frames, and they keep what is mapped
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "tilerec-package" in os.readlink(link):
                found.append(str(link))
    return found


def refused(path: Path) -> str:
    try:
        copy_package(path)
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was copied")


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "got no archive"),
        (lambda data: data[: len(data) // 2], "got a part of a package"),
        (lambda data: flipped(data, WEIGHTS_AT), "got a damaged part .*weights"),
        (lambda data: flipped(data, data.index(CODE)), "got a damaged part"),
        (lambda data: flipped(data, data.index(b'"signature"') + 2), "[Pp]ackage"),
    ],
)  # fmt: skip
def test_damage_is_named_and_leaves_no_memory(
    path: Path, data: bytes, damage: Callable[[bytes], bytes], reason: str
) -> None:
    path.write_bytes(damage(data))
    text = refused(path)
    assert re.search(reason, text)
    assert str(path) in text
    assert not memories()


def test_a_missing_file_and_missing_memory_are_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No such file" in refused(path.with_name("none.pt2"))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "sendfile", full)
    assert re.search("No space left on device.*memory for its bytes", refused(path))
    assert not memories()


@pytest.mark.parametrize("last", [False, True], ids=["in the middle", "after the last read"])
def test_a_file_that_is_written_while_it_is_read_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    check = package_copy._check

    def write_first(*args: Any) -> None:
        if last:
            check(*args)
        with path.open("r+b") as file:
            file.seek(WEIGHTS_AT)
            file.write(b"another version")
        os.utime(path, ns=(1, 1))  # the clock of the file system may stand still for some milliseconds
        if not last:
            raise ConfigError("what a mixture of two versions looks like")

    monkeypatch.setattr(package_copy, "_check", write_first)
    with pytest.raises(ConfigError, match="got a write to the file while it was read"):
        copy_package(path)


def test_a_file_has_changed_once_it_is_at_rest(path: Path) -> None:
    watch = FileWatch(path)
    assert not any(watch.changed() for _ in range(3))
    for size in (10, 20, 30):  # it is being written
        path.write_bytes(b"x" * size)
        assert not watch.changed()
    assert watch.changed()
    assert not watch.changed()
    path.unlink()
    assert not any(watch.changed() for _ in range(3))
    path.write_bytes(b"x" * 40)
    assert [watch.changed() for _ in range(3)] == [False, True, False]
