// The device that engine tests run on: simulated by default, the machine's GPU if the environment
// has PYGRAPH_TEST_DRIVER=cuda. The same test bodies run on both.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pygraph/pygraph.h"
#include "simulator/simulator.h"

namespace pygraph::testing {

class Device {
 public:
  Device();
  ~Device();

  const Driver& driver() const { return *driver_; }
  bool is_simulated() const { return simulator_ != nullptr; }
  simulator::Simulator& simulator() { return *simulator_; }
  CUfunction kernel(const char* name) const;

  // Device memory, given back with the Device.
  uint64_t allocate(uint64_t size);
  uint64_t floats(const std::vector<float>& values);
  // Pinned memory of the host. Never freed: the driver's table has no function for it.
  std::span<float> pinned(size_t count, float value) const;
  std::vector<float> read_floats(uint64_t address, size_t count) const;
  void write_bytes(uint64_t address, const void* data, size_t size) const;
  void synchronize() const;

  // Launches of the test kernels. All work on `count` floats.
  void add_constant(CUstream stream, uint64_t to, uint64_t from, unsigned count, float value) const;
  void add(CUstream stream, uint64_t to, uint64_t a, uint64_t b, unsigned count) const;
  // Same as add_constant, its parameters handed over as one packed buffer.
  void add_constant_packed(CUstream stream, uint64_t to, uint64_t from, unsigned count,
                           float value) const;
  // to[i] = from[i] + 1, both addresses inside a struct of {to, padding, from}.
  void add_one_struct(CUstream stream, uint64_t to, uint64_t padding, uint64_t from,
                      unsigned count) const;
  // to[i] = (*table)[i] + 1: the source's address is hidden in device memory.
  void add_one_hidden(CUstream stream, uint64_t to, uint64_t table, unsigned count) const;

 private:
  std::unique_ptr<simulator::Simulator> simulator_;
  const Driver* driver_ = nullptr;
  Module module_;
  std::vector<uint64_t> memory_;
};

class DeviceTest : public ::testing::Test {
 protected:
  Device device;
  const Driver& driver = device.driver();
  Stream stream = create_stream(driver);
};

// An allocator over stand-in addresses that reuses memory as PyTorch's does, and logs it.
class RecordedPool {
 public:
  RecordedPool(const Device& device, AddressSpace& space, CUstream stream)
      : device_(device), space_(space), stream_(stream) {}
  uint64_t allocate(uint64_t size);
  void free(uint64_t address);
  const AllocationLog& log() const { return log_; }

 private:
  uint32_t node_count() const;
  const Device& device_;
  AddressSpace& space_;
  CUstream stream_;
  AllocationLog log_;
  std::vector<std::pair<uint64_t, uint64_t>> free_;  // (address, size)
  std::vector<std::pair<uint64_t, uint64_t>> used_;
};

// What a recorded computation works with. It returns the addresses of its outputs.
struct Session {
  CUstream stream;
  std::span<const uint64_t> inputs;
  RecordedPool& pool;
};
using Computation = std::function<std::vector<uint64_t>(Session&)>;

// Two recordings of a computation and the graph of the second.
struct TwoRecordings {
  std::unique_ptr<AddressSpace> space_a;
  std::unique_ptr<AddressSpace> space_b;
  Recording first;
  Recording second;
  Graph graph;

  LinkedGraph link(const Driver& driver, const MemoryOptions& memory = {}, uint32_t lanes = 1) {
    return pygraph::link(driver, first, second, memory, lanes);
  }
};

// Declares that each kernel writes to its first address and reads from the others.
void declare_reads(Recording& recording);

TwoRecordings record_twice(const Device& device, const std::vector<uint64_t>& input_sizes,
                           const Computation& computation);

}  // namespace pygraph::testing
