// A device of torch whose memory is that of the host, and whose kernels are the CPU's. See the package's docstring.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <mutex>

namespace {

using c10::DeviceType;
const c10::Device device(DeviceType::PrivateUse1, 0);
const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size);
    return {data, data, &c10::free_cpu, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Allocator allocator;
REGISTER_ALLOCATOR(DeviceType::PrivateUse1, &allocator);

// What stands for pinned memory knows its own, since FSDP keeps a tensor that is pinned and copies one that is not.
struct Pinned final : c10::Allocator {
  static inline std::mutex mutex;
  static inline std::map<const void*, size_t> blocks;
  static void free(void* data) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      blocks.erase(data);
    }
    c10::free_cpu(data);
  }
  static bool has(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto next = blocks.upper_bound(data);
    if (next == blocks.begin()) return false;
    auto [begin, size] = *std::prev(next);
    return static_cast<const char*>(data) < static_cast<const char*>(begin) + size;
  }
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size);
    const std::lock_guard<std::mutex> lock(mutex);
    blocks[data] = size;
    return {data, data, &free, c10::Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Pinned pinned;

// One device with one stream, which has done everything when the host goes on.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::PrivateUse1> {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override { return Pinned::has(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = allocator.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  auto keep = [storage = tensor.storage()](void*) {};
  auto options = tensor.options().device(c10::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), keep, options);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& out, bool) {
  (out.is_cpu() ? out : on_cpu(out)).copy_(self.is_cpu() ? self : on_cpu(self));
  return out;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& out) {
  out.resize_(self.sizes());
  return copy_from(self, out, false);
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(
      self, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void check_device(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  TORCH_CHECK(
      !tensor.defined() || !tensor.is_cpu() || tensor.dim() == 0,
      "Expected all tensors to be on the same device, and ", op.schema().name(), " got one on cpu");
}

// As CUDA does, take numbers from the CPU, but no tensors; indices may come from there, and are an argument of another kind.
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (argument.isTensor()) check_device(op, argument.toTensor());
    if (argument.isTensorList())
      for (const at::Tensor& tensor : argument.toTensorVector()) check_device(op, tensor);
  }
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }  // in fp32

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("unfold", at::native::unfold);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}

PYBIND11_MODULE(apart, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("on_cpu", &on_cpu);
}
