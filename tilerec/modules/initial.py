"""Initial values of a table's places: the same bits for the same seed, however the table is cut.

Nouns
  block   `INIT_BLOCK` rows of a table, full width, from row `INIT_BLOCK * b` on: what a user's `init_fn` is called with
  key     two 32-bit words, of the collection's seed and the table's name (`ops/random/definition.py`)

Without an `init_fn` every element comes from a counter-based generator. An `init_fn` draws from torch's default
generators, whose numbers depend on how many were drawn before: so they are seeded anew for every block, by key and
block, and the caller's are put back afterwards.
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

INIT_BLOCK = 1 << 20
"""Rows that a user's `init_fn` gets at once: full width, the same blocks under every sharding."""

_FP8 = torch.float8_e4m3fn

# Torch's default generators belong to the process; ranks may be its threads.
_generators = threading.RLock()


def draw_seed() -> int:
    """A collection's seed, from torch's default generator on the CPU, whatever `with torch.device(...)` says."""
    with _generators:
        return int(torch.randint(1 << 62, (), device="cpu"))


@torch.no_grad()
def fill_initial(
    out: Tensor, config: AnyTableConfig, key: Sequence[int], row_offset: int, column_offset: int
) -> None:
    """Write the initial values of a tile.

    Args:
        out: `[rows, width]`, contiguous, of the table's data type; not written yet.
        config: the table's.
        key: the table's.
        row_offset, column_offset: where the tile begins in the table.

    Raises:
        ConfigError: `init_fn` returned a tensor of another shape than its block's.

    A block that the tile covers is filled where it lies; of others there is one copy in memory at a time.
    """
    if config.init_fn is None:
        low, high = config.get_weight_init_min(), config.get_weight_init_max()
        torch.ops.tilerec.random_fill_(out, key, row_offset, column_offset, "uniform", low, high)
        return
    stop, columns = row_offset + out.shape[0], slice(column_offset, column_offset + out.shape[1])
    if not out.numel():
        return
    with _seeding(out.device) as seed:
        for start in range(row_offset // INIT_BLOCK * INIT_BLOCK, stop, INIT_BLOCK):
            end = min(start + INIT_BLOCK, config.num_embeddings)
            first, last = max(start, row_offset), min(end, stop)
            here = out[first - row_offset : last - row_offset]
            whole = here.shape == (end - start, config.embedding_dim) and here.dtype != _FP8
            block = here if whole else _block(here, end - start, config)
            block.zero_()  # the function may write a part only
            seed(block_seed(key, start // INIT_BLOCK))
            _call(config, block, start)
            if not whole:
                here.copy_(block[first - start : last - start, columns])


@torch.no_grad()
def initial_row(config: AnyTableConfig, key: Sequence[int], row: int, like: Tensor) -> Tensor:
    """What `init_fn` makes of one row that begins anew, full width `[D]`: drawn by key and row.

    Another draw than the row's part of its block: making that again would take the whole block.
    """
    block = _block(like, 1, config).zero_()
    with _seeding(like.device) as seed:
        seed(block_seed(key, (1 << 31) + row))
        _call(config, block, row)
    return block[0].to(like.dtype)


def _block(like: Tensor, rows: int, config: AnyTableConfig) -> Tensor:
    """Memory for rows of full width. fp8 in fp32: torch draws no fp8, and rounds the numbers when they are copied."""
    dtype = torch.float32 if like.dtype == _FP8 else like.dtype
    return like.new_empty((rows, config.embedding_dim), dtype=dtype)


def _call(config: AnyTableConfig, block: Tensor, start: int) -> None:
    """Let `init_fn` fill a block, in place or by its result."""
    init_fn = config.init_fn
    assert init_fn is not None
    result = init_fn(block, row_offset=start) if _takes_offset(init_fn) else init_fn(block)
    if (
        not isinstance(result, Tensor)
        or result.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
    ):
        return
    if result.shape != block.shape:
        raise ConfigError(
            f"Table '{config.name}': init_fn returned shape {tuple(result.shape)} for a block of shape "
            f"{tuple(block.shape)}; fill the block in place or return one of its shape."
        )
    block.copy_(result)


def _takes_offset(init_fn: Callable[..., Any]) -> bool:
    try:
        return "row_offset" in inspect.signature(init_fn).parameters
    except ValueError:  # methods of torch.Tensor tell no signature
        return False


@contextmanager
def _seeding(device: torch.device) -> Iterator[Callable[[int], None]]:
    """A function that seeds torch's default generators, the CPU's and `device`'s; they are put back at the end."""
    if device.type == "cpu":
        with _generators, torch.random.fork_rng(devices=()):
            yield lambda seed: _seed_cpu(seed)
        return
    module = torch.get_device_module(device)

    def both(seed: int) -> None:
        _seed_cpu(seed)
        with module.device(device):
            module.manual_seed(seed)

    with _generators, torch.random.fork_rng(devices=[device], device_type=device.type):
        yield both


def _seed_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
