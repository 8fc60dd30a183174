// A package of `tilerec.export.export`, in a C++ program without Python: load, run, free.
//
//   tilerec::Model model("model.pt2");                                        // load: maps the weights, loads the code
//   std::vector<at::Tensor> outputs = model.run({dense, ids, lengths});       // tensors in the order of model.inputs
//   // the destructor frees all of it; tensors that `run` returned stay valid
//
// Compile with the headers of the torch that made the package, and link torch, c10 and libtilerec_ops.so (docs/export.md).
// `run` may be called from several threads; with `runners` > 1 that many calls work at the same time. Errors are
// std::runtime_error: their text says what was got and what was expected.
#pragma once

#include <ATen/Version.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>
#include <unistd.h>

#include <cctype>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" int32_t tilerec_ops_abi(void);
extern "C" const char* tilerec_ops_last_error(void);

namespace tilerec {

// Name, dtype and sizes of a tensor. A size is a number or a name; equal names are equal sizes.
struct TensorSpec {
  std::string name, dtype;
  std::vector<std::string> shape;
};

inline c10::ScalarType scalar_type(const std::string& dtype) {
  static const std::map<std::string, c10::ScalarType> all{
      {"float32", c10::kFloat}, {"float64", c10::kDouble}, {"float16", c10::kHalf}, {"bfloat16", c10::kBFloat16},
      {"int64", c10::kLong},    {"int32", c10::kInt},      {"int16", c10::kShort},  {"int8", c10::kChar},
      {"uint8", c10::kByte},    {"bool", c10::kBool},      {"float8_e4m3fn", c10::kFloat8_e4m3fn}};
  const auto found = all.find(dtype);
  if (found == all.end()) throw std::runtime_error("Package: got a tensor of " + dtype + ", which this header does not know.");
  return found->second;
}

class Model {
 public:
  explicit Model(const std::string& path, size_t runners = 1)
      : path_(path), file_(path), loader_(load(path, runners)), metadata_(loader_->get_metadata()) {
    check("tilerec.abi", "version of tilerec's ops", std::to_string(tilerec_ops_abi()));
    check("tilerec.torch", "torch", std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR));
    const int made = level(text("tilerec.cpu")), here = level(at::get_cpu_capability());
    if (made > here || made == kOtherLevel) check("tilerec.cpu", "vector level", at::get_cpu_capability());
    inputs = specs("tilerec.inputs"), outputs = specs("tilerec.outputs");
    map_weights();
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& tensors) {
    check_inputs(tensors);
    c10::InferenceMode no_gradients;
    try {
      return loader_->run(tensors);
    } catch (const std::exception& error) {
      const std::string own = tilerec_ops_last_error();  // of an op; torch passes on less of it
      throw std::runtime_error(own.empty() ? error.what() : own);
    }
  }

  std::vector<TensorSpec> inputs, outputs;
  // The tensors that calls read, by name, mapped from the file: a row written here is read by the next call of this process.
  std::unordered_map<std::string, at::Tensor> weights;

