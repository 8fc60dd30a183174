"""The model file of a run: all weights of a model in one safetensors file, independent of its sharding.

    name                         value
    <path of a table>.weight     the whole table; ranks send their tiles to rank 0, rows by rows
    <path of a parameter>        whole, as on rank 0
    <path of a table's ids>      rows and ids of managed collision, gathered whole

A process loads the file under any sharding and any number of ranks: the file is mapped, and each rank copies the rows
of its tiles. Memory beside the model: `_CHUNK_BYTES` and the ids of managed tables while writing, none while loading.

The format: 8 bytes with the size of the header, the header (JSON: dtype, shape and byte range of each name), the bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from tilerec.atomic_file import open_replacement
from tilerec.checkpoint.data_file import bytes_of
from tilerec.checkpoint.dtypes import DTYPE_NAMES
from tilerec.errors import ConfigError, FileError
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.modules.table import Table
from tilerec.sharding.buckets_view import full_state_of
from tilerec.sharding.logical import LogicalTensor
from tilerec.sharding.rank_0_rows import rows_on_rank_0
from tilerec.sharding.table import ShardedTable
from tilerec.torch_private import state_dict_pre_hooks

MODEL_FILE = "model.safetensors"
_CHUNK_BYTES = 1 << 26
_ALIGNMENT = 8


@dataclass(frozen=True)
class _Entry:
    """One tensor of the file. `chunks` yields its rows in order, on rank 0; on other ranks None. It is collective."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Callable[[], Iterator[Tensor | None]]


@torch.no_grad()
def save_model(
    path: str | Path, model: nn.Module, metadata: dict[str, str], *, rank: int = 0, what: str = "Model"
) -> None:
    """Write the weights of a model to a safetensors file. Collective: all ranks call it, and rank 0 writes.

    The file is replaced as a whole or not at all. Sharded tables are gathered in chunks, so no rank holds a whole one.

    Args:
        metadata: text by name, for the header.
        rank: of this process.
        what: the kind of file, for errors.

    Raises:
        FileError: the file cannot be written; on rank 0, after all ranks have sent their rows.
        ConfigError: the model has a tensor that safetensors cannot hold.
    """
    entries = _entries(model)
    failure: OSError | None = None
    writer = open_replacement(path, what) if rank == 0 else nullcontext()
    # Other ranks send their rows even if rank 0 cannot write them, so that no rank waits.
    chunks = (chunk for entry in entries.values() for chunk in entry.chunks())
    try:
        with writer as file:
            if file is not None:
                _write_header(file, entries, metadata)
            for chunk in chunks:
                if file is not None and chunk is not None:
                    file.write(bytes_of(chunk))
    except OSError as error:
        failure = error
        for _ in chunks:
            pass
    if failure is not None:
        raise failure


@torch.no_grad()
def weights_hash(model: nn.Module, names: Collection[str] | None = None) -> str:
    """Return the SHA-256 of the names, types and values of a model's weights, sharded or not. Collective.

    Only rank 0 has the values of sharded tables; other ranks return other texts.

    Args:
        names: of the weights that count; None: all.

    Raises:
        ConfigError: the model has a tensor that safetensors cannot hold.
    """
    found = hashlib.sha256()
    for name, entry in sorted(_entries(model).items()):
        if names is not None and name not in names:
            continue
        found.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
        for chunk in entry.chunks():
            if chunk is not None:
                found.update(bytes_of(chunk))
    return found.hexdigest()


def _write_header(file: BinaryIO, entries: dict[str, _Entry], metadata: dict[str, str]) -> None:
    header: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for name, entry in entries.items():
        size = torch.Size(entry.shape).numel() * entry.dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (start, start + size),
        }
        start += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)


def _entries(model: nn.Module) -> dict[str, _Entry]:
    """Return the tensors of the model by the names of the unsharded one, large dtypes first. Collective."""
    for before in state_dict_pre_hooks(model).values():
        before(model, "", False)
    out: dict[str, _Entry] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(part, Table):
            part.settle()
        if isinstance(part, ShardedTable):
            whole = part.weight_of()
            out[f"{prefix}weight"] = _Entry(whole.cover.shape, whole.like.dtype, _row_chunks(whole))
            continue
        found: dict[str, Tensor] = {}
        if isinstance(part, ManagedCollisionModule):
            full_state_of(part, found, prefix)
        else:
            part._save_to_state_dict(found, prefix, keep_vars=False)
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPE_NAMES:
                got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ConfigError(
                    f"Model: got {got} for {name!r}; expected tensors of numbers. Leave it out of the state dict."
                )
            out[name] = _Entry(tuple(tensor.shape), tensor.dtype, _plain_chunks(tensor.detach()))
    # Offsets are then multiples of each dtype's size, as safetensors requires of aligned readers.
    return dict(sorted(out.items(), key=lambda item: -item[1].dtype.itemsize))


def _plain_chunks(tensor: Tensor) -> Callable[[], Iterator[Tensor]]:
    def chunks() -> Iterator[Tensor]:
        if not tensor.dim():
            yield tensor
            return
        step = _rows_per_chunk(tuple(tensor.shape), tensor.dtype)
        for first in range(0, tensor.shape[0], step):
            yield tensor[first : first + step]

    return chunks


def _row_chunks(whole: LogicalTensor) -> Callable[[], Iterator[Tensor | None]]:
    def chunks() -> Iterator[Tensor | None]:
        shape = whole.cover.shape
        whole.group.begin("save_model")
        step = _rows_per_chunk(shape, whole.like.dtype)
        for first in range(0, shape[0], step):
            yield rows_on_rank_0(whole, first, min(first + step, shape[0]))

    return chunks


def _rows_per_chunk(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    row = torch.Size(shape[1:]).numel() * dtype.itemsize
    return max(1, _CHUNK_BYTES // max(1, row))


def read_metadata(path: str | Path) -> dict[str, str]:
    """Return the metadata of a file of `save_model`; raise as `load_model` does."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except OSError as error:
        raise _unreadable(path, error) from error
    except SafetensorError as error:
        raise _damaged(path, error) from error
    return metadata


def _unreadable(path: str | Path, error: OSError) -> FileError:
    return FileError(
        f"Model {path}: got '{error.strerror or error}'; expected a readable file. Train the run first.", error.errno
    )


def _damaged(path: str | Path, error: Exception) -> ConfigError:
    return ConfigError(f"Model {path}: got '{error}'; expected a complete safetensors file. Copy or train it again.")


def load_model(path: str | Path, model: nn.Module) -> dict[str, str]:
    """Load a file of `save_model` into a model, sharded or not; return the file's metadata.

    The file is mapped: each rank reads the rows of its tiles, and needs the file on its machine.

    Raises:
        FileError: the file cannot be read.
        ConfigError: it is no such file, or has the weights of another model.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # it is not a dict
            metadata: dict[str, str] = file.metadata() or {}
            result = model.load_state_dict(state, strict=False)
    except OSError as error:
        raise _unreadable(path, error) from error
    except SafetensorError as error:
        raise _damaged(path, error) from error
    except RuntimeError as error:
        raise ConfigError(
            f"Model {path}: {' '.join(str(error).split())} The run's model or its tables have changed since; use the "
            "run.toml beside the file."
        ) from error
    if result.missing_keys or result.unexpected_keys:
        raise ConfigError(
            f"Model {path}: got a file without {result.missing_keys[:4]} and with the unknown "
            f"{result.unexpected_keys[:4]}; expected the weights of this model. Use the run.toml beside the file."
        )
    return metadata
