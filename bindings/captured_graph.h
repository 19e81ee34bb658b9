// A compiled function for one signature of its arguments, as an executable graph: the replay.
#pragma once

#include <ATen/core/Generator.h>
#include <Python.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "outputs.h"
#include "pygraph/executable.h"
#include "workspace.h"

namespace pygraph {

// Where a graph's random numbers come from: argument `argument`, or the device's default generator.
struct RandomSource {
  static constexpr int kDefaultGenerator = -1;
  int argument = kDefaultGenerator;
};

class CapturedGraph {
 public:
  CapturedGraph(const Driver& driver, c10::Device device, std::vector<Argument> arguments,
                OutputPlan outputs, std::vector<RandomSource> random, Graph graph,
                LinkedGraph linked);
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  // Whether the graph may be replayed for these arguments.
  bool matches(PyObject* arguments) const;

  // Takes room in the device's workspace, once; the first replay does it otherwise. Throws
  // c10::OutOfMemoryError where there is none.
  void reserve_workspace();

  // Binds the arguments and fresh outputs, launches on PyTorch's current stream and returns the
  // outputs. Needs Python's lock, gives it up from bind to launch. Throws DriverError if the driver
  // refuses, c10::Error if the outputs cannot be allocated; nothing was launched then.
  // `poison_outputs` fills fresh outputs with 0xFF first, for verification.
  PyObject* replay(PyObject* arguments, bool poison_outputs = false);

  const LinkedGraph& linked() const { return executable_.linked(); }
  c10::Device device() const { return device_; }
  uint64_t output_bytes() const;  // of the memory that a replay allocates

  // Counters for the report; written without Python's lock.
  std::atomic<uint64_t> replays = 0;
  std::atomic<uint64_t> nodes_touched = 0;
  std::string failure;  // why the graph stopped being used; empty while it is usable

 private:
  struct Launch;
  void collect_input_addresses(PyObject* arguments, std::vector<uint64_t>& addresses) const;
  void bind_and_launch(Launch& launch);

  const Driver& driver_;
  c10::Device device_;
  std::vector<Argument> arguments_;
  OutputPlan outputs_;
  std::vector<RandomSource> random_;
  bool draws_ = false;
  bool reserved_ = false;
  c10::DataPtr random_memory_;  // 16 bytes (seed, offset) per source
  ExecutableGraph executable_;
  Workspace& workspace_;
};

}  // namespace pygraph
