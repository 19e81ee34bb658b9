// How long the parts of replays, and of calls that they serve, take: for benchmarks
// (benchmarks/call_clocks.py). Off by default; then each part costs a load and a branch.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace pygraph::bindings {

// In the order of a call.
enum class ReplayPart : uint8_t {
  // Of a graphed callable's call (callables/served_calls.h).
  kMayBeServed,
  kArguments,
  kState,  // whose memory is still its own; which gradients there are
  kHost,
  kInputs,  // gradients and rates, whether memory is shared, the list of arguments
  // Of any replay.
  kMatch,      // the arguments with the graphs; their addresses
  kStream,     // the call's stream, and what the call gives away
  kAddresses,  // the list of addresses; gradients that are taken
  kAllocate,
  kPlace,  // the executable for the stream, and its memory
  kBind,
  kLaunch,
  kOutputs,
  kRelease,  // of the list of arguments
  // Of a graphed callable's call.
  kVersions,
  kGradients,
  kResult,
  kCount
};

// Right only while one thread calls.
class ReplayClocks {
 public:
  using Parts = std::array<double, static_cast<size_t>(ReplayPart::kCount)>;

  // Begins a call.
  static void begin() {
    if (is_running.load(std::memory_order_relaxed)) last_end = Clock::now();
  }
  // The part has ended now, and began where the one before ended.
  static void end(ReplayPart part) {
    if (!is_running.load(std::memory_order_relaxed)) return;
    const Clock::time_point now = Clock::now();
    spent[static_cast<size_t>(part)] += std::chrono::duration<double>(now - last_end).count();
    last_end = now;
  }
  // The seconds by part since it was called last. is_on: whether clocks run from now on.
  static Parts take(bool is_on) {
    is_running = is_on;
    const Parts found = spent;
    spent = {};
    return found;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static inline std::atomic<bool> is_running = false;
  static inline Clock::time_point last_end;
  static inline Parts spent{};
};

}  // namespace pygraph::bindings
