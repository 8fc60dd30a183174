"""The import hook: names of TorchRec are objects of tilerec, and a name without one raises with the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

import tilerec
from tilerec.compat.standins.name_table import absent, names_of, other_numbers, reason_of_absence
from tilerec.compat.standins.session import PATH, installed


def test_every_name_of_the_table_is_there() -> None:
    for module, names in names_of().items():
        for name, home in names.items():
            assert home.load() is not None, f"{module}.{name}"


def test_every_name_with_other_numbers_is_in_the_table_and_no_name_is_there_and_absent() -> None:
    known = {name for names in names_of().values() for name in names}
    assert set(other_numbers()) <= known
    assert not [key for key in absent() if key[1] in names_of().get(key[0], {})]


def test_modules_and_names_import_in_every_form() -> None:
    with installed() as session:
        import torchrec  # type: ignore[import-not-found]
        import torchrec.distributed as distributed  # type: ignore[import-not-found]
        from torchrec.modules.mlp import MLP  # type: ignore[import-not-found]

        from tilerec.modules import MLP as own

        assert MLP is own
        assert torchrec.KeyedJaggedTensor is tilerec.KeyedJaggedTensor
        assert distributed.planner.ParameterConstraints is tilerec.ParameterConstraints
        assert issubclass(torchrec.EmbeddingBagConfig, tilerec.EmbeddingBagConfig)
        assert "EmbeddingBagCollection" in dir(torchrec)
        assert torchrec.__version__
        assert ("torchrec.modules.mlp", "MLP") in session.report.names
        scope: dict[str, object] = {}
        exec("from torchrec.datasets.movielens import *", scope)
        assert scope["RATINGS_FILENAME"] == "ratings.csv"
    assert not [name for name in sys.modules if name.startswith("torchrec")]
    assert PATH not in sys.path


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from torchrec.distributed.comm import get_loca_size", "nearest known name is .*comm.get_local_size"),
        ("from torchrec import DLRM", r"Did you mean torchrec\.models\.dlrm\.DLRM\?"),
        ("import torchrec.distributed.dist_data", "classes of TorchRec's exchange"),
        ("from torchrec.distributed.dist_data import KJTAllToAll", "classes of TorchRec's exchange"),
        ("import torchrec.nonsense", "No known name is similar"),
    ],
)
def test_a_name_without_a_stand_in_raises_with_the_way_out(statement: str, message: str) -> None:
    with installed(), pytest.raises(ImportError, match=message) as error:
        exec(statement, {})
    assert "docs/torchrec-users.md" in str(error.value)


def test_an_attribute_without_a_stand_in_is_an_attribute_error() -> None:
    with installed():
        import torchrec

        assert not hasattr(torchrec, "nonsense")
        with pytest.raises(AttributeError, match="no stand-in"):
            _ = torchrec.nonsense


def test_a_torchrec_that_is_already_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", ModuleType("torchrec"))
    with pytest.raises(ImportError, match="expected that it is not imported yet"), installed():
        pass


def test_processes_of_the_program_find_the_stand_ins_through_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned process has the parent's `sys.path` and environment, and no hook."""
    with installed():
        assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == PATH
    monkeypatch.syspath_prepend(PATH)
    monkeypatch.setenv("PYTHONPATH", PATH)
    from tilerec.compat.standins import session

    torchrec = import_module("torchrec")
    try:
        assert torchrec.KeyedTensor is tilerec.KeyedTensor
        assert session._installed is not None
    finally:
        assert session._installed is not None
        session._installed.stop()
        session._installed = None


def test_reasons_name_the_nearest_module() -> None:
    assert "torchrec.modules.mlp.MLP" in reason_of_absence("torchrec.modules", "MLP")


def test_a_program_runs_with_its_arguments_and_a_report_at_the_end(tmp_path: os.PathLike[str]) -> None:
    program = os.path.join(tmp_path, "program.py")
    with open(program, "w") as file:
        file.write(
            "import sys\nfrom torchrec import EmbeddingBagCollection, EmbeddingBagConfig\n"
            "config = EmbeddingBagConfig(num_embeddings=4, embedding_dim=2, name='t', need_pos=True)\n"
            "print(sys.argv[1:], __name__)\n"
        )
    command = [sys.executable, "-m", "tilerec.compat.torchrec", program, "--epochs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--epochs', '2'] __main__\n"
    assert "substituted by tilerec: 2 names" in done.stderr
    assert "torchrec: EmbeddingBagCollection, EmbeddingBagConfig" in done.stderr
    assert "ignored (no effect): 1" in done.stderr
    assert "numbers that differ from TorchRec's: 1" in done.stderr
