// Locks: OpPlan::mu guards its metadata cache and functions; g_plans_mu the table of plans. Neither is held over a
// driver call that waits.
#include "devproxy/torch/client/forward.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "devproxy/torch/block.h"
#include "devproxy/torch/client/allocator.h"
#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/generator.h"
#include "devproxy/torch/client/graph.h"

namespace devproxy::aten {
namespace {

constexpr size_t kMaxCachedSignatures = 4096;  // per op

// ---- what is known of an op ----------------------------------------------------------------------------------------

struct TensorMeta {
  bool defined = false;
  bool on_host = false;  // the op returns it on the CPU
  at::ScalarType dtype = at::kFloat;
  uint8_t flags = 0;
  size_t bytes = 0;
  c10::SmallVector<int64_t, 5> sizes, strides;
};

struct ReturnMeta {
  Tag tag = Tag::kNone;
  uint32_t count = 1;  // tensors of it in Meta::tensors
  c10::IValue scalar;
};

struct Meta {
  std::vector<ReturnMeta> returns;
  std::vector<TensorMeta> tensors;  // of all returns, flattened
  bool host_results = false;        // some tensor is on_host
};

using Key = c10::SmallVector<uint64_t, 64>;

struct KeyHash {
  size_t operator()(const Key& k) const {
    uint64_t h = 0x9e3779b97f4a7c15ull;
    for (uint64_t w : k) h = (h ^ w) * 0xff51afd7ed558ccdull, h ^= h >> 32;
    return h;
  }
};

struct ArgPlan {
  bool writable = false;  // the op writes it
  bool scalar = false;    // a number whose value does not decide the result's shape
  bool generator = false;
  bool host_ok = false;  // a CPU tensor of any size may come here (index lists, sequence lengths)
};

struct OpPlan {
  std::string name;  // "aten::add.out"
  const c10::FunctionSchema* schema = nullptr;
  std::vector<ArgPlan> args;
  std::vector<int> return_is_arg;  // -1: a new tensor or number
  std::vector<int> outs;           // places of out= arguments
  bool has_tensor_arg = false;
  bool has_generator_arg = false;
  bool random = false;
  bool dynamic = false;  // the result's shape or a returned number depends on data
  bool numbers = false;  // it returns some
  bool new_tensors = false;
  bool copy_all_on_infer = false;
  bool checked_by_meta = false;  // structured: whoever calls out= from ATen has run the op's own shape function
  int view_of = -1;

