// Included before every source file of a wheel (PYGRAPH_OLD_GLIBC), which has to run with
// glibc 2.28, on which PyTorch's wheels run: on the system that builds it, glibc may be newer.
//
// glibc 2.32 and 2.34 moved functions of libpthread and libdl to libc and gave them new versions.
// The old versions are the same functions, and all later releases of glibc keep them for old
// programs. tools/build_wheel.py checks what the built engines need.
#pragma once

#include <features.h>

#if !defined(__GLIBC__) || !defined(__x86_64__)
#error "PYGRAPH_OLD_GLIBC is for glibc on x86-64"
#endif

#define PYGRAPH_OLD(function) __asm__(".symver " #function "," #function "@GLIBC_2.2.5")
PYGRAPH_OLD(dlopen);
PYGRAPH_OLD(dlsym);
PYGRAPH_OLD(pthread_attr_getstack);
PYGRAPH_OLD(pthread_getattr_np);
PYGRAPH_OLD(pthread_once);
PYGRAPH_OLD(pthread_rwlock_rdlock);
PYGRAPH_OLD(pthread_rwlock_unlock);
PYGRAPH_OLD(pthread_rwlock_wrlock);
#undef PYGRAPH_OLD

// glibc has this variable from 2.32 on: whether the process has one thread. libstdc++ reads it to
// count references without atomic instructions. With one of its own, which is 0, it always uses
// them.
extern "C" {
__attribute__((weak, visibility("hidden"))) char __libc_single_threaded = 0;
}
