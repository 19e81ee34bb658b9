#include "replay/left_gradients.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "tensors/gradients.h"
#include "tensors/recorded_streams.h"

namespace pygraph::bindings {

TakenGradients::~TakenGradients() {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (gradients_[i].defined()) owners_[i].mutable_grad() = std::move(gradients_[i]);
  }
}

std::vector<bool> LeftGradients::alone(const GradientOwners& owners, const OutputPlan& plan) {
  std::vector<uint32_t> users(plan.block_bytes.size(), 0);
  for (const Output& output : plan.outputs) {
    if (output.kind == OutputKind::kFresh) ++users[plan.buffers[output.source].block];
    if (output.kind != OutputKind::kRepeated) continue;
    const Output& other = plan.outputs[output.source];
    if (other.kind == OutputKind::kFresh) ++users[plan.buffers[other.source].block];
  }
  std::vector<bool> alone;
  for (size_t i = owners.first; i < plan.outputs.size(); ++i) {
    const Output& output = plan.outputs[i];
    if (output.kind != OutputKind::kFresh) {
      alone.push_back(false);
      continue;
    }
    const OutputBuffer& buffer = plan.buffers[output.source];
    alone.push_back(users[buffer.block] == 1 && buffer.offset == 0 && output.byte_offset == 0 &&
                    buffer.bytes > 0 && buffer.bytes == plan.block_bytes[buffer.block] &&
                    plan.block_donors[buffer.block] == OutputPlacement::kNone);
  }
  return alone;
}

// Whether nothing but its tensor holds the gradient and its memory, and both are what the last
// replay left.
bool LeftGradients::may_be_taken(const at::Tensor& gradient, const Left& left,
                                 const Output& output) {
  if (!gradient.defined() || gradient.use_count() != 1 || gradient.weak_use_count() != 1) {
    return false;
  }
  const c10::TensorImpl* tensor = gradient.unsafeGetTensorImpl();
  if (tensor->autograd_meta() != nullptr || tensor->pyobj_slot()->load_pyobj() != nullptr ||
      gradient.layout() != c10::kStrided || tensor->is_python_dispatch() ||
      !tensor->has_storage()) {
    return false;
  }
  // A backward elsewhere adds to it without a reference of Python's, and counts its version.
  const c10::VariableVersion& version = tensor->version_counter();
  if (!version.enabled() || version.current_version() != 0) return false;
  const c10::Storage& storage = gradient.storage();
  return left.storage && storage.unsafeGetStorageImpl() == left.storage->_unsafe_get_target() &&
         storage.use_count() == 1 && storage.data() == left.address &&
         !is_used_by_other_streams(storage.unsafeGetStorageImpl()) &&
         gradient.storage_offset() == 0 && gradient.dtype() == output.dtype &&
         gradient.sizes().equals(output.sizes) && gradient.strides().equals(output.strides) &&
         conj_neg_bits_of(gradient) == output.conj_neg;
}

void LeftGradients::take(const GradientOwners& owners, const OutputPlan& plan, Launch& launch,
                         TakenGradients& taken) {
  // Memory of another stream's: that one may still read it.
  if (left_.empty() || !launch.stream.is_permanent || launch.stream.handle != stream_) return;
  const auto count = static_cast<size_t>(PyList_GET_SIZE(owners.tensors));
  if (count != left_.size()) return;
  taken.owners_.resize(count);
  taken.gradients_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const Output& output = plan.outputs[owners.first + i];
    PyObject* object = PyList_GET_ITEM(owners.tensors, static_cast<Py_ssize_t>(i));
    if (!alone_[i] || !THPVariable_Check(object)) continue;
    const at::Tensor& owner = THPVariable_Unpack(object);
    if (!owner.is_leaf() || !may_be_taken(owner.grad(), left_[i], output)) continue;
    taken.owners_[i] = owner;
    taken.gradients_[i] = std::exchange(owner.mutable_grad(), at::Tensor());
    launch.outputs[plan.buffers[output.source].block] = taken.gradients_[i].storage();
  }
}

std::vector<PyObject*> LeftGradients::leave(const GradientOwners& owners, const OutputPlan& plan,
                                            const Launch& launch, TakenGradients& taken) {
  std::vector<PyObject*> instead(plan.outputs.size(), nullptr);
  const auto count = static_cast<size_t>(PyList_GET_SIZE(owners.tensors));
  left_.clear();
  if (plan.outputs.size() - owners.first != count) return instead;
  if (alone_.empty()) alone_ = alone(owners, plan);
  std::vector<Left> left(count);  // releases of gradients may run Python
  for (size_t i = 0; i < count; ++i) {
    const Output& output = plan.outputs[owners.first + i];
    if (!alone_[i]) continue;
    const c10::Storage& storage = launch.outputs[plan.buffers[output.source].block];
    left[i] = {storage.getWeakStorageImpl(), storage.data()};
    at::Tensor gradient;
    if (i < taken.gradients_.size()) gradient = std::move(taken.gradients_[i]);
    if (!gradient.defined()) {
      gradient =
          make_tensor(storage, output.dtype, output.sizes, output.strides, 0, output.conj_neg);
    }
    PyObject* owner = PyList_GET_ITEM(owners.tensors, static_cast<Py_ssize_t>(i));
    if (set_plain_gradient(owner, gradient)) instead[owners.first + i] = Py_Ellipsis;
  }
  left_ = std::move(left);
  stream_ = launch.stream.handle;
  return instead;
}

}  // namespace pygraph::bindings
