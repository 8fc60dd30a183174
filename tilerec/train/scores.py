"""`HeldOutScores`: scores of one task on held-out samples, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable


class HeldOutScores(ABC):
    """Scores of one task (abstract).

    Attributes:
        samples: number of samples.
    """

    samples: int

    @property
    @abstractmethod
    def numbers(self) -> dict[str, float]:
        """The scores by name, in the order of reports; NaN where the samples do not define a score."""

    @abstractmethod
    def with_numbers(self, numbers: dict[str, float]) -> HeldOutScores:
        """Return scores of the same kind and number of samples with other numbers."""


def mean_scores(several: Iterable[HeldOutScores]) -> HeldOutScores:
    """Return the mean of the scores of tasks on the same samples."""
    found = list(several)
    if len(found) == 1:
        return found[0]
    means = {name: sum(one.numbers[name] for one in found) / len(found) for name in found[0].numbers}
    return found[0].with_numbers(means)


def score_record(scores: HeldOutScores) -> dict[str, float]:
    """Return the number of samples and the scores, as JSON values."""
    return {"samples": scores.samples, **scores.numbers}
