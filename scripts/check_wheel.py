"""Install a built wheel into fresh environments and run the op tests there.

    python scripts/check_wheel.py dist/*.whl                           # pinned torch; oldest torch and Python
    python scripts/check_wheel.py dist/*.whl --env python3.12=2.13.0   # chosen environments
    python scripts/check_wheel.py dist/*.whl --without-compiler        # also: an install without C++ compiler

The script checks that

- the file is one `py3-none-<platform>` wheel;
- the native library in it is linked to no OpenMP, Python or torch library;
- with each (Python, torch) the installed package finds and loads the library;
- `tests/ops` passes against the installed package, not the working tree.

Each environment is a new venv with the torch that pip finds. A CUDA build of torch takes about 5 GB of disk during the
check.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "tilerec/ops/runtime/cpu/libtilerec_cpu.so"
OPS_LIBRARY = (
    "tilerec/export/lib/libtilerec_ops.so"  # on torch's stable ABI: built with one version, it runs with others
)
OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 14)
LOADED = """
import importlib.metadata, pathlib, sys, torch, tilerec
from tilerec.ops.runtime.cpu import library
found = library.library() is not None
print(f"tilerec {importlib.metadata.version('tilerec')} from {pathlib.Path(tilerec.__file__).parent}")
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, native library loaded: {found}")
sys.exit(0 if found is (sys.argv[1] == "native") else 3)
"""


@dataclass(frozen=True)
class Environment:
    python: str
    torch: str


def run(command: list[str], **kwargs: object) -> None:
    print("  $", " ".join(str(part) for part in command), flush=True)
    subprocess.run([str(part) for part in command], check=True, **kwargs)  # type: ignore[call-overload]


def pinned_torch() -> str:
    match = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert match, "constraints.txt pins torch"
    return match.group(1)


def oldest_torch() -> str:
    """Return the lower bound of torch in pyproject.toml, as a full version."""
    match = re.search(r'"torch>=(\d+\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert match, "pyproject.toml gives a lower bound of torch"
    return f"{match.group(1)}.0"


def another_python() -> str:
    """Return the oldest supported Python on PATH other than the running one, else the running one."""
    for minor in range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1):
        name = f"python3.{minor}"
        if minor == sys.version_info.minor or shutil.which(name) is None:
            continue
        if subprocess.run([name, "-c", "import venv, ctypes"], capture_output=True, check=False).returncode == 0:
            return name
    print("no second Python on PATH: the same Python is used for every environment")
    return sys.executable


def check_file(wheel: Path) -> None:
    name, _, python, abi, platform = wheel.stem.rsplit("-", 4)
    if (name, python, abi) != ("tilerec", "py3", "none") or platform == "any":
        raise SystemExit(
            f"wheel: got {wheel.name}; expected tilerec-<version>-py3-none-<platform>.whl with a native library"
        )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if LIBRARY not in names:
            raise SystemExit(f"{wheel.name}: no {LIBRARY} in it; was the C++ build skipped?")
        if OPS_LIBRARY not in names:
            raise SystemExit(f"{wheel.name}: no {OPS_LIBRARY} in it; was torch missing where it was built?")
        foreign = [n for n in names if not n.startswith(("tilerec/", "tilerec-"))]
        if foreign:
            raise SystemExit(f"{wheel.name}: files that do not belong into a wheel: {foreign[:5]}")
        if shutil.which("readelf") is None:
            print("  readelf not found: the libraries that it is linked to were not checked")
            return
        with tempfile.TemporaryDirectory() as folder:
            dynamic = subprocess.run(
                ["readelf", "-d", archive.extract(LIBRARY, folder)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic)
    print(f"  {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, linked to {', '.join(needed)}")
    wrong = [n for n in needed if re.search(r"omp|python|torch|c10|cuda", n)]
    if wrong:
        raise SystemExit(f"{LIBRARY} is linked to {wrong}; it must work with every Python and every torch")


def check_environment(
    wheel: Path, environment: Environment, index: list[str], tests: list[str], *, native: bool
) -> None:
    print(f"\n== {environment.python}, torch {environment.torch}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tilerec-wheel-") as folder:
        here = Path(folder)
        python = here / "venv" / "bin" / "python"
        run([environment.python, "-m", "venv", here / "venv"])  # type: ignore[list-item]
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *index]
        run([*pip, f"torch=={environment.torch}", f"{wheel}[test]"])
        # Tests and configuration are copied out of the working tree, so `import tilerec` can only find the wheel.
        shutil.copytree(ROOT / "tests", here / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "examples" / "cpp_server", here / "examples" / "cpp_server")
        shutil.copy(ROOT / "pyproject.toml", here)
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        run([str(python), "-c", LOADED, "native" if native else "reference"], cwd=here, env=clean)
        if tests:
            run([str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], cwd=here, env=clean)


def build_without_compiler(folder: Path) -> Path:
    """Build a wheel without a working C++ compiler: pip must succeed, and the wheel must be pure Python."""
    print("\n== no C++ compiler", flush=True)
    source = folder / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "dist", "__pycache__", "*.so")
    )
    without = {
        **os.environ,
        "CXX": "/nonexistent/c++",
        "CC": "/nonexistent/cc",
        "TILEREC_NATIVE_REQUIRED": "0",
    }
    run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(source)],
        env=without,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        if any(name.endswith(".so") for name in archive.namelist()):
            raise SystemExit(f"{wheel.name}: holds a library although no compiler was there")
    print(f"  {wheel.name}: pure Python")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--env", action="append", default=[], metavar="PYTHON=TORCH", help="an environment to check")
    parser.add_argument("--index", help="a further package index to find torch in (CPU builds)")
    parser.add_argument("--tests", nargs="*", default=["tests/ops", "tests/test_conftest.py"])
    parser.add_argument("--without-compiler", action="store_true", help="also build and check a pure-Python install")
    options = parser.parse_args()

    wheel = options.wheel.resolve()
    index = ["--extra-index-url", options.index] if options.index else []
    chosen = [Environment(*entry.rsplit("=", 1)) for entry in options.env]
    environments = chosen or [
        Environment(sys.executable, pinned_torch()),
        Environment(another_python(), oldest_torch()),
    ]
    check_file(wheel)
    for environment in environments:
        check_environment(wheel, environment, index, options.tests, native=True)
    if options.without_compiler:
        with tempfile.TemporaryDirectory(prefix="tilerec-pure-") as folder:
            pure = build_without_compiler(Path(folder))
            check_environment(pure, environments[0], index, options.tests, native=False)
    print("\nthe wheel works in", ", ".join(f"{e.python} with torch {e.torch}" for e in environments))


if __name__ == "__main__":
    main()
