#include "captured_graph.h"

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <functional>
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
  std::vector<uint64_t> addresses;        // by slot
  std::vector<c10::Storage> outputs;      // by block
  std::vector<at::Generator> generators;  // by random source
  std::vector<PhiloxPosition> positions;
  bool donated = false;
  int poison = -1;
  std::vector<c10::DataPtr> regions;  // by region; none for those in an input
};

CapturedGraph::CapturedGraph(const Driver& driver, c10::Device device,
                             std::vector<Argument> arguments, OutputPlan outputs,
                             std::vector<RandomSource> random, Graph graph, LinkedGraph linked,
                             std::shared_ptr<FixedMemory> fixed_memory,
                             std::vector<uint32_t> written)
    : driver_(driver),
      device_(device),
      arguments_(std::move(arguments)),
      outputs_(std::move(outputs)),
      random_(std::move(random)),
      fixed_memory_(std::move(fixed_memory)),
      written_(std::move(written)),
      executable_(std::make_unique<ExecutableGraph>(driver, std::move(graph), std::move(linked))),
      workspace_(Workspace::of_device(device.index())) {
  plan_donations();
  plan_allocations();
  const auto& states = executable_->linked().recording.random;
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

void CapturedGraph::note_no_room() {
  release_workspace();
  without_room_ += 2;
  if (without_room_ < 6) return;
  without_room_ = 4;  // after its rest, one more time is enough
  failure = "its replays ran out of memory";
  calls_to_rest_ = next_rest_;
  next_rest_ *= 4;
}

bool CapturedGraph::is_out_of_use() {
  if (failure.empty()) return false;
  if (calls_to_rest_ > 0 && --calls_to_rest_ == 0) failure.clear();
  return true;
}

void CapturedGraph::patch(Patching patching) {
  if (patching == patching_) return;
  const c10::OptionalDeviceGuard guard(device_);
  const std::lock_guard lock(workspace_.mutex());
  if (other_ == nullptr) other_ = executable_->copy(patching);
  try {
    other_->bind(executable_->bound());
  } catch (...) {
    other_.reset();
    throw;
  }
  executable_.swap(other_);
  patching_ = patching;
}

void CapturedGraph::drop_other_patching() {
  const std::lock_guard lock(workspace_.mutex());
  other_.reset();
}

void CapturedGraph::settle_workspace() {
  reserve_workspace(workspace_needed(!donations_.empty()));
  workspace_.settle();
}

void CapturedGraph::plan_donations() {
  for (uint32_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].is_relocated()) slot_arguments_.push_back(i);
  }
  for (const DonatedInput& input : linked().donated) {
    GivenAway& tensors = donations_.emplace_back();
    tensors.bytes = input.size;
    tensors.positions.push_back(slot_arguments_[input.slot]);
    for (const uint32_t view : input.views) tensors.positions.push_back(slot_arguments_[view]);
  }
  for (const uint32_t donor : outputs_.block_donors) {
    donors_.push_back(donor == Donor::kNone ? kNoArgument : slot_arguments_[donor]);
  }
}

// A block of internal memory in an output is the output's allocation. (Such outputs do not share
// theirs: kLargestBlock in outputs.cc is far below kLargeBlock in recording_pair.cc.)
// Largest first: PyTorch's allocator gives the smallest free piece that fits, and cuts it, so small
// allocations that come first would break up the pieces that large ones had in the call before.
void CapturedGraph::plan_allocations() {
  for (uint32_t i = 0; i < outputs_.block_bytes.size(); ++i) {
    allocations_.push_back({outputs_.block_bytes[i], true, i});
  }
  const std::vector<const Buffer*> slots = output_slots(outputs_);
  for (uint32_t i = 0; i < linked().regions.size(); ++i) {
    const Region& region = linked().regions[i];
    if (region.output != Region::kNoOutput) {
      uint64_t& bytes = allocations_[slots[region.output]->block].bytes;
      bytes = std::max(bytes, region.size);
    } else if (region.input == Region::kOwnBlock) {
      allocations_.push_back({region.size, false, i});
    }
  }
  std::ranges::stable_sort(allocations_, std::greater(), &Allocation::bytes);
}

