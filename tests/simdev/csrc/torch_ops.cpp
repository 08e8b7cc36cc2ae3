// The device's operations: each runs torch's CPU kernel on a stream's thread, over the memory that only such threads
// may touch. The host learns the results' shapes from the meta kernel and does not wait.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <exception>
#include <mutex>
#include <unordered_map>

#include "torch_device.h"

namespace simdev {
namespace {

using c10::IValue;
using torch::jit::Stack;

// ---- tensors on other devices that stand for ours

// Images of this device's tensors: on meta (no memory), or on the CPU over the streams' view of the same memory.
// What shares a tensor or a storage here shares it there.
class Images {
 public:
  explicit Images(c10::DeviceType kind) : kind_(kind) {}

  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    auto& image = tensors_[tensor.unsafeGetTensorImpl()];
    if (!image.defined()) image = tensor.is_privateuseone() ? over_storage(tensor) : of_cpu(tensor);
    return image;
  }

 private:
  at::Tensor over_storage(const at::Tensor& tensor) {
    auto key = kind_ == c10::DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
    auto image = at::detail::make_tensor<c10::TensorImpl>(storage_of(tensor), c10::DispatchKeySet(key), tensor.dtype());
    auto* impl = image.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    impl->_set_conj(tensor.is_conj());
    impl->_set_neg(tensor.is_neg());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return image;
  }

  // A tensor of the CPU among the arguments is copied as it is now: the kernel runs later. For meta its value does
  // not matter, but a number keeps its place in the rules of type promotion.
  at::Tensor of_cpu(const at::Tensor& tensor) {
    if (kind_ != c10::DeviceType::CPU) return tensor.dim() ? tensor.to(at::kMeta) : tensor;
    auto image = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) image.unsafeGetTensorImpl()->set_wrapped_number(true);
    return image;
  }

  c10::Storage storage_of(const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    auto& image = storages_[storage.unsafeGetStorageImpl()];
    if (!image) {
      bool meta = kind_ != c10::DeviceType::CPU;
      c10::DataPtr memory(meta ? nullptr : alias(storage.data()), c10::Device(kind_));
      image = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory),
                           c10::GetAllocator(kind_), /*resizable=*/meta);
    }
    return image;
  }

  c10::DeviceType kind_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

at::Tensor cpu_image(const at::Tensor& tensor) { return Images(c10::DeviceType::CPU).of(tensor); }

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(at::kPrivateUse1),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

void ensure_storage(const at::Tensor& tensor) {
  auto need = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(),
                                               static_cast<std::size_t>(tensor.storage_offset()));
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (tensor.numel() && need > storage->nbytes()) resize_storage(*storage, need);
}

// What a tensor will look like, as the meta kernel says.
struct Layout {
  explicit Layout(const at::Tensor& tensor) : defined(tensor.defined()) {
    if (!defined) return;
    sizes = tensor.sizes().vec();
    strides = tensor.strides().vec();
    offset = tensor.storage_offset();
    dtype = tensor.scalar_type();
  }
  bool defined;
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset = 0;
  at::ScalarType dtype = at::ScalarType::Undefined;
};

// Give a tensor of ours the layout that its image was given by an operation.
void adopt_layout(const at::Tensor& tensor, const Layout& layout) {
  if (tensor.sizes() == layout.sizes && tensor.strides() == layout.strides && tensor.storage_offset() == layout.offset)
    return;
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, layout.offset);
  ensure_storage(tensor);
}

// What every piece of queued work runs in: below autograd, with as many threads as the host's kernels have.
class KernelScope {
 public:
  explicit KernelScope(int threads) {
    if (at::get_num_threads() != threads) at::set_num_threads(threads);
  }

 private:
  at::AutoDispatchBelowADInplaceOrView below_;
};

void enqueue_kernel(std::function<void()> kernel) {
  enqueue(current_stream(), [kernel = std::move(kernel), threads = at::get_num_threads()] {
    KernelScope scope(threads);
    kernel();
  });
}

