// The ops that exported models call, for processes without Python: `libtilerec_ops.so` on PyTorch's stable ABI.
//
//   schema     as tilerec/ops defines it in Python: one schema per op, compared by tests/export/test_ops_library.py
//   kernel     a function of `torch::stable::Tensor`s that calls the C function of the family (native/lookup.h, ...)
//
// A process that loads the library can run packages of tilerec.export. If Python has defined the ops, the library leaves them.
//
// To add an op: declare its kernel here, define it, and add a line with its schema to register.cpp. If the schema or the
// meaning of an op changes, raise TR_OPS_ABI here and OPS_ABI of tilerec/export/manifest.py.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../tilerec.h"

#define TR_OPS_ABI 1

TR_API int32_t tilerec_ops_abi(void);
// One schema a line, in the order of registration.
TR_API const char* tilerec_ops_schemas(void);
// Text of the latest error of an op in this thread since the last call, "" if there was none; valid until the next call. torch
// versions differ in what they pass on of it.
TR_API const char* tilerec_ops_last_error(void);

namespace tilerec::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;
using Two = std::tuple<Tensor, Tensor>;

// Raises std::runtime_error with the text, and keeps it for tilerec_ops_last_error.
[[noreturn]] void fail(const std::string& text);
// Keeps the text of another error, unless that of an op explains it.
void keep_error(const std::string& text);

// A new tensor of the CPU, not written yet. Memory of large ones is reused: the C library would request it from the system,
// and give it back, at each call.
Tensor new_tensor(const Sizes& sizes, ScalarType type);

// The tensor, or a contiguous copy; raises for a tensor that is not on the CPU, or has another number of dimensions.
Tensor dense(const char* op, const char* name, const Tensor& tensor, int64_t dims = -1);
// As `dense`, converted to int64.
Tensor int64s(const char* op, const char* name, const Tensor& tensor);
// Codes of native/tilerec.h: TR_F32, ... and TR_I32, TR_I64. -1: another type.
int64_t number_code(ScalarType type);
int64_t index_code(ScalarType type);

inline int64_t threads() { return torch::stable::get_num_threads(); }
inline std::string text(int64_t number) { return std::to_string(number); }

// lookup_ops.cpp
Two pooled_lookup(std::vector<Tensor> weights, Tensor sinks, Tensor ids, Tensor offsets, std::optional<Tensor> sample_weights,
                  Sizes tables, Sizes keys, Sizes means, Sizes batches, ScalarType type, std::string names);
Two sequence_lookup(std::vector<Tensor> weights, Tensor sinks, Tensor ids, Tensor starts, Sizes tables, ScalarType type,
                    std::string names);
Tensor quantized_pooled_lookup(std::vector<Tensor> weights, Sizes dims, Sizes bits, Tensor ids, Tensor offsets,
                               std::optional<Tensor> sample_weights, Sizes tables, Sizes keys, Sizes means, Sizes batches,
                               ScalarType type, std::string names);
Tensor quantized_sequence_lookup(std::vector<Tensor> weights, Sizes dims, Sizes bits, Tensor ids, Tensor starts, Sizes tables,
                                 ScalarType type, std::string names);
// jagged_ops.cpp
Tensor offsets_from_lengths(Tensor lengths);
Tensor segment_ids(Tensor offsets, int64_t total);
Tensor unbacked_rows(Tensor items, int64_t parts);
Tensor select_segments(Tensor values, Tensor offsets, Tensor order, Tensor out_offsets, int64_t total);
Tensor jagged_to_padded(Tensor values, Tensor offsets, int64_t length, double padding);
Tensor padded_to_jagged(Tensor padded, Tensor offsets, int64_t total);
Tensor segment_sum(Tensor values, Tensor offsets);
Tensor repeat_segments(Tensor rows, Tensor offsets, int64_t total);
// hash_ops.cpp
Tensor zch_buckets(Tensor ids, int64_t buckets);
Two zch_find(Tensor ids, Tensor slot_ids, Tensor used, int64_t first, int64_t buckets, int64_t slots, int64_t max_probe);
// search_ops.cpp
Two best_rows(Tensor query, Tensor rows, Tensor scale, Tensor words, Tensor first, Tensor last, Tensor required, Tensor forbidden,
              int64_t k);

}  // namespace tilerec::ops
