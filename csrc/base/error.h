// The exceptions that cross the binding. They carry a finished sentence; the Python side owns the typed errors.
#pragma once
#include <stdexcept>
#include <string>

namespace flexep {

/// A caller broke a documented precondition; the message names the value.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The entry exists, but this build left it out; the message names the build option to set.
struct NotBuilt : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace flexep
