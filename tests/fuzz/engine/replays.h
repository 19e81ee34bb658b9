// Replays of a program's graph, each compared byte by byte with the program as it stands.
#pragma once

#include <map>
#include <memory>
#include <random>

#include "arena.h"
#include "intervals.h"
#include "machine.h"

namespace pygraph::fuzz {

class Replays {
 public:
  Replays(Machine& machine, Arena& arena, const Program& program, const Recorded& recorded,
          const LinkedGraph& linked);

  // Other contents; other addresses for some of what there is.
  void move();
  // The addresses by slot, if the inputs are given away or not. Fills all memory.
  std::vector<uint64_t> prepare(bool donated);
  // Throws Wrong if anything is not what it should be after a launch.
  void check() const;

 private:
  struct Piece {  // of the arena
    uint64_t address = 0;
    uint64_t size = 0;
  };
  struct Block {  // of inputs
    Piece piece;
    std::vector<std::byte> content;  // before, and then what the program makes of it
    uint32_t given = kNone;          // slot, if it may be given away
  };
  struct Input {
    size_t block = 0;
    uint64_t offset = 0;
  };

  uint64_t total_size() const;
  void place_inputs();
  void place(Piece& piece, uint64_t size, uint64_t low_bits = 0);
  uint64_t output_size(uint32_t slot) const;
  void place_outputs();
  void run_program();
  bool is_overwritten(const Block& block) const;
  uint64_t address_of_input(uint32_t slot) const;

  Machine& machine_;
  Arena& arena_;
  const Program& program_;
  const Recorded& recorded_;
  const LinkedGraph& linked_;
  std::mt19937_64 random_;
  std::vector<Intervals> written_;
  std::vector<Block> blocks_;
  std::vector<Input> inputs_;   // by slot
  std::vector<Piece> outputs_;  // by slot; several may lie in one block
  std::vector<Piece> output_blocks_;
  std::vector<Piece> regions_;  // by region, those that are blocks of their own
  std::vector<Piece> states_;   // random
  Piece workspace_;
  bool donated_ = false;
  std::vector<uint64_t> output_addresses_;
  std::vector<std::unique_ptr<std::byte[]>> values_;  // what the program makes of the others
};

}  // namespace pygraph::fuzz
