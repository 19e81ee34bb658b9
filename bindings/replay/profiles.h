// Whether a profile may be under way, in which every replay launches a new executable.
//
// NVIDIA's CUPTI, up to 13.3, can end the process with a segmentation fault where an executable is
// launched that was launched before, while CUPTI is attached (docs/explanation/profiles.md).
// PyTorch's profiler attaches it. All functions are thread-safe.
#pragma once

namespace pygraph::bindings {

// CUPTI is about to be attached.
void begin_profile();
// The profile is over. CUPTI stays attached until a call of the driver after this; so the next
// second, and the next launches, count as part of the profile. detaches: whether it ever is
// detached; if not, the profile goes on.
void end_profile(bool detaches);
// Whether an executable that was launched before must not be launched now: replays are slow then.
// To be called once for each launch of one, and for each call that would time a replay.
bool needs_new_executable();

}  // namespace pygraph::bindings
