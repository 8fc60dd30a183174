"""The C++ libraries of torch and tilerec's ops for it, in a process that need not import torch.

`import torch` takes a second or two, four fifths of it for Python modules. The C++ libraries load in a fifth
of a second.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from tilerec.errors import ConfigError

_VERSION = re.compile(r"^__version__ = '(\d+\.\d+)", re.MULTILINE)


def torch_home() -> Path:
    """Return the folder of torch.

    Raises:
        ConfigError: torch is not installed.
    """
    found = find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("torch: got no module of this name; expected PyTorch. Install it.")
    return Path(found.submodule_search_locations[0])


@functools.cache
def torch_version() -> str:
    """Return the major and minor version of torch: `2.13`."""
    found = _VERSION.search((torch_home() / "version.py").read_text())
    assert found is not None
    return found[1]


def ops_path() -> Path:
    """Return the path of `libtilerec_ops.so`.

    Raises:
        ConfigError: this installation has none.
    """
    path = Path(__file__).parent / "lib" / "libtilerec_ops.so"
    if not path.is_file():
        raise ConfigError(
            f"libtilerec_ops.so: got no {path}; expected the library of ops for servers and C++ programs. Install a "
            "wheel that has it, or build it in a checkout with `make native`."
        )
    return path


@functools.cache
def ops_library() -> ctypes.CDLL:
    """Load libtorch and `libtilerec_ops.so`, and return the latter (native/torch/package_runner.cpp).

    Its functions run without Python's global lock.

    Raises:
        ConfigError: this installation has none, or torch's libraries cannot be loaded.
    """
    path = ops_path()
    try:
        load_torch()
        # Python's global lock is kept: the library takes it to find tilerec's Python ops. Otherwise this thread would
        # wait for one that keeps the lock while it imports another library, and that one for this thread's loader.
        library = ctypes.CDLL(str(path), handle=_opened(ctypes.PyDLL(None), path, 0))
    except OSError as error:
        raise ConfigError(
            f"libtilerec_ops.so: got '{error}'; expected to load it. Install tilerec and torch again."
        ) from None
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64
    for name, result, arguments in (
        ("load", pointer, (text,)),
        ("free", None, (pointer,)),
        ("metadata", text, (pointer, text)),
        ("weight", text, (pointer, number)),
        ("bind", ctypes.c_bool, (pointer, pointer, pointer, number)),
        ("run", ctypes.POINTER(number), (pointer, pointer, number)),
        ("set_threads", ctypes.c_bool, (number,)),
        ("cpu", text, ()),
        ("last_error", text, ()),
    ):
        function = getattr(library, f"tilerec_ops_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def load_torch() -> None:
    """Load torch's C++ libraries while other Python threads run. Does nothing if torch is imported."""
    if "torch" in sys.modules:
        return
    try:
        # With what it needs: libtorch_cpu.so, and in builds for GPUs the libraries that their packages are linked to.
        _opened(ctypes.CDLL(None), torch_home() / "lib" / "libtorch.so", ctypes.RTLD_GLOBAL)
    except OSError:  # a build for GPUs whose libraries the system does not find: torch's modules do
        import torch as torch


def _opened(process: ctypes.CDLL, path: Path, mode: int) -> int:
    """Load a library by functions of the process: those of a `PyDLL` keep Python's global lock. Returns its handle."""
    dlopen, dlerror = process.dlopen, process.dlerror
    dlopen.restype, dlopen.argtypes, dlerror.restype = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int), ctypes.c_char_p
    found: int | None = dlopen(str(path).encode(), mode | os.RTLD_NOW)
    if found is None:
        raise OSError((dlerror() or b"").decode(errors="replace"))
    return found


def last_error() -> str:
    """Return the text of this thread's latest error in the library, in one line."""
    found: bytes = ops_library().tilerec_ops_last_error()
    return " ".join(found.decode(errors="replace").split())


def set_threads(count: int) -> None:
    """Set the number of threads of torch's operators and tilerec's ops in this process."""
    ops_library().tilerec_ops_set_threads(count)


def cpu_level() -> str:
    """Return the vector level that torch uses on this machine: `AVX2`."""
    found: bytes = ops_library().tilerec_ops_cpu()
    return found.decode()