// Run the kernel on the current stream and wait for it. What it throws is the caller's and does not stick.
void run_and_wait(std::function<void()> kernel) {
  refuse_synchronization();
  auto thrown = std::make_shared<std::exception_ptr>();
  enqueue_kernel([kernel = std::move(kernel), thrown] {
    try {
      kernel();
    } catch (...) {
      *thrown = std::current_exception();
    }
  });
  synchronize_stream(current_stream());
  if (*thrown) std::rethrow_exception(*thrown);
}

// ---- boxed arguments and results

std::vector<at::Tensor> tensors_in(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

template <typename Map>
IValue map_tensors(const IValue& value, Map&& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(map(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      mapped.push_back(tensor ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt);
    return mapped;
  }
  return value;
}

bool written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

const std::unordered_set<c10::Symbol>& alias_sets(const c10::AliasInfo& alias) {
  return alias.beforeSets().empty() && !alias.containedTypes().empty() ? alias.containedTypes()[0].beforeSets()
                                                                       : alias.beforeSets();
}

// What one call's layouts follow from: the operation, its arguments' layouts, and the numbers among them. Asking the
// meta kernel again and again would take longer than the kernels do: many are Python.
class Signature {
 public:
  explicit Signature(const c10::FunctionSchema& schema) : numbers_count_(schema.name() == "aten::arange" ||
                                                                         schema.name() == "aten::range") {
    const void* operation = &schema;
    raw(operation);
    raw(at::get_default_dtype_as_scalartype());
  }

  // Whether the value's meaning for layouts is known here; else the call has no signature.
  bool add(const IValue& value) {
    raw(value.isNone() ? 'N' : value.isTensor() ? 'T' : value.isDouble() ? 'D' : 'O');
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isTensorList()) return add_all(value.toTensorVector());
    if (value.isInt()) return raw(value.toInt());
    if (value.isBool()) return raw(value.toBool());
    if (value.isDouble()) return !numbers_count_ || raw(value.toDouble());
    if (value.isIntList()) return add_all(value.toIntVector());
    if (value.isBoolList()) return add_all(value.toBoolList().vec());
    if (value.isString()) return add_all(value.toStringRef());
    if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        add_tensor(tensor.value_or(at::Tensor()));
      return raw(value.toOptionalTensorList().size());
    }
    return value.isNone() || value.isDevice() || value.isGenerator();
  }
  const std::string& text() const { return text_; }

 private:
  template <typename T>
  bool raw(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return true;
  }
  bool add_one(const at::Tensor& tensor) { return add_tensor(tensor); }
  template <typename T>
  bool add_one(T value) {
    return raw(value);
  }
  template <typename Values>
  bool add_all(const Values& values) {
    for (const auto& value : values) add_one(value);
    return raw(values.size());
  }
  bool add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) return raw('U');
    add_all(tensor.sizes());
    add_all(tensor.strides());
    raw(tensor.storage_offset());
    raw(tensor.scalar_type());
    raw(tensor.is_privateuseone());
    raw(tensor.is_conj());
    raw(tensor.is_neg());
    raw(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    // Which arguments share memory, not where it is.
    return raw(storages_.emplace(tensor.storage().unsafeGetStorageImpl(), storages_.size()).first->second);
  }

  bool numbers_count_;
  std::string text_;
  std::unordered_map<const void*, std::size_t> storages_;
};

