// SPDX-License-Identifier: Apache-2.0
// Locks: modules_mu guards the modules, settings_mu the table of settings, replies_mu the free buffers. The first two
// are held over a driver call that waits (a module's loading, new settings), and no other lock is taken under any of
// them.
#include "devproxy/torch/client/executor.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/headeronly/version.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "devproxy/torch/client/graph.h"
#include "devproxy/torch/settings.h"

#ifndef DEVPROXY_TORCH_BUILD
#error "the build says what client and executor are made from: -DDEVPROXY_TORCH_BUILD"
#endif

extern char** environ;

namespace devproxy::aten {
namespace {

bool is(const char* variable, std::string_view value) {
  const char* v = std::getenv(variable);
  return v != nullptr && v == value;
}

std::string folder_of(const void* symbol) {
  Dl_info here{};
  TORCH_CHECK(dladdr(symbol, &here) != 0, "dladdr failed");
  char real[4096];
  TORCH_CHECK(realpath(here.dli_fname, real) != nullptr, "The library ", here.dli_fname, " is gone");
  const std::string path = real;
  return path.substr(0, path.rfind('/'));
}

}  // namespace

const std::string& torch_folder() {
  static const auto* const folder = new std::string(folder_of(reinterpret_cast<const void*>(&at::globalContext)));
  return *folder;
}

namespace {

// hal/host_module/descriptor.h has the format.
const std::string& description() {
  static const auto* const text = [] {
    const std::string own = folder_of(reinterpret_cast<const void*>(&description));
    const std::string plugin = own.substr(own.rfind('/') + 1);
    const std::string& torch = torch_folder();
    auto* t = new std::string("devproxy executor 1\nbuild " DEVPROXY_TORCH_BUILD "\n");
    *t += "host " + plugin + "/libdevproxy_torch_cpu.so\n";
    for (const char* name : {"libc10.so", "libtorch_cpu.so"}) *t += "needs host " + torch + "/" + name + "\n";
    if (access((torch + "/libtorch_cuda.so").c_str(), F_OK) == 0) {
      *t += "cuda " + plugin + "/libdevproxy_torch_cuda.so\n";
      for (const char* name : {"libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so"})
        *t += "needs cuda " + torch + "/" + name + "\n";
      // What the vendor's libraries read when they are first used: the job may have set it after devproxy-run began.
      for (char** e = environ; *e != nullptr; ++e) {
        const std::string_view v = *e;
        for (const char* prefix : {"CUBLAS", "CUDNN_", "CUFFT_", "CUSOLVER_", "NVIDIA_TF32_OVERRIDE=", "TORCH_"})
          if (v.rfind(prefix, 0) == 0 && v.find('\n') == v.npos) *t += "set " + std::string(v) + "\n";
      }
    }
    return t;
  }();
  return *text;
}

CUmodule module_of(DeviceIndex device) {
  static auto* const modules_mu = new std::mutex;
  static auto* const modules = new std::array<CUmodule, kMaxDevices>{};
  std::lock_guard lock(*modules_mu);
  CUmodule& module = (*modules)[device];
  if (module == nullptr) {
    bind_device(device);
    const RelaxedScope relaxed;
    const CUresult r = driver().cuModuleLoadData(&module, description().c_str());
    TORCH_CHECK(r == CUDA_SUCCESS, "The device-proxy server of GPU ", static_cast<int>(device),
                " cannot load PyTorch's operators (", error_text(r),
                "); its log says why: devproxy logs, or the job's folder");
  }
  return module;
}

// Is the executor called when a launch is dispatched, in the order of all streams? So it is on CUDA, where it submits
// to the GPU. On the host an op runs when its stream comes to it.
bool called_in_order() {
  static const bool in_order = is("DEVPROXY_DEVICE", "cuda") && !is("DEVPROXY_CUDA_EXECUTOR", "host");
  return in_order;
}

// A function that is no op, on a stream of its own where that needs no wait for the GPU's work.
void call_service(DeviceIndex device, std::string_view name, const Writer& block, bool wait) {
  const CUfunction f = executor_function(device, std::string(name));
  const CUstream stream = called_in_order() || any_capture() ? side_stream(device) : current_stream(device);
  const RelaxedScope relaxed;
  launch(f, stream, block);
  if (wait) check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");
}

std::mutex& replies_mu() {
  static auto* const m = new std::mutex;
  return *m;
}
// Each device has its own: pinned memory belongs to the device whose context was current, and another cannot reach it.
std::vector<void*>& free_replies(DeviceIndex device) {
  static auto* const f = new std::array<std::vector<void*>, kMaxDevices>;
  return (*f)[device];
}

// ---- has a setting changed? ----------------------------------------------------------------------------------------

// at::Context tells nobody when a setting changes, and asking its getters for all of them is a tenth of an op. So its
// bytes are compared: what read_settings() asks for lies between the first of its flags and its table of precisions,
// and in that table's entries, which are made once and never move. Both members are private; an explicit instantiation
// may name them all the same. A torch that nobody has looked at takes the long way.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11 && TORCH_VERSION_MINOR <= 15

template <class Name, auto Member>
struct Expose {
  friend constexpr auto member_of_context(Name) { return Member; }
};
struct FirstFlag {
  friend constexpr auto member_of_context(FirstFlag);
};
struct Precisions {
  friend constexpr auto member_of_context(Precisions);
};
template struct Expose<FirstFlag, &at::Context::enabled_cudnn>;
template struct Expose<Precisions, &at::Context::fp32_precision>;

// What the settings were made of when this thread last read them. It is the thread's own; another thread may change a
// setting meanwhile, and as with torch's getters, which take no lock either, an op then goes with the one or the other.
// take() comes before the settings are read: what changes in between differs from the copy, and is seen the next time.
class SettingsWatch {
 public:
  bool unchanged(const at::Context& c) const {
    const Where& w = where(c);
    if (std::memcmp(flags_.data(), w.flags, w.bytes) != 0) return false;
    if (empties_cache_ != at::native::_cudnn_get_conv_benchmark_empty_cache()) return false;  // it is not the Context's
    for (size_t i = 0; i < precisions_.size(); i++)
      if (precisions_[i] != *w.precisions[i]) return false;
    return true;
  }
  void take(const at::Context& c) {
    const Where& w = where(c);
    std::memcpy(flags_.data(), w.flags, w.bytes);
    empties_cache_ = at::native::_cudnn_get_conv_benchmark_empty_cache();
    for (size_t i = 0; i < precisions_.size(); i++) precisions_[i] = *w.precisions[i];
  }

