#include "replay/captured_graph.h"

#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <new>
#include <utility>

#include "replay/profiles.h"
#include "replay/replay_clocks.h"
#include "tensors/saved_blocks.h"
#include "torch_private/torch_cuda.h"
#include "without_python_lock.h"

namespace pygraph::bindings {
namespace {

// Streams that a graph replays on at a time. Each costs an executable: some 10 KB per node.
constexpr size_t kMostStreams = 8;

// Keeps what a value has from being destroyed.
template <typename Value>
void leak(Value& value) noexcept {
  try {
    static_cast<void>(new Value(std::move(value)));
  } catch (const std::bad_alloc&) {
    // Then it is destroyed.
  }
}

thread_local int t_entered = 0;  // graphs whose lock this thread has

}  // namespace

CapturedGraph::Entered::Entered(CapturedGraph& graph) : lock_(graph.mutex_) {
  ++t_entered;
}

CapturedGraph::Entered::~Entered() {
  --t_entered;
}

bool CapturedGraph::is_entered() {
  return t_entered > 0;
}

CapturedGraph::CapturedGraph(const Driver& driver, c10::Device device,
                             std::vector<Argument> arguments, OutputPlan outputs,
                             std::vector<int> random, Graph graph, LinkedGraph linked,
                             std::vector<at::Tensor> held, std::optional<FftPlans> fft_plans)
    : driver_(driver),
      device_(device),
      arguments_(std::move(arguments)),
      outputs_(std::move(outputs)),
      held_(std::move(held)),
      fft_plans_(fft_plans),
      switches_(current_switches()),
      held_blocks_(device),
      slots_(driver, kMostStreams),
      replicas_(first_replica(driver, std::move(graph), std::move(linked))),
      plan_(arguments_, outputs_, executable(), device),
      random_(std::move(random), this->linked().recording.random) {}

std::vector<std::unique_ptr<CapturedGraph::Replica>> CapturedGraph::first_replica(
    const Driver& driver, Graph graph, LinkedGraph linked) {
  std::vector<std::unique_ptr<Replica>> replicas;
  replicas.reserve(kMostStreams);  // the first one is read without the lock
  auto& first = replicas.emplace_back(std::make_unique<Replica>());
  first->executable =
      std::make_unique<ExecutableGraph>(driver, std::move(graph), std::move(linked));
  return replicas;
}

CapturedGraph::~CapturedGraph() {
  if (!process_.is_here()) {
    // The parent's: not even tensors can be freed, as another thread of the parent may have had the
    // allocator's lock, or the driver's.
    for (auto& replica : replicas_) static_cast<void>(replica.release());
    leak(held_);
    leak(slots_);
    return;
  }
  const WithoutPythonLock unlocked;  // the driver may wait for the device
  for (const auto& replica : replicas_) replica->release();
  replicas_.clear();
}

void CapturedGraph::Replica::reserve(Workspace::Share needed) {
  if (share.generation != workspace->generation()) share.with_blocks = 0;
  Workspace::Share wanted = {.bytes = std::max(share.bytes, needed.bytes),
                             .with_blocks = std::max(share.with_blocks, needed.with_blocks)};
  if (wanted.bytes == share.bytes && wanted.with_blocks == share.with_blocks) return;
  workspace->reserve(wanted);
  workspace->release(share);
  share = wanted;
}

void CapturedGraph::Replica::release() noexcept {
  if (workspace != nullptr) workspace->release(share);
  share = {};
}

void CapturedGraph::Replica::release_blocks() noexcept {
  if (share.with_blocks == 0) return;
  workspace->release({.with_blocks = share.with_blocks, .generation = share.generation});
  share.with_blocks = 0;
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
  const std::shared_lock<std::shared_mutex> plans = check_fft_plans();
  auto replica = std::make_unique<Replica>();
  replica->executable = executable().copy();
  return replica;
}

// Before the driver is given kernels that may be gone. Not to be held while memory is allocated:
// the allocator may run code that drops plans.
std::shared_lock<std::shared_mutex> CapturedGraph::check_fft_plans() const {
  return fft_plans_ ? fft_plans_->check() : std::shared_lock<std::shared_mutex>();
}

CapturedGraph::Replica& CapturedGraph::replica_for(CallStream stream, size_t& slot) {
  if (has_failed_) throw StreamNotReady("the graph has failed");
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
    } catch (...) {
      slots_.drop_last();
      throw;
    }
  }
  Replica& replica = *replicas_[slot];
  if (choice->has_moved || replica.workspace == nullptr) {
    // In the order of the stream that they were used on until now.
    replica.release();
    replica.random_memory.clear();
    replica.workspace = Workspace::of_stream(device_.index(), choice->stream_id);
  }
  if (random_.are_drawn() && !replica.random_memory) {
    replica.random_memory = c10::GetAllocator(device_.type())->allocate(random_.state_bytes());
  }
  return replica;
}

