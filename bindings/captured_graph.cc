#include "captured_graph.h"

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>

#include "philox.h"
#include "torch_cuda.h"

namespace pygraph {
namespace {

constexpr uint64_t kRandomStateSize = 16;

constexpr unsigned char kInternalPoison = 0xFF;

class WithoutPythonLock {
 public:
  WithoutPythonLock() : state_(PyEval_SaveThread()) {}
  ~WithoutPythonLock() { PyEval_RestoreThread(state_); }
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  PyThreadState* state_;
};

at::Generator generator_of(const RandomSource& source, PyObject* arguments, c10::Device device) {
  if (source.argument == RandomSource::kDefaultGenerator) {
    return at::globalContext().defaultGenerator(device);
  }
  return unpack_generator(PyList_GET_ITEM(arguments, source.argument));
}

}  // namespace

// What one replay works with.
struct CapturedGraph::Launch {
  CUstream stream = nullptr;
  std::vector<uint64_t> addresses;  // by slot
  std::vector<c10::Storage> storages;
  std::vector<at::Generator> generators;  // by random source
  std::vector<PhiloxPosition> positions;
  bool donated = false;
  int poison = -1;
  std::vector<c10::DataPtr> blocks;  // of the regions that are not in an input, in their order
};

CapturedGraph::CapturedGraph(const Driver& driver, c10::Device device,
                             std::vector<Argument> arguments, OutputPlan outputs,
                             std::vector<RandomSource> random, Graph graph, LinkedGraph linked)
    : driver_(driver),
      device_(device),
      arguments_(std::move(arguments)),
      outputs_(std::move(outputs)),
      random_(std::move(random)),
      executable_(driver, std::move(graph), std::move(linked)),
      workspace_(Workspace::of_device(device.index())) {
  plan_donations();
  const auto& states = executable_.linked().recording.random;
  draws_ = std::ranges::any_of(states, [](const RandomState& s) { return s.increment > 0; });
  if (draws_) {
    random_memory_ = c10::GetAllocator(device.type())->allocate(states.size() * kRandomStateSize);
  }
}

CapturedGraph::~CapturedGraph() {
  release_workspace();
}

void CapturedGraph::release_workspace() noexcept {
  if (reserved_ > 0) workspace_.release(reserved_);
  reserved_ = 0;
}

void CapturedGraph::plan_donations() {
  for (uint32_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].kind == ArgumentKind::kTensor) slot_arguments_.push_back(i);
  }
  const auto add = [&](uint32_t slot, uint64_t bytes) {
    const uint32_t position = slot_arguments_[slot];
    const auto it = std::ranges::find(donations_, position, &std::pair<uint32_t, uint64_t>::first);
    if (it == donations_.end()) {
      donations_.emplace_back(position, bytes);
    } else {
      it->second = std::max(it->second, bytes);
    }
  };
  for (const Region& region : linked().regions) {
    if (region.input != Region::kOwnBlock) add(region.input, region.size);
  }
  donors_.assign(outputs_.storage_bytes.size(), kNoArgument);
  uint32_t output = 0;
  for (size_t storage = 0; storage < donors_.size(); ++storage) {
    if (outputs_.storage_bytes[storage] == 0) continue;
    const uint32_t donor = linked().donors[output++];
    if (donor == kNoDonor) continue;
    add(donor, outputs_.storage_bytes[storage]);
    donors_[storage] = slot_arguments_[donor];
  }
}

std::vector<uint32_t> CapturedGraph::donated() const {
  std::vector<uint32_t> positions;
  for (const auto& donation : donations_) positions.push_back(donation.first);
  return positions;
}

uint64_t CapturedGraph::block_bytes() const {
  uint64_t bytes = 0;
  for (const Region& region : linked().regions) {
    if (region.input == Region::kOwnBlock) bytes += region.size;
  }
  return bytes;
}

bool CapturedGraph::gives_away(PyObject* arguments, Py_ssize_t holders) const {
  if (holders == 0 || donations_.empty()) return false;
  return std::ranges::all_of(donations_, [&](const auto& donation) {
    return is_given_away(PyList_GET_ITEM(arguments, donation.first), holders, donation.second);
  });
}

void CapturedGraph::reserve_workspace(uint64_t bytes) {
  if (bytes <= reserved_) return;
  workspace_.reserve(bytes);
  if (reserved_ > 0) workspace_.release(reserved_);
  reserved_ = bytes;
}

uint64_t CapturedGraph::output_bytes() const {
  return std::accumulate(outputs_.storage_bytes.begin(), outputs_.storage_bytes.end(), uint64_t{0});
}

bool CapturedGraph::matches(PyObject* arguments) const {
  return pygraph::matches(arguments_, arguments, device_);
}

void CapturedGraph::collect_input_addresses(PyObject* arguments,
                                            std::vector<uint64_t>& addresses) const {
  for (const uint32_t position : slot_arguments_) {
    const at::Tensor& tensor = unpack_tensor(PyList_GET_ITEM(arguments, position));
    addresses.push_back(reinterpret_cast<uint64_t>(tensor.mutable_data_ptr()));
  }
}

