// simccl's backend: what collectives do with the transport, how they are queued, and what their works tell.
#include "simccl.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <thread>
#include <tuple>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "module.h"
#include "torch_device.h"

namespace simccl {

namespace {

using c10d::OpType;
using c10d::ReduceOp;

using simdev::current_stream;

// Streams are never destroyed, so groups that are gone leave theirs to those that come. One that still has work, of
// an aborted group say, is not taken: its next owner would wait for it.
class StreamPool {
 public:
  simdev::StreamId take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto idle = std::find_if(free_.begin(), free_.end(), simdev::stream_idle);
    if (idle == free_.end()) {
      return simdev::create_stream();
    }
    const simdev::StreamId stream = *idle;
    free_.erase(idle);
    return stream;
  }
  void give(simdev::StreamId stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(stream);
  }

 private:
  std::mutex mutex_;
  std::vector<simdev::StreamId> free_;
};

StreamPool& stream_pool() {
  static StreamPool* pool = new StreamPool;  // never destroyed: backends may go after the statics have gone
  return *pool;
}

[[noreturn]] void refuse(const std::string& sentence) { C10_THROW_ERROR(ValueError, sentence); }

void check_tensor(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone() || tensor.layout() != at::kStrided) {
    refuse("simccl takes dense tensors on simdev only");
  }
  if (!tensor.is_contiguous(tensor.suggest_memory_format())) {
    refuse("Tensors must be contiguous");
  }
}

const at::Tensor& only(const Tensors& tensors) {
  if (tensors.size() != 1) {
    refuse("simccl takes one tensor a call");
  }
  check_tensor(tensors[0]);
  return tensors[0];
}

// The one list with a tensor for each rank.
const Tensors& per_rank(const std::vector<Tensors>& lists, int size) {
  if (lists.size() != 1 || lists[0].size() != static_cast<std::size_t>(size)) {
    refuse("simccl takes one list with a tensor for each rank of the group");
  }
  std::for_each(lists[0].begin(), lists[0].end(), check_tensor);
  return lists[0];
}

void check_same(const at::Tensor& one, const at::Tensor& many, std::int64_t ranks) {
  check_tensor(one);
  check_tensor(many);
  if (one.scalar_type() != many.scalar_type() || one.numel() * ranks != many.numel()) {
    refuse("the larger tensor must have the type of the smaller one and its size times the number of ranks");
  }
}

Span span_of(const at::Tensor& tensor) { return {tensor.data_ptr(), tensor.nbytes()}; }

std::vector<Span> spans_of(const Tensors& tensors) {
  std::vector<Span> spans;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(spans), span_of);
  return spans;
}

// One tensor cut into equal parts, one a rank.
std::vector<Span> parts_of(const at::Tensor& tensor, int ranks) {
  const std::size_t bytes = tensor.nbytes() / ranks;
  std::vector<Span> parts;
  for (int rank = 0; rank < ranks; ++rank) {
    parts.push_back({static_cast<char*>(tensor.data_ptr()) + rank * bytes, bytes});
  }
  return parts;
}

bool same_sizes(const std::vector<Span>& spans) {
  return std::all_of(spans.begin(), spans.end(), [&](const Span& span) { return span.bytes == spans[0].bytes; });
}

char* touch(const Span& span) { return static_cast<char*>(simdev::alias(span.device)); }

std::vector<char*> touch(const std::vector<Span>& spans) {
  std::vector<char*> memory;
  for (const Span& span : spans) {
    memory.push_back(touch(span));
  }
  return memory;
}

// ---- reductions

struct Reduction {
  ReduceOp::RedOpType op;
  at::ScalarType dtype;
  double factor = 1.0;  // of PREMUL_SUM
};

