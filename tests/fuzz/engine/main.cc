// The fuzzer of the engine, on the simulated driver:
//
//   engine_fuzz [--seed N] [--count M] [--seconds S]   random programs, by default without end
//   engine_fuzz --tables 1 ...                         some keep addresses in device memory
//   engine_fuzz --lingering 0 ...                      none uses memory that has just been freed
//   engine_fuzz --forks 0 ...                          all of them run on one stream
//   engine_fuzz --touching 1 ...                       some use ends that are others' beginnings
//   engine_fuzz --reduce 0 ...                         does not make a failing program smaller
//   engine_fuzz --print N                              the program of a seed
//   engine_fuzz --program FILE                         one program, as the fuzzer prints it
//
// Ends with 1 at the first program that the engine gets wrong, after having made it smaller.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>

#include "campaign.h"
#include "reduce.h"

namespace pygraph::fuzz {
namespace {

using Clock = std::chrono::steady_clock;

// In a process of its own, as some failures end theirs.
bool fails_apart(const Program& program) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    std::freopen("/dev/null", "w", stderr);
    alarm(20);
    Machine machine;
    Arena arena;
    Tally tally;
    _exit(find_fault(machine, arena, program, tally) ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status != 0;
}

std::optional<std::string> run_alone(const Program& program, Tally& tally) {
  Machine machine;
  Arena arena;
  return find_fault(machine, arena, program, tally);
}

void report(const Tally& tally, uint64_t next, double seconds) {
  std::printf(
      "%llu programs up to seed %llu in %.0f s: %llu replays (%llu donated), %llu with "
      "branches, %llu with forks, %llu with regions, %llu with donors, %llu driver failures, %llu "
      "refused\n",
      static_cast<unsigned long long>(tally.programs), static_cast<unsigned long long>(next),
      seconds, static_cast<unsigned long long>(tally.replays),
      static_cast<unsigned long long>(tally.donated),
      static_cast<unsigned long long>(tally.with_branches),
      static_cast<unsigned long long>(tally.with_forks),
      static_cast<unsigned long long>(tally.with_regions),
      static_cast<unsigned long long>(tally.with_donors),
      static_cast<unsigned long long>(tally.failures),
      static_cast<unsigned long long>(tally.refused));
  std::fflush(stdout);
}

bool g_reduces = true;

int print_smaller(uint64_t seed, const Program& program, const std::string& reason) {
  std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), reason.c_str());
  std::fflush(stdout);
  if (!g_reduces) return 1;
  const Program small = reduce(program, fails_apart);
  Tally tally;
  std::printf("# seed %llu\n%s", static_cast<unsigned long long>(seed), to_text(small).c_str());
  std::fflush(stdout);
  const auto found = run_alone(small, tally);  // may end the process
  std::printf("# %s\n", found ? found->c_str() : "does not fail again in this process");
  return 1;
}

// Batches run in processes of their own, so that one that crashes is found out, too.
constexpr uint64_t kBatch = 200;

// The first seed from `first` on that fails, or nothing.
struct BatchResult {
  bool failed = false;
  uint64_t next = 0;
  Tally tally;
  char reason[400] = {};
};

BatchResult run_batch(uint64_t first, uint64_t end, const Features& features,
                      Clock::time_point until) {
  int pipes[2];
  if (pipe(pipes) != 0) std::abort();
  const pid_t child = fork();
  if (child == 0) {
    Machine machine;
    Arena arena;
    BatchResult result;
    for (result.next = first; result.next < end && Clock::now() < until; ++result.next) {
      if (write(pipes[1], &result, sizeof result) < 0) _exit(2);
      const auto found = find_fault(machine, arena, generate(result.next, features), result.tally);
      if (!found) continue;
      result.failed = true;
      std::strncpy(result.reason, found->c_str(), sizeof result.reason - 1);
      break;
    }
    if (write(pipes[1], &result, sizeof result) < 0) _exit(2);
    _exit(0);
  }
  close(pipes[1]);
  BatchResult last;
  BatchResult read_now;
  while (read(pipes[0], &read_now, sizeof read_now) == static_cast<ssize_t>(sizeof read_now)) {
    last = read_now;
  }
  close(pipes[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (status != 0 && !last.failed) {
    last.failed = true;
    std::strncpy(last.reason, "the process ended", sizeof last.reason - 1);
  }
  return last;
}

void add(Tally& sum, const Tally& more) {
  sum.programs += more.programs;
  sum.refused += more.refused;
  sum.replays += more.replays;
  sum.donated += more.donated;
  sum.with_branches += more.with_branches;
  sum.with_forks += more.with_forks;
  sum.with_regions += more.with_regions;
  sum.with_donors += more.with_donors;
  sum.failures += more.failures;
}

int run_programs(uint64_t seed, uint64_t count, const Features& features, double seconds) {
  const auto start = Clock::now();
  const auto until =
      start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const uint64_t end = seed + count;
  Tally sum;
  double reported = 0;
  while (seed < end && Clock::now() < until) {
    const BatchResult batch = run_batch(seed, std::min(end, seed + kBatch), features, until);
    add(sum, batch.tally);
    seed = batch.next;
    if (batch.failed) {
      report(sum, seed, elapsed());
      return print_smaller(seed, generate(seed, features), batch.reason);
    }
    if (elapsed() < reported + 60) continue;
    report(sum, seed, elapsed());
    reported = elapsed();
  }
  report(sum, seed, elapsed());
  return 0;
}

int run_file(const char* path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  Tally tally;
  const auto found = run_alone(from_text(text.str()), tally);
  std::printf("%s\n", found ? found->c_str() : "right");
  return found ? 1 : 0;
}

int run(int count, char** arguments) {
  uint64_t seed = 1;
  uint64_t programs = uint64_t{1} << 40;
  double seconds = 1e9;
  Features features;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string option = arguments[i];
    const char* value = arguments[i + 1];
    if (option == "--program") return run_file(value);
    if (option == "--touching") features.touching = std::strtoull(value, nullptr, 10) != 0;
    if (option == "--reduce") g_reduces = std::strtoull(value, nullptr, 10) != 0;
    if (option == "--tables") features.tables = std::strtoull(value, nullptr, 10) != 0;
    if (option == "--lingering") features.lingering = std::strtoull(value, nullptr, 10) != 0;
    if (option == "--forks") features.forks = std::strtoull(value, nullptr, 10) != 0;
    if (option == "--print") {
      std::cout << to_text(generate(std::strtoull(value, nullptr, 10), features));
      return 0;
    }
    if (option == "--seed") seed = std::strtoull(value, nullptr, 10);
    if (option == "--count") programs = std::strtoull(value, nullptr, 10);
    if (option == "--seconds") seconds = std::strtod(value, nullptr);
  }
  return run_programs(seed, programs, features, seconds);
}

}  // namespace
}  // namespace pygraph::fuzz

int main(int count, char** arguments) {
  return pygraph::fuzz::run(count, arguments);
}
