"""What Triton would compile for the launches of a program, found out while the kernels run interpreted.

Nouns
  launch    one call of a kernel: `kernel[grid](…)`
  variant   what Triton compiles for a launch: the kernel, its arguments' types, its constants, which of its arguments
            are multiples of 16 (pointers too), and options. Launches of one variant share one program; a launch of a
            new one waits for the compiler
  sweep     compiling every variant of a list without a GPU (`gates.py`), in pieces of so many seconds

Triton's own binder says what a launch's variant is: the one that `JITFunction.run` would call, for Hopper's backend. So
what is recorded here is what a GPU's cache would be asked for. Tensors begin at multiples of 64 bytes here, of 512
there: multiples of 16 both.

    with recorded() as record:
        pooled_lookup(...)
    record.launches                 # in their order
    sorted(record.variants, key=str)

    python -m tests.ops.triton.variants record FILE tests.ops.triton.serve_cpu       a module's main()
    python -m tests.ops.triton.variants record FILE pytest tests/ops/triton -q       tests
    python -m tests.ops.triton.variants sweep FILE RESULTS --capability 90 --seconds 80      again, until it says "done"

Recording adds to FILE what is not yet in it. The sweep does not interpret: it starts a process that compiles.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.ops.triton.gates import ROOT, Gate

_TYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int32": "int32",
    "int64": "int64",
}

Constant = bool | int | float | str | None


@dataclass(frozen=True)
class Variant:
    """One compiled program, by what it is compiled from."""

    kernel: str  # "module:function"
    types: tuple[tuple[str, str], ...]  # argument and type, of those that are no constants
    constants: tuple[tuple[str, Constant], ...]  # a jitted function, or a type, is "module:name"
    multiples_of_16: tuple[str, ...]
    options: tuple[tuple[str, Constant], ...]

    def __str__(self) -> str:
        """As a line: `pooled_kernel base:*fp32! … GROUP=1 … num_warps=1`; `!` where a multiple of 16."""
        types = [f"{n}:{t}{'!' * (n in self.multiples_of_16)}" for n, t in self.types]
        constants = [f"{n}={v}" for n, v in (*self.constants, *self.options)]
        return " ".join([self.kernel.partition(":")[2], *types, *constants])

    def gate(self, capability: int = 90) -> Gate:
        """The same for `gates.compiled`."""
        return Gate(
            str(self), self.kernel, dict(self.types), dict(self.constants), list(self.multiples_of_16),
            dict(self.options), capability,
        )  # fmt: skip

    def unlike(self, other: Variant) -> list[str]:
        """What differs between two variants of one kernel, for people."""
        mine, others = set(str(self).split()), set(str(other).split())
        return sorted(mine ^ others)


@dataclass
class Record:
    """The launches of a program, in their order."""

    launches: list[Variant] = field(default_factory=list)

    @property
    def variants(self) -> set[Variant]:
        return set(self.launches)

    @property
    def names(self) -> list[str]:
        """The kernels, without their modules."""
        return [variant.kernel.partition(":")[2] for variant in self.launches]


@contextlib.contextmanager
def recorded(run: bool = True) -> Iterator[Record]:
    """Record every launch. `run=False`: no kernel runs, and what they should have written is what it was before."""
    record = Record()
    kind = interpreter.InterpretedFunction
    real = kind.run

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        record.launches.append(variant_of(self, args, kwargs))
        return real(self, *args, grid=grid, warmup=warmup, **kwargs) if run else None

    kind.run = noted
    try:
        yield record
    finally:
        kind.run = real


def variant_of(kernel: Any, args: Sequence[Any], named: dict[str, Any]) -> Variant:
    """The variant of one launch of an interpreted kernel."""
    bind, names = _binder(kernel)
    bound, specialization, options = bind(*args, **named)
    types, constants, multiples = [], [], []
    for name, (type_, more) in zip(names, specialization, strict=True):
        if type_ == "constexpr":
            # What is 1 has become a constant, too; `more` is its value then.
            constants.append((name, _plain(bound[name])))
        else:
            types.append((name, type_))
            if more:
                assert more == "D", f"a specialization that this file does not know: {more}"
                multiples.append(name)
    place = f"{kernel.fn.__module__}:{kernel.fn.__qualname__}"
    return Variant(place, tuple(types), tuple(constants), tuple(multiples), tuple(sorted(options.items())))


@functools.cache
def _binder(kernel: Any) -> tuple[Any, list[str]]:
    """Triton's function from arguments to a specialization, and the names of the arguments."""
    allowed = ("do_not_specialize", "do_not_specialize_on_alignment")
    compiled = JITFunction(kernel.fn, **{name: kernel.kwargs.get(name) for name in allowed})
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(inspect.signature(kernel.fn), compiled.params, backend)
    return bind, compiled.arg_names


