#include "replay/memory_plan.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace pygraph::bindings {
namespace {

constexpr unsigned char kInternalPoison = 0xFF;

}  // namespace

MemoryPlan::MemoryPlan(const std::vector<Argument>& arguments, const OutputPlan& outputs,
                       const ExecutableGraph& executable, c10::Device device)
    : outputs_(outputs), executable_(executable), linked_(executable.linked()), device_(device) {
  for (uint32_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].is_relocated()) slot_arguments_.push_back(i);
  }
  plan_donations();
  plan_allocations();
}

void MemoryPlan::plan_donations() {
  for (const DonatedInput& input : linked_.donated) {
    GivenAway& tensors = donations_.emplace_back();
    tensors.bytes = input.size;
    tensors.positions.push_back(slot_arguments_[input.slot]);
    for (const uint32_t view : input.views) tensors.positions.push_back(slot_arguments_[view]);
  }
  for (const uint32_t donor : outputs_.block_donors) {
    donors_.push_back(donor == OutputPlacement::kNone ? kNoArgument : slot_arguments_[donor]);
  }
}

// A block of internal memory in an output is the output's allocation. (Such outputs do not share
// theirs: they are larger than blocks that are shared, see kLargeBlock in recording_pair.cc.)
// Largest first: PyTorch's allocator gives the smallest free piece that fits, and cuts it, so small
// allocations that come first would break up the pieces that large ones had in the call before.
void MemoryPlan::plan_allocations() {
  for (uint32_t i = 0; i < outputs_.block_bytes.size(); ++i) {
    allocations_.push_back({outputs_.block_bytes[i], true, i});
  }
  const std::vector<const OutputBuffer*> slots = output_slots(outputs_);
  block_offsets_.resize(linked_.regions.size());
  for (uint32_t i = 0; i < linked_.regions.size(); ++i) {
    const Region& region = linked_.regions[i];
    if (region.output != Region::kNoOutput) {
      uint64_t& bytes = allocations_[slots[region.output]->block].bytes;
      bytes = std::max(bytes, region.size);
    } else if (region.input == Region::kOwnBlock) {
      allocations_.push_back({region.size, false, i});
      block_offsets_[i] = block_bytes_;
      block_bytes_ += align_up(region.size);
    }
  }
  std::ranges::stable_sort(allocations_, std::greater(), &Allocation::bytes);
}

std::vector<uint32_t> MemoryPlan::donated() const {
  std::vector<uint32_t> positions;
  for (const GivenAway& tensors : donations_) {
    positions.insert(positions.end(), tensors.positions.begin(), tensors.positions.end());
  }
  return positions;
}

bool MemoryPlan::gives_away(PyObject* arguments, Py_ssize_t holders) const {
  if (holders == 0 || donations_.empty()) return false;
  return std::ranges::all_of(donations_, [&](const GivenAway& tensors) {
    return is_given_away(arguments, tensors, holders);
  });
}

uint64_t MemoryPlan::output_bytes() const {
  return std::accumulate(outputs_.block_bytes.begin(), outputs_.block_bytes.end(), uint64_t{0});
}

void MemoryPlan::collect_input_addresses(PyObject* arguments, const OwnInputs* own,
                                         std::vector<uint64_t>& addresses) const {
  for (const uint32_t position : slot_arguments_) {
    if (own != nullptr && own->has(position)) {
      addresses.push_back(own->address(position));
      continue;
    }
    addresses.push_back(address_of_argument(PyList_GET_ITEM(arguments, position)));
  }
}

