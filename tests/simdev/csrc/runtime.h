// The simulated device's driver: memory that the CPU may not touch, streams that run beside the host, events,
// errors that stick. It knows nothing of torch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace simdev {

using StreamId = std::int64_t;  // 0 is the default stream; every stream is of the one device

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct StickyError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The first call of any function that needs the device makes the device: its memory and its streams' threads. In a
// process forked after that, every such call throws std::runtime_error.
void initialise();
bool initialised();
bool in_bad_fork();

// ---- memory

// Return device memory (64-byte aligned, zero bytes give nullptr). A read or write through it by the host faults.
// Throws OutOfMemory where the device's limit, over all living processes, does not leave that much.
void* allocate(std::size_t nbytes);
// Give it back at once; work that is queued on a stream and still uses it is the caller's affair, as with cudaFree
// the caller must have ordered it. (The torch allocator above defers it behind the streams that used it.)
void release(void* device);
// Return the address under which a stream's own thread (and nobody else) reads and writes this device memory.
// `device` may point into the middle of an allocation. A pointer that is no device memory comes back as it is.
void* alias(const void* device);
bool is_device(const void* pointer);
struct MemoryInfo { std::size_t free, total; };
MemoryInfo memory_info();

// ---- host memory that the device reads and writes by itself

void* allocate_host(std::size_t nbytes);
// Give it back as soon as no queued copy holds it.
void release_host(void* host) noexcept;
void register_host(void* host, std::size_t nbytes);
void unregister_host(void* host);
// Return what keeps the pinned block around `host` alive; null where `host` is not pinned. For queued work.
std::shared_ptr<void> hold_host(const void* host);
bool is_pinned(const void* host);

// ---- streams and events

StreamId create_stream();
// Run `work` on the stream's thread behind all that was queued there before. Never blocks.
// After a sticky error nothing queued runs any more, and this throws StickyError.
void enqueue(StreamId stream, std::function<void()> work);

class Event;  // recorded on a stream, waited for by streams and by the host
using EventPtr = std::shared_ptr<Event>;
EventPtr record_event(StreamId stream);
void stream_wait_event(StreamId stream, const EventPtr& event);
bool event_done(const EventPtr& event);
// Host waits: each is counted, and throws StickyError; all but the first are refused in sync-debug mode "error".
void synchronize_event(const EventPtr& event);
void synchronize_stream(StreamId stream);
void synchronize_device();
bool stream_idle(StreamId stream);
// Throw where the sync-debug mode refuses the wait that the caller is about to prepare.
void refuse_synchronization();
// Milliseconds between two events that are done.
double elapsed_ms(const EventPtr& from, const EventPtr& to);

// ---- errors, and what tests ask

// From now on every call throws StickyError(text) until the process ends, as after a device-side assert.
void inject_sticky_error(const char* text);
void check_error();
// How often the host has waited for the device so far.
std::int64_t synchronizations();
enum class SyncDebug { off, error };
void set_sync_debug(SyncDebug mode);
SyncDebug sync_debug();
// Whether SIMDEV_PLANT asks for this mistake.
bool planted(const char* mistake);

}  // namespace simdev
