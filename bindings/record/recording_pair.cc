#include "record/recording_pair.h"

#include <pthread.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <set>

#include "pygraph/written_inputs.h"
#include "torch_private/philox.h"
#include "without_python_lock.h"

namespace pygraph::bindings {
namespace {

// Internal memory for allocations of this size is taken from PyTorch's allocator for each launch
// and given back at once, so that others can use it between launches. Smaller ones stay in the
// workspace: memory that moves between calls costs host time for every node that uses it.
constexpr uint64_t kLargeBlock = uint64_t{64} << 20;

// Of all recordings of the process.
std::vector<Range>& kept_stand_ins() {
  static auto* kept = new std::vector<Range>;
  return *kept;
}

constexpr size_t kScrubbedStack = size_t{512} << 10;
// Left alone at the end of a thread's stack: for the loop itself, and pages that must not be
// touched.
constexpr size_t kStackReserve = size_t{64} << 10;

// Bytes of this thread's stack below the caller's frame; 0 where the system does not say.
size_t stack_left() {
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return 0;
  void* lowest = nullptr;
  size_t size = 0;
  const int status = pthread_attr_getstack(&attributes, &lowest, &size);
  pthread_attr_destroy(&attributes);
  const auto here = reinterpret_cast<uint64_t>(__builtin_frame_address(0));
  const auto end = reinterpret_cast<uint64_t>(lowest);
  return status == 0 && here > end ? here - end : 0;
}

// Zeroes the stack below the caller, where the recorded code will run. Kernels whose parameters are
// large structs (lists of tensors) are launched with whatever the stack held in the unused part;
// without this, that is addresses from before the recording, which nothing could explain.
__attribute__((noinline)) void scrub_stack() {
  const size_t left = stack_left();
  if (left <= kStackReserve) return;
  const size_t bytes = std::min(kScrubbedStack, left - kStackReserve);
  auto* garbage = static_cast<volatile uint64_t*>(__builtin_alloca(bytes));
  for (size_t i = bytes / sizeof(uint64_t); i-- > 0;) garbage[i] = 0;  // downwards, as it grows
}

}  // namespace

RecordingPair::RecordingPair(const Driver& driver, PyObject* arguments, c10::Device device,
                             uint64_t capacity)
    : driver_(driver),
      device_(device),
      arguments_(describe_arguments(arguments, device)),
      original_(nullptr),
      fft_plans_(device.index()) {
  check_supported(arguments_);
  struct Owned {  // until nothing can throw any more
    PyObject* list;
    ~Owned() { Py_XDECREF(list); }
  } original{PyList_GetSlice(arguments, 0, PyList_GET_SIZE(arguments))};
  {
    const WithoutPythonLock unlocked;  // the driver may wait for another thread's call
    for (int i = 0; i < 2; ++i) {
      spaces_[i] =
          std::make_unique<AddressSpace>(driver, device.index(), capacity, AddressSpace::kGaps[i]);
    }
  }
  original_ = std::exchange(original.list, nullptr);
}

RecordingPair::~RecordingPair() {
  operator_log_.reset();
  scope_.reset();
  workspaces_.reset();
  for (PyObject* list : stand_ins_) Py_XDECREF(list);
  Py_XDECREF(original_);
  const WithoutPythonLock unlocked;  // the driver may wait for the device
  for (auto& space : spaces_) space.reset();
}

PyObject* RecordingPair::stand_ins(int index) {
  PyObject* list = PyList_New(PyList_GET_SIZE(original_));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(original_); ++i) {
    PyObject* real = PyList_GET_ITEM(original_, i);
    if (!arguments_[i].is_relocated()) {
      PyList_SET_ITEM(list, i, Py_NewRef(real));
      continue;
    }
    at::Tensor stand_in = make_stand_in(arguments_[i], unpack_tensor(real), *spaces_[index]);
    inputs_[index].push_back(
        {reinterpret_cast<uint64_t>(stand_in.mutable_data_ptr()), arguments_[i].extent});
    PyList_SET_ITEM(list, i, THPVariable_Wrap(std::move(stand_in)));
  }
  stand_ins_[index] = PyList_GetSlice(list, 0, PyList_GET_SIZE(list));
  if (index == 1) Py_CLEAR(original_);  // the user's tensors are not kept longer than needed
  return list;
}

