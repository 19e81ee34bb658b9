#include "pygraph/device_patcher.h"

#include <algorithm>
#include <array>
#include <string>

namespace pygraph {
namespace {

constexpr unsigned kThreads = 512;
constexpr size_t kMostChanges = 255;  // of one launch: parameters may take 4096 bytes

struct Params {  // of the kernel, as one buffer
  abi::DevicePointer words;
  abi::DevicePointer status;  // where to note a refusal; 0: stop
  std::array<DevicePatcher::Change, kMostChanges> changes;
};
static_assert(sizeof(Params) == 4096);

// Block b makes change b, a word per thread and turn:
//
//   for (i = changes[b].begin + threadIdx.x; i < changes[b].end; i += blockDim.x) {
//     value = changes[b].address + words[i].addend;
//     error = cudaGraphKernelNodeSetParam(words[i].node, words[i].offset, &value, 8);
//     if (error != 0) { if (status == nullptr) trap; *status = error; }
//   }
constexpr const char* kPtx = R"(
.version 8.3
.target sm_70
.address_size 64

.extern .func (.param .b32 error) cudaGraphKernelNodeSetParam(
    .param .b64 node, .param .b64 offset, .param .b64 value, .param .b64 size);

.visible .entry pygraph_patch(.param .u64 words, .param .u64 status,
                              .param .align 8 .b8 changes[4080]) {
  .local .align 8 .b8 value[8];
  .reg .pred %p; .reg .b32 %r<6>; .reg .b64 %d<9>;
  mov.u32 %r1, %ctaid.x; mul.wide.u32 %d1, %r1, 16; mov.u64 %d2, changes; add.u64 %d1, %d1, %d2;
  ld.param.u64 %d2, [%d1]; ld.param.u32 %r2, [%d1+8]; ld.param.u32 %r3, [%d1+12];
  ld.param.u64 %d3, [words]; ld.param.u64 %d4, [status];
  mov.u32 %r4, %tid.x; add.u32 %r2, %r2, %r4; mov.u32 %r4, %ntid.x;
next:
  setp.ge.u32 %p, %r2, %r3; @%p bra done;
  mul.wide.u32 %d5, %r2, 24; add.u64 %d5, %d5, %d3;
  ld.global.u64 %d6, [%d5]; ld.global.u64 %d7, [%d5+8]; ld.global.u64 %d8, [%d5+16];
  add.u64 %d8, %d8, %d2; mov.u64 %d5, value; st.local.u64 [%d5], %d8; cvta.local.u64 %d5, %d5;
  {
    .param .b64 a; .param .b64 b; .param .b64 c; .param .b64 d; .param .b32 error;
    st.param.b64 [a], %d6; st.param.b64 [b], %d7; st.param.b64 [c], %d5; st.param.b64 [d], 8;
    call.uni (error), cudaGraphKernelNodeSetParam, (a, b, c, d);
    ld.param.b32 %r5, [error];
  }
  add.u32 %r2, %r2, %r4;
  setp.eq.u32 %p, %r5, 0; @%p bra next;
  setp.ne.u64 %p, %d4, 0; @%p bra note;
  trap;
note:
  st.global.u32 [%d4], %r5; bra next;
done:
  ret;
}
)";

}  // namespace

DevicePatcher::DevicePatcher(const Driver& driver, std::span<const Word> words) : driver_(driver) {
  const RelaxedCaptureMode relaxed(driver_);
  PYGRAPH_CHECK(driver_, context_get_current(&context_));
  CUmodule module = nullptr;
  PYGRAPH_CHECK(driver_, module_load_data(&module, kPtx));
  module_ = Module(driver_, module);
  PYGRAPH_CHECK(driver_, module_get_function(&kernel_, module_.get(), "pygraph_patch"));
  const uint64_t none = 0;
  PYGRAPH_CHECK(driver_, memory_allocate(&words_, words.size_bytes() + sizeof none));
  status_ = words_ + words.size_bytes();
  try {
    PYGRAPH_CHECK(driver_, copy_to_device(status_, &none, sizeof none));
    if (words.empty()) return;
    PYGRAPH_CHECK(driver_, copy_to_device(words_, words.data(), words.size_bytes()));
  } catch (...) {
    driver_.memory_free(words_);
    throw;
  }
}

DevicePatcher::~DevicePatcher() {
  const RelaxedCaptureMode relaxed(driver_);
  // A graph may be dropped while another device is current; a module belongs to a context.
  driver_.context_push(context_);
  driver_.memory_free(words_);
  module_.reset();
  driver_.context_pop(&context_);
}

void DevicePatcher::patch(CUstream stream, std::span<const Change> changes) {
  for (size_t done = 0; done < changes.size(); done += kMostChanges) {
    const auto part = changes.subspan(done, std::min(kMostChanges, changes.size() - done));
    Params params{words_, is_confirmed_ ? 0 : status_, {}};
    std::ranges::copy(part, params.changes.begin());
    void* pointers[] = {&params.words, &params.status, &params.changes};
    PYGRAPH_CHECK(driver_, launch_kernel(kernel_, static_cast<unsigned>(part.size()), 1, 1,
                                         kThreads, 1, 1, 0, stream, pointers, nullptr));
  }
}

void DevicePatcher::confirm(CUstream stream) {
  uint64_t status = 0;
  PYGRAPH_CHECK(driver_, stream_synchronize(stream));
  PYGRAPH_CHECK(driver_, copy_to_host(&status, status_, sizeof status));
  if (status != 0) {
    throw DriverError("cudaGraphKernelNodeSetParam failed: error " + std::to_string(status),
                      static_cast<abi::Result>(status));
  }
  is_confirmed_ = true;
}

}  // namespace pygraph
