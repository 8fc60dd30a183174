"""Retrieval and next-item models: losses, exact search, scores, exported indexes, item indexes inside of models."""

from tilerec.retrieval.baselines import baseline_scores
from tilerec.retrieval.exact_search import ExactSearch, Nearest, Pairs
from tilerec.retrieval.faiss_index import FaissIndex
from tilerec.retrieval.index_files import write_index
from tilerec.retrieval.item_index import Filters, IndexForm, ItemIndex
from tilerec.retrieval.item_index_file import load_item_index, save_item_index
from tilerec.retrieval.next_item_task import NextItemConfig, NextItemTask
from tilerec.retrieval.ranking_scores import RankingScores
from tilerec.retrieval.ranking_task import IndexVectors, RankingConfig, RankingTask
from tilerec.retrieval.retriever import Retriever, index_of_items
from tilerec.retrieval.softmax import softmax_losses
from tilerec.retrieval.two_tower_task import RetrievalConfig, RetrievalTask

__all__ = [
    "ExactSearch",
    "FaissIndex",
    "Filters",
    "IndexForm",
    "IndexVectors",
    "ItemIndex",
    "Nearest",
    "NextItemConfig",
    "NextItemTask",
    "Pairs",
    "RankingConfig",
    "RankingScores",
    "RankingTask",
    "RetrievalConfig",
    "RetrievalTask",
    "Retriever",
    "baseline_scores",
    "index_of_items",
    "load_item_index",
    "save_item_index",
    "softmax_losses",
    "write_index",
]
