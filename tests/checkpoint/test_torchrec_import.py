"""Import of a checkpoint that TorchRec 1.8.0 wrote over two ranks (write_torchrec_files.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tilerec.checkpoint import import_torchrec, load
from tilerec.checkpoint.contents import SavedContents
from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.fused import FusedOptimizer
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
FILES = Path(__file__).parent / "files"
ROWS, DIM, BAGS = 11, 16, 4
EBC, EC, ADAM = ["rows", "columns", "table"], ["sequence"], ["adam_rows", "adam_columns", "adam_table"]


class Model(nn.Module):
    """The model of write_torchrec_files.py."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.adam = (
            EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, name, feature_names=[name]) for name in names])
            for names in (EBC, ADAM)
        )
        self.ec = EmbeddingCollection([EmbeddingConfig(ROWS, DIM, name, feature_names=[name]) for name in EC])
        self.over = nn.Linear(DIM * len(EBC), 1)

    def forward(self, features: Any) -> Tensor:
        rows = torch.cat([jagged.values() for jagged in self.ec(features).values()])
        return cast(Tensor, self.over(self.ebc(features).values()).sum() + (rows**2).sum())


def made() -> Model:
    model = Model()
    spec = RowWiseAdagrad(lr=0.1, eps=1e-8)
    apply_optimizer_in_backward(spec, [*model.ebc.parameters(), *model.ec.parameters()])
    apply_optimizer_in_backward(Adam(lr=0.1), list(model.adam.parameters()))
    return model


def expected() -> dict[str, Tensor]:
    return cast(dict[str, Tensor], torch.load(FILES / "torchrec.pt", weights_only=True))


