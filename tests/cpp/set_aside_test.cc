// Workspaces of the stream of a recording, which it must neither use nor free.
#include "torch_private/set_aside.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <shared_mutex>
#include <vector>

namespace pygraph::bindings {
namespace {

struct Entries {  // as BlasWorkspaces
  std::map<std::tuple<void*, void*>, std::shared_ptr<int>> map;
  std::shared_mutex mutex;
};

std::tuple<void*, void*> key(uintptr_t handle, uintptr_t stream) {
  return {reinterpret_cast<void*>(handle), reinterpret_cast<void*>(stream)};
}

struct SetAsideTest : testing::Test {
  SetAsideTest() {
    for (const uintptr_t handle : {1, 2, 3}) {
      for (const uintptr_t stream : {0, 7, 8}) {
        auto memory = std::make_shared<int>();
        known.push_back(memory);
        entries.map.emplace(key(handle, stream), std::move(memory));
      }
    }
  }
  bool all_are_alive() const {
    for (const auto& memory : known) {
      if (memory.expired()) return false;
    }
    return true;
  }
  void set_aside() { aside.emplace(entries, reinterpret_cast<void*>(7)); }

  Entries entries;
  std::optional<SetAside<Entries>> aside;
  std::vector<std::weak_ptr<int>> known;
};

TEST_F(SetAsideTest, ARecordingFindsNoneOfItsStream) {
  set_aside();
  EXPECT_EQ(entries.map.size(), 6u);
  for (const uintptr_t handle : {1, 2, 3}) {
    EXPECT_FALSE(entries.map.contains(key(handle, 7)));
    EXPECT_TRUE(entries.map.contains(key(handle, 0)));
    EXPECT_TRUE(entries.map.contains(key(handle, 8)));
  }
  EXPECT_TRUE(all_are_alive());
}

TEST_F(SetAsideTest, TheyAreThereAgainAfterwards) {
  const auto before = entries.map;
  set_aside();
  aside.reset();
  EXPECT_EQ(entries.map, before);
}

TEST_F(SetAsideTest, NoMemoryIsFreedWhereAnotherHasTakenItsPlace) {
  set_aside();
  const auto other = std::make_shared<int>();
  entries.map.emplace(key(2, 7), other);
  aside.reset();
  EXPECT_EQ(entries.map.size(), 9u);
  EXPECT_EQ(entries.map.at(key(2, 7)), other);
  EXPECT_TRUE(all_are_alive());
}

TEST_F(SetAsideTest, AStreamWithoutAnyIsNoMatter) {
  const auto before = entries.map;
  aside.emplace(entries, reinterpret_cast<void*>(9));
  EXPECT_EQ(entries.map, before);
  aside.reset();
  EXPECT_EQ(entries.map, before);
}

}  // namespace
}  // namespace pygraph::bindings
