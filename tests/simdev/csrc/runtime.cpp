// The simulated device's driver. See runtime.h for what it promises.
#include "runtime.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace simdev {

class Event {
 public:
  bool done = false;  // under the runtime's lock
  std::chrono::steady_clock::time_point when;
};

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kAlignment = 64;

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

double from_environment(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtod(text, nullptr) : otherwise;
}

// ---- the ledger: which process has how much of the device's memory

// When a process was started, in ticks; nothing where there is no such process any more.
std::string birth(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  auto name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  for (int number = 3; number <= 22 && fields >> field; ++number)
    if (number == 3 && (field == "Z" || field == "X")) return {};  // has no memory any more
  return field;
}

class FileLock {
 public:
  explicit FileLock(const fs::path& path) : descriptor_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    if (descriptor_ < 0 || flock(descriptor_, LOCK_EX)) throw std::runtime_error("cannot lock " + path.string());
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock() { close(descriptor_); }

 private:
  int descriptor_;
};

class Ledger {
 public:
  explicit Ledger(std::size_t total) : total_(total), granule_(std::clamp<std::size_t>(total / 64, 1, 2 << 20)) {
    if (const char* folder = std::getenv("SIMDEV_LEDGER")) folder_ = folder;
    if (!folder_.empty()) fs::create_directories(folder_);
  }

  // Enter that this process uses so many bytes; false where the others leave less. Steps of a granule, so that not
  // every small allocation takes a look at the files.
  bool set(std::size_t used) {
    if (used <= entered_ && entered_ - used < 2 * granule_) return true;
    if (folder_.empty()) return used <= total_;
    FileLock lock(folder_ / "lock");
    std::size_t others = used > entered_ ? others_locked() : 0;
    if (used > entered_ && used + others > total_) return false;
    std::size_t rounded = round_up(used, granule_);
    entered_ = used <= entered_ || rounded + others <= total_ ? rounded : used;
    auto pid = std::to_string(getpid());
    std::ofstream(folder_ / pid) << entered_ << ' ' << birth(pid) << '\n';
    return true;
  }

  std::size_t others() {
    if (folder_.empty()) return 0;
    FileLock lock(folder_ / "lock");
    return others_locked();
  }

 private:
  std::size_t others_locked() {
    std::size_t sum = 0;
    for (const auto& entry : std::vector<fs::directory_entry>(fs::directory_iterator(folder_), {})) {
      auto pid = entry.path().filename().string();
      if (pid.find_first_not_of("0123456789") != std::string::npos || pid == std::to_string(getpid())) continue;
      std::size_t bytes = 0;
      std::string born;
      std::ifstream(entry.path()) >> bytes >> born;
      if (birth(pid) == born || !reclaimed(entry.path())) sum += bytes;
    }
    return sum;
  }

  // Whether the memory of a process that is dead has come back by now: the driver takes its time.
  bool reclaimed(const fs::path& entry) {
    auto noticed = fs::path(entry).concat(".dead");
    if (!fs::exists(noticed)) std::ofstream(noticed).flush();
    std::chrono::duration<double> since = fs::file_time_type::clock::now() - fs::last_write_time(noticed);
    if (since.count() < from_environment("SIMDEV_RECLAIM_S", 0)) return false;
    fs::remove(entry);
    fs::remove(noticed);
    return true;
  }

  std::size_t total_, granule_, entered_ = 0;
  fs::path folder_;
};

// ---- device memory: one file in memory, mapped where nobody may touch it, and once more for the streams' threads

