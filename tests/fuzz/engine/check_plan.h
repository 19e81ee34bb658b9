// The engine's plan against what the program really accesses. Nothing here asks the engine why.
#pragma once

#include "machine.h"

namespace pygraph::fuzz {

// Throws Wrong if
//   * an address is not relocated, or to another place than the rest of its value;
//   * the graph's edges allow two steps to run in another order than the program, or beside each
//     other, though one writes what the other accesses;
//   * two values share bytes and the edges do not put all uses of one before those of the other;
//   * memory is taken from an input that was not given away, or lies outside of where it belongs.
void check_plan(const Program& program, const Recorded& recorded, const LinkedGraph& linked);

}  // namespace pygraph::fuzz
