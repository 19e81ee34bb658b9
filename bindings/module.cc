// pygraph._engine: the engine for Python. No logic here, only names.
#include <c10/core/CachingDeviceAllocator.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "blas_workspaces.h"
#include "compiled_call.h"
#include "graphed_callable.h"
#include "last_look.h"
#include "numbers.h"
#include "parameter_loader.h"
#include "pygraph/link.h"
#include "recording_pair.h"
#include "saved_hooks.h"
#include "whole_graph.h"

namespace py = pybind11;

namespace pygraph {
namespace {

// As Route's in Python: (is_output, index, (sizes, strides, offset) or None), or None.
using OutputOfRoute = std::optional<std::tuple<
    bool, int, std::optional<std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t>>>>;

// As Sent in Python: (arguments, device, whether they are numbers, sent as one vector).
using SentOfRoute = std::tuple<std::vector<int>, py::object, bool>;

RouteOutput route_output(const OutputOfRoute& output) {
  if (!output) return {};
  const auto& [is_output, index, view] = *output;
  RouteOutput result{is_output ? RouteSource::kOutput : RouteSource::kArgument, index, {}};
  if (view) result.view = {std::get<0>(*view), std::get<1>(*view), std::get<2>(*view)};
  return result;
}

c10::Device device_of(const py::object& device) {
  if (!THPDevice_Check(device.ptr())) throw py::type_error("not a torch.device");
  return reinterpret_cast<THPDevice*>(device.ptr())->device;
}

c10::Device cuda_device(int index) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

py::object steal(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

int driver_version() {
  int version = 0;
  PYGRAPH_CHECK(cuda_driver(), driver_get_version(&version));
  return version;
}

// A stream of the current device that ends with the process.
uint64_t new_stream() {
  constexpr unsigned kNonBlocking = 1;
  CUstream stream = nullptr;
  PYGRAPH_CHECK(cuda_driver(), stream_create(&stream, kNonBlocking));
  return reinterpret_cast<uint64_t>(stream);
}

std::vector<Range> ranges_of(const std::vector<std::pair<uint64_t, uint64_t>>& pieces) {
  std::vector<Range> ranges;
  ranges.reserve(pieces.size());
  for (const auto& [address, size] : pieces) ranges.push_back({address, size});
  return ranges;
}

// Gives the memory of a released pool of PyTorch's allocator back. False: not while any thread
// captures or allocates from a pool.
bool free_pool(uint64_t first, uint64_t second) {
  try {
    c10::getDeviceAllocator(c10::kCUDA)->emptyCache({first, second});
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

// Tensors of a list.
std::vector<at::Tensor> tensors_of(const py::list& list) {
  std::vector<at::Tensor> tensors;
  for (const py::handle& object : list) tensors.push_back(THPVariable_Unpack(object.ptr()));
  return tensors;
}

void bind_captured_graph(py::module_& m) {
  py::class_<CapturedGraph, std::shared_ptr<CapturedGraph>>(m, "CapturedGraph")
      .def(
          "replay",
          [](CapturedGraph& graph, const py::list& arguments, bool gives_away, int poison,
             const py::object& generator) {
            std::optional<at::Generator> instead;
            if (!generator.is_none()) {
              if (!is_generator(generator.ptr())) throw py::type_error("not a torch.Generator");
              instead = unpack_generator(generator.ptr());
            }
            return steal(graph.replay(arguments.ptr(), gives_away ? 1 : 0, poison, instead));
          },
          py::arg("arguments"), py::arg("gives_away"), py::arg("poison") = -1,
          py::arg("generator") = py::none())
      .def("release_workspace", &CapturedGraph::release_workspace)
      .def("settle_workspace", &CapturedGraph::settle_workspace)
      .def("link_map", [](const CapturedGraph& graph) { return link_map(graph.linked()); })
      .def("to_dot", [](const CapturedGraph& graph) { return to_dot(graph.linked()); })
      .def_property_readonly("replays",
                             [](const CapturedGraph& graph) { return graph.replays.load(); })
      .def_property_readonly(
          "donated_replays",
          [](const CapturedGraph& graph) { return graph.donated_replays.load(); })
      .def_property_readonly(
          "calls_elsewhere",
          [](const CapturedGraph& graph) { return graph.calls_elsewhere.load(); })
      .def_property_readonly("donated", &CapturedGraph::donated)
      .def_property_readonly("random_arguments", &CapturedGraph::random_arguments)
      .def_property_readonly("is_audit_due", &CapturedGraph::is_audit_due)
      .def_property(
          "audit_at",
          [](const CapturedGraph& graph) -> std::optional<uint64_t> {
            const uint64_t replays = graph.audit_at;
            return replays == CapturedGraph::kNoAudit ? std::nullopt : std::optional(replays);
          },
          [](CapturedGraph& graph, std::optional<uint64_t> replays) {
            graph.audit_at = replays.value_or(CapturedGraph::kNoAudit);
          })
      .def_property_readonly("nodes_touched",
                             [](const CapturedGraph& graph) { return graph.nodes_touched.load(); })
      .def_readwrite("name", &CapturedGraph::name)
      .def_readwrite("failure", &CapturedGraph::failure)
      .def_property_readonly(
          "nodes", [](const CapturedGraph& graph) { return graph.linked().recording.nodes.size(); })
      .def_property_readonly(
          "inputs",
          [](const CapturedGraph& graph) { return graph.linked().recording.inputs.size(); })
      .def_property_readonly(
          "outputs",
          [](const CapturedGraph& graph) { return graph.linked().recording.outputs.size(); })
      .def_property_readonly(
          "relocations",
          [](const CapturedGraph& graph) { return graph.linked().relocations.size(); })
      .def_property_readonly(
          "symbols", [](const CapturedGraph& graph) { return graph.linked().symbols.size(); })
      .def_property_readonly("noise_words",
                             [](const CapturedGraph& graph) { return graph.linked().noise_words; })
      .def_property_readonly(
          "unexplained_words",
          [](const CapturedGraph& graph) { return graph.linked().unexplained_words; })
      .def_property_readonly("doubtful_use",
                             [](const CapturedGraph& graph) { return graph.linked().doubtful_use; })
      .def_property_readonly("declared",
                             [](const CapturedGraph& graph) {
                               return std::ranges::count_if(graph.linked().recording.nodes,
                                                            &Node::declared);
                             })
      .def_property_readonly("lanes",
                             [](const CapturedGraph& graph) { return graph.linked().lanes; })
      .def("matches",
           [](const CapturedGraph& graph, const py::list& arguments) {
             return graph.matches(arguments.ptr(), current_switches());
           })
      .def_property_readonly("foreign_memory",
                             [](const CapturedGraph& graph) {
                               std::vector<std::pair<uint64_t, std::string>> memory;
                               for (const auto& [address, number, user] : graph.linked().foreign) {
                                 memory.emplace_back(address, user);
                               }
                               return memory;
                             })
      .def_property_readonly("output_bytes", &CapturedGraph::output_bytes)
      .def_property_readonly("block_bytes", &CapturedGraph::block_bytes)
      .def_property_readonly("workspace_bytes", [](const CapturedGraph& graph) {
        return graph.linked().workspace_size;
      });
}

void bind_recording_pair(py::module_& m) {
  py::class_<RecordingPair>(m, "RecordingPair")
      .def(py::init([](const py::list& arguments, int device, uint64_t capacity) {
        return std::make_unique<RecordingPair>(cuda_driver(), arguments.ptr(), cuda_device(device),
                                               capacity);
      }))
      .def("is_recorded",
           [](const RecordingPair& pair, const py::object& tensor) {
             return pair.is_recorded(THPVariable_Unpack(tensor.ptr()));
           })
      .def("stand_ins", [](RecordingPair& pair, int index) { return steal(pair.stand_ins(index)); })
      .def("begin", [](RecordingPair& pair, int index,
                       uint64_t stream) { pair.begin(index, reinterpret_cast<CUstream>(stream)); })
      .def("end", &RecordingPair::end)
      .def("finish",
           [](RecordingPair& pair, int index, uint64_t graph, const py::object& returned,
              const std::vector<int>& random_arguments,
              const std::unordered_map<uint64_t, ParameterAccess>& kernels) {
             std::vector<RandomSource> random;
             random.reserve(random_arguments.size());
             for (const int argument : random_arguments) random.push_back({argument});
             pair.finish(index, reinterpret_cast<CUgraph>(graph), returned.ptr(), std::move(random),
                         kernels);
           })
      .def("may_write", &RecordingPair::may_write)
      .def("returned", &RecordingPair::returned)
      .def("surround",
           [](RecordingPair& pair, const py::list& held, py::function cached) {
             pair.surround(tensors_of(held), [cached = std::move(cached)] {
               return ranges_of(cached().cast<std::vector<std::pair<uint64_t, uint64_t>>>());
             });
           })
      .def("keep",
           [](RecordingPair& pair, int index,
              const std::vector<std::pair<uint64_t, uint64_t>>& pieces) {
             return pair.keep(index, ranges_of(pieces));
           })
      .def("link", &RecordingPair::link)
      .def("poison", &RecordingPair::poison, py::call_guard<py::gil_scoped_release>())
      .def("untouched", &RecordingPair::untouched, py::call_guard<py::gil_scoped_release>());
}

void bind_last_look(py::module_& m) {
  m.def("memory_of", [](const py::object& tensor) {
    return steal(THPVariable_Wrap(memory_of(THPVariable_Unpack(tensor.ptr()))));
  });
  py::class_<LastLook>(m, "LastLook")
      .def(py::init([](const py::list& tensors, py::function look) {
        return std::make_unique<LastLook>(tensors_of(tensors), std::move(look));
      }))
      .def("end", &LastLook::end);
}

void bind_graphed_callable(py::module_& m) {
  m.add_object("GraphedCallable", reinterpret_cast<PyObject*>(graphed_callable_type()));
  m.add_object("WholeGraphCallable", reinterpret_cast<PyObject*>(whole_graph_type()));
  m.def("graphed_callable", [](const py::object& uncaptured, const py::object& miss, int device) {
    return steal(make_graphed_callable(uncaptured.ptr(), miss.ptr(), device));
  });
  m.def("add_graph", [](const py::object& callable, std::shared_ptr<CapturedGraph> graph,
                        size_t limit, uint64_t calls_per_look) {
    return add_graph(callable.ptr(), std::move(graph), limit, calls_per_look);
  });
  m.def("remove_graph", [](const py::object& callable, const CapturedGraph& graph) {
    remove_graph(callable.ptr(), &graph);
  });
  m.def("add_without_graph",
        [](const py::object& callable, const py::list& arguments, uint64_t calls_per_look) {
          add_without_graph(callable.ptr(), arguments.ptr(), calls_per_look);
        });
  m.def("whole_graph_callable",
        [](const py::object& partition, const py::object& fallback, bool takes_list,
           int input_count, std::vector<int> inputs, const std::vector<OutputOfRoute>& outputs,
           const std::vector<SentOfRoute>& sent) {
          Route route{input_count, std::move(inputs), {}, {}};
          for (const OutputOfRoute& output : outputs) route.outputs.push_back(route_output(output));
          for (const auto& [arguments, device, is_vector] : sent) {
            route.sent.push_back({arguments, device_of(device), is_vector});
          }
          return steal(make_whole_graph_callable(partition.ptr(), fallback.ptr(), takes_list,
                                                 std::move(route)));
        });
  m.def("pause", &pause_replays);
  m.def("clear_without_graph",
        [](const py::object& callable) { clear_without_graph(callable.ptr()); });
  m.def("wait", [](const py::object& callable, const py::bytes& signature, double seconds) {
    wait(callable.ptr(), std::string_view(signature), seconds);
  });
  m.def("waiting_seconds", [](const py::object& callable, const py::bytes& signature) {
    return waiting_seconds(callable.ptr(), std::string_view(signature));
  });
  m.def("clear_waiting", [](const py::object& callable) { clear_waiting(callable.ptr()); });
  m.def("clear_decided", [](const py::object& callable) { clear_decided(callable.ptr()); });
}

void bind_compiled_call(py::module_& m) {
  m.def("compiled_call", [](const py::function& wrapper, const py::object& function,
                            const py::object& module, const py::object& callback,
                            const py::list& enter_hooks, const py::bool_& full_graph,
                            const py::object& raise_to_user) {
    return steal(make_compiled_call({wrapper.ptr(), function.ptr(), module.ptr(), callback.ptr(),
                                     enter_hooks.ptr(), full_graph.ptr(), raise_to_user.ptr()}));
  });
  m.def("saved_hooks_guard", [](const py::function& otherwise) {
    return steal(make_saved_hooks_guard(otherwise.ptr()));
  });
  m.def("parameter_loader", [](const std::vector<std::pair<uint32_t, std::string>>& containers,
                               const std::vector<std::pair<uint32_t, std::string>>& items,
                               std::vector<uint32_t> results) {
    ParameterPaths paths;
    for (const auto& [owner, attribute] : containers)
      paths.containers.push_back({owner, attribute});
    for (const auto& [container, key] : items) paths.items.push_back({container, key});
    paths.results = std::move(results);
    return steal(make_parameter_loader(paths));
  });
  m.def("module_call", [](const py::type& type, const py::object& original) {
    return steal(make_module_call(reinterpret_cast<PyTypeObject*>(type.ptr()), original.ptr()));
  });
}

}  // namespace
}  // namespace pygraph

PYBIND11_MODULE(_engine, m) {
  using namespace pygraph;  // NOLINT(google-build-using-namespace)
  m.doc() = "PyGraph's engine: record, link and replay CUDA graphs.";
  py::register_exception<NotRelocatable>(m, "NotRelocatable", PyExc_RuntimeError);
  py::register_exception<DriverError>(m, "DriverError", PyExc_RuntimeError);
  py::register_exception<StreamNotReady>(m, "StreamNotReady", PyExc_RuntimeError);
  py::register_exception<NotGivenAway>(m, "NotGivenAway", PyExc_RuntimeError);
  m.def("driver_version", &driver_version);
  m.def("new_stream", &new_stream, py::call_guard<py::gil_scoped_release>());
  py::class_<GivenAway>(m, "GivenAway").def_readonly("positions", &GivenAway::positions);
  m.def("given_away", [](const py::list& arguments) { return given_away(arguments.ptr()); });
  m.def("has_transform_wrapper",
        [](const py::tuple& arguments) { return has_transform_wrapper(arguments.ptr()); });
  m.def("free_blas_workspaces", &free_blas_workspaces, py::call_guard<py::gil_scoped_release>());
  m.def("free_pool", &free_pool, py::call_guard<py::gil_scoped_release>());
  m.add_object("as_tensor", steal(make_as_tensor()));
  m.def("signature", [](const py::list& arguments, int device) {
    return py::bytes(signature_of(arguments.ptr(), cuda_device(device)));
  });
  bind_captured_graph(m);
  bind_recording_pair(m);
  bind_last_look(m);
  bind_graphed_callable(m);
  bind_compiled_call(m);
}