void RecordingPair::begin(int index, CUstream stream) {
  current_ = index;
  workspaces_.emplace(spaces_[index]->range());
  scrub_stack();
  scope_.emplace(driver_, stream, *spaces_[index]);
  operator_log_.emplace(driver_, stream, spaces_[index]->range());
}

void RecordingPair::end() {
  if (operator_log_) {
    operators_ = operator_log_->take();
    uses_fft_plans_ |= operators_.uses_fft_plans;
    scratch_ = workspaces_->stand_ins();
    logs_[current_] = scope_->log();
  }
  operator_log_.reset();
  scope_.reset();
  workspaces_.reset();
}

void RecordingPair::finish(int index, CUgraph graph, PyObject* returned,
                           std::vector<RandomSource> random,
                           const std::unordered_map<uint64_t, ParameterAccess>& kernels) {
  Recording& recording = recordings_[index];
  recording = read_graph(driver_, graph);
  recording.allocations = logs_[index].allocations();
  recording.inputs = inputs_[index];
  recording.address_space = spaces_[index]->range();
  recording.scratch = scratch_;
  declare_accesses(recording, std::move(operators_), kernels);
  outputs_[index].emplace(plan_outputs(returned, stand_ins_[index], spaces_[index]->range()));
  for (const OutputBuffer* buffer : output_slots(*outputs_[index])) {
    recording.outputs.push_back(buffer->address);
  }
  random_ = std::move(random);
  if (index == 1) {
    // PyTorch's graph object, and with it the pool of stand-in addresses, can go.
    CUgraph clone = nullptr;
    PYGRAPH_CHECK(driver_, graph_clone(&clone, graph));
    graph_ = Graph(driver_, clone);
    retarget_nodes(driver_, recording, clone);
  }
  const std::vector<CUgraphNode> sentinels = take_random_sentinels(recording, random_.size());
  if (index == 1) {
    for (CUgraphNode node : sentinels) PYGRAPH_CHECK(driver_, graph_destroy_node(node));
  }
}

bool RecordingPair::is_recorded(const at::Tensor& tensor) const {
  const auto address = reinterpret_cast<uint64_t>(tensor.storage().data());
  return spaces_[current_]->range().contains(address);
}

std::vector<uint32_t> RecordingPair::may_write() const {
  std::vector<uint32_t> relocated;  // positions, by slot
  for (uint32_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].is_relocated()) relocated.push_back(i);
  }
  std::set<uint32_t> positions;
  for (const Recording& recording : recordings_) {
    for (const uint32_t slot : written_inputs(recording)) positions.insert(relocated.at(slot));
  }
  return {positions.begin(), positions.end()};
}

std::vector<uint32_t> RecordingPair::returned() const {
  std::set<uint32_t> positions;
  for (const std::optional<OutputPlan>& plan : outputs_) {
    if (!plan) continue;
    for (const Output& output : plan->outputs) {
      const bool is_argument =
          output.kind == OutputKind::kArgument || output.kind == OutputKind::kView;
      if (is_argument) positions.insert(output.source);
    }
  }
  return {positions.begin(), positions.end()};
}

void RecordingPair::surround(std::vector<at::Tensor> held,
                             std::function<std::vector<Range>()> cached) {
  held_ = std::move(held);
  cached_ = std::move(cached);
}

std::string RecordingPair::keep(int index, const std::vector<Range>& pieces) {
  // Never destroyed: who holds the memory may do so until the process ends.
  static auto* spaces = new std::vector<std::unique_ptr<AddressSpace>>;
  kept_stand_ins().insert(kept_stand_ins().end(), pieces.begin(), pieces.end());
  if (spaces_[index] != nullptr) {
    spaces->push_back(std::move(spaces_[index]));
    AddressSpace& space = *spaces->back();
    const WithoutPythonLock unlocked;  // the driver may wait for the device
    space.keep(pieces);
  }
  return pieces.empty() ? "" : allocator_of(index, pieces.front());
}