void CapturedGraph::take_memory(Launch& launch) {
  reserve_workspace(workspace_needed(launch.donated));
  for (const Region& region : linked().regions) {
    if (region.input != Region::kOwnBlock) continue;
    launch.blocks.push_back(c10::GetAllocator(device_.type())->allocate(region.size));
  }
}

void CapturedGraph::place_internal_memory(Launch& launch, uint64_t workspace) const {
  launch.addresses[executable_.workspace_slot()] = workspace;
  size_t block = 0;
  for (size_t i = 0; i < linked().regions.size(); ++i) {
    const Region& region = linked().regions[i];
    uint64_t& address = launch.addresses[executable_.region_slot() + i];
    if (region.input == Region::kOwnBlock) {
      address = reinterpret_cast<uint64_t>(launch.blocks[block++].get());
    } else {
      address =
          launch.donated ? launch.addresses[region.input] : workspace + region.fallback_offset;
    }
  }
}

void CapturedGraph::bind_and_launch(Launch& launch) {
  const WithoutPythonLock unlocked;
  const std::lock_guard lock(workspace_.mutex());
  const uint64_t needed = workspace_needed(launch.donated);
  if (workspace_.capacity() < needed) {
    throw DriverError("the workspace could not be kept", abi::kOutOfMemory);
  }
  const uint64_t workspace = workspace_.enter(driver_, launch.stream);
  place_internal_memory(launch, needed > 0 ? workspace : 0);
  nodes_touched += executable_.bind(launch.addresses);
  if (draws_) {
    // From pageable memory: the driver has copied the bytes when the call returns.
    PYGRAPH_CHECK(driver_,
                  copy_to_device_async(reinterpret_cast<uint64_t>(random_memory_.get()),
                                       launch.positions.data(),
                                       launch.positions.size() * kRandomStateSize, launch.stream));
  }
  if (launch.poison >= 0) {
    poison_outputs(launch);
    poison_internal_memory(launch, workspace, needed);
  }
  executable_.launch(launch.stream);
  ++replays;
  if (launch.donated) ++donated_replays;
}

void CapturedGraph::poison_outputs(const Launch& launch) const {
  const auto value = static_cast<unsigned char>(launch.poison);
  for (size_t i = 0; i < launch.storages.size(); ++i) {
    const c10::Storage& storage = launch.storages[i];
    // What was an input until now still is one when the graph starts.
    if (storage.nbytes() == 0 || (launch.donated && donors_[i] != kNoArgument)) continue;
    const auto address = reinterpret_cast<uint64_t>(storage.mutable_data());
    PYGRAPH_CHECK(driver_, memset_d8_async(address, value, storage.nbytes(), launch.stream));
  }
}

void CapturedGraph::poison_internal_memory(const Launch& launch, uint64_t workspace,
                                           uint64_t size) const {
  const auto fill = [&](uint64_t address, uint64_t bytes) {
    if (bytes == 0) return;
    PYGRAPH_CHECK(driver_, memset_d8_async(address, kInternalPoison, bytes, launch.stream));
  };
  fill(workspace, size);
  size_t block = 0;
  for (const Region& region : linked().regions) {
    if (region.input != Region::kOwnBlock) continue;
    fill(reinterpret_cast<uint64_t>(launch.blocks[block++].get()), region.size);
  }
}

PyObject* CapturedGraph::replay(PyObject* arguments, Py_ssize_t holders, int poison) {
  const c10::OptionalDeviceGuard guard(device_);
  Launch launch;
  launch.donated = gives_away(arguments, holders);
  launch.stream = torch_cuda::current_stream(device_.index());
  launch.poison = poison;
  launch.addresses.reserve(executable_.slot_count());
  collect_input_addresses(arguments, launch.addresses);
  Donations donations;  // given back if anything below throws
  launch.storages = allocate_storages(
      outputs_, device_,
      launch.donated ? std::span<const uint32_t>(donors_) : std::span<const uint32_t>(), arguments,
      donations);
  for (const c10::Storage& storage : launch.storages) {
    if (storage.nbytes() > 0) {
      launch.addresses.push_back(reinterpret_cast<uint64_t>(storage.mutable_data()));
    }
  }
  launch.addresses.resize(executable_.slot_count());
  take_memory(launch);
  if (draws_) {
    const auto& states = linked().recording.random;
    for (size_t i = 0; i < random_.size(); ++i) {
      launch.generators.push_back(generator_of(random_[i], arguments, device_));
      launch.positions.push_back(reserve_random(launch.generators[i], states[i].increment));
      launch.addresses[executable_.workspace_slot() + 1 + i] =
          reinterpret_cast<uint64_t>(random_memory_.get()) + i * kRandomStateSize;
    }
  }
  try {
    bind_and_launch(launch);
  } catch (...) {
    for (size_t i = 0; i < launch.positions.size(); ++i) {
      unreserve_random(launch.generators[i], launch.positions[i]);
    }
    throw;
  }
  launch.blocks.clear();  // reused in stream order
  donations.keep();
  return build_outputs(outputs_, launch.storages, arguments);
}

}  // namespace pygraph
