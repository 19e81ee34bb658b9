// The process that an object was made in. A forked child has copies of what its parent has made:
// with locks that the parent's other threads may hold, and with handles that the driver does not
// accept.
#pragma once

#include <unistd.h>

namespace pygraph::bindings {

class OwnProcess {
 public:
  // Whether this is the process.
  bool is_here() const { return getpid() == made_in_; }

 private:
  pid_t made_in_ = getpid();
};

}  // namespace pygraph::bindings
