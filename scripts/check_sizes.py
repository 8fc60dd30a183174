"""Compare the sizes of the package's source with their limits, and with the list of known exceptions.

    python scripts/check_sizes.py            # print what is over its limit and not allowed; exit 1 if there is any
    python scripts/check_sizes.py --shrink   # lower the list of exceptions to today's values

Measures and limits
    file      lines of a file                                                                    600
    function  lines of a function or method, its docstring included                               80
    class     lines of a class                                                                   400
    methods   functions in a class body                                                           40
    fan-out   modules of the package that a file imports (other packages do not count)            15

`size_exceptions.txt` has one line for each measure above its limit: measure, file, name, largest allowed value. An
entry fails the check if its value grew, and if it is no longer needed. So the list can only shrink.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXCEPTIONS = Path(__file__).with_name("size_exceptions.txt")
LIMITS = {"file": 600, "function": 80, "class": 400, "methods": 40, "fan-out": 15}

Sizes = dict[tuple[str, str, str], int]
"""(measure, file, name) -> value; the name is "-" for measures of a whole file."""


def sizes_over_limits(package: Path = ROOT / "tilerec") -> Sizes:
    """Return every measure of the package that is above its limit."""
    files = {path: path.relative_to(package.parent) for path in sorted(package.rglob("*.py"))}
    modules = {".".join(name.with_suffix("").parts).removesuffix(".__init__") for name in files.values()}
    found: Sizes = {}
    for path, name in files.items():
        text = path.read_text(encoding="utf-8")
        for measure, thing, value in _sizes(ast.parse(text), text.count("\n"), package.name, modules):
            if value > LIMITS[measure]:
                key = measure, name.as_posix(), thing
                found[key] = max(value, found.get(key, 0))
    return found


def _sizes(tree: ast.Module, lines: int, package: str, modules: set[str]) -> Iterator[tuple[str, str, int]]:
    yield "file", "-", lines
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield "function", node.name, (node.end_lineno or 0) - node.lineno + 1
        elif isinstance(node, ast.ClassDef):
            yield "class", node.name, (node.end_lineno or 0) - node.lineno + 1
            yield "methods", node.name, sum(isinstance(part, ast.FunctionDef) for part in node.body)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name.split(".")[0] == package}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            imported |= {name if name in modules else str(node.module) for name in within}
    yield "fan-out", "-", len(imported)


def read_exceptions() -> Sizes:
    """Return the list of known exceptions."""
    lines = [line.split() for line in EXCEPTIONS.read_text(encoding="utf-8").splitlines()]
    return {(measure, file, name): int(value) for measure, file, name, value in lines}


def complaints(found: Sizes, allowed: Sizes) -> list[str]:
    """Return a sentence for each value above its limit that is not allowed, and for each exception without use."""
    out = []
    for (measure, file, name), value in sorted(found.items()):
        most = max(allowed.get((measure, file, name), 0), LIMITS[measure])
        if value > most:
            out.append(f"{file}: {measure} {name} is {value}; expected at most {most}. Split it by noun.")
    for measure, file, name in sorted(allowed.keys() - found.keys()):
        out.append(f"{file}: {measure} {name} is within its limit. Remove its line of {EXCEPTIONS.name}.")
    return out


def main() -> int:
    """Print the complaints and return 1 if there is one. With `--shrink`, first lower the list of exceptions."""
    found, allowed = sizes_over_limits(), read_exceptions()
    if "--shrink" in sys.argv[1:]:
        allowed = {key: min(value, found[key]) for key, value in allowed.items() if key in found}
        lines = [" ".join((*key, str(value))) for key, value in sorted(allowed.items())]
        EXCEPTIONS.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    texts = complaints(found, allowed)
    print("\n".join([*texts, f"{len(allowed)} known exceptions, {len(texts)} complaints"]))
    return 1 if texts else 0


if __name__ == "__main__":
    sys.exit(main())
