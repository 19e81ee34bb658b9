#include <sstream>
#include <stdexcept>

#include "program.h"

namespace pygraph::fuzz {
namespace {

// A line is a word and numbers.
template <typename... Numbers>
void put(std::ostream& out, const char* word, Numbers... numbers) {
  out << word;
  ((out << ' ' << static_cast<uint64_t>(numbers)), ...);
  out << '\n';
}

template <typename T>
void take(std::istream& in, T& number) {
  uint64_t value = 0;
  if (!(in >> value)) throw std::runtime_error("a number is missing");
  number = static_cast<T>(value);
}

template <typename... Numbers>
void take_all(std::istream& in, Numbers&... numbers) {
  (take(in, numbers), ...);
}

}  // namespace

std::string to_text(const Program& program) {
  std::ostringstream out;
  put(out, "program", program.lanes, program.smallest_block, program.has_gaps, program.replays,
      program.seed);
  for (const Value& v : program.values) {
    put(out, "value", v.kind, v.size, v.born, v.freed, v.low_bits, v.given, v.view_of,
        v.view_offset, v.shares);
    if (v.lingers) put(out, "lingers");
  }
  for (const Step& s : program.steps) {
    put(out, "step", s.is_child, s.is_declared, s.op, s.overlaps, s.waits);
    if (s.stream != 0 || s.joined != 0) put(out, "stream", s.stream, s.joined);
    for (const Launch& l : s.launches) {
      put(out, "launch", l.kind, l.layout, l.is_packed, l.order, l.noise, l.has_stray,
          l.has_foreign);
      for (const Access& a : l.accesses) {
        put(out, "access", a.value, a.offset, a.size, a.reads, a.writes, a.is_early, a.by_end,
            a.through, a.stores_address);
      }
      for (const auto& [value, offset] : l.leftovers) put(out, "leftover", value, offset);
    }
  }
  return out.str();
}

Program from_text(const std::string& text) {
  Program program;
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream in(line);
    std::string word;
    if (!(in >> word) || word[0] == '#') continue;
    if (word == "program") {
      take_all(in, program.lanes, program.smallest_block, program.has_gaps, program.replays,
               program.seed);
    } else if (word == "value") {
      Value& v = program.values.emplace_back();
      take_all(in, v.kind, v.size, v.born, v.freed, v.low_bits, v.given, v.view_of, v.view_offset,
               v.shares);
    } else if (word == "lingers") {
      program.values.back().lingers = true;
    } else if (word == "step") {
      Step& s = program.steps.emplace_back();
      take_all(in, s.is_child, s.is_declared, s.op, s.overlaps, s.waits);
    } else if (word == "stream") {
      take_all(in, program.steps.back().stream, program.steps.back().joined);
    } else if (word == "launch") {
      Launch& l = program.steps.back().launches.emplace_back();
      take_all(in, l.kind, l.layout, l.is_packed, l.order, l.noise, l.has_stray, l.has_foreign);
    } else if (word == "access") {
      Access& a = program.steps.back().launches.back().accesses.emplace_back();
      take_all(in, a.value, a.offset, a.size, a.reads, a.writes, a.is_early, a.by_end, a.through,
               a.stores_address);
    } else if (word == "leftover") {
      auto& leftover = program.steps.back().launches.back().leftovers.emplace_back();
      take_all(in, leftover.first, leftover.second);
    } else {
      throw std::runtime_error("unknown line: " + line);
    }
  }
  return program;
}

}  // namespace pygraph::fuzz
