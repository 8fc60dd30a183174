"""The pools of processes of tests/parallel, and counts of faults."""

from tests.chaos.fault_counts import counts as counts
from tests.parallel.conftest import pool as pool
