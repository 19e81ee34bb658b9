#include "reference.h"

#include <cstring>

#include "effects.h"

namespace pygraph::fuzz {

void run_reference(const Program& program, const std::vector<std::byte*>& bases) {
  uint64_t number = 0;
  const Locate locate = [&](const Access& access) -> Place {
    std::byte* first = bases[access.value] + access.offset;
    return {first, first + 8};
  };
  for (const Step& step : program.steps) {
    for (const Launch& launch : step.launches) {
      if (launch.kind == LaunchKind::kCopy) {
        std::memcpy(locate(launch.accesses[1]).first, locate(launch.accesses[0]).first,
                    launch.accesses[0].size);
      } else if (launch.kind == LaunchKind::kFill) {
        std::memset(locate(launch.accesses[0]).first, static_cast<unsigned char>(number),
                    launch.accesses[0].size);
      } else {
        Effects effects(number + 1);
        effects.run_early(program, launch, locate);
        effects.run_late(program, launch, locate);
      }
      ++number;
    }
  }
}

std::vector<Intervals> written_bytes(const Program& program) {
  std::vector<Intervals> written(program.values.size());
  for (const Step& step : program.steps) {
    for (const Launch& launch : step.launches) {
      for (const Access& access : launch.accesses) {
        if (!access.writes || access.stores_address) continue;
        written[access.value].add(access.offset, access.offset + access.size);
      }
    }
  }
  return written;
}

}  // namespace pygraph::fuzz
