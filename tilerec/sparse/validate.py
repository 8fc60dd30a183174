"""Validation of the contents of a keyed jagged tensor, for data loaders, tests and debugging.

Constructors check only shapes and types. Contents are on the device, and reading them waits for it, so only an explicit
call checks them. Every message names the feature, the bag and the value.

An id outside its table is a warning, not an error: the collection's `on_bad_id` decides how a lookup handles it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.jagged.definition import repeat_segments
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keys import shorten

if TYPE_CHECKING:
    from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig


def validate_keyed_jagged_tensor(
    kjt: KeyedJaggedTensor, configs: Sequence[EmbeddingBagConfig | EmbeddingConfig] | None = None
) -> bool:
    """Return False if an id is outside its table, with a warning that names feature, bag and id; else True.

    Checks that
    - offsets start at 0 and do not descend,
    - no length is negative, and lengths and offsets agree,
    - the lengths sum to the number of values and weights,
    - inverse indices are numbers of existing bags,
    - with table `configs`: ids are whole numbers below the number of rows. Features without a config are not checked;
      for a feature with several tables the smallest table counts.

    Waits for the device.

    Raises:
        InputError: any fault except an id out of range; the message has feature, bag and value.
    """
    _check_offsets(kjt)
    _check_lengths(kjt)
    _check_sizes(kjt)
    _check_inverse_indices(kjt)
    fault = None if configs is None else _id_out_of_range(kjt, configs)
    if fault is not None:
        warnings.warn(fault, stacklevel=2)
    return fault is None


def _check_offsets(kjt: KeyedJaggedTensor) -> None:
    offsets_S1 = kjt._parts.segments.given_offsets
    if offsets_S1 is None:
        return
    first = int(offsets_S1[0].item())
    if first != 0:
        raise InputError(
            f"KeyedJaggedTensor: got {first} as the first offset; expected 0, since values outside all bags would "
            f"shift the features. Pass values[offsets[0]:] and offsets - offsets[0]."
        )
    bag = _first(offsets_S1.diff() < 0)
    if bag is not None:
        raise InputError(
            f"{_bag_name(kjt, bag)}: got offsets that descend from {int(offsets_S1[bag])} to "
            f"{int(offsets_S1[bag + 1])}; expected each "
            f"at least as large as the one before. Correct the offsets."
        )
    lengths_S = kjt._parts.segments.given_lengths
    if lengths_S is not None:
        bag = _first(lengths_S.long() != offsets_S1.long().diff())
        if bag is not None:
            raise InputError(
                f"{_bag_name(kjt, bag)}: got length {int(lengths_S[bag])} and offsets of "
                f"{int(offsets_S1[bag + 1] - offsets_S1[bag])} ids; expected equal numbers. Pass only lengths or "
                "offsets."
            )


def _check_lengths(kjt: KeyedJaggedTensor) -> None:
    lengths_S = kjt.lengths()
    bag = _first(lengths_S < 0)
    if bag is not None:
        raise InputError(
            f"{_bag_name(kjt, bag)}: got length {int(lengths_S[bag])}; expected 0 or more. Correct the lengths."
        )


def _check_sizes(kjt: KeyedJaggedTensor) -> None:
    offsets_S1, items = kjt.offsets(), kjt.values().shape[0]
    total = int(offsets_S1[-1].item())
    if total > items:
        bag = _first(offsets_S1[1:] > items)
        assert bag is not None, "the last offset exceeds the number of values"
        raise InputError(
            f"{_bag_name(kjt, bag)}: got the end {int(offsets_S1[bag + 1])}; expected at most {items}, the number of "
            f"values. Correct the lengths, which "
            f"sum to {total}."
        )
    if total < items:
        raise InputError(
            f"KeyedJaggedTensor: got lengths that sum to {total}; expected {items}, the number of values. The first "
            f"value outside all bags "
            f"is {kjt.values()[total].tolist()} at position {total}."
        )
    weights = kjt.weights_or_none()
    if weights is not None and weights.shape[0] != items:
        raise InputError(
            f"KeyedJaggedTensor: got {weights.shape[0]} weights; expected {items}. Pass one weight per value."
        )


def _check_inverse_indices(kjt: KeyedJaggedTensor) -> None:
    inverse_indices = kjt.inverse_indices_or_none()
    if inverse_indices is None:
        return
    keys, index_FB = inverse_indices
    own_keys = kjt.keys()
    lacking = [key for key in own_keys if key not in keys]
    unknown = [key for key in keys if key not in own_keys]
    if lacking or unknown:
        raise InputError(
            f"KeyedJaggedTensor: got inverse indices without the keys {shorten(lacking)} and with the unknown keys "
            f"{shorten(unknown)}; expected those of the tensor. Pass one row of inverse indices for each."
        )
    stride = dict(zip(kjt.keys(), kjt.stride_per_key(), strict=True))
    bags_F1 = torch.tensor([stride[key] for key in keys], device=index_FB.device).view(-1, 1)
    wrong = _first(((index_FB < 0) | (index_FB >= bags_F1)).flatten())
    if wrong is not None:
        row, sample = divmod(wrong, index_FB.shape[1])
        raise InputError(
            f"Feature '{keys[row]}': got bag {int(index_FB[row, sample])} for sample {sample}; expected one of its "
            f"{stride[keys[row]]} bags. Correct inverse_indices."
        )


def _id_out_of_range(kjt: KeyedJaggedTensor, configs: Sequence[EmbeddingBagConfig | EmbeddingConfig]) -> str | None:
    """Return the message about the first id outside its table, or None."""
    ids_N = kjt.values()
    if ids_N.is_floating_point() or ids_N.is_complex() or ids_N.dtype == torch.bool:
        raise InputError(
            f"KeyedJaggedTensor: got values of {ids_N.dtype}; expected whole numbers as ids. Use torch.int64."
        )
    if ids_N.dim() != 1:
        raise InputError(
            f"KeyedJaggedTensor: got values of shape {list(ids_N.shape)}; expected one id each, [N]. Flatten them."
        )
    # The smallest table is the limit if several tables have one feature.
    table: dict[str, tuple[int, str]] = {}
    for config in configs:
        for feature in config.feature_names:
            limit = (config.num_embeddings, config.name)
            table[feature] = min(limit, table.get(feature, limit))
    keys = kjt.keys()
    unbounded = torch.iinfo(torch.int64).max
    rows_F = torch.tensor([table.get(key, (unbounded, ""))[0] for key in keys], device=ids_N.device)
    lowest_F = torch.tensor([0 if key in table else -unbounded - 1 for key in keys], device=ids_N.device)
    starts_F1 = torch.tensor(kjt.offset_per_key(), device=ids_N.device)
    ids_long_N = ids_N.long()
    too_high = ids_long_N >= repeat_segments(rows_F, starts_F1, ids_N.shape[0])
    too_low = ids_long_N < repeat_segments(lowest_F, starts_F1, ids_N.shape[0])
    position = _first(too_high | too_low)
    if position is None:
        return None
    bag = int(torch.searchsorted(kjt.offsets().long(), torch.tensor(position, device=ids_N.device), right=True)) - 1
    rows, name = table[_feature(kjt, bag)[0]]
    return (
        f"{_bag_name(kjt, bag)}: got id {int(ids_N[position])} (value {position}); expected one in [0, {rows}), the "
        f"rows of table '{name}'. Map it into the table or increase num_embeddings."
    )


def _first(wrong: Tensor) -> int | None:
    """Return the first True position, or None."""
    positions = wrong.nonzero()
    return int(positions[0].item()) if positions.shape[0] > 0 else None


def _feature(kjt: KeyedJaggedTensor, bag: int) -> tuple[str, int]:
    """Return the feature of a flat bag number, and the number of the bag in the feature."""
    bag_offsets = kjt.lengths_offset_per_key()
    position = max(f for f in range(len(bag_offsets) - 1) if bag_offsets[f] <= bag)
    return kjt.keys()[position], bag - bag_offsets[position]


def _bag_name(kjt: KeyedJaggedTensor, bag: int) -> str:
    feature, own_bag = _feature(kjt, bag)
    return f"Feature '{feature}', bag {own_bag}"
