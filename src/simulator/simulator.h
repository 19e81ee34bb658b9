// A CUDA driver made of host memory, for tests and demonstrations on machines without a GPU.
//
// It implements the functions of the Driver table: capture (fork and join by events included),
// graphs, executable graphs, updates, launches, virtual memory. Kernels are host functions over
// host memory, so a relocated replay computes real results, and a wrong address really corrupts
// them. Work executes at the call that enqueues it; timing and overlap are not simulated, but the
// nodes of a graph can be made to run in any order that its edges allow.
//
// What it claims about the driver is checked by running the same engine tests on a GPU.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pygraph/driver.h"

namespace pygraph::simulator {

// A kernel: its name, the sizes of its parameters in bytes (laid out with natural alignment), and
// what one launch does. `params[i]` points to parameter i.
struct Kernel {
  std::string name;
  std::vector<size_t> param_sizes;
  std::function<void(void** params)> body;
  // What a launch does before it waits for the kernel in front of it, if it is launched with
  // programmatic stream serialization, and whether it waits at all before it runs `body`.
  std::function<void(void** params)> prologue = nullptr;
  bool waits = true;
};

// The simulated device of this process; at most one exists at a time. The driver's functions are
// thread-safe, this class is not.
class Simulator {
 public:
  Simulator();
  ~Simulator();
  Simulator(const Simulator&) = delete;
  Simulator& operator=(const Simulator&) = delete;

  const Driver& driver() const;

  // Makes the kernel available to module_get_function by its name.
  void add_kernel(Kernel kernel);

  // Lets the `nth` call from now (1: the next) of a function, named as in cuda.h, fail with `code`.
  void fail(const std::string& symbol, int nth, abi::Result code);

  // Failures that were asked for and have not happened will not happen.
  void forget_failures();

  // Calls made so far of a function, named as in cuda.h.
  int calls(const std::string& symbol) const;

  // Lets the nodes of each graph run in a random order that its edges allow. Kernels that overlap
  // the one in front of them may begin when that one has begun, and what they do before they wait
  // may come before anything that it does. A node behind any other edge begins when the node in
  // front of it, and all that this one overlaps, have ended.
  void shuffle(unsigned seed);

  // Appends a copy of the graph to what the stream captures, as one node.
  void capture_child(CUstream stream, CUgraph graph);

  // Until it ends, events that are recorded on the stream from now on are not complete, as if its
  // work took that long. Ends with the stream, too.
  void hold(CUstream stream, bool is_held);

  // The flags with which the last executable was instantiated (abi::kInstantiate...).
  uint64_t last_executable_flags() const;

  // Graphs, executables, streams, events, modules, allocations and reservations not yet given back.
  size_t live_objects() const;
};

}  // namespace pygraph::simulator
