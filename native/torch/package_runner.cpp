// Runs packages for processes that do not import torch's Python modules: torch's loader of packages behind C functions.
//
//   load      extracts the compiled part, loads it, and keeps torch's loader
//   bind      gives it the weights: memory of the caller, which stays with the caller
//   run       one batch; the outputs stay with the package until the next run
//
// Tensors travel as words: address, dtype (torch's number), dims, sizes; contiguous, on the CPU.
//
// torch's loader is a C++ class without a stable interface. Its functions are looked up by their mangled names when a package is
// loaded, so this library needs none of its headers and runs with every torch that has these names (2.11 to 2.13). What is relied
// on beside the names: an `at::Tensor` is one pointer, and an `AtenTensorHandle` points to one.
#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <unordered_map>

#include "ops.h"

#define TR_STRING "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"

namespace {

using tilerec::ops::fail;
using tilerec::ops::Sizes;
using tilerec::ops::Tensor;
using Texts = std::unordered_map<std::string, std::string>;

struct BareTensor {
  void* implementation;  // borrowed: the handle owns it
};
using Tensors = std::vector<BareTensor>;
using TensorsByName = std::unordered_map<std::string, BareTensor>;

template <class Function>
Function symbol(std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (void* found = dlsym(RTLD_DEFAULT, name)) return reinterpret_cast<Function>(found);
  fail(std::string("libtilerec_ops.so: got a torch without ") + *names.begin() + "; expected torch 2.11 to 2.13. Install one of these.");
}

// The functions of torch::inductor::AOTIModelPackageLoader. A function of a class is called as a plain one that has the object as
// its first argument.
struct Loader {
#define TR_LOADER "_ZN5torch8inductor22AOTIModelPackageLoader"
  void (*make)(void*, const std::string&, const std::string&, bool, size_t, int8_t) =
      symbol<decltype(make)>({TR_LOADER "C1ERK" TR_STRING "S9_bma"});
  void (*end)(void*) = symbol<decltype(end)>({TR_LOADER "D1Ev"});
  Texts (*metadata)(void*) = symbol<decltype(metadata)>({TR_LOADER "12get_metadataB5cxx11Ev"});
  std::vector<std::string> (*constants)(void*) = symbol<decltype(constants)>({TR_LOADER "17get_constant_fqnsB5cxx11Ev"});
#define TR_LOAD TR_LOADER "14load_constantsERSt13unordered_mapI" TR_STRING "N2at6TensorESt4hashIS8_ESt8equal_toIS8_ESaISt4pairIKS8_SA_EEE"
  // torch 2.12 added an argument, which older ones do not read.
  void (*load)(void*, TensorsByName&, bool, bool, bool, bool) = symbol<decltype(load)>({TR_LOAD "bbbb", TR_LOAD "bbb"});
  Tensors (*run)(void*, const Tensors&, void*) = symbol<decltype(run)>({TR_LOADER "3runERKSt6vectorIN2at6TensorESaIS4_EEPv"});
};

const Loader& loader() {
  static const Loader found;
  return found;
}

constexpr size_t kLoaderBytes = 4096;  // the class has about 100

struct Package {
  explicit Package(const char* path) {
    loader().make(object, path, "model", false, 1, -1);
    made = true;
    metadata = loader().metadata(object);
    constants = loader().constants(object);
  }
  ~Package() {
    outputs.clear();
    if (made) loader().end(object);
  }
  Package(const Package&) = delete;

  alignas(64) char object[kLoaderBytes];
  bool made = false;
  Texts metadata;
  std::vector<std::string> constants;
  std::vector<Tensor> weights;  // the loader never frees those of the caller
  std::vector<Tensor> outputs;
  std::vector<int64_t> words;
};

Tensor tensor_of(const int64_t*& words) {
  const auto data = reinterpret_cast<void*>(words[0]);
  const auto type = static_cast<int32_t>(words[1]);
  const int64_t dims = words[2];
  const int64_t* sizes = words + 3;
  Sizes strides(static_cast<size_t>(dims), 1);
  for (int64_t at = dims - 1; at > 0; --at) strides[at - 1] = strides[at] * (sizes[at] > 0 ? sizes[at] : 1);
  words = sizes + dims;
  AtenTensorHandle out;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob_v2(
      data, dims, sizes, strides.data(), 0, type, aoti_torch_device_type_cpu(), 0, &out, aoti_torch_layout_strided(), nullptr, 0));
  return Tensor(out);
}

