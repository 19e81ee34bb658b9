// The gradients of lists of tensors: which tensors have one, and setting them. Needs Python's lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

#include <string>
#include <string_view>

namespace pygraph::bindings {

// One byte per tensor of a list: 1 if it has a gradient, else 0.
std::string gradient_pattern(PyObject* tensors);
bool has_gradient_pattern(PyObject* tensors, std::string_view pattern);

// What a graph that adds to gradients depends on, of each tensor of a list: whether it has a
// gradient, its type, its layout in its storage, and whether it was made in inference mode.
std::string gradient_layouts(PyObject* tensors);
// Whether the gradient of each tensor of a list lies in the memory of the other list's tensor of
// the same number.
bool gradients_lie_in(PyObject* tensors, PyObject* others);
// The same, of the memory of the other tensor's gradient.
bool gradients_share_memory(PyObject* tensors, PyObject* others);

// Tells autograd that the gradients that the tensors of a list have were written.
void bump_gradient_versions(PyObject* tensors);

// As `tensor.grad = gradient` in Python, if PyTorch's setter would do nothing but store it; else
// false, and nothing is done.
bool set_plain_gradient(PyObject* tensor, const at::Tensor& gradient);

// As `tensor.grad = gradient` in Python, for the tensors of a list; the gradients are those of
// `values` (a list or a tuple) from `first` on, where an ellipsis stands for one that a replay has
// set (replay/left_gradients.h). Throws std::invalid_argument where there are more or fewer of
// them. False with a Python error set on failure.
bool set_gradients(PyObject* tensors, PyObject* values, Py_ssize_t first);
// `tensor.grad = None`. False with a Python error set on failure.
bool clear_gradients(PyObject* tensors);

}  // namespace pygraph::bindings