Reduction reduction_of(const ReduceOp& op, at::ScalarType dtype) {
  Reduction reduction{op.op_, dtype};
  const bool floating = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
  const bool bitwise = op.op_ == ReduceOp::BAND || op.op_ == ReduceOp::BOR || op.op_ == ReduceOp::BXOR;
  if (!floating && !at::isIntegralType(dtype, true)) {
    C10_THROW_ERROR(TypeError, c10::str("simccl does not reduce ", dtype));
  }
  if ((floating && bitwise) || (dtype == at::kBool && op.op_ == ReduceOp::AVG)) {
    C10_THROW_ERROR(TypeError, c10::str("simccl has no such reduction of ", dtype));
  }
  if (op.op_ == ReduceOp::PREMUL_SUM) {
    const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    if (supplement == nullptr || supplement->tensor_factor.defined() || !floating) {
      refuse("simccl takes PREMUL_SUM of floating tensors with a number as its factor only");
    }
    reduction.factor = supplement->double_factor;
  }
  return reduction;
}

void accumulate(const Reduction& how, at::Tensor& sum, const at::Tensor& next) {
  switch (how.op) {
    case ReduceOp::PRODUCT:
      sum.mul_(next);
      break;
    case ReduceOp::MIN:
      at::minimum_out(sum, sum, next);
      break;
    case ReduceOp::MAX:
      at::maximum_out(sum, sum, next);
      break;
    case ReduceOp::BAND:
      sum.bitwise_and_(next);
      break;
    case ReduceOp::BOR:
      sum.bitwise_or_(next);
      break;
    case ReduceOp::BXOR:
      sum.bitwise_xor_(next);
      break;
    case ReduceOp::PREMUL_SUM:
      sum.add_(next.mul(how.factor));
      break;
    default:
      sum.add_(next);
  }
}

// Reduce the ranks' pieces in the ranks' order, so that the bits are the same on every rank and in every run.
void combine(const Reduction& how, const std::vector<char*>& pieces, char* out, std::size_t bytes) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const std::size_t item = c10::elementSize(how.dtype);
  // So few elements at a time that at:: computes them on this thread: its helpers would take the cores of others.
  const std::size_t step = 16384 * item;
  for (std::size_t offset = 0; offset < bytes; offset += step) {
    const auto elements = static_cast<std::int64_t>(std::min(step, bytes - offset) / item);
    const auto view = [&](char* memory) {
      return at::from_blob(memory + offset, {elements}, at::TensorOptions().dtype(how.dtype));
    };
    at::Tensor sum = view(out);
    sum.copy_(view(pieces[0]));
    if (how.op == ReduceOp::PREMUL_SUM) {
      sum.mul_(how.factor);
    }
    for (std::size_t rank = 1; rank < pieces.size(); ++rank) {
      accumulate(how, sum, view(pieces[rank]));
    }
    if (how.op == ReduceOp::AVG) {
      at::isFloatingType(how.dtype) ? sum.div_(static_cast<double>(pieces.size()))
                                    : sum.div_(static_cast<std::int64_t>(pieces.size()), "trunc");
    }
  }
}

// ---- the collectives as steps of a kernel

Launch::Step broadcast_step(Span from, Span to, int root) {
  return [=](Communicator& ranks) {
    const char* source = touch(from);
    char* target = touch(to);
    ranks.exchange(
        to.bytes, Communicator::chunk_bytes,
        [&](char* slot, std::size_t offset, std::size_t bytes) {
          if (ranks.rank() == root) {
            std::memcpy(slot, source + offset, bytes);
          }
        },
        [&](std::size_t offset, std::size_t bytes) {
          if (ranks.rank() != root || source != target) {
            std::memcpy(target + offset, ranks.slot(root), bytes);
          }
        });
  };
}

// With a root, the others' `to` stays as it is.
Launch::Step reduce_step(Reduction how, Span from, Span to, std::optional<int> root) {
  return [=](Communicator& ranks) {
    const char* source = touch(from);
    char* target = touch(to);
    std::vector<char*> slots;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      slots.push_back(ranks.slot(rank));
    }
    ranks.exchange(
        from.bytes, Communicator::chunk_bytes,
        [&](char* slot, std::size_t offset, std::size_t bytes) { std::memcpy(slot, source + offset, bytes); },
        [&](std::size_t offset, std::size_t bytes) {
          if (!root || *root == ranks.rank()) {
            combine(how, slots, target + offset, bytes);
          }
        });
  };
}

