#include "order_steps.h"

#include <algorithm>
#include <array>
#include <set>

namespace pygraph::fuzz {
namespace {

using Steps = std::set<uint32_t>;

void add(Steps& steps, const Steps& more) {
  steps.insert(more.begin(), more.end());
}

class StepOrder {
 public:
  explicit StepOrder(Program& program)
      : program_(program), tail_at_birth_(program.values.size(), kNone) {
    tails_.fill(kNone);
  }

  void run() {
    for (uint32_t s = 0; s < program_.steps.size(); ++s) {
      clean(s);
      for (uint32_t v = 0; v < program_.values.size(); ++v) {
        if (program_.values[v].born == s) tail_at_birth_[v] = tails_[program_.steps[s].stream];
        if (program_.values[v].freed == s) delay_free(v, s);
      }
      while (!is_ordered(s)) {
      }
      Steps done = begin_[s];
      done.insert(s);
      if (program_.steps[s].overlaps) add(done, done_[tails_[program_.steps[s].stream]]);
      done_.push_back(std::move(done));
      tails_[program_.steps[s].stream] = s;
    }
  }

 private:
  // Without streams that are not there, and overlaps that no launch could ask for.
  void clean(uint32_t s) {
    Step& step = program_.steps[s];
    step.stream %= kMostStreams;
    const uint32_t tail = tails_[step.stream];
    uint32_t begun = 1;
    for (uint32_t stream = 1; stream < kMostStreams; ++stream) {
      if (tails_[stream] != kNone) begun |= 1U << stream;
    }
    step.joined &= begun & ~(1U << step.stream);
    if (step.stream != 0 && tail == kNone && step.joined == 0) step.joined = 1;
    step.overlaps = step.overlaps && tail != kNone && is_single_kernel(s) &&
                    is_single_kernel(tail) && !uses_table(s) && !uses_table(tail);
    if (!step.overlaps) step.waits = true;
    begin_.emplace_back();
    late_.emplace_back();
  }

  bool is_single_kernel(uint32_t s) const {
    const Step& step = program_.steps[s];
    return !step.is_child && step.launches[0].kind == LaunchKind::kKernel;
  }
  bool uses_table(uint32_t s) const {
    return std::ranges::any_of(program_.steps[s].launches[0].accesses,
                               [](const Access& access) { return access.through != kNone; });
  }

  void find_ended(uint32_t s) {
    const Step& step = program_.steps[s];
    Steps& begin = begin_[s];
    begin.clear();
    for (uint32_t stream = 0; stream < kMostStreams; ++stream) {
      const bool is_joined = (step.joined >> stream & 1) != 0;
      if (is_joined && tails_[stream] != kNone) add(begin, done_[tails_[stream]]);
    }
    const uint32_t tail = tails_[step.stream];
    if (tail != kNone) add(begin, step.overlaps ? begin_[tail] : done_[tail]);
    late_[s] = begin;
    if (!step.overlaps || !step.waits) return;
    add(late_[s], late_[tail]);
    late_[s].insert(tail);
  }

  // Whether nothing that the step conflicts with may still run. If something may, changes the step.
  bool is_ordered(uint32_t s) {
    find_ended(s);
    for (uint32_t other = s; other-- > 0;) {
      if (!begin_[s].contains(other) && !wait_for(other, s)) return false;
    }
    for (const Launch& launch : program_.steps[s].launches) {
      for (const Access& access : launch.accesses) {
        if (!is_there(access.value, s)) return false;
        if (access.through != kNone && !is_there(access.through, s)) return false;
      }
    }
    return true;
  }

  bool wait_for(uint32_t other, uint32_t s) {
    Step& step = program_.steps[s];
    for (Launch& launch : step.launches) {
      for (Access& access : launch.accesses) {
        if (!conflict(access, other)) continue;
        const uint32_t stream = program_.steps[other].stream;
        const bool has_waited = late_[s].contains(other);
        const bool is_overlapped = step.overlaps && stream == step.stream;
        if (has_waited || is_overlapped) access.is_early = false;
        if (has_waited) continue;
        if (is_overlapped) {
          step.overlaps = false;
          step.waits = true;
        } else {
          step.joined |= 1U << stream;
        }
        return false;
      }
    }
    return true;
  }

  // Memory that others had before was theirs until the value's own stream came to its allocation.
  bool is_there(uint32_t v, uint32_t s) {
    const Value& value = program_.values[v];
    const uint32_t tail = tail_at_birth_[v];
    Step& step = program_.steps[s];
    if (!is_made(value.kind) || tail == kNone) return true;
    const uint32_t stream = program_.steps[value.born].stream;
    if (stream == step.stream || begin_[s].contains(tail)) return true;
    step.joined |= 1U << stream;
    return false;
  }

  // Any two inputs may lie in the same memory.
  bool conflict(const Access& a, const Access& b) const {
    if (a.through != kNone && a.through == b.through) return true;
    const auto is_input = [&](const Access& access) {
      return program_.values[access.value].kind == ValueKind::kInput;
    };
    const bool is_same = a.value == b.value || (is_input(a) && is_input(b));
    return is_same && (a.writes || b.writes);
  }
  bool conflict(const Access& access, uint32_t s) const {
    return std::ranges::any_of(program_.steps[s].launches, [&](const Launch& launch) {
      return std::ranges::any_of(launch.accesses,
                                 [&](const Access& other) { return conflict(access, other); });
    });
  }

  bool uses(uint32_t s, uint32_t v) const {
    return std::ranges::any_of(program_.steps[s].launches, [&](const Launch& launch) {
      return std::ranges::any_of(launch.accesses, [&](const Access& access) {
        return access.value == v || access.through == v;
      });
    });
  }

  // Before step s, to just before the next one, if a use may still run on another stream.
  void delay_free(uint32_t v, uint32_t s) {
    Value& value = program_.values[v];
    const uint32_t tail = tails_[program_.steps[value.born].stream];
    for (uint32_t user = value.born; user < s; ++user) {
      if (done_[tail].contains(user) || !uses(user, v)) continue;
      value.freed = s + 1 < program_.steps.size() ? s + 1 : kNever;
      value.lingers = value.lingers && value.freed != kNever;
      return;
    }
  }

  Program& program_;
  std::array<uint32_t, kMostStreams> tails_;  // by stream: its last step
  std::vector<uint32_t> tail_at_birth_;       // by value: of its stream
  // By step: which steps have ended when it begins, when it has waited for the one that it
  // overlaps, and when its stream goes on behind it.
  std::vector<Steps> begin_;
  std::vector<Steps> late_;
  std::vector<Steps> done_;
};

}  // namespace

void order_steps(Program& program) {
  StepOrder(program).run();
}

}  // namespace pygraph::fuzz