// One call of an operation with this device's tensors.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack) : op_(op), schema_(op.schema()) {
    auto count = static_cast<std::ptrdiff_t>(schema_.arguments().size());
    arguments_.assign(stack.end() - count, stack.end());
    stack.resize(stack.size() - static_cast<std::size_t>(count));
  }

  Stack run() {
    auto layouts = known_layouts();
    return layouts ? launch(*layouts) : run_synchronously();
  }

 private:
  struct Layouts {
    std::vector<std::vector<Layout>> results;
    std::vector<Layout> written;  // of all arguments that are, one after the other
  };
  using LayoutsPtr = std::shared_ptr<const Layouts>;  // null where the meta kernel does not know

  // The arguments for a kernel on another device; a random one gets a generator that is made for this call.
  template <typename Map>
  Stack arguments_on(c10::DeviceType kind, Map&& map) {
    Stack mapped;
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      const auto& value = arguments_[i];
      if (value.isDevice())
        mapped.emplace_back(c10::Device(kind));
      else if (!is_generator(schema_.arguments()[i]))
        mapped.push_back(map_tensors(value, [&](const at::Tensor& tensor) { return map(tensor, i); }));
      else if (kind == c10::DeviceType::CPU)
        mapped.emplace_back(at::make_generator<at::CPUGeneratorImpl>(
            draw_seed(value.isNone() ? std::nullopt : std::make_optional(value.toGenerator()))));
      else
        mapped.emplace_back();
    }
    return mapped;
  }

  LayoutsPtr known_layouts() {
    static std::mutex lock;
    static auto* known = new std::unordered_map<std::string, LayoutsPtr>;
    Signature signature(schema_);
    for (const auto& value : arguments_)
      if (!signature.add(value)) return infer();
    {
      std::lock_guard guard(lock);
      auto found = known->find(signature.text());
      if (found != known->end()) return found->second;
    }
    auto layouts = infer();
    std::lock_guard guard(lock);
    if (known->size() > 10000) known->clear();
    return (*known)[signature.text()] = std::move(layouts);
  }

  // Run the meta kernel. Where there is none, or where shapes depend on values, or where it refuses the arguments
  // (then the CPU kernel will, too), there is nothing to launch from.
  LayoutsPtr infer() {
    for (const auto& result : schema_.returns()) {
      auto type = result.type();
      if (auto list = type->cast<c10::ListType>()) type = list->getElementType();
      if (type->kind() != c10::TypeKind::TensorType) return nullptr;
    }
    auto layouts = std::make_shared<Layouts>();
    at::AutoDispatchBelowADInplaceOrView below;
    Images images(c10::DeviceType::Meta);
    try {
      auto stack =
          arguments_on(c10::DeviceType::Meta, [&](const at::Tensor& tensor, std::size_t) { return images.of(tensor); });
      op_.callBoxed(&stack);
      for (const auto& result : stack) {
        auto& made = layouts->results.emplace_back();
        for (const auto& tensor : tensors_in(result)) made.emplace_back(tensor);
      }
    } catch (const std::exception&) {
      return nullptr;
    }
    for_each_written([&](const at::Tensor& tensor) { layouts->written.emplace_back(images.of(tensor)); });
    return layouts;
  }

  template <typename Act>
  void for_each_written(Act&& act) const {
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      if (!written(schema_.arguments()[i])) continue;
      for (const auto& tensor : tensors_in(arguments_[i]))
        if (tensor.defined()) act(tensor);
    }
  }

  // Return the argument that a result is (in-place, out=) or is a view of; none where it is a tensor of its own.
  std::optional<std::size_t> aliased_argument(std::size_t result) const {
    const auto* alias = schema_.returns()[result].alias_info();
    if (!alias) return std::nullopt;
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      const auto* candidate = schema_.arguments()[i].alias_info();
      if (candidate && alias_sets(*candidate) == alias_sets(*alias)) return i;
    }
    return std::nullopt;
  }

  Stack launch(const Layouts& layouts) {
    auto next = layouts.written.begin();
    for_each_written([&](const at::Tensor& tensor) {
      TORCH_CHECK(tensor.is_privateuseone(), op_.operator_name(), " cannot write a tensor on ", tensor.device());
      adopt_layout(tensor, *next++);
    });
    bool computes = !layouts.written.empty();  // what only returns views of its arguments does not
    Stack results;
    std::vector<std::vector<at::Tensor>> outputs;  // for each result the memory it is copied to, if it is new
    Images images(c10::DeviceType::CPU);
    for (std::size_t i = 0; i < layouts.results.size(); ++i) {
      auto source = aliased_argument(i);
      auto& stored = outputs.emplace_back();
      if (source && written(schema_.arguments()[*source])) {
        results.push_back(arguments_[*source]);
      } else if (source) {
        results.push_back(
            result(i, layouts, [&](const Layout& layout) { return view_like(arguments_[*source].toTensor(), layout); }));
      } else {
        computes = true;
        results.push_back(result(i, layouts, [&](const Layout& layout) {
          auto made = layout.defined ? empty_on_device(layout.sizes, layout.strides, layout.dtype) : at::Tensor();
          stored.push_back(images.of(made));
          return made;
        }));
      }
    }
    if (computes) enqueue_call(images, std::move(outputs));
    return results;
  }

  template <typename Make>
  IValue result(std::size_t number, const Layouts& layouts, Make&& make) const {
    if (schema_.returns()[number].type()->kind() != c10::TypeKind::ListType) return make(layouts.results[number].at(0));
    c10::List<at::Tensor> list;
    for (const auto& layout : layouts.results[number]) list.push_back(make(layout));
    return list;
  }

  void enqueue_call(Images& images, std::vector<std::vector<at::Tensor>> outputs) {
    auto stack =
        arguments_on(c10::DeviceType::CPU, [&](const at::Tensor& tensor, std::size_t) { return images.of(tensor); });
    enqueue_kernel([op = op_, stack = std::move(stack), outputs = std::move(outputs)]() mutable {
      op.callBoxed(&stack);
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        auto made = tensors_in(stack[i]);
        for (std::size_t j = 0; j < outputs[i].size(); ++j) store(op, made.at(j), outputs[i][j]);
      }
    });
  }

  static void store(const c10::OperatorHandle& op, const at::Tensor& made, const at::Tensor& output) {
    if (!made.defined() || !output.defined()) return;
    TORCH_CHECK(made.sizes() == output.sizes() && made.scalar_type() == output.scalar_type(), op.operator_name(),
                ": the CPU kernel made ", made.scalar_type(), made.sizes(), ", the meta kernel promised ",
                output.scalar_type(), output.sizes());
    output.copy_(made);
  }

  static at::Tensor view_like(const at::Tensor& base, const Layout& layout) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                         base.key_set(), c10::scalarTypeToTypeMeta(layout.dtype));
    view.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides, layout.offset);
    return view;
  }

  // Wait for the kernel, and take its results' shapes from it. It writes copies, which may get another size.
  Stack run_synchronously() {
    struct State {
      Stack stack;
      std::unordered_map<c10::TensorImpl*, at::Tensor> written;
    };
    auto state = std::make_shared<State>();
    Images images(c10::DeviceType::CPU);
    state->stack = arguments_on(c10::DeviceType::CPU, [&](const at::Tensor& tensor, std::size_t i) {
      auto image = images.of(tensor);
      if (written(schema_.arguments()[i]) && tensor.defined()) state->written[image.unsafeGetTensorImpl()] = image;
      return image;
    });
    run_and_wait([op = op_, state] {
      for (auto& value : state->stack)
        value = map_tensors(value, [&](const at::Tensor& tensor) {
          auto found = state->written.find(tensor.unsafeGetTensorImpl());
          return found == state->written.end() ? tensor : found->second = tensor.clone();
        });
      op.callBoxed(&state->stack);
    });
    for_each_written([&](const at::Tensor& tensor) {
      replace(tensor, state->written.at(images.of(tensor).unsafeGetTensorImpl()));
    });
    Stack results;
    for (std::size_t i = 0; i < state->stack.size(); ++i) {
      auto source = aliased_argument(i);
      TORCH_CHECK_NOT_IMPLEMENTED(!source || written(schema_.arguments()[*source]), op_.operator_name(),
                                  " is a view without a meta kernel");
      results.push_back(source ? arguments_[*source] : map_tensors(state->stack[i], to_device));
    }
    return results;
  }

  static void replace(const at::Tensor& tensor, const at::Tensor& value) {
    if (tensor.sizes() != value.sizes()) {
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(value.sizes(), value.strides());
      ensure_storage(tensor);
    }
    enqueue_kernel([value, image = cpu_image(tensor)] { image.copy_(value); });
  }

  static at::Tensor to_device(const at::Tensor& value) {
    if (!value.defined()) return value;
    auto tensor = empty_on_device(value.sizes(), value.strides(), value.scalar_type());
    enqueue_kernel([value, image = cpu_image(tensor)] { image.copy_(value); });
    return tensor;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::vector<IValue> arguments_;
};

