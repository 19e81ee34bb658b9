// Memory of the simulated driver: allocations are host memory; virtual memory is real, so that
// several addresses can share one page just as on the device.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include "simulator/state.h"

namespace pygraph::simulator::functions {
namespace {

constexpr size_t kGranularity = size_t{64} << 10;

bool is_inside(const std::map<uint64_t, size_t>& ranges, uint64_t address) {
  const auto after = ranges.upper_bound(address);
  return after != ranges.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

// Without its source.
std::unique_ptr<SimulatedNode> copy_node(abi::DevicePointer to, size_t size) {
  auto node = std::make_unique<SimulatedNode>();
  node->type = abi::kNodeMemcpy;
  node->memcpy.dst_memory_type = abi::kMemoryTypeDevice;
  node->memcpy.dst_device = to;
  node->memcpy.width_bytes = size;
  node->memcpy.height = 1;
  node->memcpy.depth = 1;
  return node;
}

}  // namespace

abi::Result memory_allocate(abi::DevicePointer* address, size_t size) {
  void* memory = std::aligned_alloc(512, (size + 511) / 512 * 512);
  if (memory == nullptr) return abi::kOutOfMemory;
  *address = reinterpret_cast<abi::DevicePointer>(memory);
  current_state()->memory[*address] = size;
  current_state()->numbers[*address] = current_state()->next_number++;
  return abi::kSuccess;
}

abi::Result memory_free(abi::DevicePointer address) {
  if (current_state()->memory.erase(address) == 0) return abi::kInvalidValue;
  std::free(reinterpret_cast<void*>(address));
  return abi::kSuccess;
}

abi::Result memory_get_info(size_t* free, size_t* total) {
  *total = size_t{1} << 40;
  *free = *total;
  for (const auto& [address, size] : current_state()->memory) *free -= size;
  return abi::kSuccess;
}

abi::Result memory_get_address_range(abi::DevicePointer* base, size_t* size,
                                     abi::DevicePointer address) {
  const auto& memory = current_state()->memory;
  if (!is_inside(memory, address)) return abi::kNotFound;
  const auto range = std::prev(memory.upper_bound(address));
  *base = range->first;
  *size = range->second;
  return abi::kSuccess;
}

abi::Result memory_allocate_host(void** memory, size_t size, unsigned /*flags*/) {
  *memory = std::malloc(size);
  if (*memory == nullptr) return abi::kOutOfMemory;
  current_state()->pinned[reinterpret_cast<uint64_t>(*memory)] = size;
  return abi::kSuccess;
}

abi::Result copy_to_device(abi::DevicePointer to, const void* from, size_t size) {
  std::memcpy(reinterpret_cast<void*>(to), from, size);
  return abi::kSuccess;
}

abi::Result copy_to_host(void* to, abi::DevicePointer from, size_t size) {
  std::memcpy(to, reinterpret_cast<const void*>(from), size);
  return abi::kSuccess;
}

// The driver's own types of memory, as it reports them for copies that were captured.
abi::Result copy_to_device_async(abi::DevicePointer to, const void* from, size_t size,
                                 CUstream stream) {
  std::unique_ptr<SimulatedNode> node = copy_node(to, size);
  node->memcpy.src_memory_type = abi::kMemoryTypeHost;
  node->memcpy.src_host = from;
  return enqueue(stream, std::move(node));
}

abi::Result copy_on_device_async(abi::DevicePointer to, abi::DevicePointer from, size_t size,
                                 CUstream stream) {
  std::unique_ptr<SimulatedNode> node = copy_node(to, size);
  node->memcpy.src_memory_type = abi::kMemoryTypeDevice;
  node->memcpy.src_device = from;
  return enqueue(stream, std::move(node));
}

abi::Result memset_d8_async(abi::DevicePointer to, unsigned char value, size_t count,
                            CUstream stream) {
  auto node = std::make_unique<SimulatedNode>();
  node->type = abi::kNodeMemset;
  node->memset = {to, 0, value, 1, count, 1};
  return enqueue(stream, std::move(node));
}

abi::Result pointer_get_attribute(void* value, int attribute, abi::DevicePointer address) {
  const State& state = *current_state();
  if (attribute == abi::kPointerAttributeBufferId) {
    if (!is_inside(state.memory, address)) return abi::kInvalidValue;
    const uint64_t base = std::prev(state.memory.upper_bound(address))->first;
    *static_cast<unsigned long long*>(value) = state.numbers.at(base);
    return abi::kSuccess;
  }
  if (attribute != abi::kPointerAttributeMemoryType) return abi::kNotSupported;
  const bool is_on_host = is_inside(state.pinned, address);
  if (!is_on_host && !is_inside(state.memory, address) && !is_inside(state.reserved, address)) {
    return abi::kInvalidValue;
  }
  *static_cast<unsigned*>(value) = is_on_host ? abi::kMemoryTypeHost : abi::kMemoryTypeDevice;
  return abi::kSuccess;
}

abi::Result address_reserve(abi::DevicePointer* address, size_t size, size_t /*alignment*/,
                            abi::DevicePointer /*hint*/, uint64_t /*flags*/) {
  void* range = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return abi::kOutOfMemory;
  *address = reinterpret_cast<abi::DevicePointer>(range);
  current_state()->reserved[*address] = size;
  return abi::kSuccess;
}

abi::Result address_free(abi::DevicePointer address, size_t size) {
  if (current_state()->reserved.erase(address) == 0) return abi::kInvalidValue;
  munmap(reinterpret_cast<void*>(address), size);
  return abi::kSuccess;
}

abi::Result memory_create(abi::MemoryHandle* handle, size_t size,
                          const abi::MemoryAllocationProperties* /*properties*/,
                          uint64_t /*flags*/) {
  if (size % kGranularity != 0) return abi::kInvalidValue;
  const int file = memfd_create("pygraph-page", MFD_CLOEXEC);
  if (file < 0) return abi::kOutOfMemory;
  if (ftruncate(file, static_cast<off_t>(size)) != 0) {
    close(file);
    return abi::kOutOfMemory;
  }
  *handle = current_state()->next_page++;
  current_state()->pages[*handle] = {file, size};
  return abi::kSuccess;
}

abi::Result memory_release(abi::MemoryHandle handle) {
  const auto page = current_state()->pages.find(handle);
  if (page == current_state()->pages.end()) return abi::kInvalidValue;
  close(page->second.file);  // mappings keep the memory alive
  current_state()->pages.erase(page);
  return abi::kSuccess;
}

abi::Result memory_map(abi::DevicePointer address, size_t size, size_t offset,
                       abi::MemoryHandle handle, uint64_t /*flags*/) {
  const auto page = current_state()->pages.find(handle);
  if (page == current_state()->pages.end() || offset != 0 || size > page->second.size ||
      !is_inside(current_state()->reserved, address)) {
    return abi::kInvalidValue;
  }
  void* mapped = mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED,
                      page->second.file, 0);
  return mapped == MAP_FAILED ? abi::kOutOfMemory : abi::kSuccess;
}

abi::Result memory_unmap(abi::DevicePointer address, size_t size) {
  void* range = mmap(reinterpret_cast<void*>(address), size, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return range == MAP_FAILED ? abi::kInvalidValue : abi::kSuccess;
}

abi::Result memory_set_access(abi::DevicePointer address, size_t size,
                              const abi::MemoryAccess* /*access*/, size_t /*count*/) {
  const int failed = mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE);
  return failed != 0 ? abi::kInvalidValue : abi::kSuccess;
}

abi::Result memory_get_granularity(size_t* granularity,
                                   const abi::MemoryAllocationProperties* /*properties*/,
                                   int /*option*/) {
  *granularity = kGranularity;
  return abi::kSuccess;
}

}  // namespace pygraph::simulator::functions
