#include "generate.h"

#include <algorithm>
#include <random>
#include <tuple>

#include "intervals.h"
#include "layouts.h"

namespace pygraph::fuzz {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

class Generator {
 public:
  Generator(uint64_t seed, const Features& features)
      : random_(seed), forks_(~seed), features_(features) {
    program_.seed = static_cast<uint32_t>(seed);
  }

  Program make() {
    program_.lanes = pick({1, 1, 2, 3, 8});
    program_.has_gaps = chance(70);
    program_.replays = 2 + below(5);
    is_large_ = chance(25);
    declared_percent_ = program_.lanes > 1 ? pick({60, 90, 100}) : pick({0, 50});
    overlap_percent_ = pick({0, 0, 30, 80});
    reads_most_ = 1 + below(4);
    const uint32_t steps = 1 + below(chance(20) ? 60 : 20);
    program_.steps.resize(steps);
    if (is_large_ && chance(50)) program_.smallest_block = pick({kMiB / 2, kMiB, 2 * kMiB});
    if (chance(15)) program_.smallest_block = 1 + below(40000);
    if (features_.forks && forks_() % 5 < 2) choose_streams();
    add_inputs();
    const uint32_t internals = below(steps + 4);
    for (uint32_t i = 0; i < internals; ++i) add_internal(ValueKind::kInternal);
    const uint32_t outputs = 1 + below(6);
    for (uint32_t i = 0; i < outputs; ++i) add_internal(ValueKind::kOutput);
    if (chance(30)) add_internal(ValueKind::kScratch);
    if (chance(10)) add_internal(ValueKind::kScratch);
    for (uint32_t i = below(3); i > 0; --i) add({.kind = ValueKind::kConstant, .size = size()});
    if (chance(25)) add({.kind = ValueKind::kRandom, .size = 16});
    if (chance(5)) add({.kind = ValueKind::kRandom, .size = 16});
    if (features_.tables && chance(50)) {
      Value& table = add_internal(ValueKind::kTable);
      table.size = std::max<uint64_t>(table.size, 8);
    }
    defined_.resize(program_.values.size());
    for (uint32_t v = 0; v < program_.values.size(); ++v) {
      const ValueKind kind = program_.values[v].kind;
      const bool is_defined =
          kind == ValueKind::kInput || kind == ValueKind::kConstant || kind == ValueKind::kRandom;
      if (is_defined) defined_[v].add(0, program_.values[v].size);
    }
    for (uint32_t s = 0; s < steps; ++s) fill_step(s);
    normalise(program_);
    return std::move(program_);
  }

 private:
  uint32_t below(uint64_t count) { return static_cast<uint32_t>(random_() % count); }
  bool chance(uint32_t percent) { return below(100) < percent; }
  template <typename T>
  T pick(std::initializer_list<T> of) {
    return *(of.begin() + below(of.size()));
  }

  uint64_t size() {
    if (is_large_ && chance(40)) return kMiB * (2 + below(4)) / 2 + pick({0, 8, 512, 1000});
    switch (below(4)) {
      case 0:
        return 1 + below(64);
      case 1:
        return 512 * (1 + below(8));
      case 2:
        return 1 + below(5000);
      default:
        return 1 + below(40000);
    }
  }

  uint32_t add(Value value) {
    program_.values.push_back(value);
    return static_cast<uint32_t>(program_.values.size() - 1);
  }

  void add_inputs() {
    const uint32_t inputs = 1 + below(6);
    for (uint32_t i = 0; i < inputs; ++i) {
      Value input{
          .kind = ValueKind::kInput, .size = size(), .low_bits = pick({0U, 0U, 16U, 4U, 1U})};
      const bool is_given = is_large_ && chance(50);
      if (is_given) {
        input.low_bits = 0;
        input.given = input.size + (chance(30) ? below(2 * kMiB) : 0);
      }
      const uint32_t host = add(input);
      if (!is_given || !chance(30)) continue;
      Value view{.kind = ValueKind::kInput, .view_of = host};
      view.view_offset = chance(50) ? below(input.given) : 512 * below((input.given + 511) / 512);
      view.size = 1 + below(std::min<uint64_t>(input.given - view.view_offset, 100000));
      view.low_bits = static_cast<uint32_t>(view.view_offset % 512);
      add(view);
    }
  }

