"""Losses of ranks: how a rank recognises one, and how the launcher passes on the folder for files in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tilerec.comms.process import is_peer_failure
from tilerec.errors import CommsError

FOLDER = "TILEREC_MEMORY"
"""Environment variable with the folder for files in memory, set by a launcher that replaces killed ranks."""
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable with the number of earlier starts of these ranks."""


def is_lost_peer(error: BaseException) -> bool:
    """Return True if an error was caused by another rank that failed."""
    return isinstance(error, CommsError) or is_peer_failure(str(error))


def attempt(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of earlier starts of the ranks of this run."""
    text = (os.environ if environ is None else environ).get(ATTEMPT, "0")
    return int(text) if text.isdecimal() else 0