 private:
  static constexpr size_t kPrecisions = std::size(settings_detail::kPrecisions), kMostBytes = 512;
  struct Where {
    const unsigned char* flags;
    size_t bytes;
    std::array<const at::Float32Precision*, kPrecisions> precisions;
  };
  static const Where& where(const at::Context& c) {  // there is one at::Context
    static const Where w = [&] {
      const auto& table = c.*member_of_context(Precisions{});
      Where made{};
      made.flags = reinterpret_cast<const unsigned char*>(&(c.*member_of_context(FirstFlag{})));
      made.bytes = static_cast<size_t>(reinterpret_cast<const unsigned char*>(&table) - made.flags);
      TORCH_INTERNAL_ASSERT(made.bytes <= kMostBytes && table.size() == kPrecisions);
      for (size_t i = 0; i < kPrecisions; i++) {
        const auto& p = settings_detail::kPrecisions[i];
        made.precisions[i] = &table.at({p.backend, p.op});
      }
      return made;
    }();
    return w;
  }

  bool empties_cache_ = false;
  std::array<unsigned char, kMostBytes> flags_;
  std::array<at::Float32Precision, kPrecisions> precisions_;
};

#else

struct SettingsWatch {
  bool unchanged(const at::Context&) const { return false; }
  void take(const at::Context&) {}
};

#endif

// Calls a function that answers, in the reply that its block names. Returns the answer without its header; throws the
// text of an exception.
Reader answer_of(DeviceIndex device, std::string_view name, const Writer& block, const ReplyBuffer& reply) {
  std::memset(reply.data(), 0, sizeof(ReplyHeader));
  call_service(device, name, block, true);
  Reader r(reply.data(), reply.size());
  const auto head = r.get<ReplyHeader>();
  TORCH_INTERNAL_ASSERT(head.total_bytes >= sizeof head && head.total_bytes <= reply.size(),
                        "the executor did not answer");
  const size_t n = head.total_bytes - sizeof head;
  TORCH_CHECK(head.status == ReplyStatus::kOk, std::string(reinterpret_cast<const char*>(r.bytes(n)), n));
  return {reply.data() + sizeof head, n};
}

void post_generator(DeviceIndex device, GeneratorBlock block, bool wait) {
  static thread_local Writer t_block;
  block.magic = kBlockMagic;
  t_block.clear();
  t_block.put(block);
  call_service(device, kGeneratorName, t_block, wait);
}

// The server begins to load its half while this process goes on importing. Only on a real GPU, which the user has asked
// for: elsewhere a job that imports torch and never uses a GPU would pay for it.
const bool g_warmed = [] {
  if (!is("DEVPROXY_DEVICE", "cuda")) return false;
  using Warm = void (*)(int, const char*);
  const auto warm = reinterpret_cast<Warm>(dlsym(RTLD_DEFAULT, "devproxy_warm"));
  const char* const rank = std::getenv("LOCAL_RANK");  // one process per GPU: its own
  if (warm != nullptr) warm(rank != nullptr ? std::atoi(rank) : 0, description().c_str());
  return warm != nullptr;
}();

}  // namespace

bool ops_run_on_cuda() {
  // DEVPROXY_TORCH_OPS=cuda: tests, which try the client's half of this over the executor for the host.
  static const bool on_cuda = is("DEVPROXY_TORCH_OPS", "cuda") || called_in_order();
  return on_cuda;
}

bool executor_keeps_generators() {
  static const bool kept = ops_run_on_cuda() || is("DEVPROXY_TORCH_GENERATORS", "kept");
  return kept;
}

CUfunction executor_function(DeviceIndex device, const std::string& name) {
  const CUmodule module = module_of(device);
  bind_device(device);
  CUfunction f = nullptr;
  const CUresult r = driver().cuModuleGetFunction(&f, module, name.c_str());
  TORCH_CHECK_NOT_IMPLEMENTED(
      r != CUDA_ERROR_NOT_FOUND, "Could not run '", name,
      "' on the device behind devproxy: its PyTorch has no such op, and no kernel of it for the "
      "CPU is loaded here; a CPU build of the package that has the op may bring one");
  check(r, "cuModuleGetFunction");
  return f;
}

void launch(CUfunction f, CUstream stream, const Writer& block) {
  size_t bytes = block.size();
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, const_cast<uint8_t*>(block.data()), CU_LAUNCH_PARAM_BUFFER_SIZE,
                   &bytes, CU_LAUNCH_PARAM_END};
  check(driver().cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, extra), "cuLaunchKernel");
  // CUDA's own variable, for debugging: an error is that of the call that made it.
  static const bool blocking = [] {
    const char* set = std::getenv("CUDA_LAUNCH_BLOCKING");
    return set != nullptr && std::strcmp(set, "1") == 0;
  }();
  if (blocking && !any_capture()) [[unlikely]]
    check(driver().cuStreamSynchronize(stream), "cuLaunchKernel, CUDA_LAUNCH_BLOCKING=1");
}