  std::mutex mu;
  std::unordered_map<Key, std::shared_ptr<const Meta>, KeyHash> cache;
  std::array<std::atomic<CUfunction>, kMaxDevices> functions{};
  std::atomic<int64_t> launches{0}, infers{0};
};

std::mutex g_plans_mu;
auto& plans() {
  static auto* const p = new std::unordered_map<const void*, std::unique_ptr<OpPlan>>;
  return *p;
}

bool has_structured_kernel(const c10::OperatorName& out) {
  // add.out belongs to add.Tensor: any functional overload of that name with the shape-function wrapper will do.
  static auto* const names = [] {
    auto* set = new std::unordered_map<std::string, bool>;
    for (const auto& n : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(n);
      if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
        (*set)[n.name] = true;
    }
    return set;
  }();
  return names->count(out.name) != 0;
}

// Ops that return numbers beside tensors, or alone, which their arguments' shapes and torch's settings decide:
// attention's and what chooses among its kinds. Asked once per signature, and in the signature are the settings.
bool numbers_follow_shapes(const std::string& name) {
  for (const char* known :
       {"aten::_fused_sdp_choice", "aten::_use_cudnn_ctc_loss", "aten::_scaled_dot_product_",
        "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward"})
    if (name.rfind(known, 0) == 0) return true;
  return false;
}

bool mentions(const std::string& type, const char* word) { return type.find(word) != std::string::npos; }

std::unique_ptr<OpPlan> make_plan(const c10::OperatorHandle& op) {
  auto plan = std::make_unique<OpPlan>();
  const c10::FunctionSchema& schema = op.schema();
  plan->schema = &schema;
  plan->name = c10::toString(schema.operator_name());
  for (const auto& a : schema.arguments()) {
    ArgPlan arg;
    const std::string type = a.real_type()->str();
    arg.writable = a.alias_info() != nullptr && a.alias_info()->isWrite();
    arg.generator = mentions(type, "Generator");
    arg.scalar = mentions(type, "Scalar") || mentions(type, "number");
    arg.host_ok =
        mentions(type, "Optional[Tensor][]") || mentions(type, "Tensor?[]") || mentions(type, "List[Optional[Tensor]]");
    if (mentions(a.name(), "lengths") || a.name() == "batch_sizes" || a.name() == "tensor_indices_or_sections" ||
        a.name() == "repeats")
      arg.host_ok = true;
    if (mentions(type, "Tensor") && !a.is_out()) plan->has_tensor_arg = true;
    plan->has_generator_arg |= arg.generator;
    if (a.is_out()) plan->outs.push_back(static_cast<int>(plan->args.size()));
    plan->args.push_back(arg);
  }
  for (const auto& r : schema.returns()) {
    int from = -1;
    if (r.alias_info() != nullptr) {
      for (size_t i = 0; i < schema.arguments().size() && from < 0; ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias != nullptr && alias->beforeSets() == r.alias_info()->beforeSets()) from = static_cast<int>(i);
      }
      if (!r.alias_info()->isWrite()) plan->view_of = from;
    } else {
      const auto kind = r.type()->kind();
      if (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType) {
        plan->new_tensors = true;
      } else {
        plan->numbers = true;
        plan->dynamic = !numbers_follow_shapes(plan->name);
      }
    }
    plan->return_is_arg.push_back(from);
  }
  for (const auto tag : op.getTags()) {
    if (tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output) plan->dynamic = true;
    if (tag == at::Tag::nondeterministic_seeded) plan->random = true;
  }
  // Recurrent layers sent whole drop out between their layers.
  for (const char* layer : {"aten::lstm.", "aten::gru.", "aten::rnn_"})
    if (plan->name.rfind(layer, 0) == 0) plan->random = true;
  if (!plan->outs.empty()) plan->checked_by_meta = has_structured_kernel(schema.operator_name());
  // native_batch_norm and its kin update running statistics that their schemas do not declare as written.
  plan->copy_all_on_infer = mentions(plan->name, "batch_norm");
  return plan;
}

OpPlan& plan_for(const c10::OperatorHandle& op) {
  struct Entry {
    const void* key;
    OpPlan* plan;
  };
  thread_local std::array<Entry, 1024> t_recent{};
  const void* key = &op.schema();
  Entry& e = t_recent[(reinterpret_cast<uintptr_t>(key) >> 6) % t_recent.size()];
  if (e.key == key) [[likely]]
    return *e.plan;
  std::lock_guard lock(g_plans_mu);
  auto& slot = plans()[key];
  if (slot == nullptr) slot = make_plan(op);
  e = {key, slot.get()};
  return *slot;
}

CUfunction function_of(OpPlan& plan, DeviceIndex device) {
  CUfunction f = plan.functions[device].load(std::memory_order_acquire);
  if (f == nullptr) [[unlikely]] {
    f = executor_function(device, plan.name);
    plan.functions[device].store(f, std::memory_order_release);
  }
  return f;
}

// ---- encoding ------------------------------------------------------------------------------------------------------

uint8_t tensor_flags(const at::Tensor& t) {
  return static_cast<uint8_t>((t.is_conj() ? kConj : 0) | (t.is_neg() ? kNeg : 0) |
                              (t.unsafeGetTensorImpl()->is_wrapped_number() ? kWrappedNumber : 0));
}

[[noreturn]] void throw_mixed_devices(DeviceIndex device, c10::Device other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:",
              static_cast<int>(device), " and ", other, "!");
}

// Writes a block and, beside it, the signature that decides the results' metadata.
class Encoder {
 public:
  Writer block;
  Key key;
  bool want_key = false;
  DeviceIndex device = -1;

  void begin(size_t n_args, DeviceIndex fallback) {
    block.clear();
    key.clear();
    seen_.clear();
    tensors_ = 0;
    device = fallback;
    BlockHeader h{};
    h.magic = kBlockMagic;
    h.mode = Mode::kRun;
    h.flags = static_cast<uint8_t>((c10::GradMode::is_enabled() ? kFlagGradMode : 0) |
                                   (at::globalContext().deterministicAlgorithms() ? kFlagDeterministic : 0));
    h.n_args = static_cast<uint16_t>(n_args);
    h.threads = static_cast<uint32_t>(at::get_num_threads());
    h.settings = settings_number(fallback);
    block.put(h);
    if (want_key) key.push_back(h.flags | uint64_t{h.settings} << 8);
  }

  BlockHeader header() {
    BlockHeader h;
    std::memcpy(&h, block.at(0), sizeof h);
    return h;
  }
  void set_header(const BlockHeader& h) { std::memcpy(block.at(0), &h, sizeof h); }

