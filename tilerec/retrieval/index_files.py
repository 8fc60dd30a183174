"""Files of an exported index: the vectors of all items, for search outside of tilerec.

    DIR/index.json       number of items, dim, metric, the run; the file is written last
    DIR/items.parquet    `item` (as in the data) and `row` (of its table); row i of the file is vector i
    DIR/vectors.npy      float32 [N, D], for numpy.load(mmap_mode="r")
    DIR/index.safetensors  with --index: an `ItemIndex`; its ids are the items if these are integers, else the places of
                         items in items.parquet
    DIR/index.faiss      with --faiss: a flat or an HNSW index by inner product; label i is row i of items.parquet
    DIR/queries.parquet  with --queries: key columns and `vector` of each sample

The best items of a query vector are those with the largest inner products.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from torch import Tensor

from tilerec.atomic_file import new_folder, open_replacement, write_file
from tilerec.errors import ConfigError
from tilerec.output_path import Inputs, check_output
from tilerec.retrieval.index_recall import MOST_QUERIES, IndexRecall, index_recall
from tilerec.retrieval.item_index import FORMS, IndexForm, ItemIndex
from tilerec.retrieval.item_index_file import save_item_index
from tilerec.retrieval.ranking_task import IndexVectors
from tilerec.train.predictions import write_predictions

FAISS_KINDS = ("none", "flat", "hnsw")
_HNSW_LINKS = 32
"""Links of a node of the HNSW graph, faiss's usual number."""


def check_out(out: Path, kind: str, form: str = "none", inputs: Inputs | None = None) -> None:
    """Raise before the work begins if the folder exists or lies in an input, or faiss is needed and absent."""
    if kind not in FAISS_KINDS:
        raise ConfigError(f"--faiss: got {kind!r}; expected one of {', '.join(FAISS_KINDS)}. Correct it.")
    if form != "none" and form not in FORMS:
        raise ConfigError(f"--index: got {form!r}; expected none or one of {', '.join(FORMS)}. Correct it.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: got {out}, which exists; expected a new folder. Choose another name.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out: got {out}; expected a name in an existing folder. Create {out.parent} first.")
    check_output("--out", out, inputs or {})  # Parquet files of the index would become data of the next run
    if kind != "none":
        import_faiss("--faiss")


def write_index(
    out: Path,
    index: IndexVectors,
    facts: dict[str, Any],
    queries: Iterator[tuple[int, pa.Table]],
    *,
    kind: str = "none",
    form: str = "none",
    tower: str = "",
    progress: Callable[[int], object] = lambda rows: None,
) -> IndexRecall | None:
    """Write the folder of an index, as a whole or not at all.

    Args:
        out: the folder; it must not exist, or be empty.
        index: vectors and items.
        facts: further entries of index.json.
        queries: samples and tables with key columns and `vector`; may be empty.
        kind: of the faiss index, "none" for no such file.
        form: of the `ItemIndex`, "none" for no such file.
        tower: hash of the query tower, for the `ItemIndex`.
        progress: called with the samples of each table of `queries`.

    Returns:
        The recall of an approximate `ItemIndex`, for the first queries; without queries, for vectors of items. None for
        an exact one, or none.

    Raises:
        FileError: a file cannot be written.
    """
    with new_folder(out, "Index") as folder:
        vectors = np.ascontiguousarray(index.vectors.numpy(), np.float32)
        with open_replacement(folder / "vectors.npy", "Index") as file:
            np.save(file, vectors)
        with open_replacement(folder / "items.parquet", "Index") as file:
            parquet.write_table(pa.table({"item": index.catalog.values, "row": index.catalog.ids.numpy()}), file)
        if kind != "none":
            write_file(folder / "index.faiss", _faiss_bytes(vectors, kind), "Index")
        made = None if form == "none" else _item_index(index, form, tower)
        if made is not None:
            save_item_index(folder / "index.safetensors", made)
        count = _write_queries(folder / "queries.parquet", queries, progress)
        recall = None
        if made is not None and form != "exact" and len(made):
            query_QD = _first_queries(folder / "queries.parquet") if count else _item_queries(index.vectors)
            recall = index_recall(made, index.vectors, _item_ids(index), query_QD)
            facts = {**facts, "recall": recall._asdict()}
        entries = {"format": 1, "items": len(vectors), "dim": int(vectors.shape[1]), "metric": "inner_product"}
        text = json.dumps({**entries, "faiss": kind, "index": form, "queries": count, **facts}, indent=2) + "\n"
        write_file(folder / "index.json", text, "Index")
    return recall


def _item_index(index: IndexVectors, form: str, tower: str) -> ItemIndex:
    return ItemIndex.build(index.vectors, _item_ids(index), form=cast(IndexForm, form), tower=tower)


def _item_ids(index: IndexVectors) -> Tensor:
    values = index.catalog.values
    if pa.types.is_integer(values.type):
        return torch.from_numpy(values.cast(pa.int64()).to_numpy(zero_copy_only=False).copy())
    return torch.arange(len(values))


def _first_queries(path: Path) -> Tensor:
    batch = next(parquet.ParquetFile(path).iter_batches(MOST_QUERIES, columns=["vector"]))
    return torch.from_numpy(np.stack(batch["vector"].to_numpy(zero_copy_only=False))).float()


def _item_queries(vectors_ND: Tensor) -> Tensor:
    """Return vectors of items as queries, spread over all of them."""
    return vectors_ND[:: -(-len(vectors_ND) // MOST_QUERIES)]


def _write_queries(path: Path, queries: Iterator[tuple[int, pa.Table]], progress: Callable[[int], object]) -> int:
    """Write the samples' tables, if there are some; return the number of samples."""
    first = next(iter(queries), None)
    if first is None:
        return 0
    return write_predictions(path, chain([first], queries), progress=progress)


def _faiss_bytes(vectors_ND: np.ndarray[Any, Any], kind: str) -> bytes:
    faiss = import_faiss("--faiss")
    dim = vectors_ND.shape[1]
    index = (
        faiss.IndexFlatIP(dim) if kind == "flat" else faiss.IndexHNSWFlat(dim, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    )
    index.add(vectors_ND)
    found: bytes = faiss.serialize_index(index).tobytes()
    return found


def import_faiss(what: str) -> Any:
    """Return the package faiss.

    Args:
        what: needs it; the error message begins with it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            f"{what}: got no package faiss; expected it to be installed. Run pip install 'tilerec[faiss]', or leave "
            f"{what} out."
        ) from error
    return faiss
