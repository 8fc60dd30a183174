"""Mutation run: change one operator or constant of the package, run the tests of its room, list undetected changes.

    python scripts/mutate.py                                     # all rooms, the default seed and count
    python scripts/mutate.py --rooms sharding ops --seed 7 --count 20
    python scripts/mutate.py --at tilerec/sharding/update.py:277 # every mutant of one line

A mutant is one edit of one line:

    comparison   a < b    ->  a <= b, a >= b        boolean   a and b  ->  a or b
    arithmetic   a * b    ->  a // b                not       not a    ->  a
    constant     8        ->  9, 7                  sign      -a       ->  a

Each mutant runs in its own process, forked after the import of torch. The mutated file lies in a temporary copy of the
repository; the working tree is only read. A room is a package with its folder of tests. Test files run in this order,
the fastest first within each group:

1. files of the room that import the mutated file or have its name
2. the other files of the room
3. files of other rooms that import the mutated file

A failed test, a crash, a time-out and a process beyond `MOST_MEMORY` all count as noticed. In another room, only files
that pass on the unchanged package count.

The sample depends on the seed and on the text of the lines alone: an edit elsewhere in a room keeps its other mutants.

`scripts/mutate_equivalents.txt` lists mutants that no test can notice, each with the reason. They do not count.

These are not mutated:

- annotations, decorators, assertions, error messages
- the Triton kernels (`make sanitize` covers them)
- functions that run on a GPU alone (`GPU_ONLY`): tests/cuda covers them, on a GPU or by `make simulated-gpu`
- sizes of models that are only timed (`TIMED`)

Exits with 1 if the tests of a room notice less than `--floor` percent of its mutants.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENTS = Path(__file__).with_name("mutate_equivalents.txt")

MOST_MEMORY = 8 << 30
"""Bytes that a mutant's process may occupy; beyond this the process is killed."""

SECONDS_PER_TEST = 60
"""Time limit of one test. The slowest takes 5 s, or several times as long on a busy machine if it starts processes."""


@dataclass(frozen=True)
class Room:
    """Folders of sources that are mutated, and the folders of the tests that must notice the mutants."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "sharding": Room(("tilerec/sharding",), ("tests/sharding",)),
    "ops": Room(("tilerec/ops",), ("tests/ops", "tests/ops/cpu")),
    "storage": Room(("tilerec/storage",), ("tests/storage",)),
    "planner/cost": Room(("tilerec/planner/cost",), ("tests/planner/cost",)),
    "optim": Room(("tilerec/optim",), ("tests/optim",)),
    "sparse": Room(("tilerec/sparse",), ("tests/sparse",)),
}

GPU_ONLY = {
    "tilerec/ops/runtime/readback.py": ("_new_copy",),
    "tilerec/storage/host_rows.py": ("_DeviceView.__init__", "_over_pinned", "_forget_error", "_pin"),
    "tilerec/storage/prefetched_results.py": ("StreamEvent.__init__", "StreamEvent.wait"),
}
"""Functions of which no line runs without a GPU, by file. A function with any other line is not listed here: its GPU
lines are entries of the list of equivalents."""

TIMED = {"tilerec/planner/cost/whole_steps.py": ("SHAPES",)}
"""Constants with sizes of models whose steps are timed, by file: a similar size is an equally good measurement."""

# ---------------------------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """One edit: bytes `[start, end)` of a file become `new`."""

    path: str
    line: int
    start: int
    end: int
    new: bytes
    before: str  # the line, without its indent
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        """The mutant's name in the list of equivalents: it survives edits of other lines."""
        return self.path, self.before, self.after

    def text(self) -> str:
        return f"{self.path}:{self.line}\n    - {self.before}\n    + {self.after}"


