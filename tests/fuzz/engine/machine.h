// The simulated device that programs run on, and recordings of programs.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "effects.h"
#include "program.h"
#include "pygraph/pygraph.h"
#include "simulator/simulator.h"

namespace pygraph::fuzz {

// The engine did something wrong.
class Wrong : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Where an access's words stand in which node's image.
struct Words {
  uint32_t node = 0;  // of the recording
  uint32_t offset = 0;
  uint32_t end_offset = 0;  // of the second word, if there is one
  bool has_end = false;
};

struct Recorded {
  std::array<std::unique_ptr<AddressSpace>, 2> spaces;
  std::array<Recording, 2> recordings;
  Graph graph;  // of the second
  // By step, launch and access; none for accesses through tables.
  std::vector<std::vector<std::vector<Words>>> words;
  std::vector<uint32_t> input_slots;  // values, by slot
  std::vector<uint32_t> output_slots;
  std::vector<uint32_t> random_slots;
};

class Machine {
 public:
  Machine();
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  const Driver& driver() const { return simulator_.driver(); }
  simulator::Simulator& simulator() { return simulator_; }
  CUstream stream() const { return stream_.get(); }

  // Kernels that run from here on are the program's. The constants get memory.
  void begin(const Program& program);
  void end();
  std::span<const uint64_t> constants() const { return constants_; }  // addresses, by value
  // Of the surroundings' allocator, which gives it to others: no kernel uses it.
  std::vector<Range> foreign_memory() const;

  // Throws what the engine throws.
  Recorded record(const Program& program);

 private:
  friend class Capture;
  void run_kernel(void** params, bool is_early);

  simulator::Simulator simulator_;
  Stream stream_;
  Module module_;
  std::vector<CUfunction> functions_;  // by layout, those that wait and those that do not
  const Program* program_ = nullptr;
  std::vector<const Launch*> launches_;  // by number
  std::vector<Effects> effects_;
  std::vector<std::vector<Words>> places_;  // by number
  std::vector<uint64_t> constants_;
  std::vector<uint64_t> owned_;
};

}  // namespace pygraph::fuzz
