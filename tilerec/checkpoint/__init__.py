"""Checkpoints of whole jobs: every part of a job in one folder, under any plan and any number of ranks."""

from tilerec.checkpoint.changes import Changes
from tilerec.checkpoint.loading import load
from tilerec.checkpoint.manager import CheckpointManager, latest
from tilerec.checkpoint.saving import save

__all__ = ["Changes", "CheckpointManager", "latest", "load", "save"]
