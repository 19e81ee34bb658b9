#include "test_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace pygraph::testing {
namespace {

constexpr unsigned kThreads = 128;
constexpr uint64_t kCapacity = uint64_t{1} << 34;

// The test kernels for a real GPU. The driver compiles PTX itself, so no toolkit is needed.
constexpr const char* kPtx = R"(
.version 7.0
.target sm_70
.address_size 64

.visible .entry add_constant(.param .u64 to, .param .u64 from, .param .u32 count,
                             .param .f32 value) {
  .reg .pred %p; .reg .b32 %r<6>; .reg .f32 %f<3>; .reg .b64 %d<5>;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  ld.param.u32 %r5, [count]; setp.ge.u32 %p, %r4, %r5; @%p bra done;
  ld.param.u64 %d1, [to]; ld.param.u64 %d2, [from]; mul.wide.u32 %d3, %r4, 4;
  add.u64 %d1, %d1, %d3; add.u64 %d2, %d2, %d3;
  ld.global.f32 %f1, [%d2]; ld.param.f32 %f2, [value]; add.f32 %f1, %f1, %f2;
  st.global.f32 [%d1], %f1;
done: ret;
}

.visible .entry add(.param .u64 to, .param .u64 a, .param .u64 b, .param .u32 count) {
  .reg .pred %p; .reg .b32 %r<6>; .reg .f32 %f<3>; .reg .b64 %d<5>;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  ld.param.u32 %r5, [count]; setp.ge.u32 %p, %r4, %r5; @%p bra done;
  ld.param.u64 %d1, [to]; ld.param.u64 %d2, [a]; ld.param.u64 %d4, [b];
  mul.wide.u32 %d3, %r4, 4;
  add.u64 %d1, %d1, %d3; add.u64 %d2, %d2, %d3; add.u64 %d4, %d4, %d3;
  ld.global.f32 %f1, [%d2]; ld.global.f32 %f2, [%d4]; add.f32 %f1, %f1, %f2;
  st.global.f32 [%d1], %f1;
done: ret;
}

.visible .entry add_one_struct(.param .align 8 .b8 args[24], .param .u32 count) {
  .reg .pred %p; .reg .b32 %r<6>; .reg .f32 %f<3>; .reg .b64 %d<5>;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  ld.param.u32 %r5, [count]; setp.ge.u32 %p, %r4, %r5; @%p bra done;
  ld.param.u64 %d1, [args]; ld.param.u64 %d2, [args+16]; mul.wide.u32 %d3, %r4, 4;
  add.u64 %d1, %d1, %d3; add.u64 %d2, %d2, %d3;
  ld.global.f32 %f1, [%d2]; add.f32 %f1, %f1, 0f3F800000; st.global.f32 [%d1], %f1;
done: ret;
}

.visible .entry add_one_hidden(.param .u64 to, .param .u64 table, .param .u32 count) {
  .reg .pred %p; .reg .b32 %r<6>; .reg .f32 %f<3>; .reg .b64 %d<5>;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  ld.param.u32 %r5, [count]; setp.ge.u32 %p, %r4, %r5; @%p bra done;
  ld.param.u64 %d1, [to]; ld.param.u64 %d2, [table]; ld.global.u64 %d2, [%d2];
  mul.wide.u32 %d3, %r4, 4; add.u64 %d1, %d1, %d3; add.u64 %d2, %d2, %d3;
  ld.global.f32 %f1, [%d2]; add.f32 %f1, %f1, 0f3F800000; st.global.f32 [%d1], %f1;
done: ret;
}
)";

struct StructArgs {
  uint64_t to, padding, from;
};

template <typename T>
T value_of(void* param) {
  T value;
  std::memcpy(&value, param, sizeof value);
  return value;
}

float* floats_at(uint64_t address) {
  return reinterpret_cast<float*>(address);
}

