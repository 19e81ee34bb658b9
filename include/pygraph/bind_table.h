// The bind table: for each slot, the words of the nodes that hold its address. It keeps a copy of
// these nodes' parameter images, because the driver cannot return the parameters of an executable
// graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pygraph/link.h"

namespace pygraph {

// Slots: inputs, then outputs, then the workspace, then one per random state, then one per region,
// each in the order of the recording. They are fixed at capture; no address is ever looked up.
//
// Not thread-safe.
class BindTable {
 public:
  struct Word {
    uint64_t* value;  // in its node's image
    uint64_t addend;  // to the slot's address
    uint32_t patch;   // index into patched_nodes()
  };
  struct PatchedNode {  // a node that holds addresses
    uint32_t node;
    std::byte* image;
    abi::KernelNodeParams params;  // kernels: points into image
    bool is_dirty;
  };

  explicit BindTable(const LinkedGraph& linked);
  BindTable(const BindTable&) = delete;
  BindTable& operator=(const BindTable&) = delete;

  size_t slot_count() const { return bound_.size(); }
  size_t workspace_slot() const { return workspace_slot_; }
  size_t region_slot() const { return region_slot_; }
  // The address of each slot that was written last; all bits set before the first write.
  std::span<const uint64_t> bound() const { return bound_; }
  std::span<const PatchedNode> patched_nodes() const { return patched_nodes_; }
  std::span<const Word> words(size_t slot) const {
    return std::span(words_).subspan(begin_[slot], begin_[slot + 1] - begin_[slot]);
  }

  // Writes the addresses that differ from the last ones into the images. Marks their nodes as dirty
  // until clean().
  void write(std::span<const uint64_t> addresses);
  std::span<const uint32_t> dirty() const { return dirty_; }  // patches
  void clean();

 private:
  void lay_out_images(const LinkedGraph& linked);
  void sort_words(const LinkedGraph& linked);
  size_t slot_of(const Symbol& symbol, const LinkedGraph& linked) const;

  size_t workspace_slot_ = 0;
  size_t region_slot_ = 0;
  std::unique_ptr<std::byte[]> images_;  // one 128-byte aligned image after another
  std::vector<void*> param_pointers_;    // kernelParams and extra arrays of all patches
  std::vector<size_t> packed_sizes_;     // what extra's size entries point to
  std::vector<PatchedNode> patched_nodes_;
  std::vector<Word> words_;      // sorted by slot
  std::vector<uint32_t> begin_;  // words of slot s: [begin_[s], begin_[s + 1])
  std::vector<uint64_t> bound_;
  std::vector<uint32_t> dirty_;
};

}  // namespace pygraph
