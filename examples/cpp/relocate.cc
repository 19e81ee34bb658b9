// Records a stream of two kernels once and replays it on other buffers, without PyTorch.
//
//   relocate              on the machine's GPU
//   relocate --simulated  on a simulated device (no GPU needed)
//
// The kernels compute out = (a + b) + 1. The program prints the link map (which words of the
// kernels' parameters are addresses, and of what) and checks every replay.
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

#include "pygraph/pygraph.h"
#include "simulator/simulator.h"

namespace {

using pygraph::Driver;
using pygraph::abi::DevicePointer;

constexpr unsigned kCount = 1024;
constexpr size_t kBytes = kCount * sizeof(float);

// The kernels as PTX, which the driver compiles for its GPU.
constexpr const char* kPtx = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry add(.param .u64 to, .param .u64 a, .param .u64 b) {
  .reg .b32 %r<5>; .reg .f32 %f<3>; .reg .b64 %d<5>;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3; mul.wide.u32 %d3, %r4, 4;
  ld.param.u64 %d1, [to]; ld.param.u64 %d2, [a]; ld.param.u64 %d4, [b];
  add.u64 %d1, %d1, %d3; add.u64 %d2, %d2, %d3; add.u64 %d4, %d4, %d3;
  ld.global.f32 %f1, [%d2]; ld.global.f32 %f2, [%d4]; add.f32 %f1, %f1, %f2;
  st.global.f32 [%d1], %f1;
  ret;
}
.visible .entry add_one(.param .u64 to) {
  .reg .b32 %r<5>; .reg .f32 %f<2>; .reg .b64 %d<4>;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3; mul.wide.u32 %d3, %r4, 4;
  ld.param.u64 %d1, [to]; add.u64 %d1, %d1, %d3;
  ld.global.f32 %f1, [%d1]; add.f32 %f1, %f1, 0f3F800000; st.global.f32 [%d1], %f1;
  ret;
}
)";

float* floats(void* param) {
  DevicePointer address = 0;
  std::memcpy(&address, param, sizeof address);
  return reinterpret_cast<float*>(address);
}

void add_simulated_kernels(pygraph::simulator::Simulator& simulator) {
  simulator.add_kernel({"add", {8, 8, 8}, [](void** params) {
                          for (unsigned i = 0; i < kCount; ++i) {
                            floats(params[0])[i] = floats(params[1])[i] + floats(params[2])[i];
                          }
                        }});
  simulator.add_kernel({"add_one", {8}, [](void** params) {
                          for (unsigned i = 0; i < kCount; ++i) floats(params[0])[i] += 1;
                        }});
}

void make_context_current(const Driver& driver) {
  int device = 0;
  CUcontext context = nullptr;
  PYGRAPH_CHECK(driver, init(0));
  PYGRAPH_CHECK(driver, device_get(&device, 0));
  PYGRAPH_CHECK(driver, primary_context_retain(&context, device));
  PYGRAPH_CHECK(driver, context_set_current(context));
}

DevicePointer upload(const Driver& driver, float value) {
  DevicePointer address = 0;
  const std::vector<float> values(kCount, value);
  PYGRAPH_CHECK(driver, memory_allocate(&address, kBytes));
  PYGRAPH_CHECK(driver, copy_to_device(address, values.data(), kBytes));
  return address;
}

void launch(const Driver& driver, CUfunction kernel, CUstream stream, void** params) {
  PYGRAPH_CHECK(driver,
                launch_kernel(kernel, kCount / 128, 1, 1, 128, 1, 1, 0, stream, params, nullptr));
}

int run(const Driver& driver) {
  make_context_current(driver);
  CUmodule raw = nullptr;
  PYGRAPH_CHECK(driver, module_load_data(&raw, kPtx));
  const pygraph::Module module(driver, raw);
  CUfunction add = nullptr;
  CUfunction add_one = nullptr;
  PYGRAPH_CHECK(driver, module_get_function(&add, raw, "add"));
  PYGRAPH_CHECK(driver, module_get_function(&add_one, raw, "add_one"));
  const pygraph::Stream stream = pygraph::create_stream(driver);

  const auto issue = [&](CUstream on, std::span<const DevicePointer> buffers) {
    DevicePointer a = buffers[0];
    DevicePointer b = buffers[1];
    DevicePointer out = buffers[2];
    void* add_params[] = {&out, &a, &b};
    launch(driver, add, on, add_params);
    void* add_one_params[] = {&out};
    launch(driver, add_one, on, add_one_params);
  };
  const DevicePointer warm_up[] = {upload(driver, 0), upload(driver, 0), upload(driver, 0)};
  issue(stream.get(), warm_up);  // loads the kernels
  PYGRAPH_CHECK(driver, stream_synchronize(stream.get()));

  const pygraph::Buffer buffers[] = {{kBytes}, {kBytes}, {kBytes}};
  const auto graph = pygraph::record(driver, 0, buffers, issue);
  std::printf("%s\n", pygraph::link_map(graph->linked()).c_str());

  for (const float value : {1.0F, 2.0F, 3.0F}) {
    const DevicePointer out = upload(driver, 0);
    const DevicePointer addresses[] = {upload(driver, value), upload(driver, 10), out};
    const uint64_t slots[] = {addresses[0], addresses[1], addresses[2], 0};
    const size_t touched = graph->bind(slots);
    graph->launch(stream.get());
    PYGRAPH_CHECK(driver, stream_synchronize(stream.get()));
    std::vector<float> result(kCount);
    PYGRAPH_CHECK(driver, copy_to_host(result.data(), out, kBytes));
    const bool right = result == std::vector<float>(kCount, value + 11);
    std::printf("replay on other buffers: %zu nodes updated, out = %g, %s\n", touched,
                static_cast<double>(result[0]), right ? "as expected" : "WRONG");
    for (const DevicePointer address : addresses) PYGRAPH_CHECK(driver, memory_free(address));
    if (!right) return 1;
  }
  for (const DevicePointer address : warm_up) PYGRAPH_CHECK(driver, memory_free(address));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc > 1 && std::string_view(argv[1]) == "--simulated") {
      pygraph::simulator::Simulator simulator;
      add_simulated_kernels(simulator);
      return run(simulator.driver());
    }
    return run(pygraph::cuda_driver());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "relocate: %s\n", error.what());
    return 1;
  }
}
