"""Rendezvous of one start of torchrun's workers, apart from earlier starts.

torchrun (seen in 2.13) lets the workers of all restarts use one store, under the same keys. A restarted worker then
finds addresses of processes that have ended, and fails or hangs (pytorch issue 135712). So rank 0 of each start chooses
a prefix, and the others join it. A rank may read the prefix of an earlier start first. That start already has all its
ranks, or never gets them, so the rank waits for another prefix.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from tilerec.errors import CommsError
from tilerec.train.placement import Placement, number

_KEY = "tilerec/start"
_PAUSE_S = 0.01


def start_store(place: Placement, environ: Mapping[str, str], timeout: timedelta) -> dist.Store | None:
    """Return the store of this start of torchrun's workers; None if torchrun does not share one. Collective."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    port = number(environ, "MASTER_PORT")
    store = dist.TCPStore(environ.get("MASTER_ADDR", ""), port, is_master=False, timeout=timeout)
    return dist.PrefixStore(agree_on_prefix(store, place.rank, place.size, timeout.total_seconds()), store)


def agree_on_prefix(store: dist.Store, rank: int, size: int, timeout_s: float) -> str:
    """Return a prefix that the ranks of this start have in common, and no earlier start has. Collective.

    Raises:
        CommsError: the ranks have not met in time.
    """
    deadline = time.monotonic() + timeout_s
    own = f"{_KEY}/{os.getpid()}-{uuid.uuid4().hex}"
    if rank == 0:
        store.set(_KEY, own)
    joined = ""
    turn = 0
    while time.monotonic() < deadline:
        if rank == 0:
            if store.add(f"{own}/came", 0) >= size - 1:
                store.set(f"{own}/all", str(size))
                return own
        elif store.check([_KEY]):
            found = store.get(_KEY).decode()
            if found != joined:
                joined, turn = found, store.add(f"{found}/came", 1)
            # Ranks of an earlier start have taken all its turns.
            if store.check([f"{found}/all"]) and turn < int(store.get(f"{found}/all")):
                return found
        time.sleep(_PAUSE_S)
    raise CommsError(
        f"rank {rank} of {size}: got no meeting of all ranks in {timeout_s:g} s; expected the others to start. Look "
        "for the first error in their logs."
    )
