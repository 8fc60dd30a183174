"""Retrieval and next-item models: losses, exact search, scores, exported indexes."""

from tilerec.retrieval.baselines import baseline_scores
from tilerec.retrieval.exact_search import ExactSearch, Nearest, Pairs
from tilerec.retrieval.index_files import write_index
from tilerec.retrieval.next_item_task import NextItemConfig, NextItemTask
from tilerec.retrieval.ranking_scores import RankingScores
from tilerec.retrieval.ranking_task import IndexVectors, RankingConfig, RankingTask
from tilerec.retrieval.softmax import softmax_losses
from tilerec.retrieval.two_tower_task import RetrievalConfig, RetrievalTask

__all__ = [
    "ExactSearch",
    "IndexVectors",
    "Nearest",
    "NextItemConfig",
    "NextItemTask",
    "Pairs",
    "RankingConfig",
    "RankingScores",
    "RankingTask",
    "RetrievalConfig",
    "RetrievalTask",
    "baseline_scores",
    "softmax_losses",
    "write_index",
]
