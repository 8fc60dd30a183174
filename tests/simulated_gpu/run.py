"""Run Python on a GPU that is made of host memory: what only a GPU reaches is reached, on any machine.

    python tests/simulated_gpu/run.py -m pytest tests/cuda
    python tests/simulated_gpu/run.py script.py

`device.cpp` says what it is; it needs a C++ compiler (the build is kept under `build/simulated_gpu`) and Triton, whose
kernels run in its interpreter on the device's bytes. What it shows: that the code that is run on GPUs only runs, and
gives the right numbers; that nothing waits where nothing should; that a captured step does the right thing when it is
replayed. What it cannot show: races, several streams at work at a time, speed; DistributedDataParallel over ranks,
as the gloo of a CPU build of torch does not reduce tensors of GPUs.

Processes that are started from there are on it, too (`site/sitecustomize.py`). `TILEREC_SIMULATED_GPU=1` in the
environment tells tests to take fewer rows.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def built() -> Path:
    """The device as a shared library, built where it is missing or old."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch = Path(found.origin).parent
    source = HERE / "device.cpp"
    mark = hashlib.sha256(source.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()[:12]
    library = ROOT / "build" / "simulated_gpu" / f"device-{mark}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        command = [
            os.environ.get("CXX", "g++"), "-O0", "-std=c++20", "-shared", "-fPIC", "-w", f"-I{torch / 'include'}",
            str(source), "-o", str(made), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}",
            "-Wl,--no-as-needed",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        made.rename(library)
    return library


def load() -> None:
    """Let this process, and those that it starts, have the device."""
    assert "torch" not in sys.modules, "the device comes first: PyTorch looks for it once"
    os.environ["TRITON_INTERPRET"] = os.environ["TILEREC_SIMULATED_GPU"] = "1"
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(HERE / "site"), str(ROOT), *filter(None, paths)]))
    library = ctypes.CDLL(str(built()))
    sys.path[:0] = [path for path in (str(ROOT), str(HERE)) if path not in sys.path]
    import runtime

    runtime.install(library)


def main(arguments: list[str]) -> None:
    if not arguments:
        sys.exit(__doc__)
    load()
    if arguments[0] == "-m":
        sys.argv = [arguments[1], *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _leave(code: object) -> None:
    """Without a word to autograd's threads: they would have to be stopped by a device that is gone."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit as stop:
        _leave(stop.code)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)