class Memory {
 public:
  Memory() : total(static_cast<std::size_t>(from_environment("SIMDEV_MEMORY", 512 << 20))), ledger_(total) {
    size_ = round_up(2 * total, 1 << 16);  // twice, so that holes between blocks do not matter
    int file = memfd_create("simdev", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(size_))) throw std::runtime_error("simdev: no memory file");
    device_ = map(file, PROT_NONE);
    alias_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
    holes_[0] = size_;
  }

  void* allocate(std::size_t nbytes) {
    std::size_t need = round_up(nbytes, kAlignment);
    auto best = holes_.end();
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole)
      if (hole->second >= need && (best == holes_.end() || hole->second < best->second)) best = hole;
    if (used_ + need > total || best == holes_.end() || !ledger_.set(used_ + need)) return nullptr;
    auto [offset, size] = *best;
    holes_.erase(best);
    if (size > need) holes_[offset + need] = size - need;
    blocks_[offset] = need;
    used_ += need;
    return device_ + offset;
  }

  void release(void* device) {
    auto block = blocks_.find(static_cast<char*>(device) - device_);
    if (block == blocks_.end()) throw std::runtime_error("simdev: released what was not allocated");
    auto [offset, size] = *block;
    blocks_.erase(block);
    used_ -= size;
    ledger_.set(used_);
    auto next = holes_.lower_bound(offset);
    if (next != holes_.end() && next->first == offset + size) {
      size += next->second;
      next = holes_.erase(next);
    }
    if (next != holes_.begin() && std::prev(next)->first + std::prev(next)->second == offset)
      std::prev(next)->second += size;
    else
      holes_[offset] = size;
  }

  bool contains(const void* pointer) const {
    auto* byte = static_cast<const char*>(pointer);
    return byte >= device_ && byte < device_ + size_;
  }
  void* alias(const void* device) const { return alias_ + (static_cast<const char*>(device) - device_); }
  std::size_t available() {
    std::size_t gone = used_ + ledger_.others();
    return gone < total ? total - gone : 0;
  }

  const std::size_t total;

 private:
  char* map(int file, int protection) const {
    void* at = mmap(nullptr, size_, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) throw std::runtime_error("simdev: cannot map the memory file");
    return static_cast<char*>(at);
  }

  Ledger ledger_;
  std::size_t size_ = 0, used_ = 0;
  char *device_ = nullptr, *alias_ = nullptr;
  std::map<std::size_t, std::size_t> holes_, blocks_;  // offset: size
};

// ---- the device

struct Stream {
  std::deque<std::function<void()>> queue;
  std::condition_variable arrived;
  bool running = false;
};

struct Runtime {
  std::mutex lock;
  std::condition_variable progress;  // an event is done, a stream idle, or all is over
  Memory memory;
  std::vector<std::unique_ptr<Stream>> streams;
  std::string sticky;
  std::atomic<bool> broken{false}, stopping{false};
};

std::atomic<Runtime*> the_runtime{nullptr};  // never deleted: threads and tensors outlive whatever main() does
std::atomic<bool> forked{false};
std::atomic<std::int64_t> waits{0};
std::atomic<SyncDebug> debug_mode{SyncDebug::off};

void break_device(Runtime& device, const std::string& text) {
  std::lock_guard guard(device.lock);
  if (!device.broken) device.sticky = text;
  device.broken = true;
  device.progress.notify_all();
  for (auto& stream : device.streams) stream->arrived.notify_all();
}

void run_stream(Runtime& device, Stream& stream) {
  std::unique_lock lock(device.lock);
  while (true) {
    stream.arrived.wait(lock, [&] { return !stream.queue.empty() && !device.stopping; });
    auto work = std::move(stream.queue.front());
    stream.queue.pop_front();
    stream.running = true;
    lock.unlock();
    try {
      if (!device.broken) work();
    } catch (const std::exception& error) {
      break_device(device, error.what());
    }
    work = nullptr;  // what it holds goes now, and without the lock
    lock.lock();
    stream.running = false;
    if (stream.queue.empty() || device.stopping) device.progress.notify_all();
  }
}

// Let no stream's thread run into what exit() takes down. A kernel that hangs is left hanging.
void stop_streams() {
  auto* device = the_runtime.load();
  if (forked || !device) return;
  std::unique_lock lock(device->lock);
  device->stopping = true;
  device->progress.notify_all();
  device->progress.wait_for(lock, std::chrono::seconds(2), [&] {
    return std::none_of(device->streams.begin(), device->streams.end(), [](auto& stream) { return stream->running; });
  });
}

StreamId add_stream(Runtime& device) {
  sigset_t all, before;  // signals are the interpreter's main thread's
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::lock_guard guard(device.lock);
  auto id = static_cast<StreamId>(device.streams.size());
  auto& stream = *device.streams.emplace_back(std::make_unique<Stream>());
  std::thread thread(run_stream, std::ref(device), std::ref(stream));
  pthread_setname_np(thread.native_handle(), ("simdev-" + std::to_string(id)).c_str());
  thread.detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return id;
}