OPERATORS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Lt: (r"<", ("<=", ">=")),
    ast.LtE: (r"<=", ("<", ">")),
    ast.Gt: (r">", (">=", "<=")),
    ast.GtE: (r">=", (">", "<")),
    ast.Eq: (r"==", ("!=",)),
    ast.NotEq: (r"!=", ("==",)),
    ast.Is: (r"is", ("is not",)),
    ast.IsNot: (r"is\s+not", ("is",)),
    ast.In: (r"in", ("not in",)),
    ast.NotIn: (r"not\s+in", ("in",)),
    ast.Add: (r"\+", ("-",)),
    ast.Sub: (r"-", ("+",)),
    ast.Mult: (r"\*", ("//",)),
    ast.Div: (r"/", ("*",)),
    ast.FloorDiv: (r"//", ("*",)),
    ast.Mod: (r"%", ("//",)),
    ast.Pow: (r"\*\*", ("*",)),
    ast.BitAnd: (r"&", ("|",)),
    ast.BitOr: (r"\|", ("&",)),
    ast.LShift: (r"<<", (">>",)),
    ast.RShift: (r">>", ("<<",)),
    ast.And: (r"and", ("or",)),
    ast.Or: (r"or", ("and",)),
}
"""Per operator of the grammar: its pattern in source text, and the operators that replace it."""

SILENT_CALLS = {"cast", "TypeVar", "warn", "warning"}
"""Calls whose arguments change no result."""

SILENT_KEYWORDS = {"strict", "stacklevel"}
"""Keyword arguments that change no result of correct code."""


class _Sites(ast.NodeVisitor):
    """Visitor that collects every edit of a module: (start, end, new), as byte offsets.

    Args:
        skipped: functions and constants that are not mutated, as "name" or "Class.name".
    """

    def __init__(self, source: bytes, skipped: Sequence[str] = ()) -> None:
        self.source = source
        self.skipped = skipped
        self.within = ""  # "Class." inside of a class
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.edits: list[tuple[int, int, str]] = []

    def _begin(self, node: ast.expr) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def _operator(self, op: ast.AST, begin: int, end: int) -> None:
        """Add the edits of the operator between two operands."""
        pattern, replacements = OPERATORS.get(type(op), ("", ()))
        gap = self.source[begin:end].decode()
        found = re.search(pattern, gap) if replacements and "#" not in gap else None
        for new in replacements if found else ():
            assert found is not None
            self.edits.append((begin + found.start(), begin + found.end(), new))

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
            self._operator(op, self._end(left), self._begin(right))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not (isinstance(node.op, ast.BitOr) and (_is_type(node.left) or _is_type(node.right))):
            self._operator(node.op, self._end(node.left), self._begin(node.right))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._operator(node.op, self._end(node.target), self._begin(node.value))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._operator(node.op, self._end(left), self._begin(right))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        begin = self._begin(node)
        found = re.match(rb"(not +|-)(?=\S)", self.source[begin : self._end(node)])
        if isinstance(node.op, (ast.Not, ast.USub)) and found:
            self.edits.append((begin, begin + found.end(), ""))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value, changes = node.value, list[str]()
        if isinstance(value, bool):
            changes = [str(not value)]
        elif isinstance(value, int):
            changes = [str(value + 1)] + [str(value - 1)] * (value > 0)
        elif isinstance(value, float):
            changes = [repr(value * 2 if value else 1.0)]
        self.edits += [(self._begin(node), self._end(node), new) for new in changes if new != "inf"]

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in SILENT_CALLS:
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in SILENT_KEYWORDS:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if names.isdisjoint(self.skipped):
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if self.within + node.name in self.skipped:
            return
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.within = self.within, f"{self.within}{node.name}."
        for part in node.body:
            self.visit(part)
        self.within = outer

    def _skip(self, node: ast.AST) -> None:
        pass

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Raise = visit_Assert = visit_JoinedStr = _skip


def _is_type(node: ast.expr) -> bool:
    """Return True if an operand of `A | B` is a type or None."""
    if isinstance(node, ast.Subscript):
        node = node.value
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    none = isinstance(node, ast.Constant) and node.value is None
    return none or (name[:1].isupper() and not name.isupper()) or name in ("int", "float", "str", "bool", "tuple")


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    sites = _Sites(source, (*GPU_ONLY.get(path, ()), *TIMED.get(path, ())))
    sites.visit(ast.parse(source))
    lines = source.splitlines()
    made = []
    for start, end, new in sorted(set(sites.edits)):
        number = source.count(b"\n", 0, start)
        line, column = lines[number], start - sites.starts[number]
        after = line[:column] + new.encode() + line[column + end - start :]
        before_text, after_text = line.decode().strip(), after.decode().strip()
        made.append(Mutant(path, number + 1, start, end, new.encode(), before_text, after_text))
    return made


