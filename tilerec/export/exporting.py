"""`export`: a model as one file that runs without its Python code."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from tilerec.atomic_file import open_replacement
from tilerec.comms.agreement import on_all_ranks
from tilerec.errors import ConfigError
from tilerec.export.arguments import bound_arguments, dtype_name, example_signature
from tilerec.export.manifest import OPS_ABI, Manifest, TableEntry, base_hash
from tilerec.export.package_writing import weight_places, write_package
from tilerec.export.program import output_specs, rename_hidden, traced
from tilerec.export.torch_library import torch_version
from tilerec.modules.collection import TableCollection
from tilerec.quantized.collection import QuantTableCollection
from tilerec.torch_private import compile_package, cpp_compiler, package_loader, submodules, uncompiled


def export(model: nn.Module, example: Any, path: str | Path, *, strict: bool = False) -> None:
    """Compile a model and write it, with its weights, to one file. Collective for a sharded model; rank 0 writes.

    The file runs in any process: `load` in Python, `tilerec/export/cpp/model.h` in C++. It takes batches of any number
    of samples and ids, also none and one, and returns the bits of the model in evaluation mode on the CPU; where torch
    operators sum over a dimension, as in a norm, the last bits may differ. Tables of managed collision are read only:
    an id without a row gets what it gets in evaluation mode. The model stays as it is.

    Args:
        model: unsharded, or sharded on every rank. Its tables may be cached; their rows are written whole.
        example: a batch: the tuple of the model's arguments, a dict of them by name, or a single argument: tensors,
            `KeyedJaggedTensor`s, `JaggedTensor`s, and lists, tuples and dicts of them. The file takes batches of these
            dtypes and keys. Dimension 0 of a tensor is the number of samples if it equals that of the example, so let
            no fixed size equal it.
        path: the file; `.pt2` is usual. It is replaced as a whole or not at all.
        strict: trace with Dynamo instead of running the Python code; see `torch.export`.

    Raises:
        ConfigError: `torch.export` cannot trace the model, the example does not fit, the model has no memory, or there
            is no C++ compiler.
        FileError: the file cannot be written.
    """
    from tilerec.export.whole_model import model_group, whole_model  # imports the planner, which servers do not need

    group = model_group(uncompiled(model))
    whole = whole_model(model)
    with nullcontext() if group is None else on_all_ranks(group, "the export", "its file"):
        if whole is not None:
            target = Path(path)
            if target.is_dir() or not target.absolute().parent.is_dir():
                raise ConfigError(f"export: got {path}; expected a file in an existing folder. Name a file.")
            if cpp_compiler() is None:
                raise ConfigError("export: got no C++ compiler; expected g++ or the one that CXX names. Install g++.")
            _write(target, prepared(whole, example, strict=strict))


class PreparedExport(NamedTuple):
    """All of a package but its compiled part."""

    program: ExportedProgram
    manifest: Manifest
    weights: dict[str, Tensor]


def prepared(model: nn.Module, example: Any, *, strict: bool = False) -> PreparedExport:
    """Trace a model of `whole_model` and describe it."""
    names, args = bound_arguments(model, example)
    signature = example_signature(names, args)
    renamed = rename_hidden(model)
    program = traced(model, signature, args, strict=strict)
    outputs, keys = output_specs(program, signature)
    weights = _weights(program)
    # The compiled part knows a renamed table by its new name, deltas and checkpoints by that of the model.
    weights |= {f"{old}.weight": weights[f"{new}.weight"] for new, old in renamed.items() if f"{new}.weight" in weights}
    places = weight_places(weights)
    manifest = Manifest(
        OPS_ABI, torch_version(), torch.backends.cpu.get_cpu_capability(), base_hash(places), signature,
        tuple(outputs), keys, tuple(_tables(model, weights)), tuple(places),
    )  # fmt: skip
    return PreparedExport(program, manifest, weights)


def _write(path: Path, found: PreparedExport) -> None:
    with tempfile.TemporaryDirectory(prefix="tilerec-export-") as folder:
        compiled = Path(folder) / "model.pt2"
        compile_package(found.program, str(compiled))
        read = package_loader(str(compiled)).get_constant_fqns()
        made = [name for name in read if name not in found.weights]
        if made:
            raise ConfigError(
                f"export: the compiler made the constants {made[:4]}, which are no weights of the model; expected "
                "parameters and buffers. Register them as buffers of a module."
            )
        fixed = _fixed(found, read)
        if fixed:
            raise ConfigError(
                f"export: the compiler wrote the weights {fixed[:4]} into its code, where no published state changes "
                "them; expected all weights in memory. Export with another version of torch."
            )
        size = sum(weight.nbytes for weight in found.weights.values())
        with open_replacement(path, "Package", f"{size:,} bytes") as file:
            write_package(file, compiled, found.manifest, found.weights)


def _fixed(found: PreparedExport, read: list[str]) -> list[str]:
    """Return the parameters and buffers that the compiled part does not read from memory.

    Args:
        read: names of those that it reads. A renamed table has two names and one memory.
    """
    constants = set(found.program.graph_signature.inputs_to_lifted_tensor_constants.values())
    places = {found.weights[name].data_ptr() for name in read}
    return [
        name for name, weight in found.weights.items()
        if weight.numel() and weight.data_ptr() not in places and name not in constants
    ]  # fmt: skip


def _weights(program: ExportedProgram) -> dict[str, Tensor]:
    """Return the parameters, buffers and constants that the program uses, by name."""
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    used = {names[node.name] for node in program.graph.nodes if node.name in names and node.users}
    known = {**program.constants, **program.state_dict}
    return {name: known[name].detach() for name in sorted(used)}


def _tables(model: nn.Module, tensors: dict[str, Tensor]) -> list[TableEntry]:
    """Return the tables whose rows the compiled model reads, in the order of the model."""
    names: dict[tuple[int, torch.Size], str] = {}
    for name in sorted(tensors):
        names.setdefault((tensors[name].data_ptr(), tensors[name].shape), name)
    out = []
    for path, part in model.named_modules():
        if not isinstance(part, (TableCollection, QuantTableCollection)):
            continue
        types = part.row_types() if isinstance(part, QuantTableCollection) else {}
        tables = submodules(cast(nn.Module, submodules(part)[part._holder])).values()
        for config, table in zip(part._configs, tables, strict=True):  # a table may have been renamed
            rows = cast(nn.Module, table).weight
            assert isinstance(rows, Tensor)
            weight = names.get((rows.data_ptr(), rows.shape))
            if weight is not None:
                place = ".".join(filter(None, (path, part._holder, config.name)))
                pooling = getattr(config, "pooling", None)
                data_type = types[config.name].name if config.name in types else dtype_name(rows)
                out.append(
                    TableEntry(
                        place, tuple(config.feature_names), config.num_embeddings, config.embedding_dim,
                        data_type, "NONE" if pooling is None else pooling.value, weight,
                    )
                )  # fmt: skip
    return out
