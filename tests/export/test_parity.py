"""Seeded faults of a package are found on logged batches, each with its cause."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typer.testing import CliRunner

from tests.export.export_models import every_batch, every_kind, kjt
from tilerec.cli import app
from tilerec.errors import InputError
from tilerec.export import Package, Parity, parity
from tilerec.export.arguments import flat_tensors
from tilerec.export.exporting import prepared
from tilerec.export.whole_model import whole_model
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.quantized import quantize_tables
from tilerec.run_cli.parity import logged_batch
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig


class Runner:
    """Runs the program of a package that was not compiled: a compilation takes half a minute."""

    def __init__(self, program: nn.Module, out_spec: str) -> None:
        self._program, self._out_spec = program, out_spec

    def get_call_spec(self) -> list[str]:
        return ["", self._out_spec]

    def boxed_run(self, tensors: list[Tensor]) -> list[Tensor]:
        return pytree.tree_leaves(self._program(*tensors))


def package_of(model: nn.Module, example: Any) -> Package:
    whole = whole_model(model)
    assert whole is not None
    made = prepared(whole, example)
    program: Any = made.program.module()
    return Package(made.manifest, made.weights, Runner(program, pytree.treespec_dumps(made.program.call_spec.out_spec)))


def batches(package: Package, args: Any) -> list[dict[str, Tensor]]:
    names = [spec.name for spec in package.manifest.signature.specs()]
    return [dict(zip(names, flat_tensors(package.manifest.signature, one), strict=True)) for one in args]


class Two(nn.Module):
    def __init__(self, keys: tuple[str, ...] = ("user", "item")) -> None:
        super().__init__()
        torch.manual_seed(1)
        # "items" is a method of the tables' module, too.
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(24, 4, key.replace("item", "items"), feature_names=[key]) for key in keys]
        )
        self.over = nn.Linear(4 * len(keys), 1)

    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(self.tables(sparse).values())
        return logits


LOGGED = [(kjt(("user", "item"), samples, torch.Generator().manual_seed(samples)),) for samples in (3, 8)]


def found(package: Package, model: nn.Module) -> Parity:
    return parity(package, model.eval(), batches(package, LOGGED))


def causes(result: Parity) -> dict[str, str]:
    every = (*result.features, *result.weights)
    return {one.name: one.cause for one in every if one.cause}


def test_a_package_equals_its_model() -> None:
    model = every_kind()
    package = package_of(model, every_batch(3).args())
    floats = copy.deepcopy(model)
    result = parity(package, floats, batches(package, [every_batch(5, 3).args(), every_batch(2, 4).args()]))
    assert result.is_equal
    assert result.samples == 7
    assert {one.name for one in result.features} == {"user", "item", "raw"}


def shift_a_row(package: Package) -> None:
    package.weights["tables.embedding_bags.items.weight"][int(LOGGED[0][0]["item"].values()[0])] += 0.5


def shift_the_dense_part(package: Package) -> None:
    package.weights["over.bias"] += 1


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (shift_a_row, {"item": "other version"}),
        (shift_the_dense_part, {"over.bias": "other version"}),
    ],
)
def test_other_weights_are_another_version(fault: Callable[[Package], None], cause: dict[str, str]) -> None:
    package = package_of(Two().eval(), LOGGED[0])
    fault(package)
    result = found(package, Two())
    assert causes(result) == cause
    assert result.outputs[0].differing > 0
    if "item" in cause:
        (item,) = (one for one in result.features if one.name == "item")
        assert (item.differing, item.largest) == (1, pytest.approx(0.5))


def test_a_feature_is_compared_in_each_of_its_tables() -> None:
    model = every_kind()
    package = package_of(copy.deepcopy(model), every_batch(3).args())
    args = every_batch(5, 3).args()
    id_ = int(args[1]["item"].values()[0])
    package.weights["rows.embeddings.seen.weight"][id_] += 0.5
    result = parity(package, model, batches(package, [args]))
    assert {(one.name, one.table) for one in result.features} == {
        ("user", "pooled.embedding_bags.user"),
        ("user", "weighted._embedding_bag_collection.embedding_bags.place"),
        ("user", "small.embedding_bags.user"),
        ("user", "read.embeddings.read"),
        ("item", "pooled.embedding_bags.item"),
        ("item", "rows.embeddings.seen"),
        ("item", "small.embedding_bags.item"),
        ("raw", "managed._embedding_module.embedding_bags.raw"),
    }
    assert [(one.table, one.cause, one.differing) for one in result.features if one.cause] == [
        ("rows.embeddings.seen", "other version", 1)
    ]


class Sized(nn.Module):
    """One table and a layer of its columns, of any sizes."""

    def __init__(self, rows: int = 24, dim: int = 4, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        config = EmbeddingBagConfig(rows, dim, "user", feature_names=["user"])
        self.tables = EmbeddingBagCollection([config], **options)

    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        found: Tensor = self.tables(sparse).values()
        return found.sum(1, keepdim=True)


CLAMPED = pytest.mark.filterwarnings("ignore:.* lay outside their tables and were clamped")
USERS = KeyedJaggedTensor.from_lengths_sync(["user"], torch.tensor([3, 99, -1]), torch.tensor([1, 2]))


@CLAMPED
def test_ids_that_a_table_clamps_are_compared_as_it_reads_them() -> None:
    model = Sized(on_bad_id="clamp").eval()
    package = package_of(copy.deepcopy(model), (USERS,))
    assert parity(package, model, batches(package, [(USERS,)])).is_equal
    package.weights["tables.embedding_bags.user.weight"][23] += 0.5  # the row of id 99
    (user,) = parity(package, model, batches(package, [(USERS,)])).features
    assert (user.seen, user.differing, user.cause) == (3, 1, "other version")


@CLAMPED
@pytest.mark.parametrize("sizes", [{"dim": 5}, {"rows": 12}, {"rows": 120}])
def test_a_table_of_another_size_is_another_version(sizes: dict[str, int]) -> None:
    package = package_of(Sized(on_bad_id="clamp").eval(), (USERS,))
    result = parity(package, Sized(**sizes, on_bad_id="clamp").eval(), batches(package, [(USERS,)]))
    assert causes(result) == {"user": "other version"}


class Wide(Two):
    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(torch.cat([self.tables(sparse).values()] * 2, 1))
        return logits


class Several(Two):
    def forward(self, sparse: KeyedJaggedTensor) -> Any:
        return super().forward(sparse), sparse.values()


@pytest.mark.parametrize(
    ("model", "text"),
    [(Wide, "got 'mat1 and mat2 shapes cannot be multiplied .* from the model"), (Several, "got a model with 2 out")],
)
def test_a_model_of_other_layers_or_outputs_is_refused(model: type[Two], text: str) -> None:
    with pytest.raises(InputError, match=text):
        found(package_of(Two().eval(), LOGGED[0]), model())


class Factor(Two):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        return super().forward(sparse) * self.factor


@pytest.mark.parametrize(("factor", "cause"), [(1 + 2**-20, "rounding"), (2.0, "other code")])
def test_outputs_that_differ_alone_are_rounding_or_other_code(factor: float, cause: str) -> None:
    result = found(package_of(Two().eval(), LOGGED[0]), Factor(factor))
    assert result.causes == {cause}
    assert not result.is_equal


def test_quantized_rows_are_another_data_type() -> None:
    package = package_of(quantize_tables(Two().eval(), "int8", per_table={"items": "fp32"}), LOGGED[0])
    assert causes(found(package, Two())) == {"user": "data type"}
    assert found(package, quantize_tables(Two().eval(), "int8", per_table={"items": "fp32"})).is_equal
    assert causes(found(package, quantize_tables(Two().eval(), "int4"))) == dict.fromkeys(("user", "item"), "data type")


def test_other_ids_are_another_id_mapping() -> None:
    model = every_kind()
    package = package_of(copy.deepcopy(model), every_batch(3).args())
    (name,) = (name for name in package.weights if name.endswith("raw.ids"))
    used = package.weights[name.replace(".ids", ".used")].nonzero().flatten()
    package.weights[name][used[0]] = 1 << 50
    ids = model.managed.managed_collision_collection.modules_by_table["raw"].ids[used].tolist()
    one = every_batch(2, 3)
    managed = KeyedJaggedTensor(["raw"], torch.tensor(ids[:2]), lengths=torch.tensor([1, 1], dtype=torch.int32))
    result = parity(package, model, batches(package, [(one.dense, one.pooled, managed)]))
    assert causes(result) == {"raw": "id mapping"}


def test_features_of_one_side_alone_are_missing() -> None:
    package = package_of(Two().eval(), LOGGED[0])
    wide = Two(("user", "item", "shop")).eval()
    wide.over = nn.Linear(12, 1)
    assert causes(found(package, wide))["shop"] == "missing feature"
    narrow = Two(("user",)).eval()
    assert causes(found(package, narrow))["item"] == "missing feature"


def test_no_or_other_batches_are_refused() -> None:
    package = package_of(Two().eval(), LOGGED[0])
    with pytest.raises(InputError, match="got no samples"):
        parity(package, Two(), [])
    with pytest.raises(InputError, match=r"does not take the package's \['sparse'\]"):
        parity(package, nn.Bilinear(2, 2, 2), [])
    with pytest.raises(InputError, match=r"got a batch without 'sparse\.values'"):
        parity(package, Two(), [{"dense": torch.zeros(1)}])


def test_requests_in_both_forms_are_batches(tmp_path: Path) -> None:
    manifest = package_of(Two().eval(), LOGGED[0]).manifest
    tensors = {"sparse.values": torch.tensor([3, 1, 2]), "sparse.lengths": torch.tensor([[1, 0], [1, 1]]).int()}
    save_file(tensors, tmp_path / "a.safetensors")
    samples = [{"sparse": {"user": [3], "item": [1]}}, {"sparse": {"item": [2]}}]
    (tmp_path / "a.json").write_text(json.dumps({"instances": samples}))
    (tmp_path / "b.json").write_text(json.dumps({"instances": [{"sparse": {"shop": [3]}}]}))
    for name in ("a.safetensors", "a.json"):
        read = logged_batch(tmp_path / name, manifest)
        assert list(read) == list(tensors)
        assert all(map(torch.equal, read.values(), tensors.values()))
    with pytest.raises(InputError, match=r"b\.json: .*shop"):
        logged_batch(tmp_path / "b.json", manifest)
    with pytest.raises(InputError, match="expected the file of a request"):
        logged_batch(tmp_path / "c.json", manifest)


def test_the_command_refuses_files_that_are_no_package(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "batch.safetensors")
    (tmp_path / "model.pt2").write_bytes(b"no package")
    words = ["parity", str(tmp_path / "model.pt2"), str(tmp_path), str(tmp_path / "batch.safetensors")]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 2
    assert "expected" in ended.output
