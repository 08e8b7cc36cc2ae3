// How a source file adds its functions to the extension module, without module.cpp knowing of it.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace simdev {

using Binder = void (*)(pybind11::module_&);

inline std::vector<Binder>& binders() {
  static std::vector<Binder> all;
  return all;
}

// At namespace level: static simdev::Binds here([](pybind11::module_& module) { module.def(...); });
struct Binds {
  explicit Binds(Binder binder) { binders().push_back(binder); }
};

}  // namespace simdev
