// The ops with their schemas, and their registration when the library is loaded.
#include <dlfcn.h>

#include "ops.h"

namespace {

using namespace tilerec::ops;

struct Op {
  const char* schema;
  void (*kernel)(StableIValue*, uint64_t, uint64_t);
};

const Op kOps[] = {
    {"pooled_lookup(Tensor[] weights, Tensor sinks, Tensor ids, Tensor offsets, Tensor? sample_weights, int[] tables, int[] keys, "
     "int[] means, SymInt[] batches, ScalarType dtype, str names) -> (Tensor, Tensor)",
     TORCH_BOX(&pooled_lookup)},
    {"sequence_lookup(Tensor[] weights, Tensor sinks, Tensor ids, Tensor starts, int[] tables, ScalarType dtype, str names) -> "
     "(Tensor, Tensor)",
     TORCH_BOX(&sequence_lookup)},
    {"quantized_pooled_lookup(Tensor[] weights, int[] dims, int[] bits, Tensor ids, Tensor offsets, Tensor? sample_weights, "
     "int[] tables, int[] keys, int[] means, SymInt[] batches, ScalarType dtype, str names) -> Tensor",
     TORCH_BOX(&quantized_pooled_lookup)},
    {"quantized_sequence_lookup(Tensor[] weights, int[] dims, int[] bits, Tensor ids, Tensor starts, int[] tables, ScalarType "
     "dtype, str names) -> Tensor",
     TORCH_BOX(&quantized_sequence_lookup)},
    {"offsets_from_lengths(Tensor lengths_S) -> Tensor", TORCH_BOX(&offsets_from_lengths)},
    {"segment_ids(Tensor offsets_S1, SymInt total) -> Tensor", TORCH_BOX(&segment_ids)},
    {"unbacked_rows(Tensor items_N, int parts) -> Tensor", TORCH_BOX(&unbacked_rows)},
    {"select_segments(Tensor values_N, Tensor offsets_S1, Tensor order_P, Tensor out_offsets_P1, SymInt total) -> Tensor",
     TORCH_BOX(&select_segments)},
    {"jagged_to_padded(Tensor values_N, Tensor offsets_B1, SymInt length, float padding) -> Tensor",
     TORCH_BOX(&jagged_to_padded)},
    {"padded_to_jagged(Tensor padded_BL, Tensor offsets_B1, SymInt total) -> Tensor", TORCH_BOX(&padded_to_jagged)},
    {"segment_sum(Tensor values_N, Tensor offsets_S1) -> Tensor", TORCH_BOX(&segment_sum)},
    {"repeat_segments(Tensor rows_S, Tensor offsets_S1, SymInt total) -> Tensor", TORCH_BOX(&repeat_segments)},
    {"zch_buckets(Tensor ids_N, int buckets) -> Tensor", TORCH_BOX(&zch_buckets)},
    {"zch_find(Tensor ids_N, Tensor ids_E, Tensor used_E, int first, int buckets, int slots, int max_probe) -> (Tensor, Tensor)",
     TORCH_BOX(&zch_find)},
    {"best_rows(Tensor query, Tensor rows, Tensor scale, Tensor words, Tensor first, Tensor last, Tensor required, Tensor "
     "forbidden, SymInt k) -> (Tensor, Tensor)",
     TORCH_BOX(&best_rows)},
};

// Whether this process has imported the Python package, which defines the ops itself. Python is found, if it is there,
// through its stable C interface.
bool python_defines_ops() {
  const auto initialized = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  if (!initialized || !initialized()) return false;
  const auto ensure = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
  const auto release = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "PyGILState_Release"));
  const auto modules = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyImport_GetModuleDict"));
  const auto item = reinterpret_cast<void* (*)(void*, const char*)>(dlsym(RTLD_DEFAULT, "PyDict_GetItemString"));
  if (!ensure || !release || !modules || !item) return false;
  const int state = ensure();
  const bool found = item(modules(), "tilerec.ops.runtime.library") != nullptr;
  release(state);
  return found;
}

struct Registration {
  torch::stable::detail::StableLibrary* definitions = nullptr;
  torch::stable::detail::StableLibrary* kernels = nullptr;

  Registration() {
    using Library = torch::stable::detail::StableLibrary;
    if (python_defines_ops()) return;
    try {
      definitions = new Library(Library::Kind::FRAGMENT, "tilerec", nullptr, __FILE__, __LINE__);
      for (const Op& op : kOps) definitions->def(op.schema);
      kernels = new Library(Library::Kind::IMPL, "tilerec", "CPU", __FILE__, __LINE__);
      for (const Op& op : kOps) kernels->impl(std::string(op.schema, std::string(op.schema).find('(')).c_str(), op.kernel);
    } catch (const std::exception&) {
      // Another copy of this library has defined the ops.
    }
  }
  // Never undone: packages may run until the process ends.
};

const Registration registration;

}  // namespace

TR_API int32_t tilerec_ops_abi(void) { return TR_OPS_ABI; }

TR_API const char* tilerec_ops_schemas(void) {
  static const std::string* all = [] {
    auto* text = new std::string;
    for (const Op& op : kOps) *text += std::string(op.schema) + "\n";
    return text;
  }();
  return all->c_str();
}