Launch::Step allgather_step(Span from, const std::vector<Span>& to) {
  return [=](Communicator& ranks) {
    const char* source = touch(from);
    const std::vector<char*> targets = touch(to);
    ranks.exchange(
        from.bytes, Communicator::chunk_bytes,
        [&](char* slot, std::size_t offset, std::size_t bytes) { std::memcpy(slot, source + offset, bytes); },
        [&](std::size_t offset, std::size_t bytes) {
          for (int rank = 0; rank < ranks.size(); ++rank) {
            std::memcpy(targets[rank] + offset, ranks.slot(rank), bytes);
          }
        });
  };
}

// Each round moves a piece for every rank, side by side in the slot.
Launch::Step reduce_scatter_step(Reduction how, const std::vector<Span>& from, Span to) {
  return [=](Communicator& ranks) {
    const std::vector<char*> sources = touch(from);
    char* target = touch(to);
    const std::size_t step = Communicator::chunk_bytes / ranks.size() / 64 * 64;
    std::vector<char*> pieces;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      pieces.push_back(ranks.slot(rank) + ranks.rank() * step);
    }
    ranks.exchange(
        to.bytes, step,
        [&](char* slot, std::size_t offset, std::size_t bytes) {
          for (int rank = 0; rank < ranks.size(); ++rank) {
            std::memcpy(slot + rank * step, sources[rank] + offset, bytes);
          }
        },
        [&](std::size_t offset, std::size_t bytes) { combine(how, pieces, target + offset, bytes); });
  };
}

void add_messages(Launch& launch, bool sending, const std::vector<Span>& spans) {
  for (std::size_t peer = 0; peer < spans.size(); ++peer) {
    launch.messages.push_back(
        {sending, static_cast<int>(peer), static_cast<char*>(spans[peer].device), spans[peer].bytes});
  }
}

// What the stream runs: it holds pointers, the communicator and the work's outcome, and no tensor.
std::function<void()> kernel_of(Launch launch, std::shared_ptr<Communicator> communicator,
                                std::shared_ptr<std::atomic<Outcome>> outcome) {
  launch.inputs.clear();
  launch.outputs.clear();
  return [launch = std::move(launch), communicator = std::move(communicator), outcome = std::move(outcome)] {
    const auto move = [&] {
      for (const Launch::Step& step : launch.steps) {
        step(*communicator);
      }
      std::vector<Message> messages = launch.messages;
      for (Message& message : messages) {
        message.data = static_cast<char*>(simdev::alias(message.data));
      }
      communicator->deliver(std::move(messages));
    };
    // A real abort leaves results that are partly written; whoever uses them shall see it at once.
    const auto spoil = [&] {
      for (const Span& span : launch.written) {
        if (span.bytes != 0) {
          std::memset(touch(span), 0x7f, span.bytes);
        }
      }
    };
    outcome->store(communicator->run(move, spoil) ? Outcome::finished : Outcome::aborted);
  };
}

}  // namespace

// ---- works

std::exception_ptr SimWork::exception() const {
  const Outcome outcome = outcome_->load();
  if (outcome == Outcome::finished || (outcome == Outcome::pending && !communicator_->aborted())) {
    return nullptr;
  }
  return std::make_exception_ptr(
      C10_BUILD_ERROR(DistBackendError, c10::str("simccl: the communicator of rank ", rank_, " was aborted")));
}

void SimWork::raise_if_failed() const {
  if (const std::exception_ptr error = exception()) {
    std::rethrow_exception(error);
  }
}

bool SimWork::isCompleted() { return exception() != nullptr || simdev::event_done(end_); }

bool SimWork::isSuccess() const { return exception() == nullptr && simdev::event_done(end_); }

void SimWork::synchronize() { simdev::stream_wait_event(current_stream(), end_); }

