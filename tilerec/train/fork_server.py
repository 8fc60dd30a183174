"""Imported by the fork server alone: the processes that it forks get their signals again.

The server starts with SIGINT and SIGTERM held back (`launch.py`), and its children inherit that. It serves the whole
process that started it, so some children are not ranks: without this, `terminate()` would not end a data loader's
worker.
"""

from __future__ import annotations

import os

from tilerec.stop_signals import release_signals

os.register_at_fork(after_in_child=release_signals)
