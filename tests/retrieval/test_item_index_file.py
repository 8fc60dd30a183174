"""Files of item indexes: the same results after loading; whole or unchanged; refused if damaged or of another tower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilerec.errors import ConfigError, FileError
from tilerec.retrieval.item_index import FORMS, Filters, IndexForm, ItemIndex
from tilerec.retrieval.item_index_file import load_item_index, save_item_index


def index_of(form: IndexForm) -> tuple[ItemIndex, Tensor]:
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(30, 8, generator=draw)
    ids = torch.randint(-(2**63), 2**63 - 1, (30,), generator=draw)
    index = ItemIndex.build(vectors, ids, form=form, flags=torch.arange(30) % 4, spare=0.3, tower="abc")
    index.remove(ids[3:5])
    return index, vectors[:6]


@pytest.mark.parametrize("form", FORMS)
def test_a_loaded_index_gives_the_same_results_and_takes_changes(form: IndexForm, tmp_path: Path) -> None:
    index, query = index_of(form)
    save_item_index(tmp_path / "items.safetensors", index)
    loaded = load_item_index(tmp_path / "items.safetensors", tower="abc")
    assert (len(loaded), loaded.form, loaded.nprobe, loaded.tower, loaded.changed) == (
        len(index), form, index.nprobe, "abc", 2
    )  # fmt: skip
    for one in (index, loaded):
        one.add(query[:2], [5, 6])
    filters = Filters(forbidden=torch.ones(6, dtype=torch.int64))
    for got, want in zip(loaded(query, 12, filters), index(query, 12, filters), strict=True):
        assert torch.equal(got, want)


def test_items_of_another_query_tower_are_refused(tmp_path: Path) -> None:
    index, _ = index_of("exact")
    save_item_index(tmp_path / "items", index)
    with pytest.raises(ConfigError, match=r"got items of the tower abc… for a query tower other…"):
        load_item_index(tmp_path / "items", tower="other")
    index.tower = ""
    save_item_index(tmp_path / "items", index)
    with pytest.raises(ConfigError, match="got an index without the hash of its query tower"):
        load_item_index(tmp_path / "items", tower="other")
    assert load_item_index(tmp_path / "items").tower == ""


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    index, _ = index_of("int8")
    with pytest.raises(FileError, match=r"Item index: .* cannot be written"):
        save_item_index(tmp_path / "no" / "items", index)
    save_item_index(tmp_path / "items", index)
    before = (tmp_path / "items").read_bytes()
    original = ItemIndex._save_to_state_dict

    def broken(self: ItemIndex, *arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    ItemIndex._save_to_state_dict = broken  # type: ignore[assignment, method-assign]
    try:
        with pytest.raises(OSError, match="No space"):
            save_item_index(tmp_path / "items", index)
    finally:
        ItemIndex._save_to_state_dict = original  # type: ignore[method-assign]
    assert (tmp_path / "items").read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["items"]


METADATA = {"tilerec": "item index", "format": "1", "form": "ivf", "nprobe": "1", "tower": "", "changed": "0"}


@pytest.mark.parametrize(
    ("metadata", "tensors", "text"),
    [
        ({"tilerec": "model"}, {}, "got format '1' of 'model'"),
        ({"format": "2"}, {}, "got format '2' of 'item index'"),
        ({"form": "pq"}, {}, "the metadata"),
        ({"form": "exact"}, {}, "the tensors"),
        ({"nprobe": "x"}, {}, "the metadata"),
        ({"nprobe": "99"}, {}, "nprobe=99 with"),
        ({}, {"rows": torch.zeros(3, 8)}, "the tensors"),
        ({}, {"used": 100}, "lists that overlap"),
        ({}, {"first": 7}, "lists that overlap"),
        ({}, {"ids": 0}, "ids that repeat"),
        ({}, {"ids": -1}, "ids that repeat"),
        ({}, {"extra": torch.zeros(1)}, "the tensors"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    metadata: dict[str, str], tensors: dict[str, Tensor | int], text: str, tmp_path: Path
) -> None:
    save_item_index(tmp_path / "items", index_of("ivf")[0])
    state = load_file(tmp_path / "items")
    changed = {
        name: torch.full_like(state[name], own) if isinstance(own, int) else own for name, own in tensors.items()
    }
    save_file({**state, **changed}, tmp_path / "items", {**METADATA, **metadata})
    with pytest.raises(ConfigError, match=text):
        load_item_index(tmp_path / "items")


def test_half_a_file_and_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="expected a readable file"):
        load_item_index(tmp_path / "none")
    save_item_index(tmp_path / "items", index_of("ivf")[0])
    (tmp_path / "items").write_bytes((tmp_path / "items").read_bytes()[:-9])
    with pytest.raises(ConfigError, match="expected a complete safetensors file"):
        load_item_index(tmp_path / "items")
