"""The C++ libraries of torch and tilerec's ops, loaded while other threads run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tilerec.errors import ConfigError
from tilerec.export.torch_library import ops_path

BESIDE_AN_IMPORT = """
import sys, threading
from tilerec.export import torch_library

opened = torch_library._opened
begun = threading.Event()

def opening(process, path, mode):
    if path == torch_library.ops_path():
        sys.setswitchinterval(1000)  # the other thread goes on at once if this one gives up Python's lock, and else not
        begun.set()
    return opened(process, path, mode)

torch_library._opened = opening
loading = threading.Thread(target=torch_library.ops_library)
loading.start()
begun.wait()
sum(range(10_000_000))  # meanwhile the other thread comes to the library's beginning
assert "_lzma" not in sys.modules
import _lzma
loading.join()
print("both loaded")
"""


def test_the_library_of_ops_is_loaded_beside_an_import_of_another_library() -> None:
    """The system's loader and Python's lock are taken in one order: a server with `--deltas` waited forever."""
    try:
        ops_path()
    except ConfigError:
        pytest.skip("this installation has no libtilerec_ops.so")
    found = subprocess.run(
        [sys.executable, "-c", BESIDE_AN_IMPORT], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.stdout.strip() == "both loaded", found.stderr
