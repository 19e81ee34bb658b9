#include <algorithm>

#include "intervals.h"
#include "layouts.h"
#include "order_steps.h"
#include "program.h"

namespace pygraph::fuzz {
namespace {

// Words that an access takes among the parameters.
uint32_t words_of(const Program& program, const Access& access) {
  if (access.stores_address) return 2;
  if (program.values[access.value].kind == ValueKind::kRandom || access.by_end) return 2;
  return 1;
}

class Normaliser {
 public:
  explicit Normaliser(Program& program) : program_(program), defined_(program.values.size()) {
    for (size_t v = 0; v < program.values.size(); ++v) {
      if (is_always_defined(program.values[v])) defined_[v].add(0, program.values[v].size);
    }
    last_op_.assign(program.values.size(), kNone);
    table_of_.assign(program.values.size(), kNone);
    for (const Step& step : program.steps) {
      for (const Launch& launch : step.launches) {
        for (const Access& access : launch.accesses) {
          const bool is_constant = kind_of(access.value) == ValueKind::kConstant;
          if (is_constant && access.writes) written_constants_.push_back(access.value);
        }
      }
    }
  }

  void run() {
    for (uint32_t s = 0; s < program_.steps.size(); ++s) {
      Step& step = program_.steps[s];
      ++anonymous_op_;
      step.is_declared = step.is_declared && !step.is_child && may_be_declared(step);
      if (!step.is_declared) step.op = kNone;
      if (!step.is_child && step.launches.size() > 1) step.launches.resize(1);
      for (Launch& launch : step.launches) clean(launch, s, step);
      std::erase_if(step.launches, [](const Launch& launch) {
        return launch.kind != LaunchKind::kKernel && launch.accesses.empty();
      });
      if (step.launches.empty()) step.launches.push_back({});
    }
    order_steps(program_);
  }

 private:
  ValueKind kind_of(uint32_t value) const { return program_.values[value].kind; }
  static bool is_always_defined(const Value& value) {
    return value.kind == ValueKind::kInput || value.kind == ValueKind::kConstant ||
           value.kind == ValueKind::kRandom;
  }

  void clean(Launch& launch, uint32_t s, const Step& step) {
    const uint32_t op = step.op == kNone ? kNone - 1 - anonymous_op_ : step.op;
    std::erase_if(launch.accesses,
                  [&](const Access& a) { return !is_possible(a, launch, s, step, op); });
    if (launch.kind != LaunchKind::kKernel) {
      const size_t wanted = launch.kind == LaunchKind::kCopy ? 2 : 1;
      if (launch.accesses.size() != wanted) launch.accesses.clear();
      for (const Access& access : launch.accesses) {
        const bool is_plain = access.through == kNone && !access.by_end &&
                              kind_of(access.value) != ValueKind::kRandom;
        if (!is_plain) return launch.accesses.clear();
      }
      if (launch.kind == LaunchKind::kCopy && !launch.accesses.empty()) {
        Access& from = launch.accesses[0];
        Access& to = launch.accesses[1];
        const bool is_apart = from.value != to.value && (kind_of(from.value) != ValueKind::kInput ||
                                                         kind_of(to.value) != ValueKind::kInput);
        const bool is_copy = from.reads && !from.writes && to.writes && !to.reads;
        if (!is_apart || !is_copy || from.size != to.size) return launch.accesses.clear();
      } else if (!launch.accesses.empty()) {
        if (launch.accesses[0].reads || !launch.accesses[0].writes) return launch.accesses.clear();
      }
      launch.leftovers.clear();
      launch.noise = 0;
      launch.has_stray = launch.has_foreign = false;
    }
    fit(launch);
    std::erase_if(launch.leftovers, [&](const auto& leftover) {
      const Value& value = program_.values[leftover.first];
      return value.born > s || leftover.second >= value.size || value.kind == ValueKind::kRandom ||
             value.kind == ValueKind::kConstant;
    });
    for (const Access& access : launch.accesses) note(access, op);
  }

  // What a launch reads was there before it.
  bool is_possible(const Access& access, const Launch& launch, uint32_t s, const Step& step,
                   uint32_t op) {
    const Value& value = program_.values[access.value];
    if (!is_alive(value, s) || access.size == 0) return false;
    if (access.offset + access.size > value.size || access.size > value.size) return false;
    if (s == value.freed && !may_be_freed_before(access, launch, s)) return false;
    if (access.stores_address) {
      return access.through != kNone && value.kind != ValueKind::kRandom &&
             kind_of(access.through) == ValueKind::kTable &&
             is_alive(program_.values[access.through], s) && access.through != access.value;
    }
    if (value.kind == ValueKind::kTable) return false;
    if (value.kind == ValueKind::kRandom && (access.writes || access.through != kNone)) {
      return false;
    }
    if (access.through != kNone) {
      const bool is_hidden = !step.is_declared && !step.is_child && !access.by_end;
      if (!is_hidden || table_of_[access.through] != access.value) return false;
      if (!is_alive(program_.values[access.through], s)) return false;
    }
    if (value.kind == ValueKind::kScratch && last_op_[access.value] != op) {
      defined_[access.value].clear();
    }
    const uint64_t end = access.offset + access.size;
    if (access.reads && !defined_[access.value].contain(access.offset, end)) return false;
    return access.reads || access.writes;
  }

