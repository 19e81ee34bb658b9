// PyGraph's C++ API: record work on a CUDA stream once, replay it on other buffers without copies.
// examples/cpp/relocate.cc shows it in use.
#pragma once

#include "pygraph/address_space.h"  // IWYU pragma: export
#include "pygraph/bind_table.h"     // IWYU pragma: export
#include "pygraph/constants.h"      // IWYU pragma: export
#include "pygraph/driver.h"         // IWYU pragma: export
#include "pygraph/executable.h"     // IWYU pragma: export
#include "pygraph/handles.h"        // IWYU pragma: export
#include "pygraph/host_tables.h"    // IWYU pragma: export
#include "pygraph/link.h"           // IWYU pragma: export
#include "pygraph/record.h"         // IWYU pragma: export
#include "pygraph/recording.h"      // IWYU pragma: export
#include "pygraph/stream_slots.h"   // IWYU pragma: export
