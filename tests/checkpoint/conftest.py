"""The pools of processes of tests/parallel."""

from tests.parallel.conftest import pool as pool