bool SimWork::wait(std::chrono::milliseconds timeout) {
  raise_if_failed();
  synchronize();
  if (timeout != kNoTimeout) {
    // As NCCL's: with a timeout the host does wait, asking again and again.
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!isCompleted()) {
      if (std::chrono::steady_clock::now() > deadline) {
        C10_THROW_ERROR(DistBackendError, c10::str("simccl: not completed after ", timeout.count(), " ms"));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } else if (barrier_) {
    simdev::synchronize_stream(current_stream());
  }
  raise_if_failed();
  stash_.clear();
  return true;
}

// ---- the backend

SimCCL::SimCCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout)
    : Backend(rank, size), store_(std::move(store)), timeout_(timeout) {
  lanes_[group].communicator = std::make_shared<Communicator>(rank, size);
}

// Nothing is waited for but the kernel that an abort chases out.
SimCCL::~SimCCL() {
  abort();
  release_streams();
}

c10::intrusive_ptr<c10d::Backend::Options> SimCCL::getBackendOptions() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

void SimCCL::setTimeout(std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(mutex_);
  timeout_ = timeout;
}

std::uint64_t SimCCL::getSequenceNumberForGroup() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sequence_;
}

c10d::ErrorType SimCCL::getError() {
  return aborted_ ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void SimCCL::check_usable() const {
  if (aborted_ || closed_) {
    C10_THROW_ERROR(DistBackendError, c10::str("simccl: the communicator of rank ", rank_, " was ",
                                               aborted_ ? "aborted" : "shut down"));
  }
}

void SimCCL::abort() {
  aborted_ = true;
  std::vector<std::shared_ptr<Communicator>> communicators;
  {
    const std::lock_guard<std::mutex> lock(lanes_mutex_);
    for (const auto& [peer, lane] : lanes_) {
      communicators.push_back(lane.communicator);
    }
  }
  for (const auto& communicator : communicators) {
    communicator->abort();
  }
}

void SimCCL::shutdown() {
  if (closed_.exchange(true)) {
    return;
  }
  std::vector<simdev::EventPtr> ends;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [peer, lane] : lanes_) {
      if (lane.last) {
        ends.push_back(lane.last);
      }
    }
  }
  if (!aborted_) {
    std::for_each(ends.begin(), ends.end(), simdev::synchronize_event);
  }
  release_streams();
}

void SimCCL::release_streams() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [peer, lane] : lanes_) {
    if (lane.stream) {
      stream_pool().give(*lane.stream);
      lane.stream.reset();
    }
  }
}

SimCCL::Lane& SimCCL::connected_lane(int peer) {
  Lane* lane = nullptr;
  {
    const std::lock_guard<std::mutex> lock(lanes_mutex_);
    check_usable();  // with the lock: an abort either sees the lane or is seen here
    lane = &lanes_[peer];
    if (!lane->communicator) {
      lane->communicator = std::make_shared<Communicator>(rank_ < peer ? 0 : 1, 2);
    }
  }
  if (!lane->communicator->connected()) {
    const std::string name =
        peer == group ? "0" : c10::str(std::min(rank_, peer), ":", std::max(rank_, peer));
    lane->communicator->connect(*store_, "simccl/" + name, timeout_);
  }
  if (!lane->stream) {
    lane->stream = stream_pool().take();
  }
  return *lane;
}

void SimCCL::eagerConnectSingleDevice(at::Device where) {
  TORCH_CHECK(where.type() == simdev::the_device().type(), "simccl: ", where, " is no simdev");
  const std::lock_guard<std::mutex> lock(mutex_);
  connected_lane(group);
}

void SimCCL::startCoalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable();
  coalesced_.emplace();
}

WorkPtr SimCCL::endCoalescing() {
  Coalesced coalesced;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(coalesced_, "simccl: endCoalescing() without startCoalescing()");
    coalesced = std::move(*coalesced_);
    coalesced_.reset();
  }
  if (coalesced.launch.steps.empty() && coalesced.launch.messages.empty()) {
    return nullptr;
  }
  return launch(std::move(coalesced.launch), OpType::COALESCED, coalesced.async);
}

