// How long the parts of replays take: for benchmarks (benchmarks/call_clocks.py). Off by default;
// then each part costs a load and a branch.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace pygraph::bindings {

// In the order of a call.
enum class ReplayPart : uint8_t {
  kMatch,      // the arguments with the graphs; their addresses
  kStream,     // the call's stream, and what the call gives away
  kAddresses,  // the list of addresses; gradients that are taken
  kAllocate,
  kPlace,  // the executable for the stream, and its memory
  kBind,
  kLaunch,
  kOutputs,
  kRelease,  // of the list of arguments
  kCount
};

// Right only while one thread calls.
class ReplayClocks {
 public:
  using Parts = std::array<double, static_cast<size_t>(ReplayPart::kCount)>;

  // Begins a call.
  static void begin() {
    if (is_on_.load(std::memory_order_relaxed)) last_ = Clock::now();
  }
  // The part has ended now, and began where the one before ended.
  static void end(ReplayPart part) {
    if (!is_on_.load(std::memory_order_relaxed)) return;
    const Clock::time_point now = Clock::now();
    spent_[static_cast<size_t>(part)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  // The seconds by part since it was called last. is_on: whether clocks run from now on.
  static Parts take(bool is_on) {
    is_on_ = is_on;
    const Parts found = spent_;
    spent_ = {};
    return found;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static inline std::atomic<bool> is_on_ = false;
  static inline Clock::time_point last_;
  static inline Parts spent_{};
};

}  // namespace pygraph::bindings
