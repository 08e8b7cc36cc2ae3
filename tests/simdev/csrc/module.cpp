// The extension module: what torch's own interface to a device has no words for.
#include "module.h"

#include <future>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <thread>

#include "torch_device.h"

namespace py = pybind11;

namespace simdev {
namespace {

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

void spin(double seconds) {
  enqueue(current_stream(), [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
}

// The current stream goes no further until what is returned is called, once.
py::cpp_function hold() {
  auto gate = std::make_shared<std::promise<void>>();
  enqueue(current_stream(), [opened = gate->get_future().share()] { opened.wait(); });
  return py::cpp_function([gate] { gate->set_value(); });
}

void throw_on_device(const std::string& text) {
  enqueue(current_stream(), [text] { throw std::runtime_error(text); });
}

void bind(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("initialise", &initialise, Release());
  module.def("initialised", &initialised);
  module.def("in_bad_fork", &in_bad_fork);
  module.def("memory_info", [] {
    auto info = memory_info();
    return std::make_pair(info.free, info.total);
  });
  module.def("allocated_bytes", &allocated_bytes);
  module.def("synchronize", &synchronize_device, Release());
  module.def("synchronizations", &synchronizations);
  module.def("set_sync_debug", [](bool error) { set_sync_debug(error ? SyncDebug::error : SyncDebug::off); });
  module.def("sync_debug", [] { return sync_debug() == SyncDebug::error; });
  module.def("inject_sticky_error", [](const std::string& text) { inject_sticky_error(text.c_str()); }, Release());
  module.def("default_generator",
             [] { return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator())); });
  module.def("host_register", [](std::uintptr_t at, std::size_t nbytes) { register_host(pointer(at), nbytes); });
  module.def("host_unregister", [](std::uintptr_t at) { unregister_host(pointer(at)); });
  module.def("is_device_pointer", [](std::uintptr_t at) { return is_device(pointer(at)); });
  module.def("spin", &spin, "Keep the current stream busy for so many seconds.");
  module.def("hold", &hold, "Hold the current stream up; the function returned lets it go on.");
  module.def("throw_on_device", &throw_on_device, "Queue work that fails.");
}

}  // namespace
}  // namespace simdev

PYBIND11_MODULE(simdev_ext, module) {
  simdev::bind(module);
  for (auto binder : simdev::binders()) binder(module);
}