  void value(const c10::IValue& v, const ArgPlan& arg, bool scalar_in_key) {
    if (v.isTensor()) return tensor(v.toTensor(), arg);
    if (v.isNone()) return mark(Tag::kNone);
    if (v.isInt()) {
      const int64_t i = v.toInt();
      mark(Tag::kInt, scalar_in_key ? static_cast<uint64_t>(i) : i < 0);  // pow of integers looks at the sign
      return block.put(i);
    }
    if (v.isDouble()) {
      const double d = v.toDouble();
      uint64_t bits;
      std::memcpy(&bits, &d, sizeof bits);
      mark(Tag::kDouble, scalar_in_key ? bits : 0);
      return block.put(d);
    }
    if (v.isBool()) {
      mark(Tag::kBool, v.toBool());
      return block.put(static_cast<uint8_t>(v.toBool()));
    }
    if (v.isIntList())
      return words<int64_t>(Tag::kIntList, v.toListRef(), [](const c10::IValue& e) { return e.toInt(); });
    if (v.isTensorList()) return list(Tag::kTensorList, v.toListRef(), arg, scalar_in_key);
    if (v.isGenerator()) return generator(take_random_state(v.toGenerator()));
    if (v.isDevice()) return mark(Tag::kDevice);
    if (v.isComplexDouble()) {
      mark(Tag::kComplex);
      block.put(v.toComplexDouble().real());
      return block.put(v.toComplexDouble().imag());
    }
    if (v.isString()) {
      const std::string& s = v.toStringRef();
      mark(Tag::kString, s.size());
      block.put(static_cast<uint32_t>(s.size()));
      block.bytes(s.data(), s.size());
      if (want_key) key.push_back(std::hash<std::string>{}(s));
      return;
    }
    if (v.isDoubleList())
      return words<double>(Tag::kDoubleList, v.toListRef(), [](const c10::IValue& e) { return e.toDouble(); });
    if (v.isBoolList()) {
      const auto l = v.toListRef();
      mark(Tag::kBoolList, l.size());
      block.put(static_cast<uint32_t>(l.size()));
      for (const auto& e : l) {
        block.put(static_cast<uint8_t>(e.toBool()));
        if (want_key) key.push_back(e.toBool());
      }
      return;
    }
    if (v.isList()) {
      const bool numbers = v.toList().elementType()->kind() == c10::TypeKind::NumberType;
      return list(numbers ? Tag::kScalarList : Tag::kOptionalTensorList, v.toListRef(), arg, scalar_in_key && !numbers);
    }
    TORCH_CHECK_NOT_IMPLEMENTED(false, "devproxy cannot take a ", v.tagKind(), " argument");
  }

  void generator(const RandomState& state) {
    if (state.kept) {
      block.tag(Tag::kNamedGenerator);
      block.put(state.seed);
    } else {
      block.tag(state.addr == 0 ? Tag::kGenerator : Tag::kDeviceGenerator);
      block.put(state.addr == 0 ? state.seed : static_cast<uint64_t>(state.addr));
      block.put(state.offset);
    }
    if (want_key) key.push_back(static_cast<uint64_t>(Tag::kGenerator));
  }

  void output(const at::Tensor& t) {
    if (!t.defined()) return block.tag(Tag::kUndefined);
    block.tag(Tag::kTensor);
    device_tensor(t, 0);
  }

  void tensor_list(const std::vector<at::Tensor>& l) {
    block.tag(Tag::kTensorList);
    block.put(static_cast<uint32_t>(l.size()));
    for (const auto& t : l) tensor(t, {});
  }
  void bool_list(const std::vector<bool>& l) {
    block.tag(Tag::kBoolList);
    block.put(static_cast<uint32_t>(l.size()));
    for (const bool b : l) block.put(static_cast<uint8_t>(b));
  }

