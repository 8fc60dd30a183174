"""Records passed to the native library: ctypes copies of the structs in `native/*.h`, field for field.

`layout()` describes their memory layout as text. The library returns the same text for its own structs (`tr_layout`). A
library with a different text was built from other sources and would misread these records, so it is not used.

Example: `ReportRecord` gives "tr_report 32: status 0+8 feature 8+8 position 16+8 value 24+8" (size: field
offset+size).
"""

from __future__ import annotations

import ctypes

_P, _I32, _I64, _F64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double


class ReportRecord(ctypes.Structure):
    """`tr_report`: the error that a function found; `status` 0: none."""

    _fields_ = [("status", _I64), ("feature", _I64), ("position", _I64), ("value", _I64)]


class LookupRecord(ctypes.Structure):
    """`tr_lookup` of native/lookup.h; pointers are passed as integers."""

    _fields_ = [
        ("features", _I64),
        ("tables", _P),
        ("keys", _P),
        ("means", _P),
        ("table_count", _I64),
        ("rows", _P),
        ("dims", _P),
        ("types", _P),
        ("data", _P),
        ("batch_count", _I64),
        ("batches", _P),
        ("ids", _P),
        ("index_type", _I64),
        ("id_count", _I64),
        ("offsets", _P),
        ("offset_count", _I64),
        ("sample_weights", _P),
        ("numbers", _P),
        ("number_type", _I64),
        ("sample_grads", _P),
        ("threads", _I64),
        ("report", ReportRecord),
    ]


class GradientArguments(ctypes.Structure):
    """`tr_gradient` of native/update.h."""

    _fields_ = [
        *((name, _P) for name in ("grad", "ids", "offsets", "sample_weights")),
        *((name, _I64) for name in ("grad_count", "ids_count", "offsets_count", "features")),
        *((name, _P) for name in ("tables", "starts", "bags", "grad_starts", "grad_strides", "means")),
        ("grad_type", _I32),
        ("index_type", _I32),
    ]


class RowsRecord(ctypes.Structure):
    """`tr_rows` of native/update.h."""

    _fields_ = [
        *((name, _P) for name in ("weights", "slots", "rows", "dims", "types")),
        *((name, _P) for name in ("steps", "seeds", "row_offsets", "column_offsets", "hyper", "names")),
        *((name, _I64) for name in ("tables", "slots_per_table", "hypers")),
        ("rule", _I32),
    ]


class PartsRecord(ctypes.Structure):
    """`tr_parts` of native/update.h."""

    _fields_ = [(name, _P) for name in ("rows", "grads", "scalars", "counts", "strides", "full_dims")]


class RouteRecord(ctypes.Structure):
    """`tr_route` of native/exchange.h."""

    _fields_ = [
        ("lists", _P),
        *((name, _I64) for name in ("routes", "batch_count", "cut_count", "wire_count")),
        ("ids", _P),
        ("index_type", _I64),
        ("id_count", _I64),
        ("offsets", _P),
        *((name, _I64) for name in ("offset_count", "each_id", "local_type", "threads")),
        ("state", _P),
        *((name, _I64) for name in ("parts", "present", "moved")),
        *((name, _P) for name in ("counts", "lengths", "slots", "local", "positions")),
        ("report", ReportRecord),
    ]


class SegmentsRecord(ctypes.Structure):
    """`tr_segments` of native/exchange.h."""

    _fields_ = [
        ("lists", _P),
        ("segments", _I64),
        ("flat", _P),
        ("flat_size", _I64),
        ("rows", _P),
        ("rows_size", _I64),
        ("slots", _P),
        *((name, _I64) for name in ("slot_count", "element_bytes", "sum_bytes", "fresh", "threads")),
        ("report", ReportRecord),
    ]


