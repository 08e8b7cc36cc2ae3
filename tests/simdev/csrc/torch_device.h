// What the torch side's source files share: the current stream, the device's generator, storage that grows.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include "runtime.h"

namespace simdev {

inline c10::Device the_device() { return {c10::DeviceType::PrivateUse1, 0}; }
inline c10::Stream torch_stream(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, the_device(), id); }

// The stream that the calling thread launches on.
StreamId current_stream();
// Note that work queued on this stream uses the memory: it is not given away before that work is through.
void record_stream(const c10::DataPtr& memory, StreamId stream);
// Bytes that tensors hold, without what is freed and only waits for a stream.
std::int64_t allocated_bytes();
// Give the storage another size, with what was in it.
void resize_storage(c10::StorageImpl& storage, std::size_t nbytes);

const at::Generator& default_generator();
// Draw the seed for one random kernel. The draw is the host's, so the order is that of the launches, and reading or
// setting the generator's state needs no wait for the device (as with CUDA's counter-based generator).
std::uint64_t draw_seed(const std::optional<at::Generator>& generator);

}  // namespace simdev
