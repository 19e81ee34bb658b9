#include "pygraph/host_tables.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "graph_lists.h"
#include "pygraph/handles.h"

namespace pygraph {
namespace {

constexpr size_t kMostBytes = size_t{1} << 20;  // of a table

bool is_pinned(const Driver& driver, const std::byte* address) {
  unsigned type = 0;
  return driver.pointer_get_attribute(&type, abi::kPointerAttributeMemoryType,
                                      reinterpret_cast<uint64_t>(address)) == abi::kSuccess &&
         type == abi::kMemoryTypeHost;
}

bool is_on_device(int memory_type) {
  return memory_type == abi::kMemoryTypeDevice || memory_type == abi::kMemoryTypeUnified;
}

// The bytes that a copy to the device reads from pinned memory; empty for any other copy.
std::span<const std::byte> source_of(const Driver& driver, const abi::Memcpy3D& copy) {
  const bool is_one_row = copy.height <= 1 && copy.depth <= 1 && copy.src_y == 0 && copy.src_z == 0;
  if (!is_one_row || !is_on_device(copy.dst_memory_type)) return {};
  if (copy.width_bytes == 0 || copy.width_bytes > kMostBytes) return {};
  const void* source = nullptr;
  if (copy.src_memory_type == abi::kMemoryTypeHost) source = copy.src_host;
  if (copy.src_memory_type == abi::kMemoryTypeUnified) {
    source = reinterpret_cast<const void*>(copy.src_device);
  }
  if (source == nullptr) return {};
  const std::span bytes(static_cast<const std::byte*>(source) + copy.src_x_bytes, copy.width_bytes);
  const bool is_readable = is_pinned(driver, &bytes.front()) && is_pinned(driver, &bytes.back());
  return is_readable ? bytes : std::span<const std::byte>();
}

Node& copy_at(Recording& recording, uint32_t position) {
  const auto is_it = [&](const Node& node) { return node.parent < 0 && node.position == position; };
  return *std::ranges::find_if(recording.nodes, is_it);
}

// Changes the image only.
void read_from(Node& node, uint64_t address) {
  abi::Memcpy3D copy{};
  std::memcpy(&copy, node.image.data(), sizeof copy);
  copy.src_x_bytes = 0;
  copy.src_memory_type = abi::kMemoryTypeDevice;
  copy.src_host = nullptr;
  copy.src_device = address;
  std::memcpy(node.image.data(), &copy, sizeof copy);
}

// Device memory until it is released.
class DeviceMemory {
 public:
  DeviceMemory(const Driver& driver, size_t bytes) : driver_(driver) {
    PYGRAPH_CHECK(driver_, memory_allocate(&address_, bytes));
  }
  ~DeviceMemory() {
    if (address_ != 0) driver_.memory_free(address_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  abi::DevicePointer address() const { return address_; }
  uint64_t release() { return std::exchange(address_, 0); }

 private:
  const Driver& driver_;
  abi::DevicePointer address_ = 0;
};

}  // namespace

uint64_t TableMemory::keep(std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  for (const Kept& kept : kept_) {
    if (std::ranges::equal(kept.bytes, bytes)) return kept.address;
  }
  const RelaxedCaptureMode relaxed(driver_);
  DeviceMemory piece(driver_, bytes.size());
  // On a stream, because a copy without one may return before it is done.
  const Stream stream = create_stream(driver_);
  PYGRAPH_CHECK(driver_,
                copy_to_device_async(piece.address(), bytes.data(), bytes.size(), stream.get()));
  PYGRAPH_CHECK(driver_, stream_synchronize(stream.get()));
  kept_.push_back({{bytes.begin(), bytes.end()}, piece.address()});
  return piece.release();
}

std::vector<HostTable> read_host_tables(const Driver& driver, CUgraph graph, uint32_t first,
                                        uint32_t last) {
  std::vector<HostTable> tables;
  const std::vector<CUgraphNode> nodes = list_nodes(driver, graph);
  for (uint32_t position = first; position < std::min<size_t>(last, nodes.size()); ++position) {
    int type = 0;
    PYGRAPH_CHECK(driver, graph_node_get_type(nodes[position], &type));
    if (type != abi::kNodeMemcpy) continue;
    abi::Memcpy3D copy{};
    PYGRAPH_CHECK(driver, graph_memcpy_get_params(nodes[position], &copy));
    const std::span<const std::byte> source = source_of(driver, copy);
    if (!source.empty()) tables.push_back({position, {source.begin(), source.end()}});
  }
  return tables;
}

std::vector<Range> use_table_memory(const Driver& driver, Recording& first, Recording& second,
                                    TableMemory& memory) {
  std::vector<Range> used;
  if (first.tables != second.tables) return used;
  for (const HostTable& table : first.tables) {
    const uint64_t address = memory.keep(table.bytes);
    Node& node = copy_at(second, table.position);
    read_from(copy_at(first, table.position), address);
    read_from(node, address);
    const auto* params = reinterpret_cast<const abi::Memcpy3D*>(node.image.data());
    PYGRAPH_CHECK(driver, graph_memcpy_set_params(node.handle, params));
    used.push_back({address, table.bytes.size()});
  }
  return used;
}

}  // namespace pygraph