namespace {

template <typename T>
void append(std::vector<T>& to, std::vector<T>& from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

void add(Launch& to, Launch from) {
  append(to.steps, from.steps);
  append(to.messages, from.messages);
  append(to.written, from.written);
  append(to.inputs, from.inputs);
  append(to.outputs, from.outputs);
}

}  // namespace

// Queue a launch. An asynchronous one runs on the communicator's own stream behind what the caller's stream holds
// now. One that is not runs, as NCCL's since torch 2.8, on the caller's stream itself and gives no work.
WorkPtr SimCCL::launch(Launch launch, OpType type, bool async, int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable();
  if (coalesced_) {
    add(coalesced_->launch, std::move(launch));
    coalesced_->async = coalesced_->async || async;
    return nullptr;
  }
  Lane& lane = connected_lane(peer);
  const simdev::StreamId current = current_stream();
  const simdev::StreamId stream = async ? *lane.stream : current;
  if (async) {
    simdev::stream_wait_event(stream, simdev::record_event(current));
  }
  // One communicator's kernels run one after the other, also when they come from several streams.
  if (lane.last && lane.last_stream != stream) {
    simdev::stream_wait_event(stream, lane.last);
  }
  auto outcome = std::make_shared<std::atomic<Outcome>>(Outcome::pending);
  simdev::enqueue(stream, kernel_of(launch, lane.communicator, outcome));
  lane.last = simdev::record_event(stream);
  lane.last_stream = stream;
  sequence_ += peer == group ? 1 : 0;
  if (!async) {
    return nullptr;
  }
  auto work = make_work(launch, type, lane);
  work->outcome_ = std::move(outcome);
  return work;
}

c10::intrusive_ptr<SimWork> SimCCL::make_work(const Launch& launch, OpType type, const Lane& lane) {
  auto work = c10::make_intrusive<SimWork>(rank_, type, sequence_, lane.communicator);
  work->end_ = lane.last;
  work->outputs_ = launch.outputs;
  work->barrier_ = type == OpType::BARRIER;
  const c10::StreamGuard on(simdev::torch_stream(lane.last_stream));
  for (const Tensors* tensors : {&launch.inputs, &launch.outputs}) {
    for (const at::Tensor& tensor : *tensors) {
      // For those who drop the work, and so the stash, before the kernel has run.
      simdev::record_stream(tensor.storage().data_ptr(), lane.last_stream);
      work->stash_.push_back(tensor);
    }
  }
  // Completed now, on the kernel's stream: who waits for it, and what then() runs, is ordered behind the kernel.
  work->future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{simdev::the_device()});
  work->future_->markCompleted(c10::IValue(launch.outputs));
  return work;
}

// ---- the operations

WorkPtr SimCCL::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  only(tensors);
  c10d::AllreduceCoalescedOptions all;
  static_cast<c10d::AllreduceOptions&>(all) = opts;
  return allreduce_coalesced(tensors, all);
}

WorkPtr SimCCL::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  std::for_each(tensors.begin(), tensors.end(), check_tensor);
  Launch what{{}, {}, spans_of(tensors), {}, tensors};
  for (const at::Tensor& tensor : tensors) {
    const Reduction how = reduction_of(opts.reduceOp, tensor.scalar_type());
    what.steps.push_back(reduce_step(how, span_of(tensor), span_of(tensor), std::nullopt));
  }
  return launch(std::move(what), tensors.size() == 1 ? OpType::ALLREDUCE : OpType::COALESCED, opts.asyncOp);
}

WorkPtr SimCCL::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Span span = span_of(only(tensors));
  const int root = static_cast<int>(opts.rootRank);
  Launch what{{broadcast_step(span, span, root)}, {}, {}, {}, tensors};
  if (root != rank_) {
    what.written = {span};
  }
  return launch(std::move(what), OpType::BROADCAST, opts.asyncOp);
}

