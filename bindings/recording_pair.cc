#include "recording_pair.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "philox.h"

namespace pygraph {
namespace {

// Different gaps make distances between buffers differ between the recordings, not only addresses.
constexpr std::array<uint64_t, 2> kGaps = {512, 1536};

// Internal memory for allocations of this size is taken from PyTorch's allocator for each launch
// and given back at once, so that others can use it between launches. Smaller ones stay in the
// workspace: memory that moves between calls costs host time for every node that uses it.
constexpr uint64_t kLargeBlock = uint64_t{64} << 20;

constexpr size_t kScrubbedStack = size_t{512} << 10;

// Zeroes the stack below the caller, where the recorded code will run. Kernels whose parameters are
// large structs (lists of tensors) are launched with whatever the stack held in the unused part;
// without this, that is addresses from before the recording, which nothing could explain.
__attribute__((noinline)) void scrub_stack() {
  volatile uint64_t garbage[kScrubbedStack / sizeof(uint64_t)];
  for (volatile uint64_t& word : garbage) word = 0;
}

}  // namespace

RecordingPair::RecordingPair(const Driver& driver, PyObject* arguments, c10::Device device,
                             uint64_t capacity, std::optional<CopiedForm> copied)
    : driver_(driver), device_(device), arguments_(describe_arguments(arguments, device)) {
  check_supported(arguments_);
  if (copied) {
    if (shares_memory(arguments_, arguments, copied->written)) {
      throw NotRelocatable("an argument that is written shares memory with another one");
    }
    for (const uint32_t i : copied->fixed) {
      Argument& argument = arguments_.at(i);
      if (argument.kind != ArgumentKind::kTensor) continue;
      const at::Tensor& tensor = unpack_tensor(PyList_GET_ITEM(arguments, i));
      argument.fixed_address = reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
    }
    fixed_memory_ = std::make_shared<FixedMemory>(driver);
    written_ = std::move(copied->written);
  }
  for (int i = 0; i < 2; ++i) {
    spaces_[i] = std::make_unique<AddressSpace>(driver, device.index(), capacity, kGaps[i]);
  }
  original_ = PyList_GetSlice(arguments, 0, PyList_GET_SIZE(arguments));
}

RecordingPair::~RecordingPair() {
  operator_log_.reset();
  scope_.reset();
  workspaces_.reset();
  for (PyObject* list : stand_ins_) Py_XDECREF(list);
  Py_XDECREF(original_);
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
  if (fixed_memory_) fixed_memory_->rewind();
  scope_.emplace(driver_, stream, *spaces_[index], fixed_memory_.get());
  operator_log_.emplace(driver_, stream, spaces_[index]->range());
}

void RecordingPair::end() {
  if (!scope_) return;
  operators_ = operator_log_->take();
  scratch_ = workspaces_->stand_ins();
  operator_log_.reset();
  logs_[current_] = scope_->log();
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
  declare_accesses(recording, operators_, kernels);
  outputs_[index].emplace(plan_outputs(returned, stand_ins_[index], spaces_[index]->range()));
  for (const Buffer* buffer : output_slots(*outputs_[index])) {
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

bool RecordingPair::is_fixed(const at::Tensor& tensor) const {
  const auto address = reinterpret_cast<uint64_t>(tensor.storage().data());
  return fixed_memory_ != nullptr && fixed_memory_->contains(address);
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
  LinkedGraph linked = pygraph::link(driver_, recordings_[0], recordings_[1], memory, lanes);
  take_over_donors(outputs, linked.donors);
  CUgraph clone = nullptr;
  PYGRAPH_CHECK(driver_, graph_clone(&clone, graph_.get()));
  Graph graph(driver_, clone);
  retarget_nodes(driver_, linked.recording, clone);
  if (linked.lanes > 1) set_edges(driver_, clone, linked.recording);
  return std::make_shared<CapturedGraph>(driver_, device_, arguments_, std::move(outputs), random_,
                                         std::move(graph), std::move(linked), fixed_memory_,
                                         written_);
}

}  // namespace pygraph
