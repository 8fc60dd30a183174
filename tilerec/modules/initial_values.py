"""Initial values of table elements: the same seed gives the same bits under every sharding of the table.

Nouns
  block   `INIT_BLOCK` rows of a table, full width, starting at row `INIT_BLOCK * b`; the argument of a user's `init_fn`
  key     two 32-bit words, derived from the collection's seed and the table's name (`ops/random/definition.py`)

Without an `init_fn`, a counter-based generator computes every element. An `init_fn` draws from torch's default
generators, whose output depends on the number of earlier draws. They are therefore reseeded for every block, from the
key and the block number. The caller's generator state is restored afterwards.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.random.definition import block_seed
from tilerec.spec.table import AnyTableConfig
from tilerec.storage.row_file import copy_rows, fetch, release, row_blocks

INIT_BLOCK = 1 << 20
"""Rows in one call of a user's `init_fn`: full width, the same blocks under every sharding."""

_FP8 = torch.float8_e4m3fn

# Torch's default generators belong to the process; ranks may be its threads.
_generators = threading.RLock()


def draw_seed() -> int:
    """Return a seed for a collection, from torch's default CPU generator; `with torch.device(...)` has no effect."""
    with _generators:
        return int(torch.randint(1 << 62, (), device="cpu"))


@torch.no_grad()
def fill_initial(out: Tensor, config: AnyTableConfig, key: Sequence[int], row_offset: int, column_offset: int) -> None:
    """Write the initial values of a tile.

    Args:
        out: `[rows, width]`, contiguous or in a file, of the table's data type; not written yet.
        config: of the table.
        key: of the table.
        row_offset, column_offset: first row and column of the tile in the table.

    Raises:
        ConfigError: `init_fn` returned a tensor whose shape differs from its block's.

    A block that the tile covers completely, in contiguous memory, is filled in place. Other blocks are built in a
    temporary, one at a time.
    """
    if config.init_fn is None:
        low, high = config.get_weight_init_min(), config.get_weight_init_max()
        first = row_offset
        scratch: Tensor | None = None
        for block in row_blocks(out):
            here = block
            if not block.is_contiguous():
                scratch = torch.empty(block.shape, dtype=block.dtype) if scratch is None else scratch
                here = scratch[: block.shape[0]]
            torch.ops.tilerec.random_fill_(here, key, first, column_offset, "uniform", low, high)
            if here is not block:
                block.copy_(here)
            first += block.shape[0]
        torch.autograd.graph.increment_version(out)  # the op writes outside of autograd
        return
    stop, columns = row_offset + out.shape[0], slice(column_offset, column_offset + out.shape[1])
    if not out.numel():
        return
    with _reseeded(out.device) as seed:
        for start in range(row_offset // INIT_BLOCK * INIT_BLOCK, stop, INIT_BLOCK):
            end = min(start + INIT_BLOCK, config.num_embeddings)
            first, last = max(start, row_offset), min(end, stop)
            here = out[first - row_offset : last - row_offset]
            whole = here.shape == (end - start, config.embedding_dim) and here.dtype != _FP8 and here.is_contiguous()
            block = here if whole else _block(here, end - start, config)
            if whole:
                fetch(here)
            block.zero_()  # the function may write only a part
            seed(block_seed(key, start // INIT_BLOCK))
            _call(config, block, start)
            if whole:
                release(here)
            else:
                copy_rows(here, block[first - start : last - start, columns])


@torch.no_grad()
def initial_row(config: AnyTableConfig, key: Sequence[int], row: int, like: Tensor) -> Tensor:
    """Return new initial values of one row from `init_fn`, full width `[D]`, seeded by key and row.

    The values differ from the row's values in its block, because reproducing those would take the whole block.
    """
    block = _block(like, 1, config).zero_()
    with _reseeded(like.device) as seed:
        seed(block_seed(key, (1 << 31) + row))
        _call(config, block, row)
    return block[0].to(like.dtype)


def _block(like: Tensor, rows: int, config: AnyTableConfig) -> Tensor:
    """Allocate rows of full width. fp8 rows use fp32: torch draws no fp8, and rounds when the values are copied."""
    dtype = torch.float32 if like.dtype == _FP8 else like.dtype
    return like.new_empty((rows, config.embedding_dim), dtype=dtype)


def _call(config: AnyTableConfig, block: Tensor, start: int) -> None:
    """Fill a block with `init_fn`, which either writes in place or returns the values."""
    init_fn = config.init_fn
    assert init_fn is not None
    result = init_fn(block, row_offset=start) if _accepts_row_offset(init_fn) else init_fn(block)
    if not isinstance(result, Tensor) or result.untyped_storage().data_ptr() == block.untyped_storage().data_ptr():
        return
    if result.shape != block.shape:
        raise ConfigError(
            f"Table '{config.name}': init_fn returned shape {tuple(result.shape)}; expected the block's shape "
            f"{tuple(block.shape)}. Fill the block in place, or return a tensor of its shape."
        )
    block.copy_(result)


def _accepts_row_offset(init_fn: Callable[..., Any]) -> bool:
    try:
        return "row_offset" in inspect.signature(init_fn).parameters
    except ValueError:  # methods of torch.Tensor have no signature
        return False


@contextmanager
def _reseeded(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds torch's default generators of the CPU and `device`; restore both at the end."""
    if device.type == "cpu":
        with _generators, torch.random.fork_rng(devices=()):
            yield lambda seed: _seed_cpu(seed)
        return
    module = torch.get_device_module(device)

    def seed_both(seed: int) -> None:
        _seed_cpu(seed)
        with module.device(device):
            module.manual_seed(seed)

    with _generators, torch.random.fork_rng(devices=[device], device_type=device.type):
        yield seed_both


def _seed_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