void run_boxed(const c10::OperatorHandle& op, Stack* stack) {
  check_error();
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), op.operator_name(),
                              " is not there for simdev: it has no CPU kernel");
  for (auto& result : Call(op, *stack).run()) stack->push_back(std::move(result));
}

// ---- what is not left to the CPU's kernels

void check_ours(std::optional<at::Layout> layout, std::optional<bool> pinned) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "simdev has dense tensors only");
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> /*device*/, std::optional<bool> pinned,
                 std::optional<at::MemoryFormat> format) {
  check_ours(layout, pinned);
  return at::detail::empty_generic(sizes, c10::GetAllocator(at::kPrivateUse1),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<at::Device> /*device*/,
                         std::optional<bool> pinned) {
  check_ours(layout, pinned);
  return empty_on_device(sizes, strides, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == sizes && !format) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  ensure_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, std::int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset);
  } else {  // none given: contiguous
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  }
  ensure_storage(self);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  auto count = static_cast<std::int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  auto* allocator = c10::GetAllocator(at::kPrivateUse1);
  return set_whole_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator, /*resizable=*/true));
}

// The host's side of a copy, as the stream's thread will find it: without a hold on the tensor, whose end may be
// Python's affair. `hold` keeps pinned memory.
at::Tensor host_image(const at::Tensor& tensor) {
  auto image = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options());
  image._set_conj(tensor.is_conj());
  image._set_neg(tensor.is_neg());
  return image;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  check_error();
  if (!self.numel()) return to;
  if (self.is_privateuseone() && to.is_privateuseone()) {
    enqueue_kernel([from = cpu_image(self), to = cpu_image(to)] { to.copy_(from); });
    return to;
  }
  const auto& host = self.is_cpu() ? self : to;
  TORCH_CHECK(host.is_cpu(), "simdev copies from and to the CPU, not ", host.device());
  auto hold = non_blocking ? hold_host(host.data_ptr()) : nullptr;
  if (self.is_cpu()) {
    // What is pageable is copied now: the caller may change it the moment this returns.
    auto from = hold ? host_image(self) : self.clone();
    enqueue_kernel([from, to = cpu_image(to), hold] { to.copy_(from); });
  } else if (hold) {
    enqueue_kernel([from = cpu_image(self), to = host_image(to), hold] { to.copy_(from); });
  } else {
    run_and_wait([from = cpu_image(self), to = host_image(to)] { to.copy_(from); });
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  auto value = std::make_shared<at::Scalar>();
  run_and_wait([value, image = cpu_image(self)] { *value = image.item(); });
  return *value;
}

void record_tensor_on_stream(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream.id());
}

// The CPU's kernel takes no generator, so it would draw from the host's while the host draws from it, too.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// Attention is always the plain formula; asking the CPU which of its kernels to take would be a wait.
void choose_plain_attention(const c10::OperatorHandle& op, Stack* stack) {
  stack->resize(stack->size() - op.schema().arguments().size());
  stack->emplace_back(std::int64_t{0});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", resize_);
  library.impl("set_", set_empty);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_tensor_on_stream);
  library.impl("native_dropout", native_dropout);
  library.impl("_fused_sdp_choice", torch::CppFunction::makeFromBoxedFunction<&choose_plain_attention>());
  // On a device that torch does not know these would look for a kernel of a name of its own.
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
}

// A copy resolves what is only marked as conjugate or negative; torch would have it resolved first, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Where the CPU has a kernel of its own, take it also where torch would compose the operation of others: the results
// are to be the CPU's, bit for bit.
const bool kernels_are_the_cpus = [] {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && op && op->hasSchema() &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      library.impl(c10::toString(name).c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
  }
  return true;
}();

}  // namespace
}  // namespace simdev