  void tensor(const at::Tensor& t, const ArgPlan& arg) {
    if (!t.defined()) return mark(Tag::kUndefined);
    if (!t.is_cuda()) return host_tensor(t, arg);
    TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided && !t.is_quantized() && !t.is_nested(),
                                "devproxy has only dense tensors, got ", t.layout());
    const DeviceIndex d = t.device().index();
    if (tensors_++ == 0) {
      device = d;
    } else if (device != d) {
      throw_mixed_devices(device, t.device());
    }
    // In-place ops recognise an argument that is also their result.
    const auto* impl = t.unsafeGetTensorImpl();
    for (size_t i = 0; i < seen_.size(); ++i) {
      if (seen_[i].impl != impl) continue;
      // add_ is add(self, out=self): what was read first is written after all.
      if (arg.writable) *block.at(seen_[i].head + offsetof(TensorHead, flags)) |= kWritable;
      mark(Tag::kSameTensor, i);
      return block.put(static_cast<uint16_t>(i));
    }
    block.tag(Tag::kTensor);
    if (seen_.size() < kRemembered) seen_.push_back({impl, block.size()});
    device_tensor(t, arg.writable ? kWritable : 0);
    if (!want_key) return;
    key.push_back(static_cast<uint64_t>(Tag::kTensor) | static_cast<uint64_t>(t.scalar_type()) << 8 |
                  static_cast<uint64_t>(tensor_flags(t)) << 16 | static_cast<uint64_t>(t.dim()) << 24);
    key.append(t.sizes().begin(), t.sizes().end());
    key.append(t.strides().begin(), t.strides().end());
  }

 private:
  static constexpr size_t kRemembered = 8;

  void mark(Tag tag, uint64_t what = 0) {
    block.tag(tag);
    if (!want_key) return;
    key.push_back(static_cast<uint64_t>(tag));
    key.push_back(what);
  }

  void device_tensor(const at::Tensor& t, uint8_t extra_flags) {
    const auto sizes = t.sizes(), strides = t.strides();
    const size_t n = sizes.size();
    uint8_t* p = block.extend(sizeof(TensorHead) + 16 * n);
    const TensorHead head{address_of(t),
                          static_cast<int8_t>(t.scalar_type()),
                          static_cast<uint8_t>(tensor_flags(t) | extra_flags),
                          static_cast<uint8_t>(n),
                          {}};
    std::memcpy(p, &head, sizeof head);
    std::memcpy(p + sizeof head, sizes.data(), 8 * n);
    std::memcpy(p + sizeof head + 8 * n, strides.data(), 8 * n);
  }

  // Numbers, and what CUDA too takes from the host: index lists and sequence lengths.
  void host_tensor(const at::Tensor& t, const ArgPlan& arg) {
    if (!t.is_cpu() || (t.dim() != 0 && !arg.host_ok))
      throw_mixed_devices(device < 0 ? current_device() : device, t.device());
    const at::Tensor c = t.contiguous();
    block.tag(Tag::kHostTensor);
    block.put(HostTensorHead{
        c.nbytes(), static_cast<int8_t>(t.scalar_type()), tensor_flags(t), static_cast<uint8_t>(t.dim()), {}});
    block.bytes(t.sizes().data(), 8 * t.sizes().size());
    block.bytes(c.const_data_ptr(), c.nbytes());
    if (!want_key) return;
    key.push_back(static_cast<uint64_t>(Tag::kHostTensor) | static_cast<uint64_t>(t.scalar_type()) << 8 |
                  static_cast<uint64_t>(tensor_flags(t)) << 16 | static_cast<uint64_t>(t.dim()) << 24);
    key.append(t.sizes().begin(), t.sizes().end());
  }

  template <class T, class F>
  void words(Tag tag, c10::ArrayRef<c10::IValue> l, F get) {
    mark(tag, l.size());
    block.put(static_cast<uint32_t>(l.size()));
    for (const auto& e : l) {
      const T v = get(e);
      block.put(v);
      if (want_key) {
        uint64_t bits;
        std::memcpy(&bits, &v, sizeof bits);
        key.push_back(bits);
      }
    }
  }

  void list(Tag tag, c10::ArrayRef<c10::IValue> l, const ArgPlan& arg, bool scalar_in_key) {
    mark(tag, l.size());
    block.put(static_cast<uint32_t>(l.size()));
    for (const auto& e : l) value(e, arg, scalar_in_key);
  }

  struct Seen {
    const c10::TensorImpl* impl;
    size_t head;  // where its TensorHead is in the block
  };
  c10::SmallVector<Seen, kRemembered> seen_;
  size_t tensors_ = 0;
};

// One encoder per thread; a second one if an op is sent while another is being encoded.
class EncoderLease {
 public:
  EncoderLease() : mine_(!t_busy_) {
    if (mine_) {
      t_busy_ = true;
      encoder_ = &t_encoder_;
    } else {
      encoder_ = new Encoder;
    }
  }
  ~EncoderLease() {
    if (mine_) {
      t_busy_ = false;
    } else {
      delete encoder_;
    }
  }
  EncoderLease(const EncoderLease&) = delete;
  EncoderLease& operator=(const EncoderLease&) = delete;
  Encoder& operator*() { return *encoder_; }

 private:
  static thread_local Encoder t_encoder_;
  static thread_local bool t_busy_;
  bool mine_;
  Encoder* encoder_;
};
thread_local Encoder EncoderLease::t_encoder_;
thread_local bool EncoderLease::t_busy_ = false;

