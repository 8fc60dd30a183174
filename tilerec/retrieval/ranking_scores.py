"""`RankingScores`: scores of a ranking task on held-out queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilerec.train.scores import HeldOutScores


@dataclass(frozen=True)
class RankingScores(HeldOutScores):
    """Exact scores over all items (`tilerec.metrics.ranking`).

    Attributes:
        samples: queries with at least one relevant item.
        values: by name, such as "recall@10".
    """

    samples: int
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        return dict(self.values)

    def with_numbers(self, numbers: dict[str, float]) -> RankingScores:
        return RankingScores(self.samples, numbers)

    def __getitem__(self, name: str) -> float:
        """Return a score by name: scores["ndcg@10"]."""
        return self.values[name]
