// A GPU made of host memory: PyTorch's device type "cuda" on a build without CUDA.
//
// Tensors are on "cuda", their bytes are on the host. An operator that a library registers for CUDA (from Python, too)
// runs as it would on a GPU; every other one is run by the CPU's kernel on the same bytes, at once. Streams and events
// are numbers without effect. What a GPU forbids is forbidden: reading one of its numbers while `sync_debug_mode` is
// "error" or a graph is captured, and copies that wait.
//
// Graphs: while capturing, every kernel is written on a tape with its tensors, and `replay` runs the tape. So what a kernel
// got by value stays as it was, and what it reads in memory is read anew. Kernels run while they are captured, too (some need
// true numbers to give a result of the right shape), and at the end all memory is put back as it was before.
//
// Nouns
//   twin    a CPU tensor over the bytes of a "cuda" one
//   kernel  one operator that reaches the device (not one that is composed of others), or one call of `tape`

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr c10::DeviceIndex DEVICES = 2;
constexpr auto CUDA = c10::DeviceType::CUDA;

using Tape = std::deque<std::function<void()>>;

std::mutex lock;
std::set<int64_t> pinned;              // addresses where pinned memory begins
int waiting_is = 0;                    // 1: told of, 2: an error
Tape* taping = nullptr;
int64_t kernels = 0;
std::atomic<int64_t> waited = 0;       // how often the host has

thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<c10::StreamId, DEVICES> stream_now = {0, 0};
c10::StreamId last_stream = 0;

void waits(const std::string& what) {
  TORCH_CHECK(taping == nullptr, "operation not permitted when stream is capturing: ", what, " waits for the device");
  TORCH_CHECK(waiting_is < 2, "called a synchronizing CUDA operation: ", what);
  if (waiting_is == 1) {
    TORCH_WARN("called a synchronizing CUDA operation: ", what);
  }
  waited++;
}

// ------------------------------------------------------------------------------------------------ memory

// Where the device's tensors are, and how long; several storages may be over the same bytes.
std::map<char*, std::pair<size_t, int>> blocks;

void know(void* bytes, size_t count) {
  std::lock_guard<std::mutex> held(lock);
  auto& [size, users] = blocks[static_cast<char*>(bytes)];
  size = std::max(size, count);
  users += 1;
}

void forget(void* bytes) {
  std::lock_guard<std::mutex> held(lock);
  auto found = blocks.find(static_cast<char*>(bytes));
  if (found != blocks.end() && --found->second.second == 0) {
    blocks.erase(found);
  }
}

// All that the device holds, to be put back.
struct Snapshot {
  std::vector<std::pair<char*, std::vector<char>>> parts;

  Snapshot() {
    std::lock_guard<std::mutex> held(lock);
    for (auto& [bytes, block] : blocks) {
      parts.emplace_back(bytes, std::vector<char>(bytes, bytes + block.first));
    }
  }
  void put_back() const {
    std::lock_guard<std::mutex> held(lock);
    for (auto& [bytes, saved] : parts) {
      auto found = blocks.find(bytes);
      if (found != blocks.end()) {
        std::memcpy(bytes, saved.data(), std::min(saved.size(), found->second.first));
      }
    }
  }
};

std::unique_ptr<Snapshot> before_capture;

void free_bytes(void* context) {
  forget(context);
  std::free(context);
}

