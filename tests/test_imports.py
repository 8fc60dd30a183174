"""What a fresh process imports: nothing heavy before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tilerec
import tilerec.serve
from tilerec.lazy_names import MODULES
from tilerec.serve.lazy_names import MODULES as SERVE

HEAVY = (
    "torch",
    "numpy",
    "torch._dynamo",
    "sympy",
    "torchmetrics",
    "pyarrow",
    "tensorboard",
    "rich.progress",
    "tilerec.train.loop",
)


def _modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('modules', *sys.modules)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(("package", "modules"), [(tilerec, MODULES), (tilerec.serve, SERVE)], ids=["all", "serve"])
def test_names_of_a_package_are_those_that_type_checkers_see(package: ModuleType, modules: dict[str, str]) -> None:
    """They are listed twice: as imports for type checkers, and by module for their import on first use."""
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == {name: home for name, home in modules.items() if name != "__version__"}  # a text for checkers
    assert set(seen) <= set(dir(package))
    for name in seen:
        assert getattr(package, name) is not None


def test_submodules_are_attributes_and_other_names_are_errors() -> None:
    assert tilerec.parallel.shard is not None
    with pytest.raises(AttributeError, match="module 'tilerec' has no attribute 'EmbedingBagCollection'"):
        _ = tilerec.EmbedingBagCollection  # type: ignore[attr-defined]


def test_an_op_is_imported_with_its_kernels() -> None:
    """Otherwise the reference would run: hashes of ids took three times as long."""
    assert "tilerec.ops.backends" in _modules_after("from tilerec.data.rows import hash_rows")


_BLOCKED = """
import importlib
import sys


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pyarrow", "rich", "typer", "torchmetrics", "tensorboard", "safetensors", "click"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])


sys.meta_path.insert(0, Block())
import tilerec.lazy_names
from tilerec.errors import MissingExtraError

for name in tilerec.lazy_names.MODULES:
    getattr(tilerec, name)
for name in ("checkpoint", "export", "models", "optim", "parallel", "pipelines", "planner", "quantized", "viz"):
    importlib.import_module(f"tilerec.{name}")
for name in ("data", "train", "metrics", "recipes", "retrieval", "testing"):
    try:
        importlib.import_module(f"tilerec.{name}")
    except MissingExtraError as error:
        print(name, error)
try:
    from tilerec.__main__ import main

    main()
except SystemExit as error:
    print(error)
"""


def test_the_library_needs_torch_and_numpy_alone_and_other_parts_name_their_extra() -> None:
    done = subprocess.run([sys.executable, "-c", _BLOCKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["data", "train", "metrics", "recipes", "retrieval", "testing"]
    assert all("Run pip install 'tilerec[" in line for line in lines)
    assert lines[-1].endswith("Run pip install 'tilerec[cli]'.")


def test_help_imports_neither_torch_nor_numpy_nor_what_needs_them() -> None:
    found = _modules_after(
        "from typer.testing import CliRunner\n"
        "from tilerec.cli import app\n"
        "for more in ([], ['plan'], ['plan', 'make'], ['train'], ['serve'], ['checkpoint'], ['data']):\n"
        "    assert CliRunner().invoke(app, [*more, '--help']).exit_code == 0\n"
    )
    assert "tilerec.plan_cli.make" in found
    assert found.isdisjoint({*HEAVY, "rich.markdown"})


def test_a_server_begins_to_read_its_package_before_it_imports_its_other_modules() -> None:
    first = _modules_after("import tilerec.serve.server, tilerec.serve.server_options")
    assert first.isdisjoint(HEAVY)
    second = _modules_after("import tilerec.serve.package_copy, tilerec.serve.package_source")
    assert second.isdisjoint({"starlette", "uvicorn", "tilerec.delta", "tilerec.checkpoint", "tilerec.serve.app"})


def test_a_command_imports_no_other_command() -> None:
    """To make all commands took longer than to import a server's modules."""
    found = _modules_after(
        "from typer.testing import CliRunner\n"
        "from tilerec.cli import app\n"
        "assert CliRunner().invoke(app, ['serve', '--help']).exit_code == 0\n"
    )
    assert "tilerec.run_cli.serve" in found
    assert found.isdisjoint({"tilerec.run_cli.train", "tilerec.plan_cli.app", "tilerec.checkpoint_cli"})


def test_a_server_imports_no_library_while_a_thread_loads_those_of_torch() -> None:
    """Such an import waits for the system's loader, and all other threads wait for the import."""
    found = _modules_after(
        "import sys\n"
        "from tilerec.serve.server import _IMPORTS, _LIBRARIES, _import\n"
        "import tilerec.serve.package_copy, tilerec.serve.package_source, tilerec.export.torch_library\n"
        "def libraries(): return {name for name, module in sys.modules.items()\n"
        "    if str(getattr(module, '__file__', '')).endswith('.so')}\n"
        "_import(_LIBRARIES)\n"
        "before = libraries()\n"
        "_import(_IMPORTS)\n"
        "assert libraries() == before, libraries() - before\n"
    )
    assert "tilerec.serve.workers" in found


def test_a_server_imports_no_torch() -> None:
    """torch's modules took most of the time of a start, and most of a server's memory."""
    found = _modules_after(
        "from importlib import import_module\n"
        "from tilerec.serve.server import _IMPORTS, _LIBRARIES\n"
        "for name in _LIBRARIES + _IMPORTS:\n"
        "    import_module(name)\n"
    )
    assert "tilerec.serve.workers" in found
    assert found.isdisjoint({"torch", "tilerec.ops", "tilerec.delta", "tilerec.checkpoint"})


def test_evaluating_and_sharding_managed_collision_imports_no_compiler() -> None:
    """It took 823 modules and two seconds at the first batch."""
    found = _modules_after(
        """
import sys
import torch
from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tilerec.modules import (
    HashZchManagedCollisionModule, ManagedCollisionCollection, ManagedCollisionEmbeddingBagCollection
)
from tilerec.parallel import shard
from tilerec.testing import run_virtual_ranks

def users():
    config = EmbeddingBagConfig(num_embeddings=64, embedding_dim=4, name="user", feature_names=["user"])
    ids = HashZchManagedCollisionModule(64, "cpu", eviction_policy_name="LRU_EVICTION", total_num_buckets=2)
    collection = ManagedCollisionCollection({"user": ids}, [config])
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection([config]), collection, return_remapped_features=True
    )

def run(module):
    batch = KeyedJaggedTensor.from_lengths_sync(["user"], torch.tensor([-1, 10**18, -1]), torch.tensor([1, 0, 2]))
    for training in (True, False):
        module.train(training)
        with torch.no_grad():
            pooled, _ = module(batch)
            pooled = getattr(pooled, "wait", lambda: pooled)()

alone = users()
before = set(sys.modules)
run(alone)
assert not set(sys.modules) - before, sorted(set(sys.modules) - before)
run_virtual_ranks(2, lambda group: run(shard(users(), mesh=group)))
"""
    )
    assert found.isdisjoint({*HEAVY} - {"torch", "numpy", "pyarrow"})  # tilerec.testing draws from tilerec.data


def test_a_star_imports_the_names_of_the_package() -> None:
    names: dict[str, object] = {}
    exec("from tilerec import *", names)
    assert {*MODULES, "TilerecError", "ConfigError"} <= set(names)