// A block that was allocated on another stream goes back to that stream's free ones: not before
// this stream is done with it. (PyTorch does nothing where that is the same stream.)
void MemoryPlan::take_donated(Launch& launch, PyObject* arguments, Donations& donations) const {
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::Stream stream = guard.getStream(device_);
  for (const GivenAway& tensors : donations_) {
    PyObject* first = PyList_GET_ITEM(arguments, tensors.positions.front());
    guard.recordDataPtrOnStream(unpack_tensor(first).storage().data_ptr(), stream);
  }
  for (size_t i = 0; i < donors_.size(); ++i) {
    if (donors_[i] == kNoArgument) continue;
    launch.outputs[i] = c10::Storage(c10::Storage::use_byte_size_t(), outputs_.block_bytes[i],
                                     donations.take(PyList_GET_ITEM(arguments, donors_[i])),
                                     c10::GetAllocator(device_.type()), /*resizable=*/true);
    donations.given_to(launch.outputs[i]);
  }
}

void MemoryPlan::allocate(Launch& launch) const {
  static c10::Allocator* allocator = c10::GetAllocator(device_.type());
  for (const auto& [bytes, is_output, index] : allocations_) {
    if (!is_output) {
      if (!launch.holds_blocks) launch.regions[index] = allocator->allocate(bytes);
    } else if (!launch.outputs[index]) {
      launch.outputs[index] =
          c10::Storage(c10::Storage::use_byte_size_t(), outputs_.block_bytes[index],
                       allocator->allocate(bytes), allocator, /*resizable=*/true);
    }
  }
  for (const OutputBuffer& buffer : outputs_.buffers) {
    if (buffer.bytes == 0) continue;
    const auto block = reinterpret_cast<uint64_t>(launch.outputs[buffer.block].mutable_data());
    launch.addresses.push_back(block + buffer.offset);
  }
}

void MemoryPlan::place_internal_memory(Launch& launch, uint64_t workspace,
                                       uint64_t random_memory) const {
  const size_t workspace_slot = executable_.workspace_slot();
  launch.addresses[workspace_slot] = workspace;
  const size_t states = random_memory != 0 ? linked_.recording.random.size() : 0;
  for (size_t i = 0; i < states; ++i) {
    launch.addresses[workspace_slot + 1 + i] = random_memory + i * kRandomStateSize;
  }
  for (size_t i = 0; i < linked_.regions.size(); ++i) {
    const Region& region = linked_.regions[i];
    uint64_t& address = launch.addresses[executable_.region_slot() + i];
    if (region.output != Region::kNoOutput) {
      address = launch.addresses[slot_arguments_.size() + region.output];
    } else if (region.input == Region::kOwnBlock) {
      address = launch.holds_blocks
                    ? workspace + start_of_blocks(launch.donated) + block_offsets_[i]
                    : reinterpret_cast<uint64_t>(launch.regions[i].get());
    } else {
      address =
          launch.donated ? launch.addresses[region.input] : workspace + region.fallback_offset;
    }
  }
}

void MemoryPlan::poison_outputs(const Driver& driver, const Launch& launch) const {
  const auto value = static_cast<unsigned char>(launch.poison);
  for (size_t i = 0; i < launch.outputs.size(); ++i) {
    const c10::Storage& block = launch.outputs[i];
    // What was an input until now still is one when the graph starts.
    if (block.nbytes() == 0 || (launch.donated && donors_[i] != kNoArgument)) continue;
    const auto address = reinterpret_cast<uint64_t>(block.mutable_data());
    PYGRAPH_CHECK(driver, memset_d8_async(address, value, block.nbytes(), launch.stream.handle));
  }
}

void MemoryPlan::poison_internal_memory(const Driver& driver, const Launch& launch,
                                        uint64_t workspace, uint64_t size) const {
  const auto fill = [&](uint64_t address, uint64_t bytes) {
    if (bytes == 0) return;
    PYGRAPH_CHECK(driver, memset_d8_async(address, kInternalPoison, bytes, launch.stream.handle));
  };
  fill(workspace, size);
  for (size_t i = 0; i < launch.regions.size(); ++i) {
    if (!launch.regions[i]) continue;
    fill(reinterpret_cast<uint64_t>(launch.regions[i].get()), linked_.regions[i].size);
  }
}

}  // namespace pygraph::bindings