void CapturedGraph::release_workspace() noexcept {
  if (is_entered()) return;
  const WithoutPythonLock unlocked;
  const Entered entered(*this);
  for (const auto& replica : replicas_) replica->release();
}

Workspace::Share CapturedGraph::share_of(const Launch& launch) const {
  const uint64_t with_blocks = plan_.workspace_needed(launch.donated, true);
  return {.bytes = plan_.workspace_needed(launch.donated, false),
          .with_blocks = launch.holds_blocks ? with_blocks : 0};
}

void CapturedGraph::release_blocks() noexcept {
  for (const auto& replica : replicas_) replica->release_blocks();
}

void CapturedGraph::release_dropped_blocks() {
  if (held_blocks_.are_held()) return;
  const Entered entered(*this);
  release_blocks();
}

void CapturedGraph::note_no_room() {
  release_workspace();
  HeldBlocks::drop_all(device_);
  if (back_off_.note_no_room()) failure = "its replays ran out of memory";
}

void CapturedGraph::fail(std::string reason) {
  failure = std::move(reason);
  held_blocks_.end();
  {
    const WithoutPythonLock unlocked;
    const Entered entered(*this);
    has_failed_ = true;  // for launches of other threads, which wait for the lock
  }
  release_workspace();
}

bool CapturedGraph::is_out_of_use() {
  if (failure.empty()) return false;
  if (back_off_.note_uncaptured_call()) failure.clear();
  return true;
}

void CapturedGraph::defragment_workspace() {
  const c10::OptionalDeviceGuard guard(device_);
  const CallStream stream = call_stream();
  const WithoutPythonLock unlocked;
  try {
    place_workspace(stream);
  } catch (const c10::OutOfMemoryError&) {
    HeldBlocks::drop_all(device_);  // this graph's, or others' in the same workspace
    release_dropped_blocks();
    place_workspace(stream);
  }
  release_dropped_blocks();
}

void CapturedGraph::place_workspace(CallStream stream) {
  std::shared_ptr<Workspace> workspace;
  {
    const Entered entered(*this);
    size_t slot = 0;
    Replica& replica = replica_for(stream, slot);
    Launch launch;
    launch.donated = plan_.may_donate();
    launch.holds_blocks = held_blocks_.are_held(stream);
    replica.reserve(share_of(launch));
    workspace = replica.workspace;
    workspace->acquire(plan_.workspace_needed(launch.donated, launch.holds_blocks));
  }
  workspace->defragment();
}

void CapturedGraph::hold_blocks(uint64_t most, uint64_t most_reserved) {
  const c10::OptionalDeviceGuard guard(device_);
  const CallStream stream = call_stream();
  if (!stream.is_permanent) return;
  const WithoutPythonLock unlocked;
  const Entered entered(*this);
  release_blocks();  // of an earlier selection
  held_blocks_.begin(stream, plan_.block_bytes(), most, most_reserved);
}

uint64_t CapturedGraph::workspace_bytes() const {
  const bool holds_blocks = held_blocks_.are_held();
  return holds_blocks ? plan_.workspace_needed(plan_.may_donate(), true) : linked().workspace_size;
}

bool CapturedGraph::matches(PyObject* arguments, const Switches& switches, Positions known) const {
  return switches == switches_ && bindings::matches(arguments_, arguments, device_, known);
}

void CapturedGraph::join_saved(PyObject* outputs) const {
  copy_into_blocks(driver_, outputs_, outputs, device_);
}

