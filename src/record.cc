#include "pygraph/record.h"

#include "pygraph/address_space.h"
#include "pygraph/alignment.h"

namespace pygraph {
namespace {

// Addresses for all buffers in one half of the space, with room for alignment and gaps.
uint64_t capacity_for(std::span<const Buffer> buffers) {
  constexpr uint64_t kSlack = uint64_t{4} << 20;
  constexpr uint64_t kPerBuffer = uint64_t{65} << 10;
  uint64_t half = kSlack;
  for (const Buffer& buffer : buffers) half += buffer.size + kPerBuffer;
  return 2 * (half + half / 16);  // the second recording's addresses do not begin at the start
}

struct Capture {
  Graph graph;
  Recording recording;
};

Graph end_capture(const Driver& driver, CUstream stream) {
  CUgraph raw = nullptr;
  PYGRAPH_CHECK(driver, stream_end_capture(stream, &raw));
  return {driver, raw};
}

Capture capture(const Driver& driver, CUstream stream, AddressSpace& space,
                std::span<const Buffer> buffers, const Issue& issue) {
  std::vector<Range> inputs;
  std::vector<abi::DevicePointer> addresses;
  for (const Buffer& buffer : buffers) {
    // Exactly the alignment that was promised, so that no library relies on more.
    const uint64_t low_bits = buffer.alignment >= kAllocationAlignment ? 0 : buffer.alignment;
    const uint64_t address =
        space.allocate(buffer.size, low_bits, AddressSpace::Content::kFloating);
    inputs.push_back({address, buffer.size});
    addresses.push_back(address);
  }
  Capture result;
  PYGRAPH_CHECK(driver, stream_begin_capture(stream, abi::kCaptureModeThreadLocal));
  try {
    issue(stream, addresses);
  } catch (...) {
    CUgraph abandoned = nullptr;
    driver.stream_end_capture(stream, &abandoned);
    if (abandoned != nullptr) driver.graph_destroy(abandoned);
    throw;
  }
  result.graph = end_capture(driver, stream);
  result.recording = read_graph(driver, result.graph.get());
  result.recording.inputs = std::move(inputs);
  result.recording.address_space = space.range();
  return result;
}

}  // namespace

std::unique_ptr<ExecutableGraph> record(const Driver& driver, int device,
                                        std::span<const Buffer> buffers, const Issue& issue) {
  const Stream stream = create_stream(driver);
  AddressSpace space_a(driver, device, capacity_for(buffers), AddressSpace::kGaps[0]);
  AddressSpace space_b(driver, device, capacity_for(buffers), AddressSpace::kGaps[1]);
  const Capture first = capture(driver, stream.get(), space_a, buffers, issue);
  Capture second = capture(driver, stream.get(), space_b, buffers, issue);
  LinkedGraph linked = link(driver, first.recording, std::move(second.recording));
  if (linked.unexplained_words > 0) {  // there is no verification here
    throw NotRelocatable(std::to_string(linked.unexplained_words) +
                         " parameter words look like addresses and belong to no buffer");
  }
  return std::make_unique<ExecutableGraph>(driver, std::move(second.graph), std::move(linked));
}

}  // namespace pygraph