WorkPtr SimCCL::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only(tensors);
  const int root = static_cast<int>(opts.rootRank);
  const Reduction how = reduction_of(opts.reduceOp, tensor.scalar_type());
  Launch what{{reduce_step(how, span_of(tensor), span_of(tensor), root)}, {}, {}, {}, tensors};
  if (root == rank_) {
    what.written = {span_of(tensor)};
  }
  return launch(std::move(what), OpType::REDUCE, opts.asyncOp);
}

WorkPtr SimCCL::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const Span from = span_of(only(inputs));
  const std::vector<Span> to = spans_of(per_rank(outputs, size_));
  TORCH_CHECK_VALUE(to[rank_].bytes == from.bytes, "simccl: this rank's output has another size than its input");
  Launch what{{}, {}, to, inputs, outputs[0]};
  if (same_sizes(to)) {
    what.steps = {allgather_step(from, to)};
  } else {
    for (int root = 0; root < size_; ++root) {
      what.steps.push_back(broadcast_step(from, to[root], root));
    }
  }
  return launch(std::move(what), OpType::ALLGATHER, opts.asyncOp);
}

WorkPtr SimCCL::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr SimCCL::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "simccl: as many outputs as inputs, please");
  Launch what{{}, {}, {}, inputs, outputs};
  for (std::size_t which = 0; which < inputs.size(); ++which) {
    check_same(inputs[which], outputs[which], size_);
    what.steps.push_back(allgather_step(span_of(inputs[which]), parts_of(outputs[which], size_)));
  }
  what.written = spans_of(outputs);
  return launch(std::move(what), inputs.size() == 1 ? OpType::_ALLGATHER_BASE : OpType::COALESCED, opts.asyncOp);
}

WorkPtr SimCCL::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                               const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only(outputs);
  const Reduction how = reduction_of(opts.reduceOp, output.scalar_type());
  const std::vector<Span> from = spans_of(per_rank(inputs, size_));
  const Span to = span_of(output);
  TORCH_CHECK_VALUE(to.bytes == from[rank_].bytes, "simccl: this rank's input has another size than its output");
  Launch what{{}, {}, {to}, inputs[0], outputs};
  if (same_sizes(from)) {
    what.steps = {reduce_scatter_step(how, from, to)};
  } else {
    for (int root = 0; root < size_; ++root) {
      what.steps.push_back(reduce_step(how, from[root], to, root));
    }
  }
  return launch(std::move(what), OpType::REDUCE_SCATTER, opts.asyncOp);
}

WorkPtr SimCCL::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr SimCCL::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "simccl: as many outputs as inputs, please");
  Launch what{{}, {}, {}, inputs, outputs};
  for (std::size_t which = 0; which < inputs.size(); ++which) {
    check_same(outputs[which], inputs[which], size_);
    const Reduction how = reduction_of(opts.reduceOp, inputs[which].scalar_type());
    what.steps.push_back(reduce_scatter_step(how, parts_of(inputs[which], size_), span_of(outputs[which])));
  }
  what.written = spans_of(outputs);
  return launch(std::move(what), inputs.size() == 1 ? OpType::_REDUCE_SCATTER_BASE : OpType::COALESCED,
                opts.asyncOp);
}

namespace {

// The parts of a tensor's first dimension by split sizes; none given means equal parts.
std::vector<Span> rows_of(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, int ranks) {
  check_tensor(tensor);
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (sizes.empty()) {
    TORCH_CHECK_VALUE(rows % ranks == 0, "simccl: the first dimension does not divide by the number of ranks");
    return parts_of(tensor, ranks);
  }
  std::int64_t sum = 0;
  std::vector<Span> parts;
  for (const std::int64_t size : sizes) {
    const std::size_t row = rows == 0 ? 0 : tensor.nbytes() / rows;
    parts.push_back({static_cast<char*>(tensor.data_ptr()) + sum * row, size * row});
    sum += size;
  }
  TORCH_CHECK_VALUE(sum == rows && parts.size() == static_cast<std::size_t>(ranks),
                    "simccl: split sizes must be one a rank and sum up to the first dimension");
  return parts;
}

}  // namespace