std::vector<uint32_t> CapturedGraph::donated() const {
  std::vector<uint32_t> positions;
  for (const GivenAway& tensors : donations_) {
    positions.insert(positions.end(), tensors.positions.begin(), tensors.positions.end());
  }
  return positions;
}

uint64_t CapturedGraph::block_bytes() const {
  uint64_t bytes = 0;
  for (const Region& region : linked().regions) {
    const bool is_own = region.input == Region::kOwnBlock && region.output == Region::kNoOutput;
    if (is_own) bytes += region.size;
  }
  return bytes;
}

bool CapturedGraph::gives_away(PyObject* arguments, Py_ssize_t holders) const {
  if (holders == 0 || donations_.empty()) return false;
  return std::ranges::all_of(donations_, [&](const GivenAway& tensors) {
    return is_given_away(arguments, tensors, holders);
  });
}

void CapturedGraph::reserve_workspace(uint64_t bytes) {
  if (bytes <= reserved_ && bytes <= workspace_.capacity()) return;
  workspace_.reserve(bytes);
  if (reserved_ > 0) workspace_.release(reserved_);
  reserved_ = bytes;
}

uint64_t CapturedGraph::output_bytes() const {
  return std::accumulate(outputs_.block_bytes.begin(), outputs_.block_bytes.end(), uint64_t{0});
}

bool CapturedGraph::matches(PyObject* arguments) const {
  return pygraph::matches(arguments_, arguments, device_) &&
         (written_.empty() || !shares_memory(arguments_, arguments, written_));
}

uint64_t CapturedGraph::fixed_bytes() const {
  return fixed_memory_ == nullptr ? 0 : fixed_memory_->bytes();
}

uint64_t CapturedGraph::copied_bytes() const {
  if (fixed_memory_ == nullptr) return 0;
  uint64_t bytes = output_bytes();
  for (const uint32_t position : slot_arguments_) bytes += arguments_[position].extent;
  for (const uint32_t position : written_) bytes += arguments_[position].extent;
  return bytes;
}

void CapturedGraph::collect_input_addresses(PyObject* arguments,
                                            std::vector<uint64_t>& addresses) const {
  for (const uint32_t position : slot_arguments_) {
    const at::Tensor& tensor = unpack_tensor(PyList_GET_ITEM(arguments, position));
    addresses.push_back(reinterpret_cast<uint64_t>(tensor.mutable_data_ptr()));
  }
}

void CapturedGraph::allocate(Launch& launch, PyObject* arguments, Donations& donations) const {
  static c10::Allocator* allocator = c10::GetAllocator(device_.type());
  launch.outputs.resize(outputs_.block_bytes.size());
  launch.regions.resize(linked().regions.size());
  for (const auto& [bytes, is_output, index] : allocations_) {
    if (!is_output) {
      launch.regions[index] = allocator->allocate(bytes);
      continue;
    }
    const bool is_donated = launch.donated && donors_[index] != kNoArgument;
    launch.outputs[index] =
        c10::Storage(c10::Storage::use_byte_size_t(), outputs_.block_bytes[index],
                     is_donated ? donations.take(PyList_GET_ITEM(arguments, donors_[index]))
                                : allocator->allocate(bytes),
                     allocator, /*resizable=*/true);
    if (is_donated) donations.given_to(launch.outputs[index]);
  }
  for (const Buffer& buffer : outputs_.buffers) {
    if (buffer.bytes == 0) continue;
    const auto block = reinterpret_cast<uint64_t>(launch.outputs[buffer.block].mutable_data());
    launch.addresses.push_back(block + buffer.offset);
  }
}

