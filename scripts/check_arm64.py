"""Compare the arm64 library of a cross-built wheel, under qemu, with the x86-64 library of this checkout, bit by bit.

    make wheel ARCH=aarch64 && python scripts/check_arm64.py dist/*aarch64.whl

The script checks that

- the file is one `py3-none-linux_aarch64` wheel, and its library is for arm64 and linked to no OpenMP or torch library;
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
DRIVER = ROOT / "tests" / "native" / "digests.cpp"
LEVELS = {0: "base", 1: "AVX2", 2: "AVX-512"}
NO_SUCH_LEVEL = 3
"""Exit code of the driver."""
ARM, QEMU, SYSROOT = "aarch64-linux-gnu", "qemu-aarch64", "/usr/aarch64-linux-gnu"
ALLOWED = ("libc.so", "libm.so", "libdl.so", "libpthread.so", "ld-linux-aarch64.so")


def output(*command: str | Path) -> str:
    """Run a command and return what it prints; exit if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: got exit code {done.returncode}; expected 0. {done.stderr.strip()}")
    return done.stdout


def unpacked(wheel: Path, folder: Path) -> Path:
    """Return the wheel's library, after a check of the tag and of what the library needs."""
    if not wheel.name.endswith("-py3-none-linux_aarch64.whl"):
        sys.exit(f"{wheel.name}: got another tag; expected py3-none-linux_aarch64. Run make wheel ARCH=aarch64.")
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract(LIBRARY, folder))
    if "AArch64" not in output(f"{ARM}-readelf", "-h", library):
        sys.exit(f"{wheel.name}: got a library for another processor; expected one for arm64.")
    dynamic = output(f"{ARM}-readelf", "-d", library).splitlines()
    needed = [line.split("[")[1].rstrip("]") for line in dynamic if "(NEEDED)" in line]
    further = [name for name in needed if not name.startswith(ALLOWED)]
    if further:
        sys.exit(f"{wheel.name}: got a library that needs {', '.join(further)}; expected libc and its parts alone.")
    return library


def driver(compiler: str, out: Path) -> Path:
    """Compile the driver and return the program."""
    output(compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", DRIVER, "-ldl", "-o", out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the arm64 library under qemu with the x86-64 library.")
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = unpacked(wheel, folder)
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
