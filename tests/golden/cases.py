"""All golden cases by name: each returns the hashes of a small deterministic run.

    CASES["sharded/row_wise-adam-sum-2-fp32-as_is"]()    ->    {"outputs": "03d8…", "weights": "83a1…", …}

A case's bits depend on nothing but the code: not on the machine's vectors, threads, the order of cases or the seed of
Python's hashes.

To add cases, give them names of their own. A further choice on an axis of `dealt.py` deals all its runs anew, which
renames them, and hashes under new names prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.golden import features, files, kernels, managed, planning, processes, stepped
from tests.golden.dealt import sharded_runs, unsharded_runs
from tests.golden.training import Marks, sharded, unsharded

Case = Callable[[], Marks]

_day, _night = sharded_runs()

CASES: dict[str, Case] = {
    **{f"unsharded/{run.name}": partial(unsharded, run) for run in unsharded_runs()},
    **{f"sharded/{run.name}": partial(sharded, run) for run in _day},
    **features.CASES,
    **managed.CASES,
    **kernels.CASES,
    **stepped.CASES,
    **planning.CASES,
    **processes.CASES,
    **files.CASES,
}
"""The cases of every run of the tests."""

NIGHTLY: dict[str, Case] = {f"sharded/{run.name}": partial(sharded, run) for run in _night}
"""The cases that run with TILEREC_NIGHTLY=1 only."""
