// Streams, events, capture, modules and kernel launches of the simulated driver.
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "simulator/state.h"

namespace pygraph::simulator {
namespace {

thread_local int g_thread_mode = abi::kCaptureModeGlobal;

// A stream that was destroyed must not be touched: the driver would read freed memory.
SimulatedStream* as_stream(CUstream stream) {
  auto* found = reinterpret_cast<SimulatedStream*>(stream);
  const auto& streams = current_state()->streams;
  const auto is_it = [&](const auto& owned) { return owned.get() == found; };
  if (found != nullptr && std::ranges::none_of(streams, is_it)) std::abort();
  return found;
}
SimulatedEvent* as_event(CUevent event) {
  return reinterpret_cast<SimulatedEvent*>(event);
}

void join(std::vector<SimulatedNode*>& frontier, const std::vector<SimulatedNode*>& other) {
  for (SimulatedNode* node : other) {
    if (std::ranges::find(frontier, node) == frontier.end()) frontier.push_back(node);
  }
}

// Every node must lead to what the origin stream saw last, else a forked stream never came back.
bool is_joined(const SimulatedGraph& graph, const std::vector<SimulatedNode*>& frontier) {
  return std::all_of(graph.nodes.begin(), graph.nodes.end(), [&](const auto& node) {
    const auto leaves_node = [&](const auto& edge) { return edge.from == node.get(); };
    return std::any_of(graph.edges.begin(), graph.edges.end(), leaves_node) ||
           std::find(frontier.begin(), frontier.end(), node.get()) != frontier.end();
  });
}

void end_capture(SimulatedStream& stream) {
  stream = {.id = stream.id, .is_held = stream.is_held, .frontier = {}};
}

// Every stream of the capture goes back to normal, and its graph is gone.
void abandon_capture(SimulatedGraph* captured) {
  for (const auto& stream : current_state()->streams) {
    if (stream->graph == captured) end_capture(*stream);
  }
  delete captured;
}

}  // namespace

bool may_allocate() {
  if (g_thread_mode == abi::kCaptureModeRelaxed) return true;
  bool may = true;
  for (const auto& stream : current_state()->streams) {
    if (stream->graph == nullptr || !stream->is_global) continue;
    stream->invalidated = true;
    may = false;
  }
  return may;
}

abi::Result enqueue(CUstream stream, std::unique_ptr<SimulatedNode> node) {
  SimulatedStream* target = as_stream(stream);
  if (target == nullptr || target->graph == nullptr) {
    run_node(*node);
    return abi::kSuccess;
  }
  if (target->invalidated) return abi::kCaptureInvalidated;
  node->owner = target->graph;
  for (SimulatedNode* before : target->frontier) {
    target->graph->edges.push_back({before, node.get()});
  }
  target->frontier = {node.get()};
  target->graph->nodes.push_back(std::move(node));
  return abi::kSuccess;
}

namespace functions {

abi::Result driver_get_version(int* version) {
  *version = 13000;
  return abi::kSuccess;
}

abi::Result init(unsigned /*flags*/) {
  return abi::kSuccess;
}

abi::Result get_error_name(abi::Result code, const char** name) {
  *name = code == abi::kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
  return abi::kSuccess;
}

abi::Result device_get(int* device, int ordinal) {
  *device = ordinal;
  return abi::kSuccess;
}

abi::Result device_get_attribute(int* value, int attribute, int /*device*/) {
  if (attribute != abi::kDeviceMaxSharedBytesPerBlock) return abi::kInvalidValue;
  *value = 227 << 10;
  return abi::kSuccess;
}

abi::Result primary_context_retain(CUcontext* context, int /*device*/) {
  *context = reinterpret_cast<CUcontext>(current_state());
  return abi::kSuccess;
}

abi::Result context_set_current(CUcontext /*context*/) {
  return abi::kSuccess;
}

abi::Result context_get_device(int* device) {
  *device = 0;
  return abi::kSuccess;
}

abi::Result context_get_current(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(current_state());
  return abi::kSuccess;
}

abi::Result context_synchronize() {
  return abi::kSuccess;
}

abi::Result stream_create(CUstream* stream, unsigned /*flags*/) {
  auto created = std::make_unique<SimulatedStream>();
  created->id = current_state()->next_stream++;
  *stream = reinterpret_cast<CUstream>(created.get());
  current_state()->streams.insert(std::move(created));
  return abi::kSuccess;
}

// Also ends a capture that was begun on the stream, as the driver does.
abi::Result stream_destroy(CUstream stream) {
  auto& streams = current_state()->streams;
  const auto it = std::find_if(streams.begin(), streams.end(), [&](const auto& owned) {
    return owned.get() == reinterpret_cast<SimulatedStream*>(stream);
  });
  if (it == streams.end()) return abi::kInvalidValue;
  if ((*it)->origin) abandon_capture((*it)->graph);
  streams.erase(it);
  return abi::kSuccess;
}

abi::Result stream_synchronize(CUstream stream) {
  if (as_stream(stream) == nullptr || as_stream(stream)->graph == nullptr) return abi::kSuccess;
  as_stream(stream)->invalidated = true;
  return abi::kCaptureUnsupported;
}

abi::Result stream_wait_event(CUstream stream, CUevent event, unsigned /*flags*/) {
  if (as_event(event)->graph == nullptr) return abi::kSuccess;
  as_stream(stream)->graph = as_event(event)->graph;
  join(as_stream(stream)->frontier, as_event(event)->frontier);
  return abi::kSuccess;
}

abi::Result stream_get_id(CUstream stream, unsigned long long* id) {
  *id = stream == nullptr ? 1 : as_stream(stream)->id;
  return abi::kSuccess;
}

abi::Result stream_is_capturing(CUstream stream, int* status) {
  const SimulatedStream* target = as_stream(stream);
  *status = target == nullptr || target->graph == nullptr ? abi::kCaptureStatusNone
            : target->invalidated                         ? abi::kCaptureStatusInvalidated
                                                          : abi::kCaptureStatusActive;
  return abi::kSuccess;
}

abi::Result stream_begin_capture(CUstream stream, int mode) {
  if (as_stream(stream) == nullptr) return abi::kCaptureUnsupported;  // the legacy stream
  if (as_stream(stream)->graph != nullptr) return abi::kIllegalState;
  as_stream(stream)->graph = new SimulatedGraph;
  as_stream(stream)->origin = true;
  as_stream(stream)->is_global = mode == abi::kCaptureModeGlobal;
  return abi::kSuccess;
}

abi::Result stream_end_capture(CUstream stream, CUgraph* graph) {
  *graph = nullptr;
  SimulatedStream* origin = as_stream(stream);
  if (origin->graph == nullptr || !origin->origin) return abi::kIllegalState;
  SimulatedGraph* captured = origin->graph;
  const bool invalidated = origin->invalidated;
  const bool joined = is_joined(*captured, origin->frontier);
  if (invalidated || !joined) {
    abandon_capture(captured);
    return invalidated ? abi::kCaptureInvalidated : abi::kCaptureUnjoined;
  }
  for (const auto& other : current_state()->streams) {
    if (other->graph == captured) end_capture(*other);
  }
  current_state()->objects.insert(captured);
  *graph = reinterpret_cast<CUgraph>(captured);
  return abi::kSuccess;
}

abi::Result stream_get_capture_info(CUstream stream, int* status, uint64_t* /*id*/, CUgraph* graph,
                                    const CUgraphNode** /*dependencies*/,
                                    const abi::EdgeData** /*data*/, size_t* /*count*/) {
  stream_is_capturing(stream, status);
  if (graph != nullptr) *graph = reinterpret_cast<CUgraph>(as_stream(stream)->graph);
  return abi::kSuccess;
}

abi::Result thread_exchange_capture_mode(int* mode) {
  std::swap(g_thread_mode, *mode);
  return abi::kSuccess;
}

abi::Result event_create(CUevent* event, unsigned /*flags*/) {
  auto* created = new SimulatedEvent;
  current_state()->objects.insert(created);
  *event = reinterpret_cast<CUevent>(created);
  return abi::kSuccess;
}

abi::Result event_record(CUevent event, CUstream stream) {
  *as_event(event) = {};
  const SimulatedStream* recorded = as_stream(stream);
  if (recorded == nullptr) return abi::kSuccess;
  if (recorded->is_held) as_event(event)->held_by = recorded->id;
  if (recorded->graph != nullptr) {
    as_event(event)->graph = recorded->graph;
    as_event(event)->frontier = recorded->frontier;
  }
  return abi::kSuccess;
}

abi::Result event_query(CUevent event) {
  const auto holds = [&](const auto& stream) {
    return stream->is_held && stream->id == as_event(event)->held_by;
  };
  return std::ranges::any_of(current_state()->streams, holds) ? abi::kNotReady : abi::kSuccess;
}

abi::Result event_destroy(CUevent event) {
  if (current_state()->objects.erase(event) == 0) return abi::kInvalidValue;
  delete as_event(event);
  return abi::kSuccess;
}

abi::Result function_get_param_info(CUfunction function, size_t index, size_t* offset,
                                    size_t* size) {
  const auto& layout = reinterpret_cast<const Function*>(function)->layout;
  if (index >= layout.size()) return abi::kInvalidValue;
  *offset = layout[index].first;
  *size = layout[index].second;
  return abi::kSuccess;
}

abi::Result function_get_name(const char** name, CUfunction function) {
  *name = reinterpret_cast<const Function*>(function)->kernel.name.c_str();
  return abi::kSuccess;
}

abi::Result function_get_attribute(int* value, int attribute, CUfunction function) {
  const auto* found = reinterpret_cast<const Function*>(function);
  *value = attribute == abi::kFunctionMaxDynamicSharedBytes ? found->max_dynamic_shared : 0;
  return abi::kSuccess;
}

abi::Result function_set_attribute(CUfunction function, int attribute, int value) {
  if (attribute != abi::kFunctionMaxDynamicSharedBytes || value < 0) return abi::kInvalidValue;
  reinterpret_cast<Function*>(function)->max_dynamic_shared = value;
  return abi::kSuccess;
}

abi::Result kernel_get_function(CUfunction* /*function*/, CUkernel /*kernel*/) {
  return abi::kNotSupported;
}

abi::Result module_load_data(CUmodule* module, const void* /*image*/) {
  auto* created = new char;
  current_state()->objects.insert(created);
  *module = reinterpret_cast<CUmodule>(created);
  return abi::kSuccess;
}

abi::Result module_get_function(CUfunction* function, CUmodule /*module*/, const char* name) {
  const auto found = current_state()->functions.find(name);
  if (found == current_state()->functions.end()) return abi::kNotFound;
  *function = reinterpret_cast<CUfunction>(found->second.get());
  return abi::kSuccess;
}

abi::Result module_unload(CUmodule module) {
  if (current_state()->objects.erase(module) == 0) return abi::kInvalidValue;
  delete reinterpret_cast<char*>(module);
  return abi::kSuccess;
}

abi::Result launch_kernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                          CUstream stream, void** params, void** extra) {
  const abi::KernelNodeParams node_params{.func = function,
                                          .grid = {grid_x, grid_y, grid_z},
                                          .block = {block_x, block_y, block_z},
                                          .shared_memory_bytes = shared,
                                          .kernel_params = params,
                                          .extra = extra,
                                          .kern = nullptr,
                                          .ctx = nullptr};
  if (exceeds_shared_memory(node_params)) return abi::kInvalidValue;
  auto node = std::make_unique<SimulatedNode>();
  node->type = abi::kNodeKernel;
  set_kernel_params(node->kernel, node_params);
  return enqueue(stream, std::move(node));
}

}  // namespace functions
}  // namespace pygraph::simulator