WorkPtr SimCCL::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                              std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  Launch what{{}, {}, {span_of(output)}, {input}, {output}};
  add_messages(what, true, rows_of(input, input_splits, size_));
  add_messages(what, false, rows_of(output, output_splits, size_));
  return launch(std::move(what), OpType::ALLTOALL_BASE, opts.asyncOp);
}

WorkPtr SimCCL::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  Launch what{{}, {}, spans_of(outputs), inputs, outputs};
  add_messages(what, true, spans_of(per_rank({inputs}, size_)));
  add_messages(what, false, spans_of(per_rank({outputs}, size_)));
  return launch(std::move(what), OpType::ALLTOALL, opts.asyncOp);
}

WorkPtr SimCCL::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const Span from = span_of(only(inputs));
  const int root = static_cast<int>(opts.rootRank);
  Launch what{{}, {{true, root, static_cast<char*>(from.device), from.bytes}}, {}, inputs, {}};
  if (root == rank_) {
    what.outputs = per_rank(outputs, size_);
    what.written = spans_of(what.outputs);
    add_messages(what, false, what.written);
  }
  return launch(std::move(what), OpType::GATHER, opts.asyncOp);
}

WorkPtr SimCCL::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  const Span to = span_of(only(outputs));
  const int root = static_cast<int>(opts.rootRank);
  Launch what{{}, {{false, root, static_cast<char*>(to.device), to.bytes}}, {to}, {}, outputs};
  if (root == rank_) {
    what.inputs = per_rank(inputs, size_);
    add_messages(what, true, spans_of(what.inputs));
  }
  return launch(std::move(what), OpType::SCATTER, opts.asyncOp);
}

// A lone message goes by the pair's own communicator, one of a coalesced group by the group's: as NCCL's. Tags are
// ignored, as NCCL ignores them.
WorkPtr SimCCL::point_to_point(Tensors& tensors, int peer, bool sending) {
  const Span span = span_of(only(tensors));
  TORCH_CHECK_VALUE(peer >= 0 && peer < size_ && (peer != rank_ || size_ == 1 || coalesced_),
                    "simccl: no rank ", peer, " to exchange a lone message with");
  const bool lone = !coalesced_;
  const int index = !lone ? peer : (peer < rank_ ? 0 : 1);
  Launch what{{}, {{sending, index, static_cast<char*>(span.device), span.bytes}}, {}, {}, tensors};
  if (!sending) {
    what.written = {span};
  }
  return launch(std::move(what), sending ? OpType::SEND : OpType::RECV, true, lone ? peer : group);
}

WorkPtr SimCCL::send(Tensors& tensors, int destination, int /*tag*/) {
  return point_to_point(tensors, destination, true);
}

WorkPtr SimCCL::recv(Tensors& tensors, int source, int /*tag*/) { return point_to_point(tensors, source, false); }

WorkPtr SimCCL::recvAnysource(Tensors& /*tensors*/, int /*tag*/) {
  C10_THROW_ERROR(NotImplementedError, "simccl does not support recvAnysource, as NCCL does not");
}

WorkPtr SimCCL::barrier(const c10d::BarrierOptions& opts) {
  const at::Tensor token = at::empty({1}, at::TensorOptions().device(simdev::the_device()).dtype(at::kByte));
  const Reduction how{ReduceOp::SUM, at::kByte};
  Launch what{{reduce_step(how, span_of(token), span_of(token), std::nullopt)}, {}, {span_of(token)}, {}, {token}};
  WorkPtr work = launch(std::move(what), OpType::BARRIER, opts.asyncOp);
  if (!opts.asyncOp) {
    simdev::synchronize_stream(current_stream());
  }
  return work;
}

}  // namespace simccl

static const simdev::Binds bind_simccl([](pybind11::module_& module) {
  namespace py = pybind11;
  using simccl::SimCCL;
  py::class_<SimCCL, c10d::Backend, c10::intrusive_ptr<SimCCL>>(module, "SimCCL")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, int, int, std::chrono::milliseconds>(), py::arg("store"),
           py::arg("rank"), py::arg("size"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
});
