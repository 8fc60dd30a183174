"""`libtilerec_ops.so`: the schemas of Python, and a process that has both."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import torch

from tilerec.export.cpp_flags import ops_library
from tilerec.export.manifest import OPS_ABI
from tilerec.ops.quantized.row_format import BITS, quantize_rows
from tilerec.ops.search.definition import quantized
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

QUANTIZED = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1])
for op, args, want in torch.load(sys.argv[2]):
    got = getattr(torch.ops.tilerec, op)(*args, torch.float32, "a@a,b@b,c@c,d@d")
    print(op, torch.equal(got, want))
weights, dims, bits, *rest = args
try:
    torch.ops.tilerec.quantized_sequence_lookup(weights, [8] * 4, bits, *rest, torch.float32, "a@a,b@b,c@c,d@d")
except RuntimeError as error:
    print(error)
"""

SEARCH = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1])
for args, (score, place) in torch.load(sys.argv[2]):
    found = torch.ops.tilerec.best_rows(*args)
    print(torch.equal(found[0], score), torch.equal(found[1], place))
for query in (args[0][:, 1:], args[0] / 0):
    try:
        torch.ops.tilerec.best_rows(query, *args[1:])
    except RuntimeError as error:
        print(error)
"""


def _library() -> ctypes.CDLL:
    """Load the library after Python has defined the ops."""
    library = ctypes.CDLL(str(ops_library()))
    library.tilerec_ops_schemas.restype = ctypes.c_char_p
    return library


def test_the_library_and_python_have_the_same_schemas() -> None:
    schemas = _library().tilerec_ops_schemas().decode().splitlines()
    assert len(schemas) >= 14
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


def test_quantized_rows_are_read_without_python(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(4, 50, 9, generator=generator)
    rows = [*(quantize_rows(each, bits) for each, bits in zip(floats, BITS, strict=False)), floats[3].half()]
    ids, offsets = torch.arange(60) % 50, torch.tensor([0, 3, 3, 10, 20, 25, 30, 41, 60])
    tables = (rows, [9] * 4, [*BITS, 0], ids)
    cases = [
        ("quantized_pooled_lookup", (*tables, offsets, torch.rand(60), [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 1], [2])),
        ("quantized_sequence_lookup", (*tables, torch.tensor([0, 20, 30, 41, 60]), [0, 1, 2, 3])),
    ]
    found = [(op, args, getattr(torch.ops.tilerec, op)(*args, torch.float32, "a@a,b@b,c@c,d@d")) for op, args in cases]
    torch.save(found, tmp_path / "cases.pt")
    command = [sys.executable, "-c", QUANTIZED, str(ops_library()), str(tmp_path / "cases.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, error = done.stdout.splitlines()[:3]
    assert first == "quantized_pooled_lookup True"
    assert second == "quantized_sequence_lookup True"
    assert "quantized_sequence_lookup: got table" in error


def test_items_are_found_without_python(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(5, 70, generator=generator)
    queries[1], queries[2] = 0, queries[2] * 1e-44  # codes of 0
    vectors = torch.randn(200, 70, generator=generator)
    codes, scale = quantized(vectors)
    words = torch.arange(200) % 4
    first = torch.tensor([[0, 100], [20, 60], [0, 190], [-5, 150], [9, 9]])
    found = []
    for rows, scales in ((vectors, scale[:0]), (codes, scale)):
        args = queries, rows, scales, words, first, first + 30, torch.tensor([0, 1, 2, 0, 0]), torch.zeros(5).long(), 7
        found.append((args, torch.ops.tilerec.best_rows(*args)))
    torch.save(found, tmp_path / "cases.pt")
    command = [sys.executable, "-c", SEARCH, str(ops_library()), str(tmp_path / "cases.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    same, again, size, finite = (line for line in done.stdout.splitlines() if line and not line.startswith("Exception"))
    assert same == again == "True True"
    assert "best_rows: got queries of 69 numbers; expected float32 [B, 70]" in size
    assert "best_rows: got query 0 with values that are not finite" in finite