Runtime& make_runtime() {
  static std::mutex making;
  std::lock_guard guard(making);
  if (!the_runtime) {
    auto* device = new Runtime;
    add_stream(*device);
    the_runtime = device;
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    std::atexit(stop_streams);
  }
  return *the_runtime;
}

void refuse_fork() {
  if (forked) throw std::runtime_error("simdev was initialised before the fork");
}

Runtime& enter() {
  refuse_fork();
  auto* made = the_runtime.load();
  Runtime& device = made ? *made : make_runtime();
  if (device.broken) throw StickyError(device.sticky);
  return device;
}

Stream& stream_of(Runtime& device, StreamId id) {
  if (id < 0 || id >= static_cast<StreamId>(device.streams.size()))
    throw std::runtime_error("simdev: no stream " + std::to_string(id));
  return *device.streams[static_cast<std::size_t>(id)];
}

void wait_for(Runtime& device, const std::vector<EventPtr>& events) {
  ++waits;
  std::unique_lock lock(device.lock);
  for (auto& event : events) device.progress.wait(lock, [&] { return event->done || device.broken; });
  if (device.broken) throw StickyError(device.sticky);
}

// ---- pinned host memory

struct HostBlock {
  HostBlock(void* at, std::size_t nbytes, bool own) : address(static_cast<char*>(at)), size(nbytes), owned(own) {}
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;
  ~HostBlock() {
    if (owned) std::free(address);
  }
  char* address;
  std::size_t size;
  bool owned;
};

struct HostBlocks {
  std::mutex lock;
  std::map<char*, std::shared_ptr<HostBlock>> blocks;

  std::shared_ptr<HostBlock> around(const void* host) {
    auto* byte = const_cast<char*>(static_cast<const char*>(host));
    auto after = blocks.upper_bound(byte);
    if (after == blocks.begin()) return nullptr;
    auto& block = std::prev(after)->second;
    return byte < block->address + block->size ? block : nullptr;
  }
};

HostBlocks& host_blocks() {
  static auto* blocks = new HostBlocks;
  return *blocks;
}

void drop_host(void* host, bool owned) {
  auto& known = host_blocks();
  std::shared_ptr<HostBlock> last;  // freed without the lock
  std::lock_guard guard(known.lock);
  auto found = known.blocks.find(static_cast<char*>(host));
  if (found == known.blocks.end() || found->second->owned != owned)
    throw std::runtime_error("simdev: this host memory is not registered");
  last = std::move(found->second);
  known.blocks.erase(found);
}

}  // namespace

void initialise() { enter(); }
bool initialised() { return the_runtime && !forked; }
bool in_bad_fork() { return forked; }

void* allocate(std::size_t nbytes) {
  auto& device = enter();
  if (!nbytes) return nullptr;
  std::lock_guard guard(device.lock);
  if (void* block = device.memory.allocate(nbytes)) return block;
  throw OutOfMemory("simdev out of memory: tried to allocate " + std::to_string(nbytes) + " bytes, " +
                    std::to_string(device.memory.available()) + " of " + std::to_string(device.memory.total) +
                    " are free");
}

void release(void* pointer) {
  refuse_fork();
  auto* device = the_runtime.load();
  if (!pointer || !device) return;
  std::lock_guard guard(device->lock);
  device->memory.release(pointer);
}

bool is_device(const void* pointer) {
  auto* device = the_runtime.load();
  return device && device->memory.contains(pointer);
}

void* alias(const void* pointer) {
  return is_device(pointer) ? the_runtime.load()->memory.alias(pointer) : const_cast<void*>(pointer);
}

MemoryInfo memory_info() {
  auto& device = enter();
  std::lock_guard guard(device.lock);
  return {device.memory.available(), device.memory.total};
}