def _plain(value: Any) -> Constant:
    if isinstance(value, triton.language.constexpr):
        value = value.value
    if isinstance(value, interpreter.InterpretedFunction):
        return f"{value.fn.__module__}:{value.fn.__qualname__}"
    if isinstance(value, triton.language.dtype):
        return f"triton.language:{_TYPES[str(value)]}"
    assert value is None or isinstance(value, (bool, int, float, str)), f"a constant of a new kind: {value!r}"
    return value


def cover(variants: Iterable[Variant], together: int = 2) -> list[Variant]:
    """Some of the variants, in which all else that is in any of them is found, too: of every kernel, each value of each
    constant, type and hint with each of every other one (`together=1`: each value).

    What a compiler does wrong, or finds wrong, needs one such value or two; hardly ever three. Always the same some.
    """
    chosen: list[Variant] = []
    missing: dict[Variant, set[Any]] = {}
    for variant in sorted(set(variants), key=str):
        name, *values = str(variant).split()
        missing[variant] = {(name, *some) for some in itertools.combinations(values, together)}
    by_part: dict[Any, list[Variant]] = {}
    for variant, parts in missing.items():
        for part in parts:
            by_part.setdefault(part, []).append(variant)
    while missing:
        best = max(missing, key=lambda variant: len(missing[variant]))
        gained = missing.pop(best)
        if not gained:
            break
        chosen.append(best)
        for part in gained:
            for other in by_part[part]:
                if other in missing:
                    missing[other].discard(part)
    return chosen


# ------------------------------------------------------------------------------------------------ files


def save(variants: set[Variant], file: Path) -> None:
    """Add variants to a file of them: JSON, one to a line, sorted."""
    lines = {json.dumps(_as_json(variant)) for variant in variants}
    if file.exists():
        lines |= set(file.read_text().splitlines())
    file.write_text("\n".join(sorted(lines)) + "\n")


def load(file: Path) -> list[Variant]:
    return [_of_json(json.loads(line)) for line in file.read_text().splitlines()]


def _as_json(variant: Variant) -> list[Any]:
    return [variant.kernel, variant.types, variant.constants, variant.multiples_of_16, variant.options]


def _of_json(fields: list[Any]) -> Variant:
    kernel, types, constants, multiples, options = fields
    pairs = [tuple(tuple(pair) for pair in pairs) for pairs in (types, constants, options)]
    return Variant(kernel, pairs[0], pairs[1], tuple(multiples), pairs[2])


# ------------------------------------------------------------------------------------------------ the script


def _record(file: Path, what: list[str]) -> int:
    from tests.ops.triton.interpreter import quick

    done = 0
    with recorded() as record:
        try:
            if what[0] == "pytest":
                import pytest

                done = int(pytest.main([*what[1:], "-p", "no:cacheprovider"]))
            else:
                with quick():
                    importlib.import_module(what[0]).main()
        finally:
            save(record.variants, file)
            print(f"{len(record.launches)} launches, {len(record.variants)} variants", file=sys.stderr)
    return done


def sweep(variants: Sequence[Variant], results: Path, capability: int = 90, seconds: float = 80.0) -> int:
    """Compile variants that are not in `results`, for so many seconds; returns how many are left.

    `results` gets a line of JSON for each: its name, and what came out, or the compiler's words.
    """
    known = set()
    if results.exists():
        known = {json.loads(line)["name"] for line in results.read_text().splitlines()}
    left = [v for v in variants if str(v) not in known]
    if not left:
        return 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    gates = json.dumps([vars(v.gate(capability)) for v in left])
    command = [
        sys.executable,
        str(ROOT / "tests/ops/triton/gates.py"),
        str(results),
        str(time.time() + seconds),
    ]
    subprocess.run(command, input=gates, env=environment, text=True, check=True)
    done = len(results.read_text().splitlines()) - len(known)
    return len(left) - done


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    to_record = commands.add_parser("record")
    to_record.add_argument("file", type=Path)
    to_record.add_argument("what", nargs=argparse.REMAINDER)
    to_sweep = commands.add_parser("sweep")
    to_sweep.add_argument("file", type=Path)
    to_sweep.add_argument("results", type=Path)
    to_sweep.add_argument("--capability", type=int, default=90)
    to_sweep.add_argument("--seconds", type=float, default=80.0)
    to_sweep.add_argument("--together", type=int, default=0, help="not all, but a `cover`: 1 small, 2 nearly as good")
    given = parser.parse_args()
    if given.command == "record":
        return _record(given.file, given.what)
    variants = load(given.file)
    if given.together:
        variants = cover(variants, given.together)
    left = sweep(variants, given.results, given.capability, given.seconds)
    print("done" if not left else f"{left} left")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