void wait_submitted(DeviceIndex device, CUstream stream) {
  if (!called_in_order()) return check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");
  post_generator(device, {0, GeneratorBlock::kForget, 0, 0, 0, 0}, true);  // there is no generator 0 to forget
}

uint32_t settings_number(DeviceIndex device) {
  struct Last {
    Settings settings;
    uint32_t number = 0;
    uint64_t devices = 0;  // that have been told
    SettingsWatch watch;
  };
  thread_local Last t_last;
  static_assert(kMaxDevices <= 64);
  at::Context& context = at::globalContext();
  if (t_last.devices >> device & 1 && t_last.watch.unchanged(context)) [[likely]]
    return t_last.number;
  t_last.devices = 0;  // until it is done: who throws on the way leaves nothing to believe
  t_last.watch.take(context);
  uint8_t matmul = t_last.settings.bytes[0];
  if (matmul != kMixedMatmulPrecision || t_last.number == 0) matmul = matmul_precision(context);
  Settings now = read_settings(context, matmul);
  if (matmul == kMixedMatmulPrecision && now != t_last.settings)  // it was mixed when it was last asked
    now = read_settings(context, matmul_precision(context));

  struct Known {
    uint32_t number;
    uint64_t devices;
  };
  static auto* const settings_mu = new std::mutex;
  static auto* const known = new std::map<std::array<uint8_t, sizeof now.bytes>, Known>;
  std::lock_guard lock(*settings_mu);
  Known& k = known->try_emplace(now.bytes, Known{static_cast<uint32_t>(known->size()) + 1, 0}).first->second;
  if (!(k.devices >> device & 1)) {
    Writer block;
    block.put(SettingsBlock{kBlockMagic, k.number, sizeof now.bytes, 0});
    block.bytes(now.bytes.data(), now.bytes.size());
    // Waits: an op on another stream, which may run before this one, is about to use the number.
    call_service(device, kSettingsName, block, true);
    k.devices |= uint64_t{1} << device;
  }
  t_last.settings = now;
  t_last.number = k.number;
  t_last.devices = k.devices;
  return k.number;
}

