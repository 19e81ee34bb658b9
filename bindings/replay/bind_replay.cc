#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "bind.h"
#include "conversions.h"
#include "replay/captured_graph.h"
#include "replay/graphed_callable.h"
#include "replay/profiles.h"
#include "replay/replay_clocks.h"
#include "replay/whole_graph.h"
#include "torch_private/blas_workspaces.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

// As Route's in Python: (is_output, index, (sizes, strides, offset) or None), or None.
using OutputOfRoute = std::optional<std::tuple<
    bool, int, std::optional<std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t>>>>;

// As HostTransfer in Python: (arguments, device, whether they are numbers, sent as one vector).
using HostTransferOfRoute = std::tuple<std::vector<int>, c10::Device, bool>;

RouteOutput route_output(const OutputOfRoute& output) {
  if (!output) return {};
  const auto& [is_output, index, view] = *output;
  RouteOutput result{is_output ? RouteSource::kOutput : RouteSource::kArgument, index, {}};
  if (view) result.view = {std::get<0>(*view), std::get<1>(*view), std::get<2>(*view)};
  return result;
}

int driver_version() {
  int version = 0;
  PYGRAPH_CHECK(cuda_driver(), driver_get_version(&version));
  return version;
}

void bind_captured_graph(py::module_& m) {
  py::class_<CapturedGraph, std::shared_ptr<CapturedGraph>> type(m, "CapturedGraph");
  type.def(
          "replay",
          [](CapturedGraph& graph, const py::list& arguments, bool gives_away, int poison,
             const std::optional<at::Generator>& generator) {
            return steal(graph.replay(arguments.ptr(), gives_away ? 1 : 0, poison, generator));
          },
          py::arg("arguments"), py::arg("gives_away"), py::arg("poison") = -1,
          py::arg("generator") = py::none())
      .def("release_workspace", &CapturedGraph::release_workspace)
      .def("defragment_workspace", &CapturedGraph::defragment_workspace)
      .def("hold_blocks", &CapturedGraph::hold_blocks)
      .def("link_map", [](const CapturedGraph& graph) { return link_map(graph.linked()); })
      .def("matches",
           [](const CapturedGraph& graph, const py::list& arguments) {
             return graph.matches(arguments.ptr(), current_switches());
           })
      .def("gives_away",
           [](const CapturedGraph& graph, const py::list& arguments) {
             return graph.gives_away(arguments.ptr(), 1);
           })
      .def("join_saved",
           [](const CapturedGraph& graph, py::list& outputs) { graph.join_saved(outputs.ptr()); })
      .def_property(
          "audit_at",
          [](const CapturedGraph& graph) -> std::optional<uint64_t> {
            const uint64_t replays = graph.audit_at;
            return replays == CapturedGraph::kNoAudit ? std::nullopt : std::optional(replays);
          },
          [](CapturedGraph& graph, std::optional<uint64_t> replays) {
            graph.audit_at = replays.value_or(CapturedGraph::kNoAudit);
          })
      .def_property_readonly("random_arguments", &CapturedGraph::random_arguments)
      .def_property_readonly("is_audit_due", &CapturedGraph::is_audit_due)
      .def_readwrite("name", &CapturedGraph::name)
      .def_readwrite("failure", &CapturedGraph::failure);
  const auto add = [&type](const char* name, auto read) {
    type.def_property_readonly(name, [read](const CapturedGraph& graph) { return read(graph); });
  };
  add("replays", [](auto& graph) { return graph.replays.load(); });
  add("donated_replays", [](auto& graph) { return graph.donated_replays.load(); });
  add("calls_elsewhere", [](auto& graph) { return graph.calls_elsewhere.load(); });
  add("nodes_touched", [](auto& graph) { return graph.nodes_touched.load(); });
  add("donated", [](auto& graph) { return graph.plan().donated(); });
  add("output_bytes", [](auto& graph) { return graph.plan().output_bytes(); });
  add("block_bytes", [](auto& graph) { return graph.block_bytes(); });
  add("workspace_bytes", [](auto& graph) { return graph.workspace_bytes(); });
  add("nodes", [](auto& graph) { return graph.linked().recording.nodes.size(); });
  add("inputs", [](auto& graph) { return graph.linked().recording.inputs.size(); });
  add("outputs", [](auto& graph) { return graph.linked().recording.outputs.size(); });
  add("relocations", [](auto& graph) { return graph.linked().relocations.size(); });
  add("symbols", [](auto& graph) { return graph.linked().symbols.size(); });
  add("unexplained_words", [](auto& graph) { return graph.linked().unexplained_words; });
  add("lanes", [](auto& graph) { return graph.linked().lanes; });
  add("nodes_with_known_accesses", [](auto& graph) {
    return std::ranges::count_if(graph.linked().recording.nodes, &Node::has_known_accesses);
  });
  add("foreign_memory", [](auto& graph) {
    std::vector<std::pair<uint64_t, std::string>> memory;
    for (const auto& [address, number, user] : graph.linked().foreign) {
      memory.emplace_back(address, user);
    }
    return memory;
  });
}

