// A shortcut around Python wrapper code for graphs that are one partition.
//
// Inductor calls a graph through Python: check the alignment of each input, unpack the arguments,
// pack those of the partition, call it, unpack and pack the outputs. Around that, AOTAutograd has
// wrappers of its own, which do nothing for an inference graph without mutations and aliases. Where
// the graph is nothing but its one partition, all of it is a fixed reordering of inputs and
// outputs, and views of these, done here in C++. A call that no captured graph matches goes the
// long way.
#pragma once

#include <Python.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace pygraph {

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

// How a graph's arguments and outputs map to those of its one partition.
struct Route {
  int input_count = 0;      // of the graph
  std::vector<int> inputs;  // argument i of the partition is argument inputs[i] of the graph
  std::vector<RouteOutput> outputs;
};

// `partition` is the partition's GraphedCallable. With `takes_list` the callable and `fallback`
// take the graph's arguments as one list, which is emptied; otherwise one by one.
PyObject* make_whole_graph_callable(PyObject* partition, PyObject* fallback, bool takes_list,
                                    Route route);

}  // namespace pygraph