def check(weights: Mapping[str, Tensor], slots: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise unless weights and state are those of the file."""
    want = expected()
    got = {f"model.{name}": value for name, value in weights.items()}
    got |= {f"optimizer.state.{name}.{slot}": v for name, own in slots.items() for slot, v in own.items()}
    steps = [got.pop(name) for name in list(got) if name.endswith(".step")]
    assert set(got) == {name for name in want if name.startswith(("model.", "optimizer."))}
    for name, value in got.items():
        assert torch.equal(value, want[name]), name
    assert [int(step) for step in steps] == [3] * 7


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("torchrec") / "step-3"
    import_torchrec(FILES / "torchrec", path, steps=3)
    return str(path)


def test_weights_and_state_load_bit_for_bit(imported: str) -> None:
    assert SavedContents(imported).verify() > 0
    model = made()
    face = FusedOptimizer(model)
    load(imported, {"model": model, "optimizer": face})
    check(model.state_dict(), face.state_dict()["state"])


def train_on(path: str, turn: int) -> float:
    """Load under another plan and train a fourth step; return the largest distance from TorchRec's weights."""
    last = dist.get_world_size() - 1
    ways: list[list[tuple[Any, ...]]] = [
        [(0, 4, 0, DIM, last), (4, ROWS, 0, DIM, 0)],
        [(0, ROWS, 0, 4, 0), (0, ROWS, 4, DIM, last)],
        [(0, ROWS, 0, DIM, last)],
    ]
    plan = {
        part: {name: Tiling.of(name, ROWS, DIM, ways[(i + turn) % 3]) for i, name in enumerate(names)}
        for part, names in (("ebc", EBC), ("ec", EC), ("adam", ADAM))
    }
    dmp = DistributedModelParallel(made(), plan=plan)
    load(path, {"model": dmp, "optimizer": dmp.fused_optimizer})
    check(full_state_dict(dmp.module), dmp.fused_optimizer.full_state_dict()["state"])
    want = expected()
    own = (f"batch.{dist.get_rank()}.{part}" for part in ("values", "lengths"))
    values, lengths = (want[name] for name in own)
    dmp(KeyedJaggedTensor([*EBC, *EC], values, lengths=lengths)).backward()
    got = full_state_dict(dmp.module)
    # TorchRec scales each column shard of a row by its own sum, and tilerec the whole row by one sum.
    names = [name for name in want if name.startswith("after.") and "columns" not in name]
    assert len(names) == 3
    return max(float((got[name.removeprefix("after.")] - want[name]).abs().max()) for name in names)


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_training_goes_on_as_in_torchrec_under_any_plan(pool: Pool, imported: str, turn: int) -> None:
    assert max(pool(2).run(train_on, imported, turn)) < 1e-6


def test_adam_requires_the_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--steps N"):
        import_torchrec(FILES / "torchrec", tmp_path / "own")
    with pytest.raises(ConfigError, match="steps=-1"):
        import_torchrec(FILES / "torchrec", tmp_path / "own", steps=-1)
    assert not list(tmp_path.iterdir())


WEIGHT = "ebc.embedding_bags.t.weight"


def save(folder: Path, slots: dict[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    state = {"model": dict(weights), "optimizer": {"state": {WEIGHT: slots}}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def save_columns(folder: str, widths: tuple[int, ...]) -> None:
    """Save a table of two columns shards on two ranks, in the layout of TorchRec."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    class Boxes(Tensor):
        """A tensor of which each rank has some boxes."""

        boxes: list[tuple[list[int], Tensor]]

        def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
            found = []
            for i, (offset, part) in enumerate(self.boxes):
                chunk = ChunkStorageMetadata(torch.Size(offset), part.shape)
                data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.shape)
                found.append(WriteItem(MetadataIndex(fqn, offset, i), WriteItemType.SHARD, tensor_data=data))
            return found

        def __create_chunk_list__(self) -> Any:
            raise AssertionError

        def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
            return next(part for offset, part in self.boxes if torch.Size(offset) == index.offset)

    def boxes(shape: tuple[int, ...], parts: list[tuple[list[int], Tensor]]) -> Boxes:
        made = torch.empty(shape).as_subclass(Boxes)
        made.boxes = parts
        return made

    rows = 5
    rank = dist.get_rank()
    first = sum(widths[:rank])
    weight = boxes((rows, sum(widths)), [([0, first], torch.ones(rows, widths[rank]))])
    values = torch.arange(float(rows)) + 10 * rank + 1
    # rank 1 cuts its shard once more
    cuts = [(0, 5)] if rank == 0 else [(0, 2), (2, 5)]
    state = boxes((2 * rows,), [([rank * rows + low], values[low:high].clone()) for low, high in cuts])
    dcp.save(
        {"model": {WEIGHT: weight}, "optimizer": {"state": {WEIGHT: {"t.momentum1": state}}}}, checkpoint_id=folder
    )


def test_state_of_column_shards_is_folded_by_their_widths(pool: Pool, tmp_path: Path) -> None:
    pool(2).run(save_columns, str(tmp_path / "dcp"), (12, 4))
    import_torchrec(tmp_path / "dcp", tmp_path / "own")
    name = f"optimizer.state.{WEIGHT}.sum"
    contents = SavedContents(tmp_path / "own")
    assert contents.manifest.tensors[name].shape == (5,)
    got = torch.cat([part for _, part in contents.parts_of(name)])
    assert torch.equal(got, (12 * (torch.arange(5.0) + 1) + 4 * (torch.arange(5.0) + 11)) / 16)


def test_unknown_layouts_are_refused(tmp_path: Path) -> None:
    weights = {WEIGHT: torch.ones(6, 4)}
    for i, (slots, own, match) in enumerate(
        [
            ({"t.momentum1": torch.ones(7)}, weights, r"of shape \[7\]"),
            ({"t.momentum1": torch.ones(6), "t.other": torch.ones(6)}, weights, "the slots momentum1, other"),
            ({"t.exp_avg_sq": torch.ones(6, 4)}, weights, "the slots exp_avg_sq"),
            ({"t.momentum1": torch.ones(6)}, {"other": torch.ones(2)}, "without the weight"),
        ]
    ):
        save(tmp_path / f"dcp-{i}", slots, own)
        with pytest.raises(InputError, match=match):
            import_torchrec(tmp_path / f"dcp-{i}", tmp_path / "own", steps=1)
    assert not (tmp_path / "own").exists()


def test_state_of_dense_optimizers_keeps_its_names(tmp_path: Path) -> None:
    state = {
        "model": {"over.weight": torch.ones(2)},
        "optimizer": {"state": {"over.weight": {"exp_avg": torch.ones(2)}}},
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_torchrec(tmp_path / "dcp", tmp_path / "own")
    assert set(SavedContents(tmp_path / "own").manifest.tensors) == {
        "model.over.weight",
        "optimizer.state.over.weight.exp_avg",
    }