def sample(mutants: Sequence[Mutant], seed: int, count: int) -> list[Mutant]:
    """Choose `count` mutants by the hash of the seed and the mutant's text."""
    seen: dict[tuple[str, str, str], int] = {}
    marked = []
    for mutant in mutants:
        seen[mutant.key] = twin = seen.get(mutant.key, 0) + 1
        mark = hashlib.sha256(repr((seed, mutant.key, twin)).encode()).digest()
        marked.append((mark, mutant))
    chosen = [mutant for _, mutant in sorted(marked, key=lambda pair: pair[0])[:count]]
    return sorted(chosen, key=lambda mutant: (mutant.path, mutant.start))


def read_equivalents(text: str) -> dict[tuple[str, str, str], str]:
    """Return reasons by mutant. An entry is a path, `- line`, `+ line` and the reason; a blank line ends it."""
    entries = {}
    for block in re.split(r"\n\s*\n", re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)):
        lines = block.strip().splitlines()
        if not lines:
            continue
        if len(lines) < 4 or not lines[1].startswith("- ") or not lines[2].startswith("+ "):
            raise SystemExit(
                f"{EQUIVALENTS.name}: got the entry {block!r}; expected a path, '- line', '+ line' and the reason. "
                "Write all four."
            )
        entries[lines[0].strip(), lines[1][2:].strip(), lines[2][2:].strip()] = " ".join(lines[3:])
    return entries


# ---------------------------------------------------------------------------------------------------- runs


class _Durations:
    """Pytest plugin that adds up seconds per test file."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: object) -> None:
        path = report.nodeid.partition("::")[0]  # type: ignore[attr-defined]
        self.seconds[path] = self.seconds.get(path, 0.0) + report.duration  # type: ignore[attr-defined]


SITE = """
import sys
# An editable install puts a finder before sys.path; remove it, so that the copy on sys.path is found.
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
"""


class Copy:
    """Copy of the repository in which one file at a time is mutated and tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout.split("\0")  # fmt: skip
        libraries = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tilerec").rglob("*.so")]
        for name in filter(None, [*listed, *libraries]):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / "sitecustomize.py").write_text(SITE)
        os.environ["PYTHONPATH"] = str(folder)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
        sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT / "scripts")]
        exec(SITE, {})

        # Imported once, here, so that each forked process has them: 3 s less per mutant.
        import numpy  # noqa: F401
        import pytest  # noqa: F401
        import torch  # noqa: F401

        assert "tilerec" not in sys.modules

    def run(self, files: Sequence[str], limit: float) -> tuple[str, dict[str, float]]:
        """Run test files up to the first failure; return the outcome ("passed", ...) and seconds per file."""
        log, report = self.folder / "log.txt", self.folder / "durations.json"
        report.unlink(missing_ok=True)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._child(files, log, report)
        ended = _wait(pid, limit)
        _kill_group(pid)
        seconds = json.loads(report.read_text()) if report.exists() else {}
        return ended, seconds

    def _child(self, files: Sequence[str], log: Path, report: Path) -> None:
        code = 70
        try:
            os.setsid()
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir(self.folder)
            import pytest

            durations = _Durations()
            options = [
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                f"--timeout={SECONDS_PER_TEST}",
            ]
            code = int(pytest.main([*options, *files], plugins=[durations]))
            report.write_text(json.dumps(durations.seconds))
        finally:
            os._exit(code)

    def mutate(self, mutant: Mutant) -> None:
        file = self.folder / mutant.path
        source = (ROOT / mutant.path).read_bytes()
        file.write_bytes(source[: mutant.start] + mutant.new + source[mutant.end :])
        # Python identifies compiled files by size and second. A time one hour later avoids those of the original.
        os.utime(file, (time.time() + 3600, time.time() + 3600))

    def restore(self, mutant: Mutant) -> None:
        shutil.copy2(ROOT / mutant.path, self.folder / mutant.path)

    def last_line(self) -> str:
        """Return the line of pytest's summary that names the failed test."""
        lines = (self.folder / "log.txt").read_text(errors="replace").splitlines()
        named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return named[0][:110] if named else ""


