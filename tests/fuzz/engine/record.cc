// Records a random program twice, as PyTorch's bindings would.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "layouts.h"
#include "machine.h"
#include "pool.h"

namespace pygraph::fuzz {

// One recording.
class Capture {
 public:
  Capture(Machine& machine, const Program& program, int index, AddressSpace& space)
      : machine_(machine),
        driver_(machine.driver()),
        program_(program),
        index_(index),
        space_(space),
        random_(program.seed * 3 + index),
        addresses_(machine.constants_),
        inner_(create_stream(driver_)) {
    for (uint32_t i = 0; i < kMostStreams; ++i) {
      pools_.emplace_back(space, program.seed * 2 + index + 1000 * i, program.has_gaps);
      const bool is_used =
          std::ranges::find(program.steps, i, &Step::stream) != program.steps.end();
      side_.push_back(i > 0 && is_used ? create_stream(driver_) : Stream());
    }
    if (std::ranges::any_of(program.steps, &Step::stream)) event_ = create_event(driver_);
  }

  void run(Recorded& result) {
    Recording& recording = result.recordings[index_];
    std::vector<Range> inputs;
    for (uint32_t v = 0; v < program_.values.size(); ++v) {
      const Value& value = program_.values[v];
      if (value.kind != ValueKind::kInput) continue;
      addresses_[v] = space_.allocate(value.size, value.low_bits, AddressSpace::Content::kFloating);
      inputs.push_back({addresses_[v], value.size});
    }
    const CUstream stream = machine_.stream();
    PYGRAPH_CHECK(driver_, stream_begin_capture(stream, abi::kCaptureModeThreadLocal));
    CUgraph raw = nullptr;
    try {
      for (uint32_t s = 0; s < program_.steps.size(); ++s) capture_step(s);
      for (const Stream& side : side_) {
        if (side.get() != nullptr) wait(stream, side.get());
      }
      PYGRAPH_CHECK(driver_, stream_end_capture(stream, &raw));
    } catch (...) {  // of the driver, perhaps because a test lets it fail
      driver_.stream_end_capture(stream, &raw);
      if (raw != nullptr) driver_.graph_destroy(raw);
      throw;
    }
    Graph graph(driver_, raw);
    set_overlaps(raw);
    if (program_.seed % 16 == 15) change_an_edge(raw);
    recording = read_graph(driver_, raw);
    recording.allocations = log_.allocations();
    recording.inputs = std::move(inputs);
    recording.address_space = space_.range();
    for (uint32_t v = 0; v < program_.values.size(); ++v) {
      const Value& value = program_.values[v];
      if (value.kind == ValueKind::kOutput) recording.outputs.push_back(addresses_[v]);
      if (value.kind == ValueKind::kScratch) recording.scratch.push_back(addresses_[v]);
      if (value.kind == ValueKind::kRandom) {
        recording.random.push_back({addresses_[v], addresses_[v] + 512, 0});
      }
    }
    declare(recording);
    name_operators(recording);
    result.words = std::move(words_);
    result.graph = std::move(graph);
  }

 private:
  // Of the stream that the value is allocated on, as PyTorch's allocator has one for each.
  Pool& pool_of(const Value& value) { return pools_[program_.steps[value.born].stream]; }

  CUstream stream_at(uint32_t index) const {
    return index == 0 ? machine_.stream() : side_[index].get();
  }
  void wait(CUstream waiting, CUstream stream) {
    PYGRAPH_CHECK(driver_, event_record(event_.get(), stream));
    PYGRAPH_CHECK(driver_, stream_wait_event(waiting, event_.get(), 0));
  }

  void free_values(uint32_t s, bool that_linger) {
    for (uint32_t v = 0; v < program_.values.size(); ++v) {
      const Value& value = program_.values[v];
      if (value.freed != s || value.lingers != that_linger) continue;
      pool_of(value).free(addresses_[v]);
      log_.free(addresses_[v], s);
    }
  }

  void capture_step(uint32_t s) {
    free_values(s, false);
    for (uint32_t v = 0; v < program_.values.size(); ++v) {
      const Value& value = program_.values[v];
      if (!is_made(value.kind) || value.born != s) continue;
      addresses_[v] = pool_of(value).allocate(value.size);
      log_.allocate(addresses_[v], value.size, s);
    }
    free_values(s, true);
    const Step& step = program_.steps[s];
    const CUstream stream = stream_at(step.stream);
    for (uint32_t i = 0; i < kMostStreams; ++i) {
      if ((step.joined >> i & 1) != 0) wait(stream, stream_at(i));
    }
    words_.emplace_back();
    if (!step.is_child) return launch(step, step.launches[0], stream);
    ++node_;
    PYGRAPH_CHECK(driver_, stream_begin_capture(inner_.get(), abi::kCaptureModeThreadLocal));
    for (const Launch& inside : step.launches) launch(step, inside, inner_.get());
    CUgraph raw = nullptr;
    PYGRAPH_CHECK(driver_, stream_end_capture(inner_.get(), &raw));
    const Graph child(driver_, raw);
    machine_.simulator_.capture_child(stream, raw);
  }

