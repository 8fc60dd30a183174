"""Planned saves of tables in files: their tensors are found, and the pages of their records are read once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, apply_optimizer_in_backward, cache_tables
from tilerec.checkpoint import data_file
from tilerec.checkpoint.pieces import Box
from tilerec.checkpoint.planned_save import Changed, Leaves, Place, PlannedChunk, PlannedSave
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.storage.row_file import file_of


def table(spec: Adam | RowWiseAdagrad, folder: Path | None) -> EmbeddingBagCollection:
    """A table with other values in each cell."""
    module = EmbeddingBagCollection([EmbeddingBagConfig(300, 8, "a", feature_names=["f"])])
    apply_optimizer_in_backward(spec, module.parameters())
    cache_tables(module, 0.1, folder=folder)
    with torch.no_grad():
        for k, tensor in enumerate(module.embedding_bags["a"].rows.host()):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 10000 * k)
    return module


def box_of(tensor: Tensor) -> Box:
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


@pytest.mark.parametrize("spec", [Adam(0.1), RowWiseAdagrad(0.1)], ids=lambda spec: type(spec).__name__)
def test_leaves_and_slots_in_records_are_found(tmp_path: Path, spec: Adam | RowWiseAdagrad) -> None:
    module = table(spec, tmp_path)
    rows = module.embedding_bags["a"].rows
    leaves = Leaves([rows])
    for k, tensor in reversed(list(enumerate(rows.host()))):
        assert file_of(tensor) is not None
        assert leaves.take(tensor[4:, 1:] if tensor.dim() == 2 else tensor[::2]) is None
        assert leaves.take(tensor[7:]) == Place(rows, k, 7)
        assert leaves.take(tensor) is None  # taken


@pytest.mark.parametrize("in_files", [True, False])
def test_chunks_of_the_same_records_are_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_files: bool
) -> None:
    monkeypatch.setattr(data_file, "CHUNK_BYTES", 128 * 36)  # records of a row and a sum have 36 bytes
    module = table(RowWiseAdagrad(0.1), tmp_path if in_files else None)
    rows = module.embedding_bags["a"].rows
    tensors = {"other": torch.ones(2), "w": rows.leaf.detach(), "sum": rows.state["sum"]}
    boxes = [(name, box_of(tensor)) for name, tensor in tensors.items()]
    save = PlannedSave(tensors, boxes, Changed([rows], {}, {}), {}, ahead=False)
    chunks = [own for own in save.own if isinstance(own, PlannedChunk)]
    order = [(own.name, own.box.offsets[0]) for own in chunks]
    if in_files:
        own = [(name, first) for first in (0, 128, 256) for name in ("w", "sum")]
        assert order == [("other", 0), *own]
    else:
        assert order == [("other", 0), ("w", 0), ("w", 144), ("w", 288), ("sum", 0)]
    for chunk in chunks:
        assert chunk.entry.data is not None
        found = torch.frombuffer(bytearray(b"".join(map(bytes, chunk.entry.data()))), dtype=torch.float32)
        first, count = chunk.box.offsets[0], chunk.box.sizes[0]
        assert torch.equal(found, tensors[chunk.name][first : first + count].reshape(-1))
