// Two recordings of one computation must be the same graph: same nodes in the same order, same
// functions and launch shapes, same edges, same memory requests. Only addresses may differ.
#include <cstddef>
#include <cstring>
#include <string>

#include "pygraph/link.h"

namespace pygraph {
namespace {

[[noreturn]] void differ(const std::string& what) {
  throw NotRelocatable("the two recordings differ: " + what);
}

std::string describe(const Node& node) {
  switch (node.kind) {
    case NodeKind::kKernel:
      return "kernel " + node.name;
    case NodeKind::kMemcpy:
      return "a memcpy";
    case NodeKind::kMemset:
      return "a memset";
    case NodeKind::kChildGraph:
      return "a child graph";
    case NodeKind::kEmpty:
      break;
  }
  return "an empty node";
}

// Everything outside the address words of a memcpy or memset must be equal. Kernels are exempt:
// their words are judged one by one when relocations are scanned.
bool same_fixed_bytes(const Node& a, const Node& b) {
  if (a.kind == NodeKind::kKernel) return true;
  std::vector<std::byte> rest_a = a.image;
  std::vector<std::byte> rest_b = b.image;
  for (const uint32_t offset : a.address_offsets()) {
    std::memset(rest_a.data() + offset, 0, 8);
    std::memset(rest_b.data() + offset, 0, 8);
  }
  return rest_a == rest_b;
}

// Whether two copies differ in nothing but the addresses of host memory.
bool differs_in_host_memory(const Node& a, const Node& b) {
  if (a.kind != NodeKind::kMemcpy) return false;
  Node copy = a;
  for (const size_t offset :
       {offsetof(abi::Memcpy3D, src_host), offsetof(abi::Memcpy3D, dst_host)}) {
    std::memcpy(copy.image.data() + offset, b.image.data() + offset, 8);
  }
  return same_fixed_bytes(copy, b);
}

void match_node(const Recording& recording, size_t index, const Node& b) {
  const Node& a = recording.nodes[index];
  const Operator* op = recording.operator_of(a);
  const std::string place =
      (op == nullptr ? "" : "operator " + op->name + ", ") + "node " + std::to_string(index);
  if (a.kind != b.kind || a.function != b.function) {
    differ(place + " is " + describe(a) + " in one and " + describe(b) + " in the other");
  }
  if (a.grid != b.grid || a.block != b.block || a.shared_memory_bytes != b.shared_memory_bytes) {
    differ(place + ", " + describe(a) + ", is launched with another shape");
  }
  if (a.packed != b.packed || a.image.size() != b.image.size()) {
    differ(place + ", " + describe(a) + ", has parameters of another size");
  }
  if (same_fixed_bytes(a, b)) return;
  const char* what =
      differs_in_host_memory(a, b) ? ", uses other host memory" : ", has another extent";
  differ(place + ", " + describe(a) + what);
}

}  // namespace

void match_recordings(const Recording& a, const Recording& b) {
  if (a.nodes.size() != b.nodes.size()) {
    differ(std::to_string(a.nodes.size()) + " nodes against " + std::to_string(b.nodes.size()));
  }
  for (size_t i = 0; i < a.nodes.size(); ++i) match_node(a, i, b.nodes[i]);
  if (a.edges != b.edges) differ("the dependencies between nodes");
  if (a.allocations.size() != b.allocations.size()) {
    differ(std::to_string(a.allocations.size()) + " allocations against " +
           std::to_string(b.allocations.size()));
  }
  for (size_t i = 0; i < a.allocations.size(); ++i) {
    const Allocation& x = a.allocations[i];
    const Allocation& y = b.allocations[i];
    if (x.size != y.size || x.first != y.first || x.last != y.last) {
      differ("allocation " + std::to_string(i) + " has another size or lifetime");
    }
  }
  if (a.inputs.size() != b.inputs.size() || a.outputs.size() != b.outputs.size() ||
      a.random.size() != b.random.size()) {
    differ("the number of inputs, outputs or random states");
  }
  for (size_t i = 0; i < a.random.size(); ++i) {
    if (a.random[i].increment != b.random[i].increment) differ("the random numbers drawn");
  }
}

}  // namespace pygraph
