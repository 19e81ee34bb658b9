#include "record/recording_pair.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <set>

#include "conversions.h"
#include "pygraph/join_saved.h"
#include "pygraph/written_inputs.h"
#include "record/scrub_stack.h"
#include "record/table_log.h"
#include "tensors/followed_number.h"
#include "tensors/saved_blocks.h"
#include "torch_private/philox.h"
#include "without_python_lock.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

// Internal memory for allocations of this size is taken from PyTorch's allocator for each launch
// and given back at once, so that others can use it between launches. Smaller ones stay in the
// workspace: memory that moves between calls costs host time for every node that uses it.
//
// cuBLAS's workspace has 32 MiB on an H200. As a block it takes a segment of its own, beside the
// one of 20 MiB in which the few MiB that are left of the workspace lie alone. So it is a block
// only in the forwards and backwards of a training program: what one gives back, the other uses.
constexpr uint64_t kLargeBlock = uint64_t{33} << 20;
constexpr uint64_t kLargeBlockInTraining = uint64_t{32} << 20;
// Such memory may lie in an output, if that is not much smaller. (Outputs that share a block are.)
static_assert(kLargestJoinedBlock * 3 / 2 < kLargeBlockInTraining);

py::list copy_of(const py::handle& list) {
  return py::reinterpret_steal<py::list>(PyList_GetSlice(list.ptr(), 0, PY_SSIZE_T_MAX));
}

// Of all recordings of the process.
std::vector<Range>& retained_stand_ins() {
  static auto* kept = new std::vector<Range>;
  return *kept;
}

}  // namespace

RecordingPair::RecordingPair(const Driver& driver, const py::list& arguments, c10::Device device,
                             uint64_t capacity)
    : driver_(driver),
      device_(device),
      arguments_(describe_arguments(arguments.ptr(), device)),
      original_(copy_of(arguments)),
      fft_plans_(device.index()) {
  check_supported(arguments_);
  const WithoutPythonLock unlocked;  // the driver may wait for another thread's call
  for (int i = 0; i < 2; ++i) {
    halves_[i].space =
        std::make_unique<AddressSpace>(driver, device.index(), capacity, AddressSpace::kGaps[i]);
  }
}

RecordingPair::~RecordingPair() {
  operator_log_.reset();
  scope_.reset();
  workspaces_.reset();
  for (Half& half : halves_) half.stand_ins = py::object();
  const WithoutPythonLock unlocked;  // the driver may wait for the device
  for (Half& half : halves_) half.space.reset();
}

py::list RecordingPair::stand_ins(int index) {
  py::list list = copy_of(original_);
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const Argument& argument = arguments_[i];
    if (!argument.is_relocated()) continue;
    PyObject* real = PyList_GET_ITEM(list.ptr(), i);
    const py::object stand_in =
        steal(argument.kind == ArgumentKind::kFollowedNumber
                  ? stand_in_for_number(i, index)
                  : THPVariable_Wrap(
                        make_stand_in(argument, unpack_tensor(real), *halves_[index].space)));
    halves_[index].inputs.push_back({address_of_argument(stand_in.ptr()), argument.extent});
    list[i] = stand_in;
  }
  halves_[index].stand_ins = copy_of(list);
  if (index == 1) original_ = py::object();  // the user's tensors are not kept longer than needed
  return list;
}

void RecordingPair::begin(int index, CUstream stream) {
  current_ = index;
  workspaces_before_.emplace(stream);
  workspaces_.emplace(stream, halves_[index].space->range());
  scrub_stack();
  scope_.emplace(driver_, stream, *halves_[index].space);
  operator_log_.emplace(driver_, device_.index(), stream, halves_[index].space->range());
}

void RecordingPair::end() {
  if (operator_log_) {
    operators_ = operator_log_->take();
    if (workspaces_->uses_other_memory()) operators_.doubt_workspaces();
    uses_fft_plans_ |= operators_.uses_fft_plans;
    scratch_ = workspaces_->stand_ins();
    halves_[current_].log = scope_->log();
    workspaces_->note_own(scope_->allocated_here());
  }
  operator_log_.reset();
  scope_.reset();
  workspaces_.reset();
}

void RecordingPair::put_back_workspaces() {
  workspaces_before_.reset();
}

void RecordingPair::finish(int index, CUgraph graph, PyObject* returned, std::vector<int> random,
                           const std::unordered_map<uint64_t, ParameterAccess>& kernels) {
  Recording& recording = halves_[index].recording;
  recording = read_graph(driver_, graph);
  recording.allocations = halves_[index].log.allocations();
  recording.inputs = halves_[index].inputs;
  recording.address_space = halves_[index].space->range();
  recording.scratch = scratch_;
  declare_accesses(recording, std::move(operators_), kernels);
  halves_[index].outputs.emplace(
      plan_outputs(returned, halves_[index].stand_ins.ptr(), halves_[index].space->range()));
  for (const OutputBuffer* buffer : output_slots(*halves_[index].outputs)) {
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
  return halves_[current_].space->range().contains(address);
}

std::vector<uint32_t> RecordingPair::may_write() const {
  std::vector<uint32_t> relocated;  // positions, by slot
  for (uint32_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].is_relocated()) relocated.push_back(i);
  }
  std::set<uint32_t> positions;
  for (const Half& half : halves_) {
    for (const uint32_t slot : written_inputs(half.recording)) positions.insert(relocated.at(slot));
  }
  return {positions.begin(), positions.end()};
}

