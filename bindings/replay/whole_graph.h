// A shortcut around Python wrapper code for graphs that are one partition.
//
// Inductor calls a graph through Python: check the alignment of each input, unpack the arguments,
// pack those of the partition, call it, unpack and pack the outputs. Around that, AOTAutograd has
// wrappers of its own, which do nothing for an inference graph without mutations and aliases. If
// the graph consists of one partition, all of that is a fixed reordering of inputs and outputs, and
// views of these. It is done here in C++, and so is sending CPU values to the GPU first. A call
// without a matching captured graph takes PyTorch's way.
#pragma once

#include <Python.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace pygraph::bindings {

struct View {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;  // in elements, from the first one of the tensor that is viewed
};

enum class RouteSource : uint8_t { kOutput, kArgument, kNone };

struct RouteOutput {
  RouteSource source = RouteSource::kNone;  // an output of the partition, an argument of the graph
  int index = 0;
  std::optional<View> view;  // of that tensor; without, it is returned itself
};

// CPU tensors that are sent to the GPU before the partition is called (tensors/operators.h).
struct HostTransfer {
  std::vector<int> arguments;  // of the graph
  c10::Device device;
  bool is_vector = false;  // numbers, sent as one vector; else one tensor
};

// How a graph's arguments and outputs map to those of its one partition.
struct Route {
  int input_count = 0;  // of the graph
  // Argument i of the partition is argument inputs[i] of the graph, or, beyond the last of these,
  // what was sent.
  std::vector<int> inputs;
  std::vector<RouteOutput> outputs;
  std::vector<HostTransfer> sent;
};

PyTypeObject* whole_graph_type();

// `partition` is the partition's GraphedCallable. With `takes_list` the callable and `fallback`
// take the graph's arguments as one list, which is emptied; otherwise one by one.
PyObject* make_whole_graph_callable(PyObject* partition, PyObject* fallback, bool takes_list,
                                    Route route);

}  // namespace pygraph::bindings