  uint64_t address_of(const Access& access) const {
    return addresses_[access.value] + access.offset;
  }

  void launch(const Step& step, const Launch& launch, CUstream stream) {
    std::vector<Words> words(launch.accesses.size(), {.node = node_++});
    if (launch.kind == LaunchKind::kCopy && !launch.accesses.empty()) {
      words[0].offset = offsetof(abi::Memcpy3D, src_device);
      words[1].offset = offsetof(abi::Memcpy3D, dst_device);
      PYGRAPH_CHECK(driver_, copy_on_device_async(address_of(launch.accesses[1]),
                                                  address_of(launch.accesses[0]),
                                                  launch.accesses[0].size, stream));
    } else if (launch.kind == LaunchKind::kFill && !launch.accesses.empty()) {
      words[0].offset = offsetof(abi::MemsetNodeParams, dst);
      PYGRAPH_CHECK(driver_, memset_d8_async(address_of(launch.accesses[0]),
                                             static_cast<unsigned char>(number_),
                                             launch.accesses[0].size, stream));
    } else {
      launch_kernel(step, launch, words, stream);
    }
    machine_.places_[number_++] = words;
    words_.back().push_back(std::move(words));
  }

  void launch_kernel(const Step& step, const Launch& launch, std::vector<Words>& words,
                     CUstream stream) {
    const Layout& layout = layouts()[launch.layout];
    std::vector<std::byte> image(layout.first_word + size_t{8} * layout.words);
    // Pairs of words first, which need neighbours; the rest in any order.
    std::vector<uint32_t> places(layout.words);
    std::iota(places.begin(), places.end(), 0U);
    const auto put = [&](uint32_t place, uint64_t word) {
      const uint32_t offset = layout.first_word + 8 * place;
      std::memcpy(image.data() + offset, &word, sizeof word);
      return offset;
    };
    std::memcpy(image.data(), &number_, sizeof number_);
    size_t pairs = 0;
    for (size_t i = 0; i < launch.accesses.size(); ++i) {
      const Access& access = launch.accesses[i];
      if (program_.values[access.value].kind != ValueKind::kRandom) continue;
      words[i].offset = put(static_cast<uint32_t>(pairs++), addresses_[access.value]);
      words[i].end_offset = put(static_cast<uint32_t>(pairs++), addresses_[access.value] + 512);
      words[i].has_end = true;
    }
    places.erase(places.begin(), places.begin() + static_cast<ptrdiff_t>(pairs));
    std::mt19937 order(launch.order);
    std::ranges::shuffle(places, order);
    const auto next = [&](uint64_t word) {
      const uint32_t place = places.back();
      places.pop_back();
      return put(place, word);
    };
    for (size_t i = 0; i < launch.accesses.size(); ++i) {
      const Access& access = launch.accesses[i];
      if (program_.values[access.value].kind == ValueKind::kRandom) continue;
      const bool is_hidden = access.through != kNone;
      words[i].offset = next(is_hidden ? addresses_[access.through] : address_of(access));
      words[i].has_end = access.by_end || access.stores_address;
      if (access.by_end) words[i].end_offset = next(address_of(access) + access.size);
      if (access.stores_address) words[i].end_offset = next(addresses_[access.value]);
    }
    for (const auto& [value, offset] : launch.leftovers) next(addresses_[value] + offset);
    const Range space = space_.range();
    if (launch.has_stray) next(space.address + space.size - 4096 * (1 + random_() % 16));
    if (launch.has_foreign) next(machine_.owned_[machine_.owned_.size() - 1 - index_] + 64);
    for (uint32_t i = 0; i < launch.noise; ++i) next(random_() % 1000000 * 2 + index_);
    // What is left is equal in both recordings.
    while (!places.empty()) next(order() % 3 == 0 ? 0 : order());

    const CUfunction function =
        machine_.functions_[launch.layout + (step.waits ? 0 : layouts().size())];
    std::vector<void*> params;
    size_t offset = 0;
    for (const size_t size : layout.sizes) {
      params.push_back(image.data() + offset);
      offset += size;
    }
    size_t size = image.size();
    void* extra[] = {abi::kLaunchParamBufferPointer, image.data(), abi::kLaunchParamBufferSize,
                     &size, abi::kLaunchParamEnd};
    PYGRAPH_CHECK(driver_, launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream,
                                         launch.is_packed ? nullptr : params.data(),
                                         launch.is_packed ? extra : nullptr));
  }

  // A stream capture would have made these edges so.
  void set_overlaps(CUgraph graph) {
    size_t count = program_.steps.size();
    std::vector<CUgraphNode> nodes(count);
    PYGRAPH_CHECK(driver_, graph_get_nodes(graph, nodes.data(), &count));
    constexpr abi::EdgeData kFull{};
    constexpr abi::EdgeData kOverlap{.from_port = 1, .to_port = 0, .type = 1, .reserved = {}};
    std::array<CUgraphNode, kMostStreams> tails{};
    for (size_t s = 0; s < count; ++s) {
      CUgraphNode& tail = tails[program_.steps[s].stream];
      if (program_.steps[s].overlaps) {
        PYGRAPH_CHECK(driver_, graph_remove_dependencies(graph, &tail, &nodes[s], &kFull, 1));
        PYGRAPH_CHECK(driver_, graph_add_dependencies(graph, &tail, &nodes[s], &kOverlap, 1));
      }
      tail = nodes[s];
    }
  }

