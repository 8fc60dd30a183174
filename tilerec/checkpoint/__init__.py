"""Checkpoints of whole jobs: every part of a job in one folder, under any plan and any number of ranks."""

from tilerec.checkpoint.changes import Changes
from tilerec.checkpoint.compaction import compact
from tilerec.checkpoint.dcp_export import export_dcp
from tilerec.checkpoint.dcp_import import import_dcp
from tilerec.checkpoint.id_sizes import saved_id_sizes
from tilerec.checkpoint.job_tables import announce_write
from tilerec.checkpoint.loading import load
from tilerec.checkpoint.manager import CheckpointManager, latest
from tilerec.checkpoint.running_save import RunningSave, save_ahead
from tilerec.checkpoint.saving import save
from tilerec.checkpoint.torchrec_import import import_torchrec

__all__ = [
    "Changes",
    "CheckpointManager",
    "RunningSave",
    "announce_write",
    "compact",
    "export_dcp",
    "import_dcp",
    "import_torchrec",
    "latest",
    "load",
    "save",
    "save_ahead",
    "saved_id_sizes",
]