std::vector<uint32_t> RecordingPair::returned() const {
  std::set<uint32_t> positions;
  for (const Half& half : halves_) {
    if (!half.outputs) continue;
    for (const Output& output : half.outputs->outputs) {
      const bool is_argument =
          output.kind == OutputKind::kArgument || output.kind == OutputKind::kView;
      if (is_argument) positions.insert(output.source);
    }
  }
  return {positions.begin(), positions.end()};
}

void RecordingPair::set_surroundings(std::vector<at::Tensor> held,
                                     std::function<std::vector<Range>()> cached) {
  held_ = std::move(held);
  cached_ = std::move(cached);
}

std::string RecordingPair::retain(int index, const std::vector<Range>& pieces) {
  // Never destroyed: who holds the memory may do so until the process ends.
  static auto* spaces = new std::vector<std::unique_ptr<AddressSpace>>;
  retained_stand_ins().insert(retained_stand_ins().end(), pieces.begin(), pieces.end());
  if (halves_[index].space != nullptr) {
    spaces->push_back(std::move(halves_[index].space));
    AddressSpace& space = *spaces->back();
    const WithoutPythonLock unlocked;  // the driver may wait for the device
    space.retain(pieces);
  }
  return pieces.empty() ? "" : allocator_of(index, pieces.front());
}

// An operator that is not PyTorch's own, if one of several may be it.
std::string RecordingPair::allocator_of(int index, const Range& piece) const {
  const Operator* found = nullptr;
  for (const Allocation& allocation : halves_[index].log.allocations()) {
    if (allocation.address != piece.address || allocation.last != Allocation::kNever) continue;
    for (const Operator& op : halves_[index].recording.operators) {
      const bool is_there = op.first <= allocation.first && allocation.first <= op.last;
      if (is_there && (found == nullptr || op.is_foreign)) found = &op;
    }
  }
  return found == nullptr ? "the function" : "operator " + found->name;
}

// Once, although the pair may be linked twice.
void RecordingPair::use_table_memory() {
  if (tables_) return;
  const WithoutPythonLock unlocked;  // the driver may wait for the device
  tables_ = pygraph::use_table_memory(driver_, halves_[0].recording, halves_[1].recording,
                                      table_memory(driver_, device_.index()));
}

Surroundings RecordingPair::surroundings() const {
  Surroundings around{.kept_stand_ins = retained_stand_ins(),
                      .workspaces = side_blas_workspaces(),
                      .cached = cached_};
  const auto is_pinned = [](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.is_pinned();
  };
  for (const at::Tensor& tensor : held_) {
    if (!tensor.is_cuda() && !is_pinned(tensor)) continue;
    const c10::Storage& storage = tensor.storage();
    around.held.push_back({reinterpret_cast<uint64_t>(storage.data()), storage.nbytes()});
  }
  if (tables_) around.held.insert(around.held.end(), tables_->begin(), tables_->end());
  return around;
}

void RecordingPair::poison() {
  for (const Half& half : halves_) half.space->poison();
}

bool RecordingPair::untouched() {
  // Both are looked at, so that what was written is filled again in both.
  bool is_untouched = true;
  for (const Half& half : halves_) is_untouched &= half.space->untouched();
  return is_untouched;
}

std::vector<DonatedInput> RecordingPair::donated_inputs(
    const std::vector<GivenAway>& given_away) const {
  constexpr uint32_t kNone = ~uint32_t{0};
  std::vector<uint32_t> slots(arguments_.size(), kNone);  // by position
  uint32_t count = 0;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].is_relocated()) slots[i] = count++;
  }
  for (const Output& output :
       halves_[1].outputs->outputs) {  // the user gets what an output refers to
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
                                                   const std::vector<uint64_t>& gradients,
                                                   const std::vector<GivenAway>& given_away,
                                                   uint32_t lanes) {
  halves_[0].outputs->check_equal(*halves_[1].outputs);
  use_table_memory();
  OutputPlan outputs = *halves_[1].outputs;
  share_blocks(outputs, sharing);
  join_saved_tensors(outputs, sharing, gradients);
  const MemoryOptions memory{
      .donated = donated_inputs(given_away),
      .sharing = sharing_slots(outputs, sharing),
      .smallest_block = sharing.empty() ? kLargeBlock : kLargeBlockInTraining};
  LinkedGraph linked = pygraph::link(driver_, halves_[0].recording, halves_[1].recording, memory,
                                     lanes, surroundings());
  apply_placements(outputs, linked.placements);
  CUgraph clone = nullptr;
  PYGRAPH_CHECK(driver_, graph_clone(&clone, graph_.get()));
  Graph graph(driver_, clone);
  retarget_nodes(driver_, linked.recording, clone);
  if (linked.has_new_edges) set_edges(driver_, clone, linked.recording);
  return std::make_shared<CapturedGraph>(
      driver_, device_, arguments_, std::move(outputs), random_, std::move(graph),
      std::move(linked), held_, uses_fft_plans_ ? std::optional(fft_plans_) : std::nullopt);
}

}  // namespace pygraph::bindings
