#include "replay/captured_graph.h"

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "torch_private/philox.h"
#include "torch_private/torch_cuda.h"
#include "without_python_lock.h"

namespace pygraph::bindings {
namespace {

constexpr uint64_t kRandomStateSize = 16;

constexpr unsigned char kInternalPoison = 0xFF;

// Streams that a graph replays on at a time. Each costs an executable: some 10 KB per node.
constexpr size_t kMostStreams = 8;

at::Generator generator_of(const RandomSource& source, PyObject* arguments, c10::Device device,
                           const std::optional<at::Generator>& default_generator) {
  if (source.argument == RandomSource::kDefaultGenerator) {
    return default_generator ? *default_generator : at::globalContext().defaultGenerator(device);
  }
  return unpack_generator(PyList_GET_ITEM(arguments, source.argument));
}

}  // namespace

// What one replay works with.
struct CapturedGraph::Launch {
  CallStream stream;
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
                             std::vector<at::Tensor> held, std::optional<FftPlans> fft_plans)
    : driver_(driver),
      device_(device),
      arguments_(std::move(arguments)),
      outputs_(std::move(outputs)),
      random_(std::move(random)),
      held_(std::move(held)),
      fft_plans_(fft_plans),
      switches_(current_switches()),
      slots_(driver, kMostStreams) {
  replicas_.reserve(kMostStreams);  // the first one is read without the lock
  auto& first = replicas_.emplace_back(std::make_unique<Replica>());
  first->executable =
      std::make_unique<ExecutableGraph>(driver, std::move(graph), std::move(linked));
  plan_donations();
  plan_allocations();
  const auto& states = executable().linked().recording.random;
  draws_ = std::ranges::any_of(states, [](const RandomState& s) { return s.increment > 0; });
}

CapturedGraph::~CapturedGraph() {
  const WithoutPythonLock unlocked;  // the driver may wait for the device
  for (const auto& replica : replicas_) replica->release();
  replicas_.clear();
}

void CapturedGraph::Replica::reserve(uint64_t bytes) {
  if (bytes <= reserved) return;
  workspace->reserve(bytes);
  if (reserved > 0) workspace->release(reserved);
  reserved = bytes;
}

void CapturedGraph::Replica::release() noexcept {
  if (reserved > 0) workspace->release(reserved);
  reserved = 0;
}

CallStream CapturedGraph::call_stream() const {
  // A thread that has used nothing of the device yet has no context: PyTorch does not make one
  // current where a guard names the device that is the thread's by default.
  CUcontext context = nullptr;
  PYGRAPH_CHECK(driver_, context_get_current(&context));
  if (context == nullptr) PYGRAPH_CHECK(driver_, context_set_current(executable().context()));
  // PyTorch's numbers of streams: 0 is the default stream, odd ones are those that it keeps for
  // good, others are handles of streams that the program made (c10/cuda/CUDAStream.cpp).
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::StreamId id = guard.getStream(device_).id();
  return {torch_cuda::current_stream(device_.index()), id == 0 || id % 2 != 0};
}

// A copy of the first one, which no stream has used.
std::unique_ptr<CapturedGraph::Replica> CapturedGraph::new_replica() const {
  auto replica = std::make_unique<Replica>();
  replica->executable = executable().copy();
  return replica;
}

CapturedGraph::Replica& CapturedGraph::replica_for(CallStream stream, size_t& slot) {
  const auto choice = slots_.choose(stream);
  if (!choice) {
    ++calls_elsewhere;
    throw StreamNotReady("replays on other streams are not known to be complete");
  }
  slot = choice->slot;
  if (slot == replicas_.size()) {
    try {
      replicas_.push_back(new_replica());
    } catch (const DriverError& error) {
      slots_.drop_last();
      slots_.limit();
      if (error.sticky()) throw;
      ++calls_elsewhere;
      throw StreamNotReady(error.what());
    }
  }
  Replica& replica = *replicas_[slot];
  if (choice->has_moved || replica.workspace == nullptr) {
    // In the order of the stream that they were used on until now.
    replica.release();
    replica.random_memory.clear();
    replica.workspace = Workspace::of_stream(device_.index(), choice->stream_id);
  }
  if (draws_ && !replica.random_memory) {
    const uint64_t bytes = linked().recording.random.size() * kRandomStateSize;
    replica.random_memory = c10::GetAllocator(device_.type())->allocate(bytes);
  }
  return replica;
}

void CapturedGraph::release_workspace() noexcept {
  const WithoutPythonLock unlocked;
  const std::lock_guard lock(mutex_);
  for (const auto& replica : replicas_) replica->release();
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

void CapturedGraph::settle_workspace() {
  const c10::OptionalDeviceGuard guard(device_);
  const CallStream stream = call_stream();
  const WithoutPythonLock unlocked;
  std::shared_ptr<Workspace> workspace;
  {
    const std::lock_guard lock(mutex_);
    size_t slot = 0;
    Replica& replica = replica_for(stream, slot);
    const uint64_t bytes = workspace_needed(!donations_.empty());
    replica.reserve(bytes);
    workspace = replica.workspace;
    const std::lock_guard entered(workspace->mutex());
    workspace->enter(bytes);
  }
  workspace->settle();
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
  const std::vector<const OutputBuffer*> slots = output_slots(outputs_);
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

std::vector<int> CapturedGraph::random_arguments() const {
  std::vector<int> arguments;
  if (!draws_) return arguments;
  arguments.reserve(random_.size());
  for (const RandomSource& source : random_) arguments.push_back(source.argument);
  return arguments;
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

uint64_t CapturedGraph::output_bytes() const {
  return std::accumulate(outputs_.block_bytes.begin(), outputs_.block_bytes.end(), uint64_t{0});
}

bool CapturedGraph::matches(PyObject* arguments, const Switches& switches) const {
  return switches == switches_ && bindings::matches(arguments_, arguments, device_);
}

void CapturedGraph::collect_input_addresses(PyObject* arguments,
                                            std::vector<uint64_t>& addresses) const {
  for (const uint32_t position : slot_arguments_) {
    const at::Tensor& tensor = unpack_tensor(PyList_GET_ITEM(arguments, position));
    addresses.push_back(reinterpret_cast<uint64_t>(tensor.mutable_data_ptr()));
  }
}

// A block that was allocated on another stream goes back to that stream's free ones: not before
// this stream is done with it. (PyTorch does nothing where that is the same stream.)
void CapturedGraph::take_donated(Launch& launch, PyObject* arguments, Donations& donations) const {
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::Stream stream = guard.getStream(device_);
  for (const GivenAway& tensors : donations_) {
    PyObject* first = PyList_GET_ITEM(arguments, tensors.positions.front());
    guard.recordDataPtrOnStream(unpack_tensor(first).storage().data_ptr(), stream);
  }
  for (size_t i = 0; i < donors_.size(); ++i) {
    if (donors_[i] == kNoArgument) continue;
    launch.outputs[i] = c10::Storage(c10::Storage::use_byte_size_t(), outputs_.block_bytes[i],
                                     donations.take(PyList_GET_ITEM(arguments, donors_[i])),
                                     c10::GetAllocator(device_.type()), /*resizable=*/true);
    donations.given_to(launch.outputs[i]);
  }
}

void CapturedGraph::allocate(Launch& launch) const {
  static c10::Allocator* allocator = c10::GetAllocator(device_.type());
  for (const auto& [bytes, is_output, index] : allocations_) {
    if (!is_output) {
      launch.regions[index] = allocator->allocate(bytes);
    } else if (!launch.outputs[index]) {
      launch.outputs[index] =
          c10::Storage(c10::Storage::use_byte_size_t(), outputs_.block_bytes[index],
                       allocator->allocate(bytes), allocator, /*resizable=*/true);
    }
  }
  for (const OutputBuffer& buffer : outputs_.buffers) {
    if (buffer.bytes == 0) continue;
    const auto block = reinterpret_cast<uint64_t>(launch.outputs[buffer.block].mutable_data());
    launch.addresses.push_back(block + buffer.offset);
  }
}

void CapturedGraph::place_internal_memory(Launch& launch, const Replica& replica,
                                          uint64_t workspace) const {
  const size_t workspace_slot = executable().workspace_slot();
  launch.addresses[workspace_slot] = workspace;
  for (size_t i = 0; i < launch.positions.size(); ++i) {
    launch.addresses[workspace_slot + 1 + i] =
        reinterpret_cast<uint64_t>(replica.random_memory.get()) + i * kRandomStateSize;
  }
  for (size_t i = 0; i < linked().regions.size(); ++i) {
    const Region& region = linked().regions[i];
    uint64_t& address = launch.addresses[executable().region_slot() + i];
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
  const CUstream stream = launch.stream.handle;
  // Before the driver is given kernels that may be gone.
  std::shared_lock<std::shared_mutex> plans;
  if (fft_plans_) plans = fft_plans_->check();
  const std::lock_guard lock(mutex_);
  size_t slot = 0;
  Replica& replica = replica_for(launch.stream, slot);
  const uint64_t needed = workspace_needed(launch.donated);
  replica.reserve(needed);
  const std::lock_guard entered(replica.workspace->mutex());
  const uint64_t workspace = needed > 0 ? replica.workspace->enter(needed) : 0;
  place_internal_memory(launch, replica, workspace);
  ExecutableGraph& executable = *replica.executable;
  nodes_touched += executable.bind(launch.addresses);
  if (draws_) {
    // From pageable memory: the driver has copied the bytes when the call returns.
    PYGRAPH_CHECK(driver_,
                  copy_to_device_async(reinterpret_cast<uint64_t>(replica.random_memory.get()),
                                       launch.positions.data(),
                                       launch.positions.size() * kRandomStateSize, stream));
  }
  if (launch.poison >= 0) {
    poison_outputs(launch);
    poison_internal_memory(launch, workspace, needed);
  }
  executable.launch(stream);
  slots_.launched(slot, stream);
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
    PYGRAPH_CHECK(driver_, memset_d8_async(address, value, block.nbytes(), launch.stream.handle));
  }
}

void CapturedGraph::poison_internal_memory(const Launch& launch, uint64_t workspace,
                                           uint64_t size) const {
  const auto fill = [&](uint64_t address, uint64_t bytes) {
    if (bytes == 0) return;
    PYGRAPH_CHECK(driver_, memset_d8_async(address, kInternalPoison, bytes, launch.stream.handle));
  };
  fill(workspace, size);
  for (size_t i = 0; i < launch.regions.size(); ++i) {
    if (!launch.regions[i]) continue;
    fill(reinterpret_cast<uint64_t>(launch.regions[i].get()), linked().regions[i].size);
  }
}

std::vector<at::Generator> CapturedGraph::generators(
    PyObject* arguments, const std::optional<at::Generator>& default_generator) const {
  std::vector<at::Generator> generators;
  if (!draws_) return generators;
  for (const RandomSource& source : random_) {
    generators.push_back(generator_of(source, arguments, device_, default_generator));
  }
  return generators;
}

PyObject* CapturedGraph::replay(PyObject* arguments, Py_ssize_t holders, int poison,
                                const std::optional<at::Generator>& generator) {
  at::RecordFunction range(at::RecordScope::USER_SCOPE);  // costs nothing unless somebody profiles
  if (range.isActive()) range.before(name);
  const c10::OptionalDeviceGuard guard(device_);
  Launch launch;
  launch.stream = call_stream();
  // Memory cannot wait for a stream that may be destroyed before.
  launch.donated = launch.stream.is_permanent && gives_away(arguments, holders);
  const bool may_keep = holders == 0 && poison >= 0;  // asked for, by verification
  if (!launch.donated && !donations_.empty() && !may_keep) {
    throw NotGivenAway("somebody holds an argument whose memory the graph was to use");
  }
  launch.poison = poison;
  launch.addresses.reserve(executable().slot_count());
  collect_input_addresses(arguments, launch.addresses);
  launch.outputs.resize(outputs_.block_bytes.size());
  launch.regions.resize(linked().regions.size());
  launch.generators = generators(arguments, generator);
  Donations donations;  // given back if anything below throws
  if (launch.donated) take_donated(launch, arguments, donations);
  {
    const WithoutPythonLock unlocked;
    allocate(launch);
    launch.addresses.resize(executable().slot_count());
    const auto& states = linked().recording.random;
    for (size_t i = 0; i < launch.generators.size(); ++i) {
      launch.positions.push_back(reserve_random(launch.generators[i], states[i].increment));
    }
    try {
      bind_and_launch(launch);
    } catch (...) {
      for (size_t i = 0; i < launch.positions.size(); ++i) {
        unreserve_random(launch.generators[i], launch.positions[i], states[i].increment);
      }
      throw;
    }
    launch.regions.clear();  // reused in stream order
  }
  donations.keep();
  if (without_room_ > 0) --without_room_;
  return build_outputs(outputs_, launch.outputs, arguments);
}

}  // namespace pygraph::bindings
