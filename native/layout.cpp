// Offsets and sizes of the fields of the interface's structs, as text (tilerec/ops/runtime/cpu/records.py makes the same text).
#include <cstddef>
#include <string>

#include "cross.h"
#include "exchange.h"
#include "hash.h"
#include "lookup.h"
#include "update.h"

namespace {

// "status 0+8 feature 8+8": offset and size in bytes.
class Fields {
 public:
  Fields(std::string& text, const char* name, size_t size) : text_(text) {
    if (!text.empty()) text += '\n';
    text.append(name).append(" ").append(std::to_string(size)).append(":");
  }
  void add(const char* field, size_t place, size_t size) {
    text_.append(" ").append(field).append(" ").append(std::to_string(place)).append("+").append(std::to_string(size));
  }

 private:
  std::string& text_;
};

#define TR_STRUCT(type) Fields type##_fields(text, #type, sizeof(type))
#define TR_FIELD(type, field) type##_fields.add(#field, offsetof(type, field), sizeof(type::field))

std::string describe() {
  std::string text;
  TR_STRUCT(tr_report);
  TR_FIELD(tr_report, status);
  TR_FIELD(tr_report, feature);
  TR_FIELD(tr_report, position);
  TR_FIELD(tr_report, value);

  TR_STRUCT(tr_lookup);
  TR_FIELD(tr_lookup, features);
  TR_FIELD(tr_lookup, tables);
  TR_FIELD(tr_lookup, keys);
  TR_FIELD(tr_lookup, means);
  TR_FIELD(tr_lookup, table_count);
  TR_FIELD(tr_lookup, rows);
  TR_FIELD(tr_lookup, dims);
  TR_FIELD(tr_lookup, types);
  TR_FIELD(tr_lookup, data);
  TR_FIELD(tr_lookup, batch_count);
  TR_FIELD(tr_lookup, batches);
  TR_FIELD(tr_lookup, ids);
  TR_FIELD(tr_lookup, index_type);
  TR_FIELD(tr_lookup, id_count);
  TR_FIELD(tr_lookup, offsets);
  TR_FIELD(tr_lookup, offset_count);
  TR_FIELD(tr_lookup, sample_weights);
  TR_FIELD(tr_lookup, numbers);
  TR_FIELD(tr_lookup, number_type);
  TR_FIELD(tr_lookup, sample_grads);
  TR_FIELD(tr_lookup, threads);
  TR_FIELD(tr_lookup, report);

  TR_STRUCT(tr_gradient);
  TR_FIELD(tr_gradient, grad);
  TR_FIELD(tr_gradient, ids);
  TR_FIELD(tr_gradient, offsets);
  TR_FIELD(tr_gradient, sample_weights);
  TR_FIELD(tr_gradient, grad_count);
  TR_FIELD(tr_gradient, ids_count);
  TR_FIELD(tr_gradient, offsets_count);
  TR_FIELD(tr_gradient, features);
  TR_FIELD(tr_gradient, tables);
  TR_FIELD(tr_gradient, starts);
  TR_FIELD(tr_gradient, bags);
  TR_FIELD(tr_gradient, grad_starts);
  TR_FIELD(tr_gradient, grad_strides);
  TR_FIELD(tr_gradient, means);
  TR_FIELD(tr_gradient, grad_type);
  TR_FIELD(tr_gradient, index_type);

  TR_STRUCT(tr_rows);
  TR_FIELD(tr_rows, weights);
  TR_FIELD(tr_rows, slots);
  TR_FIELD(tr_rows, rows);
  TR_FIELD(tr_rows, dims);
  TR_FIELD(tr_rows, types);
  TR_FIELD(tr_rows, steps);
  TR_FIELD(tr_rows, seeds);
  TR_FIELD(tr_rows, row_offsets);
  TR_FIELD(tr_rows, column_offsets);
  TR_FIELD(tr_rows, hyper);
  TR_FIELD(tr_rows, names);
  TR_FIELD(tr_rows, tables);
  TR_FIELD(tr_rows, slots_per_table);
  TR_FIELD(tr_rows, hypers);
  TR_FIELD(tr_rows, rule);

  TR_STRUCT(tr_parts);
  TR_FIELD(tr_parts, rows);
  TR_FIELD(tr_parts, grads);
  TR_FIELD(tr_parts, scalars);
  TR_FIELD(tr_parts, counts);
  TR_FIELD(tr_parts, strides);
  TR_FIELD(tr_parts, full_dims);

  TR_STRUCT(tr_route);
  TR_FIELD(tr_route, lists);
  TR_FIELD(tr_route, routes);
  TR_FIELD(tr_route, batch_count);
  TR_FIELD(tr_route, cut_count);
  TR_FIELD(tr_route, wire_count);
  TR_FIELD(tr_route, ids);
  TR_FIELD(tr_route, index_type);
  TR_FIELD(tr_route, id_count);
  TR_FIELD(tr_route, offsets);
  TR_FIELD(tr_route, offset_count);
  TR_FIELD(tr_route, each_id);
  TR_FIELD(tr_route, local_type);
  TR_FIELD(tr_route, threads);
  TR_FIELD(tr_route, state);
  TR_FIELD(tr_route, parts);
  TR_FIELD(tr_route, present);
  TR_FIELD(tr_route, moved);
  TR_FIELD(tr_route, counts);
  TR_FIELD(tr_route, lengths);
  TR_FIELD(tr_route, slots);
  TR_FIELD(tr_route, local);
  TR_FIELD(tr_route, positions);
  TR_FIELD(tr_route, report);

  TR_STRUCT(tr_segments);
  TR_FIELD(tr_segments, lists);
  TR_FIELD(tr_segments, segments);
  TR_FIELD(tr_segments, flat);
  TR_FIELD(tr_segments, flat_size);
  TR_FIELD(tr_segments, rows);
  TR_FIELD(tr_segments, rows_size);
  TR_FIELD(tr_segments, slots);
  TR_FIELD(tr_segments, slot_count);
  TR_FIELD(tr_segments, element_bytes);
  TR_FIELD(tr_segments, sum_bytes);
  TR_FIELD(tr_segments, fresh);
  TR_FIELD(tr_segments, threads);
  TR_FIELD(tr_segments, report);

  TR_STRUCT(tr_crossing);
  TR_FIELD(tr_crossing, x);
  TR_FIELD(tr_crossing, x0);
  TR_FIELD(tr_crossing, factor);
  TR_FIELD(tr_crossing, bias);
  TR_FIELD(tr_crossing, out);
  TR_FIELD(tr_crossing, of_x0);
  TR_FIELD(tr_crossing, of_factor);
  TR_FIELD(tr_crossing, of_bias);
  TR_FIELD(tr_crossing, samples);
  TR_FIELD(tr_crossing, features);
  TR_FIELD(tr_crossing, adds);
  TR_FIELD(tr_crossing, first);
  TR_FIELD(tr_crossing, threads);

  TR_STRUCT(tr_zch);
  TR_FIELD(tr_zch, ids);
  TR_FIELD(tr_zch, count);
  TR_FIELD(tr_zch, counts);
  TR_FIELD(tr_zch, may_insert);
  TR_FIELD(tr_zch, ttls);
  TR_FIELD(tr_zch, slot_ids);
  TR_FIELD(tr_zch, used);
  TR_FIELD(tr_zch, since);
  TR_FIELD(tr_zch, last);
  TR_FIELD(tr_zch, hits);
  TR_FIELD(tr_zch, expires);
  TR_FIELD(tr_zch, counters);
  TR_FIELD(tr_zch, counter_count);
  TR_FIELD(tr_zch, first);
  TR_FIELD(tr_zch, held);
  TR_FIELD(tr_zch, buckets);
  TR_FIELD(tr_zch, slots);
  TR_FIELD(tr_zch, max_probe);
  TR_FIELD(tr_zch, step);
  TR_FIELD(tr_zch, now);
  TR_FIELD(tr_zch, ttl);
  TR_FIELD(tr_zch, policy);
  TR_FIELD(tr_zch, evict);
  TR_FIELD(tr_zch, threshold);
  TR_FIELD(tr_zch, exponent);
  TR_FIELD(tr_zch, rows);
  TR_FIELD(tr_zch, outcomes);
  TR_FIELD(tr_zch, probes);
  TR_FIELD(tr_zch, evicted_rows);
  TR_FIELD(tr_zch, evicted_ids);
  TR_FIELD(tr_zch, evicted);
  TR_FIELD(tr_zch, threads);
  TR_FIELD(tr_zch, report);

  TR_STRUCT(tr_zch_resizing);
  TR_FIELD(tr_zch_resizing, slot_ids);
  TR_FIELD(tr_zch_resizing, used);
  TR_FIELD(tr_zch_resizing, since);
  TR_FIELD(tr_zch_resizing, last);
  TR_FIELD(tr_zch_resizing, hits);
  TR_FIELD(tr_zch_resizing, expires);
  TR_FIELD(tr_zch_resizing, new_ids);
  TR_FIELD(tr_zch_resizing, new_used);
  TR_FIELD(tr_zch_resizing, new_since);
  TR_FIELD(tr_zch_resizing, new_last);
  TR_FIELD(tr_zch_resizing, new_hits);
  TR_FIELD(tr_zch_resizing, new_expires);
  TR_FIELD(tr_zch_resizing, moved);
  TR_FIELD(tr_zch_resizing, first);
  TR_FIELD(tr_zch_resizing, held);
  TR_FIELD(tr_zch_resizing, buckets);
  TR_FIELD(tr_zch_resizing, slots);
  TR_FIELD(tr_zch_resizing, new_buckets);
  TR_FIELD(tr_zch_resizing, new_slots);
  TR_FIELD(tr_zch_resizing, max_probe);
  TR_FIELD(tr_zch_resizing, step);
  TR_FIELD(tr_zch_resizing, policy);
  TR_FIELD(tr_zch_resizing, exponent);
  TR_FIELD(tr_zch_resizing, threads);
  TR_FIELD(tr_zch_resizing, report);
  return text;
}

}  // namespace

TR_API const char* tr_layout(void) {
  static const std::string text = describe();
  return text.c_str();
}
