"""`libtilerec_ops.so`: the schemas of Python, and a process that has both."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest
import torch

from tilerec.export.manifest import OPS_ABI
from tilerec.export.torch_library import ops_path
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

ALONE = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1])
found = []
for op, args in torch.load(sys.argv[2]):
    try:
        found.append(getattr(torch.ops.tilerec, op)(*args))
    except RuntimeError as error:
        found.append(str(error))
torch.save(found, sys.argv[3])
"""

Call = tuple[str, tuple[Any, ...]]


def _library() -> ctypes.CDLL:
    """Load the library after Python has defined the ops."""
    library = ctypes.CDLL(str(ops_path()))
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
    command = [sys.executable, "-W", "error", "-c", BOTH, str(ops_path())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, places, second = done.stdout.splitlines()
    assert first == second == "[0, 2, 2, 3]"
    assert places == "1"  # large outputs reuse their memory


def _quantized_calls() -> list[Call]:
    """Return two lookups of every row type, and one with a wrong number of columns."""
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(4, 50, 9, generator=generator)
    rows = [*(quantize_rows(each, bits) for each, bits in zip(floats, BITS, strict=False)), floats[3].half()]
    ids, offsets = torch.arange(60) % 50, torch.tensor([0, 3, 3, 10, 20, 25, 30, 41, 60])
    tables, end = (rows, [9] * 4, [*BITS, 0], ids), (torch.float32, "a@a,b@b,c@c,d@d")
    every = [0, 1, 2, 3]
    sequence = torch.tensor([0, 20, 30, 41, 60]), every, *end
    return [
        (
            "quantized_pooled_lookup",
            (*tables, offsets, torch.rand(60, generator=generator), every, every, [0, 1, 0, 1], [2], *end),
        ),
        ("quantized_sequence_lookup", (*tables, *sequence)),
        ("quantized_sequence_lookup", (rows, [8] * 4, [*BITS, 0], ids, *sequence)),
    ]


def _search_calls() -> list[Call]:
    """Return a search among float32 and int8 rows, one with short queries, and one with queries that are not finite."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(5, 70, generator=generator)
    queries[1], queries[2] = 0, queries[2] * 1e-44  # codes of 0
    vectors = torch.randn(200, 70, generator=generator)
    codes, scale = quantized(vectors)
    first = torch.tensor([[0, 100], [20, 60], [0, 190], [-5, 150], [9, 9]])
    rest = torch.arange(200) % 4, first, first + 30, torch.tensor([0, 1, 2, 0, 0]), torch.zeros(5).long(), 7
    return [
        ("best_rows", (queries, vectors, scale[:0], *rest)),
        ("best_rows", (queries, codes, scale, *rest)),
        ("best_rows", (queries[:, 1:], codes, scale, *rest)),
        ("best_rows", (queries / 0, codes, scale, *rest)),
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results and errors of all calls in a process that has not imported tilerec."""
    folder = tmp_path_factory.mktemp("alone")
    calls = {"quantized": _quantized_calls(), "search": _search_calls()}
    torch.save([call for own in calls.values() for call in own], folder / "calls.pt")
    command = [sys.executable, "-c", ALONE, str(ops_path()), str(folder / "calls.pt"), str(folder / "found.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = iter(torch.load(folder / "found.pt"))
    return {name: [next(found) for _ in own] for name, own in calls.items()}


def _here(call: Call) -> Any:
    return getattr(torch.ops.tilerec, call[0])(*call[1])


def test_quantized_rows_are_read_without_python(alone: dict[str, list[Any]]) -> None:
    *found, error = alone["quantized"]
    for call, result in zip(_quantized_calls(), found, strict=False):
        assert torch.equal(result, _here(call))
    assert "quantized_sequence_lookup: got table" in error


def test_items_are_found_without_python(alone: dict[str, list[Any]]) -> None:
    *found, size, finite = alone["search"]
    for call, result in zip(_search_calls(), found, strict=False):
        assert all(map(torch.equal, result, _here(call)))
    assert "best_rows: got queries of 69 numbers; expected float32 [B, 70]" in size
    assert "best_rows: got query 0 with values that are not finite" in finite