void* new_bytes(size_t count, int poison) {
  void* bytes = nullptr;
  TORCH_CHECK(posix_memalign(&bytes, 512, count ? count : 1) == 0, "no memory for ", count, " bytes");
  std::memset(bytes, poison, count);
  return bytes;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t count) override {
    void* bytes = new_bytes(count, 0xFF);  // NaN, or -1
    know(bytes, count);
    return {bytes, bytes, &free_bytes, c10::Device(CUDA, device_now)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_bytes;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
} device_memory;

void free_pinned(void* context) {
  {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase(reinterpret_cast<int64_t>(context));
  }
  std::free(context);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t count) override {
    void* bytes = new_bytes(count, 0xFF);
    std::lock_guard<std::mutex> held(lock);
    pinned.insert(reinterpret_cast<int64_t>(bytes));
    return {bytes, bytes, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
} pinned_memory;

bool is_pinned(const at::Tensor& tensor) {
  std::lock_guard<std::mutex> held(lock);
  return tensor.has_storage() && pinned.count(reinterpret_cast<int64_t>(tensor.storage().data()));
}

// The same bytes on another device; they live as long as the storage they are of.
c10::DataPtr over(const c10::Storage& storage, c10::Device device) {
  if (device.type() == CUDA) {
    know(storage.mutable_data(), storage.nbytes());
  }
  auto* kept = new std::pair<c10::Storage, bool>(storage, device.type() == CUDA);
  auto drop = [](void* context) {
    auto* own = static_cast<std::pair<c10::Storage, bool>*>(context);
    if (own->second) {
      forget(own->first.mutable_data());
    }
    delete own;
  };
  return {storage.mutable_data(), kept, drop, device};
}

at::Tensor tensor_of(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The twins of one operator's tensors; tensors of one storage have twins of one storage.
struct Twins {
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;
  c10::Device device{CUDA, device_now};

  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != CUDA) {
      return tensor;
    }
    for (auto& [own, twin] : tensors) {
      if (own.is_same(tensor)) {
        return twin;
      }
    }
    device = tensor.device();
    c10::Storage storage;
    for (auto& [own, twin] : storages) {
      if (own.is_alias_of(tensor.storage())) {
        storage = twin;
      }
    }
    if (!storage) {
      storage = c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                             over(tensor.storage(), c10::Device(c10::DeviceType::CPU)),
                             c10::GetAllocator(c10::DeviceType::CPU), true);
      storages.emplace_back(tensor.storage(), storage);
    }
    auto twin = tensor_of(storage, tensor, c10::DispatchKey::CPU);
    tensors.emplace_back(tensor, twin);
    return twin;
  }

  // What a kernel gave back, on the device.
  at::Tensor back(const at::Tensor& result) {
    if (!result.defined() || result.device().type() == CUDA) {
      return result;
    }
    for (auto& [own, twin] : tensors) {
      if (twin.is_same(result)) {
        return own;
      }
    }
    for (auto& [own, twin] : storages) {
      if (twin.is_alias_of(result.storage())) {
        return tensor_of(own, result, c10::DispatchKey::CUDA);
      }
    }
    c10::Storage storage(c10::Storage::use_byte_size_t(), result.storage().nbytes(), over(result.storage(), device),
                         &device_memory, true);
    return tensor_of(std::move(storage), result, c10::DispatchKey::CUDA);
  }

  // Tensors that the kernel has resized are resized on the device, too.
  void resized() {
    for (auto& [own, twin] : tensors) {
      auto* storage = own.storage().unsafeGetStorageImpl();
      if (twin.storage().data() != storage->data()) {
        storage->set_data_ptr_noswap(over(twin.storage(), own.device()));
        storage->set_nbytes(twin.storage().nbytes());
      }
      if (own.sizes() != twin.sizes() || own.strides() != twin.strides()) {
        own.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
      }
    }
  }
};

c10::IValue with(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorList()) {
      out.push_back(change(tensor));
    }
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      out.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return out;
  }
  if (value.isDevice()) {
    return c10::Device(c10::DeviceType::CPU);
  }
  return value;
}

// ------------------------------------------------------------------------------------------------ kernels

const std::set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal",      "aten::masked_select",  "aten::_unique2",
    "aten::unique_dim",          "aten::_unique", "aten::bincount",   "aten::unique_dim_consecutive",
    "aten::unique_consecutive",  "aten::allclose"};

bool picks_by_mask(const c10::IValue& value) {
  if (!value.isOptionalTensorList()) {
    return false;
  }
  for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
    if (tensor && tensor->defined() && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte)) {
      return true;
    }
  }
  return false;
}

bool is_view(const c10::OperatorHandle& op) {
  for (const auto& result : op.schema().returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

void tape_one(std::function<void()> run) {
  kernels += 1;
  if (taping != nullptr) {
    taping->push_back(std::move(run));
  }
}

// Runs the CPU's kernel on the tensors' bytes.
void by_twins(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto begin = stack->size() - count;
  std::vector<c10::IValue> arguments(stack->begin() + begin, stack->end());
  bool asks = WAITING.count(schema.name()) > 0;
  for (const auto& value : arguments) {
    asks = asks || picks_by_mask(value);
  }
  if (schema.name() == "aten::repeat_interleave") {
    asks = asks || arguments.back().isNone();
  }
  if (asks) {
    waits(schema.name());
  }
  Twins twins;
  std::vector<c10::IValue> on_host;
  bool mixed = false;
  for (size_t a = 0; a < count; a++) {
    on_host.push_back(with(arguments[a], [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.device().type() != CUDA && tensor.dim() > 0) {
        mixed = true;
      }
      return twins.of(tensor);
    }));
  }
  const bool indexes = schema.name().rfind("aten::index", 0) == 0 || schema.name().rfind("aten::_index", 0) == 0;
  if (mixed) {
    TORCH_CHECK(indexes && schema.name() != "aten::index_select", schema.name(),
                ": expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!");
    waits(schema.name() + " with indices of the host");
  }
  auto run = [op](const std::vector<c10::IValue>& given) {
    at::AutoDispatchBelowADInplaceOrView guard;
    torch::jit::Stack own(given.begin(), given.end());
    op.callBoxed(&own);
    return own;
  };
  auto results = run(on_host);
  twins.resized();
  torch::jit::drop(*stack, count);
  for (const auto& result : results) {
    stack->push_back(result.isTensor() || result.isTensorList()
                         ? with(result, [&](const at::Tensor& tensor) { return twins.back(tensor); })
                         : result);
  }
  if (is_view(op)) {
    return;
  }
  tape_one([run, on_host, results] {
    auto again = run(on_host);
    for (size_t r = 0; r < again.size(); r++) {
      std::vector<at::Tensor> from, to;
      with(again[r], [&](const at::Tensor& tensor) { return from.emplace_back(tensor); });
      with(results[r], [&](const at::Tensor& tensor) { return to.emplace_back(tensor); });
      for (size_t i = 0; i < from.size(); i++) {
        if (from[i].defined() && !from[i].is_alias_of(to[i])) {
          to[i].copy_(from[i]);
        }
      }
    }
  });
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto place = c10::device_or_default(device);
  const auto before = device_now;
  device_now = place.has_index() ? place.index() : device_now;
  auto made = at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory,
                                        c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
  device_now = before;
  return made;
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const auto place = c10::device_or_default(device);
  const auto before = device_now;
  device_now = place.has_index() ? place.index() : device_now;
  auto made = at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                c10::dtype_or_default(dtype));
  device_now = before;
  return made;
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const bool leaves = to.device().type() != CUDA, comes = from.device().type() != CUDA;
  if (leaves != comes) {
    const auto& host = leaves ? to : from;
    if (!non_blocking || !is_pinned(host)) {
      waits(leaves ? "a copy to the host" : "a copy from memory of the host that is not pinned");
    }
  }
  Twins twins;
  auto target = twins.of(to), source = twins.of(from);
  auto run = [target, source]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    target.copy_(source);
  };
  run();
  tape_one(run);
  return to;
}