void* allocate_host(std::size_t nbytes) {
  enter();
  void* at = nullptr;
  if (posix_memalign(&at, 4096, round_up(std::max<std::size_t>(nbytes, 1), kAlignment))) throw std::bad_alloc();
  auto block = std::make_shared<HostBlock>(at, nbytes, true);
  auto& known = host_blocks();
  std::lock_guard guard(known.lock);
  known.blocks[block->address] = block;
  return at;
}

void release_host(void* host) noexcept {
  if (!forked) drop_host(host, true);  // in a forked child the lock may be held by a thread that is not there
}

void register_host(void* host, std::size_t nbytes) {
  enter();
  auto& known = host_blocks();
  std::lock_guard guard(known.lock);
  auto* first = static_cast<char*>(host);
  auto next = known.blocks.lower_bound(first);
  if (known.around(host) || (next != known.blocks.end() && next->first < first + nbytes))
    throw std::runtime_error("simdev: part or all of this host memory is pinned already");
  known.blocks[first] = std::make_shared<HostBlock>(host, nbytes, false);
}

void unregister_host(void* host) {
  enter();
  drop_host(host, false);
}

std::shared_ptr<void> hold_host(const void* host) {
  if (forked) return nullptr;
  auto& known = host_blocks();
  std::lock_guard guard(known.lock);
  return known.around(host);
}

bool is_pinned(const void* host) { return hold_host(host) != nullptr; }

StreamId create_stream() { return add_stream(enter()); }

void enqueue(StreamId id, std::function<void()> work) {
  auto& device = enter();
  std::lock_guard guard(device.lock);
  auto& stream = stream_of(device, id);
  stream.queue.push_back(std::move(work));
  stream.arrived.notify_one();
}

EventPtr record_event(StreamId stream) {
  auto event = std::make_shared<Event>();
  enqueue(stream, [event] {
    auto& device = *the_runtime.load();
    std::lock_guard guard(device.lock);
    event->done = true;
    event->when = std::chrono::steady_clock::now();
    device.progress.notify_all();
  });
  return event;
}

void stream_wait_event(StreamId stream, const EventPtr& event) {
  enqueue(stream, [event] {
    auto& device = *the_runtime.load();
    std::unique_lock lock(device.lock);
    device.progress.wait(lock, [&] { return event->done || device.broken || device.stopping; });
  });
}

bool event_done(const EventPtr& event) {
  auto& device = enter();
  std::lock_guard guard(device.lock);
  return event->done;
}

// Not refused in sync-debug mode "error": CUDA's mode does not look at events either.
void synchronize_event(const EventPtr& event) { wait_for(enter(), {event}); }

void synchronize_stream(StreamId stream) {
  refuse_synchronization();
  wait_for(enter(), {record_event(stream)});
}

void synchronize_device() {
  refuse_synchronization();
  auto& device = enter();
  std::size_t count;
  {
    std::lock_guard guard(device.lock);
    count = device.streams.size();
  }
  std::vector<EventPtr> events;
  for (std::size_t id = 0; id < count; ++id) events.push_back(record_event(static_cast<StreamId>(id)));
  wait_for(device, events);
}

bool stream_idle(StreamId id) {
  auto& device = enter();
  std::lock_guard guard(device.lock);
  auto& stream = stream_of(device, id);
  return stream.queue.empty() && !stream.running;
}

void refuse_synchronization() {
  if (debug_mode == SyncDebug::error)
    throw std::runtime_error("simdev: the host would wait for the device, which the sync-debug mode refuses");
}

double elapsed_ms(const EventPtr& from, const EventPtr& to) {
  auto& device = enter();
  std::lock_guard guard(device.lock);
  if (!from->done || !to->done) throw std::runtime_error("simdev: the events are not done yet");
  return std::chrono::duration<double, std::milli>(to->when - from->when).count();
}

void inject_sticky_error(const char* text) { break_device(enter(), text); }

void check_error() { enter(); }

std::int64_t synchronizations() { return waits; }
void set_sync_debug(SyncDebug mode) { debug_mode = mode; }
SyncDebug sync_debug() { return debug_mode; }

bool planted(const char* mistake) {
  const char* plants = std::getenv("SIMDEV_PLANT");
  std::istringstream words(plants ? plants : "");
  for (std::string word; std::getline(words, word, ',');)
    if (word == mistake) return true;
  return false;
}

}  // namespace simdev
