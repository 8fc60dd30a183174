"""`tilerec checkpoint`: list, inspect, verify, diff, compact and export."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.checkpoint.test_incremental import chain
from tilerec import phase as phases
from tilerec.checkpoint import CheckpointManager
from tilerec.cli import app

COMMANDS = (
    ["list", "{}"],
    ["inspect", "{}"],
    ["verify", "{}"],
    ["diff", "{}", "{}"],
    ["compact", "{}"],
    ["export", "{}", "--out", "{out}"],
    ["export", "{}", "--dcp", "{out}"],
    ["import", "{}", "--out", "{out}"],
    ["import", "{}", "--out", "{out}", "--torchrec"],
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A log folder with two checkpoints."""
    manager = CheckpointManager(tmp_path / "checkpoints")
    for step in (10, 20):
        manager.save(step, {"model": {"rows": torch.full((4, 2), step * 1.0)}, "run": {"steps": step}})
    return tmp_path


def command(*words: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    assert found.exception is None or isinstance(found.exception, SystemExit)  # no traceback
    return found.exit_code, found.output


@contextmanager
def as_another_user() -> Iterator[None]:
    """Give up root's rights in the block: root may list every folder."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def damage(run: Path, step: int) -> None:
    file = next((run / "checkpoints" / f"step-{step}").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("words", "phase"),
    [
        (["list"], "read the manifests"),
        (["inspect"], "read the tensors"),
        (["verify"], "verify"),
        (["compact"], "compact"),
        (["export", "--out", "{out}"], "write the tensors"),
    ],
)
def test_each_phase_that_takes_a_second_gets_a_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], phase: str
) -> None:
    monkeypatch.setattr(phases, "LINE_AFTER_S", 0.0)
    code, text = command(words[0], run, *(word.format(out=tmp_path / "w.safetensors") for word in words[1:]))
    assert code == 0, text
    assert re.search(rf"load PyTorch: \d\.\d s\n(.*\n)*{phase}.*: \d\.\d s\n", text), text


def test_list_names_damaged_checkpoints(run: Path) -> None:
    assert command("list", run)[0] == 0
    (run / "checkpoints" / "step-20" / "manifest.json").unlink()
    code, text = command("list", run)
    assert code == 0
    assert "10" in text
    assert "damaged" in text
    assert command("list", run / "nothing")[0] == 1


def every_command_fails_with_one_line(
    path: object, out: Path, text: str, user: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    for words in COMMANDS:
        with user():
            code, printed = command(*(word.replace("{}", str(path)).replace("{out}", str(out)) for word in words))
        assert code == (2 if words[0] == "diff" else 1), words
        assert printed.startswith("error: "), words
        assert printed.count("\n") == 1, printed
        assert text in printed, printed
        assert "expected" in printed
        assert not out.exists()


def test_a_file_is_no_folder_of_checkpoints(run: Path, tmp_path: Path) -> None:
    every_command_fails_with_one_line(run / "checkpoints/step-10/manifest.json", tmp_path / "out", "Not a directory")


def test_a_folder_that_may_not_be_listed_is_an_error_of_one_line(run: Path, tmp_path: Path) -> None:
    command("list", run)  # imports need root's rights
    command("import", run, "--out", run / "x")
    folder = run / "checkpoints"
    folder.chmod(0)
    try:
        every_command_fails_with_one_line(folder, tmp_path / "out", "Permission denied", as_another_user)
    finally:
        folder.chmod(0o700)


def test_an_unknown_file_system_is_an_error_of_one_line(tmp_path: Path) -> None:
    every_command_fails_with_one_line("bogus://x/y", tmp_path / "out", "Protocol not known: bogus")


def test_a_store_without_credentials_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs = pytest.importorskip("s3fs")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        every_command_fails_with_one_line("s3://bucket/run", tmp_path / "out", "Unable to locate credentials")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_inspect_shows_the_newest_checkpoint_of_a_run(run: Path) -> None:
    code, text = command("inspect", run)
    assert code == 0
    assert "model.rows" in text
    assert "run.steps: 20" in text
    digests = {command("inspect", path)[1].split("digest ")[-1] for path in (run, run / "checkpoints" / "step-20")}
    assert len(digests) == 1


def test_verify_finds_a_flipped_bit(run: Path) -> None:
    code, text = command("verify", run)
    assert (code, text.count("whole")) == (0, 2)
    damage(run, 10)
    code, text = command("verify", run)
    assert code == 1
    assert "checksum" in text
    assert text.count("whole,") == 1


def test_diff_ends_with_1_for_different_checkpoints(run: Path) -> None:
    first, second = (run / "checkpoints" / f"step-{step}" for step in (10, 20))
    assert command("diff", first, first) == (0, "equal\n")
    code, text = command("diff", first, second)
    assert code == 1
    assert "8 cells, at most 10" in text
    assert "run.steps: 10 and 20" in text
    assert command("diff", first, run / "nothing")[0] == 2


def test_compact_makes_the_newest_checkpoint_whole_and_falls_back_to_the_last_whole_chain(tmp_path: Path) -> None:
    chain(tmp_path / "checkpoints", 3)
    steps = [tmp_path / "checkpoints" / f"step-{step}" for step in range(3)]
    digests = [command("inspect", path)[1].split("digest ")[-1] for path in steps]
    assert "step-1" in command("list", tmp_path)[1]
    (steps[2] / "manifest.json").unlink()
    code, text = command("compact", tmp_path)
    assert code == 0
    assert "step-2: got no manifest.json" in text
    assert "step-1: made whole" in text.replace("\n", "")
    shutil.rmtree(steps[0])
    assert command("inspect", steps[1])[1].split("digest ")[-1] == digests[1]
    assert "it is whole" in command("compact", steps[1])[1]
    assert command("verify", steps[1])[0] == 0
    assert command("compact", steps[2])[0] == 1


def test_export_writes_the_chosen_tensors(run: Path) -> None:
    for _ in range(2):  # the second time, the result is there already
        assert command("export", run, "--out", run / "a.safetensors", "--only", "model.*")[0] == 0
    assert torch.equal(load_file(run / "a.safetensors")["model.rows"], torch.full((4, 2), 20.0))
    assert command("export", run, "--out", run / "b.safetensors", "--only", "other.*")[0] == 1
    assert not (run / "b.safetensors").exists()


def test_import_and_export_of_torchs_own_checkpoints(run: Path) -> None:
    assert command("export", run, "--dcp", run / "dcp") == (0, f"wrote {run / 'dcp'}: 1 tensors\n")
    code, text = command("import", run / "dcp", "--out", run / "back")
    assert (code, text) == (0, f"wrote {run / 'back'}: 1 tensors\n")
    assert command("diff", run, run / "back") == (0, "equal\n")
    assert command("import", run / "dcp", "--out", run / "back")[0] == 1
    assert command("export", run, "--dcp", run / "weights", "--part", "model")[0] == 0
    assert command("import", run / "weights", "--out", run / "part", "--part", "model")[0] == 0
    assert "model.rows" in command("inspect", run / "part")[1]


def test_options_of_import_and_export_that_exclude_each_other_are_refused(run: Path) -> None:
    for words in (
        ["export", run],
        ["export", run, "--out", run / "a", "--dcp", run / "b"],
        ["export", run, "--dcp", run / "b", "--only", "model.*"],
        ["export", run, "--out", run / "a", "--part", "model"],
        ["import", run, "--out", run / "a", "--steps", "3"],
        ["import", run, "--out", run / "a", "--torchrec", "--part", "model"],
    ):
        code, text = command(*words)
        assert code == 1
        assert "expected --" in text


def test_a_checkpoint_of_torchrec_is_imported(tmp_path: Path) -> None:
    folder = Path(__file__).parent / "checkpoint" / "files" / "torchrec"
    code, text = command("import", folder, "--out", tmp_path / "step-3", "--torchrec")
    assert (code, "--steps N" in " ".join(text.split())) == (1, True)
    assert command("import", folder, "--out", tmp_path / "step-3", "--torchrec", "--steps", 3)[0] == 0
    assert command("verify", tmp_path / "step-3")[0] == 0