void bind_graphed_callable(py::module_& m) {
  m.add_object("GraphedCallable", reinterpret_cast<PyObject*>(graphed_callable_type()));
  m.add_object("WholeGraphCallable", reinterpret_cast<PyObject*>(whole_graph_type()));
  m.def("graphed_callable", [](const py::object& uncaptured, const py::object& miss, int device) {
    return steal(make_graphed_callable(uncaptured.ptr(), miss.ptr(), device));
  });
  m.def("add_graph", &add_graph);
  m.def("remove_graph", &remove_graph);
  m.def("add_uncaptured_decision", &add_uncaptured_decision);
  m.def("whole_graph_callable",
        [](const py::object& partition, const py::object& fallback, bool takes_list,
           int input_count, std::vector<int> inputs, const std::vector<OutputOfRoute>& outputs,
           const std::vector<HostTransferOfRoute>& sent) {
          Route route{input_count, std::move(inputs), {}, {}};
          for (const OutputOfRoute& output : outputs) route.outputs.push_back(route_output(output));
          for (const auto& [arguments, device, is_vector] : sent) {
            route.sent.push_back({arguments, device, is_vector});
          }
          return steal(make_whole_graph_callable(partition.ptr(), fallback.ptr(), takes_list,
                                                 std::move(route)));
        });
  m.def("leave_gradients", &leave_gradients);
  m.def("own_inputs", &own_inputs);
  m.def("replay_clocks", &ReplayClocks::take);
  m.def("pause", &pause_replays);
  m.def("begin_profile", &begin_profile);
  m.def("end_profile", &end_profile, py::arg("detaches"));
  m.def("needs_new_executable", &needs_new_executable);
  m.def("clear_uncaptured_decisions", &clear_uncaptured_decisions);
  m.def("wait", &wait);
  m.def("waiting_seconds", &waiting_seconds);
  m.def("clear_waiting", &clear_waiting);
  m.def("clear_decisions", &clear_decisions);
}

}  // namespace

void bind_replay(py::module_& m) {
  py::register_exception<StreamNotReady>(m, "StreamNotReady", PyExc_RuntimeError);
  py::register_exception<NotGivenAway>(m, "NotGivenAway", PyExc_RuntimeError);
  m.def("driver_version", &driver_version);
  m.def("drop_blocks",
        [](c10::DeviceIndex device) { HeldBlocks::drop_all(c10::Device(c10::kCUDA, device)); });
  m.def("drop_blocks_if_short", &HeldBlocks::look);
  m.def("free_blas_workspaces", &free_blas_workspaces, py::call_guard<py::gil_scoped_release>());
  bind_captured_graph(m);
  bind_graphed_callable(m);
}

}  // namespace pygraph::bindings
