// Which vector path the CPU row functors take. All paths give the same bits; the choice is only speed.
#pragma once
#include <string>
#include <vector>

namespace flexep {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };

/// The paths that this build holds and this CPU runs, slowest first; the first is "portable".
std::vector<std::string> isa_names();

/// The path in use: the fastest one, unless set_isa chose another.
Isa current_isa();

/// Choose a path by name for the whole process (for tests and comparisons); returns the name it replaces.
/// Throws Error when the name is not in isa_names().
std::string set_isa(const std::string& name);

}  // namespace flexep
