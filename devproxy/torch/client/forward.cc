// SPDX-License-Identifier: Apache-2.0
// Locks: OpPlan::mu guards its metadata cache and functions; g_plans_mu the table of plans. Neither is held over a
// driver call that waits.
#include "devproxy/torch/client/forward.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>

#include <c10/util/MaybeOwned.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "devproxy/torch/block.h"
#include "devproxy/torch/client/allocator.h"
#include "devproxy/torch/client/executor.h"
#include "devproxy/torch/client/generator.h"
#include "devproxy/torch/client/graph.h"
#include "devproxy/torch/client/sparse.h"

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
  // Of a sparse tensor: what it is made of.
  at::Layout layout = at::kStrided;
  bool coalesced = false;
  std::vector<TensorMeta> parts;
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
  bool sparse = false;              // some tensor is: how many elements that has only the data say
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
  bool writes_undeclared = false;
  bool foreign = false;          // of a package: the framework in the server may not have it
  bool checked_by_meta = false;  // structured: whoever calls out= from ATen has run the op's own shape function
  int view_of = -1;
  int kept_result = -1, kept_arg = -1;  // a result that is that argument, where the argument is there

  std::mutex mu;
  std::unordered_map<Key, std::shared_ptr<const Meta>, KeyHash> cache;
  std::array<std::atomic<CUfunction>, kMaxDevices> functions{};
  std::atomic<bool> said{false};  // that it runs on the host
  std::atomic<int64_t> launches{0}, infers{0};

  // Kinds of arguments that the device has taken already, for calls whose results' metadata need no question. A kind is a
  // hash; a kind that was forgotten is asked once more.
  std::array<std::atomic<uint64_t>, 8> tried{};
  std::atomic<uint32_t> next_tried{0};

  bool has_tried(uint64_t kind) const {
    for (const auto& t : tried)
      if (t.load(std::memory_order_relaxed) == kind) return true;
    return false;
  }
  void set_tried(uint64_t kind) {
    tried[next_tried.fetch_add(1, std::memory_order_relaxed) % tried.size()].store(kind, std::memory_order_relaxed);
  }
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
    // Not a ScalarType, which is a number too and decides the result's.
    arg.scalar = (mentions(type, "Scalar") && !mentions(type, "ScalarType")) || mentions(type, "number");
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
  plan->foreign = plan->name.rfind("aten::", 0) != 0;
  if (!plan->outs.empty()) plan->checked_by_meta = has_structured_kernel(schema.operator_name());
  // native_batch_norm and its kin update running statistics that their schemas do not declare as written.
  // cuDNN's recurrent layers move the state of their dropout. oneDNN's write into the gradients that they are given.
  plan->writes_undeclared = mentions(plan->name, "batch_norm") || mentions(plan->name, "_cudnn_rnn") ||
                            plan->name == "aten::mkldnn_rnn_layer_backward";
  // Their weights in one buffer come back as they were given, and nobody should copy them.
  if (plan->name == "aten::_cudnn_rnn") plan->kept_result = 4, plan->kept_arg = 3;
  return plan;
}