void add_test_kernels(simulator::Simulator& simulator) {
  simulator.add_kernel({"add_constant", {8, 8, 4, 4}, [](void** p) {
                          for (unsigned i = 0; i < value_of<unsigned>(p[2]); ++i) {
                            floats_at(value_of<uint64_t>(p[0]))[i] =
                                floats_at(value_of<uint64_t>(p[1]))[i] + value_of<float>(p[3]);
                          }
                        }});
  simulator.add_kernel({"add", {8, 8, 8, 4}, [](void** p) {
                          for (unsigned i = 0; i < value_of<unsigned>(p[3]); ++i) {
                            floats_at(value_of<uint64_t>(p[0]))[i] =
                                floats_at(value_of<uint64_t>(p[1]))[i] +
                                floats_at(value_of<uint64_t>(p[2]))[i];
                          }
                        }});
  simulator.add_kernel({"add_one_struct", {24, 4}, [](void** p) {
                          const auto args = value_of<StructArgs>(p[0]);
                          for (unsigned i = 0; i < value_of<unsigned>(p[1]); ++i) {
                            floats_at(args.to)[i] = floats_at(args.from)[i] + 1;
                          }
                        }});
  simulator.add_kernel({"add_one_hidden", {8, 8, 4}, [](void** p) {
                          const auto from = *reinterpret_cast<uint64_t*>(value_of<uint64_t>(p[1]));
                          for (unsigned i = 0; i < value_of<unsigned>(p[2]); ++i) {
                            floats_at(value_of<uint64_t>(p[0]))[i] = floats_at(from)[i] + 1;
                          }
                        }});
}

}  // namespace

Device::Device() {
  const char* wanted = std::getenv("PYGRAPH_TEST_DRIVER");
  if (wanted != nullptr && std::string(wanted) == "cuda") {
    driver_ = &cuda_driver();
    CUcontext context = nullptr;
    int ordinal = 0;
    PYGRAPH_CHECK(*driver_, init(0));
    PYGRAPH_CHECK(*driver_, device_get(&ordinal, 0));
    PYGRAPH_CHECK(*driver_, primary_context_retain(&context, ordinal));
    PYGRAPH_CHECK(*driver_, context_set_current(context));
  } else {
    simulator_ = std::make_unique<simulator::Simulator>();
    add_test_kernels(*simulator_);
    driver_ = &simulator_->driver();
  }
  CUmodule module = nullptr;
  PYGRAPH_CHECK(*driver_, module_load_data(&module, kPtx));
  module_ = Module(*driver_, module);
}

Device::~Device() {
  for (const uint64_t address : memory_) driver_->memory_free(address);
  module_.reset();
}

CUfunction Device::kernel(const char* name) const {
  CUfunction function = nullptr;
  PYGRAPH_CHECK(*driver_, module_get_function(&function, module_.get(), name));
  return function;
}

uint64_t Device::allocate(uint64_t size) {
  abi::DevicePointer address = 0;
  PYGRAPH_CHECK(*driver_, memory_allocate(&address, size));
  memory_.push_back(address);
  return address;
}

uint64_t Device::floats(const std::vector<float>& values) {
  const uint64_t address = allocate(values.size() * sizeof(float));
  write_bytes(address, values.data(), values.size() * sizeof(float));
  return address;
}

std::span<float> Device::pinned(size_t count, float value) const {
  static auto* all = new std::vector<void*>;
  PYGRAPH_CHECK(*driver_, memory_allocate_host(&all->emplace_back(), count * sizeof(float), 0));
  const std::span floats(static_cast<float*>(all->back()), count);
  std::ranges::fill(floats, value);
  return floats;
}

std::vector<float> Device::read_floats(uint64_t address, size_t count) const {
  std::vector<float> values(count);
  synchronize();
  PYGRAPH_CHECK(*driver_, copy_to_host(values.data(), address, count * sizeof(float)));
  return values;
}

void Device::write_bytes(uint64_t address, const void* data, size_t size) const {
  PYGRAPH_CHECK(*driver_, copy_to_device(address, data, size));
}

void Device::synchronize() const {
  PYGRAPH_CHECK(*driver_, context_synchronize());
}

namespace {

void launch(const Device& device, const char* name, CUstream stream, unsigned count, void** params,
            void** extra) {
  const Driver& driver = device.driver();
  const unsigned blocks = (count + kThreads - 1) / kThreads;
  PYGRAPH_CHECK(driver, launch_kernel(device.kernel(name), blocks, 1, 1, kThreads, 1, 1, 0, stream,
                                      params, extra));
}

}  // namespace

void Device::add_constant(CUstream stream, uint64_t to, uint64_t from, unsigned count,
                          float value) const {
  void* params[] = {&to, &from, &count, &value};
  launch(*this, "add_constant", stream, count, params, nullptr);
}

void Device::add(CUstream stream, uint64_t to, uint64_t a, uint64_t b, unsigned count) const {
  void* params[] = {&to, &a, &b, &count};
  launch(*this, "add", stream, count, params, nullptr);
}

