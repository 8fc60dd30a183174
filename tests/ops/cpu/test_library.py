"""The native library: found or not, its threads, its instruction sets, its conversions of numbers."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilerec.ops.runtime.cpu import library as native
from tilerec.ops.runtime.cpu.records import RECORDS, layout

LIBRARY = native.library()
REPOSITORY = Path(native.__file__).parents[3]
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")


def python(code: str, **environment: str) -> str:
    """Run code in a fresh Python; what it printed. The limit is for a machine that is busy with other things."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("TILEREC_", "COV_"))}
    settings |= {"PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def lib() -> Iterator[ctypes.CDLL]:
    """The library; its instruction set is put back afterwards."""
    assert LIBRARY is not None
    before = LIBRARY.tr_isa()
    yield LIBRARY
    LIBRARY.tr_isa_choose(before)


def convert(lib: ctypes.CDLL, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(numbers.shape, dtype=dtype)
    lib.tr_convert(
        ctypes.c_void_p(numbers.data_ptr()), native.DTYPES[numbers.dtype], ctypes.c_void_p(out.data_ptr()),
        native.DTYPES[dtype], ctypes.c_int64(numbers.numel()),
    )  # fmt: skip
    return out


def levels(lib: ctypes.CDLL) -> range:
    return range(lib.tr_isa_widest() + 1)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_widens_exactly_on_every_instruction_set(lib: ctypes.CDLL, half: torch.dtype) -> None:
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(half)
    want = numbers.to(torch.float32)
    for level in levels(lib):
        assert lib.tr_isa_choose(level) == level
        got = convert(lib, numbers, torch.float32)
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_to_nearest_even_on_every_instruction_set(lib: ctypes.CDLL, half: torch.dtype) -> None:
    anything = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64)
    # Around fp16's smallest normal and subnormal numbers, its overflow, and ties.
    edges = [torch.arange(at - 3000, at + 3000) for at in (0x38800000, 0x33000000, 0x477FF000, 0x7F800000, 0x3F808000)]
    numbers = torch.cat([anything, *edges]).to(torch.int32).view(torch.float32)
    numbers = torch.cat([numbers, -numbers])
    real = ~numbers.isnan()
    want = numbers.to(half)
    for level in levels(lib):
        lib.tr_isa_choose(level)
        got = convert(lib, numbers, half)
        assert torch.equal(got[real].view(torch.int16), want[real].view(torch.int16))
        assert got[~real].isnan().all()


@pytest.mark.parametrize("count", [0, 1, 3, 5, 8, 15, 17, 257])
@pytest.mark.parametrize("dtype", list(native.DTYPES))
def test_conversion_of_any_length_touches_only_its_numbers(lib: ctypes.CDLL, dtype: torch.dtype, count: int) -> None:
    numbers = torch.randn(count + 40)
    for level in levels(lib):
        lib.tr_isa_choose(level)
        for other in native.DTYPES:
            source = numbers.to(dtype)
            out = torch.full((count + 40,), 7.0, dtype=other)
            lib.tr_convert(
                ctypes.c_void_p(source[3:].data_ptr()), native.DTYPES[dtype], ctypes.c_void_p(out[5:].data_ptr()),
                native.DTYPES[other], ctypes.c_int64(count),
            )  # fmt: skip
            assert torch.equal(out[5 : 5 + count], source[3 : 3 + count].to(other))
            assert (out[:5] == 7).all()
            assert (out[5 + count :] == 7).all()


def test_status_names_file_instruction_set_and_openmp_runtime() -> None:
    state = native.status()
    assert state.path is not None
    assert state.path.is_file()
    assert state.isa in native.ISAS
    assert state.reason == native.reason() == ""
    assert str(state.path) in str(state)


def test_a_wider_instruction_set_than_the_machine_has_is_never_chosen(lib: ctypes.CDLL) -> None:
    assert lib.tr_isa_choose(99) == lib.tr_isa_widest()
    assert lib.tr_isa_choose(-1) == 0


def test_advice_on_pages_changes_no_value() -> None:
    table = torch.arange(3 << 19, dtype=torch.float32)  # 6 MiB
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    offered = setting.is_file() and "[never]" not in setting.read_text()
    assert native.advise_huge_pages(table) or not offered
    assert torch.equal(table, torch.arange(3 << 19, dtype=torch.float32))
    assert not native.advise_huge_pages(torch.zeros(4))  # less than a page


def test_no_pages_are_advised_on_without_the_library_or_for_other_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not native.advise_huge_pages(torch.zeros(3 << 19, device="meta"))
    monkeypatch.setattr(native, "library", lambda: None)
    assert not native.advise_huge_pages(torch.zeros(3 << 19))


def test_isa_variable_caps_the_vector_width() -> None:
    assert native.status().path is not None
    code = f"import ctypes; print(ctypes.CDLL({str(native.status().path)!r}).tr_isa())"
    assert python(code, TILEREC_ISA="base") == "0"


def test_variable_zero_leaves_the_reference_in_charge() -> None:
    code = """
import torch
import tilerec.ops.backends as backends
from tilerec.ops.runtime.cpu.library import library, reason
assert library() is None and not backends.NATIVE_CPU
out, _ = torch.ops.tilerec.pooled_lookup([torch.ones(3, 2)], torch.empty(0, dtype=torch.int64), torch.tensor([2, 0]),
    torch.tensor([0, 2]), None, [0], [0], [0], [1], torch.float32, "f@t")
print(reason(), out.tolist())
"""
    assert python(code, TILEREC_NATIVE="0") == "TILEREC_NATIVE=0 [[2.0, 2.0]]"


@pytest.mark.parametrize(
    ("contents", "reason"),
    [(None, "does not exist; the package was installed without"), (b"no library", "cannot be loaded")],
)
def test_a_library_that_cannot_be_used_is_told_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: bytes | None, reason: str
) -> None:
    path = tmp_path / "lib.so"
    if contents is not None:
        path.write_bytes(contents)
    monkeypatch.setenv("TILEREC_NATIVE_LIBRARY", str(path))
    found, state = native._load()
    assert found is None
    assert reason in state.reason
    assert state.reason in str(state)


