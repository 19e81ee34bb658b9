// A shortcut around Inductor's wrapper code for graphs that are one partition.
//
// Inductor calls a graph through Python: check the alignment of each input, unpack the arguments,
// pack those of the partition, call it, unpack and pack the outputs. Where the graph is nothing but
// its one partition, that is a fixed reordering of inputs and outputs, done here in C++. A call that
// no captured graph matches goes the long way.
#pragma once

#include <Python.h>

#include <utility>
#include <vector>

namespace pygraph {

PyTypeObject* whole_graph_type();

// `partition` is the partition's GraphedCallable; `fallback` takes the graph's argument list.
// Argument i of the partition is argument inputs[i] of the graph. Output j of the graph is
// (true, k): output k of the partition, or (false, k): argument k of the graph.
PyObject* make_whole_graph_callable(PyObject* partition, PyObject* fallback,
                                    std::vector<int> inputs,
                                    const std::vector<std::pair<bool, int>>& outputs);

}  // namespace pygraph