// ---- infer ---------------------------------------------------------------------------------------------------------

TensorMeta read_tensor_meta(Reader& r) {
  TensorMeta m;
  if (r.get<Tag>() == Tag::kUndefined) return m;
  const auto head = r.get<TensorHead>();
  m.defined = true;
  m.dtype = static_cast<at::ScalarType>(head.dtype);
  m.flags = head.flags;
  m.on_host = head.flags & kHostResult;
  for (int i = 0; i < head.dims; ++i) m.sizes.push_back(r.get<int64_t>());
  for (int i = 0; i < head.dims; ++i) m.strides.push_back(r.get<int64_t>());
  m.bytes = at::detail::computeStorageNbytes(m.sizes, m.strides, c10::elementSize(m.dtype));
  return m;
}

std::shared_ptr<const Meta> read_meta(Reader r) {
  auto meta = std::make_shared<Meta>();
  const auto n = r.get<uint8_t>();
  for (int i = 0; i < n; ++i) {
    ReturnMeta ret;
    Reader peek = r;
    ret.tag = peek.get<Tag>();
    switch (ret.tag) {
      case Tag::kTensor:
      case Tag::kUndefined:
        ret.tag = Tag::kTensor;
        meta->tensors.push_back(read_tensor_meta(r));
        break;
      case Tag::kTensorList:
        (void)r.get<Tag>();
        ret.count = r.get<uint32_t>();
        for (uint32_t k = 0; k < ret.count; ++k) meta->tensors.push_back(read_tensor_meta(r));
        break;
      case Tag::kInt:
        (void)r.get<Tag>();
        ret.scalar = r.get<int64_t>();
        break;
      case Tag::kDouble:
        (void)r.get<Tag>();
        ret.scalar = r.get<double>();
        break;
      case Tag::kBool:
        (void)r.get<Tag>();
        ret.scalar = r.boolean();
        break;
      case Tag::kComplex: {
        (void)r.get<Tag>();
        const auto re = r.get<double>();
        ret.scalar = c10::complex<double>(re, r.get<double>());
        break;
      }
      default: (void)r.get<Tag>();
    }
    meta->returns.push_back(std::move(ret));
  }
  for (const TensorMeta& t : meta->tensors) meta->host_results |= t.on_host;
  return meta;
}

[[noreturn]] void throw_from_device(ExceptionKind kind, const std::string& text) {
  switch (kind) {
    case ExceptionKind::kIndex: TORCH_CHECK_INDEX(false, text);
    case ExceptionKind::kValue: TORCH_CHECK_VALUE(false, text);
    case ExceptionKind::kType: TORCH_CHECK_TYPE(false, text);
    case ExceptionKind::kNotImplemented: TORCH_CHECK_NOT_IMPLEMENTED(false, text);
    case ExceptionKind::kLinAlg: TORCH_CHECK_LINALG(false, text);
    case ExceptionKind::kOutOfMemory: TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    default: TORCH_CHECK(false, text);
  }
}

// Asks the device for the results' metadata. Waits. Throws what the op throws. In a capture the question goes past it,
// by a stream of its own, and looks at no contents: what is captured before this op has not run.
std::shared_ptr<const Meta> infer(OpPlan& plan, Encoder& e, bool captured) {
  plan.infers.fetch_add(1, std::memory_order_relaxed);
  const BlockHeader run = e.header();
  const CUstream stream = captured ? side_stream(e.device) : current_stream(e.device);
  const RelaxedScope relaxed;
  size_t bytes = ReplyBuffer::kBytes;
  for (;;) {
    ReplyBuffer reply(e.device, bytes);
    BlockHeader h = run;
    h.mode = Mode::kInfer;
    if (plan.copy_all_on_infer) h.flags |= kFlagCopyAll;
    if (captured) h.flags |= kFlagBlank;
    h.reply_addr = reinterpret_cast<uint64_t>(reply.data());
    h.reply_bytes = reply.size();
    e.set_header(h);
    std::memset(reply.data(), 0, sizeof(ReplyHeader));
    launch(function_of(plan, e.device), stream, e.block);
    e.set_header(run);
    check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");
    ReplyHeader head;
    std::memcpy(&head, reply.data(), sizeof head);
    TORCH_INTERNAL_ASSERT(head.total_bytes >= sizeof head, plan.name, ": the device did not answer");
    if (head.total_bytes > bytes) {
      bytes = head.total_bytes;
      continue;
    }
    Reader r(reply.data() + sizeof head, head.total_bytes - sizeof head);
    if (head.status == ReplyStatus::kException) {
      const size_t length = r.left();
      std::string text(reinterpret_cast<const char*>(r.bytes(length)), length);
      if (captured)
        text += " (" + plan.name +
                " was tried during CUDA graph capture, with made-up contents since nothing captured has "
                "run; where its arguments are right, run it once with these shapes before the capture)";
      throw_from_device(head.kind, text);
    }
    return read_meta(r);
  }
}