// An operator that is not PyTorch's own, if one of several may be it.
std::string RecordingPair::allocator_of(int index, const Range& piece) const {
  const Operator* found = nullptr;
  for (const Allocation& allocation : logs_[index].allocations()) {
    if (allocation.address != piece.address || allocation.last != Allocation::kNever) continue;
    for (const Operator& op : recordings_[index].operators) {
      const bool is_there = op.first <= allocation.first && allocation.first <= op.last;
      if (is_there && (found == nullptr || op.is_foreign)) found = &op;
    }
  }
  return found == nullptr ? "the function" : "operator " + found->name;
}

Surroundings RecordingPair::surroundings() const {
  Surroundings around{.kept_stand_ins = kept_stand_ins(), .cached = cached_};
  const auto is_pinned = [](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.is_pinned();
  };
  for (const at::Tensor& tensor : held_) {
    if (!tensor.is_cuda() && !is_pinned(tensor)) continue;
    const c10::Storage& storage = tensor.storage();
    around.held.push_back({reinterpret_cast<uint64_t>(storage.data()), storage.nbytes()});
  }
  return around;
}

void RecordingPair::poison() {
  for (const auto& space : spaces_) space->poison();
}

bool RecordingPair::untouched() {
  return spaces_[0]->untouched() && spaces_[1]->untouched();
}

std::vector<DonatedInput> RecordingPair::donated_inputs(
    const std::vector<GivenAway>& given_away) const {
  constexpr uint32_t kNone = ~uint32_t{0};
  std::vector<uint32_t> slots(arguments_.size(), kNone);  // by position
  uint32_t count = 0;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].is_relocated()) slots[i] = count++;
  }
  for (const Output& output : outputs_[1]->outputs) {  // the user gets what an output refers to
    const bool is_argument =
        output.kind == OutputKind::kArgument || output.kind == OutputKind::kView;
    if (is_argument) slots[output.source] = kNone;
  }
  std::vector<DonatedInput> inputs;
  for (const GivenAway& tensors : given_away) {
    DonatedInput input{.size = tensors.bytes};
    for (const uint32_t position : tensors.positions) input.views.push_back(slots.at(position));
    if (std::ranges::find(input.views, kNone) != input.views.end()) continue;
    input.slot = input.views.front();
    input.views.erase(input.views.begin());
    inputs.push_back(std::move(input));
  }
  return inputs;
}

std::shared_ptr<CapturedGraph> RecordingPair::link(const std::vector<uint32_t>& sharing,
                                                   const std::vector<GivenAway>& given_away,
                                                   uint32_t lanes) {
  outputs_[0]->check_equal(*outputs_[1]);
  OutputPlan outputs = *outputs_[1];
  share_blocks(outputs, sharing);
  const MemoryOptions memory{.donated = donated_inputs(given_away),
                             .sharing = sharing_slots(outputs, sharing),
                             .smallest_block = kLargeBlock};
  LinkedGraph linked =
      pygraph::link(driver_, recordings_[0], recordings_[1], memory, lanes, surroundings());
  take_over_donors(outputs, linked.donors);
  CUgraph clone = nullptr;
  PYGRAPH_CHECK(driver_, graph_clone(&clone, graph_.get()));
  Graph graph(driver_, clone);
  retarget_nodes(driver_, linked.recording, clone);
  if (linked.lanes > 1) set_edges(driver_, clone, linked.recording);
  return std::make_shared<CapturedGraph>(
      driver_, device_, arguments_, std::move(outputs), random_, std::move(graph),
      std::move(linked), held_, uses_fft_plans_ ? std::optional(fft_plans_) : std::nullopt);
}

}  // namespace pygraph::bindings