void Device::add_constant_packed(CUstream stream, uint64_t to, uint64_t from, unsigned count,
                                 float value) const {
  struct {
    uint64_t to, from;
    unsigned count;
    float value;
  } packed = {to, from, count, value};
  size_t size = sizeof packed;
  void* extra[] = {abi::kLaunchParamBufferPointer, &packed, abi::kLaunchParamBufferSize, &size,
                   abi::kLaunchParamEnd};
  launch(*this, "add_constant", stream, count, nullptr, extra);
}

void Device::add_one_struct(CUstream stream, uint64_t to, uint64_t padding, uint64_t from,
                            unsigned count) const {
  StructArgs args = {to, padding, from};
  void* params[] = {&args, &count};
  launch(*this, "add_one_struct", stream, count, params, nullptr);
}

void Device::add_one_hidden(CUstream stream, uint64_t to, uint64_t table, unsigned count) const {
  void* params[] = {&to, &table, &count};
  launch(*this, "add_one_hidden", stream, count, params, nullptr);
}

uint32_t RecordedPool::node_count() const {
  int status = 0;
  CUgraph graph = nullptr;
  PYGRAPH_CHECK(device_.driver(), stream_get_capture_info(stream_, &status, nullptr, &graph,
                                                          nullptr, nullptr, nullptr));
  size_t count = 0;
  PYGRAPH_CHECK(device_.driver(), graph_get_nodes(graph, nullptr, &count));
  return static_cast<uint32_t>(count);
}

uint64_t RecordedPool::allocate(uint64_t size) {
  uint64_t address = 0;
  for (auto it = free_.begin(); it != free_.end() && address == 0; ++it) {
    if (it->second != size) continue;
    address = it->first;
    free_.erase(it);
    break;
  }
  if (address == 0) address = space_.allocate(size, 0, AddressSpace::Content::kOther);
  used_.emplace_back(address, size);
  log_.allocate(address, size, node_count());
  return address;
}

void RecordedPool::free(uint64_t address) {
  log_.free(address, node_count());
  const auto it = std::find_if(used_.begin(), used_.end(),
                               [&](const auto& entry) { return entry.first == address; });
  free_.push_back(*it);
  used_.erase(it);
}

void declare_reads(Recording& recording) {
  for (Node& node : recording.nodes) {
    node.has_known_accesses = node.kind == NodeKind::kKernel;
    for (const uint32_t offset : node.address_offsets()) {
      (offset > 0 ? node.reads : node.writes).push_back(offset);
    }
  }
}

TwoRecordings record_twice(const Device& device, const std::vector<uint64_t>& input_sizes,
                           const Computation& computation) {
  const Driver& driver = device.driver();
  TwoRecordings result;
  const Stream stream = create_stream(driver);
  for (Recording* recording : {&result.first, &result.second}) {
    const bool is_first = recording == &result.first;
    auto& space = is_first ? result.space_a : result.space_b;
    space = std::make_unique<AddressSpace>(driver, 0, kCapacity,
                                           is_first ? 512 : AddressSpace::kIrregularGaps);
    std::vector<Range> ranges;
    std::vector<uint64_t> addresses;
    for (const uint64_t size : input_sizes) {
      addresses.push_back(space->allocate(size, 0, AddressSpace::Content::kFloating));
      ranges.push_back({addresses.back(), size});
    }
    RecordedPool pool(device, *space, stream.get());
    PYGRAPH_CHECK(driver, stream_begin_capture(stream.get(), abi::kCaptureModeThreadLocal));
    Session session{stream.get(), addresses, pool};
    std::vector<uint64_t> outputs = computation(session);
    CUgraph raw = nullptr;
    PYGRAPH_CHECK(driver, stream_end_capture(stream.get(), &raw));
    Graph graph(driver, raw);
    *recording = read_graph(driver, raw);
    // These kernels keep no addresses.
    for (const Node& node : recording->nodes) {
      if (node.parent >= 0) continue;
      recording->operators.push_back(
          {.name = "aten::test", .first = node.position, .last = node.position + 1});
    }
    recording->allocations = pool.log().allocations();
    recording->inputs = std::move(ranges);
    recording->outputs = std::move(outputs);
    recording->address_space = space->range();
    if (!is_first) result.graph = std::move(graph);
  }
  return result;
}

}  // namespace pygraph::testing