  // The stream keeps what it has freed until it launches something else. (In a larger parameter,
  // its address may be a leftover: the engine assumes that PyTorch's operators free nothing there.)
  bool may_be_freed_before(const Access& access, const Launch& launch, uint32_t s) const {
    const uint32_t home = program_.steps[program_.values[access.value].born].stream;
    const bool is_apart =
        launch.kind != LaunchKind::kKernel || layouts()[launch.layout % layouts().size()].is_apart;
    return is_apart && access.through == kNone && !access.by_end &&
           program_.steps[s].stream % kMostStreams == home % kMostStreams;
  }

  void note(const Access& access, uint32_t op) {
    if (access.stores_address) {
      table_of_[access.through] = access.value;
      return;
    }
    last_op_[access.value] = op;
    if (access.writes) defined_[access.value].add(access.offset, access.offset + access.size);
  }

  // A kernel has only so many words for addresses.
  void fit(Launch& launch) const {
    launch.layout %= layouts().size();
    uint32_t left = layouts()[launch.layout].words;
    for (size_t i = 0; i < launch.accesses.size(); ++i) {
      const uint32_t words =
          launch.accesses[i].through != kNone && !launch.accesses[i].stores_address
              ? 1
              : words_of(program_, launch.accesses[i]);
      if (words > left) {
        launch.accesses.resize(i);
        break;
      }
      left -= words;
    }
    // Words that differ and are no addresses of the program's stand in larger parameters only.
    if (layouts()[launch.layout].is_apart) {
      launch.noise = 0;
      launch.has_stray = launch.has_foreign = false;
    }
    if (launch.leftovers.size() > left) launch.leftovers.resize(left);
    left -= static_cast<uint32_t>(launch.leftovers.size());
    launch.has_stray = launch.has_stray && left > 0;
    left -= launch.has_stray ? 1 : 0;
    // Only a node that is patched anyway may hold such an address.
    const bool is_patched = std::ranges::any_of(
        launch.accesses, [&](const Access& a) { return kind_of(a.value) != ValueKind::kConstant; });
    launch.has_foreign = launch.has_foreign && left > 0 && is_patched;
    left -= launch.has_foreign ? 1 : 0;
    launch.noise = std::min(launch.noise, left);
  }

  // Memory at constant addresses is not declared. So whoever writes it, and whoever reads what is
  // written, has to stay undeclared.
  bool may_be_declared(const Step& step) const {
    return std::ranges::none_of(step.launches, [&](const Launch& launch) {
      return std::ranges::any_of(launch.accesses, [&](const Access& a) {
        return a.through != kNone ||
               std::ranges::find(written_constants_, a.value) != written_constants_.end();
      });
    });
  }

  Program& program_;
  std::vector<Intervals> defined_;
  std::vector<uint32_t> last_op_;   // by value: scratch memory's last user
  std::vector<uint32_t> table_of_;  // by table: whose address it holds
  std::vector<uint32_t> written_constants_;
  uint32_t anonymous_op_ = 0;
};

}  // namespace

void normalise(Program& program) {
  for (Value& value : program.values) {
    value.size = std::max<uint64_t>(value.size, 1);
    if (value.kind == ValueKind::kRandom) value.size = 16;
    if (value.kind == ValueKind::kTable) value.size = std::max<uint64_t>(value.size, 8);
    const auto count = static_cast<uint32_t>(program.steps.size());
    value.born = std::min(value.born, count > 0 ? count - 1 : 0);
    if (value.freed != kNever) value.freed = std::max(value.freed, value.born + 1);
    const bool is_kept = value.kind != ValueKind::kInternal && value.kind != ValueKind::kTable;
    if (is_kept) value.freed = kNever;
    value.lingers = value.lingers && value.kind == ValueKind::kInternal && value.freed != kNever;
    if (!is_made(value.kind)) value.born = 0;
    if (value.given > 0) value.given = std::max(value.given, value.size);
  }
  Normaliser(program).run();
}

}  // namespace pygraph::fuzz