std::shared_ptr<const Meta> cached_meta(OpPlan& plan, Encoder& e, bool captured) {
  {
    std::lock_guard lock(plan.mu);
    const auto it = plan.cache.find(e.key);
    if (it != plan.cache.end()) [[likely]]
      return it->second;
  }
  auto meta = infer(plan, e, captured);
  if (captured) return meta;  // not tried with real contents: the first call outside still is
  std::lock_guard lock(plan.mu);
  if (plan.cache.size() >= kMaxCachedSignatures) plan.cache.clear();
  plan.cache.emplace(e.key, meta);
  return meta;
}

// ---- one op --------------------------------------------------------------------------------------------------------

at::Tensor new_tensor_of(DeviceIndex device, const TensorMeta& m) {
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), m.bytes,
                                            device_allocator()->allocate_on(device, m.bytes), device_allocator(), true);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                    c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                    c10::scalarTypeToTypeMeta(m.dtype));
  auto* impl = t.unsafeGetTensorImpl();
  if (m.sizes.size() != 1 || m.sizes[0] != 0) impl->set_sizes_and_strides(m.sizes, m.strides);
  if (m.flags & kConj) t._set_conj(true);
  if (m.flags & kNeg) t._set_neg(true);
  return t;
}

// out= tensors that ATen made itself, just before, by the op's own shape function, need no question to the device.
bool outs_are_right(const OpPlan& plan, const c10::IValue* args) {
  if (!plan.checked_by_meta) return false;
  for (const int i : plan.outs) {
    if (!args[i].isTensor()) return false;
    const at::Tensor& t = args[i].toTensor();
    if (!t.defined() || t.numel() == 0 || t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr) return false;
  }
  return true;
}

// As on the CPU: an out= of another size is resized, with a warning where it held something.
bool resize_outs(const OpPlan& plan, const c10::IValue* args, const Meta& meta) {
  bool changed = false;
  size_t k = 0;
  for (size_t i = 0; i < plan.return_is_arg.size() && i < meta.returns.size(); ++i) {
    const size_t first = k;
    k += meta.returns[i].tag == Tag::kTensor || meta.returns[i].tag == Tag::kTensorList ? meta.returns[i].count : 0;
    const int from = plan.return_is_arg[i];
    if (from < 0 || !args[from].isTensor() || meta.returns[i].tag != Tag::kTensor) continue;
    const at::Tensor& out = args[from].toTensor();
    const TensorMeta& m = meta.tensors[first];
    if (!out.defined() || !m.defined || out.sizes() == at::IntArrayRef(m.sizes)) continue;
    at::native::resize_output(out, m.sizes);
    if (out.strides() != at::IntArrayRef(m.strides))
      out.unsafeGetTensorImpl()->set_sizes_and_strides(m.sizes, m.strides);
    changed = true;
  }
  return changed;
}

void encode_op(OpPlan& plan, Encoder& e, const c10::IValue* args, std::optional<RandomState>& random) {
  const size_t n = plan.args.size();
  e.begin(n, current_device());
  bool generator_given = false;
  for (size_t i = 0; i < n; ++i) {
    const ArgPlan& arg = plan.args[i];
    if (arg.generator) {
      if (!random) random = take_random_state(args[i].isNone() ? default_generator(e.device) : args[i].toGenerator());
      e.generator(*random);
      generator_given = true;
      continue;
    }
    e.value(args[i], arg, !(arg.scalar && plan.has_tensor_arg));
  }
  if (plan.random && !generator_given) {
    if (!random) random = take_random_state(default_generator(e.device));
    BlockHeader h = e.header();
    h.flags |= kFlagAmbientGenerator;
    e.set_header(h);
    e.generator(*random);
  }
}

// Where only the kinds of the arguments make an op's shape depend on data: indexing by integers does not. (Over the
// CUDA wheel index comes here whole; the CPU wheel's own front has taken masks apart before.)
bool shape_is_known(const OpPlan& plan, const c10::IValue* args) {
  if (!plan.dynamic) return true;
  if (plan.name != "aten::index.Tensor") return false;
  for (const c10::IValue& v : args[1].toListRef())
    if (v.isTensor() && (v.toTensor().scalar_type() == at::kBool || v.toTensor().scalar_type() == at::kByte))
      return false;
  return true;
}

