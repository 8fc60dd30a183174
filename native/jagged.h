// Jagged algebra: the functions of jagged.cpp that libtilerec_ops.so calls, too (tilerec/ops/jagged/definition.py specifies
// all of them). Each fills in the report.
#pragma once

#include "tilerec.h"

TR_API void tr_offsets_from_lengths(const void* lengths, int32_t index_type, int64_t segments, int64_t* offsets, int32_t threads,
                                    tr_report* report);
TR_API void tr_segment_ids(const int64_t* offsets, int64_t segments, int64_t total, int64_t* out, int32_t threads,
                           tr_report* report);
TR_API void tr_select_segments(const void* values, int64_t item_bytes, int64_t items, const int64_t* offsets, int64_t segments,
                               const int64_t* order, const int64_t* out_offsets, int64_t selected, int64_t total, void* out,
                               int32_t threads, tr_report* report);
TR_API void tr_jagged_to_padded(const void* values, int64_t item_bytes, int64_t items, const int64_t* offsets, int64_t bags,
                                int64_t length, const void* padding, int64_t element_bytes, void* out, int32_t threads,
                                tr_report* report);
TR_API void tr_padded_to_jagged(const void* padded, int64_t item_bytes, int64_t bags, int64_t length, const int64_t* offsets,
                                int64_t total, void* out, int32_t threads, tr_report* report);
// type: 0 float, 1 double, 2 int32, 3 int64
TR_API void tr_segment_sum(const void* values, int32_t type, int64_t items, int64_t width, const int64_t* offsets,
                           int64_t segments, void* out, int32_t threads, tr_report* report);
TR_API void tr_repeat_segments(const void* rows, int64_t row_bytes, const int64_t* offsets, int64_t segments, int64_t total,
                               void* out, int32_t threads, tr_report* report);
