// Loads a model's parameters and buffers all at once.
//
// Before each call of a compiled program, Dynamo's code looks up each of them through the
// dictionaries of the modules on its path, by some eight bytecodes each. The loader walks all paths
// together. From Python 3.12 on it does so only if one of these dictionaries has changed
// (PyDict_Watch), if a module on a path has another dictionary or class, if one of the classes has
// changed (its version), or for another model. Otherwise the tensors are those of the last call.
//
// No reference is kept from call to call: a dictionary that drops a tensor or module has changed. A
// module with attribute access of its own is asked for its attributes at each call.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

namespace pygraph::bindings {

// Where they are found. Object 0 is the model, object `i + 1` is item `i`.
struct ParameterPaths {
  struct Container {  // the object's dictionary of this name: _modules, _parameters, _buffers
    uint32_t owner;
    std::string attribute;
  };
  struct Item {
    uint32_t container;
    std::string key;
  };
  // In an order in which each is found by what comes before: containers by the items before the
  // first item in them.
  std::vector<Container> containers;
  std::vector<Item> items;
  std::vector<uint32_t> results;  // the objects to return
};

// A new reference to a function of the model that returns the tuple of results, with the errors
// that looking them up one by one would raise. Null, with a Python error set, for paths that are
// not in order, or if memory ran out. Needs Python's lock, as does the function.
PyObject* make_parameter_loader(const ParameterPaths& paths);

}  // namespace pygraph::bindings
