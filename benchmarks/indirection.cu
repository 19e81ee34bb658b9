// Ways to give a graph other addresses, and what each costs: the paper's figure 9.
//
//   make bench-indirection        (needs nvcc)
//
// A graph of N small kernels, each of which reads a buffer of its own; before every launch all N
// buffers change. Prints one JSON object per way and N, in microseconds (medians):
//
//   copy      the N buffers are copied into N fixed ones, by one kernel
//   table     kernels read their address from a table in device memory, which is written
//   host      the engine's way: one driver call per node
//   device    one kernel patches the nodes, which are device-updatable
//
// host_us: of the caller's thread. latency_us: from the first call to the end of the last kernel.
// Every launch's result is checked.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int kRounds = 40;
constexpr int kThreads = 256;

#define CHECK(call)                                                      \
  do {                                                                   \
    const cudaError_t error = (call);                                    \
    if (error != cudaSuccess) {                                          \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                   cudaGetErrorString(error));                           \
      std::exit(1);                                                      \
    }                                                                    \
  } while (0)

__global__ void read_directly(const float* source, float* sum) {
  if (threadIdx.x == 0) *sum = source[0];
}

__global__ void read_through_table(const float* const* source, float* sum) {
  if (threadIdx.x == 0) *sum = (*source)[0];
}

__global__ void copy_all(const float* const* from, float* const* to, size_t floats) {
  const float* source = from[blockIdx.y];
  float* target = to[blockIdx.y];
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < floats; i += gridDim.x * blockDim.x) {
    target[i] = source[i];
  }
}

__global__ void patch_all(const cudaGraphDeviceNode_t* nodes, const float* const* addresses,
                          int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) cudaGraphKernelNodeSetParam(nodes[i], 0, &addresses[i], sizeof(addresses[i]));
}

