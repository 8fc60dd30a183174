// Read-only ids of managed collision (tilerec/ops/hash/find.py specifies the ops).
#include "../hash.h"

#include "ops.h"

namespace tilerec::ops {

Tensor zch_buckets(Tensor ids, int64_t buckets) {
  ids = int64s("zch_buckets", "ids", ids);
  if (buckets < 1) fail("zch_buckets: got " + text(buckets) + " buckets; expected at least 1.");
  Tensor out = new_tensor({ids.numel()}, ScalarType::Long);
  tr_zch_buckets(static_cast<const int64_t*>(ids.data_ptr()), ids.numel(), buckets, static_cast<int64_t*>(out.data_ptr()),
                 threads());
  return out;
}

Two zch_find(Tensor ids, Tensor slot_ids, Tensor used, int64_t first, int64_t buckets, int64_t slots, int64_t max_probe) {
  const char* op = "zch_find";
  ids = int64s(op, "ids", ids), slot_ids = int64s(op, "the ids of rows", slot_ids), used = dense(op, "used", used, 1);
  const int64_t held = slots > 0 ? slot_ids.numel() / slots : 0;
  if (used.scalar_type() != ScalarType::Bool || used.numel() != slot_ids.numel() || held * slots != slot_ids.numel() ||
      buckets < 1 || first < 0 || first + held > buckets || max_probe < 1)
    fail(std::string(op) + ": got a state of other sizes; expected whole buckets of ids and flags. Export the model again.");
  Tensor rows = new_tensor({ids.numel()}, ScalarType::Long), probes = new_tensor({ids.numel()}, ScalarType::Int);
  tr_zch call{};
  call.ids = static_cast<const int64_t*>(ids.data_ptr()), call.count = ids.numel();
  call.slot_ids = static_cast<int64_t*>(slot_ids.data_ptr()), call.used = static_cast<uint8_t*>(used.data_ptr());
  call.first = first, call.held = held, call.buckets = buckets, call.slots = slots, call.max_probe = max_probe;
  call.rows = static_cast<int64_t*>(rows.data_ptr()), call.probes = static_cast<int32_t*>(probes.data_ptr());
  call.threads = threads();
  const int64_t status = tr_zch_find(&call);
  if (status == TR_NO_MEMORY) fail(std::string(op) + ": out of memory for its workspace.");
  if (status != TR_OK)
    fail(std::string(op) + ": id " + text(call.report.value) + " (position " + text(call.report.position) +
         ") belongs to a bucket that is not held here; expected ids of the buckets [" + text(first) + ", " + text(first + held) + ").");
  return {rows, probes};
}

}  // namespace tilerec::ops
