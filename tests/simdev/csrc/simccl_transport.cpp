// The transport of simccl: rendezvous through the store, lock-step rounds, mailboxes, and the way out of them all.
#include "simccl_transport.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <utility>

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/util/Exception.h>

namespace simccl {

namespace {

constexpr std::size_t mail_bytes = 64 * 1024;

std::size_t round_up(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

[[noreturn]] void fail(const std::string& sentence) { C10_THROW_ERROR(DistBackendError, "simccl: " + sentence); }

}  // namespace

// The segment: one header, a slot (counters, a page; data) a rank, then a mailbox an ordered pair of ranks. A fresh
// segment is all zeroes, which is every counter's beginning.
struct Communicator::Header {
  std::uint64_t nonce;       // so that a key left over from an earlier job in the same store is noticed
  std::atomic<int> joined;
};
struct Communicator::Counters {
  alignas(64) std::atomic<std::uint64_t> posted;  // the last round for which this rank's slot is filled
  alignas(64) std::atomic<std::uint64_t> taken;   // the last round this rank has read from all slots
};
struct Communicator::Mailbox {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> taken;
  alignas(64) char data[mail_bytes];
};

std::size_t Communicator::segment_bytes() const {
  const std::size_t ranks = size_;
  return 4096 + ranks * (4096 + chunk_bytes) + ranks * ranks * round_up(sizeof(Mailbox));
}

Communicator::Header& Communicator::header() const { return *reinterpret_cast<Header*>(base_); }

Communicator::Counters& Communicator::counters(int rank) const {
  return *reinterpret_cast<Counters*>(base_ + 4096 + rank * (4096 + chunk_bytes));
}

char* Communicator::slot(int rank) const { return base_ + 4096 + rank * (4096 + chunk_bytes) + 4096; }

Communicator::Mailbox& Communicator::mailbox(int source, int destination) const {
  const std::size_t which = source * size_ + destination;
  return *reinterpret_cast<Mailbox*>(slot(size_ - 1) + chunk_bytes + which * round_up(sizeof(Mailbox)));
}

Communicator::~Communicator() {
  if (base_ != nullptr) {
    munmap(base_, segment_bytes());
  }
  if (descriptor_ >= 0) {
    close(descriptor_);
  }
}

// ---- rendezvous

void Communicator::map(int descriptor) {
  void* mapped = mmap(nullptr, segment_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (mapped == MAP_FAILED) {
    fail(std::string("cannot map the communicator's memory: ") + std::strerror(errno));
  }
  base_ = static_cast<char*>(mapped);
}

// An unnamed file, which the others open through this process: there is no moment at which SIGKILL leaves a name
// behind in /dev/shm.
void Communicator::create(c10d::Store& store, const std::string& key) {
  descriptor_ = memfd_create("simccl", MFD_CLOEXEC);
  if (descriptor_ < 0 || ftruncate(descriptor_, static_cast<off_t>(segment_bytes())) != 0) {
    fail(std::string("cannot create the communicator's memory: ") + std::strerror(errno));
  }
  map(descriptor_);
  std::random_device random;
  header().nonce = (static_cast<std::uint64_t>(random()) << 32) | random();
  store.set(key, c10::str("/proc/", getpid(), "/fd/", descriptor_, " ", header().nonce));
}

void Communicator::open(c10d::Store& store, const std::string& key,
                        std::chrono::steady_clock::time_point deadline) {
  // check() again and again: a wait() within the store would hear of no abort.
  wait_on_host([&] { return store.check({key}); }, deadline, "rank 0 to publish " + key);
  const std::vector<std::uint8_t> published = store.get(key);
  std::istringstream words(std::string(published.begin(), published.end()));
  std::string path;
  std::uint64_t nonce = 0;
  words >> path >> nonce;
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  const off_t length = descriptor < 0 ? 0 : lseek(descriptor, 0, SEEK_END);
  const bool whole = length == static_cast<off_t>(segment_bytes());
  if (whole) {
    map(descriptor);
  }
  if (descriptor >= 0) {
    close(descriptor);
  }
  if (!whole || header().nonce != nonce) {
    fail("the key " + key + " names the memory of a communicator that is gone (" + path +
         "): rank 0 has died, or the store's keys are an earlier job's");
  }
}

void Communicator::join(c10d::Store& store, const std::string& key,
                        std::chrono::steady_clock::time_point deadline) {
  if (rank_ == 0) {
    create(store, key);
  } else {
    open(store, key, deadline);
  }
  header().joined.fetch_add(1);
  wait_on_host([&] { return header().joined.load() == size_; }, deadline, "all ranks to join " + key);
  if (descriptor_ >= 0) {
    close(std::exchange(descriptor_, -1));
  }
}

void Communicator::connect(c10d::Store& store, const std::string& key, std::chrono::milliseconds timeout) {
  try {
    join(store, key, std::chrono::steady_clock::now() + timeout);
  } catch (...) {
    aborted_.store(true);
    throw;
  }
  connected_ = true;
}

void Communicator::wait_on_host(const std::function<bool()>& there, std::chrono::steady_clock::time_point deadline,
                                const std::string& what) const {
  while (!there()) {
    if (aborted()) {
      fail("aborted while waiting for " + what);
    }
    if (std::chrono::steady_clock::now() > deadline) {
      fail("timed out while waiting for " + what);
    }
    usleep(1000);
  }
}

// ---- what kernels do

bool Communicator::run(const std::function<void()>& kernel, const std::function<void()>& spoil) {
  // Counted before the flag is looked at: abort() sets the flag before it looks at the count, so one sees the other.
  running_.fetch_add(1);
  const std::unique_ptr<std::atomic<int>, void (*)(std::atomic<int>*)> counted(
      &running_, [](std::atomic<int>* running) { running->fetch_sub(1); });
  try {
    if (aborted()) {
      throw Aborted{};
    }
    kernel();
    return true;
  } catch (const Aborted&) {
    spoil();
    return false;
  }
}

void Communicator::abort() {
  aborted_.store(true);
  while (running_.load() != 0) {
    usleep(50);
  }
}

void Communicator::spin(const std::function<bool()>& there) const {
  for (int tries = 0; !there(); ++tries) {
    if (aborted()) {
      throw Aborted{};
    }
    // A core is given away at first, and then slept on: ranks outnumber the cores of a test machine.
    if (tries < 20) {
      sched_yield();
    } else {
      usleep(50);
    }
  }
}

void Communicator::exchange(std::size_t total, std::size_t step, const Publish& publish, const Consume& consume) {
  const auto all = [this](std::atomic<std::uint64_t> Counters::*counter, std::uint64_t round) {
    for (int rank = 0; rank < size_; ++rank) {
      if ((counters(rank).*counter).load(std::memory_order_acquire) < round) {
        return false;
      }
    }
    return true;
  };
  for (std::size_t offset = 0; offset < total; offset += step) {
    const std::size_t bytes = std::min(step, total - offset);
    spin([&] { return all(&Counters::taken, round_); });
    ++round_;
    publish(slot(rank_), offset, bytes);
    counters(rank_).posted.store(round_, std::memory_order_release);
    spin([&] { return all(&Counters::posted, round_); });
    consume(offset, bytes);
    counters(rank_).taken.store(round_, std::memory_order_release);
  }
}

// Move the next piece of a message if its mailbox allows; true if it did.
bool Communicator::advance(Message& message) const {
  const int source = message.sending ? rank_ : message.peer;
  Mailbox& box = mailbox(source, message.sending ? message.peer : rank_);
  const std::uint64_t written = box.written.load(std::memory_order_acquire);
  const std::uint64_t taken = box.taken.load(std::memory_order_acquire);
  if ((written == taken) != message.sending) {
    return false;  // a full box takes no more, an empty one has nothing to give
  }
  const std::size_t bytes = std::min(mail_bytes, message.bytes);
  std::memcpy(message.sending ? box.data : message.data, message.sending ? message.data : box.data, bytes);
  (message.sending ? box.written : box.taken).fetch_add(1, std::memory_order_release);
  message.data += bytes;
  message.bytes -= bytes;
  return true;
}

void Communicator::deliver(std::vector<Message> messages) {
  std::set<std::pair<int, bool>> busy;  // a pair and direction of which an earlier message is not through
  spin([&] {
    bool moved = true;
    while (moved && !messages.empty() && !aborted()) {
      moved = false;
      busy.clear();
      for (Message& message : messages) {
        if (message.bytes != 0 && busy.emplace(message.peer, message.sending).second) {
          moved = advance(message) || moved;
        }
      }
      const auto through = [](const Message& message) { return message.bytes == 0; };
      messages.erase(std::remove_if(messages.begin(), messages.end(), through), messages.end());
    }
    return messages.empty();
  });
}

}  // namespace simccl