BareTensor bare(const Tensor& tensor) { return *reinterpret_cast<const BareTensor*>(tensor.get()); }

// Runs a block; false, with the text of the error for tilerec_ops_last_error, if it raises one.
template <class Block>
bool tried(const Block& block) {
  tilerec_ops_last_error();  // of an earlier call
  try {
    block();
    return true;
  } catch (const std::exception& error) {
    tilerec::ops::keep_error(error.what());
    return false;
  }
}

}  // namespace

TR_API void* tilerec_ops_load(const char* path) {
  std::unique_ptr<Package> made;
  tried([&] { made = std::make_unique<Package>(path); });
  return made.release();
}

TR_API void tilerec_ops_free(void* package) { delete static_cast<Package*>(package); }

TR_API const char* tilerec_ops_metadata(void* package, const char* key) {
  const Texts& all = static_cast<Package*>(package)->metadata;
  const auto found = all.find(key);
  return found == all.end() ? nullptr : found->second.c_str();
}

TR_API const char* tilerec_ops_weight(void* package, int64_t number) {
  const auto& names = static_cast<Package*>(package)->constants;
  return static_cast<size_t>(number) < names.size() ? names[static_cast<size_t>(number)].c_str() : nullptr;
}

TR_API bool tilerec_ops_bind(void* package, const char* const* names, const int64_t* words, int64_t count) {
  auto& own = *static_cast<Package*>(package);
  return tried([&] {
    TensorsByName weights;
    for (int64_t at = 0; at < count; ++at) {
      own.weights.push_back(tensor_of(words));
      weights[names[at]] = bare(own.weights.back());
    }
    loader().load(own.object, weights, false, true, true, false);
  });
}

TR_API const int64_t* tilerec_ops_run(void* package, const int64_t* words, int64_t count) {
  auto& own = *static_cast<Package*>(package);
  const bool ran = tried([&] {
    std::vector<Tensor> inputs;
    Tensors borrowed;
    for (int64_t at = 0; at < count; ++at) {
      inputs.push_back(tensor_of(words));
      borrowed.push_back(bare(inputs.back()));
    }
    own.outputs.clear();
    const Tensors found = loader().run(own.object, borrowed, nullptr);
    for (const BareTensor& tensor : found)  // from here on the handle owns the reference
      own.outputs.emplace_back(reinterpret_cast<AtenTensorHandle>(new BareTensor(tensor)));
    own.words.assign(1, static_cast<int64_t>(own.outputs.size()));
    for (Tensor& tensor : own.outputs) {
      tensor = tilerec::ops::dense("Package", "an output", tensor);
      own.words.push_back(reinterpret_cast<int64_t>(tensor.data_ptr()));
      int32_t type;
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &type));
      own.words.push_back(type);
      own.words.push_back(tensor.dim());
      for (int64_t dim = 0; dim < tensor.dim(); ++dim) own.words.push_back(tensor.size(dim));
    }
  });
  return ran ? own.words.data() : nullptr;
}

TR_API bool tilerec_ops_set_threads(int64_t count) {
  return tried([&] { symbol<void (*)(int)>({"_ZN2at15set_num_threadsEi"})(static_cast<int>(count)); });
}

TR_API const char* tilerec_ops_cpu(void) {
  static std::string level;
  const bool found = tried([&] { level = symbol<std::string (*)()>({"_ZN2at18get_cpu_capabilityB5cxx11Ev"})(); });
  return found ? level.c_str() : nullptr;
}
