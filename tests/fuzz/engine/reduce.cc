#include "reduce.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace pygraph::fuzz {
namespace {

using Change = std::function<void(Program&)>;

void drop_steps(Program& program, uint32_t first, uint32_t count) {
  program.steps.erase(program.steps.begin() + first, program.steps.begin() + first + count);
  const auto moved = [&](uint32_t position) {
    if (position == kNever || position <= first) return position;
    return std::max(first, position - std::min(position, count));
  };
  for (Value& value : program.values) {
    value.born = moved(value.born);
    value.freed = moved(value.freed);
  }
}

void drop_value(Program& program, uint32_t v) {
  for (Step& step : program.steps) {
    for (Launch& launch : step.launches) {
      std::erase_if(launch.accesses,
                    [&](const Access& a) { return a.value == v || a.through == v; });
      std::erase_if(launch.leftovers, [&](const auto& leftover) { return leftover.first == v; });
      for (Access& access : launch.accesses) {
        if (access.value > v) --access.value;
        if (access.through != kNone && access.through > v) --access.through;
      }
      for (auto& leftover : launch.leftovers) {
        if (leftover.first > v) --leftover.first;
      }
    }
  }
  program.values.erase(program.values.begin() + v);
  for (Value& value : program.values) {
    if (value.view_of == v) value.view_of = kNone, value.low_bits = 0;
    if (value.view_of != kNone && value.view_of > v) --value.view_of;
  }
}

void simplify(Step& step) {
  step.is_child = step.overlaps = false;
  step.waits = true;
}

std::vector<Change> changes_of(const Program& program) {
  std::vector<Change> changes;
  const auto steps = static_cast<uint32_t>(program.steps.size());
  for (uint32_t count = steps / 2; count > 0; count /= 2) {
    for (uint32_t first = 0; first + count <= steps; first += count) {
      if (count < steps) changes.push_back([=](Program& p) { drop_steps(p, first, count); });
    }
  }
  for (uint32_t v = static_cast<uint32_t>(program.values.size()); v-- > 0;) {
    changes.push_back([=](Program& p) { drop_value(p, v); });
    if (program.values[v].given > 0) changes.push_back([=](Program& p) { p.values[v].given = 0; });
    if (program.values[v].lingers)
      changes.push_back([=](Program& p) { p.values[v].lingers = false; });
    if (program.values[v].size > 512)
      changes.push_back([=](Program& p) { p.values[v].size = 512; });
  }
  if (program.replays > 1) changes.push_back([](Program& p) { p.replays = 1; });
  if (program.lanes > 1) changes.push_back([](Program& p) { p.lanes = 1; });
  if (program.smallest_block > 0) changes.push_back([](Program& p) { p.smallest_block = 0; });
  changes.push_back([](Program& p) {
    for (Step& step : p.steps) step.stream = step.joined = 0;
  });
  for (uint32_t s = 0; s < steps; ++s) {
    changes.push_back([=](Program& p) { p.steps[s].stream = p.steps[s].joined = 0; });
    changes.push_back([=](Program& p) { p.steps[s].joined = 0; });
    changes.push_back([=](Program& p) { simplify(p.steps[s]); });
    for (size_t l = 0; l < program.steps[s].launches.size(); ++l) {
      const Launch& launch = program.steps[s].launches[l];
      if (program.steps[s].launches.size() > 1) {
        changes.push_back([=](Program& p) {
          p.steps[s].launches.erase(p.steps[s].launches.begin() + static_cast<ptrdiff_t>(l));
        });
      }
      for (size_t a = 0; a < launch.accesses.size(); ++a) {
        changes.push_back([=](Program& p) {
          auto& accesses = p.steps[s].launches[l].accesses;
          accesses.erase(accesses.begin() + static_cast<ptrdiff_t>(a));
        });
      }
      changes.push_back([=](Program& p) {
        Launch& one = p.steps[s].launches[l];
        one.leftovers.clear();
        one.noise = 0;
        one.has_stray = one.has_foreign = one.is_packed = false;
        for (Access& access : one.accesses) access.is_early = access.by_end = false;
      });
    }
  }
  return changes;
}

}  // namespace

Program reduce(Program program, const std::function<bool(const Program&)>& fails) {
  for (bool has_changed = true; has_changed;) {
    has_changed = false;
    std::string text = to_text(program);
    const std::vector<Change> changes = changes_of(program);
    for (size_t i = 0; i < changes.size(); ++i) {
      Program smaller = program;
      changes[i](smaller);
      normalise(smaller);
      if (to_text(smaller) == text || !fails(smaller)) continue;
      program = std::move(smaller);
      has_changed = true;
      break;  // the changes are those of another program
    }
  }
  return program;
}

}  // namespace pygraph::fuzz