OpPlan& plan_of(const c10::OperatorHandle& op) {
  std::lock_guard lock(g_plans_mu);
  auto& slot = plans()[&op.schema()];
  if (slot == nullptr) slot = make_plan(op);
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

[[noreturn]] void refuse_sparse_in_capture() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "sparse tensors are not supported in a CUDA graph behind devproxy; capture without them");
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
    const at::Context& context = at::globalContext();
    h.flags = static_cast<uint8_t>((c10::GradMode::is_enabled() ? kFlagGradMode : 0) |
                                   (context.deterministicAlgorithms() ? kFlagDeterministic : 0) |
                                   (context.deterministicAlgorithmsWarnOnly() ? kFlagWarnOnly : 0));
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
  void add_flag(BlockFlags flag) {
    BlockHeader h = header();
    h.flags |= flag;
    set_header(h);
  }

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
    TORCH_CHECK_NOT_IMPLEMENTED(!t.is_quantized() && !t.is_nested(), "devproxy has no quantized or nested tensors");
    see_device(t.device());
    if (is_sparse(t)) [[unlikely]]
      return sparse_tensor(t, arg);
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

  void see_device(c10::Device d) {
    if (tensors_++ == 0) {
      if (device != d.index()) [[unlikely]]
        move_to(d.index());
    } else if (device != d.index()) {
      throw_mixed_devices(device, d);
    }
  }

  // The signature leaves out the number of elements: no dense result's shape depends on it.
  void sparse_tensor(const at::Tensor& t, const ArgPlan& arg) {
    if (any_capture() && capturing_graph(device, current_stream_id(device)) != nullptr) refuse_sparse_in_capture();
    const Parts parts = parts_of(t);
    const bool coalesced = t.is_sparse() && t.is_coalesced();
    block.tag(Tag::kSparse);
    block.put(SparseHead{static_cast<int8_t>(t.layout()),
                         static_cast<uint8_t>(arg.writable ? kWritable : 0),
                         static_cast<uint8_t>(t.dim()),
                         coalesced,
                         static_cast<uint8_t>(parts.size()),
                         {}});
    block.bytes(t.sizes().data(), 8 * t.sizes().size());
    for (const at::Tensor& part : parts) {
      block.tag(Tag::kTensor);
      device_tensor(part, 0);
    }
    if (!want_key) return;
    key.push_back(static_cast<uint64_t>(Tag::kSparse) | static_cast<uint64_t>(t.scalar_type()) << 8 |
                  static_cast<uint64_t>(t.layout()) << 16 | static_cast<uint64_t>(coalesced) << 24 |
                  static_cast<uint64_t>(t.dim()) << 32 | static_cast<uint64_t>(parts[0].size(0)) << 40);
    key.append(t.sizes().begin(), t.sizes().end());
  }

  // The op runs where its tensors are, which need not be the current device: that one too must know the settings.
  void move_to(DeviceIndex d) {
    device = d;
    BlockHeader h = header();
    h.settings = settings_number(d);
    set_header(h);
    if (want_key) key[0] = h.flags | uint64_t{h.settings} << 8;
  }

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

// What a thread keeps from op to op, and shares with none. Found by one load: `t_worker` is a plain pointer (see
// below).
struct Worker {
  Encoder encoder;

  // Plans are never destroyed.
  struct Planned {
    const void* schema = nullptr;
    OpPlan* plan = nullptr;
  };
  std::array<Planned, 1024> planned;

  // Signatures seen of late. What an op makes of a signature never changes (OpPlan::cache forgets, but only for room),
  // so an entry needs no check but its own key; it owns its Meta, whatever becomes of OpPlan::cache.
  struct Recent {
    const OpPlan* plan = nullptr;
    c10::SmallVector<uint64_t, 24> key;
    std::shared_ptr<const Meta> meta;

    bool is(const OpPlan& p, const Key& k) const {
      return plan == &p && key.size() == k.size() && std::memcmp(key.data(), k.data(), k.size() * sizeof k[0]) == 0;
    }
    void set(const OpPlan& p, const Key& k, std::shared_ptr<const Meta> m) {
      plan = nullptr;  // half of an entry if the next line throws
      key.assign(k.begin(), k.end());
      meta = std::move(m);
      plan = &p;
    }
  };
  std::array<Recent, 256> recent;

  Recent& recent_of(const OpPlan& plan, const Key& key) {
    uint64_t h = reinterpret_cast<uintptr_t>(&plan) >> 6;
    for (const uint64_t w : key) h = (h << 5 | h >> 59) ^ w;
    return recent[(h ^ h >> 7 ^ h >> 14 ^ h >> 32) % recent.size()];
  }
};

// The thread's worker while no op has it. An op takes it and puts it back. An op that is sent while another is being
// encoded (a warning's handler may be Python) finds none, and makes a worker for itself alone. Only the thread itself
// reads this, so it needs no ordering. initial-exec: reading it takes no call; it costs one word of the space that every
// process keeps free for such variables.
thread_local constinit Worker* t_worker [[gnu::tls_model("initial-exec")]] = nullptr;

class WorkerLease {
 public:
  WorkerLease() : worker_(std::exchange(t_worker, nullptr)) {
    if (worker_ == nullptr) [[unlikely]]
      worker_ = make();
  }
  ~WorkerLease() {
    if (t_worker == nullptr) [[likely]]
      t_worker = worker_;
    else
      delete worker_;
  }
  WorkerLease(const WorkerLease&) = delete;
  WorkerLease& operator=(const WorkerLease&) = delete;
  Worker& operator*() { return *worker_; }

 private:
  [[gnu::noinline]] static Worker* make() {
    struct AtThreadEnd {
      ~AtThreadEnd() { delete std::exchange(t_worker, nullptr); }
    };
    static thread_local AtThreadEnd t_at_end;
    (void)&t_at_end;  // makes it
    return new Worker;
  }
  Worker* worker_;
};

OpPlan& plan_for(Worker& worker, const c10::OperatorHandle& op) {
  const void* schema = &op.schema();
  Worker::Planned& p = worker.planned[(reinterpret_cast<uintptr_t>(schema) >> 6) % worker.planned.size()];
  if (p.schema != schema) [[unlikely]]
    p = {schema, &plan_of(op)};
  return *p.plan;
}

