"""Batches, data sets, and statistics of their ids."""

from tilerec.data.batch import Batch
from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.criteo import Criteo, criteo_columns
from tilerec.data.dataset import Catalog, Dataset, RowDataset, SparseFeature
from tilerec.data.delimited import Block, Column, ColumnKind, DelimitedFile, RowCount
from tilerec.data.hold_out import HoldOut
from tilerec.data.interactions import Interactions, LogSplit
from tilerec.data.movielens import MovieLens
from tilerec.data.parquet_files import ParquetGroups
from tilerec.data.rows import Vocabulary, hash_rows, hash_values
from tilerec.data.synthetic import PowerLawFeature, SyntheticClicks
from tilerec.data.table_dataset import TableDataset
from tilerec.data.table_source import MapGroups, RowGroups, StreamGroups, TableGroups
from tilerec.data.text_files import DelimitedGroups, ListColumn
from tilerec.data.transform import signed_log

__all__ = [
    "Batch",
    "Dataset",
    "RowDataset",
    "Catalog",
    "SparseFeature",
    "Interactions",
    "LogSplit",
    "SyntheticClicks",
    "PowerLawFeature",
    "TableDataset",
    "Columns",
    "LabelColumn",
    "DenseColumn",
    "IdColumn",
    "TableRows",
    "HoldOut",
    "RowGroups",
    "ParquetGroups",
    "DelimitedGroups",
    "ListColumn",
    "TableGroups",
    "MapGroups",
    "StreamGroups",
    "MovieLens",
    "Criteo",
    "criteo_columns",
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
