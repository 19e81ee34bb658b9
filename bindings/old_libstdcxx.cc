// Part of a wheel's engines (PYGRAPH_OLD_GLIBC, old_glibc.h). In C++20, this member has been in
// libstdc++ itself since GCC 11 only (GLIBCXX_3.4.29), and the headers leave it to the library. It
// works on the same string as the older members, so the engine brings it along.
#include <sstream>
#include <string>

template std::string std::stringbuf::str() const&;
