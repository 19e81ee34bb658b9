#include "campaign.h"

namespace pygraph::fuzz {

std::optional<std::string> find_fault(Machine& machine, Arena& arena, const Program& program,
                                      Tally& tally) {
  std::string place;
  try {
    if (program.seed % 4 != 0) {
      live(machine, arena, program, tally);
      return {};
    }
    const Fault fault = choose_fault(machine, arena, program, program.seed);
    place = ", with call " + std::to_string(fault.call) + " of " + fault.symbol + " failing";
    live(machine, arena, program, tally, &fault);
    return {};
  } catch (const std::exception& error) {
    machine.simulator().forget_failures();
    return error.what() + place;
  }
}

}  // namespace pygraph::fuzz