  // Of a kind that the engine does not know. What overlaps is left alone: allocators rely on
  // kernels that wait.
  void change_an_edge(CUgraph graph) const {
    if (std::ranges::any_of(program_.steps, &Step::overlaps)) return;
    size_t count = 0;
    PYGRAPH_CHECK(driver_, graph_get_edges(graph, nullptr, nullptr, nullptr, &count));
    if (count == 0) return;
    std::vector<CUgraphNode> from(count);
    std::vector<CUgraphNode> to(count);
    std::vector<abi::EdgeData> data(count);
    PYGRAPH_CHECK(driver_, graph_get_edges(graph, from.data(), to.data(), data.data(), &count));
    const size_t e = program_.seed % count;
    constexpr abi::EdgeData kUnknown{.from_port = 0, .to_port = 0, .type = 0, .reserved = {1}};
    PYGRAPH_CHECK(driver_, graph_remove_dependencies(graph, &from[e], &to[e], &data[e], 1));
    PYGRAPH_CHECK(driver_, graph_add_dependencies(graph, &from[e], &to[e], &kUnknown, 1));
  }

  // A step that keeps an address, or uses one that was kept, is nobody's or a foreign operator's;
  // or all such steps, and those between them, are one of the framework's own.
  void name_operators(Recording& recording) const {
    const auto uses_table = [&](uint32_t s) {
      return std::ranges::any_of(program_.steps[s].launches[0].accesses,
                                 [](const Access& access) { return access.through != kNone; });
    };
    uint32_t begin = kNone;
    uint32_t end = 0;
    for (uint32_t s = 0; s < program_.steps.size() && program_.seed % 2 == 1; ++s) {
      if (!uses_table(s)) continue;
      begin = std::min(begin, s);
      end = s + 1;
    }
    const auto add = [&](uint32_t first, uint32_t last, bool is_foreign) {
      recording.operators.push_back({.name = is_foreign ? "fuzz::custom" : "aten::fuzz",
                                     .first = first,
                                     .last = last,
                                     .is_foreign = is_foreign,
                                     .arguments = {},
                                     .writes = {}});
    };
    for (uint32_t s = 0; s < program_.steps.size(); ++s) {
      const uint32_t order = program_.steps[s].launches[0].order;
      if (s == begin) add(begin, end, false);
      if (begin <= s && s < end) continue;
      if (!uses_table(s) || order % 2 == 1) add(s, s + 1, uses_table(s) || order % 8 == 0);
    }
  }

  void declare(Recording& recording) const {
    for (uint32_t s = 0; s < program_.steps.size(); ++s) {
      const Step& step = program_.steps[s];
      if (!step.is_declared) continue;
      for (size_t i = 0; i < words_[s][0].size(); ++i) {
        const Access& access = step.launches[0].accesses[i];
        const Words& words = words_[s][0][i];
        std::vector<uint32_t>& offsets =
            access.writes ? recording.nodes[words.node].writes : recording.nodes[words.node].reads;
        offsets.push_back(words.offset);
        if (words.has_end) offsets.push_back(words.end_offset);
      }
    }
    uint32_t s = kNone;
    for (Node& node : recording.nodes) {
      if (node.parent >= 0) continue;
      ++s;  // from the first step on
      node.has_known_accesses = program_.steps[s].is_declared;
      if (node.has_known_accesses && program_.steps[s].op != kNone) node.op = program_.steps[s].op;
    }
  }

  Machine& machine_;
  const Driver& driver_;
  const Program& program_;
  int index_;
  AddressSpace& space_;
  std::vector<Pool> pools_;  // by stream
  std::mt19937 random_;
  std::vector<uint64_t> addresses_;  // by value
  Stream inner_;
  std::vector<Stream> side_;  // by index; null where no step uses it, and for the first
  Event event_;
  AllocationLog log_;
  std::vector<std::vector<std::vector<Words>>> words_;
  uint32_t node_ = 0;    // of the recording
  uint64_t number_ = 0;  // of the launch
};

Recorded Machine::record(const Program& program) {
  constexpr uint64_t kCapacity = uint64_t{1} << 30;
  Recorded result;
  for (int i = 0; i < 2; ++i) {
    result.spaces[i] = std::make_unique<AddressSpace>(driver(), 0, kCapacity,
                                                      i == 0 ? 512 : AddressSpace::kIrregularGaps);
    Capture(*this, program, i, *result.spaces[i]).run(result);
  }
  for (uint32_t v = 0; v < program.values.size(); ++v) {
    const ValueKind kind = program.values[v].kind;
    if (kind == ValueKind::kInput) result.input_slots.push_back(v);
    if (kind == ValueKind::kOutput) result.output_slots.push_back(v);
    if (kind == ValueKind::kRandom) result.random_slots.push_back(v);
  }
  return result;
}

}  // namespace pygraph::fuzz
