#include "captured_graph.h"

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>

#include "philox.h"
#include "torch_cuda.h"

namespace pygraph {
namespace {

constexpr uint64_t kRandomStateSize = 16;

class WithoutPythonLock {
 public:
  WithoutPythonLock() : state_(PyEval_SaveThread()) {}
  ~WithoutPythonLock() { PyEval_RestoreThread(state_); }
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  PyThreadState* state_;
};

at::Generator generator_of(const RandomSource& source, PyObject* arguments, c10::Device device) {
  if (source.argument == RandomSource::kDefaultGenerator) {
    return at::globalContext().defaultGenerator(device);
  }
  return unpack_generator(PyList_GET_ITEM(arguments, source.argument));
}

}  // namespace

// What one replay works with.
struct CapturedGraph::Launch {
  CUstream stream = nullptr;
  std::vector<uint64_t> addresses;  // by slot
  std::vector<c10::Storage> storages;
  std::vector<at::Generator> generators;  // by random source
  std::vector<PhiloxPosition> positions;
  bool poison_outputs = false;
};

CapturedGraph::CapturedGraph(const Driver& driver, c10::Device device,
                             std::vector<Argument> arguments, OutputPlan outputs,
                             std::vector<RandomSource> random, Graph graph, LinkedGraph linked)
    : driver_(driver),
      device_(device),
      arguments_(std::move(arguments)),
      outputs_(std::move(outputs)),
      random_(std::move(random)),
      executable_(driver, std::move(graph), std::move(linked)),
      workspace_(Workspace::of_device(device.index())) {
  const auto& states = executable_.linked().recording.random;
  draws_ = std::ranges::any_of(states, [](const RandomState& s) { return s.increment > 0; });
  if (draws_) {
    random_memory_ = c10::GetAllocator(device.type())->allocate(states.size() * kRandomStateSize);
  }
}

CapturedGraph::~CapturedGraph() {
  if (reserved_) workspace_.release(executable_.linked().workspace_size);
}

void CapturedGraph::reserve_workspace() {
  if (reserved_) return;
  workspace_.reserve(executable_.linked().workspace_size);
  reserved_ = true;
}

uint64_t CapturedGraph::output_bytes() const {
  return std::accumulate(outputs_.storage_bytes.begin(), outputs_.storage_bytes.end(), uint64_t{0});
}

bool CapturedGraph::matches(PyObject* arguments) const {
  const auto count = static_cast<Py_ssize_t>(arguments_.size());
  if (PyList_GET_SIZE(arguments) != count) return false;
  // Integers come last and tell shapes apart soonest.
  for (Py_ssize_t i = count; i-- > 0;) {
    if (!arguments_[i].matches(PyList_GET_ITEM(arguments, i), device_)) return false;
  }
  return true;
}

void CapturedGraph::collect_input_addresses(PyObject* arguments,
                                            std::vector<uint64_t>& addresses) const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].kind != ArgumentKind::kTensor) continue;
    const at::Tensor& tensor =
        unpack_tensor(PyList_GET_ITEM(arguments, static_cast<Py_ssize_t>(i)));
    addresses.push_back(reinterpret_cast<uint64_t>(tensor.mutable_data_ptr()));
  }
}

void CapturedGraph::bind_and_launch(Launch& launch) {
  const WithoutPythonLock unlocked;
  const std::lock_guard lock(workspace_.mutex());
  if (workspace_.capacity() < linked().workspace_size) {
    throw DriverError("the workspace could not be kept", abi::kOutOfMemory);
  }
  const uint64_t workspace = workspace_.enter(driver_, launch.stream);
  launch.addresses[executable_.workspace_slot()] = linked().workspace_size > 0 ? workspace : 0;
  nodes_touched += executable_.bind(launch.addresses);
  if (draws_) {
    // From pageable memory: the driver has copied the bytes when the call returns.
    PYGRAPH_CHECK(driver_,
                  copy_to_device_async(reinterpret_cast<uint64_t>(random_memory_.get()),
                                       launch.positions.data(),
                                       launch.positions.size() * kRandomStateSize, launch.stream));
  }
  if (launch.poison_outputs) {
    for (const c10::Storage& storage : launch.storages) {
      if (storage.nbytes() == 0) continue;
      const auto address = reinterpret_cast<uint64_t>(storage.mutable_data());
      PYGRAPH_CHECK(driver_, memset_d8_async(address, 0xFF, storage.nbytes(), launch.stream));
    }
  }
  executable_.launch(launch.stream);
  ++replays;
}

PyObject* CapturedGraph::replay(PyObject* arguments, bool poison_outputs) {
  const c10::OptionalDeviceGuard guard(device_);
  reserve_workspace();
  Launch launch;
  launch.stream = torch_cuda::current_stream(device_.index());
  launch.poison_outputs = poison_outputs;
  launch.addresses.reserve(executable_.slot_count());
  collect_input_addresses(arguments, launch.addresses);
  launch.storages = allocate_storages(outputs_, device_);
  for (const c10::Storage& storage : launch.storages) {
    if (storage.nbytes() > 0) {
      launch.addresses.push_back(reinterpret_cast<uint64_t>(storage.mutable_data()));
    }
  }
  launch.addresses.resize(executable_.slot_count());
  if (draws_) {
    const auto& states = linked().recording.random;
    for (size_t i = 0; i < random_.size(); ++i) {
      launch.generators.push_back(generator_of(random_[i], arguments, device_));
      launch.positions.push_back(reserve_random(launch.generators[i], states[i].increment));
      launch.addresses[executable_.workspace_slot() + 1 + i] =
          reinterpret_cast<uint64_t>(random_memory_.get()) + i * kRandomStateSize;
    }
  }
  try {
    bind_and_launch(launch);
  } catch (...) {
    for (size_t i = 0; i < launch.positions.size(); ++i) {
      unreserve_random(launch.generators[i], launch.positions[i]);
    }
    throw;
  }
  return build_outputs(outputs_, launch.storages, arguments);
}

}  // namespace pygraph
