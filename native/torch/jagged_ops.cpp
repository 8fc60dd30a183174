// Jagged algebra (tilerec/ops/jagged/definition.py specifies the ops).
#include "../jagged.h"

#include "ops.h"

namespace tilerec::ops {
namespace {

const int64_t* numbers(const Tensor& tensor) { return static_cast<const int64_t*>(tensor.data_ptr()); }

// Bytes of one item: of all dimensions behind the first `leading`.
int64_t item_bytes(const Tensor& tensor, int64_t leading) {
  int64_t bytes = static_cast<int64_t>(tensor.element_size());
  for (int64_t at = leading; at < tensor.dim(); ++at) bytes *= tensor.size(at);
  return bytes;
}

// The shape of items with other leading dimensions.
Sizes shaped(Sizes leading, const Tensor& items, int64_t from) {
  for (int64_t at = from; at < items.dim(); ++at) leading.push_back(items.size(at));
  return leading;
}

Tensor items_of(const char* op, const Tensor& values, int64_t least = 1) {
  Tensor items = dense(op, "values", values);
  if (items.dim() < least) fail(std::string(op) + ": got values with " + text(items.dim()) + " dimensions; expected at least " + text(least) + ".");
  return items;
}

Tensor offsets_of(const char* op, const char* name, const Tensor& offsets, int64_t segments = -1) {
  Tensor found = int64s(op, name, offsets);
  if (found.numel() < 1 || (segments >= 0 && found.numel() != segments + 1))
    fail(std::string(op) + ": got " + text(found.numel()) + " " + name + "; expected one more than segments. Make them with "
         "offsets_from_lengths().");
  return found;
}

void check(const char* op, const tr_report& report) {
  if (report.status == TR_OK) return;
  if (report.status == TR_NO_MEMORY) fail(std::string(op) + ": out of memory for its workspace.");
  if (report.status == TR_BAD_ID)
    fail(std::string(op) + ": order[" + text(report.position) + "] is segment " + text(report.value) +
         ", which does not exist or has fewer items than the output's offsets require.");
  fail(std::string(op) + ": offset " + text(report.value) + " after segment " + text(report.position) +
       " descends or does not fit the number of items; expected non-negative lengths that sum to it. Check the lengths.");
}

}  // namespace

Tensor offsets_from_lengths(Tensor lengths) {
  const char* op = "offsets_from_lengths";
  lengths = index_code(lengths.scalar_type()) < 0 ? int64s(op, "lengths", lengths) : dense(op, "lengths", lengths, 1);
  Tensor out = new_tensor({lengths.numel() + 1}, ScalarType::Long);
  tr_report report{};
  tr_offsets_from_lengths(lengths.data_ptr(), static_cast<int32_t>(index_code(lengths.scalar_type())), lengths.numel(),
                          static_cast<int64_t*>(out.data_ptr()), static_cast<int32_t>(threads()), &report);
  check(op, report);
  return out;
}

Tensor segment_ids(Tensor offsets, int64_t total) {
  offsets = offsets_of("segment_ids", "offsets", offsets);
  Tensor out = new_tensor({total}, ScalarType::Long);
  tr_report report{};
  tr_segment_ids(numbers(offsets), offsets.numel() - 1, total, static_cast<int64_t*>(out.data_ptr()),
                 static_cast<int32_t>(threads()), &report);
  check("segment_ids", report);
  return out;
}

Tensor unbacked_rows(Tensor items, int64_t) {
  const Tensor own = items_of("unbacked_rows", items);
  return new_tensor({own.size(0), 0}, own.scalar_type());
}

Tensor select_segments(Tensor values, Tensor offsets, Tensor order, Tensor out_offsets, int64_t total) {
  const char* op = "select_segments";
  values = items_of(op, values), offsets = offsets_of(op, "offsets", offsets);
  order = int64s(op, "order", order), out_offsets = offsets_of(op, "out offsets", out_offsets, order.numel());
  Tensor out = new_tensor(shaped({total}, values, 1), values.scalar_type());
  tr_report report{};
  tr_select_segments(values.data_ptr(), item_bytes(values, 1), values.size(0), numbers(offsets), offsets.numel() - 1,
                     numbers(order), numbers(out_offsets), order.numel(), total, out.data_ptr(),
                     static_cast<int32_t>(threads()), &report);
  check(op, report);
  return out;
}

Tensor jagged_to_padded(Tensor values, Tensor offsets, int64_t length, double padding) {
  const char* op = "jagged_to_padded";
  values = items_of(op, values), offsets = offsets_of(op, "offsets", offsets);
  if (values.element_size() > 8) fail(std::string(op) + ": got elements wider than 8 bytes; expected real numbers. Convert them.");
  const int64_t bags = offsets.numel() - 1;
  const Tensor element = torch::stable::full(Sizes{1}, padding, values.scalar_type());
  Tensor out = new_tensor(shaped({bags, length}, values, 1), values.scalar_type());
  tr_report report{};
  tr_jagged_to_padded(values.data_ptr(), item_bytes(values, 1), values.size(0), numbers(offsets), bags, length,
                      element.data_ptr(), static_cast<int64_t>(values.element_size()), out.data_ptr(),
                      static_cast<int32_t>(threads()), &report);
  check(op, report);
  return out;
}

Tensor padded_to_jagged(Tensor padded, Tensor offsets, int64_t total) {
  const char* op = "padded_to_jagged";
  padded = items_of(op, padded, 2), offsets = offsets_of(op, "offsets", offsets, padded.size(0));
  Tensor out = new_tensor(shaped({total}, padded, 2), padded.scalar_type());
  tr_report report{};
  tr_padded_to_jagged(padded.data_ptr(), item_bytes(padded, 2), padded.size(0), padded.size(1), numbers(offsets), total,
                      out.data_ptr(), static_cast<int32_t>(threads()), &report);
  check(op, report);
  return out;
}

Tensor segment_sum(Tensor values, Tensor offsets) {
  const char* op = "segment_sum";
  const ScalarType type = values.scalar_type();
  const bool half = type == ScalarType::Half || type == ScalarType::BFloat16;
  values = items_of(op, half ? torch::stable::to(values, ScalarType::Float) : values);
  offsets = offsets_of(op, "offsets", offsets);
  const ScalarType own = values.scalar_type();
  const int32_t code = own == ScalarType::Float ? 0 : own == ScalarType::Double ? 1 : own == ScalarType::Int ? 2 : own == ScalarType::Long ? 3 : -1;
  if (code < 0) fail(std::string(op) + ": got values of another type; expected floating-point numbers, int32 or int64. Convert them.");
  Tensor out = new_tensor(shaped({offsets.numel() - 1}, values, 1), own);
  tr_report report{};
  tr_segment_sum(values.data_ptr(), code, values.size(0), item_bytes(values, 1) / static_cast<int64_t>(values.element_size()),
                 numbers(offsets), offsets.numel() - 1, out.data_ptr(), static_cast<int32_t>(threads()), &report);
  check(op, report);
  return half ? torch::stable::to(out, type) : out;
}

Tensor repeat_segments(Tensor rows, Tensor offsets, int64_t total) {
  const char* op = "repeat_segments";
  rows = items_of(op, rows), offsets = offsets_of(op, "offsets", offsets, rows.size(0));
  Tensor out = new_tensor(shaped({total}, rows, 1), rows.scalar_type());
  tr_report report{};
  tr_repeat_segments(rows.data_ptr(), item_bytes(rows, 1), numbers(offsets), offsets.numel() - 1, total, out.data_ptr(),
                     static_cast<int32_t>(threads()), &report);
  check(op, report);
  return out;
}

}  // namespace tilerec::ops
