// What is done to .grad of many parameters in every pass, without a Python object for each of them.
//
// sweep.py has the same in Python, says what each function is for, and loads this where it was
// built. Nothing is kept here: parameters and views come with every call, as tuples.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <vector>

namespace {

using at::Tensor;
using pybind11::tuple;

// Tensors whose values are not simply what lies in their memory.
const c10::DispatchKeySet kSpecial{
    c10::DispatchKey::Python,     c10::DispatchKey::Functionalize,
    c10::DispatchKey::Conjugate,  c10::DispatchKey::Negative,
    c10::DispatchKey::ZeroTensor, c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper};

const Tensor& tensor_at(const tuple& tensors, size_t i) {
  PyObject* item = PyTuple_GET_ITEM(tensors.ptr(), i);
  if (!THPVariable_Check(item)) throw pybind11::type_error("expected a tuple of tensors");
  return THPVariable_Unpack(item);
}

void expect_as_many(const tuple& params, const tuple& others) {
  if (params.size() != others.size()) throw pybind11::value_error("not as many as parameters");
}

std::vector<size_t> holding(const tuple& params) {
  std::vector<size_t> found;
  for (size_t i = 0; i < params.size(); i++)
    if (tensor_at(params, i).grad().defined()) found.push_back(i);
  return found;
}

std::vector<bool> trained(const tuple& params) {
  std::vector<bool> flags(params.size());
  for (size_t i = 0; i < params.size(); i++) flags[i] = tensor_at(params, i).requires_grad();
  return flags;
}

bool is_plain(const Tensor& grad, const Tensor& view, bool same_dtype) {
  return grad.defined() && grad.layout() == at::kStrided && !grad.requires_grad() &&
      !grad.key_set().has_any(kSpecial) && grad.sizes() == view.sizes() &&
      (!same_dtype || grad.scalar_type() == view.scalar_type());
}

bool lies_alike(const Tensor& grad, const Tensor& view) {
  return grad.is_cpu() && view.is_cpu() && grad.scalar_type() == view.scalar_type() &&
      grad.strides() == view.strides() && grad.is_non_overlapping_and_dense() &&
      grad.storage().data() != nullptr;
}

void copy(const std::vector<Tensor>& views, const std::vector<Tensor>& grads) {
  for (size_t i = 0; i < grads.size(); i++) {
    std::memmove(views[i].data_ptr(), grads[i].data_ptr(), grads[i].nbytes());
    views[i].unsafeGetTensorImpl()->bump_version();
  }
}

bool take(const tuple& params, const tuple& views, const tuple& places, bool same_dtype) {
  expect_as_many(params, views);
  expect_as_many(params, places);
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  std::vector<Tensor> from, to;
  from.reserve(params.size());
  to.reserve(params.size());
  bool alike = true;
  for (size_t i = 0; i < params.size(); i++) {
    const Tensor &grad = tensor_at(params, i).grad(), &view = tensor_at(views, i);
    if (!is_plain(grad, view, same_dtype)) return false;
    if (view.data_ptr() != PyLong_AsVoidPtr(PyTuple_GET_ITEM(places.ptr(), i))) return false;
    alike = alike && lies_alike(grad, view);
    from.push_back(grad);
    to.push_back(view);
  }
  {
    pybind11::gil_scoped_release release;
    if (alike)
      copy(to, from);
    else
      at::_foreach_copy_(to, from);
  }
  for (size_t i = 0; i < params.size(); i++) tensor_at(params, i).mutable_grad().reset();
  return true;
}

void give(const tuple& params, const tuple& grads) {
  expect_as_many(params, grads);
  for (size_t i = 0; i < params.size(); i++)
    tensor_at(params, i).mutable_grad() = tensor_at(grads, i);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("holding", &holding);
  module.def("trained", &trained);
  module.def("take", &take);
  module.def("give", &give);
}
