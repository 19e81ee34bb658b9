// Random programs through the whole engine: recorded twice, linked, replayed on other buffers with
// some inputs donated and with all of them kept. Every result must be what the program says.
#include "random_program.h"

namespace pygraph::testing {
namespace {

class RandomProgramTest : public DeviceTest {};

TEST_F(RandomProgramTest, ResultsAreThoseOfTheProgramWhereverItsBuffersAre) {
  size_t donated_somewhere = 0;
  size_t side_by_side = 0;
  size_t blocks = 0;
  size_t in_outputs = 0;
  for (unsigned seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    const Program program(seed);
    TwoRecordings recordings = record_twice(device, std::vector<uint64_t>(kInputs, kInputBytes),
                                            [&](Session& s) { return program.record(device, s); });
    const uint64_t given = seed % 3 == 0 ? kInputBytes : kBytes;
    std::vector<uint32_t> sharing;
    for (uint32_t i = 0; i < program.outputs.size(); ++i) {
      if (i % 4 != 1) sharing.push_back(i);
    }
    LinkedGraph linked = recordings.link(driver, {.donated = {{0, given}, {2, given}},
                                                  .sharing = sharing,
                                                  .smallest_block = seed % 2 == 1 ? kBytes : 0});
    const auto own_blocks = std::ranges::count(linked.regions, Region::kOwnBlock,
                                               [](const Region& r) { return r.input; });
    blocks += own_blocks;
    in_outputs += std::ranges::count_if(
        linked.regions, [](const Region& r) { return r.output != Region::kNoOutput; });
    donated_somewhere += linked.regions.size() - own_blocks;
    for (const OutputPlacement& donor : linked.placements) {
      donated_somewhere += donor ? 1 : 0;
      side_by_side += donor && donor.offset > 0 ? 1 : 0;
    }
    ExecutableGraph graph(driver, std::move(recordings.graph), std::move(linked));
    for (int round = 0; round < 2; ++round) {
      replay(device, stream.get(), graph, program, /*donated=*/true,
             static_cast<float>(10 * round));
      replay(device, stream.get(), graph, program, /*donated=*/false,
             static_cast<float>(10 * round + 5));
    }
  }
  EXPECT_GT(donated_somewhere, 20);
  EXPECT_GT(side_by_side, 3);
  EXPECT_GT(blocks, 20);
  EXPECT_GT(in_outputs, 5);
}

}  // namespace
}  // namespace pygraph::testing