void CapturedGraph::place_internal_memory(Launch& launch, uint64_t workspace) const {
  launch.addresses[executable_->workspace_slot()] = workspace;
  for (size_t i = 0; i < linked().regions.size(); ++i) {
    const Region& region = linked().regions[i];
    uint64_t& address = launch.addresses[executable_->region_slot() + i];
    if (region.output != Region::kNoOutput) {
      address = launch.addresses[slot_arguments_.size() + region.output];
    } else if (region.input == Region::kOwnBlock) {
      address = reinterpret_cast<uint64_t>(launch.regions[i].get());
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
    TORCH_CHECK_WITH(OutOfMemoryError, false, "another replay gave the workspace back");
  }
  const uint64_t workspace = workspace_.enter(driver_, launch.stream);
  place_internal_memory(launch, needed > 0 ? workspace : 0);
  nodes_touched += executable_->bind(launch.addresses);
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
  executable_->launch(launch.stream);
  ++replays;
  if (launch.donated) ++donated_replays;
}

void CapturedGraph::poison_outputs(const Launch& launch) const {
  const auto value = static_cast<unsigned char>(launch.poison);
  for (size_t i = 0; i < launch.outputs.size(); ++i) {
    const c10::Storage& block = launch.outputs[i];
    // What was an input until now still is one when the graph starts.
    if (block.nbytes() == 0 || (launch.donated && donors_[i] != kNoArgument)) continue;
    const auto address = reinterpret_cast<uint64_t>(block.mutable_data());
    PYGRAPH_CHECK(driver_, memset_d8_async(address, value, block.nbytes(), launch.stream));
  }
}

void CapturedGraph::poison_internal_memory(const Launch& launch, uint64_t workspace,
                                           uint64_t size) const {
  const auto fill = [&](uint64_t address, uint64_t bytes) {
    if (bytes == 0) return;
    PYGRAPH_CHECK(driver_, memset_d8_async(address, kInternalPoison, bytes, launch.stream));
  };
  fill(workspace, size);
  if (fixed_memory_ != nullptr) fixed_memory_->fill(kInternalPoison, launch.stream);
  for (size_t i = 0; i < launch.regions.size(); ++i) {
    if (!launch.regions[i]) continue;
    fill(reinterpret_cast<uint64_t>(launch.regions[i].get()), linked().regions[i].size);
  }
}

PyObject* CapturedGraph::replay(PyObject* arguments, Py_ssize_t holders, int poison) {
  at::RecordFunction range(at::RecordScope::USER_SCOPE);  // costs nothing unless somebody profiles
  if (range.isActive()) range.before(name);
  const c10::OptionalDeviceGuard guard(device_);
  Launch launch;
  launch.donated = gives_away(arguments, holders);
  const bool may_keep = holders == 0 && poison >= 0;  // asked for, by verification
  if (!launch.donated && !donations_.empty() && !may_keep) {
    throw NotGivenAway("somebody holds an argument whose memory the graph was to use");
  }
  launch.stream = torch_cuda::current_stream(device_.index());
  launch.poison = poison;
  launch.addresses.reserve(executable_->slot_count());
  collect_input_addresses(arguments, launch.addresses);
  Donations donations;  // given back if anything below throws
  allocate(launch, arguments, donations);
  launch.addresses.resize(executable_->slot_count());
  reserve_workspace(workspace_needed(launch.donated));
  if (draws_) {
    const auto& states = linked().recording.random;
    for (size_t i = 0; i < random_.size(); ++i) {
      launch.generators.push_back(generator_of(random_[i], arguments, device_));
      launch.positions.push_back(reserve_random(launch.generators[i], states[i].increment));
      launch.addresses[executable_->workspace_slot() + 1 + i] =
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
  launch.regions.clear();  // reused in stream order
  donations.keep();
  if (without_room_ > 0) --without_room_;
  return build_outputs(outputs_, launch.outputs, arguments);
}

}  // namespace pygraph
