"""Compare the arm64 library of a cross-built wheel, under qemu, with the x86-64 library of this checkout, bit by bit.

    make wheel ARCH=aarch64 && python scripts/check_arm64.py dist/*aarch64.whl

The script checks that

- the file is one `py3-none-linux_aarch64` wheel, and its libraries are for arm64;
- `libtilerec_cpu.so` is linked to no OpenMP or torch library;
- `libtilerec_ops.so` is linked to `libtorch_cpu.so`, and needs of it the functions that the x86-64 library needs, which
  are C functions of torch's stable ABI;
- neither needs a version of a symbol that is newer than the newest of the x86-64 library;
- `tests/native/digests.cpp` prints the same lines with both libraries, on every vector level of this machine: lookups
  of six row types, updates by every rule on three row types, hashes, jagged operators, random values, packed rows.

Needs `aarch64-linux-gnu-g++` and `qemu-aarch64` (Debian's `g++-aarch64-linux-gnu` and `qemu-user`), and `make native`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "tilerec/ops/runtime/cpu/libtilerec_cpu.so"
OPS = "tilerec/export/lib/libtilerec_ops.so"
DRIVER = ROOT / "tests" / "native" / "digests.cpp"
LEVELS = {0: "base", 1: "AVX2", 2: "AVX-512"}
NO_SUCH_LEVEL = 3
"""Exit code of the driver."""
ARM, QEMU, SYSROOT = "aarch64-linux-gnu", "qemu-aarch64", "/usr/aarch64-linux-gnu"
SYSTEM = ("libc.so", "libm.so", "libdl.so", "libpthread.so", "ld-linux-aarch64.so")


def output(*command: str | Path) -> str:
    """Run a command and return what it prints; exit if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: got exit code {done.returncode}; expected 0. {done.stderr.strip()}")
    return done.stdout


def unpacked(wheel: Path, name: str, folder: Path) -> Path:
    """Return a library of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        if name not in archive.namelist():
            sys.exit(f"{wheel.name}: got no {name}; expected it. Run make wheel ARCH=aarch64 with torch in .venv.")
        library = Path(archive.extract(name, folder))
    if "AArch64" not in output(f"{ARM}-readelf", "-h", library):
        sys.exit(f"{wheel.name}: got a {library.name} for another processor; expected one for arm64.")
    return library


def check_needed(library: Path, allowed: tuple[str, ...]) -> None:
    """Exit if a library is linked to others than the allowed ones."""
    dynamic = output(f"{ARM}-readelf", "-d", library).splitlines()
    needed = [line.split("[")[1].rstrip("]") for line in dynamic if "(NEEDED)" in line]
    further = [name for name in needed if not name.startswith(allowed)]
    if further:
        sys.exit(f"{library.name}: got a library that needs {', '.join(further)}; expected {', '.join(allowed)} alone.")


def undefined(library: Path) -> set[str]:
    """Return the symbols that a library takes from others, as NAME or NAME@VERSION."""
    lines = output(f"{ARM}-nm", "-D", "--undefined-only", library).splitlines()
    return {line.split()[-1] for line in lines}


def newest(symbols: set[str]) -> dict[str, tuple[int, ...]]:
    """Return the newest version of each set of versions, such as GLIBC."""
    found: dict[str, tuple[int, ...]] = {}
    for symbol in symbols:
        kind, _, version = symbol.partition("@")[2].lstrip("@").rpartition("_")
        if kind:
            found[kind] = max(found.get(kind, ()), tuple(map(int, version.split("."))))
    return found


def check_symbols(library: Path, own: Path) -> None:
    """Exit if the library needs other functions of torch than this machine's, or newer versions of symbols."""
    needs, expected = undefined(library), undefined(own)
    torch = [{name for name in names if "torch_" in name and "@" not in name} for names in (needs, expected)]
    if torch[0] != torch[1]:
        sys.exit(f"{library.name}: got other functions of torch in {sorted(torch[0] ^ torch[1])}; expected the same.")
    limits = newest(expected)
    newer = {kind: version for kind, version in newest(needs).items() if version > limits.get(kind, ())}
    if newer:
        sys.exit(f"{library.name}: got versions of symbols {newer}; expected at most {limits}.")
    versions = ", ".join(f"{kind} {'.'.join(map(str, version))}" for kind, version in sorted(newest(needs).items()))
    print(f"{library.name}: {len(torch[0])} functions of torch; {versions}")


def driver(compiler: str, out: Path) -> Path:
    """Compile the driver and return the program."""
    output(compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", DRIVER, "-ldl", "-o", out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the arm64 library under qemu with the x86-64 library.")
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    if not wheel.name.endswith("-py3-none-linux_aarch64.whl"):
        sys.exit(f"{wheel.name}: got another tag; expected py3-none-linux_aarch64. Run make wheel ARCH=aarch64.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library, ops = (unpacked(wheel, name, folder) for name in (LIBRARY, OPS))
        check_needed(library, SYSTEM)
        check_needed(ops, (*SYSTEM, "libtorch_cpu.so", "libstdc++.so", "libgcc_s.so"))
        check_symbols(library, ROOT / LIBRARY)
        check_symbols(ops, ROOT / OPS)
        program = driver(f"{ARM}-g++", folder / "arm64")
        found = output(QEMU, "-L", SYSROOT, program, library, "0").splitlines()
        own = driver("g++", folder / "own")
        for level, title in LEVELS.items():
            done = subprocess.run([own, ROOT / LIBRARY, str(level)], capture_output=True, text=True, check=False)
            if done.returncode == NO_SUCH_LEVEL:
                print(f"x86-64 {title}: this machine has no such level")
                continue
            expected = done.stdout.splitlines()
            differ = [line.split()[0] for line in set(expected) ^ set(found)]
            if done.returncode or differ or not found:
                sys.exit(
                    f"x86-64 {title}: got other bits in {sorted(set(differ))}; expected those of arm64. {done.stderr}"
                )
            print(f"x86-64 {title}: {len(found)} cases with the bits of arm64")


if __name__ == "__main__":
    main()