class DistinctRecord(ctypes.Structure):
    """`tr_distinct` of native/distinct.h."""

    _fields_ = [
        ("ids", _P),
        ("index_type", _I64),
        ("offsets", _P),
        ("keys", _I64),
        ("lists", _P),
        ("each_id", _I64),
        *((name, _P) for name in ("out", "out_offsets", "counts", "items", "starts", "inverse", "table")),
        *((name, _I64) for name in ("room", "threads", "item_count")),
    ]


class RepeatsRecord(ctypes.Structure):
    """`tr_repeats` of native/distinct.h."""

    _fields_ = [
        ("lists", _P),
        ("segments", _I64),
        ("flat", _P),
        ("flat_size", _I64),
        ("rows", _P),
        ("rows_size", _I64),
        ("slots", _P),
        ("slot_count", _I64),
        ("items", _P),
        ("starts", _P),
        *((name, _I64) for name in ("item_count", "start_count", "element_bytes", "fresh", "threads")),
    ]


class PackingRecord(ctypes.Structure):
    """`tr_packing` of native/quantize.h."""

    _fields_ = [
        ("lists", _P),
        ("segments", _I64),
        ("rows", _P),
        ("packed", _P),
        *((name, _I64) for name in ("fp8", "wide", "threads")),
    ]


class CrossingRecord(ctypes.Structure):
    """`tr_crossing` of native/cross.h."""

    _fields_ = [
        *((name, _P) for name in ("x", "x0", "factor", "bias", "out", "of_x0", "of_factor", "of_bias")),
        *((name, _I64) for name in ("samples", "features", "adds", "first", "threads")),
    ]


class Zch(ctypes.Structure):
    """`tr_zch` of native/hash.h."""

    _fields_ = [
        ("ids", _P),
        ("count", _I64),
        *((name, _P) for name in ("counts", "may_insert", "ttls")),
        *((name, _P) for name in ("slot_ids", "used", "since", "last", "hits", "expires", "counters")),
        *((name, _I64) for name in ("counter_count", "first", "held", "buckets", "slots", "max_probe")),
        *((name, _I64) for name in ("step", "now", "ttl", "policy", "evict", "threshold")),
        ("exponent", _F64),
        *((name, _P) for name in ("rows", "outcomes", "probes", "evicted_rows", "evicted_ids")),
        *((name, _I64) for name in ("evicted", "threads")),
        ("report", ReportRecord),
    ]


class ZchResizing(ctypes.Structure):
    """`tr_zch_resizing` of native/hash.h."""

    _fields_ = [
        *((name, _P) for name in ("slot_ids", "used", "since", "last", "hits", "expires")),
        *((f"new_{name}", _P) for name in ("ids", "used", "since", "last", "hits", "expires")),
        ("moved", _P),
        *((name, _I64) for name in ("first", "held", "buckets", "slots")),
        *((name, _I64) for name in ("new_buckets", "new_slots", "max_probe", "step", "policy")),
        ("exponent", _F64),
        ("threads", _I64),
        ("report", ReportRecord),
    ]


RECORDS: dict[str, type[ctypes.Structure]] = {
    "tr_report": ReportRecord,
    "tr_lookup": LookupRecord,
    "tr_gradient": GradientArguments,
    "tr_rows": RowsRecord,
    "tr_parts": PartsRecord,
    "tr_route": RouteRecord,
    "tr_segments": SegmentsRecord,
    "tr_crossing": CrossingRecord,
    "tr_zch": Zch,
    "tr_zch_resizing": ZchResizing,
}
"""Records by their C names."""


def layout() -> str:
    """Return one line per record: its size, then offset and size of each field, in bytes."""
    lines = []
    for name, record in RECORDS.items():
        places = [getattr(record, field[0]) for field in record._fields_]
        fields = [
            f"{field[0]} {place.offset}+{place.size}" for field, place in zip(record._fields_, places, strict=True)
        ]
        lines.append(f"{name} {ctypes.sizeof(record)}: {' '.join(fields)}")
    return "\n".join(lines)
