// C interface of the updates: sum a step's row gradients, apply a row rule once per distinct row.
//
//   gradient record   row gradients not yet materialised: an output gradient, its ids, and the positions of each feature's
//                     bags in both. Occurrence p of bag b of feature f has the row gradient
//                     s * w_p * grad[grad_starts[f] + b * grad_strides[f] : + dim], s = 1 / (ids in the bag) for a mean
//   part              some columns of a table; its rule runs in phases (rules.h)
//
// Arrays are parallel: per feature in a record, per table in tr_rows and tr_parts.
#pragma once

#include "tilerec.h"

typedef struct {
  const void* grad;             // grad_count numbers of grad_type
  const void* ids;              // ids_count of index_type
  const int64_t* offsets;       // offsets_count, or null: every id is its own bag
  const float* sample_weights;  // ids_count, or null
  int64_t grad_count, ids_count, offsets_count, features;
  const int64_t *tables, *starts, *bags, *grad_starts, *grad_strides, *means;
  int32_t grad_type, index_type;
} tr_gradient;

typedef struct {
  void* const* weights;  // per table, contiguous [rows, dims]
  void* const* slots;    // slots[t * slots_per_table + k], fp32, contiguous [rows, dims] or [rows]
  const int64_t *rows, *dims;
  const int32_t* types;
  const int64_t *steps, *seeds, *row_offsets, *column_offsets;  // two seeds per table
  const double* hyper;
  const int64_t* const* names;  // per table [rows], or null: names[t][r] is the number of row r (null: r); random words and
                                // reports use this number
  int64_t tables, slots_per_table, hypers;
  int32_t rule;  // its number (tr_rule_number)
} tr_rows;

// Distinct rows of several tables, each of which is a part of full_dims columns, with their summed gradients.
typedef struct {
  const int64_t* const* rows;    // per table, counts
  const float* const* grads;     // per table, contiguous [counts, dims]
  const float* const* scalars;   // reduced row sums of the phases so far: sum p of row u is scalars[t][p * strides[t] + u]
  const int64_t *counts, *strides, *full_dims;
} tr_parts;

// `position` of a record or of tables that are a TR_BAD_ARGUMENT. `feature` is the record's first wrong feature (the table's
// number for TR_UPDATE_BAD_COLUMN), -1 if the error has no feature.
enum {
  TR_UPDATE_BAD_TABLE = 0,    // a table outside [0, tables)
  TR_UPDATE_NEGATIVE = 1,     // a first bag or a number of bags below 0
  TR_UPDATE_SHORT_GRAD = 2,   // bags reach outside the gradient
  TR_UPDATE_FEW_OFFSETS = 3,  // bags reach beyond the last offset
  TR_UPDATE_FEW_IDS = 4,      // without offsets: bags reach beyond the last id
  TR_UPDATE_TOO_MANY = 5,     // 2^32 - 1 or more occurrences of one table
  TR_UPDATE_BAD_COLUMN = 6,   // a column offset that is negative or not below 2^34
  TR_UPDATE_NO_ROWS = 7       // a table whose rows have no memory
};

// The number of a rule by its name, -1 for an unknown one.
TR_API int32_t tr_rule_number(const char* name);

// Updates every row of the record once. skipped[3]: the number of rows whose summed gradient is not finite, then table and
// row of the first, -1 if none. Such rows keep weights and slots (the rule "store" stores them and skips none). A record with
// an error changes nothing.
TR_API void tr_update_rows(const tr_rows* tables, const tr_gradient* record, int32_t threads, int64_t* skipped, tr_report* report);

// The distinct rows of a record that reads `tables` tables of rows[t] rows (0: not known) and dims[t] columns. tr_sum_begin
// writes their number per table (counts[t]). tr_sum_finish writes, table after table, the rows ascending and their summed
// gradients [counts[t], dims[t]]. The handle is null if report->status is not 0; free it once.
TR_API void* tr_sum_begin(const tr_gradient* record, const int64_t* rows, const int64_t* dims, int64_t tables, int32_t threads,
                          int64_t* counts, tr_report* report);
TR_API void tr_sum_finish(void* handle, int64_t* rows_out, float* grads_out);
TR_API void tr_sum_free(void* handle);

// A rule in phases on column parts of tables that share it.
// outs, per table: [counts, K, 1], or [counts, K, blocks] if exact: a value per aligned block of 8 global columns that the
// part overlaps. `finite` adds one more sum: every element is 1 if the row's gradient is finite, else 0.
TR_API void tr_rule_partials(const tr_rows* tables, const tr_parts* parts, int32_t phase, int32_t exact, int32_t finite,
                             int32_t threads, float* const* outs, tr_report* report);
TR_API void tr_rule_apply(const tr_rows* tables, const tr_parts* parts, int32_t threads, tr_report* report);
