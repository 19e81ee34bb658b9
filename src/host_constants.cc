#include "pygraph/host_constants.h"

#include <algorithm>
#include <cstring>

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

// The bytes that a copy reads from pinned memory; empty if it reads from elsewhere, or more than
// one row.
std::span<const std::byte> source_of(const Driver& driver, const abi::Memcpy3D& copy) {
  if (copy.height > 1 || copy.depth > 1 || copy.width_bytes == 0 || copy.width_bytes > kMostBytes) {
    return {};
  }
  const void* source = nullptr;
  if (copy.src_memory_type == abi::kMemoryTypeHost) source = copy.src_host;
  if (copy.src_memory_type == abi::kMemoryTypeUnified) {
    source = reinterpret_cast<const void*>(copy.src_device);
  }
  if (source == nullptr) return {};
  const std::span bytes(static_cast<const std::byte*>(source) + copy.src_x_bytes, copy.width_bytes);
  const bool is_readable =
      is_pinned(driver, bytes.data()) && is_pinned(driver, bytes.data() + bytes.size() - 1);
  return is_readable ? bytes : std::span<const std::byte>();
}

}  // namespace

const void* HostConstants::keep(std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(
      kept_, [&](const auto& known) { return std::ranges::equal(known, bytes); });
  if (found != kept_.end()) return found->data();
  const RelaxedCaptureMode relaxed(driver_);
  constexpr unsigned kPortable = 1;  // CU_MEMHOSTALLOC_PORTABLE: for all devices
  void* memory = nullptr;
  PYGRAPH_CHECK(driver_, memory_allocate_host(&memory, bytes.size(), kPortable));
  std::memcpy(memory, bytes.data(), bytes.size());
  kept_.emplace_back(static_cast<const std::byte*>(memory), bytes.size());
  return memory;
}

std::vector<Range> HostConstants::ranges() const {
  const std::lock_guard lock(mutex_);
  std::vector<Range> all;
  for (const auto& bytes : kept_) {
    all.push_back({reinterpret_cast<uint64_t>(bytes.data()), bytes.size()});
  }
  return all;
}

std::vector<uint32_t> keep_host_constants(
    const Driver& driver, Recording& recording, HostConstants& constants,
    const std::function<bool(const Operator&)>& copies_constants) {
  std::vector<uint32_t> changed;
  for (uint32_t i = 0; i < recording.nodes.size(); ++i) {
    Node& node = recording.nodes[i];
    if (node.kind != NodeKind::kMemcpy || node.parent >= 0) continue;
    const Operator* op = recording.operator_of(node);
    if (op == nullptr || !copies_constants(*op)) continue;
    abi::Memcpy3D copy{};
    std::memcpy(&copy, node.image.data(), sizeof copy);
    const std::span<const std::byte> source = source_of(driver, copy);
    if (source.empty()) continue;
    const void* kept = constants.keep(source);
    copy.src_x_bytes = 0;
    if (copy.src_memory_type == abi::kMemoryTypeHost) {
      copy.src_host = kept;
    } else {
      copy.src_device = reinterpret_cast<abi::DevicePointer>(kept);
    }
    std::memcpy(node.image.data(), &copy, sizeof copy);
    changed.push_back(i);
  }
  return changed;
}

}  // namespace pygraph
