// The transport of simccl: what the ranks of one communicator, processes of one machine, move bytes through.
// It knows nothing of torch's tensors. Host calls are marked; all else runs on a stream's own thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace simccl {

// Thrown out of a kernel that is spinning, or about to, when its communicator is aborted.
struct Aborted {};

// One message of a batch: so many bytes to or from a peer. `data` is what the stream's thread may touch.
struct Message {
  bool sending;
  int peer;
  char* data;
  std::size_t bytes;
};

class Communicator {
 public:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Host: join the other ranks, blocking until all have come, as ncclCommInitRank does. Throws DistBackendError
  // after `timeout`, and when another thread aborts; the communicator then counts as aborted.
  void connect(c10d::Store& store, const std::string& key, std::chrono::milliseconds timeout);
  bool connected() const { return connected_; }

  // Host, from any thread: from now on no kernel of this communicator waits for anybody. Returns when the one that
  // was running is out. What is queued behind it on the stream is not waited for.
  void abort();
  bool aborted() const { return aborted_.load(); }

  // Run `kernel` so that abort() can wait for it. When aborted, run `spoil` (within that wait) and return false.
  bool run(const std::function<void()>& kernel, const std::function<void()>& spoil);

  // Move `total` bytes in rounds of at most `step` (up to `chunk_bytes`) with all ranks in step: `publish` fills this
  // rank's slot, then all ranks' slots stand still while `consume` reads them. All ranks give the same numbers.
  using Publish = std::function<void(char* slot, std::size_t offset, std::size_t bytes)>;
  using Consume = std::function<void(std::size_t offset, std::size_t bytes)>;
  void exchange(std::size_t total, std::size_t step, const Publish& publish, const Consume& consume);
  char* slot(int rank) const;

  // Deliver a batch: every message makes progress whatever the others wait for, so no order of sends and receives
  // within one batch deadlocks. Messages of one pair and direction keep their order.
  void deliver(std::vector<Message> messages);

  static constexpr std::size_t chunk_bytes = 256 * 1024;

 private:
  struct Header;
  struct Counters;
  struct Mailbox;

  std::size_t segment_bytes() const;
  Header& header() const;
  Counters& counters(int rank) const;
  Mailbox& mailbox(int source, int destination) const;
  bool advance(Message& message) const;
  void spin(const std::function<bool()>& there) const;
  void create(c10d::Store& store, const std::string& key);
  void open(c10d::Store& store, const std::string& key, std::chrono::steady_clock::time_point deadline);
  void map(int descriptor);
  void join(c10d::Store& store, const std::string& key, std::chrono::steady_clock::time_point deadline);
  void wait_on_host(const std::function<bool()>& there, std::chrono::steady_clock::time_point deadline,
                    const std::string& what) const;

  const int rank_;
  const int size_;
  bool connected_ = false;
  char* base_ = nullptr;
  int descriptor_ = -1;  // rank 0's, until all have mapped the segment
  std::uint64_t round_ = 0;
  std::atomic<bool> aborted_{false};
  std::atomic<int> running_{0};
};

}  // namespace simccl
