#include "pygraph/link.h"

#include <algorithm>
#include <cstring>

#include "test_device.h"

namespace pygraph::testing {
namespace {

constexpr unsigned kCount = 256;
constexpr uint64_t kBytes = kCount * sizeof(float);

class LinkTest : public DeviceTest {
 protected:
  LinkedGraph link(const std::vector<uint64_t>& inputs, const Computation& computation) {
    recordings = record_twice(device, inputs, computation);
    return recordings.link(driver);
  }
  // Runs link() and returns why it refused.
  std::string refusal(const std::vector<uint64_t>& inputs, const Computation& computation) {
    try {
      link(inputs, computation);
    } catch (const NotRelocatable& error) {
      return error.what();
    }
    return "(not refused)";
  }
  static std::vector<std::string> describe(const LinkedGraph& linked) {
    std::vector<std::string> lines;
    for (const Relocation& r : linked.relocations) {
      const Symbol& symbol = linked.symbols[r.symbol];
      const char* kind = symbol.kind == SymbolKind::kInput    ? "input"
                         : symbol.kind == SymbolKind::kOutput ? "output"
                                                              : "internal";
      lines.push_back(std::to_string(r.node) + ":" + std::to_string(r.offset) + " " + kind +
                      (symbol.kind == SymbolKind::kInternal ? "" : std::to_string(symbol.slot)) +
                      "+" + std::to_string(r.addend));
    }
    return lines;
  }
  TwoRecordings recordings;
};

TEST_F(LinkTest, FindsInputsOutputsAndInternalMemory) {
  const LinkedGraph linked = link({kBytes}, [&](Session& s) {
    const uint64_t middle = s.pool.allocate(kBytes);
    device.add_constant(s.stream, middle, s.inputs[0], kCount, 1);
    const uint64_t result = s.pool.allocate(kBytes);
    device.add_constant(s.stream, result, middle, kCount, 2);
    s.pool.free(middle);
    return std::vector{result};
  });
  EXPECT_EQ(describe(linked), (std::vector<std::string>{"0:0 internal+0", "0:8 input0+0",
                                                        "1:0 output0+0", "1:8 internal+0"}));
  EXPECT_EQ(linked.workspace_size, kBytes);
  EXPECT_EQ(linked.noise_words, 0);
}

TEST_F(LinkTest, AnInteriorAddressBecomesAnAddend) {
  const LinkedGraph linked = link({2 * kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(kBytes);
    device.add(s.stream, result, s.inputs[0], s.inputs[0] + kBytes, kCount);
    return std::vector{result};
  });
  EXPECT_EQ(describe(linked), (std::vector<std::string>{"0:0 output0+0", "0:8 input0+0",
                                                        "0:16 input0+" + std::to_string(kBytes)}));
}

TEST_F(LinkTest, AnAddressOnePastTheEndBelongsToWhatItEnds) {
  const LinkedGraph linked = link({kBytes}, [&](Session& s) {
    device.add_one_struct(s.stream, s.inputs[0], s.inputs[0] + kBytes, s.inputs[0], kCount);
    return std::vector<uint64_t>{};
  });
  ASSERT_EQ(linked.relocations.size(), 3);
  EXPECT_EQ(linked.relocations[1].addend, kBytes);
}

TEST_F(LinkTest, FindsAddressesInsideStructsAndPackedBuffers) {
  const LinkedGraph linked = link({kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(kBytes);
    device.add_one_struct(s.stream, result, 0, s.inputs[0], kCount);
    device.add_constant_packed(s.stream, result, result, kCount, 1);
    return std::vector{result};
  });
  EXPECT_EQ(describe(linked), (std::vector<std::string>{"0:0 output0+0", "0:16 input0+0",
                                                        "1:0 output0+0", "1:8 output0+0"}));
}

TEST_F(LinkTest, CopiesAndFillsAreRelocated) {
  const LinkedGraph linked = link({kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(2 * kBytes);
    PYGRAPH_CHECK(driver, copy_on_device_async(result, s.inputs[0], kBytes, s.stream));
    PYGRAPH_CHECK(driver, memset_d8_async(result + kBytes, 0, kBytes, s.stream));
    return std::vector{result};
  });
  EXPECT_EQ(linked.relocations.size(), 3);
  EXPECT_EQ(linked.recording.nodes[0].kind, NodeKind::kMemcpy);
  EXPECT_EQ(linked.recording.nodes[1].kind, NodeKind::kMemset);
}

// The prototype's defect: a word is an intermediate at one node and an output at a later one,
// because the allocator handed the intermediate's memory to the output.
TEST_F(LinkTest, ReusedMemoryIsTheAllocationAliveAtTheNode) {
  const LinkedGraph linked = link({kBytes}, [&](Session& s) {
    const uint64_t middle = s.pool.allocate(kBytes);
    device.add_constant(s.stream, middle, s.inputs[0], kCount, 1);
    const uint64_t other = s.pool.allocate(2 * kBytes);
    device.add_constant(s.stream, other, middle, kCount, 1);
    s.pool.free(middle);
    const uint64_t result = s.pool.allocate(kBytes);
    EXPECT_EQ(result, middle);
    device.add_constant(s.stream, result, other, kCount, 1);
    s.pool.free(other);
    return std::vector{result};
  });
  EXPECT_EQ(describe(linked),
            (std::vector<std::string>{"0:0 internal+0", "0:8 input0+0", "1:0 internal+0",
                                      "1:8 internal+0", "2:0 output0+0", "2:8 internal+0"}));
}

TEST_F(LinkTest, AStaleAddressInPaddingIsHarmless) {
  const LinkedGraph linked = link({kBytes}, [&](Session& s) {
    const uint64_t middle = s.pool.allocate(kBytes);
    device.add_constant(s.stream, middle, s.inputs[0], kCount, 1);
    s.pool.free(middle);
    const uint64_t result = s.pool.allocate(2 * kBytes);
    device.add_one_struct(s.stream, result, middle, s.inputs[0], kCount);
    return std::vector{result};
  });
  EXPECT_EQ(linked.relocations.size(), 5);
}

TEST_F(LinkTest, AConstantAddressIsLeftAlone) {
  const uint64_t weight = device.floats(std::vector<float>(kCount, 1));
  const LinkedGraph linked = link({kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(kBytes);
    device.add(s.stream, result, s.inputs[0], weight, kCount);
    return std::vector{result};
  });
  EXPECT_EQ(linked.relocations.size(), 2);
}

TEST_F(LinkTest, PaddingThatIsNoAddressIsNoise) {
  uint64_t garbage = 0x1234;
  const LinkedGraph linked = link({kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(kBytes);
    device.add_one_struct(s.stream, result, garbage += 8, s.inputs[0], kCount);
    return std::vector{result};
  });
  EXPECT_EQ(linked.noise_words, 1);
  EXPECT_EQ(linked.relocations.size(), 2);
}

TEST_F(LinkTest, AStandInAddressOfNoSymbolIsLeftToVerification) {
  const LinkedGraph linked = link({kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(kBytes);
    device.add_one_struct(s.stream, result, s.inputs[0] + kBytes + 64, s.inputs[0], kCount);
    return std::vector{result};
  });
  EXPECT_EQ(linked.unexplained_words, 1);
  EXPECT_EQ(linked.relocations.size(), 2);
}

TEST_F(LinkTest, RefusesOtherMemoryOfALibraryInEachRecording) {
  const uint64_t unknown[] = {device.allocate(kBytes), device.allocate(kBytes)};
  int run = 0;
  const std::string reason = refusal({kBytes}, [&](Session& s) {
    device.add_one_struct(s.stream, s.inputs[0], unknown[run++], s.inputs[0], kCount);
    return std::vector<uint64_t>{};
  });
  EXPECT_NE(reason.find("belongs to no known memory"), std::string::npos) << reason;
}

TEST_F(LinkTest, RefusesANodeWithNothingButUnknownMemory) {
  const uint64_t unknown[] = {device.allocate(kBytes), device.allocate(kBytes)};
  int run = 0;
  const std::string reason = refusal({kBytes}, [&](Session& s) {
    device.add_one_struct(s.stream, unknown[run], 0, unknown[run], kCount);
    ++run;
    return std::vector<uint64_t>{};
  });
  EXPECT_NE(reason.find("belongs to no known memory"), std::string::npos) << reason;
  EXPECT_NE(reason.find("add_one_struct"), std::string::npos) << reason;
}

TEST_F(LinkTest, RefusesRecordingsOfAnotherComputation) {
  int run = 0;
  const std::string kernels = refusal({kBytes}, [&](Session& s) {
    if (run++ == 0) {
      device.add_constant(s.stream, s.inputs[0], s.inputs[0], kCount, 1);
    } else {
      device.add(s.stream, s.inputs[0], s.inputs[0], s.inputs[0], kCount);
    }
    return std::vector<uint64_t>{};
  });
  EXPECT_EQ(kernels,
            "the two recordings differ: operator aten::test, node 0 is kernel add_constant in one "
            "and kernel add in "
            "the other");
  const std::string counts = refusal({kBytes}, [&](Session& s) {
    for (int i = 0; i < run; ++i) {
      device.add_constant(s.stream, s.inputs[0], s.inputs[0], kCount, 1);
    }
    ++run;
    return std::vector<uint64_t>{};
  });
  EXPECT_EQ(counts, "the two recordings differ: 2 nodes against 3");
  const std::string shapes = refusal({kBytes}, [&](Session& s) {
    device.add_constant(s.stream, s.inputs[0], s.inputs[0], 128 * run++, 1);
    return std::vector<uint64_t>{};
  });
  EXPECT_NE(shapes.find("launched with another shape"), std::string::npos) << shapes;
}

TEST(MatchRecordings, SaysWhatDiffersBetweenTwoCopies) {
  const auto refusal = [](const abi::Memcpy3D& first, const abi::Memcpy3D& second) -> std::string {
    Recording recordings[2];
    for (const int i : {0, 1}) {
      Node& node = recordings[i].nodes.emplace_back();
      node.kind = NodeKind::kMemcpy;
      node.image.resize(sizeof first);
      std::memcpy(node.image.data(), i == 0 ? &first : &second, sizeof first);
      recordings[i].operators = {{.name = "aten::copy_", .last = 1}};
    }
    try {
      match_recordings(recordings[0], recordings[1]);
    } catch (const NotRelocatable& error) {
      return error.what();
    }
    return "(not refused)";
  };
  abi::Memcpy3D copy{};
  copy.width_bytes = 64;
  abi::Memcpy3D other = copy;
  other.src_device = 0x1000;
  EXPECT_EQ(refusal(copy, other), "(not refused)");
  other.src_host = reinterpret_cast<const void*>(0x2000);
  const std::string place = "the two recordings differ: operator aten::copy_, node 0, a memcpy, ";
  EXPECT_EQ(refusal(copy, other), place + "uses other host memory");
  other.width_bytes = 128;
  EXPECT_EQ(refusal(copy, other), place + "has another extent");
}

TEST_F(LinkTest, RefusesOutputsThatAreNotMemoryOfTheRecording) {
  const std::string reason = refusal({kBytes}, [&](Session&) { return std::vector<uint64_t>{64}; });
  EXPECT_EQ(reason, "output 0 is not memory of this recording");
}

// Since PyTorch 2.13 each capture has memory of its own for them.
TEST_F(LinkTest, RandomStatesAreFoundByTheirTwoAddressesInEachRecording) {
  for (const bool is_shared : {true, false}) {
    std::vector<RandomState> states = {{device.allocate(8), device.allocate(8), 4}};
    if (!is_shared) states.push_back({device.allocate(8), device.allocate(8), 4});
    size_t recording = 0;
    recordings = record_twice(device, {kBytes}, [&](Session& s) {
      const RandomState& state = states[is_shared ? 0 : recording++];
      device.add_one_struct(s.stream, s.inputs[0], 0, s.inputs[0], kCount);
      device.add_one_struct(s.stream, state.seed_address, state.offset_address, 4, 0 + kCount);
      return std::vector<uint64_t>{};
    });
    recordings.first.random = {states.front()};
    recordings.second.random = {states.back()};
    const LinkedGraph linked = recordings.link(driver);
    ASSERT_EQ(linked.relocations.size(), 4);
    EXPECT_EQ(linked.symbols[linked.relocations[2].symbol].kind, SymbolKind::kRandom);
    EXPECT_EQ(linked.relocations[2].addend, 0);
    EXPECT_EQ(linked.relocations[3].addend, 8);
    EXPECT_EQ(linked.unexplained_words, 0);
    EXPECT_EQ(linked.noise_words, 0);
  }
}

// The end of a constant, say, which lies before the state in PyTorch's pool.
TEST_F(LinkTest, OneAddressOfARandomStateByItselfIsNone) {
  const RandomState state = {device.allocate(8), device.allocate(8), 4};
  recordings = record_twice(device, {kBytes}, [&](Session& s) {
    device.add_one_struct(s.stream, s.inputs[0], state.seed_address, s.inputs[0], kCount);
    device.add_one_struct(s.stream, s.inputs[0], 0, state.offset_address, kCount);
    return std::vector<uint64_t>{};
  });
  recordings.first.random = {state};
  recordings.second.random = {state};
  const LinkedGraph linked = recordings.link(driver);
  ASSERT_EQ(linked.relocations.size(), 3);
  for (const Relocation& relocation : linked.relocations) {
    EXPECT_EQ(relocation.symbol, 0);  // the input
  }
}

TEST_F(LinkTest, LinkMapAndDotNameEverySymbol) {
  const LinkedGraph linked = link({kBytes}, [&](Session& s) {
    const uint64_t result = s.pool.allocate(kBytes);
    device.add_constant(s.stream, result, s.inputs[0], kCount, 1);
    device.add_constant(s.stream, result, result, kCount, 1);
    return std::vector{result};
  });
  const std::string map = link_map(linked);
  EXPECT_NE(map.find("2 nodes, 4 relocations, 2 symbols"), std::string::npos) << map;
  EXPECT_NE(map.find("input0"), std::string::npos) << map;
  EXPECT_NE(map.find("output0"), std::string::npos) << map;
  EXPECT_NE(to_dot(linked).find("n0 -> n1"), std::string::npos);
}

}  // namespace
}  // namespace pygraph::testing