// ---- infer ---------------------------------------------------------------------------------------------------------

TensorMeta read_tensor_meta(Reader& r) {
  TensorMeta m;
  const Tag tag = r.get<Tag>();
  if (tag == Tag::kUndefined) return m;
  if (tag == Tag::kSparse) {
    const auto head = r.get<SparseHead>();
    m.defined = true;
    m.layout = static_cast<at::Layout>(head.layout);
    m.coalesced = head.coalesced != 0;
    for (int i = 0; i < head.dims; ++i) m.sizes.push_back(r.get<int64_t>());
    for (int i = 0; i < head.parts; ++i) m.parts.push_back(read_tensor_meta(r));
    return m;
  }
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
      case Tag::kSparse:
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
  for (const TensorMeta& t : meta->tensors) {
    meta->host_results |= t.on_host;
    meta->sparse |= !t.parts.empty();
  }
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
std::shared_ptr<const Meta> infer(OpPlan& plan, CUfunction function, Encoder& e, bool captured) {
  plan.infers.fetch_add(1, std::memory_order_relaxed);
  const BlockHeader run = e.header();
  const CUstream stream = captured ? side_stream(e.device) : current_stream(e.device);
  const RelaxedScope relaxed;
  size_t bytes = ReplyBuffer::kBytes;
  for (;;) {
    ReplyBuffer reply(e.device, bytes);
    BlockHeader h = run;
    h.mode = Mode::kInfer;
    if (captured) h.flags |= kFlagBlank;
    h.reply_addr = reinterpret_cast<uint64_t>(reply.data());
    h.reply_bytes = reply.size();
    e.set_header(h);
    std::memset(reply.data(), 0, sizeof(ReplyHeader));
    launch(function, stream, e.block);
    e.set_header(run);
    wait_submitted(e.device, stream);
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

std::shared_ptr<const Meta> cached_meta(Worker& worker, OpPlan& plan, bool captured) {
  Encoder& e = worker.encoder;
  Worker::Recent& recent = worker.recent_of(plan, e.key);
  if (recent.is(plan, e.key)) [[likely]]
    return recent.meta;
  std::shared_ptr<const Meta> meta;
  {
    std::lock_guard lock(plan.mu);
    if (const auto it = plan.cache.find(e.key); it != plan.cache.end()) meta = it->second;
  }
  if (meta == nullptr) {
    meta = infer(plan, function_of(plan, e.device), e, captured);
    // In a capture it was not tried with real contents: the first call outside still is.
    if (captured || meta->sparse) return meta;
    std::lock_guard lock(plan.mu);
    if (plan.cache.size() >= kMaxCachedSignatures) plan.cache.clear();
    plan.cache.emplace(e.key, meta);
  }
  recent.set(plan, e.key, meta);
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

bool is_defined(const c10::IValue& v) { return v.isTensor() && v.toTensor().defined(); }

// Shape functions look at types only where the op converts them; a kernel that does not (mm) would refuse them when it
// runs, and that is too late for an exception.
bool types_agree(const OpPlan& plan, const c10::IValue* args) {
  auto type = at::ScalarType::Undefined;
  for (size_t i = 0; i < plan.args.size(); ++i) {
    if (!is_defined(args[i])) continue;
    if (is_sparse(args[i].toTensor())) return false;
    const at::ScalarType t = args[i].toTensor().scalar_type();
    if (type != at::ScalarType::Undefined && t != type) return false;
    type = t;
  }
  return true;
}

// What decides whether the device has a kernel for the arguments, whose shapes are right. Never 0.
uint64_t kind_of(const OpPlan& plan, const c10::IValue* args) {
  uint64_t kind = 0xcbf29ce484222325;
  const auto mix = [&](uint64_t word) { kind = (kind ^ word) * 0xff51afd7ed558ccdull, kind ^= kind >> 32; };
  const auto tensor = [&](const at::Tensor& t) {
    mix(t.defined() ? static_cast<uint64_t>(t.scalar_type()) << 8 | static_cast<uint64_t>(t.dim()) : UINT64_MAX);
  };
  for (size_t i = 0; i < plan.args.size(); ++i) {
    const c10::IValue& v = args[i];
    if (v.isTensor()) {
      tensor(v.toTensor());
    } else if (v.isTensorList()) {
      for (const c10::IValue& e : v.toListRef()) tensor(e.toTensor());
    } else if (v.isBool()) {
      mix(v.toBool());
    } else if (v.isString()) {
      mix(std::hash<std::string>{}(v.toStringRef()));
    } else {
      mix(v.isNone());
    }
  }
  return kind | 1;
}

// out= tensors that ATen made itself, just before, by the op's own shape function, need no question to the device.
bool outs_are_right(const OpPlan& plan, const c10::IValue* args) {
  if (!plan.checked_by_meta || !types_agree(plan, args)) return false;
  for (const int i : plan.outs) {
    if (!args[i].isTensor()) return false;
    const at::Tensor& t = args[i].toTensor();
    if (!t.defined() || t.numel() == 0 || t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() != nullptr) return false;
  }
  return true;
}

// As on the CPU: an out= of another size is resized, with a warning if it held elements.
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
    if (!out.defined() || !m.defined || !m.parts.empty() || out.sizes() == at::IntArrayRef(m.sizes)) continue;
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
    e.add_flag(kFlagAmbientGenerator);
    e.generator(*random);
  }
  if (plan.writes_undeclared) e.add_flag(kFlagWritesUndeclared);
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

using NewTensors = c10::SmallVector<at::Tensor, 4>;

// Runs the op and waits until it is submitted, for the results that it has on the host. In a capture nothing runs that
// could be waited for.
void launch_for_host_results(OpPlan& plan, Encoder& e, const Meta& meta, NewTensors* outputs) {
  TORCH_CHECK_NOT_IMPLEMENTED(!any_capture() || capturing_graph(e.device, current_stream_id(e.device)) == nullptr,
                              plan.name,
                              " has results on the host, which a CUDA graph cannot hold behind devproxy; choose "
                              "another kernel for the capture");
  ReplyBuffer reply(e.device, ReplyBuffer::kBytes);
  std::memset(reply.data(), 0, sizeof(ReplyHeader));
  BlockHeader h = e.header();
  h.reply_addr = reinterpret_cast<uint64_t>(reply.data());
  h.reply_bytes = reply.size();
  e.set_header(h);
  const CUstream stream = current_stream(e.device);
  launch(function_of(plan, e.device), stream, e.block);
  wait_submitted(e.device, stream);
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

// An op that is on its way: what its new results are, with memory that the device will write.
struct Sent {
  std::shared_ptr<const Meta> meta;
  NewTensors outputs;
};

void send(Worker& worker, OpPlan& plan, const c10::IValue* args, std::optional<RandomState> random, Sent* sent) {
  TORCH_CHECK_NOT_IMPLEMENTED(plan.view_of < 0, "devproxy has no kernel for the view ", plan.name);
  Encoder& e = worker.encoder;
  const bool right = !plan.outs.empty() && outs_are_right(plan, args);
  // A shape function does not know which kernels the device has, so one call of each kind is tried first.
  const uint64_t kind = right ? kind_of(plan, args) : 0;
  const bool trusted = right && plan.has_tried(kind);
  const bool captures = any_capture();
  const bool known = !plan.dynamic || (captures && shape_is_known(plan, args));
  e.want_key = !trusted && known;
  if (plan.dynamic && !shape_is_known(plan, args)) say_wait();
  encode_op(plan, e, args, random);
  const bool captured = captures && capturing_graph(e.device, current_stream_id(e.device)) != nullptr;
  // The program needs this result now. As on CUDA that means waiting, and waiting is an error in a capture.
  if (captured && !known) check(driver().cuStreamSynchronize(current_stream(e.device)), "cuStreamSynchronize");

  // In-place ops too are tried once per signature: their errors are then Python exceptions, not device faults.
  std::shared_ptr<const Meta>& meta = sent->meta;
  if (!known) {
    meta = infer(plan, function_of(plan, e.device), e, captured);
  } else if (!trusted) {
    meta = cached_meta(worker, plan, captured);
    if (right && !captured) plan.set_tried(kind);
  }
  if (meta != nullptr && meta->sparse && captured) refuse_sparse_in_capture();
  if (meta != nullptr && !plan.outs.empty() && resize_outs(plan, args, *meta)) encode_op(plan, e, args, random);

  NewTensors& outputs = sent->outputs;
  c10::SmallVector<std::pair<const at::Tensor*, at::Tensor>, 1> changed;  // sparse arguments that the op writes
  if (meta != nullptr && (plan.new_tensors || meta->sparse)) {
    size_t k = 0;
    uint32_t n_outputs = 0;
    for (size_t i = 0; i < meta->returns.size(); ++i) {
      const ReturnMeta& r = meta->returns[i];
      if (r.tag != Tag::kTensor && r.tag != Tag::kTensorList) continue;
      for (uint32_t j = 0; j < r.count; ++j, ++k) {
        const TensorMeta& m = meta->tensors[k];
        if (!m.parts.empty()) [[unlikely]] {
          Parts parts;
          for (const TensorMeta& part : m.parts) {
            parts.push_back(new_tensor_of(e.device, part));
            e.output(parts.back());
          }
          n_outputs += static_cast<uint32_t>(parts.size());
          at::Tensor t = make_sparse(m.layout, m.sizes, m.coalesced, parts);
          if (const int arg = plan.return_is_arg[i]; arg >= 0) {
            changed.emplace_back(&args[arg].toTensor(), std::move(t));
          } else {
            outputs.push_back(std::move(t));
          }
          continue;
        }
        if (plan.return_is_arg[i] >= 0) continue;
        n_outputs += 1;
        if (static_cast<int>(i) == plan.kept_result && is_defined(args[plan.kept_arg])) [[unlikely]] {
          e.output({});
          outputs.push_back(args[plan.kept_arg].toTensor());
          continue;
        }
        outputs.push_back(m.defined && !m.on_host ? new_tensor_of(e.device, m) : at::Tensor());
        e.output(outputs.back());
      }
    }
    BlockHeader h = e.header();
    h.n_outputs = n_outputs;
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
  for (const auto& [arg, now] : changed) become(*arg, now);
}

// An op of a package (torchvision::nms) whose kernels only this process has loaded: its CPU kernel runs here, on copies.
// On a real GPU that would be another kernel than the one that the caller expects.
bool runs_here(OpPlan& plan, const c10::OperatorHandle& op) {
  if (ops_run_on_cuda() || !op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) return false;
  try {
    (void)function_of(plan, current_device());
    return false;
  } catch (const c10::NotImplementedError&) {}
  if (!plan.said.exchange(true))
    warn(plan.name +
         " is in no library of the server: its CPU kernel runs in the job's process, on copies of the tensors");
  return true;
}

void forward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const std::optional<RandomState>& random) {
  WorkerLease lease;
  OpPlan& plan = plan_for(*lease, op);
  if (plan.foreign && runs_here(plan, op)) [[unlikely]]
    return at::native::cpu_fallback(op, stack);
  const size_t base = stack->size() - plan.args.size();
  Sent sent;
  send(*lease, plan, stack->data() + base, random, &sent);

  // The results take the arguments' place. A result that is an argument is copied, since several may be the same one.
  const size_t n_results = plan.return_is_arg.size();
  if (n_results == 1 && plan.return_is_arg[0] >= 0) {
    const size_t from = base + static_cast<size_t>(plan.return_is_arg[0]);
    if (from != base) (*stack)[base] = std::move((*stack)[from]);
    stack->resize(base + 1);
    return;
  }
  size_t k = 0;
  auto result = [&](size_t i) -> c10::IValue {
    if (plan.return_is_arg[i] >= 0) return (*stack)[base + static_cast<size_t>(plan.return_is_arg[i])];
    const ReturnMeta& r = sent.meta->returns[i];
    if (r.tag == Tag::kTensor) return std::move(sent.outputs[k++]);
    if (r.tag != Tag::kTensorList) return r.scalar;
    c10::List<at::Tensor> list;
    list.reserve(r.count);
    for (uint32_t j = 0; j < r.count; ++j) list.push_back(std::move(sent.outputs[k++]));
    return list;
  };
  if (n_results == 1) {
    c10::IValue only = result(0);
    stack->resize(base);
    stack->push_back(std::move(only));
    return;
  }
  c10::SmallVector<c10::IValue, 4> results;
  for (size_t i = 0; i < n_results; ++i) results.push_back(result(i));
  stack->resize(base);
  for (auto& r : results) stack->push_back(std::move(r));
}

// ---- ops of a common form ------------------------------------------------------------------------------------------

// The boxed fallback gets its arguments as values that own their tensors. Owning a tensor that Python holds takes the GIL,
// and so does letting go of it: two locks for each argument, a fifth of a small op. So ops of tensors and numbers alone,
// which most small ops are, have kernels of their own signature. Their arguments are the caller's references. The caller
// keeps the tensors for the length of the call, so nobody else needs to own them.

// The arguments as values that own nothing.
template <size_t N>
class Borrowed {
 public:
  template <class... A>
  explicit Borrowed(const A&... args) {
    size_t i = 0;
    (number(i++, args),
     ...);  // first: after this nothing is thrown, and a borrowed value must not be destroyed as such
    i = 0;
    (tensor(i++, args), ...);
  }
  ~Borrowed() {
    for (c10::IValue& v : values_) {
      if (!v.isTensor()) continue;
      at::Tensor t = std::move(v).toTensor();
      Traits::destroyBorrow(t);
    }
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  const c10::IValue* data() const { return values_.data(); }

 private:
  using Traits = c10::MaybeOwnedTraits<at::Tensor>;
  void number(size_t i, const at::Scalar& s) { values_[i] = s; }
  void number(size_t, const at::Tensor&) {}
  void tensor(size_t, const at::Scalar&) noexcept {}
  void tensor(size_t i, const at::Tensor& t) noexcept { values_[i] = Traits::createBorrow(t); }
  std::array<c10::IValue, N> values_;
};

// A kernel for one op. R is at::Tensor, or at::Tensor& for the argument of that type.
template <class R, class... A>
struct Direct {
  c10::OperatorHandle op;

  R operator()(A... args) const {
    Sent sent;
    {
      WorkerLease lease;
      const Borrowed<sizeof...(A)> values(args...);
      send(*lease, plan_for(*lease, op), values.data(), std::nullopt, &sent);
    }
    if constexpr (std::is_same_v<R, at::Tensor>) {
      return std::move(sent.outputs[0]);
    } else {
      at::Tensor* written = nullptr;
      ((written = written_one(args, written)), ...);
      return *written;
    }
  }

 private:
  static at::Tensor* written_one(at::Tensor& t, at::Tensor*) { return &t; }
  static at::Tensor* written_one(const at::Tensor&, at::Tensor* other) { return other; }
  static at::Tensor* written_one(const at::Scalar&, at::Tensor* other) { return other; }
};

// Structured ops: torch makes one of a shape function and the op's out= form. The shape function is expensive (half of an
// add) and answers the same for the same signature. So the worker remembers what it made, and sends the same out= form
// next time without asking. Everything else goes through torch: new signatures, captures, arguments on other devices or
// with names, and in-place ops whose arguments share memory (the shape function checks that, and no signature shows it).
template <class R, class... A>
struct Structured {
  static constexpr bool kNew = std::is_same_v<R, at::Tensor>;
  c10::OperatorHandle op, out;

  R operator()(A... args) const {
    Key key;
    const bool plain = !any_capture() && are_plain(args...);
    if (plain) [[likely]] {
      WorkerLease lease;
      Encoder& e = (*lease).encoder;
      OpPlan& plan = plan_for(*lease, op);
      OpPlan& target = plan_for(*lease, out);
      e.want_key = true;
      e.begin(sizeof...(A) + 1, current_device());
      size_t i = 0;
      (encode(e, args, target.args[i++]), ...);
      const Worker::Recent& recent = (*lease).recent_of(plan, e.key);
      if (recent.is(plan, e.key)) [[likely]] {
        e.want_key = false;
        if constexpr (kNew) {
          at::Tensor result = new_tensor_of(e.device, recent.meta->tensors[0]);
          e.tensor(result, target.args.back());
          launch_it(target, e);
          return result;
        } else {
          e.tensor(first(args...), target.args.back());
          launch_it(target, e);
          return first(args...);
        }
      }
      key = e.key;
    }
    // torch's own way. A kernel of ours stands before it for CUDA; for a device that nobody has it is what is left.
    R result = op.typed<R(A...)>().redispatch(c10::DispatchKeySet(c10::DispatchKey::PrivateUse3), args...);
    if (plain) learn(key, result);
    return result;
  }

 private:
  template <class F, class... More>
  static F& first(F& f, More&...) {
    return f;
  }
  template <class F, class... More>
  static bool are_plain(const F& f, const More&... more) {
    const DeviceIndex here = current_device();
    return is_plain(f, f, here) && f.is_cuda() && (is_plain(f, more, here) && ...);
  }
  template <class Impl>
  static bool has_names(const Impl& impl) {
    if constexpr (requires { impl.has_named_tensor_meta(); }) return impl.has_named_tensor_meta();
    return false;  // newer torch has no named tensors
  }
  static bool is_plain(const at::Tensor&, const at::Scalar& s, DeviceIndex) { return !s.isSymbolic(); }
  static bool is_plain(const at::Tensor& f, const at::Tensor& t, DeviceIndex here) {
    if (!t.defined()) return false;
    const auto* impl = t.unsafeGetTensorImpl();
    if (has_names(*impl)) return false;
    if (!t.is_cuda()) return t.is_cpu() && t.dim() == 0;
    if (t.device().index() != here || t.layout() != at::kStrided) return false;
    return kNew || impl == f.unsafeGetTensorImpl() ||
           impl->unsafe_storage().unsafeGetStorageImpl() !=
               f.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  }
  static void encode(Encoder& e, const at::Tensor& t, const ArgPlan& arg) { e.tensor(t, arg); }
  static void encode(Encoder& e, const at::Scalar& s, const ArgPlan& arg) { e.value(s, arg, false); }
  static void launch_it(OpPlan& target, Encoder& e) {
    launch(function_of(target, e.device), current_stream(e.device), e.block);
    target.launches.fetch_add(1, std::memory_order_relaxed);
  }

  // The Meta that the device would have sent, from the tensor that torch made.
  void learn(const Key& key, const at::Tensor& result) const {
    TensorMeta m;
    m.defined = true;
    m.dtype = result.scalar_type();
    m.flags = tensor_flags(result);
    m.sizes.assign(result.sizes().begin(), result.sizes().end());
    m.strides.assign(result.strides().begin(), result.strides().end());
    m.bytes = at::detail::computeStorageNbytes(m.sizes, m.strides, result.itemsize());
    // Not what new_tensor_of() makes: then it is asked for each time.
    if (kNew &&
        (!result.is_cuda() || result.storage_offset() != 0 || m.flags != 0 || result.storage().nbytes() != m.bytes))
      return;
    auto meta = std::make_shared<Meta>();
    meta->returns.emplace_back().tag = Tag::kTensor;
    meta->tensors.push_back(std::move(m));
    WorkerLease lease;
    const OpPlan& plan = plan_for(*lease, op);
    (*lease).recent_of(plan, key).set(plan, key, std::move(meta));
  }
};

template <class A>
bool is_of(const c10::Argument& a) {
  const bool number = std::is_same_v<A, const at::Scalar&>, written = std::is_same_v<A, at::Tensor&>;
  return a.type()->kind() == (number ? c10::TypeKind::NumberType : c10::TypeKind::TensorType) &&
         (a.alias_info() != nullptr) == written && (!written || a.alias_info()->isWrite());
}

template <class R, class... A>
bool register_direct(torch::Library& m, const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.arguments().size() != sizeof...(A) || schema.returns().size() != 1 || !is_of<R>(schema.returns()[0]))
    return false;
  size_t i = 0;
  if (!(is_of<A>(schema.arguments()[i++]) && ...)) return false;
  m.impl(c10::toString(op.operator_name()).c_str(), torch::CppFunction(Direct<R, A...>{op}));
  return true;
}

// The out= form of a structured op has the op's own arguments and then the result.
std::optional<c10::OperatorHandle> out_form(const c10::OperatorHandle& op,
                                            const std::vector<c10::OperatorName>& of_base) {
  const auto& args = op.schema().arguments();
  for (const auto& name : of_base) {
    const auto out = c10::Dispatcher::singleton().findSchema(name);
    if (!out || out->schema().arguments().size() != args.size() + 1 || !out->schema().arguments().back().is_out() ||
        !out->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      continue;
    bool same = true;
    for (size_t i = 0; i < args.size() && same; ++i)
      same = args[i].name() == out->schema().arguments()[i].name() &&
             *args[i].type() == *out->schema().arguments()[i].type();
    if (same) return out;
  }
  return {};
}

template <class R, class... A>
bool register_structured(torch::Library& m, const c10::OperatorHandle& op,
                         const std::vector<c10::OperatorName>& of_base) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.arguments().size() != sizeof...(A) || schema.returns().size() != 1 || !is_of<R>(schema.returns()[0]))
    return false;
  size_t i = 0;
  if (!(is_of<A>(schema.arguments()[i++]) && ...)) return false;
  const auto out = out_form(op, of_base);
  if (out) m.impl(c10::toString(op.operator_name()).c_str(), torch::CppFunction(Structured<R, A...>{op, *out}));
  return out.has_value();
}

// `replaced`: the kernel for CUDA that the op has is the CUDA wheel's, which ours takes the place of.
bool is_structured(const c10::OperatorHandle& op, bool replaced) {
  using c10::DispatchKey;
  if (op.hasKernelForDispatchKey(DispatchKey::CUDA) && !replaced) return false;
  for (const auto key : {DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return false;
  for (const auto tag : op.getTags())
    if (tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output ||
        tag == at::Tag::nondeterministic_seeded)
      return false;
  return op.hasKernelForDispatchKey(DispatchKey::CPU) &&
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
}

// Those with a number whose value no shape function looks at (softshrink's does): a signature has only its kind.
bool number_is_free(const std::string& base) {
  for (const char* known : {"aten::add", "aten::sub", "aten::addmm", "aten::addcmul", "aten::addcdiv", "aten::baddbmm",
                            "aten::eq", "aten::ne", "aten::lt", "aten::le", "aten::gt", "aten::ge"})
    if (base == known || base == std::string(known) + "_") return true;
  return false;
}

// What would come to the boxed fallback: an op that has no kernel of another kind for this device.
bool comes_here(const c10::OperatorHandle& op, bool replaced) {
  using c10::DispatchKey;
  if (replaced) return true;
  for (const auto key : {DispatchKey::CUDA, DispatchKey::CompositeExplicitAutogradNonFunctional,
                         DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return false;
  return op.hasKernelForDispatchKey(DispatchKey::CPU);
}

// The out= forms of the op, or of the one that it is the in-place form of.
const std::vector<c10::OperatorName>& outs_of(const std::string& name) {
  static const auto* const outs = [] {
    auto* found = new std::unordered_map<std::string, std::vector<c10::OperatorName>>;
    for (const auto& n : c10::Dispatcher::singleton().getAllOpNames())
      if (n.overload_name.find("out") != std::string::npos || n.overload_name == "grad_input")
        (*found)[n.name].push_back(n);
    return found;
  }();
  static const auto* const none = new std::vector<c10::OperatorName>;
  const bool in_place = name.back() == '_' && name.size() > 7;
  const auto it = outs->find(in_place ? name.substr(0, name.size() - 1) : name);
  return it != outs->end() ? it->second : *none;
}

}  // namespace

bool register_small(torch::Library& m, const c10::OperatorHandle& op, bool replaced) {
  using T = const at::Tensor&;
  using W = at::Tensor&;
  using S = const at::Scalar&;
  using New = at::Tensor;
  if (is_structured(op, replaced)) {
    const std::string& name = op.operator_name().name;
    const auto& outs = outs_of(name);
    if (register_structured<New, T>(m, op, outs) || register_structured<New, T, T>(m, op, outs) ||
        register_structured<New, T, T, T>(m, op, outs) || register_structured<W, W>(m, op, outs) ||
        register_structured<W, W, T>(m, op, outs))
      return true;
    if (number_is_free(name) &&
        (register_structured<New, T, S>(m, op, outs) || register_structured<New, T, T, S>(m, op, outs) ||
         register_structured<New, T, T, T, S>(m, op, outs) || register_structured<New, T, T, T, S, S>(m, op, outs) ||
         register_structured<W, W, T, S>(m, op, outs) || register_structured<W, W, T, T, S>(m, op, outs)))
      return true;
  }
  return comes_here(op, replaced) &&
         (register_direct<New, T>(m, op) || register_direct<New, T, T>(m, op) || register_direct<New, T, T, T>(m, op) ||
          register_direct<New, T, S>(m, op) || register_direct<New, T, T, S>(m, op) || register_direct<W, W>(m, op) ||
          register_direct<W, W, T>(m, op) || register_direct<W, W, S>(m, op) || register_direct<W, W, T, T>(m, op) ||
          register_direct<W, W, T, S>(m, op) || register_direct<W, T, W>(m, op) || register_direct<W, T, T, W>(m, op) ||
          register_direct<W, T, T, T, W>(m, op) || register_direct<W, T, S, W>(m, op) ||
          register_direct<W, T, T, S, W>(m, op) || register_direct<W, T, T, T, S, W>(m, op) ||
          register_direct<W, T, T, T, S, S, W>(m, op));
}

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
  WorkerLease lease;
  Encoder& e = (*lease).encoder;
  OpPlan& plan = plan_for(*lease, op);
  e.want_key = false;
  e.begin(plan.args.size() + 2, current_device());
  for (size_t i = 0; i < plan.args.size(); ++i) e.value(arguments[i], plan.args[i], false);
  e.tensor_list(gradients);
  e.bool_list(wanted);
  e.add_flag(kFlagAmbientGenerator);
  if (plan.writes_undeclared) e.add_flag(kFlagWritesUndeclared);
  e.generator(random_state);

  const CUfunction function = executor_function(e.device, std::string(kVjpPrefix) + plan.name);
  const uint64_t kind = kind_of(plan, arguments.data()) ^ 2;  // another than the op's own
  if (!plan.has_tried(kind)) {
    const bool captured = any_capture() && capturing_graph(e.device, current_stream_id(e.device)) != nullptr;
    (void)infer(plan, function, e, captured);
    if (!captured) plan.set_tried(kind);
  }

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
  BlockHeader h = e.header();
  h.n_outputs = static_cast<uint32_t>(results.size());
  e.set_header(h);
  launch(function, current_stream(e.device), e.block);
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