 private:
  struct MappedFile {
    explicit MappedFile(const std::string& path) {
      const int descriptor = open(path.c_str(), O_RDONLY | O_NONBLOCK);  // a pipe is no file
      struct stat facts {};
      if (descriptor >= 0 && fstat(descriptor, &facts) == 0 && (size = static_cast<size_t>(facts.st_size)) > 0)
        data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, descriptor, 0);
      if (descriptor >= 0) close(descriptor);
      if (data == MAP_FAILED) throw std::runtime_error("Package " + path + ": cannot be read. Check the path.");
    }
    ~MappedFile() { munmap(data, size); }
    MappedFile(const MappedFile&) = delete;
    void* data = MAP_FAILED;
    size_t size = 0;
  };

  // The order of vector levels of x86; others must be equal.
  static constexpr int kOtherLevel = 3;
  static int level(const std::string& name) { return name == "DEFAULT" ? 0 : name == "AVX2" ? 1 : name == "AVX512" ? 2 : kOtherLevel; }

  using Loader = torch::inductor::AOTIModelPackageLoader;

  static std::unique_ptr<Loader> load(const std::string& path, size_t runners) {
    try {
      return std::make_unique<Loader>(path, "model", false, runners, -1);
    } catch (const std::exception& error) {
      throw std::runtime_error("Package " + path + ": got '" + error.what() +
                               "'; expected the whole file of tilerec.export.export(). Export the model again, or copy the file again.");
    }
  }

  const std::string& text(const std::string& key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end())
      throw std::runtime_error("Package " + path_ + ": got a package without " + key + "; expected a file of tilerec.export.export().");
    return found->second;
  }

  void check(const std::string& key, const std::string& what, const std::string& here) const {
    if (text(key) != here)
      throw std::runtime_error("Package " + path_ + ": made for " + what + " " + text(key) + "; expected " + here +
                               ", which runs here. Export the model again on such a machine.");
  }

  std::vector<TensorSpec> specs(const std::string& key) const {
    std::vector<TensorSpec> out;
    std::istringstream lines(text(key));
    for (std::string line, part; std::getline(lines, line);) {
      std::istringstream parts(line);
      TensorSpec& spec = out.emplace_back();
      parts >> spec.name >> spec.dtype;
      while (parts >> part) spec.shape.push_back(part);
    }
    return out;
  }

  void map_weights() {
    constexpr size_t kWeightsAt = 4096;  // tilerec/export/package_file.py
    for (const TensorSpec& spec : specs("tilerec.weights")) {
      const size_t start = kWeightsAt + std::stoull(spec.shape.at(0));
      std::vector<int64_t> sizes;
      size_t bytes = c10::elementSize(scalar_type(spec.dtype));
      for (size_t at = 1; at < spec.shape.size(); ++at) {
        sizes.push_back(std::stoll(spec.shape[at]));
        bytes *= static_cast<size_t>(sizes.back());
      }
      if (start + bytes > file_.size)
        throw std::runtime_error("Package " + path_ + ": ends within the weight '" + spec.name + "'; expected the whole file. Copy it again.");
      weights[spec.name] = at::from_blob(static_cast<char*>(file_.data) + start, sizes, scalar_type(spec.dtype));
    }
    std::unordered_map<std::string, at::Tensor> used;
    for (const std::string& name : loader_->get_constant_fqns()) {
      if (!weights.count(name)) throw std::runtime_error("Package " + path_ + ": has no weight '" + name + "'. Export the model again.");
      used[name] = weights[name];
    }
    loader_->load_constants(used, false, true, true);
  }

  void check_inputs(const std::vector<at::Tensor>& tensors) const {
    if (tensors.size() != inputs.size())
      throw std::runtime_error("Package: got " + std::to_string(tensors.size()) + " tensors; expected " + std::to_string(inputs.size()) + ", in the order of `inputs`.");
    std::unordered_map<std::string, int64_t> sizes;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const TensorSpec& spec = inputs[i];
      const at::Tensor& tensor = tensors[i];
      bool fits = tensor.scalar_type() == scalar_type(spec.dtype) && tensor.dim() == static_cast<int64_t>(spec.shape.size()) &&
                  tensor.is_contiguous() && tensor.is_cpu();
      for (size_t at = 0; fits && at < spec.shape.size(); ++at) {
        const std::string& size = spec.shape[at];
        const int64_t want = isdigit(size[0]) ? std::stoll(size) : sizes.emplace(size, tensor.size(at)).first->second;
        fits = tensor.size(at) == want;
      }
      if (fits) continue;
      std::ostringstream got;
      got << "Input '" << spec.name << "': got " << tensor.scalar_type() << " " << tensor.sizes() << "; expected contiguous "
          << spec.dtype << " [";
      for (const std::string& size : spec.shape) got << (&size == &spec.shape[0] ? "" : ", ") << size;
      throw std::runtime_error(got.str() + "] on the CPU, with one size per name.");
    }
  }

  std::string path_;
  MappedFile file_;
  std::unique_ptr<Loader> loader_;
  std::unordered_map<std::string, std::string> metadata_;
};

}  // namespace tilerec
