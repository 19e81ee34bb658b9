// What the schema of an operator tells about its use of memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <string_view>

namespace pygraph::bindings {

// Whether PyTorch itself defines the operator, with a schema that says what it writes. (Schemas of
// c10d do not.)
bool is_own(std::string_view name);

// Whether it is an operator that a program or a library has registered. Ranges, and functions of
// autograd's, are none: they have no schema.
bool is_custom(const at::RecordFunction& function);

// False for what autograd reports beside operators: that it runs a node of the backward, whose
// operators follow and are reported as well; and, inside a detach, a detach once more. (The name
// of the inner one has no namespace. If it counted, an operator that saves a tensor, which hooks
// detach, would seem to run an operator that is not PyTorch's own.)
bool is_operator(const at::RecordFunction& function);

// Whether the tensor's storage is all the memory that an operator finds in it. That of sparse
// tensors, of wrappers of torch.func, and of subclasses in Python lies in other tensors.
bool is_plain(const at::Tensor& tensor);

// Whether an operator of PyTorch's own may write to the argument.
bool may_write(const c10::FunctionSchema& schema, const c10::Argument& argument);

// Calls `visit` for each tensor in the value.
template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) visit(tensor);
  } else if (value.isTensorList() || value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, visit);
  }
}

}  // namespace pygraph::bindings