  Value& add_internal(ValueKind kind) {
    const auto steps = static_cast<uint32_t>(program_.steps.size());
    Value value{.kind = kind, .size = size(), .born = below(steps)};
    if (kind == ValueKind::kOutput && is_large_ && chance(70)) {
      value.born = steps / 2 + below(steps - steps / 2);
      const Value& other = program_.values[below(program_.values.size())];
      if (other.given > 0) value.size = other.given - below(other.given / 3 + 1);
    }
    value.shares = kind == ValueKind::kOutput && chance(60);
    if (kind == ValueKind::kScratch) value.born = below(1 + steps / 3);
    const bool is_freed = kind == ValueKind::kInternal || kind == ValueKind::kTable;
    if (is_freed && chance(85)) value.freed = value.born + 1 + below(chance(70) ? 6 : steps);
    value.lingers = features_.lingering && kind == ValueKind::kInternal &&
                    (program_.has_gaps || features_.touching) && chance(50);
    return program_.values[add(value)];
  }

  // Steps stay on their stream for a while.
  void choose_streams() {
    const uint32_t streams = 2 + forks_() % (kMostStreams - 1);
    const uint64_t stays = 1 + forks_() % 4;
    uint32_t stream = 0;
    for (Step& step : program_.steps) {
      if (forks_() % stays == 0) stream = forks_() % streams;
      step.stream = stream;
      if (forks_() % 8 == 0) step.joined = forks_() % (1U << kMostStreams);
    }
    stays_apart_ = forks_() % 4;
  }

  // Of the values on other streams only some, since each of their uses joins streams.
  std::vector<uint32_t> alive(uint32_t s) {
    std::vector<uint32_t> found;
    for (uint32_t v = 0; v < program_.values.size(); ++v) {
      const Value& value = program_.values[v];
      if (value.kind == ValueKind::kTable || !is_alive(value, s)) continue;
      const bool is_elsewhere =
          is_made(value.kind) && program_.steps[value.born].stream != program_.steps[s].stream;
      if (is_elsewhere && forks_() % 4 < stays_apart_) continue;
      found.push_back(v);
    }
    return found;
  }

  std::pair<uint64_t, uint64_t> part_of(uint64_t begin, uint64_t end) {
    if (end - begin > 65536 && !chance(4)) {  // large ones cost time
      const uint64_t length = 1 + below(16384);
      const uint64_t place =
          pick({uint64_t{0}, end - begin - length, uint64_t{below(end - begin - length)}});
      return {begin + place, length};
    }
    if (chance(60)) return {begin, end - begin};
    const uint64_t offset = below(end - begin);
    return {begin + offset, 1 + below(end - begin - offset)};
  }

  Access access(uint32_t v, bool reads, bool writes) {
    Access access{.value = v, .reads = reads, .writes = writes};
    const auto& ranges = defined_[v].ranges();
    if (reads && !ranges.empty()) {
      const auto& [begin, end] = ranges[below(ranges.size())];
      std::tie(access.offset, access.size) = part_of(begin, end);
    } else {
      access.reads = false;
      std::tie(access.offset, access.size) = part_of(0, program_.values[v].size);
    }
    access.is_early = chance(25);
    access.by_end = chance(10) && (program_.has_gaps || features_.touching ||
                                   access.offset + access.size < program_.values[v].size);
    if (program_.values[v].kind == ValueKind::kRandom) {
      access = {.value = v, .size = 16, .reads = true};
    }
    return access;
  }

  bool is_writable(uint32_t v) {
    switch (program_.values[v].kind) {
      case ValueKind::kInput:
        return chance(12);
      case ValueKind::kConstant:
        return chance(5);
      case ValueKind::kRandom:
        return false;
      default:
        return true;
    }
  }