void CapturedGraph::bind_and_launch(Launch& launch, const std::vector<PhiloxPosition>& positions) {
  const CUstream stream = launch.stream.handle;
  const Entered entered(*this);
  if (!launch.holds_blocks) release_blocks();
  size_t slot = 0;
  Replica& replica = replica_for(launch.stream, slot);
  const uint64_t needed = plan_.workspace_needed(launch.donated, launch.holds_blocks);
  replica.reserve(share_of(launch));
  const auto [workspace, lock] = replica.workspace->acquire(needed);
  const auto random_memory = reinterpret_cast<uint64_t>(replica.random_memory.get());
  plan_.place_internal_memory(launch, workspace, random_memory);
  const std::shared_lock<std::shared_mutex> plans = check_fft_plans();
  ExecutableGraph& executable = *replica.executable;
  if (executable.was_launched() && needs_new_executable()) executable.drop();
  ReplayClocks::end(ReplayPart::kPlace);
  nodes_touched += executable.bind(launch.addresses);
  ReplayClocks::end(ReplayPart::kBind);
  if (random_.are_drawn()) {
    // From pageable memory: the driver has copied the bytes when the call returns.
    PYGRAPH_CHECK(driver_, copy_to_device_async(random_memory, positions.data(),
                                                random_.state_bytes(), stream));
  }
  if (launch.poison >= 0) {
    plan_.poison_outputs(driver_, launch);
    plan_.poison_internal_memory(driver_, launch, workspace, needed);
  }
  executable.launch(stream);
  ReplayClocks::end(ReplayPart::kLaunch);
  slots_.launched(slot, stream);
  ++replays;
  if (launch.donated) ++donated_replays;
}

// Memory cannot wait for a stream that may be destroyed before.
bool CapturedGraph::gives_away(CallStream stream, PyObject* arguments, Py_ssize_t holders) const {
  return stream.is_permanent && plan_.gives_away(arguments, holders);
}

bool CapturedGraph::gives_away(PyObject* arguments, Py_ssize_t holders) const {
  const c10::OptionalDeviceGuard guard(device_);
  return gives_away(call_stream(), arguments, holders);
}

PyObject* CapturedGraph::replay(PyObject* arguments, Py_ssize_t holders, int poison,
                                const std::optional<at::Generator>& generator,
                                const GradientOwners& gradients, const OwnInputs* own) {
  at::RecordFunction range(at::RecordScope::USER_SCOPE);  // costs nothing unless somebody profiles
  if (range.isActive()) range.before(name);
  const c10::OptionalDeviceGuard guard(device_);
  Launch launch;
  launch.stream = call_stream();
  launch.donated = gives_away(launch.stream, arguments, holders);
  const bool may_keep = holders == 0 && poison >= 0;  // asked for, by verification
  if (!launch.donated && plan_.may_donate() && !may_keep) {
    throw NotGivenAway("somebody holds an argument whose memory the graph was to use");
  }
  launch.poison = poison;
  ReplayClocks::end(ReplayPart::kStream);
  launch.addresses.reserve(executable().slot_count());
  plan_.collect_input_addresses(arguments, own, launch.addresses);
  launch.outputs.resize(outputs_.block_bytes.size());
  launch.holds_blocks = held_blocks_.are_held(launch.stream);
  launch.regions.resize(linked().regions.size());
  const std::vector<at::Generator> generators = random_.generators(arguments, device_, generator);
  Donations donations;  // given back if anything below throws
  if (launch.donated) plan_.take_donated(launch, arguments, donations);
  TakenGradients taken;
  if (gradients.tensors != nullptr) left_gradients_.take(gradients, outputs_, launch, taken);
  ReplayClocks::end(ReplayPart::kAddresses);
  {
    const WithoutPythonLock unlocked;
    plan_.allocate(launch);
    launch.addresses.resize(executable().slot_count());
    ReplayClocks::end(ReplayPart::kAllocate);
    const std::vector<PhiloxPosition> positions = random_.reserve(generators);
    try {
      bind_and_launch(launch, positions);
    } catch (...) {
      random_.unreserve(generators, positions);
      throw;
    }
    launch.regions.clear();  // reused in stream order
    if (launch.holds_blocks) {
      held_blocks_.note_launch();
      release_dropped_blocks();
    }
  }
  donations.commit();
  back_off_.note_replay();
  std::vector<PyObject*> instead;
  if (gradients.tensors != nullptr) {
    instead = left_gradients_.leave(gradients, outputs_, launch, taken);
  }
  PyObject* outputs = build_outputs(outputs_, launch.outputs, arguments, instead);
  ReplayClocks::end(ReplayPart::kOutputs);
  return outputs;
}

}  // namespace pygraph::bindings
