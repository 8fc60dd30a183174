"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from tilerec import atomic_file
from tilerec.atomic_file import new_folder, open_replacement, write_file
from tilerec.errors import ConfigError, FileError


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("before", [None, "earlier"])
def test_a_write_that_fails_leaves_the_earlier_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, before: str | None
) -> None:
    path = tmp_path / "plan.json"
    if before is not None:
        path.write_text(before)
    monkeypatch.setattr(atomic_file.os, step, _full)
    with pytest.raises(FileError, match=r"Plan: .*plan\.json cannot be written: got 'No space left.* 5 bytes") as e:
        write_file(path, "later", "Plan")
    assert e.value.errno == errno.ENOSPC
    assert ("the earlier file is unchanged" in str(e.value)) is (before is not None)
    assert [item.name for item in tmp_path.iterdir()] == ([] if before is None else ["plan.json"])
    assert before is None or path.read_text() == before


def test_an_interrupt_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic_file.os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "a", "x", "File")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("code", "raises"), [(errno.EIO, True), (errno.ENOSPC, True), (errno.EINVAL, False)])
def test_a_folder_whose_fsync_fails_is_an_error_unless_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, raises: bool
) -> None:
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    path = tmp_path / "plan.json"
    path.write_text("earlier")
    monkeypatch.setattr(atomic_file.os, "fsync", failing)
    if raises:
        with pytest.raises(FileError, match=r"Plan: .*plan\.json: got .* from the fsync of its folder") as error:
            write_file(path, "later", "Plan")
        assert error.value.errno == code
    else:
        write_file(path, "later", "Plan")
    assert path.read_text() == "later"
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]


def test_file_and_folder_are_synced_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(atomic_file.os, "fsync", synced)
    monkeypatch.setattr(atomic_file.os, "replace", renamed)
    write_file(tmp_path / "a", b"x\r\n", "File")
    assert steps == ["file", "rename", "folder"]
    assert (tmp_path / "a").read_bytes() == b"x\r\n"


def test_a_new_file_has_the_permissions_of_open_and_a_replaced_one_keeps_its_own(tmp_path: Path) -> None:
    usual, new = tmp_path / "usual", tmp_path / "new"
    usual.touch()
    write_file(new, "x", "File")
    assert stat.S_IMODE(new.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    new.chmod(0o640)
    write_file(new, "y", "File")
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


def test_a_file_without_permission_to_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("earlier")
    monkeypatch.setattr(atomic_file.os, "access", lambda *_: False)  # root may write everything
    with pytest.raises(FileError, match="Permission denied"):
        write_file(path, "later", "File")
    assert path.read_text() == "earlier"


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    link.symlink_to(target)
    for text in ("new", "again"):
        write_file(link, text, "File")
        assert link.is_symlink()
        assert target.read_text() == text


def test_a_pipe_is_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_file(path, "x", "File")
    assert os.read(reader, 10) == b"x"
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_an_error_is_one_of_the_callers_and_one_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file or directory") as caught:
        write_file(tmp_path / "none" / "a", "x", "File")
    assert isinstance(caught.value, (ConfigError, OSError))
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(FileError, match="Is a directory"):
        write_file(tmp_path, "x", "File")


def test_a_file_written_in_a_block_appears_when_the_block_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("earlier")
    broken = open_replacement(path, "File")
    broken.__enter__().write(b"half")
    assert not broken.__exit__(KeyError, KeyError(), None)
    assert path.read_text() == "earlier"
    with open_replacement(path, "File") as file:
        file.write(b"later")
        assert path.read_text() == "earlier"
    assert path.read_text() == "later"
    assert list(tmp_path.iterdir()) == [path]
    with (
        pytest.raises(FileError, match=r"File: .* cannot be written"),
        open_replacement(tmp_path / "none" / "a", "File") as file,
    ):
        file.write(b"x")


@pytest.mark.parametrize("before", [False, True])
def test_a_new_folder_appears_with_all_of_its_files_or_not_at_all(tmp_path: Path, before: bool) -> None:
    path = tmp_path / "up" / "served"
    if before:
        path.mkdir(parents=True)
    with (
        pytest.raises(FileError, match=r"--out: .*served cannot be written: got 'No space left"),
        new_folder(path, "--out"),
    ):
        _full()
    assert list((tmp_path / "up").iterdir()) == ([path] if before else [])
    with new_folder(path, "--out") as folder:
        (folder / "a").touch()
    assert [item.name for item in (tmp_path / "up").iterdir()] == ["served"]
    assert [item.name for item in path.iterdir()] == ["a"]
    other = tmp_path / "other"
    other.mkdir()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