class Found:
    """What a library built from other sources answers."""

    def __init__(self, version: int, layout: str) -> None:
        self.tr_abi_version = lambda: version
        self.tr_isa = lambda: 0
        self.tr_layout = Text(layout)


class Text:
    """A C function that returns text."""

    restype: object = None

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self) -> bytes:
        assert self.restype is ctypes.c_char_p
        return self.text.encode()


OTHER_SOURCES = [
    (1, layout(), "has interface 1; expected"),
    (999, layout(), "has interface 999; expected"),
    (
        native.ABI_VERSION,
        layout().replace("keys 16+8", "keys 24+8"),
        "it has 'tr_lookup .*; expected 'tr_lookup",
    ),
    (native.ABI_VERSION, layout().replace("tr_rows 1", "tr_rows 2"), "it has 'tr_rows .*; expected 'tr_rows"),
    (native.ABI_VERSION, layout().partition("\n")[0], "it has 'nothing'; expected 'tr_lookup"),
    (native.ABI_VERSION, layout() + "\ntr_more 8: x 0+8", "it has 'tr_more 8: x 0.8'; expected 'nothing'"),
]


@pytest.mark.parametrize(("version", "text", "reason"), OTHER_SOURCES)
def test_a_library_built_from_other_sources_is_refused_and_to_be_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, text: str, reason: str
) -> None:
    path = tmp_path / "other.so"
    path.write_bytes(b"")
    monkeypatch.setenv("TILEREC_NATIVE_LIBRARY", str(path))
    monkeypatch.setattr(native, "_promote_openmp", lambda: "")
    monkeypatch.setattr(native.ctypes, "CDLL", lambda _: Found(version, text))
    found, state = native._load()
    assert found is None
    assert re.search(reason, state.reason), state.reason
    assert state.reason.endswith("Build it again (make native)")


def test_a_library_older_than_its_layout_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "old.cpp"
    source.write_text(f'extern "C" int tr_abi_version() {{ return {native.ABI_VERSION}; }}')
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "old.so")], check=True)
    monkeypatch.setenv("TILEREC_NATIVE_LIBRARY", str(tmp_path / "old.so"))
    found, state = native._load()
    assert found is None
    assert "cannot be loaded" in state.reason


def test_every_record_lies_as_the_library_says(lib: ctypes.CDLL) -> None:
    lib.tr_layout.restype = ctypes.c_char_p
    lines = lib.tr_layout().decode().split("\n")
    assert lines == layout().split("\n")
    assert [line.split()[0] for line in lines] == list(RECORDS)
    assert lines[0] == "tr_report 32: status 0+8 feature 8+8 position 16+8 value 24+8"


def test_threads_come_from_the_runtime_that_torch_loaded(lib: ctypes.CDLL) -> None:
    assert native.status().openmp, "torch's OpenMP runtime was not found"
    assert lib.tr_threads(1) == 1
    assert lib.tr_threads(2) == 2


def test_a_fresh_python_thread_gets_the_threads_it_asks_for(lib: ctypes.CDLL) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(lib.tr_threads(2)))
    thread.start()
    thread.join()
    assert seen == [2]


def test_a_forked_child_works_alone_instead_of_hanging() -> None:
    code = """
import os
import signal
import torch
import tilerec.ops.backends
from tilerec.ops.runtime.cpu.library import library
torch.set_num_threads(2)
args = ([torch.rand(1000, 64)], torch.empty(0, dtype=torch.int64), torch.arange(50_000) % 1000,
        torch.arange(0, 50_001, 50), None, [0], [0], [0], [1000], torch.float32, "f@t")
want, _ = torch.ops.tilerec.pooled_lookup(*args)  # starts the pool
assert library().tr_threads(2) == 2
child = os.fork()
if child == 0:
    signal.alarm(240)  # a child that hangs ends with -14
    # Compared by bytes: torch's own operators may hang here.
    same = torch.ops.tilerec.pooled_lookup(*args)[0].numpy().tobytes() == want.numpy().tobytes()
    os._exit(10 + library().tr_threads(2) if same else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code) == "11"


def test_without_an_openmp_runtime_one_thread_does_the_work() -> None:
    """Loaded by a Python that has no torch, and so no OpenMP runtime."""
    assert native.status().path is not None
    code = f"""
import ctypes, sys
lib = ctypes.CDLL({str(native.status().path)!r})
assert "torch" not in sys.modules
maps = open("/proc/self/maps").read()
assert not any(name in maps for name in ("libgomp", "libomp", "libiomp")), maps
out = (ctypes.c_float * (1000 * 64))()
lib.tr_random_fill.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_uint32] * 2, *[ctypes.c_int64] * 3,
                               *[ctypes.c_float] * 2, ctypes.c_int64]
lib.tr_random_fill(out, 0, 1000, 64, 0, 0, 0, 0, 0, 0.0, 1.0, 4)
print(lib.tr_threads(4), round(out[0], 6), 0.0 < min(out) < max(out) < 1.0)
"""
    assert python(code) == "1 0.399046 True"
