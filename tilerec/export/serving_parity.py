"""`parity`: a package beside the model that it should be, on logged batches, and the cause of each difference.

    outputs        the largest difference of each output
    features       of the ids in the batches: the rows that the package and the model read for them
    weights        tensors outside of tables

cause             meaning
missing feature   one of the two does not read the feature
id mapping        raw ids have other rows: the managed ids are of another state
data type         the rows are those of the model, in the package's type
other version     the rows or weights are those of another state of training
rounding          rows and weights are equal, outputs to within `ROUNDING`: the compiler sums in another order
other code        rows and weights are equal, and the outputs are not
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from tilerec.errors import InputError
from tilerec.export.arguments import InputSpec, value_of
from tilerec.export.loading import Package
from tilerec.export.manifest import TableEntry
from tilerec.modules.collection import TableCollection
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddings
from tilerec.ops.hash.definition import zch_find
from tilerec.ops.quantized.row_format import dequantize_rows, quantize_rows
from tilerec.quantized.collection import QuantTableCollection
from tilerec.quantized.row_type import ROW_TYPES
from tilerec.quantized.table import QuantTable
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import AnyTableConfig
from tilerec.torch_private import pytree, submodules

ROUNDING = 1e-5
"""Largest difference of an output that is rounding, as a share of the output's largest number."""

Batch = Mapping[str, Tensor]
"""Tensors of a package's inputs, by the names of its manifest."""


class Difference(NamedTuple):
    """One feature, weight or output of the package beside the model's.

    Args:
        name: of it. table: of a feature; "" otherwise.
        seen: distinct ids of the batches, cells of a weight, or cells of an output.
        differing: those of them that differ.
        largest: difference of two numbers; inf where one side has none.
        cause: "" if nothing differs.
    """

    name: str
    table: str
    seen: int
    differing: int
    largest: float
    cause: str


class Parity(NamedTuple):
    """What was compared. samples: of all batches."""

    samples: int
    outputs: list[Difference]
    features: list[Difference]
    weights: list[Difference]

    @property
    def is_equal(self) -> bool:
        """True if every output, row and weight has the same bits."""
        return not self.causes

    @property
    def causes(self) -> set[str]:
        """Return the causes of all differences: {"rounding"} for a package that answers as the model up to rounding."""
        return {one.cause for one in (*self.outputs, *self.features, *self.weights) if one.cause}


@torch.no_grad()
def parity(package: Package, model: nn.Module, batches: Iterable[Batch]) -> Parity:
    """Compare a package with a model on some batches.

    Args:
        package: of `tilerec.export.load`.
        model: unsharded, on the CPU, in evaluation mode; its arguments are those of the package.
        batches: the package's inputs by name.

    Raises:
        InputError: a batch does not fit the package, there is none, or the model has other arguments.
    """
    _check_arguments(package, model)
    tables = _Tables(package, model)
    outputs: dict[str, Difference] = {}
    ids: dict[tuple[str, str], Tensor] = {}
    scales: dict[str, float] = {}
    samples = 0
    for batch in batches:
        tensors = [_tensor(batch, spec.name) for spec in package.manifest.signature.specs()]
        found = package.run(tensors)
        wanted = _of_model(package, model, tensors)
        samples += found[0].shape[0]
        for spec, got, want in zip(package.manifest.outputs, found, wanted, strict=True):
            outputs[spec.name] = _sum_up(outputs.get(spec.name), _compared(spec.name, got, want, "see below"))
            largest = float(want.double().abs().nan_to_num(0, 0, 0).max()) if want.numel() else 0.0
            scales[spec.name] = max(scales.get(spec.name, 0.0), largest)
        for (own, key), values in _ids_of(package, tensors):
            ids[own, key] = torch.cat([ids[own, key], values]).unique() if (own, key) in ids else values.unique()
    if not samples:
        raise InputError("Parity: got no samples; expected at least one logged batch. Pass files of requests.")
    features = [one for key, values in _by_key(ids).items() for one in tables.feature(key, values)]
    features += [Difference(name, "", 0, 0, torch.inf, "missing feature") for name in tables.unknown_to_package(ids)]
    weights = tables.weights()
    if not any(one.cause for one in (*features, *weights)):
        for name, one in outputs.items():
            if one.cause:
                cause = "rounding" if one.largest <= ROUNDING * scales[name] else "other code"
                outputs[name] = one._replace(cause=cause)
    return Parity(samples, list(outputs.values()), features, weights)


def _check_arguments(package: Package, model: nn.Module) -> None:
    names = package.manifest.signature.arguments
    try:
        inspect.signature(model.forward).bind(*names)
    except TypeError as error:
        raise InputError(
            f"Parity: got a {type(model).__name__}, whose forward does not take the package's {list(names)} ({error}); "
            "expected the model of the package. For one tower of a model, pass `Tower(model, side)`, or --tower."
        ) from None


