#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/utils/pybind.h>

#include "bind.h"
#include "conversions.h"
#include "record/own_kernels.h"
#include "record/recording_pair.h"

namespace py = pybind11;

namespace pygraph::bindings {
namespace {

// A stream of the current device that ends with the process.
uint64_t new_stream() {
  constexpr unsigned kNonBlocking = 1;
  CUstream stream = nullptr;
  PYGRAPH_CHECK(cuda_driver(), stream_create(&stream, kNonBlocking));
  return reinterpret_cast<uint64_t>(stream);
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

std::vector<Range> ranges_of(const std::vector<std::pair<uint64_t, uint64_t>>& pieces) {
  std::vector<Range> ranges;
  ranges.reserve(pieces.size());
  for (const auto& [address, size] : pieces) ranges.push_back({address, size});
  return ranges;
}

}  // namespace

void bind_record(py::module_& m) {
  m.def("new_stream", &new_stream, py::call_guard<py::gil_scoped_release>());
  m.def("free_pool", &free_pool, py::call_guard<py::gil_scoped_release>());
  m.def("has_own_kernels", [](const std::string& name, const std::string& overload) {
    return has_own_kernels(c10::OperatorName(name, overload));
  });
  py::class_<RecordingPair>(m, "RecordingPair")
      .def(py::init([](const py::list& arguments, int device, uint64_t capacity) {
        return std::make_unique<RecordingPair>(cuda_driver(), arguments, cuda_device(device),
                                               capacity);
      }))
      .def("is_recorded", &RecordingPair::is_recorded)
      .def("stand_ins", &RecordingPair::stand_ins)
      .def("begin", [](RecordingPair& pair, int index,
                       uint64_t stream) { pair.begin(index, reinterpret_cast<CUstream>(stream)); })
      .def("end", &RecordingPair::end)
      .def("put_back_workspaces", &RecordingPair::put_back_workspaces)
      .def("finish",
           [](RecordingPair& pair, int index, uint64_t graph, const py::object& returned,
              std::vector<int> random,
              const std::unordered_map<uint64_t, ParameterAccess>& kernels) {
             pair.finish(index, reinterpret_cast<CUgraph>(graph), returned.ptr(), std::move(random),
                         kernels);
           })
      .def("may_write", &RecordingPair::may_write)
      .def("returned", &RecordingPair::returned)
      .def("set_surroundings",
           [](RecordingPair& pair, std::vector<at::Tensor> held, py::function cached) {
             pair.set_surroundings(std::move(held), [cached = std::move(cached)] {
               return ranges_of(cached().cast<std::vector<std::pair<uint64_t, uint64_t>>>());
             });
           })
      .def("retain",
           [](RecordingPair& pair, int index,
              const std::vector<std::pair<uint64_t, uint64_t>>& pieces) {
             return pair.retain(index, ranges_of(pieces));
           })
      .def("link", &RecordingPair::link)
      .def("poison", &RecordingPair::poison, py::call_guard<py::gil_scoped_release>())
      .def("untouched", &RecordingPair::untouched, py::call_guard<py::gil_scoped_release>());
}

}  // namespace pygraph::bindings
