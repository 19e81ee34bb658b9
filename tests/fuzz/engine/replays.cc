#include "replays.h"

#include <algorithm>
#include <cstring>

#include "reference.h"

namespace pygraph::fuzz {
namespace {

std::byte* at(uint64_t address) {
  return reinterpret_cast<std::byte*>(address);
}

}  // namespace

Replays::Replays(Machine& machine, Arena& arena, const Program& program, const Recorded& recorded,
                 const LinkedGraph& linked)
    : machine_(machine),
      arena_(arena),
      program_(program),
      recorded_(recorded),
      linked_(linked),
      random_(program.seed),
      written_(written_bytes(program)),
      regions_(linked.regions.size()),
      states_(recorded.random_slots.size()) {
  arena_.begin(total_size());
  for (const Value& value : program.values) values_.emplace_back(new std::byte[value.size + 16]);
}

uint64_t Replays::total_size() const {
  uint64_t size = linked_.workspace_size_if_kept;
  for (const Value& value : program_.values) {
    const bool is_callers = value.kind == ValueKind::kInput || value.kind == ValueKind::kOutput;
    if (is_callers) size += std::max(value.size, value.given) + 512;
  }
  for (const Region& region : linked_.regions) size += region.size + 512;
  return size;
}

void Replays::place(Piece& piece, uint64_t size, uint64_t low_bits) {
  const bool stays = piece.size == size && piece.address % 512 == low_bits && random_() % 3 == 0;
  if (stays) return arena_.restore(piece.address);
  if (piece.address != 0) arena_.release(piece.address);
  piece = {arena_.take(size, low_bits, random_), size};
}

void Replays::move() {
  if (blocks_.empty() || random_() % 4 != 0) place_inputs();
  place_outputs();
  const bool has_states = !states_.empty();
  for (size_t i = 0; has_states && i < states_.size(); ++i)
    place(states_[i], 16, 8 * (random_() % 2));
}

// Each input that is given away, and its views, in a block of its own; others sometimes overlap.
void Replays::place_inputs() {
  struct Wanted {
    uint64_t size;
    uint32_t given;
  };
  std::vector<Wanted> wanted;
  inputs_.assign(recorded_.input_slots.size(), {});
  std::vector<size_t> shared;  // blocks that others may lie in
  std::vector<size_t> block_of(program_.values.size(), 0);
  for (uint32_t slot = 0; slot < inputs_.size(); ++slot) {
    const uint32_t v = recorded_.input_slots[slot];
    const Value& value = program_.values[v];
    if (value.view_of != kNone) {
      inputs_[slot] = {block_of[value.view_of], value.view_offset};
      continue;
    }
    if (value.given == 0 && !shared.empty() && random_() % 4 == 0) {
      const size_t block = shared[random_() % shared.size()];
      const uint64_t offset = random_() % 3 == 0 ? 0 : random_() % wanted[block].size;
      inputs_[slot] = {block, offset};
      wanted[block].size = std::max(wanted[block].size, offset + value.size);
      continue;
    }
    block_of[v] = wanted.size();
    inputs_[slot] = {wanted.size(), 0};
    if (value.given == 0) shared.push_back(wanted.size());
    wanted.push_back({std::max(value.size, value.given), value.given > 0 ? slot : kNone});
  }
  for (size_t b = wanted.size(); b < blocks_.size(); ++b) {
    arena_.release(blocks_[b].piece.address);
  }
  blocks_.resize(wanted.size());
  for (size_t b = 0; b < wanted.size(); ++b) {
    blocks_[b].given = wanted[b].given;
    place(blocks_[b].piece, wanted[b].size, wanted[b].given == kNone ? random_() % 512 : 0);
  }
}

uint64_t Replays::output_size(uint32_t slot) const {
  uint64_t size = program_.values[recorded_.output_slots[slot]].size;
  for (const Region& region : linked_.regions) {
    if (region.output == slot) size = std::max(size, region.size);
  }
  return size;
}

void Replays::place_outputs() {
  const auto count = static_cast<uint32_t>(recorded_.output_slots.size());
  for (const Piece& block : output_blocks_) arena_.release(block.address);
  output_blocks_.clear();
  outputs_.assign(count, {});
  for (uint32_t slot = 0; slot < count; ++slot) {
    if (outputs_[slot].address != 0) continue;
    // Perhaps the next ones lie beside it, in one block.
    const uint32_t last = random_() % 3 == 0 ? std::min(count, slot + 3) : slot + 1;
    std::vector<uint64_t> offsets;
    uint64_t end = 0;
    for (uint32_t other = slot; other < last; ++other) {
      offsets.push_back(end);
      end = (end + output_size(other) + 511) / 512 * 512;
    }
    end = offsets.back() + output_size(last - 1);
    output_blocks_.push_back({arena_.take(end, 0, random_), end});
    for (uint32_t other = slot; other < last; ++other) {
      outputs_[other] = {output_blocks_.back().address + offsets[other - slot], output_size(other)};
    }
  }
  for (size_t r = 0; r < regions_.size(); ++r) {
    const Region& region = linked_.regions[r];
    const bool is_own = region.input == Region::kOwnBlock && region.output == Region::kNoOutput;
    if (is_own) place(regions_[r], region.size);
  }
}

uint64_t Replays::address_of_input(uint32_t slot) const {
  return blocks_[inputs_[slot].block].piece.address + inputs_[slot].offset;
}

std::vector<uint64_t> Replays::prepare(bool donated) {
  donated_ = donated;
  const uint64_t needed = donated ? linked_.workspace_size : linked_.workspace_size_if_kept;
  if (needed > 0) place(workspace_, needed);
  std::vector<uint64_t> addresses;
  for (Block& block : blocks_) {
    block.content.resize(block.piece.size);
    scatter(block.content.data(), block.content.size(), random_());
    std::memcpy(at(block.piece.address), block.content.data(), block.content.size());
  }
  for (uint32_t slot = 0; slot < inputs_.size(); ++slot)
    addresses.push_back(address_of_input(slot));
  output_addresses_.clear();
  for (uint32_t slot = 0; slot < outputs_.size(); ++slot) {
    const OutputPlacement& donor = linked_.placements[slot];
    output_addresses_.push_back(donated && donor ? address_of_input(donor.input) + donor.offset
                                                 : outputs_[slot].address);
  }
  addresses.insert(addresses.end(), output_addresses_.begin(), output_addresses_.end());
  addresses.push_back(needed > 0 ? workspace_.address : 0);
  for (const Piece& state : states_) {
    scatter(at(state.address), state.size, random_());
    addresses.push_back(state.address);
  }
  for (size_t r = 0; r < regions_.size(); ++r) {
    const Region& region = linked_.regions[r];
    if (region.output != Region::kNoOutput) {
      addresses.push_back(output_addresses_[region.output]);
    } else if (region.input == Region::kOwnBlock) {
      addresses.push_back(regions_[r].address);
    } else {
      addresses.push_back(donated ? address_of_input(region.input)
                                  : workspace_.address + region.fallback_offset);
    }
  }
  for (size_t v = 0; v < program_.values.size(); ++v) {
    if (program_.values[v].kind != ValueKind::kConstant) continue;
    scatter(at(machine_.constants()[v]), program_.values[v].size, random_());
  }
  run_program();
  return addresses;
}

// On copies of what the launch will find.
void Replays::run_program() {
  std::vector<std::byte*> bases;
  uint32_t input = 0;
  uint32_t state = 0;
  for (size_t v = 0; v < program_.values.size(); ++v) {
    const Value& value = program_.values[v];
    std::byte* base = values_[v].get();
    if (value.kind == ValueKind::kInput) {
      const Input& place = inputs_[input++];
      base = blocks_[place.block].content.data() + place.offset;
    } else if (value.kind == ValueKind::kConstant) {
      std::memcpy(base, at(machine_.constants()[v]), value.size);
    } else if (value.kind == ValueKind::kRandom) {
      std::memcpy(base, at(states_[state++].address), 16);
    }
    bases.push_back(base);
  }
  run_reference(program_, bases);
}

bool Replays::is_overwritten(const Block& block) const {
  return donated_ && block.given != kNone &&
         std::ranges::find(linked_.donated, block.given, &DonatedInput::slot) !=
             linked_.donated.end();
}

void Replays::check() const {
  for (uint32_t slot = 0; slot < outputs_.size(); ++slot) {
    const uint32_t v = recorded_.output_slots[slot];
    for (const auto& [begin, end] : written_[v].ranges()) {
      const bool is_right = std::memcmp(at(output_addresses_[slot] + begin),
                                        values_[v].get() + begin, end - begin) == 0;
      if (!is_right) {
        throw Wrong("output " + std::to_string(slot) + (donated_ ? " (donated)" : "") +
                    " has wrong bytes");
      }
    }
  }
  for (const Block& block : blocks_) {
    if (is_overwritten(block)) continue;
    if (std::memcmp(at(block.piece.address), block.content.data(), block.piece.size) != 0) {
      throw Wrong("memory of inputs has wrong bytes");
    }
  }
  for (size_t v = 0; v < program_.values.size(); ++v) {
    if (program_.values[v].kind != ValueKind::kConstant) continue;
    const bool is_right =
        std::memcmp(at(machine_.constants()[v]), values_[v].get(), program_.values[v].size) == 0;
    if (!is_right) throw Wrong("a constant has wrong bytes");
  }
  if (!arena_.is_untouched()) throw Wrong("memory that belongs to nobody was written");
}

}  // namespace pygraph::fuzz
