"""`BatchInFlight`: a batch between its reading and its update, and its origin."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tilerec.comms.group import Handle
from tilerec.errors import InputError
from tilerec.pipelines.batch_structure import Marks
from tilerec.sharding.posted_headers import PostedHeaders
from tilerec.storage.prefetched_results import StreamEvent


@dataclass(frozen=True)
class Origin:
    """The place of a batch.

    Attributes:
        iterator: number of the pass, counted from 0 in the order in which passes began.
        batch: number of the batch in the pass, counted from 0.
        filler: True for an empty batch, which a rank gets while other ranks still have batches.
    """

    iterator: int
    batch: int
    filler: bool = False


@dataclass(eq=False)
class BatchInFlight:
    """A batch between its reading and its update.

    Attributes:
        error: raised at the batch's turn.
        unread: True if this rank could not read the batch.
        number: number of samples for the other ranks, `END` or `FAILED`; None if ranks do not exchange it.
        handle: the exchange of it with the other ranks, if it has a message of its own.
        carrier: the headers of a route that carry it instead.
        all_samples: number of samples of each rank at the batch's turn, 0 for ranks without a batch; None if ranks do
            not exchange it.
        some_ended: True if a rank has no batch at this turn.
        done: names of the stages that have run.
        marks: of the batch's tensors, when it was read or copied to the device.
        stays: True if the iterator returned the batch on the device.
        arrived: on a GPU, the point in the stream of the copies where the batch has arrived.
        begun, routed: see `RoutesAhead`.
        prefetched: number of unsharded collections that have prefetched the batch.
        samples: number of this rank's samples, if the loss of the cycle needs it.
        loss, output: results of the forward.
        trained: True if a backward ran at the batch's turn.
    """

    origin: Origin
    batch: Any = None
    error: Exception | None = None
    unread: bool = False
    number: int | None = None
    handle: Handle | None = None
    carrier: PostedHeaders | None = None
    all_samples: list[int] | None = None
    some_ended: bool = False
    done: set[str] = field(default_factory=set)
    marks: Marks | None = None
    stays: bool = False
    arrived: StreamEvent | None = None
    begun: list[Any] = field(default_factory=list)
    routed: dict[tuple[int, int], deque[Any]] = field(default_factory=dict)
    prefetched: int = 0
    samples: int = 0
    loss: Any = None
    output: Any = None
    trained: bool = False

    @property
    def unsent(self) -> bool:
        """True if the batch has a number for the other ranks that has not been sent."""
        return self.number is not None and self.handle is None and self.carrier is None

    def wait(self) -> None:
        """Wait for the messages in flight of a batch that trains on no rank."""
        if self.handle is not None:
            self.handle.wait()
        for route in self.begun:
            if route.flight is not None:
                route.flight.wait()
            if route.routed is not None:
                route.routed.wait()

    def release(self) -> None:
        """Release the batch's memory, after the forward."""
        self.batch = self.marks = None

    def check_unwritten(self, who: str) -> None:
        """Raise an `InputError` if the batch was written to after it was copied to the device."""
        if self.marks is not None and self.marks.changed():
            raise InputError(
                f"{who}: batch {self.origin.batch} of iterator {self.origin.iterator} was written to after it was "
                "read, while it waited for its turn; expected batches that stay as they are. Let the iterator "
                "return new tensors for every batch, or write to a clone."
            )
