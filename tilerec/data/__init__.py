"""Batches, data sets, and statistics of their ids."""

from tilerec.data.batch import Batch
from tilerec.data.criteo import Criteo
from tilerec.data.dataset import Dataset, SparseFeature
from tilerec.data.delimited import Block, Column, ColumnKind, DelimitedFile, RowCount
from tilerec.data.movielens import MovieLens
from tilerec.data.rows import Vocabulary, hash_rows, hash_values
from tilerec.data.synthetic import PowerLawFeature, SyntheticClicks
from tilerec.data.transform import signed_log

__all__ = [
    "Batch",
    "Dataset",
    "SparseFeature",
    "SyntheticClicks",
    "PowerLawFeature",
    "MovieLens",
    "Criteo",
    "DelimitedFile",
    "Column",
    "ColumnKind",
    "Block",
    "RowCount",
    "hash_rows",
    "hash_values",
    "Vocabulary",
    "signed_log",
]
