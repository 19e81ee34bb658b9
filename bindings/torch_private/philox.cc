#include "torch_private/philox.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

namespace pygraph::bindings {
namespace {

// at::PhiloxCudaState, from ATen/cuda/detail/PhiloxCudaStateRaw.cuh of PyTorch 2.11.
struct CapturedPhiloxState {
  uint64_t seed_address;
  uint64_t offset_address;
  uint64_t drawn_before;
  bool captured;
};

std::optional<RandomState> read_sentinel(const Node& node) {
  for (const Range& param : node.params) {
    if (param.size != sizeof(CapturedPhiloxState)) continue;
    CapturedPhiloxState state{};
    std::memcpy(&state, node.image.data() + param.address, sizeof state);
    if (state.captured)
      return RandomState{state.seed_address, state.offset_address, state.drawn_before};
  }
  return std::nullopt;
}

}  // namespace

std::vector<CUgraphNode> take_random_sentinels(Recording& recording, size_t count) {
  std::vector<CUgraphNode> removed;
  if (recording.nodes.size() < count) throw NotRelocatable("random sentinels are missing");
  const size_t first = recording.nodes.size() - count;
  for (size_t i = first; i < recording.nodes.size(); ++i) {
    const auto state = read_sentinel(recording.nodes[i]);
    if (!state) throw NotRelocatable("the layout of PyTorch's random state is not the known one");
    recording.random.push_back(*state);
    removed.push_back(recording.nodes[i].handle);
  }
  recording.nodes.resize(first);
  std::erase_if(recording.edges, [&](const Edge& e) { return e.to >= first || e.from >= first; });
  return removed;
}

PhiloxPosition reserve_random(const at::Generator& generator, uint64_t increment) {
  at::Generator mutable_generator = generator;
  const std::lock_guard lock(mutable_generator.mutex());
  const PhiloxPosition position{mutable_generator.current_seed(), mutable_generator.get_offset()};
  mutable_generator.set_offset(position.offset + increment);
  return position;
}

void unreserve_random(const at::Generator& generator, PhiloxPosition position, uint64_t increment) {
  at::Generator mutable_generator = generator;
  const std::lock_guard lock(mutable_generator.mutex());
  const bool is_as_left = mutable_generator.current_seed() == position.seed &&
                          mutable_generator.get_offset() == position.offset + increment;
  if (is_as_left) mutable_generator.set_offset(position.offset);
}

}  // namespace pygraph::bindings
