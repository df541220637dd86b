// A CUDA device with nothing behind it, for a build of PyTorch without CUDA: autograd of fake CUDA tensors asks for a device
// guard, streams and events, and does nothing else with the device.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct CUDAHooks : CUDAHooksInterface { // the name that PyTorch looks for
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at

namespace {
constexpr auto CUDA = c10::DeviceType::CUDA;
c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, {CUDA, 0}); }

struct Guard : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return {CUDA, 0}; }
  c10::Device getDevice() const override { return {CUDA, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
} // namespace