template <class T>
T* device_array(size_t count) {
  T* memory = nullptr;
  CHECK(cudaMalloc(&memory, std::max<size_t>(1, count) * sizeof(T)));
  return memory;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double now_us() {
  using namespace std::chrono;
  return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

struct Setup {
  int n;
  size_t floats;
  cudaStream_t stream;
  std::vector<const float*> buffers[2];  // two sets of inputs, used in turns
  const float** pinned;                  // the addresses of the next launch
  const float** table;                   // on the device
  float* sums;
};

Setup make_setup(int n, size_t bytes) {
  Setup s{n, bytes / sizeof(float), nullptr, {}, nullptr, nullptr, device_array<float>(n)};
  CHECK(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
  CHECK(cudaMallocHost(&s.pinned, n * sizeof(float*)));
  s.table = device_array<const float*>(n);
  for (int set = 0; set < 2; ++set) {
    float* memory = device_array<float>(s.floats * n);
    for (int i = 0; i < n; ++i) {
      const float first = static_cast<float>(set * 10000 + i);
      CHECK(cudaMemcpy(memory + i * s.floats, &first, sizeof first, cudaMemcpyHostToDevice));
      s.buffers[set].push_back(memory + i * s.floats);
    }
  }
  return s;
}

void check(const Setup& s, int set) {
  std::vector<float> sums(s.n);
  CHECK(cudaMemcpy(sums.data(), s.sums, s.n * sizeof(float), cudaMemcpyDeviceToHost));
  for (int i = 0; i < s.n; ++i) {
    if (sums[i] != static_cast<float>(set * 10000 + i)) {
      std::fprintf(stderr, "wrong result %d: %f\n", i, sums[i]);
      std::exit(1);
    }
  }
}

template <class Launch>
void measure(const char* way, const Setup& s, size_t bytes, Launch launch) {
  std::vector<double> host, latency;
  for (int round = 0; round < kRounds; ++round) {
    const int set = round % 2;
    CHECK(cudaStreamSynchronize(s.stream));
    const double start = now_us();
    launch(s.buffers[set]);
    const double issued = now_us();
    CHECK(cudaStreamSynchronize(s.stream));
    const double end = now_us();
    check(s, set);
    if (round < 4) continue;  // cold
    host.push_back(issued - start);
    latency.push_back(end - start);
  }
  std::printf(
      "{\"way\": \"%s\", \"parameters\": %d, \"bytes\": %zu, \"host_us\": %.2f, \"latency_us\": "
      "%.2f}\n",
      way, s.n, bytes, median(host), median(latency));
}

cudaGraph_t capture(const Setup& s, const std::vector<const float*>& inputs, bool through_table) {
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < s.n; ++i) {
    if (through_table) {
      read_through_table<<<1, kThreads, 0, s.stream>>>(s.table + i, s.sums + i);
    } else {
      read_directly<<<1, kThreads, 0, s.stream>>>(inputs[i], s.sums + i);
    }
  }
  CHECK(cudaStreamEndCapture(s.stream, &graph));
  return graph;
}

cudaGraphExec_t instantiate(cudaGraph_t graph, cudaStream_t stream) {
  cudaGraphExec_t executable = nullptr;
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  CHECK(cudaGraphUpload(executable, stream));
  return executable;
}

std::vector<cudaGraphNode_t> nodes_in_order(cudaGraph_t graph) {
  size_t count = 0;
  CHECK(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
  return nodes;
}

// Positions of the kernels, by the sum that they write: nodes come in no promised order.
std::vector<int> positions(const Setup& s, const std::vector<cudaGraphNode_t>& nodes) {
  std::vector<int> result;
  for (cudaGraphNode_t node : nodes) {
    cudaKernelNodeParams params{};
    CHECK(cudaGraphKernelNodeGetParams(node, &params));
    result.push_back(static_cast<int>(*static_cast<float**>(params.kernelParams[1]) - s.sums));
  }
  return result;
}

void write_addresses(const Setup& s, const std::vector<const float*>& inputs) {
  std::copy(inputs.begin(), inputs.end(), s.pinned);
  CHECK(cudaMemcpyAsync(s.table, s.pinned, s.n * sizeof(float*), cudaMemcpyHostToDevice, s.stream));
}

void by_copy(const Setup& s, size_t bytes) {
  float* fixed = device_array<float>(s.floats * s.n);
  std::vector<const float*> inputs;
  for (int i = 0; i < s.n; ++i) inputs.push_back(fixed + i * s.floats);
  float** targets = device_array<float*>(s.n);
  CHECK(cudaMemcpy(targets, inputs.data(), s.n * sizeof(float*), cudaMemcpyHostToDevice));
  cudaGraphExec_t executable = instantiate(capture(s, inputs, false), s.stream);
  const dim3 grid(static_cast<unsigned>(std::clamp<size_t>(s.floats / kThreads, 1, 64)), s.n);
  measure("copy", s, bytes, [&](const std::vector<const float*>& real) {
    write_addresses(s, real);
    copy_all<<<grid, kThreads, 0, s.stream>>>(s.table, targets, s.floats);
    CHECK(cudaGraphLaunch(executable, s.stream));
  });
  CHECK(cudaFree(fixed));
}

void by_table(const Setup& s, size_t bytes) {
  cudaGraphExec_t executable = instantiate(capture(s, s.buffers[0], true), s.stream);
  measure("table", s, bytes, [&](const std::vector<const float*>& real) {
    write_addresses(s, real);
    CHECK(cudaGraphLaunch(executable, s.stream));
  });
}

void by_host(const Setup& s, size_t bytes) {
  cudaGraph_t graph = capture(s, s.buffers[0], false);
  const std::vector<cudaGraphNode_t> nodes = nodes_in_order(graph);
  const std::vector<int> position = positions(s, nodes);
  std::vector<cudaKernelNodeParams> params(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    CHECK(cudaGraphKernelNodeGetParams(nodes[i], &params[i]));
  }
  cudaGraphExec_t executable = instantiate(graph, s.stream);
  measure("host", s, bytes, [&](const std::vector<const float*>& real) {
    for (size_t i = 0; i < nodes.size(); ++i) {
      *static_cast<const float**>(params[i].kernelParams[0]) = real[position[i]];
      CHECK(cudaGraphExecKernelNodeSetParams(executable, nodes[i], &params[i]));
    }
    CHECK(cudaGraphLaunch(executable, s.stream));
  });
}

void by_device(const Setup& s, size_t bytes) {
  cudaGraph_t graph = capture(s, s.buffers[0], false);
  const std::vector<cudaGraphNode_t> nodes = nodes_in_order(graph);
  const std::vector<int> position = positions(s, nodes);
  std::vector<cudaGraphDeviceNode_t> handles(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    cudaLaunchAttributeValue value{};
    value.deviceUpdatableKernelNode.deviceUpdatable = 1;
    CHECK(cudaGraphKernelNodeSetAttribute(nodes[i], cudaLaunchAttributeDeviceUpdatableKernelNode,
                                          &value));
    handles[position[i]] = value.deviceUpdatableKernelNode.devNode;
  }
  auto* on_device = device_array<cudaGraphDeviceNode_t>(handles.size());
  CHECK(cudaMemcpy(on_device, handles.data(), handles.size() * sizeof(handles[0]),
                   cudaMemcpyHostToDevice));
  cudaGraphExec_t executable = instantiate(graph, s.stream);
  measure("device", s, bytes, [&](const std::vector<const float*>& real) {
    write_addresses(s, real);
    patch_all<<<(s.n + kThreads - 1) / kThreads, kThreads, 0, s.stream>>>(on_device, s.table, s.n);
    CHECK(cudaGraphLaunch(executable, s.stream));
  });
}

}  // namespace

int main() {
  for (const size_t bytes : {size_t{4} << 10, size_t{256} << 10}) {
    for (const int n : {1, 10, 30, 100, 300, 1000}) {
      const Setup setup = make_setup(n, bytes);
      by_copy(setup, bytes);
      by_table(setup, bytes);
      by_host(setup, bytes);
      by_device(setup, bytes);
      for (const auto& set : setup.buffers) CHECK(cudaFree(const_cast<float*>(set[0])));
    }
  }
  return 0;
}
