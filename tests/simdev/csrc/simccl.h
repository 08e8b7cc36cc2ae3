// simccl: a c10d backend for tensors on simdev that behaves towards its caller as ProcessGroupNCCL does.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "runtime.h"
#include "simccl_transport.h"

namespace simccl {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

enum class Outcome { pending, finished, aborted };

// Memory as the device's programs name it: a pointer that no host thread follows, and how many bytes.
struct Span {
  void* device;
  std::size_t bytes;
};

// What one call, or all calls of one coalesced group, let the stream run. The kernel holds no tensors: a tensor's
// last reference must not die on a stream's thread, which would need Python's lock for it.
struct Launch {
  using Step = std::function<void(Communicator&)>;
  std::vector<Step> steps;         // collectives, one after the other
  std::vector<Message> messages;   // of which all make progress together; `data` is a device pointer here
  std::vector<Span> written;       // what an abort leaves garbage in
  Tensors inputs, outputs;         // kept by the work; the outputs are its result
};

class SimWork final : public c10d::Work {
 public:
  SimWork(int rank, c10d::OpType type, std::uint64_t sequence, std::shared_ptr<Communicator> communicator)
      : Work(rank, type), sequence_(sequence), communicator_(std::move(communicator)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  void abort() override { communicator_->abort(); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return sequence_; }

 private:
  friend class SimCCL;
  void raise_if_failed() const;

  const std::uint64_t sequence_;
  const std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<std::atomic<Outcome>> outcome_;
  simdev::EventPtr end_;
  Tensors stash_;  // inputs and outputs, until somebody waits: as NCCL's, which frees them there
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool barrier_ = false;
};

class SimCCL final : public c10d::Backend {
 public:
  SimCCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout);
  ~SimCCL() override;

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return false; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // all ranks count from zero, and so need not agree
  std::uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void eagerConnectSingleDevice(at::Device device) override;
  void abort() override;
  void shutdown() override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

 private:
  struct Coalesced {
    Launch launch;
    bool async = false;
  };

  // A communicator and the stream its kernels run on: the group's, and one a peer for lone sends and receives,
  // which must not wait for the group's collectives nor for a third rank.
  struct Lane {
    std::shared_ptr<Communicator> communicator;  // outlives this in kernels that are queued
    std::optional<simdev::StreamId> stream;
    simdev::EventPtr last;  // of the communicator's latest kernel, on whichever stream that ran
    simdev::StreamId last_stream = 0;
  };
  static constexpr int group = -1;

  WorkPtr launch(Launch launch, c10d::OpType type, bool async, int peer = group);
  WorkPtr point_to_point(Tensors& tensors, int peer, bool sending);
  c10::intrusive_ptr<SimWork> make_work(const Launch& launch, c10d::OpType type, const Lane& lane);
  Lane& connected_lane(int peer);
  void check_usable() const;
  void release_streams();

  const c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;  // of all below but lanes_' membership. It is held while ranks are waited for.
  std::chrono::milliseconds timeout_;
  std::uint64_t sequence_ = 0;
  std::optional<Coalesced> coalesced_;
  std::mutex lanes_mutex_;  // never held for long: abort() must get through to whoever holds the other
  std::map<int, Lane> lanes_;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> closed_{false};
};

}  // namespace simccl
