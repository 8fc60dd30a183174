"""Today's code gives the bits of the golden file. `write.py` says what to do where bits change on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden import record
from tests.golden.cases import CASES, NIGHTLY
from tilerec import backends

WRITE = Path(__file__).with_name("write.py")
NIGHT = os.environ.get("TILEREC_NIGHTLY") == "1"
DAILY = record.read(record.DAILY_FILE)


@pytest.fixture(scope="module", autouse=True)
def _processes_find_these_files() -> Iterator[None]:
    """Ranks that are processes start with this path; pytest alone does not put it there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        yield


def test_the_file_has_every_case_and_no_other() -> None:
    assert set(DAILY) == set(CASES)
    assert set(record.read(record.NIGHTLY_FILE)) == set(NIGHTLY)


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_golden_file(name: str) -> None:
    assert CASES[name]() == DAILY.get(name), f"the bits of {name} changed (tests/golden/write.py)"


@pytest.mark.nightly
@pytest.mark.skipif(not NIGHT, reason="the other half of the dealt runs takes a minute: TILEREC_NIGHTLY=1")
@pytest.mark.skipif(not backends.NATIVE_CPU, reason="nightly hashes are of the native library")
@pytest.mark.parametrize("name", NIGHTLY)
def test_bits_of_nightly_cases_are_those_of_the_golden_file(name: str) -> None:
    want = record.read(record.NIGHTLY_FILE).get(name)
    assert NIGHTLY[name]() == want, f"the bits of {name} changed (tests/golden/write.py --nightly)"


@pytest.mark.nightly
@pytest.mark.skipif(not NIGHT, reason="processes that run all cases again take minutes: TILEREC_NIGHTLY=1")
@pytest.mark.skipif(not backends.NATIVE_CPU, reason="it compares the native library with other settings of it")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "settings",
    [
        {"TILEREC_NATIVE": "0", "OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"},
        {
            "TILEREC_ISA": "base",
            "ATEN_CPU_CAPABILITY": "default",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "1",
        },
        {"TILEREC_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "2"},
    ],
    ids=["reference kernels", "no vectors, one thread", "short vectors, two threads"],
)
def test_bits_depend_on_neither_vectors_nor_threads_nor_hash_seed(settings: dict[str, str]) -> None:
    command = [sys.executable, "-W", "ignore", str(WRITE), "--check"]
    found = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
