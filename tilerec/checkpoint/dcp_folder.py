"""`DcpFolder`: reads a checkpoint of `torch.distributed.checkpoint`, one box at a time, without a process group.

Each box or value is a file of `torch.save` inside of a `.distcp` file. It is loaded with `weights_only=True`, and only
in the uncompressed form that torch writes, so it takes no more memory than its bytes on disk.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, final

import torch
from torch import Tensor

from tilerec.checkpoint.dcp_metadata import METADATA, MOST_BYTES, DcpMetadata, StoredItem, parse_metadata
from tilerec.checkpoint.folder import folder_at
from tilerec.errors import FileError, InputError


@final
class DcpFolder:
    """A DCP checkpoint on disk. path: as given. contents: its tensors and values.

    Args:
        path: a folder, or a URL of fsspec.

    Raises:
        FileError: it has no `.metadata`, or a file is missing. InputError: `.metadata` is damaged or hostile.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._folder = folder_at(path)
        with self._errors(METADATA):
            size = self._folder.size(METADATA)
            if size > MOST_BYTES:
                raise InputError(
                    f"{self._what(METADATA)}: got {size:,} bytes; expected at most {MOST_BYTES:,}. Save larger boxes."
                )
            with self._folder.open(METADATA) as file:
                data = _read(file, size)
        self.contents: DcpMetadata = parse_metadata(data, self._what(METADATA), _Sizes(self))

    def tensor(self, name: str, item: StoredItem) -> Tensor:
        """Return the values of a tensor's box, on the CPU.

        Raises:
            InputError: the bytes are something else. FileError: the file cannot be read.
        """
        value = self._load(name, item)
        want = self.contents.tensors[name].dtype
        sizes = None if item.box is None else item.box.sizes
        if type(value) is not Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            raise self._error(name, item, f"a {type(value).__name__}", "a dense tensor")
        if value.dtype != want or tuple(value.shape) != sizes:
            raise self._error(name, item, f"{value.dtype} {list(value.shape)}", f"{want} {list(sizes or ())}")
        return value

    def value(self, name: str) -> Any:
        """Return a value that is no tensor: numbers, strings, lists, dicts and what else `weights_only` admits.

        Raises:
            InputError: it holds an object of another class. FileError: the file cannot be read.
        """
        return self._load(name, self.contents.values[name])

    def _load(self, name: str, item: StoredItem) -> Any:
        with self._errors(item.file), self._folder.open(item.file) as file:
            file.seek(item.start)
            data = _read(file, item.size)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                entries = archive.infolist()
            plain = not any(entry.compress_type or entry.flag_bits & 1 for entry in entries)
            # Entries that share bytes could take any amount of memory.
            if not plain or sum(entry.file_size for entry in entries) > len(data) or not data.startswith(b"PK"):
                raise self._error(name, item, "compressed or shared bytes", "the form of torch.save")
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except InputError:
            raise
        except pickle.UnpicklingError as error:
            found = str(error).split("Unsupported ")[-1].split("\n")[0]
            raise self._error(name, item, f"'{found:.160}'", "tensors, numbers, strings, lists and dicts") from error
        except Exception as error:  # torch raises a dozen kinds for damaged bytes
            raise self._error(name, item, f"'{error!s:.100}'", "undamaged bytes of torch.save") from error

    def _error(self, name: str, item: StoredItem, got: str, expected: str) -> InputError:
        where = f"{self._what(item.file)}: bytes {item.start:,} to {item.start + item.size:,} for {name!r}"
        move = "Import another checkpoint." if item.box else "Leave such values out: skip_values (--skip-values)."
        return InputError(f"{where}: got {got}; expected {expected}. {move}")

    def _what(self, file: str) -> str:
        return f"DCP checkpoint {self.path}/{file}"

    @contextmanager
    def _errors(self, file: str) -> Iterator[None]:
        """Raise `FileError` for an `OSError` of the block."""
        try:
            yield
        except OSError as error:
            if isinstance(error, FileError):
                raise
            raise FileError(
                f"{self._what(file)}: got '{error.strerror or error}'; expected a folder that "
                "torch.distributed.checkpoint wrote, with all its files. Check the path.",
                error.errno,
            ) from error

    def file_size(self, name: str) -> int:
        """Return the bytes of a file of the checkpoint."""
        with self._errors(name):
            return self._folder.size(name)


class _Sizes(dict[str, int]):
    """Sizes of files, each read once."""

    def __init__(self, folder: DcpFolder) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> int:
        self[name] = self._folder.file_size(name)
        return self[name]


def _read(file: BinaryIO, size: int) -> bytes:
    """Return `size` bytes; raise `OSError` at the end of the file."""
    parts, left = [], size
    while left:
        part = file.read(left)  # an operating system reads at most 2 GB at a time
        if not part:
            raise OSError(5, f"end of the file {left:,} bytes early")
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
