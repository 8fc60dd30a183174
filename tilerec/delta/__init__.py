"""A log of a model's published states: what training has written since the last one, for models that serve."""

from tilerec.delta.follower import DeltaRefused, Follower
from tilerec.delta.log import DeltaLog, Entry, EntryName
from tilerec.delta.record import DeltaRecord, LeftOut
from tilerec.delta.request_lock import RequestLock
from tilerec.delta.writer import DeltaWriter, Published

__all__ = [
    "DeltaLog",
    "DeltaRecord",
    "DeltaRefused",
    "DeltaWriter",
    "Entry",
    "EntryName",
    "Follower",
    "LeftOut",
    "Published",
    "RequestLock",
]