  Launch make_launch(uint32_t s) {
    Launch launch;
    launch.layout = below(layouts().size());
    launch.is_packed = chance(20);
    launch.order = below(1U << 30);
    const std::vector<uint32_t> choice = alive(s);
    const auto any = [&] { return choice[below(choice.size())]; };
    const auto writable = [&] {
      for (int tries = 0; tries < 8; ++tries) {
        const uint32_t v = any();
        if (is_writable(v)) return v;
      }
      return any();
    };
    if (chance(8)) {
      launch.kind = LaunchKind::kCopy;
      Access from = access(any(), true, false);
      Access to = access(writable(), false, true);
      from.size = to.size = std::min(from.size, to.size);
      for (Access* end : {&from, &to}) end->by_end = end->is_early = false;
      launch.accesses = {from, to};
    } else if (chance(8)) {
      launch.kind = LaunchKind::kFill;
      launch.accesses = {access(writable(), false, true)};
      launch.accesses[0].by_end = launch.accesses[0].is_early = false;
    } else {
      for (uint32_t i = below(reads_most_ + 1); i > 0; --i) {
        launch.accesses.push_back(access(any(), true, false));
      }
      for (uint32_t i = 1 + below(2); i > 0; --i) {
        const uint32_t v = writable();
        launch.accesses.push_back(access(v, chance(20), is_writable(v)));
      }
      for (uint32_t i = chance(25) ? 1 + below(3) : 0; i > 0; --i) {
        const uint32_t v = below(program_.values.size());
        launch.leftovers.emplace_back(v, below(program_.values[v].size));
      }
      launch.noise = chance(20) ? below(4) : 0;
      launch.has_stray = chance(2);
      launch.has_foreign = chance(2);
    }
    for (const Access& done : launch.accesses) {
      if (done.writes) defined_[done.value].add(done.offset, done.offset + done.size);
    }
    return launch;
  }

  void fill_step(uint32_t s) {
    Step& step = program_.steps[s];
    step.is_child = chance(7);
    const uint32_t launches = step.is_child ? 1 + below(4) : 1;
    for (uint32_t i = 0; i < launches; ++i) step.launches.push_back(make_launch(s));
    step.is_declared = chance(declared_percent_);
    if (s > 0 && chance(40)) {
      step.op = program_.steps[s - 1].op;
    } else if (chance(70)) {
      step.op = s;
    }
    step.overlaps = chance(overlap_percent_);
    step.waits = !chance(20);
    use_tables(s, step);
  }

  // One step stores an address; those behind it may use what is there.
  void use_tables(uint32_t s, Step& step) {
    for (uint32_t t = 0; t < program_.values.size(); ++t) {
      const Value& table = program_.values[t];
      if (table.kind != ValueKind::kTable || s < table.born || s >= table.freed) continue;
      Launch& launch = step.launches[0];
      if (launch.kind != LaunchKind::kKernel) continue;
      if (hidden_ == kNone || chance(10)) {
        std::vector<uint32_t> choice = alive(s);
        const auto ends_with_its_uses = [&](uint32_t v) {
          const Value& value = program_.values[v];
          return value.given > 0 || (value.kind == ValueKind::kInternal && value.freed == kNever);
        };
        if (chance(50) && std::ranges::any_of(choice, ends_with_its_uses)) {
          std::erase_if(choice, [&](uint32_t v) { return !ends_with_its_uses(v); });
        }
        hidden_ = choice[below(choice.size())];
        launch.accesses.insert(launch.accesses.begin(),
                               {.value = hidden_, .size = 1, .through = t, .stores_address = true});
      } else if (chance(50)) {
        Access hidden = access(hidden_, chance(60), chance(50));
        hidden.through = t;
        hidden.by_end = hidden.is_early = false;
        launch.accesses.push_back(hidden);
      }
    }
  }

  std::mt19937_64 random_;
  std::mt19937_64 forks_;  // so that programs on one stream do not depend on forks
  Features features_;
  Program program_;
  std::vector<Intervals> defined_;  // roughly
  bool is_large_ = false;
  uint32_t declared_percent_ = 0;
  uint32_t overlap_percent_ = 0;
  uint32_t reads_most_ = 1;
  uint64_t stays_apart_ = 0;  // of four accesses, those that are not of other streams' memory
  uint32_t hidden_ = kNone;   // whose address a table holds
};

}  // namespace

Program generate(uint64_t seed, const Features& features) {
  return Generator(seed, features).make();
}

}  // namespace pygraph::fuzz
