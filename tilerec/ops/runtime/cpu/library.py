"""Native CPU library: find it, load it, and share helpers with its callers.

`libtilerec_cpu.so` lies beside this file, both in a checkout (`cmake -S . -B build/native && cmake --build
build/native`) and in an installed wheel. It is plain C (`native/tilerec.h`), loaded with ctypes, and independent of the
versions of Python and PyTorch. If it is missing, disabled or was built from other sources, `library()` returns None,
the reference kernels run, and one log line gives the reason.

OpenMP. The library is compiled with OpenMP but not linked to a runtime. Its few OpenMP symbols resolve to the runtime
that PyTorch has loaded, so both share one thread pool. PyTorch loads that runtime with local visibility, so it is first
made visible ("promoted") to the whole process. Without such a runtime the library uses one thread. It also uses one
thread in a process forked from a multi-threaded one (GNU's runtime would wait for threads that the child lacks).

Environment, read once at the first use
  TILEREC_NATIVE=0            never load it
  TILEREC_NATIVE_LIBRARY=...  load this file instead
  TILEREC_ISA=base|avx2       limit the vector width (default: the widest of the machine, up to AVX-512)
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilerec.ops.runtime.cpu.records import layout

ABI_VERSION = 14  # TR_ABI_VERSION of native/tilerec.h
_REBUILD = "Build it again (make native)"
LOG = logging.getLogger("tilerec.native")

# Codes of native/tilerec.h.
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INDEX_TYPES: dict[torch.dtype, int] = {torch.int32: 0, torch.int64: 1}
OK, BAD_ID, BAD_OFFSETS, BAD_ARGUMENT, NO_MEMORY = range(5)
ISAS = ("base", "avx2", "avx512")


@dataclass(frozen=True)
class LibraryStatus:
    """Outcome of loading the native library; `reason` is empty if it is used."""

    path: Path | None
    reason: str
    isa: str = ""
    openmp: str = ""  # file of the OpenMP runtime; empty: one thread

    def __str__(self) -> str:
        if self.reason:
            return f"native CPU library: not used ({self.reason})"
        return f"native CPU library: {self.path}, {self.isa}, OpenMP: {self.openmp or 'none (one thread)'}"


def library() -> ctypes.CDLL | None:
    """Return the native library, or None if the reference kernels run. The first call loads it."""
    return _loaded()[0]


def status() -> LibraryStatus:
    """Return the path of the loaded library, or the reason why none is used."""
    return _loaded()[1]


def reason() -> str:
    """Return the reason why the library is not used; empty if it is."""
    return status().reason


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[ctypes.CDLL | None, LibraryStatus]:
    found, state = _load()
    LOG.info("%s", state)
    return found, state


def _load() -> tuple[ctypes.CDLL | None, LibraryStatus]:
    if os.environ.get("TILEREC_NATIVE", "1").lower() in ("0", "off", "false", "no"):
        return None, LibraryStatus(None, "TILEREC_NATIVE=0")
    configured = os.environ.get("TILEREC_NATIVE_LIBRARY")
    path = Path(configured) if configured else Path(__file__).with_name("libtilerec_cpu.so")
    if not path.is_file():
        return None, LibraryStatus(path, f"{path} does not exist; the package was installed without its C++ part")
    openmp = _promote_openmp()
    try:
        found = ctypes.CDLL(str(path))
        version = int(found.tr_abi_version())
        if version != ABI_VERSION:
            return None, LibraryStatus(path, f"{path} has interface {version}; expected {ABI_VERSION}. {_REBUILD}")
        found.tr_layout.restype = ctypes.c_char_p
        text = found.tr_layout().decode()
    except (OSError, AttributeError) as error:
        return None, LibraryStatus(path, f"it cannot be loaded: {error}")
    if text != layout():
        return None, LibraryStatus(path, f"{path} was built from other sources: {_difference(text)}. {_REBUILD}")
    return found, LibraryStatus(path, "", ISAS[found.tr_isa()], openmp)


def _difference(text: str) -> str:
    """Describe the first record whose layout in the library differs."""
    lines = itertools.zip_longest(text.split("\n"), layout().split("\n"), fillvalue="nothing")
    theirs, ours = next(pair for pair in lines if pair[0] != pair[1])
    return f"it has {theirs!r}; expected {ours!r}"


def _promote_openmp() -> str:
    """Make PyTorch's OpenMP runtime visible to libraries loaded later; return its path, "" if there is none.

    Wheels name it differently (`libgomp.so.1`, `libgomp-<hash>.so.1.0.0`, `libiomp5.so`, `libomp.so`), so this function
    searches the files that the process has mapped, PyTorch's own first.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    mapped = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if line.count("/") and ".so" in line)
    runtimes = [p for p in mapped if Path(p).name.split(".")[0].split("-")[0] in ("libgomp", "libomp", "libiomp5")]
    home = str(Path(torch.__file__).parent)
    for path in sorted(runtimes, key=lambda p: not p.startswith(home)):
        try:
            runtime = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL | getattr(os, "RTLD_NOLOAD", 0))
        except OSError:
            continue
        if hasattr(runtime, "GOMP_parallel"):
            return path
    return ""


def int64_array(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Return the values as a C array. Example: `int64_array([3, 5])` is `int64_t {3, 5}`."""
    return (ctypes.c_int64 * len(values))(*values)


def advise_huge_pages(memory: Tensor) -> bool:
    """Advise the system to use 2 MiB pages for a large CPU tensor; return True if it accepts.

    Call it before the first write to the memory. Values do not change. Random rows of a table far larger than the
    caches are read about a fifth faster from such pages. Returns False without the native library, or if the system has
    no such pages.
    """
    found = library()
    if found is None or memory.device.type != "cpu":
        return False
    return int(found.tr_advise_huge_pages(ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(memory.nbytes))) == 0


def release_pages(memory: Tensor) -> bool:
    """Return the pages of a contiguous CPU tensor to the system, before its storage is freed; True if it accepts.

    The tensor's contents are lost; it must own its memory, and share none of it with a tensor in use. Pages that it
    shares with its neighbours stay. For large storages that are read once from front to back.
    """
    found = library()
    if found is None or memory.device.type != "cpu":
        return False
    return int(found.tr_release_pages(ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(memory.nbytes))) == 0