void set_generator(DeviceIndex device, uint64_t id, uint64_t seed, uint64_t offset) {
  post_generator(device, {0, GeneratorBlock::kSet, id, seed, offset, 0}, !called_in_order());
}

void copy_generator(DeviceIndex device, uint64_t id, uint64_t from) {
  post_generator(device, {0, GeneratorBlock::kCopy, id, from, 0, 0}, !called_in_order());
}

void forget_generator(DeviceIndex device, uint64_t id) noexcept {
  try {
    if (!in_bad_fork() && has_context(device)) post_generator(device, {0, GeneratorBlock::kForget, id, 0, 0, 0}, false);
  } catch (...) {}  // at exit the driver may be gone
}

std::pair<uint64_t, uint64_t> get_generator(DeviceIndex device, uint64_t id) {
  ReplyBuffer reply(device, ReplyBuffer::kBytes);
  std::memset(reply.data(), 0, sizeof(ReplyHeader));
  post_generator(device, {0, GeneratorBlock::kGet, id, 0, 0, reinterpret_cast<uint64_t>(reply.data())}, true);
  Reader r(reply.data(), sizeof(ReplyHeader) + 16);
  TORCH_INTERNAL_ASSERT(r.get<ReplyHeader>().total_bytes == sizeof(ReplyHeader) + 16, "the executor did not answer");
  const auto seed = r.get<uint64_t>();
  return {seed, r.get<uint64_t>()};
}

void sleep_on_device(DeviceIndex device, int64_t cycles) {
  const CUfunction f = executor_function(device, std::string(kSleepName));
  const CUstream stream = current_stream(device);
  CUdevice handle;
  int khz = 0;
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet");
  check(driver().cuDeviceGetAttribute(&khz, CU_DEVICE_ATTRIBUTE_CLOCK_RATE, handle), "cuDeviceGetAttribute");
  Writer block;
  block.put(SleepBlock{kBlockMagic, static_cast<uint32_t>(std::max(khz, 1)), cycles});
  launch(f, stream, block);
}

