"""`RankVotes`: ranks agree on requests that reach them at different times, without a wait in a step.

    step       7        8        9       10       11       12
    post       votes                     votes
    collect             any?                      any?

A rank posts an asynchronous sum of its votes at one step, and reads it at the next, when it has long arrived. All ranks
post and read at the same steps, so they act at the same step. The sum also has the time per step, which decides how
many steps lie between two posts: about one post in `interval_s`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

import torch

from tilerec.comms.group import Group, Handle

_INTERVAL_S = 0.5
"""A post and its sum take 0.3 ms of a rank's CPU on 2 ranks over gloo and 2 busy cores: 0.06% of this."""
_MOST_STEPS = 64
"""Steps from one post to the next: few enough if steps become slow all at once."""


@final
class RankVotes:
    """Votes of all ranks on some questions. Every rank makes the same calls at the same steps.

    Args:
        group: the ranks; None for one process, whose votes count at once.
        questions: number of votes of each rank.
        interval_s: seconds between two posts.
    """

    def __init__(self, group: Group | None, questions: int, interval_s: float = _INTERVAL_S) -> None:
        self._group = group if group is not None and group.size > 1 else None
        self._none = (False,) * questions
        self._interval_s = interval_s
        self._posted: Handle | None = None
        self._next: int | None = None  # step of the next post
        self._last = 0  # step of the last post
        self._since = 0.0  # time of the last post

    def at(self, step: int, votes: Sequence[bool]) -> tuple[bool, ...]:
        """Return, for each question, True if a rank has voted for it. Called once per step. Collective."""
        if self._group is None:
            return tuple(votes)
        if self._posted is not None:
            found, step_us = self._collect(self._group.size)
            # The first post does not know the time of a step.
            per_post = int(self._interval_s * 1e6 / step_us) if step_us else 1
            self._next = self._last + max(1, min(per_post, _MOST_STEPS))
        else:
            found = self._none
        if self._next is None or step >= self._next:
            self._post(step, votes)
        return found

    def decide(self, votes: Sequence[bool]) -> tuple[bool, ...]:
        """Return, for each question, True if a rank votes for it now; waits for all ranks. Collective."""
        if self._group is None:
            return tuple(votes)
        earlier = self._collect(self._group.size)[0] if self._posted is not None else self._none
        self._post(self._last, votes)
        return tuple(a or b for a, b in zip(earlier, self._collect(self._group.size)[0], strict=True))

    def _post(self, step: int, votes: Sequence[bool]) -> None:
        assert self._group is not None
        now = time.perf_counter()
        # 0: the time is not known yet.
        step_us = max(1, int(1e6 * (now - self._since) / max(step - self._last, 1))) if self._since else 0
        self._last, self._since = step, now
        numbers = torch.tensor([*map(int, votes), step_us], dtype=torch.int64)
        self._posted = self._group.all_reduce_("votes", numbers.to(self._group.device))

    def _collect(self, size: int) -> tuple[tuple[bool, ...], int]:
        """Return the answers, and the mean time per step in microseconds."""
        assert self._posted is not None
        *sums, step_us = self._posted.wait().tolist()
        self._posted = None
        return tuple(number > 0 for number in sums), step_us // size
