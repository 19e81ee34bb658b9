// Takes entries out of one of PyTorch's maps for a while; their keys are a handle and a stream.
#pragma once

#include <iterator>
#include <map>
#include <mutex>
#include <tuple>

namespace pygraph::bindings {

// Takes the entries of one stream out of a map; the destructor puts them back. If the map has got a
// new entry under the same key by then, the old entry is kept until the process ends, because its
// memory may be in use. The map has a `mutex` beside it. Nothing is allocated or freed.
template <typename Entries>
class SetAside {
 public:
  SetAside(Entries& entries, void* stream) : entries_(entries) {
    replaced();  // made here, as the destructor must not throw
    const std::lock_guard lock(entries_.mutex);
    for (auto it = entries_.map.begin(); it != entries_.map.end();) {
      const auto next = std::next(it);
      if (std::get<1>(it->first) == stream) taken_.insert(entries_.map.extract(it));
      it = next;
    }
  }
  ~SetAside() {
    // Always in this order. std::scoped_lock would need functions of glibc that are newer than a
    // wheel's.
    static std::mutex of_replaced;
    const std::lock_guard lock(entries_.mutex);
    const std::lock_guard lock_of_replaced(of_replaced);
    entries_.map.merge(taken_);
    replaced().merge(taken_);
  }
  SetAside(const SetAside&) = delete;
  SetAside& operator=(const SetAside&) = delete;

 private:
  using Map = decltype(Entries::map);
  using Replaced = std::multimap<typename Map::key_type, typename Map::mapped_type>;
  static Replaced& replaced() {
    static auto* kept = new Replaced;
    return *kept;
  }
  Entries& entries_;
  Map taken_;
};

}  // namespace pygraph::bindings