int64_t plan_cache(DeviceIndex device, PlansBlock::What what, int64_t value) {
  ReplyBuffer reply(device, ReplyBuffer::kBytes);
  Writer block;
  block.put(PlansBlock{kBlockMagic, what, value, reinterpret_cast<uint64_t>(reply.data()), reply.size()});
  return answer_of(device, kPlansName, block, reply).get<int64_t>();
}

RnnLayout rnn_layout(DeviceIndex device, at::TensorList weights, const RnnForm& form) {
  ReplyBuffer reply(device, ReplyBuffer::kBytes);
  Writer block;
  block.put(RnnBlock{kBlockMagic, static_cast<uint32_t>(weights.size()), form, reinterpret_cast<uint64_t>(reply.data()),
                     reply.size()});
  for (const at::Tensor& w : weights) {
    block.put(static_cast<int64_t>(w.dim()));
    for (const int64_t n : w.sizes()) block.put(n);
  }
  Reader r = answer_of(device, kRnnName, block, reply);
  RnnLayout layout{r.get<int64_t>(), {}};
  for (size_t i = 0; i < weights.size(); i++) layout.offsets.push_back(r.get<int64_t>());
  return layout;
}

const Facts& executor_facts() {
  static const auto* const facts = [] {
    auto* f = new Facts;
    if (!ops_run_on_cuda() || device_count() == 0) return f;
    const DeviceIndex device = current_device();
    ReplyBuffer reply(device, ReplyBuffer::kBytes);
    Writer block;
    block.put(FactsBlock{kBlockMagic, 0, reinterpret_cast<uint64_t>(reply.data()), reply.size()});
    Reader r = answer_of(device, kFactsName, block, reply);
    const size_t n = r.left();
    const std::string text(reinterpret_cast<const char*>(r.bytes(n)), n);
    const std::map<std::string, long*> numbers = {{"cudnn", &f->cudnn},
                                                  {"cudnn_runtime", &f->cudnn_runtime},
                                                  {"cudnn_frontend", &f->cudnn_frontend},
                                                  {"cudart", &f->cudart}};
    const std::map<std::string, bool*> flags = {
        {"has_cudnn", &f->has_cudnn},         {"has_cublaslt", &f->has_cublaslt},
        {"has_cusolver", &f->has_cusolver},   {"has_magma", &f->has_magma},
        {"dilated_conv", &f->dilated_conv},   {"depthwise_conv", &f->depthwise_conv},
        {"bfloat16_conv", &f->bfloat16_conv}, {"bfloat16_rnn", &f->bfloat16_rnn}};
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      const std::string line = text.substr(at, end - at);
      at = end + 1;
      const std::string name = line.substr(0, line.find(' '));
      const std::string value = line.substr(std::min(name.size() + 1, line.size()));
      if (const auto n = numbers.find(name); n != numbers.end()) *n->second = std::atol(value.c_str());
      if (const auto b = flags.find(name); b != flags.end()) *b->second = value == "1";
      if (name == "batchnorm_epsilon") f->batchnorm_epsilon = std::atof(value.c_str());
      if (name == "config") f->config += (f->config.empty() ? "" : "\n") + value;
    }
    // Tests: the client's half of cuDNN's recurrent layers, over an executor that was given some.
    f->has_cudnn |= is("DEVPROXY_TORCH_RNN", "cudnn");
    return f;
  }();
  return *facts;
}

ReplyBuffer::ReplyBuffer(DeviceIndex device, size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes <= kBytes) {
    std::lock_guard lock(replies_mu());
    if (auto& free = free_replies(device); !free.empty()) {
      p_ = free.back();
      free.pop_back();
      return;
    }
  }
  bind_device(device);
  const RelaxedScope relaxed;
  check(driver().cuMemHostAlloc(&p_, bytes, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
}

ReplyBuffer::~ReplyBuffer() {
  if (bytes_ > kBytes) {
    const RelaxedScope relaxed;
    (void)driver().cuMemFreeHost(p_);
    return;
  }
  std::lock_guard lock(replies_mu());
  free_replies(device_).push_back(p_);
}

}  // namespace devproxy::aten
