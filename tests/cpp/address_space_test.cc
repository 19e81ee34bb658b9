#include "pygraph/address_space.h"

#include <set>

#include "test_device.h"

namespace pygraph::testing {
namespace {

using Content = AddressSpace::Content;
constexpr uint64_t kMiB = uint64_t{1} << 20;

struct Counted {
  decltype(Driver::memory_create) create = nullptr;
  decltype(Driver::memory_map) map = nullptr;
  decltype(Driver::copy_to_device) fill = nullptr;
  uint64_t bytes = 0;
  int mappings = 0;
  int filled = 0;
};
Counted counted;

class AddressSpaceTest : public DeviceTest {};

// A driver's table that counts mappings, copies to the device, and the bytes of device memory that
// are asked for: what the device has left is others' doing, too.
Driver counting(const Driver& driver) {
  counted = {
      .create = driver.memory_create, .map = driver.memory_map, .fill = driver.copy_to_device};
  Driver table = driver;
  table.memory_create = [](abi::MemoryHandle* handle, size_t size,
                           const abi::MemoryAllocationProperties* properties, uint64_t flags) {
    counted.bytes += size;
    return counted.create(handle, size, properties, flags);
  };
  table.memory_map = [](abi::DevicePointer address, size_t size, size_t offset,
                        abi::MemoryHandle handle, uint64_t flags) {
    ++counted.mappings;
    return counted.map(address, size, offset, handle, flags);
  };
  table.copy_to_device = [](abi::DevicePointer to, const void* from, size_t size) {
    ++counted.filled;
    return counted.fill(to, from, size);
  };
  return table;
}

TEST_F(AddressSpaceTest, AddressesKeepTheRequestedLowBits) {
  AddressSpace space(driver, 0, 64 * kMiB, 512);
  for (const uint64_t low_bits : {0, 4, 16, 256, 511}) {
    EXPECT_EQ(space.allocate(1000, low_bits, Content::kFloating) % 512, low_bits);
  }
}

TEST_F(AddressSpaceTest, AllocationsDoNotTouchEachOther) {
  AddressSpace space(driver, 0, 64 * kMiB, 1536);
  const uint64_t first = space.allocate(512, 0, Content::kOther);
  const uint64_t second = space.allocate(512, 0, Content::kOther);
  EXPECT_GE(second, first + 512 + 1536);
}

TEST_F(AddressSpaceTest, IrregularGapsAreTheSameEachTime) {
  AddressSpace one(driver, 0, 64 * kMiB, AddressSpace::kIrregularGaps);
  AddressSpace two(driver, 0, 64 * kMiB, AddressSpace::kIrregularGaps);
  std::set<uint64_t> gaps;
  uint64_t last = one.allocate(512, 0, Content::kOther);
  two.allocate(512, 0, Content::kOther);
  for (int i = 0; i < 20; ++i) {
    const uint64_t address = one.allocate(512, 0, Content::kOther);
    EXPECT_EQ(address - one.range().address,
              two.allocate(512, 0, Content::kOther) - two.range().address);
    EXPECT_GE(address - last, 1024);
    EXPECT_LE(address - last, 512 + (64 << 10));
    gaps.insert(address - last);
    last = address;
  }
  EXPECT_GE(gaps.size(), 15);
}

TEST_F(AddressSpaceTest, WhatIsKeptHasMemoryOfItsOwn) {
  // For good: never ended, and never forgotten.
  static AddressSpace* space = nullptr;
  space = new AddressSpace(driver, 0, 64 * kMiB, 512);
  const uint64_t shared = space->allocate(kMiB, 0, Content::kOther);
  space->allocate(4 * kMiB, 0, Content::kOther);
  const uint64_t kept = space->allocate(4 * kMiB, 0, Content::kOther);
  const uint64_t behind = space->allocate(4 * kMiB, 0, Content::kOther);
  space->poison();
  space->retain({{kept, 4 * kMiB}});
  device.synchronize();
  EXPECT_EQ(device.read_floats(kept + kMiB, 2), (std::vector<float>{0, 0}));
  const std::vector<float> values = {1, 2, 3};
  for (const uint64_t offset : {uint64_t{0}, kMiB, 4 * kMiB - 12}) {
    device.write_bytes(kept + offset, values.data(), 12);
    EXPECT_EQ(device.read_floats(kept + offset, 3), values);
  }
  EXPECT_NE(device.read_floats(shared, 3), values);
  EXPECT_NE(device.read_floats(behind + 2 * kMiB, 3), values);
  const std::vector<float> zeros(3, 0.0F);
  device.write_bytes(kept + 2 * kMiB, zeros.data(), 12);
  EXPECT_EQ(device.read_floats(kept, 3), values);
}

TEST_F(AddressSpaceTest, WhatIsKeptBetweenLargerPagesTakesLittleMemory) {
  static AddressSpace* space = nullptr;  // for good
  static Driver table;
  table = counting(driver);
  space = new AddressSpace(table, 0, 16384 * kMiB, 512);
  space->allocate(4500 * kMiB, 0, Content::kOther);
  const uint64_t around = space->allocate(64 * kMiB, 0, Content::kOther);
  const uint64_t kept = around + 31 * kMiB;
  space->poison();
  counted.bytes = 0;
  space->retain({{kept, kMiB}, {kept + 3 * kMiB, 512}});
  device.synchronize();
  EXPECT_LE(counted.bytes, 8 * kMiB);
  const std::vector<float> values = {1, 2, 3};
  const std::vector<float> zeros(3, 0.0F);
  for (const uint64_t address : {kept, kept + kMiB - 12, kept + 3 * kMiB}) {
    EXPECT_EQ(device.read_floats(address, 3), zeros);
    device.write_bytes(address, values.data(), 12);
  }
  for (uint64_t offset = 0; offset < 64 * kMiB; offset += kMiB) {  // still mapped
    const uint64_t address = around + offset;
    if (address < kept - 2 * kMiB || address >= kept + 6 * kMiB) {
      device.write_bytes(address, zeros.data(), 12);
    }
  }
  for (const uint64_t address : {kept, kept + kMiB - 12, kept + 3 * kMiB}) {
    EXPECT_EQ(device.read_floats(address, 3), values);
  }
}

TEST_F(AddressSpaceTest, HugeAllocationsCostNoMemory) {
  const Driver table = counting(driver);
  AddressSpace space(table, 0, 2048 * kMiB, 512);
  space.allocate(600 * kMiB, 0, Content::kFloating);
  EXPECT_GE(space.mapped_bytes(), 600 * kMiB);
  EXPECT_GE(counted.bytes, 1);
  EXPECT_LE(counted.bytes, 40 * kMiB);
}

TEST_F(AddressSpaceTest, FewAllocationsCostTwoPages) {
  const Driver table = counting(driver);
  AddressSpace space(table, 0, 1024 * kMiB, 512);
  for (int i = 0; i < 7; ++i) space.allocate(8 * kMiB, 0, Content::kFloating);
  EXPECT_GE(counted.bytes, 1);
  EXPECT_LE(counted.bytes, 4 * kMiB);
}

TEST_F(AddressSpaceTest, ManySmallAllocationsTakeFewMappings) {
  const Driver table = counting(driver);
  AddressSpace space(table, 0, 1024 * kMiB, 512);
  space.allocate(64 * kMiB, 0, Content::kFloating);
  const int before = counted.mappings;
  for (int i = 0; i < 200; ++i) space.allocate(2 * kMiB, 0, Content::kFloating);
  EXPECT_LE(counted.bytes, 12 * kMiB);
  EXPECT_LE(counted.mappings - before, 400 / 8 + 1);
}

TEST_F(AddressSpaceTest, LargerPagesEndWhereTheAddressesEnd) {
  const Driver table = counting(driver);
  AddressSpace space(table, 0, 2 * 142 * kMiB, 512);
  for (int i = 0; i < 70; ++i) space.allocate(2 * kMiB, 0, Content::kFloating);
  EXPECT_GE(space.mapped_bytes(), 140 * kMiB);
  EXPECT_LE(space.mapped_bytes(), 142 * kMiB);
}

TEST_F(AddressSpaceTest, SmallPagesDoWhereThereIsNoMemoryForLargerOnes) {
  Driver table = counting(driver);
  table.memory_create = [](abi::MemoryHandle* handle, size_t size,
                           const abi::MemoryAllocationProperties* properties, uint64_t flags) {
    if (size <= 2 * kMiB) return counted.create(handle, size, properties, flags);
    counted.bytes += size;
    return abi::Result{abi::kOutOfMemory};
  };
  AddressSpace space(table, 0, 1024 * kMiB, 512);
  for (int i = 0; i < 70; ++i) space.allocate(2 * kMiB, 0, Content::kFloating);
  EXPECT_GE(counted.mappings, 70);
  EXPECT_EQ(counted.bytes, 2 * 8 * kMiB);  // asked for after 64 and 128 MiB
  space.poison();
  EXPECT_TRUE(space.untouched());
}

TEST_F(AddressSpaceTest, RefusesMoreThanItsCapacity) {
  AddressSpace space(driver, 0, 16 * kMiB, 512);
  try {
    space.allocate(9 * kMiB, 0, Content::kFloating);
    FAIL() << "should have thrown";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.code(), abi::kOutOfMemory);
  }
}

TEST_F(AddressSpaceTest, PoisonedFloatsReadAsNan) {
  AddressSpace space(driver, 0, 64 * kMiB, 512);
  const uint64_t address = space.allocate(4096, 0, Content::kFloating);
  space.poison();
  for (const float value : device.read_floats(address, 16)) EXPECT_NE(value, value);
}

TEST_F(AddressSpaceTest, AWriteThroughAnyAddressIsSeen) {
  AddressSpace space(driver, 0, 64 * kMiB, 512);
  space.allocate(8 * kMiB, 0, Content::kOther);
  const uint64_t address = space.allocate(4096, 0, Content::kOther);
  space.poison();
  EXPECT_TRUE(space.untouched());
  const float value = 7;
  device.write_bytes(address, &value, sizeof value);
  EXPECT_FALSE(space.untouched());
}

TEST_F(AddressSpaceTest, PagesAreFilledOnceUnlessTheyAreFoundWritten) {
  const Driver table = counting(driver);
  AddressSpace space(table, 0, 64 * kMiB, 512);
  const uint64_t address = space.allocate(4096, 0, Content::kOther);
  space.poison();
  EXPECT_GE(counted.filled, 1);
  EXPECT_TRUE(space.untouched());
  counted.filled = 0;
  space.poison();
  EXPECT_EQ(counted.filled, 0);
  EXPECT_TRUE(space.untouched());
  const float value = 7;
  device.write_bytes(address, &value, sizeof value);
  EXPECT_FALSE(space.untouched());
  space.poison();
  EXPECT_GE(counted.filled, 1);
  EXPECT_TRUE(space.untouched());
}

TEST_F(AddressSpaceTest, AWriteIsSeenByACheckThatComesLater) {
  for (const bool is_checked_before : {true, false}) {
    AddressSpace space(driver, 0, 64 * kMiB, 512);
    const uint64_t address = space.allocate(4096, 0, Content::kOther);
    space.poison();
    if (is_checked_before) {
      EXPECT_TRUE(space.untouched());
    }
    const float value = 7;
    device.write_bytes(address, &value, sizeof value);
    space.poison();  // for another replay
    EXPECT_FALSE(space.untouched());
  }
}

TEST_F(AddressSpaceTest, PagesThatAreNewAreFilled) {
  AddressSpace space(driver, 0, 64 * kMiB, 512);
  space.allocate(4096, 0, Content::kOther);
  space.poison();
  EXPECT_TRUE(space.untouched());
  const uint64_t address = space.allocate(4096, 0, Content::kFloating);
  space.poison();
  for (const float value : device.read_floats(address, 16)) EXPECT_NE(value, value);
  EXPECT_TRUE(space.untouched());
}

TEST_F(AddressSpaceTest, AWriteAnywhereInALargeAllocationIsSeen) {
  constexpr uint64_t kSize = 600 * kMiB;
  for (const uint64_t offset : {uint64_t{0}, kSize / 2, kSize - 4096}) {
    AddressSpace space(driver, 0, 2048 * kMiB, 512);
    space.allocate(1000, 0, Content::kFloating);
    const uint64_t address = space.allocate(kSize, 0, Content::kFloating);
    space.poison();
    for (const float value : device.read_floats(address + offset, 16)) EXPECT_NE(value, value);
    EXPECT_TRUE(space.untouched());
    const float value = 7;
    device.write_bytes(address + offset, &value, sizeof value);
    EXPECT_FALSE(space.untouched());
  }
}

}  // namespace
}  // namespace pygraph::testing
