// Pooled and sequence lookups, also in quantized rows (tilerec/ops/lookup/definition.py and ops/quantized/definition.py
// specify them).
#include "../lookup.h"

#include "ops.h"

namespace tilerec::ops {
namespace {

// A call's tables as the C functions take them.
struct Tables {
  Sizes rows, dims, types;
  std::vector<const void*> data;

  Tables(const char* op, const std::vector<Tensor>& weights) {
    for (const Tensor& weight : weights) add(op, weight, weight.dim() == 2 ? weight.size(1) : 0, 0);
  }
  // Quantized rows of `bits` bits, or floats where it is 0.
  Tables(const char* op, const std::vector<Tensor>& weights, const Sizes& dims, const Sizes& bits) {
    if (dims.size() != weights.size() || bits.size() != weights.size())
      fail(std::string(op) + ": got lists of other sizes than that of the tables; expected one dim and one number of bits per table.");
    for (size_t t = 0; t < weights.size(); ++t) add(op, weights[t], dims[t], bits[t]);
  }

 private:
  void add(const char* op, const Tensor& weight, int64_t dim, int64_t bits) {
    int64_t type = number_code(weight.scalar_type()), width = dim;
    if (bits) {
      type = weight.scalar_type() != ScalarType::Byte ? -1 : bits == 8 ? TR_CODES8 : bits == 4 ? TR_CODES4 : bits == 2 ? TR_CODES2 : -1;
      width = 4 + ((dim * bits + 7) / 8 + 3) / 4 * 4;
    }
    if (weight.dim() != 2 || !weight.is_contiguous() || !weight.is_cpu() || type < 0 || dim < 0 || weight.size(1) != width)
      fail(std::string(op) + ": got table " + text(static_cast<int64_t>(data.size())) +
           " of another form; expected contiguous rows of float32, float16 or bfloat16, or of codes, on the CPU. Convert it before "
           "the export.");
    rows.push_back(weight.size(0)), dims.push_back(dim), types.push_back(type);
    data.push_back(weight.data_ptr());
  }
};

// The `feature`-th of "feature@table,feature@table": its part before or behind the "@".
std::string label(const std::string& names, int64_t feature, bool table) {
  size_t begin = 0;
  for (; feature > 0 && begin != std::string::npos; --feature) begin = names.find(',', begin) + 1;
  const std::string own = names.substr(begin, names.find(',', begin) - begin);
  const size_t at = own.rfind('@');
  return table ? own.substr(at + 1) : own.substr(0, at);
}

[[noreturn]] void raise(const tr_lookup& call, const std::string& names) {
  const tr_report& report = call.report;
  const std::string feature = report.feature < 0 ? "" : label(names, report.feature, false);
  const std::string table = report.feature < 0 ? "" : label(names, report.feature, true);
  if (report.status == TR_BAD_ID)
    fail("Table '" + table + "': got id " + text(report.value) + " of feature '" + feature + "' (position " + text(report.position) +
         " of the batch's values); expected ids in [0, " + text(call.rows[call.tables[report.feature]]) +
         "). Remap the ids, enlarge num_embeddings, or build the collection with on_bad_id='clamp'.");
  if (report.status == TR_BAD_OFFSETS && report.feature < 0)
    fail("KeyedJaggedTensor: the lengths sum to " + text(report.value) + ", but there are " + text(call.id_count) +
         " values; expected as many. Check how lengths and values were put together.");
  if (report.status == TR_BAD_OFFSETS)
    fail("Feature '" + feature + "': offsets[" + text(report.position) + "] is " + text(report.value) +
         "; offsets must not fall and must lie in [0, " + text(call.id_count) +
         "] (the number of values). Check how lengths and values were put together.");
  if (report.status == TR_NO_MEMORY) fail("A lookup: out of memory for its workspace.");
  if (report.value == TR_LOOKUP_FEW_OFFSETS)
    fail("Feature '" + feature + "': the offsets hold fewer bags than the batch sizes require. Check the batch sizes per key.");
  fail("A lookup has inconsistent arguments (feature " + text(report.feature) + ", check " + text(report.value) + ").");
}

int64_t output_type(const char* op, ScalarType type) {
  const int64_t code = number_code(type);
  if (code < 0) fail(std::string(op) + ": got another output type; expected float32, float16 or bfloat16. Set output_dtype.");
  return code;
}

Tensor checked_ids(const char* op, const Tensor& ids) {
  return index_code(ids.scalar_type()) < 0 ? int64s(op, "ids", ids) : dense(op, "ids", ids, 1);
}

Tensor new_ticket() {  // of a lookup whose backward never runs
  Tensor ticket = new_tensor({2}, ScalarType::Long);
  auto* numbers = static_cast<int64_t*>(ticket.data_ptr());
  numbers[0] = numbers[1] = 0;
  return ticket;
}

Tensor pooled(const char* op, const Tables& all, Tensor ids, Tensor offsets, std::optional<Tensor> sample_weights,
              const Sizes& tables, const Sizes& keys, const Sizes& means, const Sizes& batches, ScalarType type,
              const std::string& names) {
  const int64_t count = static_cast<int64_t>(all.data.size());
  ids = checked_ids(op, ids), offsets = int64s(op, "offsets", offsets);
  const size_t features = tables.size();
  if (keys.size() != features || means.size() != features || batches.empty())
    fail("A lookup of " + text(static_cast<int64_t>(features)) + " features: got lists of other sizes; expected one entry per feature.");
  Sizes shape{batches[0], 0};
  if (batches.size() > 1) shape = {0};
  for (size_t f = 0; f < features; ++f) {
    if (tables[f] < 0 || tables[f] >= count || keys[f] < 0 ||
        (batches.size() > 1 && keys[f] >= static_cast<int64_t>(batches.size())))
      fail("Feature " + text(static_cast<int64_t>(f)) + " of a lookup: got a table or key that does not exist.");
    shape.back() += all.dims[tables[f]] * (batches.size() > 1 ? batches[keys[f]] : 1);
  }
  if (sample_weights) {
    *sample_weights = dense(op, "sample_weights", *sample_weights, 1);
    if (sample_weights->scalar_type() != ScalarType::Float || sample_weights->numel() != ids.numel())
      fail("A lookup's sample_weights: got another size or type; expected one float32 weight per id.");
  }
  Tensor out = new_tensor(shape, type);
  tr_lookup call{static_cast<int64_t>(features), tables.data(), keys.data(), means.data(), count,
                 all.rows.data(), all.dims.data(), all.types.data(), all.data.data(), static_cast<int64_t>(batches.size()),
                 batches.data(), ids.data_ptr(), index_code(ids.scalar_type()), ids.numel(),
                 static_cast<const int64_t*>(offsets.data_ptr()), offsets.numel(),
                 sample_weights ? static_cast<const float*>(sample_weights->data_ptr()) : nullptr, out.data_ptr(),
                 output_type(op, type), nullptr, threads(), {}};
  if (tr_pooled_lookup(&call)) raise(call, names);
  return out;
}

Tensor sequence(const char* op, const Tables& all, Tensor ids, Tensor starts, const Sizes& tables, ScalarType type,
                const std::string& names) {
  const int64_t count = static_cast<int64_t>(all.data.size());
  ids = checked_ids(op, ids), starts = int64s(op, "starts", starts);
  if (tables.empty() || tables[0] < 0 || tables[0] >= count)
    fail("An unpooled lookup: got no feature of a table; expected at least one.");
  Tensor out = new_tensor({ids.numel(), all.dims[tables[0]]}, type);
  tr_lookup call{static_cast<int64_t>(tables.size()), tables.data(), nullptr, nullptr, count,
                 all.rows.data(), all.dims.data(), all.types.data(), all.data.data(), 0, nullptr, ids.data_ptr(),
                 index_code(ids.scalar_type()), ids.numel(), static_cast<const int64_t*>(starts.data_ptr()), starts.numel(),
                 nullptr, out.data_ptr(), output_type(op, type), nullptr, threads(), {}};
  if (tr_sequence_lookup(&call)) raise(call, names);
  return out;
}

}  // namespace

Two pooled_lookup(std::vector<Tensor> weights, Tensor, Tensor ids, Tensor offsets, std::optional<Tensor> sample_weights,
                  Sizes tables, Sizes keys, Sizes means, Sizes batches, ScalarType type, std::string names) {
  const char* op = "pooled_lookup";
  return {pooled(op, Tables(op, weights), ids, offsets, sample_weights, tables, keys, means, batches, type, names), new_ticket()};
}

Two sequence_lookup(std::vector<Tensor> weights, Tensor, Tensor ids, Tensor starts, Sizes tables, ScalarType type,
                    std::string names) {
  const char* op = "sequence_lookup";
  return {sequence(op, Tables(op, weights), ids, starts, tables, type, names), new_ticket()};
}

Tensor quantized_pooled_lookup(std::vector<Tensor> weights, Sizes dims, Sizes bits, Tensor ids, Tensor offsets,
                               std::optional<Tensor> sample_weights, Sizes tables, Sizes keys, Sizes means, Sizes batches,
                               ScalarType type, std::string names) {
  const char* op = "quantized_pooled_lookup";
  return pooled(op, Tables(op, weights, dims, bits), ids, offsets, sample_weights, tables, keys, means, batches, type, names);
}

Tensor quantized_sequence_lookup(std::vector<Tensor> weights, Sizes dims, Sizes bits, Tensor ids, Tensor starts, Sizes tables,
                                 ScalarType type, std::string names) {
  const char* op = "quantized_sequence_lookup";
  return sequence(op, Tables(op, weights, dims, bits), ids, starts, tables, type, names);
}

}  // namespace tilerec::ops
