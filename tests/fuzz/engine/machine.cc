#include "machine.h"

#include <cstring>

#include "layouts.h"

namespace pygraph::fuzz {

namespace {

constexpr uint64_t kForeignBytes = 4096;

std::string name_of(size_t layout, bool waits) {
  return "fuzz" + std::to_string(layout) + (waits ? "" : "_without_wait");
}

Stream make_stream(const Driver& driver) {
  return create_stream(driver);
}

}  // namespace

Machine::Machine() : stream_(make_stream(simulator_.driver())) {
  CUmodule module = nullptr;
  PYGRAPH_CHECK(driver(), module_load_data(&module, ""));
  module_ = Module(driver(), module);
  for (const bool waits : {true, false}) {
    for (size_t i = 0; i < layouts().size(); ++i) {
      simulator_.add_kernel({.name = name_of(i, waits),
                             .param_sizes = layouts()[i].sizes,
                             .body = [this](void** params) { run_kernel(params, false); },
                             .prologue = [this](void** params) { run_kernel(params, true); },
                             .waits = waits});
      CUfunction function = nullptr;
      PYGRAPH_CHECK(driver(),
                    module_get_function(&function, module_.get(), name_of(i, waits).c_str()));
      functions_.push_back(function);
    }
  }
}

Machine::~Machine() {
  end();
}

void Machine::begin(const Program& program) {
  end();
  program_ = &program;
  constants_.assign(program.values.size(), 0);
  const auto allocate = [&](uint64_t size) {
    abi::DevicePointer address = 0;
    PYGRAPH_CHECK(driver(), memory_allocate(&address, size));
    owned_.push_back(address);
    return address;
  };
  for (size_t v = 0; v < program.values.size(); ++v) {
    const bool is_constant = program.values[v].kind == ValueKind::kConstant;
    // Of random state, constants_ has the stand-ins: 8 bytes and, apart from these, 8 more.
    const bool is_random = program.values[v].kind == ValueKind::kRandom;
    if (is_constant || is_random)
      constants_[v] = allocate(is_random ? 1024 : program.values[v].size);
  }
  for (int i = 0; i < 2; ++i) allocate(kForeignBytes);  // the foreign memory, last
  for (const Step& step : program.steps) {
    for (const Launch& launch : step.launches) {
      launches_.push_back(&launch);
      effects_.emplace_back(launches_.size());
    }
  }
  places_.resize(launches_.size());
}

std::vector<Range> Machine::foreign_memory() const {
  return {{owned_.end()[-1], kForeignBytes}, {owned_.end()[-2], kForeignBytes}};
}

void Machine::end() {
  for (const uint64_t address : owned_) driver().memory_free(address);
  owned_.clear();
  launches_.clear();
  effects_.clear();
  places_.clear();
  program_ = nullptr;
}

void Machine::run_kernel(void** params, bool is_early) {
  const auto* image = static_cast<const std::byte*>(params[0]);
  uint64_t number = 0;
  std::memcpy(&number, image, sizeof number);
  const Launch& launch = *launches_.at(number);
  const auto word_at = [&](uint32_t offset) {
    uint64_t word = 0;
    std::memcpy(&word, image + offset, sizeof word);
    return word;
  };
  const auto index_of = [&](const Access& access) { return &access - launch.accesses.data(); };
  const Locate locate = [&](const Access& access) -> Place {
    const Words& words = places_[number][index_of(access)];
    uint64_t first = word_at(words.offset);
    if (access.through != kNone) {
      std::memcpy(&first, reinterpret_cast<const void*>(first), sizeof first);
      first += access.offset;
    }
    uint64_t second = words.has_end ? word_at(words.end_offset) : 0;
    if (access.by_end && second - first != access.size) throw Wrong("an end is not where it was");
    return {reinterpret_cast<std::byte*>(first), reinterpret_cast<std::byte*>(second)};
  };
  if (is_early) {
    effects_[number] = Effects(number + 1);
    effects_[number].run_early(*program_, launch, locate);
    return;
  }
  effects_[number].run_late(*program_, launch, locate);
  for (const Access& access : launch.accesses) {
    if (!access.stores_address) continue;
    const Words& words = places_[number][index_of(access)];
    const uint64_t address = word_at(words.end_offset);
    std::memcpy(reinterpret_cast<void*>(word_at(words.offset)), &address, sizeof address);
  }
}

}  // namespace pygraph::fuzz
