"""Rules of the house that a linter does not know. A failure names the file and the line."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tilerec

PACKAGE = Path(tilerec.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
DOORS = [path for path in MODULES if path.name == "__init__.py"]
ROOMS = [path for path in MODULES if path.name not in ("__init__.py", "__main__.py")]
REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "benchmarks" / "README.md",
    *(REPOSITORY / "docs").glob("*.md"),
]
in_repository = pytest.mark.skipif(
    not (REPOSITORY / "scripts").exists(),
    reason="pages and scripts are part of the repository, not of the wheel",
)


def _where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 1)}"


def _imports_at_run_time(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node


def test_the_rules_see_the_package() -> None:
    assert len(ROOMS) > 20
    assert PACKAGE / "__init__.py" in DOORS


def test_an_init_file_is_a_list_of_names() -> None:
    """Code in an `__init__.py` runs at import, in an order nobody chose."""
    broken = []
    for path in DOORS:
        body = ast.parse(path.read_text()).body
        for_checkers = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        inside = [part for node in for_checkers for part in (*node.body, *node.orelse)]
        for node in [*(node for node in body if node not in for_checkers), *inside]:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = isinstance(node, ast.Assign) and all(
                isinstance(target, ast.Name) and target.id in ("__all__", "__version__") for target in node.targets
            )
            if not (docstring or names or isinstance(node, (ast.Import, ast.ImportFrom))):
                broken.append(_where(path, node))
    assert not broken, f"more than imports and __all__ in {broken}; move it to a file with a noun for a name"


def _private_names_of_torch(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield names with a leading underscore that are reached from torch or triton, or from a torch object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "triton"):
            private = any(part.startswith("_") for part in (node.module or "").split("."))
            if private or any(alias.name.startswith("_") for alias in node.names):
                yield node
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            from_torch = isinstance(root, ast.Name) and root.id in ("torch", "triton", "_aten", "aten")
            if from_torch or node.attr in PRIVATE_OF_OBJECTS:
                yield node


PRIVATE_OF_OBJECTS = {
    # torch's own names on modules, optimizers, wrappers, tensors and process groups.
    "_modules", "_buffers", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_active_ddp_module",
    "_module_parameters", "_set_params_and_buffers_to_ignore_for_model", "_get_backend", "_local_tensor", "_is_view",
    "_version_counter", "_scale", "_grad_fn", "_optimizer_state_dict_pre_hooks", "_is_full_backward_hook",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks", "_forward_hooks", "_backward_hooks",
    "_optimizer_load_state_dict_post_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_dtensor__new__", "_schema",
    "_execution_engine",
}  # fmt: skip


def test_one_file_alone_uses_private_names_of_torch() -> None:
    broken = [
        _where(path, node)
        for path in ROOMS
        if path.name != "torch_private.py"
        for node in _private_names_of_torch(ast.parse(path.read_text()))
    ]
    assert not broken, f"private names of torch in {broken}; give them a function in tilerec/torch_private.py"


def test_inside_the_library_the_defining_file_is_imported() -> None:
    """`from tilerec.sparse import KeyedJaggedTensor` in the library ties a room to the whole floor."""
    broken = []
    for path in ROOMS:
        for node in _imports_at_run_time(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                if node.level:
                    broken.append(f"{_where(path, node)} (relative)")
                    continue
                for alias in node.names if node.module else []:
                    if not (node.module or "").startswith("tilerec"):
                        continue
                    target = PACKAGE.parent.joinpath(*(node.module or "").split("."))
                    imports_a_module = (target / f"{alias.name}.py").exists() or (target / alias.name).is_dir()
                    if target.is_dir() and not imports_a_module:
                        broken.append(f"{_where(path, node)} ({alias.name} through {node.module}/__init__.py)")
            else:
                for alias in node.names:
                    if alias.name == "tilerec":
                        broken.append(f"{_where(path, node)} (import tilerec)")
    assert not broken, f"imported through a package door: {broken}; name the file that defines it"


def test_no_public_name_leads_to_a_stub() -> None:
    broken = [
        _where(path, node)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, (ast.Call, ast.Name))
        and ast.unparse(node.exc).startswith("NotImplementedError")
    ]
    assert not broken, f"NotImplementedError in {broken}; build it, or take the name away"


def test_result_files_are_written_by_the_one_helper() -> None:
    """A file that is written in place is lost where the disk is full."""
    streams = {
        "train/run_logger.py": 2,
        "testing/worker.py": 1,
        "atomic_file.py": 2,
        "checkpoint/folder.py": 2,
        "export/package_writing.py": 1,
    }  # logs that grow; the helper; files that count once a manifest names them; a part of an archive
    found: dict[str, int] = {}
    for path in ROOMS:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name))):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            words = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
            opens = name in ("open", "fdopen") and any(str(word)[:1] in "wax" for word in words if word)
            if opens or name in ("write_text", "write_bytes", "tofile"):
                where = path.relative_to(PACKAGE).as_posix()
                found[where] = found.get(where, 0) + 1
    assert found == streams, "a result file is written by tilerec.atomic_file.write_file"


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_the_compiler_is_not_imported_with_the_package() -> None:
    """`torch.compiler.disable` imports it where it decorates: more than a second for every program that starts."""
    broken = []
    for path in ROOMS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                broken += [
                    _where(path, decorator)
                    for decorator in node.decorator_list
                    if "torch.compiler.disable" in ast.unparse(decorator) or "_disable_dynamo" in ast.unparse(decorator)
                ]
    assert not broken, f"{broken}: write tilerec.ops.runtime.graph_break.graph_break, which does not import it"


# ---------------------------------------------------------------------------------------------------------- sizes


@pytest.fixture(scope="module")
def check_sizes() -> Any:
    path = REPOSITORY / "scripts" / "check_sizes.py"
    spec = importlib.util.spec_from_file_location("check_sizes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@in_repository
def test_files_functions_classes_and_imports_are_within_their_limits(check_sizes: Any) -> None:
    found = check_sizes.complaints(check_sizes.sizes_over_limits(), check_sizes.read_exceptions())
    assert not found, "\n".join(found)


@in_repository
def test_the_list_of_size_exceptions_is_sorted() -> None:
    lines = (REPOSITORY / "scripts" / "size_exceptions.txt").read_text().splitlines()
    assert lines == sorted(set(lines))


@in_repository
def test_sizes_are_measured_and_exceptions_can_only_shrink(check_sizes: Any, tmp_path: Path) -> None:
    package = tmp_path / "rooms"
    package.mkdir()
    (package / "__init__.py").write_text("")
    body = "\n".join("    x = 0" for _ in range(81))
    (package / "long.py").write_text(f"from rooms import other\ndef f():\n{body}\n")
    (package / "other.py").write_text("class C:\n" + "\n".join(f"    def f{i}(self): ..." for i in range(41)))
    found = check_sizes.sizes_over_limits(package)
    assert found == {("function", "rooms/long.py", "f"): 82, ("methods", "rooms/other.py", "C"): 41}
    assert check_sizes.complaints(found, found) == []
    grown = {**found, ("function", "rooms/long.py", "f"): 81}
    assert "function f is 82; expected at most 81" in check_sizes.complaints(found, grown)[0]
    unused = {**found, ("file", "rooms/other.py", "-"): 700}
    assert "Remove its line" in check_sizes.complaints(found, unused)[0]


# ---------------------------------------------------------------------------------------------------------- paths

A_PATH = re.compile(r"(?<![\w./:-])(?!self\.)((?:[\w.-]+/)*[\w-]+\.(?:py|md|cpp|h|js))(?![\w/])")
PROGRAMS_OF_USERS = {"ported.py", "model.py", "train.py"}
RECORDS = {"log.md"}  # what was measured, with the files of its time


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page, or of the comments and strings of a Python file."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


@in_repository
@pytest.mark.parametrize("room", ["benchmarks", "scripts", "examples"])
def test_names_that_programs_import_exist(room: str) -> None:
    """Benchmarks and scripts do not run in the tests, so a rename would break them unseen."""
    programs = sorted((REPOSITORY / room).rglob("*.py"))
    assert programs
    missing = []
    for path in programs:
        for node in _imports_at_run_time(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tilerec":
                module = importlib.import_module(str(node.module))
                for name in (one.name for one in node.names):
                    submodule = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}")
                    if not hasattr(module, name) and not submodule:
                        missing.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}: {node.module}.{name}")
    assert not missing, "these names do not exist:\n" + "\n".join(missing)


@in_repository
def test_every_file_that_prose_names_exists() -> None:
    """A path begins at the repository, `tilerec`, `tests` or a folder around the text. Pages may use bare names."""
    rooms = ("tilerec", "tests", "scripts", "benchmarks", "docs", "native", "examples")
    names = {path.name for room in rooms for path in (REPOSITORY / room).rglob("*.*")}
    missing = []
    for path in [*PAGES, *MODULES]:
        around = [folder for folder in path.parents if folder.is_relative_to(REPOSITORY)]
        roots = [REPOSITORY, PACKAGE, REPOSITORY / "tests", *around]
        known = PROGRAMS_OF_USERS | (names if path.suffix == ".md" else set())
        for line, text in () if path.name in RECORDS else _prose(path):
            for found in A_PATH.findall(text):
                if found not in known and not any((root / found).exists() for root in roots):
                    missing.append(f"{path.relative_to(REPOSITORY)}:{line}: {found}")
    assert not missing, "these files do not exist:\n" + "\n".join(missing)
