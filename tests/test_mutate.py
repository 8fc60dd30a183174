"""The mutation run's own parts: which edits it makes, which of them it draws, and how equivalents are read."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "mutate.py"
if not SCRIPT.exists():
    pytest.skip("part of the repository, not of the wheel", allow_module_level=True)


@pytest.fixture(scope="module")
def mutate() -> Any:
    spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("x = a < b", ["x = a <= b", "x = a >= b"]),
        ("x = a not in b", ["x = a in b"]),
        ("x = a is not b", ["x = a is b"]),
        ("x = a * (b - c)", ["x = a // (b - c)", "x = a * (b + c)"]),
        ("x += a", ["x -= a"]),
        ("x = a and b or c", ["x = a or b or c", "x = a and b and c"]),
        ("x = not a", ["x = a"]),
        ("x = -a", ["x = a"]),
        ("x = 8", ["x = 7", "x = 9"]),
        ("x = 0", ["x = 1"]),
        ("x = True", ["x = False"]),
        ("x = 0.5", ["x = 1.0"]),
        ("é = f(é, a) + b", ["é = f(é, a) - b"]),
    ],
)
def test_a_mutant_changes_one_operator_or_constant(mutate: Any, line: str, made: list[str]) -> None:
    mutants = mutate.mutants_of("f.py", line.encode())
    assert sorted(mutant.after for mutant in mutants) == sorted(made)
    assert {(mutant.before, mutant.line) for mutant in mutants} == {(line, 1)}


@pytest.mark.parametrize(
    "source",
    [
        "'''1 + 2'''", "assert a < b", "raise E(f'{a + 1}')", "def f(a: int | None = None) -> A[3]: ...",
        "x: Final[1]", "A = B | None", "zip(a, b, strict=True)", "@d(n=1)\nclass C: ...", "x = cast('T', 1)",
    ],
)  # fmt: skip
def test_text_types_and_assertions_are_left_alone(mutate: Any, source: str) -> None:
    assert mutate.mutants_of("f.py", source.encode()) == []


def test_functions_that_a_gpu_alone_runs_are_left_alone(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = b"def f():\n  x = 0\nclass C:\n  def f(self):\n    x = 1 < a\n  def g(self):\n    y = a + b\n"
    monkeypatch.setitem(mutate.GPU_ONLY, "p.py", ("C.f",))
    assert {mutant.before for mutant in mutate.mutants_of("p.py", source)} == {"x = 0", "y = a + b"}
    assert len(mutate.mutants_of("q.py", source)) > len(mutate.mutants_of("p.py", source))


def test_sizes_of_what_is_timed_are_left_alone(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = b"SIZES = (1, 2)\nOTHERS = 3\n"
    for path, names in mutate.TIMED.items():
        assert all(f"\n{name} = " in (mutate.ROOT / path).read_text() for name in names)
    monkeypatch.setitem(mutate.TIMED, "p.py", ("SIZES",))
    assert {mutant.before for mutant in mutate.mutants_of("p.py", source)} == {"OTHERS = 3"}


def test_the_functions_listed_as_the_gpus_exist(mutate: Any) -> None:
    for path, names in mutate.GPU_ONLY.items():
        tree = ast.parse((mutate.ROOT / path).read_text())
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        for own in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            found |= {f"{own.name}.{node.name}" for node in own.body if isinstance(node, ast.FunctionDef)}
        assert found.issuperset(names), path


def test_a_sample_keeps_its_mutants_when_another_line_is_edited(mutate: Any) -> None:
    lines = [f"x{i} = {i} + y{i}" for i in range(30)]
    before = mutate.sample(mutate.mutants_of("f.py", "\n".join(lines).encode()), 3, 20)
    lines[7] = "z = 0"
    after = mutate.sample(mutate.mutants_of("f.py", "\n".join(["", *lines]).encode()), 3, 20)
    assert len({mutant.key for mutant in before} & {mutant.key for mutant in after}) >= 16
    other = mutate.sample(mutate.mutants_of("f.py", "\n".join(lines).encode()), 4, 20)
    assert {mutant.key for mutant in other} != {mutant.key for mutant in after}


def test_an_equivalent_needs_its_reason(mutate: Any) -> None:
    entry = "# a comment\n\nf.py\n- x = 1\n+ x = 2\nOne reason,\nin two lines.\n"
    assert mutate.read_equivalents(entry) == {("f.py", "x = 1", "x = 2"): "One reason, in two lines."}
    with pytest.raises(SystemExit, match="expected a path"):
        mutate.read_equivalents("f.py\n- x = 1\n+ x = 2\n")


def test_the_listed_equivalents_are_readable(mutate: Any) -> None:
    assert mutate.read_equivalents(mutate.EQUIVALENTS.read_text())


def test_equivalent_mutants_do_not_count_for_the_percentage(mutate: Any) -> None:
    mutant = mutate.mutants_of("f.py", b"x = 0")[0]
    assert mutate.Score("room", noticed=19, equivalent=4, survivors=(mutant,)).percent == 95.0
    assert mutate.Score("room").percent == 100.0


class OneTestElsewhere:
    """A copy of a package of which one test file outside of the room notices every mutant; the room's own pass."""

    def __init__(self, broken: bool) -> None:
        self.broken, self.mutated = broken, False
        self.ran: list[tuple[tuple[str, ...], bool]] = []  # test files, and whether the package was mutated

    def run(self, files: list[str], limit: float) -> tuple[str, dict[str, float]]:
        self.ran.append((tuple(files), self.mutated))
        fails = "tests/other.py" in files and (self.mutated or self.broken)
        return "a test failed" if fails else "passed", dict.fromkeys(files, 0.1)

    def mutate(self, mutant: Any) -> None:
        self.mutated = True

    def restore(self, mutant: Any) -> None:
        self.mutated = False

    def last_line(self) -> str:
        return "FAILED tests/other.py::test"


OWN, FAR, OTHER = "tests/own.py", "tests/far.py", "tests/other.py"


@pytest.fixture
def two_files_elsewhere(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "test_files", lambda room: [OWN])
    monkeypatch.setattr(mutate, "other_test_files", lambda room: [FAR, OTHER])
    monkeypatch.setattr(mutate, "nearest", lambda path, files: [f for f in files if f != OWN])
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # what a run sets is taken back
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)


@pytest.mark.usefixtures("two_files_elsewhere")
def test_what_notices_a_mutant_elsewhere_is_run_once_on_the_unchanged_package(mutate: Any) -> None:
    copy, mutants = OneTestElsewhere(broken=False), mutate.mutants_of("f.py", b"x = 8")
    score = mutate.run_room("sparse", mutants, copy, set())
    assert (score.noticed, score.survivors) == (2, ())
    first = [((OWN,), True), ((FAR, OTHER), True), ((OTHER,), False)]
    assert copy.ran == [((OWN,), False), *first, ((OWN,), True), ((FAR, OTHER), True)]


@pytest.mark.usefixtures("two_files_elsewhere")
def test_a_test_that_fails_on_the_unchanged_package_notices_nothing(
    mutate: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, mutants = OneTestElsewhere(broken=True), mutate.mutants_of("f.py", b"x = 8")
    score = mutate.run_room("sparse", mutants, copy, set())
    assert (score.noticed, score.survivors) == (0, tuple(mutants))
    again = [((OWN,), True), ((FAR,), True)]
    first = [((OWN,), True), ((FAR, OTHER), True), ((OTHER,), False), ((FAR,), True)]
    assert copy.ran == [((OWN,), False), *first, *again]
    assert capsys.readouterr().out.count("unchanged package: tests/other.py\n") == 1
