// The device as torch sees it, but for its operations: allocators, streams and events, generator, hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <condition_variable>
#include <mutex>
#include <set>

#include "torch_device.h"

namespace simdev {
namespace {

thread_local StreamId this_threads_stream = 0;

// ---- device memory that is given back behind the work that uses it

struct Block {
  void* address;
  std::size_t size;
  std::set<StreamId> streams;  // where it was allocated, and where record_stream() said
};

struct Accounts {
  std::mutex lock;
  std::condition_variable returned;
  std::int64_t live = 0, peak = 0;  // bytes that tensors hold
  std::int64_t pending = 0;         // bytes freed that wait for a stream
  std::uint64_t generation = 0;     // counts what came back

  void give_back(void* address, std::size_t size) {
    release(address);
    std::lock_guard guard(lock);
    pending -= static_cast<std::int64_t>(size);
    ++generation;
    returned.notify_all();
  }
};

Accounts& accounts() {
  static auto* all = new Accounts;
  return *all;
}

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  if (!block || in_bad_fork()) return;
  auto size = static_cast<std::int64_t>(block->size);
  {
    std::lock_guard guard(accounts().lock);
    accounts().live -= size;
    accounts().pending += size;
  }
  // Each stream holds it until it gets there; whoever comes last gives it back.
  std::shared_ptr<void> hold(block->address, [bytes = block->size](void* at) { accounts().give_back(at, bytes); });
  static const bool early = planted("early-free");
  if (early) return;
  try {
    for (auto stream : block->streams) enqueue(stream, [hold] {});
  } catch (const StickyError&) {
    return;  // nothing queued runs any more, so nothing uses it
  }
}

// Allocate; where the memory is not there, wait for what was freed already and only waits for a stream.
void* allocate_waiting(std::size_t nbytes) {
  auto& all = accounts();
  while (true) {
    std::uint64_t seen;
    {
      std::lock_guard guard(all.lock);
      seen = all.generation;
    }
    try {
      return allocate(nbytes);
    } catch (const OutOfMemory& error) {
      std::unique_lock lock(all.lock);
      TORCH_CHECK_WITH(OutOfMemoryError, all.pending > 0 || all.generation != seen, error.what());
      all.returned.wait_for(lock, std::chrono::milliseconds(50), [&] { return all.generation != seen; });
    }
  }
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    check_error();
    if (!nbytes) return {nullptr, nullptr, &free_block, the_device()};
    void* address = allocate_waiting(nbytes);
    auto& all = accounts();
    std::lock_guard guard(all.lock);
    all.live += static_cast<std::int64_t>(nbytes);
    all.peak = std::max(all.peak, all.live);
    return {address, new Block{address, nbytes, {this_threads_stream}}, &free_block, the_device()};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    enqueue(this_threads_stream, [to = alias(to), from = alias(from), count] { std::memcpy(to, from, count); });
  }
  bool initialized() override { return simdev::initialised(); }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    simdev::record_stream(memory, stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    std::lock_guard guard(accounts().lock);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = accounts().live;
    stats.allocated_bytes[0].peak = accounts().peak;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex /*device*/) override {
    std::lock_guard guard(accounts().lock);
    accounts().peak = accounts().live;
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex /*device*/) override {
    auto info = memory_info();
    return {info.free, info.total};
  }
};

Allocator the_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &the_allocator)

// ---- pinned host memory; a queued copy holds its block by itself (hold_host)

class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    void* at = allocate_host(nbytes);
    return {at, at, &release_host, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_host; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
  bool record_event(void* /*host*/, void* /*context*/, c10::Stream /*stream*/) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

HostAllocator the_host_allocator;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &the_host_allocator)

// ---- streams and events

// Streams come from a pool in turn, as CUDA's do: a process that makes one per batch does not run out of threads.
StreamId pooled_stream() {
  static std::mutex lock;
  static std::array<StreamId, 16> pool{};
  static std::size_t next = 0;
  std::lock_guard guard(lock);
  auto& stream = pool[next++ % pool.size()];
  if (!stream) stream = create_stream();
  return stream;
}

EventPtr& event_in(void* event) { return *static_cast<EventPtr*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return the_device();
  }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_privateuseone() && device.index() <= 0, "simdev has one device, not ", device);
  }
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device /*device*/) const override { return torch_stream(this_threads_stream); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return torch_stream(0); }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    return torch_stream(pooled_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*high_priority*/) const override {
    return torch_stream(pooled_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return torch_stream(std::exchange(this_threads_stream, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { return stream_idle(stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream.id()); }
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override { synchronize_device(); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/, c10::EventFlag) const override {
    auto recorded = record_event(stream.id());
    if (!*event) *event = new EventPtr;
    event_in(*event) = std::move(recorded);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) stream_wait_event(stream.id(), event_in(event));
  }
  bool queryEvent(void* event) const override { return !event || event_done(event_in(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize_event(event_in(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex /*device*/) const override {
    TORCH_CHECK(from && to, "both events must be recorded first");
    return elapsed_ms(event_in(from), event_in(to));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    simdev::record_stream(memory, stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- generator and hooks

class GeneratorImpl final : public at::CPUGeneratorImpl {
 public:
  GeneratorImpl() {
    device_ = the_device();
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  at::CPUGeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl;
    copy->set_state(*get_state());
    return copy;
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return simdev::initialised(); }
  void init() const override { simdev::initialise(); }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchangeDevice(device); }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    TORCH_CHECK(device <= 0, "simdev has one device, not number ", device);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  bool isPinnedPtr(const void* host) const override { return is_pinned(host); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &the_host_allocator; }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    TORCH_CHECK(is_device(pointer), "this is no pointer into simdev's memory");
    return the_device();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex /*device*/) const override {
    return at::make_generator<GeneratorImpl>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

const bool hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

StreamId current_stream() { return this_threads_stream; }

std::int64_t allocated_bytes() {
  std::lock_guard guard(accounts().lock);
  return accounts().live;
}

void record_stream(const c10::DataPtr& memory, StreamId stream) {
  if (memory.get_deleter() != &free_block || !memory.get_context()) return;  // nothing, or memory of someone else
  std::lock_guard guard(accounts().lock);
  static_cast<Block*>(memory.get_context())->streams.insert(stream);
}

void resize_storage(c10::StorageImpl& storage, std::size_t nbytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  auto memory = the_allocator.allocate(nbytes);
  if (auto keep = std::min(nbytes, storage.nbytes())) the_allocator.copy_data(memory.get(), storage.data(), keep);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(nbytes);
}

const at::Generator& default_generator() {
  static auto* generator = new at::Generator(at::make_generator<GeneratorImpl>());
  return *generator;
}

std::uint64_t draw_seed(const std::optional<at::Generator>& given) {
  const auto& generator = given && given->defined() ? *given : default_generator();
  TORCH_CHECK(generator.device().is_privateuseone(), "Expected a 'simdev' device type for generator but found '",
              generator.device(), "'");
  std::lock_guard guard(generator.get<GeneratorImpl>()->mutex_);
  return generator.get<GeneratorImpl>()->random64();
}

}  // namespace simdev