// Runs the op and waits until it is submitted, for the results that it has on the host.
void launch_for_host_results(OpPlan& plan, Encoder& e, const Meta& meta, std::vector<at::Tensor>* outputs) {
  ReplyBuffer reply(e.device, ReplyBuffer::kBytes);
  std::memset(reply.data(), 0, sizeof(ReplyHeader));
  BlockHeader h = e.header();
  h.reply_addr = reinterpret_cast<uint64_t>(reply.data());
  h.reply_bytes = reply.size();
  e.set_header(h);
  const CUstream stream = current_stream(e.device);
  launch(function_of(plan, e.device), stream, e.block);
  check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");
  ReplyHeader head;
  std::memcpy(&head, reply.data(), sizeof head);
  TORCH_INTERNAL_ASSERT(head.total_bytes >= sizeof head && head.total_bytes <= reply.size(), plan.name,
                        ": the device did not answer");
  Reader r(reply.data() + sizeof head, head.total_bytes - sizeof head);
  if (head.status == ReplyStatus::kException) {
    const size_t n = r.left();
    throw_from_device(head.kind, std::string(reinterpret_cast<const char*>(r.bytes(n)), n));
  }
  size_t output = 0, k = 0;
  for (size_t i = 0; i < meta.returns.size(); ++i) {
    const ReturnMeta& ret = meta.returns[i];
    if (ret.tag != Tag::kTensor && ret.tag != Tag::kTensorList) continue;
    for (uint32_t j = 0; j < ret.count; ++j, ++k) {
      if (plan.return_is_arg[i] >= 0) continue;
      const size_t place = output++;
      if (!meta.tensors[k].on_host) continue;
      TORCH_INTERNAL_ASSERT(r.get<Tag>() == Tag::kHostTensor, plan.name, ": an answer of another shape");
      const auto about = r.get<HostTensorHead>();
      std::vector<int64_t> sizes(about.dims);
      for (int64_t& size : sizes) size = r.get<int64_t>();
      at::Tensor t = at::empty(sizes, at::TensorOptions().dtype(static_cast<at::ScalarType>(about.dtype)));
      TORCH_INTERNAL_ASSERT(t.nbytes() == about.bytes, plan.name, ": an answer of another length");
      std::memcpy(t.mutable_data_ptr(), r.bytes(about.bytes), about.bytes);
      (*outputs)[place] = std::move(t);
    }
  }
}

void forward(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::optional<RandomState> random) {
  OpPlan& plan = plan_for(op);
  TORCH_CHECK_NOT_IMPLEMENTED(plan.view_of < 0, "devproxy has no kernel for the view ", plan.name);
  const size_t n = plan.args.size();
  const size_t base = stack->size() - n;
  const c10::IValue* args = stack->data() + base;

  EncoderLease lease;
  Encoder& e = *lease;
  const bool trusted = !plan.outs.empty() && outs_are_right(plan, args);
  const bool captures = any_capture();
  const bool known = !plan.dynamic || (captures && shape_is_known(plan, args));
  e.want_key = !trusted && known;
  encode_op(plan, e, args, random);
  const bool captured = captures && capturing_graph(e.device, current_stream_id(e.device)) != nullptr;
  // Its result decides what comes next: as on CUDA, that is a wait, and a wait is an error in a capture.
  if (captured && !known) check(driver().cuStreamSynchronize(current_stream(e.device)), "cuStreamSynchronize");

  // In-place ops too are tried once per signature: their errors are then Python exceptions, not device faults.
  std::shared_ptr<const Meta> meta;
  if (!known) {
    meta = infer(plan, e, captured);
  } else if (!trusted) {
    meta = cached_meta(plan, e, captured);
  }
  if (meta != nullptr && !plan.outs.empty() && resize_outs(plan, args, *meta)) encode_op(plan, e, args, random);

  std::vector<at::Tensor> outputs;
  if (plan.new_tensors && meta != nullptr) {
    size_t k = 0;
    for (size_t i = 0; i < meta->returns.size(); ++i) {
      const ReturnMeta& r = meta->returns[i];
      if (r.tag != Tag::kTensor && r.tag != Tag::kTensorList) continue;
      for (uint32_t j = 0; j < r.count; ++j, ++k) {
        if (plan.return_is_arg[i] >= 0) continue;
        const TensorMeta& m = meta->tensors[k];
        outputs.push_back(m.defined && !m.on_host ? new_tensor_of(e.device, m) : at::Tensor());
        e.output(outputs.back());
      }
    }
    BlockHeader h = e.header();
    h.n_outputs = static_cast<uint32_t>(outputs.size());
    e.set_header(h);
  }
  const bool only_numbers = outputs.empty() && plan.numbers && !plan.new_tensors && !plan.schema->is_mutable();
  if (!only_numbers) {
    if (meta != nullptr && meta->host_results) [[unlikely]]
      launch_for_host_results(plan, e, *meta, &outputs);
    else
      launch(function_of(plan, e.device), current_stream(e.device), e.block);
    plan.launches.fetch_add(1, std::memory_order_relaxed);
  }

  torch::jit::Stack results;
  results.reserve(plan.return_is_arg.size());
  size_t k = 0;
  for (size_t i = 0; i < plan.return_is_arg.size(); ++i) {
    if (plan.return_is_arg[i] >= 0) {
      results.push_back((*stack)[base + static_cast<size_t>(plan.return_is_arg[i])]);
      continue;
    }
    const ReturnMeta& r = meta->returns[i];
    if (r.tag == Tag::kTensor) {
      results.emplace_back(std::move(outputs[k++]));
    } else if (r.tag == Tag::kTensorList) {
      c10::List<at::Tensor> list;
      list.reserve(r.count);
      for (uint32_t j = 0; j < r.count; ++j) list.push_back(std::move(outputs[k++]));
      results.emplace_back(std::move(list));
    } else {
      results.push_back(r.scalar);
    }
  }
  stack->resize(base);
  for (auto& r : results) stack->push_back(std::move(r));
}

}  // namespace

