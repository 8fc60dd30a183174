"""What the sanitizer (`sanitizer.py`) lets pass, each with its reason, and what it runs on whenever tests run."""

from __future__ import annotations

from collections.abc import Mapping

ROAMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ["pooled_kernel", "chunk_kernel", "sequence_kernel", "sample_weight_kernel", "sample_weight_chunk_kernel"],
        ("base",),
    ),
    **dict.fromkeys(["quantized_pooled_kernel", "quantized_sequence_kernel"], ("base", "heads")),
    "advance_counts": ("counts",),
    "update_runs": ("weights", "slot0", "slot1", "slot2", "names"),
    "part_sums": ("rows", "grads", "scalars", "weights", "slot0", "slot1", "slot2"),
    **dict.fromkeys(["ask_kernel", "give_kernel"], ("ints", "longs")),
    **dict.fromkeys(["plan_kernel", "seat_kernel"], ("ints", "longs", "bytes")),
    "carry_kernel": ("units",),
    "lines_kernel": ("line_of", "dirty"),
    "apply_to_parts": ("rows", "grads", "scalars", "weights", "slot0", "slot1", "slot2", "names"),
}  # fmt: skip
"""Arguments from which a kernel reaches other tensors, by distance (`addresses.py`)."""

SHARED: Mapping[tuple[str, str], str] = {
    ("find_kernel", "report"): "all who take it write 1; who it is about is an atomic maximum",
    ("live_kernel", "report"): "all who take it write 1; who it is about is an atomic maximum",
    ("find_kernel", "needs_B"): "a flag: all who need the bucket walked write 1",
    ("hit_kernel", "last_E"): "all hits of a step write the step",
    ("values_kernel", "tile"): "a row that is named twice gets its initial values twice",
    ("number_kernel", "beside"): "a row that is named twice gets the number twice",
    ("lines_kernel", "dirty"): "a mark: all whose line is going to be updated write 1",
    ("move_rows", "flat"): "segments that overlap are the caller's mistake; a test of bad places makes it",
}
"""Arguments to which programs of a launch write one value, and nobody reads it in the launch: aligned words arrive
whole, so whoever is last, it is that value. Only stores of equal values pass."""

TOLD_BY_ANY: Mapping[str, str] = {
    "report": "which of a batch's errors is told may differ from run to run (reports.py)",
    "unsorted": "which of a row's occurrences has its key may differ (request.py); sorted they are the same",
}
"""Arguments whose content may depend on the order of programs."""

LISTED = 2**20
"""More tables, features or segments than any host lists."""

MOST: Mapping[tuple[str, str], int] = {
    ("pack", "segments"): LISTED,
    ("unpack", "segments"): LISTED,
    ("move_rows", "segments"): LISTED,
    ("deal_items", "width"): LISTED,
    ("sequence_kernel", "feature_count"): LISTED,
    ("quantized_sequence_kernel", "feature_count"): LISTED,
    **{
        (kernel, name): LISTED
        for kernel in (
            "ask_kernel",
            "give_kernel",
            "plan_kernel",
            "carry_kernel",
            "seat_kernel",
            "lines_kernel",
        )
        for name in ("segment_count", "table_count", "mover_count")
    },
    ("advance_counts", "program_id(0)"): LISTED // 32,
    ("sort_blocks", "program_id(0)"): 65536,  # `small_sort.MOST` occurrences
    ("rank_blocks", "program_id(0)"): 65536,
    ("rank_blocks", "total"): 65536,
    ("occurrence_keys", "programs"): 4096,  # `occurrences.programs_of`
    ("occurrence_keys", "program_id(0)"): 2 * (4096 + LISTED),
}
"""Integer arguments, `program_id(n)` and `num_programs(n)` that a kernel's host keeps below what their type holds."""

WRAPS: Mapping[tuple[str, str], str] = {
    ("move_rows", "add"): "adds rows of users, whose numbers may be int32 and wrap as torch's do",
}
"""Arithmetic of int32 numbers that are no addresses."""

GRID = (2**31 - 1, 65535, 65535)
"""Programs that a launch can have along its axes."""

SAMPLE: Mapping[str, tuple[str, ...]] = {
    "test_exchange.py": ("test_picking_into_a_part_of_memory_leaves_the_rest_alone",),
    "test_hash.py": ("test_an_id_that_is_evicted_before_its_turn_is_a_newcomer",),
    "test_update.py": (
        "test_a_sum_is_in_the_order_of_features_then_positions",
        "test_tables_of_several_types_in_one_call",
        "test_rows_go_by_their_names",
    ),
}
"""Tests of kernels that always run under the sanitizer."""
