#include "replay/profiles.h"

#include <atomic>
#include <chrono>

namespace pygraph::bindings {
namespace {

using Clock = std::chrono::steady_clock;

// After the end of a profile: each launch, or uncaptured call, makes several calls of the driver,
// one of which detaches CUPTI. More than one, because another thread must have asked for it before.
constexpr int kLaunches = 16;
constexpr Clock::duration kTime = std::chrono::seconds(1);

std::atomic<int> g_launches_left{0};                        // with new executables; 0: no profile
std::atomic<Clock::time_point> g_end{Clock::time_point{}};  // from which on they are counted

}  // namespace

void begin_profile() {
  g_end = Clock::time_point::max();
  g_launches_left = kLaunches;
}

void end_profile(bool detaches) {
  if (detaches) g_end = Clock::now() + kTime;
}

bool needs_new_executable() {
  int left = g_launches_left.load(std::memory_order_relaxed);
  if (left == 0) return false;
  if (Clock::now() >= g_end.load()) g_launches_left.compare_exchange_strong(left, left - 1);
  return true;
}

}  // namespace pygraph::bindings
