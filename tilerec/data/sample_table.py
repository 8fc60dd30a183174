"""Samples of PyTorch data sets as Arrow tables: each sample is a dict from column names to values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from tilerec.data.arrow_values import is_list, kind_of
from tilerec.errors import InputError

_NUMBERS = ("boolean", "integer", "number")
_ERRORS = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError)


def first_table(samples: Sequence[Any], where: str) -> pa.Table:
    """Return all columns of a data set's first samples; those that Arrow cannot hold as nulls.

    Args:
        samples, where: see `sample_table`.

    Raises:
        InputError: a sample is no dict.
    """
    _check_dicts(samples, where)
    found = {}
    for name in samples[0] if samples else ():
        try:
            found[name] = _column(samples, name, where)
        except InputError:  # it is raised again where the column is read
            found[name] = pa.nulls(len(samples))
    return pa.table(found)


def sample_table(samples: Sequence[Any], columns: Sequence[str], where: str, schema: pa.Schema) -> pa.Table:
    """Return columns of samples.

    Args:
        samples: dicts whose values are numbers, text, None, or one-dimensional lists, arrays or tensors.
        columns: names of the columns.
        where: the samples' place, for messages.
        schema: types of the data set's first samples. A column without values gets its type from there.

    Raises:
        InputError: a sample is no dict, lacks a column, or has a value of another type.
    """
    _check_dicts(samples, where)
    return fitted(pa.table({name: _column(samples, name, where) for name in columns}), where, schema)


def fitted(table: pa.Table, where: str, schema: pa.Schema) -> pa.Table:
    """Return a table whose columns have the kinds of a schema; one without values gets its type.

    Raises:
        InputError: a column has another kind.
    """
    for place, field in enumerate(table.schema):
        wanted, kind = schema.field(field.name).type, field.type
        if pa.types.is_null(kind) or (is_unknown(kind) and is_list(wanted)):
            table = table.set_column(place, field.name, table.column(place).cast(wanted))
        elif not is_unknown(wanted) and kind_of(kind) != kind_of(wanted) and not _are_numbers(kind, wanted):
            raise InputError(
                f"{where}: column {field.name!r}: got {kind}; expected {wanted}, as in the first samples. Return one "
                "type for every sample."
            )
    return table


def is_unknown(kind: pa.DataType) -> bool:
    """Return True for the type of columns without any value: nulls, or empty lists."""
    return bool(pa.types.is_null(kind.value_type if is_list(kind) else kind))


def _are_numbers(first: pa.DataType, second: pa.DataType) -> bool:
    kinds = [kind_of(kind).removeprefix("list of ") for kind in (first, second)]
    return all(kind in _NUMBERS for kind in kinds) and is_list(first) == is_list(second)


def _check_dicts(samples: Sequence[Any], where: str) -> None:
    for place, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise InputError(
                f"{where}: got {type(sample).__name__} as sample {place}; expected a dict from column names to values. "
                "Wrap the data set."
            )


def _column(samples: Sequence[Any], name: str, where: str) -> pa.Array:
    try:
        values = [_plain(sample[name]) for sample in samples]
    except KeyError as error:
        place = next(place for place, sample in enumerate(samples) if name not in sample)
        raise InputError(
            f"{where}: column {name!r}: got sample {place} without it; expected the same columns in every sample. "
            "Return None where a value is missing."
        ) from error
    try:
        return pa.array(values)
    except OverflowError as error:
        for kind in (pa.uint64(), pa.list_(pa.uint64())):  # ids from 2^63 on
            with suppress(*_ERRORS):
                return pa.array(values, kind)
        raise _unreadable(name, where, error) from error
    except _ERRORS as error:
        raise _unreadable(name, where, error) from error


def _unreadable(name: str, where: str, error: Exception) -> InputError:
    return InputError(
        f"{where}: column {name!r}: got values of several types, or of a type that Arrow lacks ({error}); expected "
        "numbers, text, or one-dimensional lists of them. Return one such type for every sample."
    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.item()
    return value