def _tensor(batch: Batch, name: str) -> Tensor:
    if name not in batch:
        raise InputError(f"Parity: got a batch without '{name}'; expected it. Its tensors are {sorted(batch)[:20]}.")
    return batch[name]


def _of_model(package: Package, model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the model's outputs; features that the package does not take are empty."""
    values: list[object] = []
    at = 0
    for own in package.manifest.signature.inputs:
        values.append(_with_all_features(value_of(own, tensors[at : at + len(own.tensors)]), own, model))
        at += len(own.tensors)
    structure = pytree.treespec_loads(package.manifest.signature.structure)
    try:
        out: list[Tensor] = pytree.tree_leaves(model(*pytree.tree_unflatten(values, structure)))
    except RuntimeError as error:  # of torch: a layer of another width, for example
        raise InputError(
            f"Parity: got '{' '.join(str(error).split()):.300}' from the model for a batch that the package takes; "
            "expected the model of the package. Export the package from this model, or pass its run."
        ) from error
    if len(out) != len(package.manifest.outputs):
        raise InputError(
            f"Parity: got a model with {len(out)} outputs; expected {len(package.manifest.outputs)}, those of the "
            "package. Pass the run that the package was exported from."
        )
    return out


def _with_all_features(value: object, own: InputSpec, model: nn.Module) -> object:
    """Return a batch with empty bags for the model's features that it lacks."""
    if not isinstance(value, KeyedJaggedTensor):
        return value
    known = {feature for _, config in _configs(model) for feature in config.feature_names}
    missing = sorted(known - set(own.keys))
    if not missing or not known & set(own.keys):
        return value
    lengths = torch.cat([value.lengths(), value.lengths().new_zeros(len(missing) * value.stride())])
    return KeyedJaggedTensor([*value.keys(), *missing], value.values(), value.weights_or_none(), lengths=lengths)


def _ids_of(package: Package, tensors: Sequence[Tensor]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield input and key of each feature, with its ids."""
    at = 0
    for own in package.manifest.signature.inputs:
        if own.kind != "Tensor":
            values, lengths = tensors[at], tensors[at + len(own.tensors) - 1]
            sizes = lengths.view(len(own.keys) or 1, -1).sum(1).tolist()
            for key, part in zip(own.keys or (own.name,), values.split(sizes), strict=True):
                yield (own.name, key), part
        at += len(own.tensors)


def _by_key(ids: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """Return the distinct ids of each feature, of all inputs that have it."""
    found: dict[str, Tensor] = {}
    for (_, key), values in ids.items():
        found[key] = torch.cat([found[key], values]).unique() if key in found else values
    return found


def _configs(model: nn.Module) -> Iterator[tuple[str, AnyTableConfig]]:
    """Yield the path of each table of a model, and its config."""
    for path, part in model.named_modules():
        if isinstance(part, (TableCollection, QuantTableCollection)):
            for config in part._configs:
                yield ".".join(filter(None, (path, part._holder, config.name))), config


def _module_at(model: nn.Module, path: str) -> nn.Module:
    """Return a submodule; unlike torch's `get_submodule`, one named `items` or `type`, too."""
    for name in path.split("."):
        model = cast(nn.Module, submodules(model)[name])
    return model


class _Tables:
    """The tables of both sides."""

    def __init__(self, package: Package, model: nn.Module) -> None:
        self._package, self._model = package, model
        self._entries = {entry.name: entry for entry in package.manifest.tables}
        self._own = dict(_configs(model))
        self._managed = {
            f"{path}.{name}": (f"{path}.{place}", module)
            for path, part in model.named_modules()
            if isinstance(part, ManagedCollisionEmbeddings)
            for name, place, module in _managed_of(part)
        }
        self._read: set[str] = set()

    def unknown_to_package(self, ids: Mapping[tuple[str, str], Tensor]) -> list[str]:
        """Return the features of the model that no input of the package has."""
        given = {key for _, key in ids}
        return sorted({f for config in self._own.values() for f in config.feature_names} - given)

    def feature(self, key: str, ids_U: Tensor) -> list[Difference]:
        """Compare the rows of a feature's ids in each table that it reads."""
        own = [name for name, config in self._own.items() if key in config.feature_names]
        other = [name for name, entry in self._entries.items() if key in entry.features]
        places = list(dict.fromkeys([*own, *other]))
        if not places:
            return [Difference(key, "", ids_U.numel(), ids_U.numel(), torch.inf, "missing feature")]
        return [
            self._in_table(key, self._entries[name], ids_U)
            if name in own and name in other
            else Difference(key, name, ids_U.numel(), ids_U.numel(), torch.inf, "missing feature")
            for name in places
        ]

    def _in_table(self, key: str, entry: TableEntry, ids_U: Tensor) -> Difference:
        """Compare the rows of a feature's ids in one table."""
        config = self._own[entry.name]
        is_managed = entry.name in self._managed
        if config.embedding_dim != entry.dim or (is_managed and config.num_embeddings != entry.rows):
            cause = "other version" if config.embedding_dim != entry.dim else "id mapping"
            return Difference(key, entry.name, ids_U.numel(), ids_U.numel(), torch.inf, cause)
        own, other = self._rows(entry, ids_U)
        table = _module_at(self._model, entry.name)
        rows = cast(Tensor, table.weight).detach()[own]
        own_bits = table.row_type.bits if isinstance(table, QuantTable) else 0
        wanted = _floats(rows, entry.dim, own_bits)
        stored = self._package.weights[entry.weight][other]
        row_type = ROW_TYPES.get(entry.data_type)
        bits = 0 if row_type is None else row_type.bits
        got = _floats(stored, entry.dim, bits)
        gaps_U = (got - wanted).abs().amax(1) if ids_U.numel() else torch.zeros(0)
        differs = (gaps_U > 0) | (own != other)
        cause = ""
        if is_managed and bool((own != other).any()):
            cause = "id mapping"
        elif bool(differs.any()):
            is_type = _is_rounded(wanted, rows, own_bits, got, stored, bits)
            cause = "data type" if is_type else "other version"
        largest = float(gaps_U.max()) if gaps_U.numel() else 0.0
        return Difference(key, entry.name, ids_U.numel(), int(differs.sum()), largest, cause)

    def _rows(self, entry: TableEntry, ids_U: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of ids in the model and in the package."""
        if entry.name not in self._managed:
            # Some tables clamp ids. Where a table refuses an id, the batch is refused before.
            sizes = self._own[entry.name].num_embeddings, entry.rows
            own_U, other_U = (ids_U.long().clamp(0, size - 1) for size in sizes)
            return own_U, other_U
        place, module = self._managed[entry.name]
        own = module.id_map
        state = own.state._replace(
            ids_E=self._package.weights[f"{place}.ids"], used_E=self._package.weights[f"{place}.used"]
        )
        hashed = own.hashed(ids_U.long())
        rows = []
        for each in (own.state, state):
            places_U = zch_find(hashed, each, own.range).rows_N
            rows.append(torch.where(places_U < 0, own.buckets.shared_rows(hashed), own.buckets.rows_of(places_U)))
        return rows[0], rows[1]

    def weights(self) -> list[Difference]:
        """Compare the tensors outside of tables and id maps."""
        tables = {entry.weight for entry in self._entries.values()}
        maps = tuple(f"{place}." for place, _ in self._managed.values())
        own = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        found = []
        for name, got in sorted(self._package.weights.items()):
            if name in tables or (maps and name.startswith(maps)):
                continue
            want = own.get(name)
            if want is None:
                continue  # a constant of the compiler
            found.append(_compared(name, got, want.detach(), "other version"))
        return found


def _floats(rows: Tensor, dim: int, bits: int) -> Tensor:
    """Return rows of `bits` bits, or of floats where it is 0, as float32."""
    return dequantize_rows(rows, dim, bits) if bits else rows.float()


def _is_rounded(want: Tensor, rows: Tensor, own_bits: int, got: Tensor, stored: Tensor, bits: int) -> bool:
    """Return True if two types of the same rows explain that the model's numbers `want` are not the package's `got`."""
    if bits and own_bits:  # neither side has the numbers that were rounded
        return bits != own_bits
    if own_bits:
        return torch.equal(quantize_rows(got, own_bits), rows)
    return torch.equal(quantize_rows(want, bits) if bits else want.to(stored.dtype), stored)


def _managed_of(part: ManagedCollisionEmbeddings) -> Iterator[tuple[str, str, ManagedCollisionModule]]:
    """Yield of each managed table: its path, the path of its id map, and the id map, below the module."""
    maps: dict[nn.Module, str] = {module: path for path, module in part.named_modules()}
    inner = {name.rpartition(".")[2]: name for name, _ in _configs(part)}
    for table, module in part.managed_collision_collection.modules_by_table.items():
        yield inner[table], maps[module], module


def _compared(name: str, got: Tensor, want: Tensor, cause: str) -> Difference:
    if got.shape != want.shape:
        return Difference(name, "", want.numel(), want.numel(), torch.inf, cause)
    same = (got == want) | ((got != got) & (want != want))  # NaN equals NaN
    gap = (got.double() - want.double()).abs()[~same]
    largest = float(gap.nan_to_num(torch.inf).max()) if gap.numel() else 0.0
    count = int((~same).sum())
    return Difference(name, "", want.numel(), count, largest, cause if count else "")


def _sum_up(before: Difference | None, now: Difference) -> Difference:
    if before is None:
        return now
    return now._replace(
        seen=before.seen + now.seen, differing=before.differing + now.differing,
        largest=max(before.largest, now.largest), cause=before.cause or now.cause,
    )  # fmt: skip