at::Tensor& set_storage(at::Tensor& tensor, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, c10::Storage source) {
  const int64_t count = source.nbytes() / tensor.element_size();
  return set_storage(tensor, std::move(source), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), c10::fromIntArrayRefSlow(source.sizes()),
                     c10::fromIntArrayRefSlow(source.strides()));
}

void record_stream(at::Tensor&, c10::Stream) {}

at::Tensor twin(const at::Tensor& tensor) {
  Twins twins;
  return twins.of(tensor);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_twins>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY(simulated_gpu, m) {
  m.def("twin(Tensor x) -> Tensor");
  m.impl("twin", c10::DispatchKey::CompositeExplicitAutograd, &twin);
}

// ------------------------------------------------------------------------------------------------ the device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override {
    return CUDA;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    device_now = device.index();
    return before;
  }
  c10::Device getDevice() const override {
    return {CUDA, device_now};
  }
  void setDevice(c10::Device device) const override {
    device_now = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_now = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, stream_now[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    stream_now[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = this->event();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {
    waits("an event");
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {
    waits("a stream");
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    waits("the device");
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  static void* event() {
    static int one = 1;
    return &one;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  int getNumGPUs() const override {
    return DEVICES;
  }
  c10::DeviceIndex current_device() const override {
    return device_now;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return device_now;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    device_now = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(device_now, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(device_now, device);
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> held(lock);
    return pinned.count(reinterpret_cast<int64_t>(data)) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  c10::Allocator* getCUDADeviceAllocator() const override {
    return &device_memory;
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return {CUDA, device_now};
  }
  void deviceSynchronize(c10::DeviceIndex) const override {
    waits("the device");
  }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

struct SetAllocator {
  SetAllocator() {
    c10::SetAllocator(CUDA, &device_memory);
  }
} set_allocator;

}  // namespace

// ------------------------------------------------------------------------------------------------ for Python

extern "C" {

int sg_current_device() {
  return device_now;
}

void sg_set_device(int device) {
  device_now = static_cast<c10::DeviceIndex>(device);
}

int64_t sg_current_stream(int device) {
  return stream_now[device];
}

void sg_set_stream(int device, int64_t stream) {
  stream_now[device] = stream;
}

int64_t sg_new_stream() {
  return ++last_stream;
}

void sg_set_sync_debug_mode(int mode) {
  waiting_is = mode;
}

int sg_sync_debug_mode() {
  return waiting_is;
}

int64_t sg_waited() {
  return waited;
}

int sg_capturing() {
  return taping != nullptr ? 1 : 0;
}

void* sg_begin() {
  before_capture = std::make_unique<Snapshot>();
  taping = new Tape;
  return taping;
}

void sg_end() {
  taping = nullptr;
  before_capture->put_back();
  before_capture.reset();
}

void sg_replay(void* tape) {
  for (auto& kernel : *static_cast<Tape*>(tape)) {
    kernel();
  }
}

void sg_forget(void* tape) {
  delete static_cast<Tape*>(tape);
}

void sg_tape(void (*kernel)()) {
  tape_one([kernel] { kernel(); });
}

int64_t sg_kernels() {
  return kernels;
}

void sg_pin(int64_t address, int on) {
  std::lock_guard<std::mutex> held(lock);
  if (on) {
    pinned.insert(address);
  } else {
    pinned.erase(address);
  }
}
}