def _wait(pid: int, limit: float) -> str:
    """Wait for a process, kill it beyond its time or its memory, and return the reason for its end."""
    begun = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {0: "passed", 1: "a test failed"}.get(code, f"exit status {code}")
        if time.monotonic() - begun > limit:
            reason = f"no end after {limit:.0f} s"
        elif _memory(pid) > MOST_MEMORY:
            reason = f"more than {MOST_MEMORY >> 30} GiB"
        else:
            time.sleep(0.02)
            continue
        _kill_group(pid)
        os.waitpid(pid, 0)
        return reason


def _memory(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _kill_group(pid: int) -> None:
    """Kill a process and the processes that its tests started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def test_files(room: Room) -> list[str]:
    return [
        path.relative_to(ROOT).as_posix() for folder in room.tests for path in sorted((ROOT / folder).glob("test_*.py"))
    ]


def nearest(path: str, files: Sequence[str]) -> list[str]:
    """Return the test files that are named after a source file or import it."""
    module = Path(path).with_suffix("").as_posix().replace("/", ".")
    package, _, stem = module.rpartition(".")
    imports = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import .*\b{stem}\b")
    return [f for f in files if Path(f).name == f"test_{stem}.py" or imports.search((ROOT / f).read_text())]


def other_test_files(room: Room) -> list[str]:
    """Return test files outside of a room, except those that need a GPU, Triton's interpreter, or several hosts."""
    apart = {*room.tests, "tests/cuda", "tests/simulated_gpu", "tests/ops/triton", "tests/hosts"}
    every = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return [file for file in every if Path(file).parent.as_posix() not in apart]


def mutants_in(room: Room) -> Iterator[Mutant]:
    for folder in room.sources:
        for path in sorted((ROOT / folder).rglob("*.py")):
            # Kernels for GPUs are tested on their own, minutes a file.
            if path.name != "__init__.py" and "triton" not in path.parts and path.name != "triton.py":
                yield from mutants_of(path.relative_to(ROOT).as_posix(), path.read_bytes())


@dataclass
class Score:
    """Counts of one room's mutants."""

    room: str
    noticed: int = 0
    equivalent: int = 0
    survivors: tuple[Mutant, ...] = ()

    @property
    def percent(self) -> float:
        counted = self.noticed + len(self.survivors)
        return 100.0 * self.noticed / counted if counted else 100.0

    def text(self) -> str:
        total = self.noticed + self.equivalent + len(self.survivors)
        return (
            f"{self.room:<14}{total:>8}{self.noticed:>9}{self.equivalent:>12}{len(self.survivors):>11}"
            f"{self.percent:>9.1f} %"
        )


def _named(line: str, files: Iterable[str]) -> set[str]:
    """Return the files that a line of pytest's summary names; all files if it names none (a crash)."""
    return {file for file in files if re.search(rf" {re.escape(file)}(::|\s|$)", line)} or set(files)


class Elsewhere:
    """Test files of other rooms. Only files that pass on the unchanged package can notice a mutant."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.sound: set[str] = set()  # they pass on the unchanged package
        self.unsound: set[str] = set()

    def run(self, mutant: Mutant, files: Sequence[str]) -> tuple[str, str]:
        """Run files on the mutated package; return the outcome and the line that names the failed test."""
        copy = self.copy
        while files := [file for file in files if file not in self.unsound]:
            ended, _ = copy.run(files, limit=60 + 360.0 * len(files))
            line = copy.last_line() if ended == "a test failed" else ""
            failed = _named(line, files)
            if ended == "passed" or failed <= self.sound:
                return ended, line
            copy.restore(mutant)
            if copy.run(sorted(failed), limit=1800)[0] == "passed":
                self.sound |= failed
                return ended, line
            anyway = _named(copy.last_line(), failed)
            print(f"Left out, as they fail on the unchanged package: {', '.join(sorted(anyway))}", flush=True)
            self.unsound |= anyway
            copy.mutate(mutant)
        return "passed", ""


def run_room(name: str, chosen: Sequence[Mutant], copy: Copy, equivalents: set[tuple[str, str, str]]) -> Score:
    files = test_files(ROOMS[name])
    score = Score(name)
    counted = [mutant for mutant in chosen if mutant.key not in equivalents]
    score.equivalent = len(chosen) - len(counted)
    if not counted:
        return score
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    ended, seconds = copy.run(files, limit=1800)
    if ended != "passed":
        raise SystemExit(
            f"{name}: tests of the unchanged package: {ended} ({copy.last_line()}). Mend these tests first."
        )
    print(
        f"\n{name}: {len(files)} test files, {sum(seconds.values()):.0f} s; {len(counted)} mutants",
        flush=True,
    )
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    elsewhere = Elsewhere(copy)
    by_speed = sorted(files, key=lambda file: seconds.get(file, 0.0))
    for number, mutant in enumerate(counted, 1):
        near = nearest(mutant.path, by_speed)
        ended, begun = "passed", time.monotonic()
        copy.mutate(mutant)
        for part in (near, [file for file in by_speed if file not in near]):
            if part and ended == "passed":
                ended, _ = copy.run(part, limit=60 + 3 * sum(seconds.get(file, 120.0) for file in part))
        line = copy.last_line() if ended == "a test failed" else ""
        if ended == "passed":
            ended, line = elsewhere.run(mutant, nearest(mutant.path, other_test_files(ROOMS[name])))
        copy.restore(mutant)
        if ended == "passed":
            score.survivors += (mutant,)
            found = f"NOT NOTICED\n    - {mutant.before}\n    + {mutant.after}"
        else:
            score.noticed += 1
            found = f"{ended} {line}"
        took = time.monotonic() - begun
        print(f"{number:>4} {mutant.path}:{mutant.line} {took:.0f} s: {found}", flush=True)
    return score


def _room_of(path: str) -> str:
    for name, room in ROOMS.items():
        if Path(path).parent.as_posix() in room.sources:
            return name
    raise SystemExit(f"--at: got {path}; expected a file of the rooms {', '.join(ROOMS)}. Name one of these.")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rooms", nargs="+", choices=list(ROOMS), default=list(ROOMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40, help="mutants per room")
    parser.add_argument("--floor", type=float, default=95.0, help="least percent noticed per room")
    parser.add_argument("--at", nargs="+", default=[], metavar="FILE:LINE", help="every mutant of these lines")
    given = parser.parse_args()

    chosen: dict[str, list[Mutant]] = {}
    for place in given.at:
        path, _, line = place.rpartition(":")
        found = [m for m in mutants_of(path, (ROOT / path).read_bytes()) if m.line == int(line)]
        chosen.setdefault(_room_of(path), []).extend(found)
    if not given.at:
        chosen = {room: sample(list(mutants_in(ROOMS[room])), given.seed, given.count) for room in given.rooms}

    reasons = read_equivalents(EQUIVALENTS.read_text())
    every = {mutant.key for room in ROOMS.values() for mutant in mutants_in(room)}
    stale = [key for key in reasons if key not in every]
    with tempfile.TemporaryDirectory(prefix="tilerec-mutate-") as folder:
        copy = Copy(Path(folder))
        scores = [run_room(room, mutants, copy, set(reasons)) for room, mutants in chosen.items()]

    print(f"\n{'room':<14}{'mutants':>8}{'noticed':>9}{'equivalent':>12}{'survivors':>11}   of counted")
    for score in scores:
        print(score.text())
    for score in scores:
        for mutant in score.survivors:
            print(f"\n{mutant.text()}")
    for path, before, after in stale:
        print(f"\n{EQUIVALENTS.name}: no mutant of {path} has this text any more; remove or renew the entry.")
        print(f"    - {before}\n    + {after}")
    low = [score.room for score in scores if score.percent < given.floor]
    if low:
        print(f"\nBelow {given.floor:g} percent: {', '.join(low)}. Write the tests that notice these survivors.")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
