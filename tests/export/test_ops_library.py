"""`libtilerec_ops.so`: the schemas of Python, and a process that has both."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import torch

from tilerec.export.cpp_flags import ops_library
from tilerec.export.manifest import OPS_ABI
from tilerec.torch_private import schema_of

BOTH = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1])
lengths = torch.tensor([2, 0, 1])
print(torch.ops.tilerec.offsets_from_lengths(lengths).tolist())
large = torch.ones(1 << 20, dtype=torch.int64)
places = [torch.ops.tilerec.offsets_from_lengths(large).data_ptr() for _ in range(3)]
print(len(set(places)))
import tilerec
from tilerec.ops.jagged.definition import offsets_from_lengths
print(offsets_from_lengths(lengths).tolist())
"""


def _library() -> ctypes.CDLL:
    """Load the library after Python has defined the ops."""
    library = ctypes.CDLL(str(ops_library()))
    library.tilerec_ops_schemas.restype = ctypes.c_char_p
    return library


def test_the_library_and_python_have_the_same_schemas() -> None:
    schemas = _library().tilerec_ops_schemas().decode().splitlines()
    assert len(schemas) >= 11
    for schema in schemas:
        own = torch._C.parse_schema(f"tilerec::{schema}")
        assert str(own) == str(schema_of("tilerec", schema.partition("(")[0]))


def test_the_library_and_python_have_the_same_version() -> None:
    assert _library().tilerec_ops_abi() == OPS_ABI


def test_python_keeps_its_own_ops_beside_the_library() -> None:
    _library()
    assert torch.ops.tilerec.offsets_from_lengths(torch.tensor([2, 0, 1])).tolist() == [0, 2, 2, 3]


def test_python_may_come_after_the_library() -> None:
    command = [sys.executable, "-W", "error", "-c", BOTH, str(ops_library())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, places, second = done.stdout.splitlines()
    assert first == second == "[0, 2, 2, 3]"
    assert places == "1"  # large outputs reuse their memory
