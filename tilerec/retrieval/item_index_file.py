"""The file of an item index: a safetensors file with the index's tensors; its metadata are form, nprobe and tower.

A file is replaced as a whole or not at all. A reader checks every tensor, so a file of other software, or of another
version, raises an error and never gives other items.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from tilerec.errors import ConfigError, FileError
from tilerec.retrieval.item_index import FORMS, NO_ITEM, IndexForm, ItemIndex
from tilerec.retrieval.item_lists import Centroids
from tilerec.train.saved_model import save_model

_FORMAT = "1"


def save_item_index(path: str | Path, index: ItemIndex) -> None:
    """Write an index to a file.

    Raises:
        FileError: the file cannot be written; an earlier file is then unchanged.
    """
    metadata = {
        "tilerec": "item index", "format": _FORMAT, "form": index.form, "nprobe": str(index.nprobe),
        "tower": index.tower, "changed": str(index.changed),
    }  # fmt: skip
    save_model(path, index, metadata, what="Item index")


def load_item_index(path: str | Path, *, tower: str | None = None) -> ItemIndex:
    """Return the index of a file, on the CPU.

    Args:
        tower: `weights_hash` of the query tower that will search in it; None: not checked.

    Raises:
        FileError: the file cannot be read.
        ConfigError: it is no index, it is damaged, or its items belong to another query tower.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # it is not a dict
    except OSError as error:
        raise FileError(
            f"Item index {path}: got '{error.strerror or error}'; expected a readable file. Check the path.",
            error.errno,
        ) from error
    except SafetensorError as error:
        raise ConfigError(
            f"Item index {path}: got '{error}'; expected a complete safetensors file. Copy it or write it again."
        ) from error
    if metadata.get("tilerec") != "item index" or metadata.get("format") != _FORMAT:
        raise ConfigError(
            f"Item index {path}: got format {metadata.get('format')!r} of {metadata.get('tilerec')!r}; expected "
            f"{_FORMAT!r} of 'item index'. Write it with this version of tilerec."
        )
    problem = _problem(metadata, state)
    if problem:
        raise ConfigError(f"Item index {path}: got {problem}; expected a whole index. Copy it or write it again.")
    centroids = Centroids(state["centroids"], state["probes"]) if len(state["centroids"]) else None
    index = ItemIndex(
        cast(IndexForm, metadata["form"]), centroids, state["rows"].shape[1], nprobe=int(metadata["nprobe"]),
        tower=metadata["tower"],
    )  # fmt: skip
    for name, tensor in state.items():
        setattr(index, name, tensor)
    index.load_state_dict(state)
    index.changed = int(metadata["changed"])
    if tower is not None:
        check_tower(index, tower, f"Item index {path}")
    return index


def check_tower(index: ItemIndex, tower: str, what: str) -> None:
    """Raise `ConfigError` if the index belongs to another query tower than the one with this hash."""
    if not index.tower:
        raise ConfigError(
            f"{what}: got an index without the hash of its query tower; expected {tower[:12]}…. Build it with "
            "tower=weights_hash(query_tower)."
        )
    if index.tower != tower:
        raise ConfigError(
            f"{what}: got items of the tower {index.tower[:12]}… for a query tower {tower[:12]}…; expected both of one "
            "training state. Build the index again from this tower's model."
        )


def _problem(metadata: dict[str, str], state: dict[str, Tensor]) -> str:
    """Return how the tensors of a file contradict each other, "" if they do not."""
    form = metadata.get("form", "")
    numbers = [metadata.get(name, "") for name in ("nprobe", "changed")]
    if form not in FORMS or "tower" not in metadata or not all(one.isdecimal() for one in numbers):
        return f"the metadata {metadata}"
    int8, ivf = form in ("int8", "ivf-int8"), form in ("ivf", "ivf-int8")
    rows = state.get("rows", torch.zeros(0))
    slots, dim = rows.shape if rows.dim() == 2 else (0, 0)
    lists = state["used"].numel() if "used" in state else 0
    expected = {
        "rows": (torch.int8 if int8 else torch.float32, (slots, dim)),
        "scale": (torch.float32, (slots if int8 else 0,)),
        "words": (torch.int64, (slots,)),
        "ids": (torch.int64, (slots,)),
        "centroids": (torch.float32, (lists if ivf else 0, dim)),
        "probes": (torch.float32, (lists if ivf else 0, dim)),
        "first": (torch.int64, (lists + 1,)),
        "used": (torch.int64, (lists,)),
    }
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    if found != expected or not lists or (lists != 1 and not ivf):
        return f"the tensors {found}"
    first, used = state["first"], state["used"]
    if int(first[0]) or int(first[-1]) != slots or bool(((used < 0) | (used > first.diff())).any()):
        return "lists that overlap, or leave their rows"
    live = (state["words"] & 1).bool()
    ids = state["ids"][live]
    if ids.unique().numel() != ids.numel() or bool((ids == NO_ITEM).any()):
        return "ids that repeat"
    if not 1 <= int(metadata["nprobe"]) <= lists:
        return f"nprobe={metadata['nprobe']} with {lists} lists"
    return ""
