"""`RunMemory`: a run whose rank is killed goes on from the memory of the other ranks, not from disk.

    step         every rank keeps an undo log of the tables' rows, and copies of everything else (`StepMemory`)
    kill         the other ranks fail in a collective, each somewhere in a step; they write their memory to files in
                 memory, and end
    launcher     starts all ranks anew, one in place of the killed one
    new ranks    map the files of their predecessors, agree on the newest step that all of these can reach, undo the
                 later writes, and exchange what a rank lacks (`MemorySource`)

Processes end instead of living on because a rank may wait in a collective of torch's `DistributedDataParallel`, which
only the end of a connection ends, and because a process group with a lost member has calls that never end. A file in
memory survives the process at the cost of one more copy; the new process needs no other memory than a new rank.

Random generators and losses are each rank's own, so each rank sends its own to all others after a step, and reads
theirs one step later. The step of an exchange that all have read is the newest one to go back to.

Legend: W ranks, N bytes.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from tilerec.checkpoint.changes import Changes
from tilerec.checkpoint.loading import load_from
from tilerec.checkpoint.memory_source import HeldMemory, MemorySource
from tilerec.checkpoint.step_memory import StepMemory
from tilerec.comms.agreement import errors_of_ranks
from tilerec.comms.group import Group, Handle
from tilerec.errors import CommsError, ConfigError, TilerecError
from tilerec.train.config import RunConfig
from tilerec.train.lost_peers import FOLDER, attempt, is_lost_peer
from tilerec.train.world import World

if TYPE_CHECKING:
    from tilerec.train.training_run import Run


@final
class RunMemory:
    """The last steps of a run in memory, and those that an earlier attempt has left.

    Args:
        group: the ranks.
        folder: of the files in memory, the same in all attempts of one launch.
        attempt: number of earlier attempts.
    """

    def __init__(self, group: Group, folder: Path, attempt: int) -> None:
        self._group, self._folder, self.attempt = group, folder, attempt
        self._memory: StepMemory | None = None
        self._posted: tuple[int, Handle] | None = None
        self._records: dict[int, Tensor] = {}  # uint8 [W, N] by step

    @staticmethod
    def of(config: RunConfig, world: World) -> RunMemory | None:
        """Return the memory of a run with `parallel.replace`; None for others, and where no launcher replaces ranks."""
        if not config.parallel.replace:
            return None
        folder = os.environ.get(FOLDER)
        if folder is None or world.group is None or world.size == 1:
            warnings.warn("parallel.replace has no effect without --nproc and two or more ranks.", stacklevel=3)
            return None
        return RunMemory(world.group, Path(folder), attempt())

    # ------------------------------------------------------------------------------------------------ in each step

    def begin(self, run: Run) -> None:
        """Keep the run from now on, and remove what earlier attempts have left. Collective."""
        failure: ConfigError | None = None
        try:
            self._memory = StepMemory(run.parts())
        except ConfigError as error:
            failure = error
        errors = errors_of_ranks(self._group, failure)
        if errors:
            self._memory = None
            if not self._group.rank:
                text = next(iter(errors.values()))
                warnings.warn(f"{text} parallel.replace goes on from the newest checkpoint.", stacklevel=3)
        self.step_ended(run)
        self._collect()
        self._group.barrier()
        for earlier in range(self.attempt):
            self._file(earlier).unlink(missing_ok=True)

    def step_ended(self, run: Run) -> None:
        """Keep the state at the present step, and exchange the ranks' own records. Collective."""
        if self._memory is None:
            return
        self._collect()
        self._memory.keep(run.steps, run.counters())
        own = run.own_record(self._group.device)
        received = torch.empty(own.numel() * self._group.size, dtype=torch.uint8, device=own.device)
        sizes = [own.numel()] * self._group.size
        handle = self._group.all_to_all("records of steps", received, own.repeat(self._group.size), sizes, sizes)
        self._posted = run.steps, handle

    def _collect(self) -> None:
        """Read the records of the last step."""
        if self._posted is not None:
            step, handle = self._posted
            received = handle.wait()
            self._posted = None
            self._records[step] = received.view(self._group.size, -1)
            for old in sorted(self._records)[:-2]:
                del self._records[old]

    # ------------------------------------------------------------------------------------------------ after a loss

    def finish(self) -> None:
        """Wait until no rank needs the memory of another one any more. Collective."""
        self._group.barrier()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def hand_over(self, error: BaseException) -> None:
        """Leave this rank's memory to the process that takes its place, if the run has lost a peer."""
        if self._memory is None or not is_lost_peer(error):
            return
        self._group.abort(error)  # ranks that wait for this one need not wait for the end of its process
        records = {step: {"records": records.cpu()} for step, records in self._records.items()}
        try:
            self._memory.write(self._file(self.attempt), records)
        except TilerecError as failure:
            print(f"rank {self._group.rank}: its memory is lost: {failure}", file=sys.stderr, flush=True)

    def recover(self, run: Run, newest: int) -> bool:
        """Continue from the memory of the earlier ranks; return False if it is not enough. Collective.

        Args:
            newest: step of the newest checkpoint, -1 if there is none. Memory of no later step is not used: this step
                must not be saved again.
        """
        for earlier in reversed(range(self.attempt)):
            source = MemorySource.of(self._group, self._held(earlier))
            if source is None or source.step <= newest:
                continue
            try:
                _load(source, run, self._group)
            except CommsError:
                raise
            except TilerecError as error:
                if not self._group.rank:
                    warnings.warn(f"{error} The newest checkpoint is loaded.", stacklevel=2)
                continue
            run.load_record(source.values, source.values["records"][self._group.rank])
            return True
        return False

    def _held(self, earlier: int) -> HeldMemory | None:
        """Return what this rank's process of an earlier attempt has left."""
        try:
            return HeldMemory(self._file(earlier))
        except OSError:
            return None

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}-rank{self._group.rank}.safetensors"


def _load(source: MemorySource, run: Run, group: Group) -> None:
    load_from(lambda _: source, run.parts(), group, Changes())
