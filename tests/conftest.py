"""What every test runs under: poisoned memory, fixed seeds, quiet neighbours.

- `torch.empty` and its relatives return NaN (float) or a large odd number (int32, int64), so a kernel that
  forgets an element fails here and not once a month in production. Mark a test `real_empty` to opt out.
- Every random generator is seeded before each test, and thread counts and default dtypes are put back.
- Hypothesis draws the same examples every time (`derandomize`).
- Warnings are errors; the few exceptions are in `pyproject.toml`, each with its reason.
"""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Several workers of two threads each share the cores: a thread that waits in a loop, as is libgomp's way, keeps its
# core from the thread that it waits for, and small steps take five times as long. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What inductor compiles here needs no vectors: their headers are half of the compiler's time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import hypothesis
import numpy as np
import pytest
import torch
from torch.utils import _device
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tilerec import phase

hypothesis.settings.register_profile(
    "tilerec",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("TILEREC_TEST_EXAMPLES", "30")),
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("tilerec")

# A shell script starts `make test &` with SIGINT ignored, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where there is no GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The integers: far outside every table and buffer, and odd so that halving does not make them plausible.
POISON = {
    torch.float16: float("nan"),
    torch.bfloat16: float("nan"),
    torch.float32: float("nan"),
    torch.float64: float("nan"),
    torch.int32: 0x5A5A5A5B,
    torch.int64: 0x5A5A5A5A5A5A5A5B,
}
# Bigger tensors are reserved address space (tests of rows beyond 2**31), not memory to be written.
POISON_AT_MOST_BYTES = 256 * 2**20


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = make(*args, **kwargs)
        # Tracers (compile, export, fake tensors) see torch as it is: their programs are torch's business.
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
            return out
        if type(out) is not torch.Tensor or out.is_meta or out.layout is not torch.strided:
            return out
        if out.dtype in POISON and out.untyped_storage().nbytes() <= POISON_AT_MOST_BYTES:
            out.data.fill_(POISON[out.dtype])  # `.data`: neither the graph nor the version counter sees it
        return out

    empty.__name__ = make.__name__
    empty.__doc__ = f"torch's {make.__name__}, with memory that is visibly not written yet."
    return empty


_SITES: list[tuple[Any, str]] = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]
_REAL = {(owner, name): getattr(owner, name) for owner, name in _SITES}
_POISONED = {site: _poisoned(real) for site, real in _REAL.items()}


def _set(functions: dict[tuple[Any, str], Callable[..., torch.Tensor]]) -> None:
    for (owner, name), function in functions.items():
        setattr(owner, name, function)


def pytest_configure(config: pytest.Config) -> None:
    # `with torch.device(...)` remembers the factory functions on first use: let it remember torch's own.
    _device._device_constructors()
    _set(_POISONED)


# Minutes of few tests: given out first, so that no worker is left alone with one of them at the end.
LONG = (
    "hosts", "modules/test_compile.py", "simulated_gpu", "test_cli.py", "parallel/test_reshard",
    "comms/test_process.py", "ops/triton/test_update.py", "ops/triton/test_lookup.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    items.sort(key=lambda item: not item.path.relative_to(here).as_posix().startswith(LONG))


def pytest_collection_finish() -> None:
    """Ten thousand tests stay until the end: the garbage collector need not look at them each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()
    _set(_REAL)


@pytest.fixture(autouse=True)
def _real_empty_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("real_empty") is None:
        yield
        return
    _set(_REAL)
    yield
    _set(_POISONED)


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    """Two threads unless OMP_NUM_THREADS says otherwise: it meets every race, on any machine."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


@pytest.fixture(scope="session", autouse=True)
def _no_lines_of_phases() -> None:
    """A phase of a command that takes a second gets no line: on a slow machine it would be part of an output."""
    phase.LINE_AFTER_S = math.inf


@pytest.fixture(scope="session", autouse=True)
def _compile_caches_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing compiled in an earlier session is found, unless the caller names a cache."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    os.environ.setdefault("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


@pytest.fixture(scope="session")
def compile_backend() -> str:
    """A backend for `torch.compile`: inductor, or aot_eager where the C++ that inductor writes cannot be compiled.

    That C++ includes Python.h, which Debian ships apart (python3-dev). aot_eager traces, partitions and
    functionalizes the same graphs and then runs them op by op.
    """
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return "inductor" if headers.exists() else "aot_eager"
