// A number on the host that a graph follows, as an argument: its value may differ from call to
// call.
//
// The kernels of fused optimizers take momentum, betas and weight decay by value, as doubles. To
// the engine such a number is an input like any other: its address is the bits of the double. So
// the two recordings, which are given different numbers, show which words hold it, and each call
// writes the number of that call there. A kernel that takes a number in another form (a float, or 1
// - beta) keeps that of the second recording, and the verification refuses the graph.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace pygraph::bindings {

// The Python type, which derives from float: what a callable gets in place of the float.
PyTypeObject* followed_number_type();

bool is_followed_number(PyObject* object);
uint64_t bits_of_number(PyObject* number);

// A new number for recording `index` (0 or 1) that no other argument and no other recording has,
// between 0 and 1, as betas are. Null with a Python error set on failure.
PyObject* stand_in_for_number(size_t position, int index);

}  // namespace pygraph::bindings