CUdeviceptr address_of(const at::Tensor& t) {
  const auto* impl = t.unsafeGetTensorImpl();
  const void* p = impl->unsafe_storage().unsafeGetStorageImpl()->data();
  if (p == nullptr) return 0;
  return reinterpret_cast<CUdeviceptr>(p) + static_cast<size_t>(impl->storage_offset()) * impl->itemsize();
}

at::Tensor new_tensor(DeviceIndex device, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
  TensorMeta m;
  m.defined = true;
  m.dtype = dtype;
  m.sizes.assign(sizes.begin(), sizes.end());
  m.strides.assign(strides.begin(), strides.end());
  m.bytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
  return new_tensor_of(device, m);
}

void forward_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) { forward(op, stack, std::nullopt); }

void forward_op_with_state(const c10::OperatorHandle& op, torch::jit::Stack* stack, const RandomState& state) {
  forward(op, stack, state);
}

torch::jit::Stack forward_named(const char* name, const char* overload, torch::jit::Stack arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  forward(op, &arguments, std::nullopt);
  return arguments;
}

std::vector<at::Tensor> forward_vjp(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                    const std::vector<at::Tensor>& gradients, const std::vector<bool>& wanted,
                                    const RandomState& random_state) {
  OpPlan& plan = plan_for(op);
  EncoderLease lease;
  Encoder& e = *lease;
  e.want_key = false;
  e.begin(plan.args.size() + 2, current_device());
  for (size_t i = 0; i < plan.args.size(); ++i) e.value(arguments[i], plan.args[i], false);
  e.tensor_list(gradients);
  e.bool_list(wanted);
  BlockHeader h = e.header();
  h.flags |= kFlagAmbientGenerator;
  e.generator(random_state);

  std::vector<at::Tensor> results;
  size_t place = 0;
  auto want = [&](const at::Tensor& t) {
    if (!t.defined() || !wanted[place++]) return;
    results.push_back(new_tensor(e.device, t.scalar_type(), t.sizes(), c10::contiguous_strides(t.sizes())));
    e.output(results.back());
  };
  for (const auto& v : arguments) {
    if (v.isTensor()) {
      want(v.toTensor());
    } else if (v.isTensorList()) {
      for (const at::Tensor& t : v.toTensorVector()) want(t);
    }
  }
  h.n_outputs = static_cast<uint32_t>(results.size());
  e.set_header(h);
  launch(executor_function(e.device, std::string(kVjpPrefix) + plan.name), current_stream(e.device), e.block);
  plan.launches.fetch_add(1, std::memory_order_relaxed);
  return results;
}

std::map<std::string, OpCounts> op_counts() {
  std::lock_guard lock(g_plans_mu);
  std::map<std::string, OpCounts> counts;
  for (const auto& [key, plan] : plans()) counts[plan->name] = {plan->launches.load(), plan->infers.load()};
  return counts;
}

}  // namespace devproxy::aten
