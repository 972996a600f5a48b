// SPDX-License-Identifier: Apache-2.0
// A driver that executes on host memory and believes nothing: for tests of hal/cuda without a GPU.
//
// It has the exports that driver_table.h asks for, with the vendor's own declarations, so a wrong signature does not
// compile. Device memory is real memory at the reserved addresses, streams are threads, events and the legacy stream
// have CUDA's order, a stream blocks its submitter behind 1,024 operations, an execution fault sticks to its context.
// Everything that cuda.h forbids and a driver may let pass is written down as a violation: host memory that is not
// page-locked in an asynchronous call, addresses without mapping or access, objects of another context, driver calls
// from a host function, sizes off the granularity, unmapping a part of a mapping, unloading a module whose kernel is
// queued.
//
// It shows that hal/cuda keeps the rules as written there. It shows nothing about a real driver.
#include "tests/native/hal_cuda/fake_control.h"

#include <cuda.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "devproxy/hal/soft/comm/reduce.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t kGranularity = 2u << 20;
constexpr size_t kQueueDepth = 1024;

struct Context {
  std::atomic<int> sticky{0};
  std::string out, err;  // what kernels said; written when somebody synchronises. Under mu
  std::map<int, size_t> limits = {
      {CU_LIMIT_STACK_SIZE, 1024}, {CU_LIMIT_PRINTF_FIFO_SIZE, 1 << 20}, {CU_LIMIT_MALLOC_HEAP_SIZE, 8 << 20}};
};

struct Stream;
using StreamRef = std::shared_ptr<Stream>;

struct Operation {
  std::function<void()> run;
  std::vector<std::pair<StreamRef, uint64_t>> needs;
  CUmodule module = nullptr;
  bool callback = false;
};

struct Stream {
  Context* context = nullptr;
  bool legacy = false, non_blocking = false, closing = false;
  std::deque<Operation> operations;
  uint64_t submitted = 0, done = 0;
  std::condition_variable work;  // of its own, so that a stream without work is not woken by others'
  std::thread thread;
};

struct Event {
  Context* context = nullptr;
  unsigned flags = 0;
  StreamRef stream;
  uint64_t position = 0;
  std::shared_ptr<std::atomic<uint64_t>> time_ns;
};

struct Function {
  CUmodule module = nullptr;
  std::string name;
  std::vector<std::pair<size_t, size_t>> params;
  std::string shape;                       // of a reduction (hal/cuda/reduce_ptx.h)
  unsigned max_dynamic_shared = 48 << 10;  // until it asks for more
};

struct Module {
  Context* context = nullptr;
  std::map<std::string, std::unique_ptr<Function>> functions;
  std::vector<Function*> order;                                  // of the image
  std::map<std::string, std::pair<uint64_t, uint64_t>> globals;  // address, bytes
  int queued = 0;
};

// Its memory outlives it while a copy is queued, so that a test sees the violation and no crash.
struct FakeArray {
  Context* context = nullptr;
  CUDA_ARRAY3D_DESCRIPTOR shape{};
  size_t element = 0;
  std::shared_ptr<std::vector<uint8_t>> memory;
  uint64_t row() const { return shape.Width * element; }
  uint64_t rows() const { return std::max<uint64_t>(shape.Height, 1); }
  uint64_t slices() const { return std::max<uint64_t>(shape.Depth, 1); }
};

struct Object {
  bool surface = false;
  Context* context = nullptr;
  CUarray array = nullptr;
};

struct Handle {
  int fd = -1;
  uint64_t bytes = 0;
  int mappings = 0;
  bool released = false;
};

struct Mapping {
  uint64_t bytes = 0;
  CUmemGenericAllocationHandle handle = 0;
  bool access = false;
};

// FAKE_MEMORY_MIB: of the GPU. FAKE_TAKEN_MIB: what others have of it.
uint64_t mib_of(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return (text ? std::strtoull(text, nullptr, 10) : otherwise) << 20;
}

struct Driver {
  std::atomic<int> ordinal{0};  // of the GPU that was asked for last: a server asks for its own
  std::mutex mu;
  std::condition_variable changed;
  std::set<Context*> contexts;
  std::map<CUstream, StreamRef> streams;
  std::map<Context*, StreamRef> legacy;
  std::vector<StreamRef> destroyed;
  std::set<Event*> events;
  std::map<Module*, std::unique_ptr<Module>> modules;
  std::set<Function*> functions;
  std::map<CUarray, std::unique_ptr<FakeArray>> arrays;
  std::map<uint64_t, Object> objects;  // textures and surfaces are counted together, the lowest free number is next
  std::map<uint64_t, uint64_t> reservations;
  std::map<uint64_t, Mapping> mappings;
  std::map<CUmemGenericAllocationHandle, Handle> handles;
  std::map<uint64_t, uint64_t> host_allocated, registered;
  uint64_t memory = mib_of("FAKE_MEMORY_MIB", 8192), used = mib_of("FAKE_TAKEN_MIB", 0), next_handle = 1, blocked = 0,
           chaos = 0;
  bool spin = false;
  std::map<std::string, std::pair<int, int>> failures;  // symbol -> countdown, result
  std::map<std::string, uint64_t> calls;
  std::map<int, int> attributes;
  std::vector<std::string> violations;
  std::vector<uint8_t> last_params;
  std::vector<CUlaunchAttribute> last_attributes;
  CUstreamAttrID stream_attribute{};
  CUstreamAttrValue stream_value{};
  uint64_t stream_attributes = 0, stream_submitted = 0;
};

Driver& driver() {
  static Driver* const one = new Driver;  // threads outlive main
  return *one;
}

thread_local Context* t_context = nullptr;
thread_local bool t_callback = false;

void violation(const std::string& what) { driver().violations.push_back(what); }  // under mu

// Begins every driver call. False: return `result`.
bool enter(const char* symbol, CUresult* result, bool needs_context) {
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  d.calls[symbol]++;
  if (t_callback) violation(std::string(symbol) + " called from a host function");
  if (auto it = d.failures.find(symbol); it != d.failures.end() && --it->second.first == 0) {
    *result = static_cast<CUresult>(it->second.second);
    d.failures.erase(it);
    return false;
  }
  if (!needs_context) return true;
  if (!t_context || !d.contexts.contains(t_context)) {
    violation(std::string(symbol) + " without a context");
    *result = CUDA_ERROR_INVALID_CONTEXT;
    return false;
  }
  if (const int sticky = t_context->sticky.load()) {
    *result = static_cast<CUresult>(sticky);
    return false;
  }
  return true;
}

#define ENTER(symbol)                                 \
  CUresult entered = CUDA_SUCCESS;                    \
  if (!enter(symbol, &entered, true)) return entered; \
  Driver& d = driver();                               \
  std::unique_lock lock(d.mu);                        \
  (void)d

#define ENTER_ANYWHERE(symbol)                         \
  CUresult entered = CUDA_SUCCESS;                     \
  if (!enter(symbol, &entered, false)) return entered; \
  Driver& d = driver();                                \
  std::unique_lock lock(d.mu);                         \
  (void)d

CUresult bad(const std::string& what, CUresult result = CUDA_ERROR_INVALID_VALUE) {
  violation(what);
  return result;
}

uint64_t now_ns() { return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()); }

// Is every byte mapped with access, or in one variable of a module? Under mu.
bool device_range(uint64_t addr, uint64_t bytes) {
  Driver& d = driver();
  const uint64_t end = addr + bytes;
  for (const auto& [key, module] : d.modules)
    for (const auto& [name, place] : module->globals)
      if (addr >= place.first && end <= place.first + place.second) return true;
  auto it = d.mappings.upper_bound(addr);
  if (it == d.mappings.begin()) return false;
  --it;
  for (uint64_t at = addr; at < end; ++it) {
    if (it == d.mappings.end() || it->first > at || it->first + it->second.bytes <= at || !it->second.access)
      return false;
    at = it->first + it->second.bytes;
  }
  return true;
}

bool within(const std::map<uint64_t, uint64_t>& blocks, uint64_t addr, uint64_t bytes) {
  auto it = blocks.upper_bound(addr);
  if (it == blocks.begin()) return false;
  --it;
  return addr + bytes <= it->first + it->second;
}

bool host_range(uint64_t addr, uint64_t bytes) {
  return within(driver().host_allocated, addr, bytes) || within(driver().registered, addr, bytes);
}

StreamRef find_stream(CUstream handle, const char* symbol) {
  Driver& d = driver();
  if (handle == CU_STREAM_LEGACY || handle == nullptr) return d.legacy[t_context];
  auto it = d.streams.find(handle);
  if (it == d.streams.end()) return violation(std::string(symbol) + ": no such stream"), nullptr;
  if (it->second->context != t_context) return violation(std::string(symbol) + ": stream of another context"), nullptr;
  return it->second;
}

uint64_t pending(const Stream& stream) { return stream.submitted - stream.done; }

void work(const StreamRef& stream) {
  Driver& d = driver();
  std::unique_lock lock(d.mu);
  uint64_t dice = d.chaos * 2654435761u + reinterpret_cast<uintptr_t>(stream.get());
  for (;;) {
    stream->work.wait(lock, [&] { return stream->closing || !stream->operations.empty(); });
    if (stream->operations.empty()) return;
    Operation operation = std::move(stream->operations.front());
    stream->operations.pop_front();
    d.changed.wait(lock, [&] {
      if (stream->context->sticky.load()) return true;
      for (const auto& [other, position] : operation.needs)
        if (other->done < position) return false;
      return true;
    });
    const bool run = !stream->context->sticky.load();
    const uint64_t chaos = d.chaos;
    lock.unlock();
    dice = dice * 6364136223846793005u + 1442695040888963407u;
    if (chaos && (dice >> 60) == 0) std::this_thread::sleep_for(std::chrono::microseconds((dice >> 40) % 400));
    if (run) {
      t_callback = operation.callback;
      operation.run();
      t_callback = false;
    }
    operation.run = nullptr;
    lock.lock();
    if (operation.module)
      if (auto it = d.modules.find(reinterpret_cast<Module*>(operation.module)); it != d.modules.end())
        it->second->queued--;
    stream->done++;
    d.changed.notify_all();
  }
}

// Under mu; may let it go while the stream is full.
void push(const StreamRef& stream, std::unique_lock<std::mutex>& lock, Operation operation) {
  Driver& d = driver();
  if (pending(*stream) >= kQueueDepth) {
    d.blocked++;
    if (!d.changed.wait_for(lock, std::chrono::seconds(10), [&] { return pending(*stream) < kQueueDepth; }))
      violation("a submission was blocked for 10 s by a full queue");
  }
  auto need = [&](const StreamRef& other) {
    if (other != stream && pending(*other)) operation.needs.push_back({other, other->submitted});
  };
  if (stream->legacy) {
    for (const auto& [handle, other] : d.streams)
      if (other->context == stream->context && !other->non_blocking) need(other);
    for (const StreamRef& other : d.destroyed)
      if (other->context == stream->context && !other->non_blocking) need(other);
  } else if (!stream->non_blocking) {
    need(d.legacy[stream->context]);
  }
  stream->submitted++;
  stream->operations.push_back(std::move(operation));
  if (!stream->thread.joinable()) stream->thread = std::thread(work, stream);
  stream->work.notify_one();
  d.changed.notify_all();
}

CUresult push_work(CUstream handle, const char* symbol, std::unique_lock<std::mutex>& lock, std::function<void()> run) {
  const StreamRef stream = find_stream(handle, symbol);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  push(stream, lock, {std::move(run), {}, nullptr, false});
  return CUDA_SUCCESS;
}

// An execution fault, on a stream's thread.
void fail_context(Context* context, int result) {
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  int none = 0;
  context->sticky.compare_exchange_strong(none, result);
  d.changed.notify_all();
}

// At execution: memory may have been unmapped since.
bool still_mapped(Context* context, uint64_t addr, uint64_t bytes) {
  {
    std::lock_guard lock(driver().mu);
    if (device_range(addr, bytes)) return true;
    violation("work touches device memory that is not mapped any more");
  }
  fail_context(context, CUDA_ERROR_ILLEGAL_ADDRESS);
  return false;
}

// Where a driver puts variables: nobody knows. FAKE_GLOBALS_AT, a file with an address in it, decides here, so that a
// test can let a second process put them at the same place, or at another. Under mu.
uint64_t place_global(uint64_t bytes) {
  static uint64_t next = [] {
    unsigned long long at = 0;
    if (const char* path = std::getenv("FAKE_GLOBALS_AT"))
      if (FILE* file = std::fopen(path, "r")) {
        if (std::fscanf(file, "%llx", &at) != 1) at = 0;
        std::fclose(file);
      }
    return at;
  }();
  const uint64_t room = (bytes + 4095) / 4096 * 4096;
  void* const got = mmap(reinterpret_cast<void*>(next), room, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | (next ? MAP_FIXED_NOREPLACE : 0), -1, 0);
  if (next) next += room;
  return reinterpret_cast<uint64_t>(got);
}

void drop_globals(Module& module) {
  for (const auto& [name, place] : module.globals)
    munmap(reinterpret_cast<void*>(place.first), (place.second + 4095) / 4096 * 4096);
}

// What reduce_ptx.h says of its text, done by the software GPU's arithmetic. tests/native/test_reduce_ptx.py reads the text.
void run_reduction(Context* context, const std::string& shape, const std::vector<uint8_t>& params) {
  unsigned type, op, sources, destinations;
  char on_device[80] = "";
  if (std::sscanf(shape.c_str(), "// devproxy reduce type=%u reduction=%u sources=%u destinations=%u on_device=%79s",
                  &type, &op, &sources, &destinations, on_device) != 5)
    return fail_context(context, CUDA_ERROR_ILLEGAL_INSTRUCTION);
  std::vector<uint64_t> p(params.size() / 8);
  std::memcpy(p.data(), params.data(), p.size() * 8);
  devproxy::hal::soft::Reduction r;
  r.type = static_cast<devproxy::CommType>(type), r.op = static_cast<devproxy::CommReduction>(op);
  const uint64_t element = devproxy::comm_type_bytes(r.type), count = p[0];
  bool mapped = true;
  {
    std::lock_guard lock(driver().mu);
    for (size_t i = 1; i <= sources + destinations; i++)
      mapped &= device_range(p[i], count * element) && p[i] % element == 0;
    for (size_t i = 0; r.op == devproxy::CommReduction::kPreMulSum && i < sources; i++)
      mapped &= on_device[i] == '0' || device_range(p[1 + sources + destinations + i], element);
  }
  if (!mapped) return fail_context(context, CUDA_ERROR_ILLEGAL_ADDRESS);
  for (size_t i = 0; i < sources; i++) r.inputs.push_back(reinterpret_cast<const uint8_t*>(p[1 + i]));
  for (size_t i = 0; i < destinations; i++) r.outputs.push_back(reinterpret_cast<uint8_t*>(p[1 + sources + i]));
  for (size_t i = 0; r.op == devproxy::CommReduction::kPreMulSum && i < sources; i++) {
    const uint64_t& scalar = p[1 + sources + destinations + i];
    r.scalars.push_back(on_device[i] == '0' ? reinterpret_cast<const uint8_t*>(&scalar)
                                            : reinterpret_cast<const uint8_t*>(scalar));
  }
  devproxy::hal::soft::reduce(r, 0, count);
}

void run_kernel(Context* context, const std::string& name, const std::vector<uint8_t>& params, uint64_t counter) {
  Driver& d = driver();
  if (name.starts_with("bump")) ++*reinterpret_cast<uint32_t*>(counter);
  if (name.starts_with("say")) {
    uint32_t number;
    std::memcpy(&number, params.data(), sizeof number);
    std::lock_guard lock(d.mu);
    context->out += "kernel " + std::to_string(number) + "\n";
  }
  if (name.starts_with("claim")) {
    {
      std::lock_guard lock(d.mu);
      context->err += "claim.cu:7: void claim(): block: [0,0,0], thread: [0,0,0] Assertion `1 == 2` failed.\n";
    }
    return fail_context(context, CUDA_ERROR_ASSERT);
  }
  if (name.starts_with("peek")) {
    uint64_t to;
    std::memcpy(&to, params.data(), sizeof to);
    {
      std::lock_guard lock(d.mu);
      if (!device_range(to, 4) && !within(d.registered, to, 4)) to = 0;
    }
    if (!to) return fail_context(context, CUDA_ERROR_ILLEGAL_ADDRESS);
    *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<uint32_t*>(counter);
  }
  if (name.starts_with("spin")) {
    std::unique_lock lock(d.mu);
    d.changed.wait(lock, [&] { return !d.spin || context->sticky.load(); });
    return;
  }
  if (name.starts_with("fault")) return fail_context(context, CUDA_ERROR_ILLEGAL_ADDRESS);
  if (name.starts_with("fill")) {
    struct {
      uint64_t to;
      uint32_t n, value;
    } p;
    std::memcpy(&p, params.data(), sizeof p);
    bool mapped;
    {
      std::lock_guard lock(d.mu);
      mapped = device_range(p.to, p.n * 4ull);
    }
    if (!mapped) return fail_context(context, CUDA_ERROR_ILLEGAL_ADDRESS);  // the kernel's own fault
    for (uint32_t i = 0; i < p.n; i++) reinterpret_cast<uint32_t*>(p.to)[i] = p.value + i;
  }
  std::lock_guard lock(d.mu);
  d.last_params = params;
}

size_t put_text(const std::string& from, char* to, size_t bytes) {
  if (!bytes) return 0;
  const size_t n = std::min(from.size(), bytes - 1);
  std::memcpy(to, from.data(), n);
  to[n] = 0;
  return n;
}

void map_nothing(uint64_t addr, uint64_t bytes) {
  mmap(reinterpret_cast<void*>(addr), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void drop_handle(CUmemGenericAllocationHandle id) {  // under mu
  Driver& d = driver();
  auto it = d.handles.find(id);
  if (it == d.handles.end() || it->second.mappings || !it->second.released) return;
  close(it->second.fd);
  d.used -= it->second.bytes;
  d.handles.erase(it);
}

}  // namespace

// -- control --------------------------------------------------------------------------------------------------------

EXPORT void fake_fail(const char* symbol, int nth, int result) {
  std::lock_guard lock(driver().mu);
  driver().failures[symbol] = {nth, result};
}
EXPORT uint64_t fake_calls(const char* symbol) {
  std::lock_guard lock(driver().mu);
  return driver().calls[symbol];
}
EXPORT int fake_violations(char* text, size_t bytes) {
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  std::string all;
  for (const std::string& v : d.violations) all += v + "\n";
  put_text(all, text, bytes);
  const int n = static_cast<int>(d.violations.size());
  d.violations.clear();
  return n;
}
EXPORT int fake_alive(char* text, size_t bytes) {
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  std::ostringstream out;
  out << d.contexts.size() << " contexts, " << d.streams.size() << " streams, " << d.events.size() << " events, "
      << d.modules.size() << " modules, " << d.reservations.size() << " reservations, " << d.mappings.size()
      << " mappings, " << d.handles.size() << " handles, " << d.host_allocated.size() << " host allocations, "
      << d.registered.size() << " registrations, " << d.arrays.size() << " arrays, " << d.objects.size() << " objects";
  put_text(out.str(), text, bytes);
  return static_cast<int>(d.contexts.size() + d.streams.size() + d.events.size() + d.modules.size() +
                          d.reservations.size() + d.mappings.size() + d.handles.size() + d.host_allocated.size() +
                          d.registered.size() + d.arrays.size() + d.objects.size());
}
EXPORT void fake_set_memory(uint64_t bytes) {
  std::lock_guard lock(driver().mu);
  driver().memory = bytes;
}
EXPORT uint64_t fake_used_memory() {
  std::lock_guard lock(driver().mu);
  return driver().used;
}
EXPORT void fake_set_attribute(int attribute, int value) {
  std::lock_guard lock(driver().mu);
  driver().attributes[attribute] = value;
}
EXPORT void fake_set_chaos(uint64_t seed) {
  std::lock_guard lock(driver().mu);
  driver().chaos = seed;
}
EXPORT void fake_hold_spin(int hold) {
  std::lock_guard lock(driver().mu);
  driver().spin = hold != 0;
  driver().changed.notify_all();
}
EXPORT uint64_t fake_blocked() {
  std::lock_guard lock(driver().mu);
  return driver().blocked;
}
EXPORT size_t fake_last_attributes(uint32_t* ids, uint32_t* first_words, size_t n) {
  std::lock_guard lock(driver().mu);
  const auto& list = driver().last_attributes;
  for (size_t i = 0; i < std::min(n, list.size()); i++) {
    ids[i] = list[i].id;
    std::memcpy(first_words + i, &list[i].value, sizeof *first_words);
  }
  return list.size();
}
EXPORT uint64_t fake_stream_attribute(uint32_t* id, uint64_t* value, uint64_t* submitted) {
  std::lock_guard lock(driver().mu);
  const Driver& d = driver();
  *id = d.stream_attribute, *submitted = d.stream_submitted;
  std::memcpy(value, &d.stream_value, 2 * sizeof *value);
  return d.stream_attributes;
}
EXPORT size_t fake_last_params(void* to, size_t bytes) {
  std::lock_guard lock(driver().mu);
  const auto& params = driver().last_params;
  std::memcpy(to, params.data(), std::min(bytes, params.size()));
  return params.size();
}

// -- device and context ---------------------------------------------------------------------------------------------

EXPORT CUresult CUDAAPI cuInit(unsigned int flags) {
  ENTER_ANYWHERE("cuInit");
  return flags ? bad("cuInit: flags") : CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuGetErrorName(CUresult error, const char** text) {
  static const std::map<int, const char*> kNames = {
      {1, "CUDA_ERROR_INVALID_VALUE"},     {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {200, "CUDA_ERROR_INVALID_IMAGE"},   {500, "CUDA_ERROR_NOT_FOUND"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"}};
  auto it = kNames.find(error);
  *text = it == kNames.end() ? "CUDA_ERROR_OF_THE_FAKE" : it->second;
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "as the name says";
  return CUDA_SUCCESS;
}
// FAKE_GPUS: how many; every server uses one of them.
static int device_count() {
  const char* const many = std::getenv("FAKE_GPUS");
  return many ? std::atoi(many) : 1;
}

EXPORT CUresult CUDAAPI cuDeviceGetCount(int* count) {
  *count = device_count();
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  *device = 7;  // not the ordinal, so that a mix-up shows
  driver().ordinal = ordinal;
  return ordinal >= 0 && ordinal < device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORT CUresult CUDAAPI cuDeviceGetName(char* name, int bytes, CUdevice) {
  put_text("Fake GPU", name, static_cast<size_t>(bytes));
  return CUDA_SUCCESS;
}
// Of this host: FAKE_HOST, or who has this /dev/shm, by which NCCL tells hosts apart too.
static uint32_t host() {
  struct stat there{};
  if (const char* const named = std::getenv("FAKE_HOST")) return static_cast<uint32_t>(std::atoi(named)) + 1;
  return stat("/dev/shm", &there) == 0 ? static_cast<uint32_t>(there.st_dev) & 0x3fffff : 0;
}

EXPORT CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice) {
  std::memset(uuid->bytes, 0x5a, sizeof uuid->bytes);
  const uint32_t which[] = {host(), static_cast<uint32_t>(driver().ordinal)};
  std::memcpy(uuid->bytes, which, sizeof which);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  *bytes = driver().memory;
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  if (device != 7) return bad("cuDeviceGetAttribute: not a device");
  if (auto it = d.attributes.find(attribute); it != d.attributes.end()) return *value = it->second, CUDA_SUCCESS;
  switch (static_cast<int>(attribute)) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: {
      const char* const each = std::getenv("FAKE_MAJORS");  // a digit for each GPU
      *value = each && d.ordinal < static_cast<int>(std::strlen(each)) ? each[d.ordinal] - '0' : 9;
      break;
    }
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT: *value = 4; break;
    case CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 0x7fffffff; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: *value = 1; break;
    default:
      if (attribute >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
      *value = 0;
  }
  return CUDA_SUCCESS;
}

namespace {

// Under mu.
Context* make_context(Driver& d) {
  auto* context = new Context;
  d.contexts.insert(context);
  auto legacy = std::make_shared<Stream>();
  legacy->context = context;
  legacy->legacy = true;
  d.legacy[context] = legacy;
  return context;
}

Context* g_primary = nullptr;  // under mu
int g_primary_holders = 0;

}  // namespace

EXPORT int fake_gpu() { return static_cast<int>(host() << 8) | driver().ordinal; }
EXPORT void* fake_primary() {
  std::lock_guard lock(driver().mu);
  return g_primary;
}
EXPORT void* fake_current() { return t_context; }
EXPORT int fake_is_mapped(uint64_t addr, uint64_t bytes) {
  std::lock_guard lock(driver().mu);
  return device_range(addr, bytes);
}

EXPORT CUresult CUDAAPI cuCtxCreate_v2(CUcontext* to, unsigned int, CUdevice device) {
  ENTER_ANYWHERE("cuCtxCreate_v2");
  if (device != 7) return bad("cuCtxCreate: not a device", CUDA_ERROR_INVALID_DEVICE);
  t_context = make_context(d);
  *to = reinterpret_cast<CUcontext>(t_context);
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int) {
  ENTER_ANYWHERE("cuDevicePrimaryCtxSetFlags_v2");
  return device == 7 ? CUDA_SUCCESS : bad("cuDevicePrimaryCtxSetFlags: not a device", CUDA_ERROR_INVALID_DEVICE);
}

// Does not make it current; one context for all who hold it.
EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* to, CUdevice device) {
  ENTER_ANYWHERE("cuDevicePrimaryCtxRetain");
  if (device != 7) return bad("cuDevicePrimaryCtxRetain: not a device", CUDA_ERROR_INVALID_DEVICE);
  if (g_primary_holders++ == 0) g_primary = make_context(d);
  *to = reinterpret_cast<CUcontext>(g_primary);
  return CUDA_SUCCESS;
}

extern "C" CUresult CUDAAPI cuCtxDestroy_v2(CUcontext handle);

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  Context* last = nullptr;
  {
    ENTER_ANYWHERE("cuDevicePrimaryCtxRelease_v2");
    if (device != 7 || g_primary_holders == 0)
      return bad("cuDevicePrimaryCtxRelease: nobody holds it", CUDA_ERROR_INVALID_CONTEXT);
    if (--g_primary_holders == 0) last = std::exchange(g_primary, nullptr);
  }
  return last ? cuCtxDestroy_v2(reinterpret_cast<CUcontext>(last)) : CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxDestroy_v2(CUcontext handle) {
  auto* context = reinterpret_cast<Context*>(handle);
  Driver& d = driver();
  std::vector<StreamRef> mine;
  {
    std::lock_guard lock(d.mu);
    if (!d.contexts.erase(context)) return bad("cuCtxDestroy: no such context", CUDA_ERROR_INVALID_CONTEXT);
    for (auto it = d.streams.begin(); it != d.streams.end();) {
      if (it->second->context == context)
        violation("cuCtxDestroy: a stream is left"), mine.push_back(it->second), it = d.streams.erase(it);
      else
        ++it;
    }
    std::erase_if(d.destroyed, [&](const StreamRef& s) { return s->context == context && (mine.push_back(s), true); });
    mine.push_back(d.legacy[context]);
    d.legacy.erase(context);
    for (const StreamRef& stream : mine) {
      if (pending(*stream) && !context->sticky.load()) violation("cuCtxDestroy: work is pending");
      stream->closing = true;
      stream->work.notify_one();
    }
    d.changed.notify_all();
  }
  for (const StreamRef& stream : mine)
    if (stream->thread.joinable()) stream->thread.join();
  if (t_context == context) t_context = nullptr;
  return CUDA_SUCCESS;  // the context itself stays: somebody may still hold it, and that shall show as a violation
}

namespace {

// As the driver's: through this process's stdio, at a synchronisation. Under mu.
void write_output(Context& context) {
  std::fputs(context.out.c_str(), stdout);
  std::fputs(context.err.c_str(), stderr);
  context.out.clear();
  context.err.clear();
}

}  // namespace

EXPORT CUresult CUDAAPI cuCtxSynchronize() {
  if (Context* const context = t_context) {
    Driver& d = driver();
    std::unique_lock lock(d.mu);
    d.changed.wait(lock, [&] {
      if (context->sticky.load()) return true;
      for (const auto& [handle, stream] : d.streams)
        if (stream->context == context && pending(*stream)) return false;
      return !pending(*d.legacy[context]);
    });
    write_output(*context);
  }
  ENTER("cuCtxSynchronize");
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value) {
  ENTER("cuCtxSetLimit");
  auto it = t_context->limits.find(limit);
  if (it == t_context->limits.end()) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  it->second = limit == CU_LIMIT_STACK_SIZE ? (value + 15) / 16 * 16 : value;  // a driver rounds
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuCtxGetLimit(size_t* value, CUlimit limit) {
  ENTER("cuCtxGetLimit");
  auto it = t_context->limits.find(limit);
  if (it == t_context->limits.end()) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  *value = it->second;
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext handle) {
  ENTER_ANYWHERE("cuCtxSetCurrent");
  auto* context = reinterpret_cast<Context*>(handle);
  if (!d.contexts.contains(context)) return bad("cuCtxSetCurrent: no such context", CUDA_ERROR_INVALID_CONTEXT);
  t_context = context;
  return CUDA_SUCCESS;
}

// -- memory ---------------------------------------------------------------------------------------------------------

EXPORT CUresult CUDAAPI cuMemGetAllocationGranularity(size_t* to, const CUmemAllocationProp* prop,
                                                      CUmemAllocationGranularity_flags) {
  ENTER("cuMemGetAllocationGranularity");
  if (prop->location.id != 7) return bad("cuMemGetAllocationGranularity: not a device");
  *to = kGranularity;
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* to, size_t bytes, size_t, CUdeviceptr wish,
                                            unsigned long long flags) {
  // FAKE_STAGGER_MS: a process comes so much later for each GPU before its own.
  if (const char* const ms = std::getenv("FAKE_STAGGER_MS"))
    usleep(static_cast<useconds_t>(driver().ordinal * std::atoi(ms) * 1000));
  ENTER("cuMemAddressReserve");
  if (bytes == 0 || bytes % kGranularity || wish % kGranularity || flags) return bad("cuMemAddressReserve: arguments");
  const int protection = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* got = MAP_FAILED;
  if (wish) got = mmap(reinterpret_cast<void*>(wish), bytes, PROT_NONE, protection | MAP_FIXED_NOREPLACE, -1, 0);
  if (got == MAP_FAILED) {  // somewhere else, as the driver does
    got = mmap(nullptr, bytes + kGranularity, PROT_NONE, protection, -1, 0);
    if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const auto begin = reinterpret_cast<uint64_t>(got),
               aligned = (begin + kGranularity - 1) / kGranularity * kGranularity;
    if (aligned != begin) munmap(got, aligned - begin);
    if (aligned != begin + kGranularity)
      munmap(reinterpret_cast<void*>(aligned + bytes), begin + kGranularity - aligned);
    got = reinterpret_cast<void*>(aligned);
  }
  *to = reinterpret_cast<CUdeviceptr>(got);
  d.reservations[*to] = bytes;
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemAddressFree(CUdeviceptr addr, size_t bytes) {
  CUresult entered;  // whether a failed context keeps the real driver from giving addresses back is not known
  if (!enter("cuMemAddressFree", &entered, false)) return entered;
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  auto it = d.reservations.find(addr);
  if (it == d.reservations.end() || it->second != bytes) return bad("cuMemAddressFree: not a reservation");
  auto mapped = d.mappings.lower_bound(addr);
  if (mapped != d.mappings.end() && mapped->first < addr + bytes)
    return bad("cuMemAddressFree: something is mapped there");
  munmap(reinterpret_cast<void*>(addr), bytes);
  d.reservations.erase(it);
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* to, size_t bytes, const CUmemAllocationProp* prop,
                                    unsigned long long flags) {
  ENTER("cuMemCreate");
  if (bytes == 0 || bytes % kGranularity || flags || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop->location.id != 7)
    return bad("cuMemCreate: arguments");
  if (bytes > d.memory - std::min(d.memory, d.used)) return CUDA_ERROR_OUT_OF_MEMORY;
  const int fd = memfd_create("fake-device-memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *to = d.next_handle++;
  d.handles[*to] = {fd, bytes, 0, false};
  d.used += bytes;
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemGetInfo_v2(size_t* free, size_t* total) {
  ENTER("cuMemGetInfo");
  *total = d.memory;
  *free = d.memory - std::min(d.memory, d.used);
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  CUresult entered;
  if (!enter("cuMemRelease", &entered, false)) return entered;
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  auto it = d.handles.find(handle);
  if (it == d.handles.end() || it->second.released) return bad("cuMemRelease: not a handle");
  it->second.released = true;
  drop_handle(handle);
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr addr, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                                 unsigned long long flags) {
  ENTER("cuMemMap");
  auto it = d.handles.find(handle);
  if (it == d.handles.end() || it->second.released) return bad("cuMemMap: not a handle");
  if (addr % kGranularity || bytes % kGranularity || offset || flags || bytes != it->second.bytes)
    return bad("cuMemMap: arguments");
  if (!within(d.reservations, addr, bytes)) return bad("cuMemMap: addresses are not reserved");
  auto next = d.mappings.lower_bound(addr + bytes);
  if (next != d.mappings.begin() && std::prev(next)->first + std::prev(next)->second.bytes > addr)
    return bad("cuMemMap: something is mapped there");
  mmap(reinterpret_cast<void*>(addr), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, it->second.fd, 0);
  it->second.mappings++;
  d.mappings[addr] = {bytes, handle, false};
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr addr, size_t bytes) {
  CUresult entered;
  if (!enter("cuMemUnmap", &entered, false)) return entered;
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  auto it = d.mappings.find(addr);
  if (it == d.mappings.end() || it->second.bytes != bytes) return bad("cuMemUnmap: not a whole mapping");
  map_nothing(addr, bytes);
  const auto handle = it->second.handle;
  d.mappings.erase(it);
  d.handles[handle].mappings--;
  drop_handle(handle);
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemSetAccess(CUdeviceptr addr, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  ENTER("cuMemSetAccess");
  if (count != 1 || access->location.id != 7 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    return bad("cuMemSetAccess: arguments");
  uint64_t at = addr;
  for (auto it = d.mappings.find(addr); at < addr + bytes; ++it) {
    if (it == d.mappings.end() || it->first != at || at + it->second.bytes > addr + bytes)
      return bad("cuMemSetAccess: not whole mappings");
    it->second.access = true;
    at += it->second.bytes;
  }
  mprotect(reinterpret_cast<void*>(addr), bytes, PROT_READ | PROT_WRITE);
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemHostAlloc(void** to, size_t bytes, unsigned int) {
  ENTER("cuMemHostAlloc");
  *to = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*to == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  d.host_allocated[reinterpret_cast<uint64_t>(*to)] = bytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuMemFreeHost(void* addr) {
  CUresult entered;
  if (!enter("cuMemFreeHost", &entered, false)) return entered;
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  auto it = d.host_allocated.find(reinterpret_cast<uint64_t>(addr));
  if (it == d.host_allocated.end()) return bad("cuMemFreeHost: not an allocation");
  munmap(addr, it->second);
  d.host_allocated.erase(it);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr* to, void* addr, unsigned int flags) {
  ENTER("cuMemHostGetDevicePointer_v2");
  if (flags || !host_range(reinterpret_cast<uint64_t>(addr), 1)) return bad("cuMemHostGetDevicePointer: arguments");
  *to = reinterpret_cast<CUdeviceptr>(addr);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuMemHostRegister_v2(void* addr, size_t bytes, unsigned int) {
  ENTER("cuMemHostRegister_v2");
  const auto begin = reinterpret_cast<uint64_t>(addr);
  if (begin % 4096 || bytes % 4096 || !bytes) return bad("cuMemHostRegister: not whole pages");
  auto next = d.registered.lower_bound(begin + bytes);
  if (next != d.registered.begin() && std::prev(next)->first + std::prev(next)->second > begin)
    return bad("cuMemHostRegister: registered already", CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  d.registered[begin] = bytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuMemHostUnregister(void* addr) {
  CUresult entered;
  if (!enter("cuMemHostUnregister", &entered, false)) return entered;
  std::lock_guard lock(driver().mu);
  if (!driver().registered.erase(reinterpret_cast<uint64_t>(addr))) return bad("cuMemHostUnregister: not registered");
  return CUDA_SUCCESS;
}

// -- streams and events ---------------------------------------------------------------------------------------------

EXPORT CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* to, unsigned int flags, int) {
  ENTER("cuStreamCreateWithPriority");
  if (flags > CU_STREAM_NON_BLOCKING) return bad("cuStreamCreateWithPriority: flags");
  auto stream = std::make_shared<Stream>();
  stream->context = t_context;
  stream->non_blocking = flags == CU_STREAM_NON_BLOCKING;
  *to = reinterpret_cast<CUstream>(stream.get());
  d.streams[*to] = stream;
  return CUDA_SUCCESS;
}
// What a driver checks of a value that a correct caller may get wrong is refused; what a caller must know is a
// violation.
EXPORT CUresult CUDAAPI cuStreamSetAttribute(CUstream handle, CUstreamAttrID id, const CUstreamAttrValue* value) {
  ENTER("cuStreamSetAttribute");
  const StreamRef stream = find_stream(handle, "cuStreamSetAttribute");
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const CUaccessPolicyWindow& w = value->accessPolicyWindow;
  switch (id) {
    case CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      if (w.num_bytes && !device_range(reinterpret_cast<uint64_t>(w.base_ptr), 1))
        return bad("cuStreamSetAttribute: a window outside of device memory");
      break;
    case CU_STREAM_ATTRIBUTE_PRIORITY:
      if (value->priority > 0 || value->priority < -5) return CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      if (value->memSyncDomainMap.default_ > 3 || value->memSyncDomainMap.remote > 3) return CUDA_ERROR_INVALID_VALUE;
      break;
    case CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN: break;
    default: return bad("cuStreamSetAttribute: attribute " + std::to_string(id));
  }
  d.stream_attributes++;
  d.stream_attribute = id;
  d.stream_value = *value;
  d.stream_submitted = stream->submitted;
  // For a test that sees only the process: which attributes this driver was given.
  if (const char* path = std::getenv("FAKE_SAYS"))
    if (FILE* file = std::fopen(path, "a")) {
      uint64_t words[2];
      std::memcpy(words, value, sizeof words);
      std::fprintf(file, "%d %s %d %llx %llx\n", getpid(), stream->legacy ? "legacy" : "stream", id,
                   static_cast<unsigned long long>(words[0]), static_cast<unsigned long long>(words[1]));
      std::fclose(file);
    }
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuCtxResetPersistingL2Cache() {
  ENTER("cuCtxResetPersistingL2Cache");
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuStreamDestroy_v2(CUstream handle) {
  CUresult entered;
  if (!enter("cuStreamDestroy_v2", &entered, false)) return entered;
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  auto it = d.streams.find(handle);
  if (it == d.streams.end()) return bad("cuStreamDestroy: no such stream", CUDA_ERROR_INVALID_HANDLE);
  it->second->closing = true;
  it->second->work.notify_one();
  d.destroyed.push_back(it->second);
  d.streams.erase(it);
  d.changed.notify_all();
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuStreamQuery(CUstream handle) {
  ENTER("cuStreamQuery");
  const StreamRef stream = find_stream(handle, "cuStreamQuery");
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  return pending(*stream) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
  ENTER("cuStreamSynchronize");
  const StreamRef stream = find_stream(handle, "cuStreamSynchronize");
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  d.changed.wait(lock, [&] { return !pending(*stream); });
  write_output(*stream->context);
  return static_cast<CUresult>(stream->context->sticky.load());
}
EXPORT CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags) {
  ENTER("cuStreamWaitEvent");
  auto* event = reinterpret_cast<Event*>(event_handle);
  if (!d.events.contains(event) || flags) return bad("cuStreamWaitEvent: no such event", CUDA_ERROR_INVALID_HANDLE);
  const StreamRef stream = find_stream(handle, "cuStreamWaitEvent");
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  Operation operation{[] {}, {}, nullptr, false};
  if (event->stream) operation.needs.push_back({event->stream, event->position});
  push(stream, lock, std::move(operation));
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuStreamWriteValue64_v2(CUstream handle, CUdeviceptr addr, cuuint64_t value,
                                                unsigned int flags) {
  ENTER("cuStreamWriteValue64_v2");
  if (addr % 8 || flags || !host_range(addr, 8)) return bad("cuStreamWriteValue64: arguments");
  return push_work(handle, "cuStreamWriteValue64", lock, [addr, value] {
    reinterpret_cast<std::atomic<uint64_t>*>(addr)->store(value, std::memory_order_release);
  });
}
EXPORT CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  ENTER("cuLaunchHostFunc");
  const StreamRef stream = find_stream(handle, "cuLaunchHostFunc");
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  push(stream, lock, {[function, data] { function(data); }, {}, nullptr, true});
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuEventCreate(CUevent* to, unsigned int flags) {
  ENTER("cuEventCreate");
  auto* event = new Event;
  event->context = t_context;
  event->flags = flags;
  d.events.insert(event);
  *to = reinterpret_cast<CUevent>(event);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuEventDestroy_v2(CUevent handle) {
  CUresult entered;
  if (!enter("cuEventDestroy_v2", &entered, false)) return entered;
  auto* event = reinterpret_cast<Event*>(handle);
  std::lock_guard lock(driver().mu);
  if (!driver().events.erase(event)) return bad("cuEventDestroy: no such event", CUDA_ERROR_INVALID_HANDLE);
  delete event;
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuEventRecord(CUevent handle, CUstream stream_handle) {
  ENTER("cuEventRecord");
  auto* event = reinterpret_cast<Event*>(handle);
  if (!d.events.contains(event) || event->context != t_context)
    return bad("cuEventRecord: no event of this context", CUDA_ERROR_INVALID_HANDLE);
  const StreamRef stream = find_stream(stream_handle, "cuEventRecord");
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  auto time = std::make_shared<std::atomic<uint64_t>>(0);
  push(stream, lock, {[time] { time->store(now_ns()); }, {}, nullptr, false});
  event->stream = stream;
  event->position = stream->submitted;
  event->time_ns = time;
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuEventQuery(CUevent handle) {
  ENTER("cuEventQuery");
  auto* event = reinterpret_cast<Event*>(handle);
  if (!d.events.contains(event)) return bad("cuEventQuery: no such event", CUDA_ERROR_INVALID_HANDLE);
  return !event->stream || event->stream->done >= event->position ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
// How late, at the most, who waits for an event is woken, in microseconds.
static std::atomic<unsigned> g_late_us{0};
EXPORT void fake_late(unsigned us) { g_late_us = us; }

EXPORT CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
  ENTER("cuEventSynchronize");
  auto* event = reinterpret_cast<Event*>(handle);
  if (!d.events.contains(event)) return bad("cuEventSynchronize: no such event", CUDA_ERROR_INVALID_HANDLE);
  if (!event->stream) return CUDA_SUCCESS;
  const StreamRef stream = event->stream;
  const uint64_t position = event->position;
  d.changed.wait(lock, [&] { return stream->done >= position; });
  const auto sticky = static_cast<CUresult>(stream->context->sticky.load());
  lock.unlock();
  if (const unsigned late = g_late_us) usleep(static_cast<unsigned>(std::rand()) % late);
  return sticky;
}
#undef cuEventElapsedTime
EXPORT CUresult CUDAAPI cuEventElapsedTime(float* ms, CUevent start_handle, CUevent end_handle) {
  ENTER("cuEventElapsedTime");
  auto *start = reinterpret_cast<Event*>(start_handle), *end = reinterpret_cast<Event*>(end_handle);
  if (!d.events.contains(start) || !d.events.contains(end))
    return bad("cuEventElapsedTime: no such event", CUDA_ERROR_INVALID_HANDLE);
  if (!start->stream || !end->stream || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
    return CUDA_ERROR_INVALID_HANDLE;
  const uint64_t a = start->time_ns->load(), b = end->time_ns->load();
  if (!a || !b) return CUDA_ERROR_NOT_READY;
  *ms = static_cast<float>((static_cast<double>(b) - static_cast<double>(a)) * 1e-6);
  return CUDA_SUCCESS;
}

// -- copies and sets ------------------------------------------------------------------------------------------------

namespace {

struct Side {
  bool device;
  uint64_t addr, pitch;
};

CUresult copy(const char* symbol, Side to, Side from, uint64_t width, uint64_t height, CUstream handle,
              std::unique_lock<std::mutex>& lock) {
  auto side = [&](const Side& s, const char* which) {
    const uint64_t bytes = (height - 1) * s.pitch + width;
    if (s.device ? device_range(s.addr, bytes) : host_range(s.addr, bytes)) return true;
    violation(std::string(symbol) + ": " + which +
              (s.device ? " is not accessible device memory" : " is not page-locked memory"));
    return false;
  };
  if (!width || !height || (height > 1 && (to.pitch < width || from.pitch < width)))
    return bad(std::string(symbol) + ": extent");
  if (!side(to, "destination") || !side(from, "source")) return CUDA_ERROR_INVALID_VALUE;
  Context* const context = t_context;
  return push_work(handle, symbol, lock, [=] {
    for (const Side& s : {to, from})
      if (s.device && !still_mapped(context, s.addr, (height - 1) * s.pitch + width)) return;
    for (uint64_t row = 0; row < height; row++)
      std::memmove(reinterpret_cast<void*>(to.addr + row * to.pitch),
                   reinterpret_cast<const void*>(from.addr + row * from.pitch), width);
  });
}

template <class T>
CUresult fill(const char* symbol, uint64_t addr, uint64_t pitch, T value, uint64_t count, uint64_t rows,
              CUstream handle, std::unique_lock<std::mutex>& lock) {
  if (!count || !rows || addr % sizeof(T) || pitch % sizeof(T)) return bad(std::string(symbol) + ": arguments");
  const uint64_t bytes = (rows - 1) * pitch + count * sizeof(T);
  if (!device_range(addr, bytes)) return bad(std::string(symbol) + ": not accessible device memory");
  Context* const context = t_context;
  return push_work(handle, symbol, lock, [=] {
    if (!still_mapped(context, addr, bytes)) return;
    for (uint64_t row = 0; row < rows; row++) std::fill_n(reinterpret_cast<T*>(addr + row * pitch), count, value);
  });
}

}  // namespace

EXPORT CUresult CUDAAPI cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  ENTER("cuMemcpyHtoDAsync_v2");
  return copy("cuMemcpyHtoDAsync", {true, to, 0}, {false, reinterpret_cast<uint64_t>(from), 0}, bytes, 1, stream, lock);
}
EXPORT CUresult CUDAAPI cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER("cuMemcpyDtoHAsync_v2");
  return copy("cuMemcpyDtoHAsync", {false, reinterpret_cast<uint64_t>(to), 0}, {true, from, 0}, bytes, 1, stream, lock);
}
EXPORT CUresult CUDAAPI cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER("cuMemcpyDtoDAsync_v2");
  return copy("cuMemcpyDtoDAsync", {true, to, 0}, {true, from, 0}, bytes, 1, stream, lock);
}
EXPORT CUresult CUDAAPI cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* c, CUstream stream) {
  ENTER("cuMemcpy2DAsync_v2");
  auto side = [&](CUmemorytype type, const void* host, CUdeviceptr device, size_t pitch) -> Side {
    const bool on_device = type == CU_MEMORYTYPE_DEVICE;
    return {on_device, on_device ? device : reinterpret_cast<uint64_t>(host), pitch};
  };
  if (c->srcXInBytes || c->srcY || c->dstXInBytes || c->dstY) return bad("cuMemcpy2DAsync: origin");
  return copy("cuMemcpy2DAsync", side(c->dstMemoryType, c->dstHost, c->dstDevice, c->dstPitch),
              side(c->srcMemoryType, c->srcHost, c->srcDevice, c->srcPitch), c->WidthInBytes, c->Height, stream, lock);
}
// -- arrays, texture and surface objects ------------------------------------------------------------------------------

namespace {

size_t element_bytes(CUarray_format format, unsigned channels) {
  if (channels != 1 && channels != 2 && channels != 4) return 0;
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: return channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: return 2 * channels;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT: return 4 * channels;
    default: return 0;
  }
}

FakeArray* find_array(CUarray handle, const char* symbol) {
  const auto it = driver().arrays.find(handle);
  if (it == driver().arrays.end()) return violation(std::string(symbol) + ": no such array"), nullptr;
  if (it->second->context != t_context) return violation(std::string(symbol) + ": array of another context"), nullptr;
  return it->second.get();
}

// A row of one side of a 3D copy, and the whole side's check.
struct Box {
  std::shared_ptr<std::vector<uint8_t>> memory;  // of an array
  uint64_t first = 0, pitch = 0, slice = 0, span = 0;
  bool device = false;
  uint8_t* row(uint64_t z, uint64_t y) const {
    return (memory ? memory->data() : nullptr) + first + z * slice + y * pitch;
  }
};

bool box(CUmemorytype type, const void* host, CUdeviceptr device, CUarray handle, size_t pitch, size_t height, size_t x,
         size_t y, size_t z, const CUDA_MEMCPY3D& c, Box* out) {
  const char* const symbol = "cuMemcpy3DAsync";
  if (type == CU_MEMORYTYPE_ARRAY) {
    FakeArray* const a = find_array(handle, symbol);
    if (!a) return false;
    if (x % a->element || c.WidthInBytes % a->element || x + c.WidthInBytes > a->row() || y + c.Height > a->rows() ||
        z + c.Depth > a->slices())
      return violation(std::string(symbol) + ": outside of the array"), false;
    *out = {a->memory, (z * a->rows() + y) * a->row() + x, a->row(), a->rows() * a->row(), 0, false};
    return true;
  }
  if (x || y || z) return violation(std::string(symbol) + ": origin"), false;
  if (pitch < c.WidthInBytes || height < c.Height) return violation(std::string(symbol) + ": pitch or height"), false;
  const bool on_device = type == CU_MEMORYTYPE_DEVICE;
  *out = {nullptr, on_device ? device : reinterpret_cast<uint64_t>(host), pitch, pitch * height, 0, on_device};
  out->span = (c.Depth - 1) * out->slice + (c.Height - 1) * pitch + c.WidthInBytes;
  if (on_device ? device_range(out->first, out->span) : host_range(out->first, out->span)) return true;
  violation(std::string(symbol) + (on_device ? ": not accessible device memory" : ": not page-locked memory"));
  return false;
}

// FAKE_OBJECTS_AT, a file with a number in it: the lowest number of an object, so that a test can let a second process
// count otherwise. Under mu.
uint64_t free_object() {
  static const uint64_t first = [] {
    unsigned long long at = 1;
    if (const char* path = std::getenv("FAKE_OBJECTS_AT"))
      if (FILE* file = std::fopen(path, "r")) {
        if (std::fscanf(file, "%llu", &at) != 1) at = 1;
        std::fclose(file);
      }
    return at;
  }();
  uint64_t value = first;
  while (driver().objects.contains(value)) value++;
  return value;
}

bool good_resource(const CUDA_RESOURCE_DESC& r, const char* symbol) {
  if (r.flags) return false;
  switch (r.resType) {
    case CU_RESOURCE_TYPE_ARRAY: return find_array(r.res.array.hArray, symbol) != nullptr;
    case CU_RESOURCE_TYPE_LINEAR:
      return r.res.linear.devPtr % 512 == 0 && element_bytes(r.res.linear.format, r.res.linear.numChannels) &&
             device_range(r.res.linear.devPtr, r.res.linear.sizeInBytes);
    case CU_RESOURCE_TYPE_PITCH2D: {
      const auto& p = r.res.pitch2D;
      const size_t element = element_bytes(p.format, p.numChannels);
      return element && p.width * element <= p.pitchInBytes && p.pitchInBytes % 32 == 0 && p.height &&
             device_range(p.devPtr, (p.height - 1) * p.pitchInBytes + p.width * element);
    }
    default: return false;
  }
}

CUresult make_object(const char* symbol, const CUDA_RESOURCE_DESC& r, bool surface, unsigned long long* out) {
  if (!good_resource(r, symbol)) return bad(std::string(symbol) + ": resource");
  const CUarray array = r.resType == CU_RESOURCE_TYPE_ARRAY ? r.res.array.hArray : nullptr;
  if (surface && (!array || !(driver().arrays[array]->shape.Flags & CUDA_ARRAY3D_SURFACE_LDST)))
    return bad(std::string(symbol) + ": an array for surfaces is wanted");
  *out = free_object();
  driver().objects[*out] = {surface, t_context, array};
  return CUDA_SUCCESS;
}

CUresult drop_object(const char* symbol, uint64_t value, bool surface) {
  const auto it = driver().objects.find(value);
  if (it == driver().objects.end() || it->second.surface != surface)
    return bad(std::string(symbol) + ": no such object");
  driver().objects.erase(it);
  return CUDA_SUCCESS;
}

}  // namespace

EXPORT CUresult CUDAAPI cuArray3DCreate_v2(CUarray* to, const CUDA_ARRAY3D_DESCRIPTOR* shape) {
  ENTER("cuArray3DCreate_v2");
  const size_t element = element_bytes(shape->Format, shape->NumChannels);
  const bool layered = shape->Flags & CUDA_ARRAY3D_LAYERED;
  if (!element || !shape->Width || (shape->Depth && !shape->Height && !layered)) return bad("cuArray3DCreate: shape");
  auto array = std::make_unique<FakeArray>();
  *array = {t_context, *shape, element, nullptr};
  const uint64_t bytes = array->row() * array->rows() * array->slices();
  if (bytes > d.memory - d.used) return CUDA_ERROR_OUT_OF_MEMORY;
  d.used += bytes;
  array->memory = std::make_shared<std::vector<uint8_t>>(bytes, 0xcd);
  *to = reinterpret_cast<CUarray>(array.get());
  d.arrays[*to] = std::move(array);
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuArrayDestroy(CUarray handle) {
  CUresult entered;
  if (!enter("cuArrayDestroy", &entered, false)) return entered;
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  const auto it = d.arrays.find(handle);
  if (it == d.arrays.end()) return bad("cuArrayDestroy: no such array", CUDA_ERROR_INVALID_HANDLE);
  if (it->second->memory.use_count() > 1 && !it->second->context->sticky.load())
    violation("cuArrayDestroy: a copy of it is queued");
  for (const auto& [value, object] : d.objects)
    if (object.array == handle) violation("cuArrayDestroy: an object shows it");
  d.used -= it->second->memory->size();
  d.arrays.erase(it);
  return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* c, CUstream stream) {
  ENTER("cuMemcpy3DAsync_v2");
  if (!c->WidthInBytes || !c->Height || !c->Depth || c->srcLOD || c->dstLOD) return bad("cuMemcpy3DAsync: extent");
  Box to, from;
  if (!box(c->dstMemoryType, c->dstHost, c->dstDevice, c->dstArray, c->dstPitch, c->dstHeight, c->dstXInBytes, c->dstY,
           c->dstZ, *c, &to) ||
      !box(c->srcMemoryType, c->srcHost, c->srcDevice, c->srcArray, c->srcPitch, c->srcHeight, c->srcXInBytes, c->srcY,
           c->srcZ, *c, &from))
    return CUDA_ERROR_INVALID_VALUE;
  Context* const context = t_context;
  return push_work(stream, "cuMemcpy3DAsync", lock, [=, width = c->WidthInBytes, rows = c->Height, depth = c->Depth] {
    for (const Box* side : {&to, &from})
      if (side->device && !still_mapped(context, side->first, side->span)) return;
    for (uint64_t z = 0; z < depth; z++)
      for (uint64_t y = 0; y < rows; y++) std::memmove(to.row(z, y), from.row(z, y), width);
  });
}

EXPORT CUresult CUDAAPI cuTexObjectCreate(CUtexObject* to, const CUDA_RESOURCE_DESC* resource,
                                          const CUDA_TEXTURE_DESC* how, const CUDA_RESOURCE_VIEW_DESC* view) {
  ENTER("cuTexObjectCreate");
  if (how->flags & ~0x73u || (view && resource->resType != CU_RESOURCE_TYPE_ARRAY)) return bad("cuTexObjectCreate");
  return make_object("cuTexObjectCreate", *resource, false, to);
}

EXPORT CUresult CUDAAPI cuSurfObjectCreate(CUsurfObject* to, const CUDA_RESOURCE_DESC* resource) {
  ENTER("cuSurfObjectCreate");
  return make_object("cuSurfObjectCreate", *resource, true, to);
}

EXPORT CUresult CUDAAPI cuTexObjectDestroy(CUtexObject object) {
  ENTER_ANYWHERE("cuTexObjectDestroy");
  return drop_object("cuTexObjectDestroy", object, false);
}

EXPORT CUresult CUDAAPI cuSurfObjectDestroy(CUsurfObject object) {
  ENTER_ANYWHERE("cuSurfObjectDestroy");
  return drop_object("cuSurfObjectDestroy", object, true);
}

EXPORT CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream stream) {
  ENTER("cuMemsetD8Async");
  return fill<uint8_t>("cuMemsetD8Async", to, 0, value, n, 1, stream, lock);
}
EXPORT CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t n, CUstream stream) {
  ENTER("cuMemsetD16Async");
  return fill<uint16_t>("cuMemsetD16Async", to, 0, value, n, 1, stream, lock);
}
EXPORT CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t n, CUstream stream) {
  ENTER("cuMemsetD32Async");
  return fill<uint32_t>("cuMemsetD32Async", to, 0, value, n, 1, stream, lock);
}
EXPORT CUresult CUDAAPI cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t n, size_t rows,
                                          CUstream stream) {
  ENTER("cuMemsetD2D8Async");
  return fill<uint8_t>("cuMemsetD2D8Async", to, pitch, value, n, rows, stream, lock);
}
EXPORT CUresult CUDAAPI cuMemsetD2D16Async(CUdeviceptr to, size_t pitch, unsigned short value, size_t n, size_t rows,
                                           CUstream stream) {
  ENTER("cuMemsetD2D16Async");
  return fill<uint16_t>("cuMemsetD2D16Async", to, pitch, value, n, rows, stream, lock);
}
EXPORT CUresult CUDAAPI cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned int value, size_t n, size_t rows,
                                           CUstream stream) {
  ENTER("cuMemsetD2D32Async");
  return fill<uint32_t>("cuMemsetD2D32Async", to, pitch, value, n, rows, stream, lock);
}

// -- modules: text, one object a line: "kernel NAME OFFSET:SIZE ..." and "global NAME BYTES"; or PTX, of which only the
// declarations are read ---------------------------------------------------------------------------------------------

namespace {

size_t type_bytes(const std::string& type) {  // ".u32"
  const size_t digit = type.find_first_of("0123456789");
  return digit == std::string::npos ? 0 : std::stoul(type.substr(digit)) / 8;
}

// Simple declarations with at most one initial value, as tests write them.
void read_ptx(const std::string& text, Module* module, std::set<Function*>* functions) {
  std::string plain;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) plain += line.substr(0, line.find("//")) + '\n';
  for (char& c : plain)
    if (c == ',' || c == '(' || c == ')') c = ' ';
  std::istringstream words(plain);
  std::string word, type;
  Function* open = nullptr;
  while (words >> word) {
    if (word == ".entry") {
      auto function = std::make_unique<Function>();
      words >> function->name;
      function->module = reinterpret_cast<CUmodule>(module);
      if (text.starts_with("// devproxy reduce ")) function->shape = text.substr(0, text.find('\n'));
      open = function.get();
      functions->insert(open);
      module->order.push_back(open);
      module->functions[open->name] = std::move(function);
    } else if (word == ".param" && open) {
      words >> type;
      const size_t bytes = type_bytes(type);
      size_t at = open->params.empty() ? 0 : open->params.back().first + open->params.back().second;
      at = (at + bytes - 1) / bytes * bytes;
      open->params.push_back({at, bytes});
    } else if (word[0] == '{') {
      open = nullptr;
    } else if (word == ".global" || word == ".const") {
      std::string name, equals;
      uint32_t initial = 0;
      while (words >> word && word[0] == '.') {
        if (word == ".align")
          words >> equals;
        else
          type = word;
      }
      name = word;
      uint64_t bytes = type_bytes(type);
      if (const size_t bracket = name.find('['); bracket != std::string::npos) {
        bytes *= std::stoul(name.substr(bracket + 1));
        name.resize(bracket);
      } else if (name.back() == ';') {
        name.pop_back();
      } else {
        words >> equals >> initial;
      }
      const uint64_t at = place_global(bytes);
      module->globals[name] = {at, bytes};
      std::memcpy(reinterpret_cast<void*>(at), &initial, std::min<size_t>(bytes, sizeof initial));
    }
  }
}

}  // namespace

EXPORT CUresult CUDAAPI cuModuleLoadDataEx(CUmodule* to, const void* image, unsigned int n_options,
                                           CUjit_option* options, void** values) {
  ENTER("cuModuleLoadDataEx");
  const char* text = static_cast<const char*>(image);
  if (std::memcmp(text, "\x50\xed\x55\xba", 4) == 0) {  // a fat binary: its header, then what we read
    uint16_t head = 0;
    std::memcpy(&head, text + 6, sizeof head);
    text += head;
  }
  std::istringstream lines(text);
  auto module = std::make_unique<Module>();
  module->context = t_context;
  std::string line;
  const bool ptx = std::string(text).find(".version") != std::string::npos;
  if (ptx) read_ptx(text, module.get(), &d.functions);
  while (!ptx && std::getline(lines, line)) {
    std::istringstream words(line);
    std::string what, name, place;
    words >> what >> name;
    if (what == "kernel") {
      auto function = std::make_unique<Function>();
      function->module = reinterpret_cast<CUmodule>(module.get());
      function->name = name;
      while (words >> place) {
        const size_t colon = place.find(':');
        function->params.push_back({std::stoul(place), std::stoul(place.substr(colon + 1))});
      }
      d.functions.insert(function.get());
      module->order.push_back(function.get());
      module->functions[name] = std::move(function);
    } else if (what == "global") {
      size_t bytes = 0;
      words >> bytes;
      module->globals[name] = {place_global(bytes), bytes};
    } else if (!what.empty() && what != "//") {
      for (unsigned i = 0; i < n_options; i++)
        if (options[i] == CU_JIT_ERROR_LOG_BUFFER)
          put_text("line not understood: " + line, static_cast<char*>(values[i]), 256);
      for (auto& [n, f] : module->functions) d.functions.erase(f.get());
      drop_globals(*module);
      return CUDA_ERROR_INVALID_IMAGE;
    }
  }
  Module* const key = module.get();
  *to = reinterpret_cast<CUmodule>(key);
  d.modules[key] = std::move(module);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuModuleUnload(CUmodule handle) {
  CUresult entered;
  if (!enter("cuModuleUnload", &entered, false)) return entered;
  Driver& d = driver();
  std::lock_guard lock(d.mu);
  auto it = d.modules.find(reinterpret_cast<Module*>(handle));
  if (it == d.modules.end()) return bad("cuModuleUnload: no such module", CUDA_ERROR_INVALID_HANDLE);
  if (it->second->queued && !it->second->context->sticky.load()) violation("cuModuleUnload: a kernel of it is queued");
  for (auto& [name, function] : it->second->functions) d.functions.erase(function.get());
  drop_globals(*it->second);
  d.modules.erase(it);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuModuleGetFunction(CUfunction* to, CUmodule handle, const char* name) {
  ENTER("cuModuleGetFunction");
  auto it = d.modules.find(reinterpret_cast<Module*>(handle));
  if (it == d.modules.end()) return bad("cuModuleGetFunction: no such module", CUDA_ERROR_INVALID_HANDLE);
  auto function = it->second->functions.find(name);
  if (function == it->second->functions.end()) return CUDA_ERROR_NOT_FOUND;
  *to = reinterpret_cast<CUfunction>(function->second.get());
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuModuleGetFunctionCount(unsigned int* count, CUmodule handle) {
  ENTER("cuModuleGetFunctionCount");
  auto it = d.modules.find(reinterpret_cast<Module*>(handle));
  if (it == d.modules.end()) return bad("cuModuleGetFunctionCount: no such module", CUDA_ERROR_INVALID_HANDLE);
  *count = static_cast<unsigned>(it->second->order.size());
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuModuleEnumerateFunctions(CUfunction* to, unsigned int n, CUmodule handle) {
  ENTER("cuModuleEnumerateFunctions");
  auto it = d.modules.find(reinterpret_cast<Module*>(handle));
  if (it == d.modules.end()) return bad("cuModuleEnumerateFunctions: no such module", CUDA_ERROR_INVALID_HANDLE);
  for (size_t i = 0; i < std::min<size_t>(n, it->second->order.size()); i++)
    to[i] = reinterpret_cast<CUfunction>(it->second->order[i]);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuFuncGetName(const char** name, CUfunction handle) {
  ENTER("cuFuncGetName");
  auto* function = reinterpret_cast<Function*>(handle);
  if (!d.functions.contains(function)) return bad("cuFuncGetName: no such function", CUDA_ERROR_INVALID_HANDLE);
  *name = function->name.c_str();
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuModuleGetGlobal_v2(CUdeviceptr* to, size_t* bytes, CUmodule handle, const char* name) {
  ENTER("cuModuleGetGlobal_v2");
  auto it = d.modules.find(reinterpret_cast<Module*>(handle));
  if (it == d.modules.end()) return bad("cuModuleGetGlobal: no such module", CUDA_ERROR_INVALID_HANDLE);
  auto global = it->second->globals.find(name);
  if (global == it->second->globals.end()) return CUDA_ERROR_NOT_FOUND;
  *to = global->second.first;
  *bytes = global->second.second;
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  ENTER("cuFuncGetAttribute");
  if (!d.functions.contains(reinterpret_cast<Function*>(function)))
    return bad("cuFuncGetAttribute: no such function", CUDA_ERROR_INVALID_HANDLE);
  if (attribute >= CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE)
    return CUDA_ERROR_INVALID_VALUE;  // a driver that does not know the last one
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 40
           : attribute == CU_FUNC_ATTRIBUTE_BINARY_VERSION      ? 90
                                                                : 16;
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  ENTER("cuFuncSetAttribute");
  auto* function = reinterpret_cast<Function*>(handle);
  if (!d.functions.contains(function)) return bad("cuFuncSetAttribute: no such function", CUDA_ERROR_INVALID_HANDLE);
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  function->max_dynamic_shared = static_cast<unsigned>(value);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset, size_t* bytes) {
  ENTER("cuFuncGetParamInfo");
  auto* function = reinterpret_cast<Function*>(handle);
  if (!d.functions.contains(function)) return bad("cuFuncGetParamInfo: no such function", CUDA_ERROR_INVALID_HANDLE);
  if (index >= function->params.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = function->params[index].first;
  *bytes = function->params[index].second;
  return CUDA_SUCCESS;
}
namespace {

// A launch, after the exports have made it one form. attributes: what the driver keeps of them.
CUresult launch(const char* symbol, CUfunction handle, const CUlaunchConfig& c, void** params, void** extra,
                std::unique_lock<std::mutex>& lock) {
  Driver& d = driver();
  auto* function = reinterpret_cast<Function*>(handle);
  const std::string name = symbol;
  if (!d.functions.contains(function)) return bad(name + ": no such function", CUDA_ERROR_INVALID_HANDLE);
  if (!c.gridDimX || !c.gridDimY || !c.gridDimZ || !c.blockDimX || !c.blockDimY || !c.blockDimZ ||
      c.blockDimX * c.blockDimY * c.blockDimZ > 1024 || params)
    return bad(name + ": arguments");
  if (c.sharedMemBytes > function->max_dynamic_shared) return CUDA_ERROR_INVALID_VALUE;
  d.last_attributes.assign(c.attrs, c.attrs + c.numAttrs);
  for (const CUlaunchAttribute& a : d.last_attributes) {
    if (a.id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
    if (!a.value.clusterDim.x || c.gridDimX % a.value.clusterDim.x) return bad(name + ": cluster does not divide");
    if (a.value.clusterDim.x > 4) return CUDA_ERROR_INVALID_CLUSTER_SIZE;  // this fake's own limit: a late refusal
  }
  std::vector<uint8_t> block;
  if (extra) {
    if (extra[0] != CU_LAUNCH_PARAM_BUFFER_POINTER || extra[2] != CU_LAUNCH_PARAM_BUFFER_SIZE ||
        extra[4] != CU_LAUNCH_PARAM_END)
      return bad(name + ": extra");
    const auto* bytes = static_cast<const uint8_t*>(extra[1]);
    block.assign(bytes, bytes + *static_cast<size_t*>(extra[3]));
  }
  for (const auto& [offset, bytes] : function->params)
    if (offset + bytes > block.size()) return bad(name + ": parameters are missing");
  const StreamRef stream = find_stream(c.hStream, symbol);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  auto& module = *d.modules[reinterpret_cast<Module*>(function->module)];
  if (module.context != t_context) return bad(name + ": function of another context", CUDA_ERROR_INVALID_HANDLE);
  module.queued++;
  Context* const context = t_context;
  const uint64_t counter = module.globals.contains("counter") ? module.globals["counter"].first : 0;
  push(stream, lock,
       {[context, kernel = function->name, shape = function->shape, block, counter] {
          if (shape.empty())
            run_kernel(context, kernel, block, counter);
          else
            run_reduction(context, shape, block);
        },
        {},
        function->module,
        false});
  return CUDA_SUCCESS;
}

}  // namespace

EXPORT CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz,
                                       unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
                                       CUstream stream, void** params, void** extra) {
  ENTER("cuLaunchKernel");
  return launch("cuLaunchKernel", function, {gx, gy, gz, bx, by, bz, shared, stream, nullptr, 0}, params, extra, lock);
}
EXPORT CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params,
                                         void** extra) {
  ENTER("cuLaunchKernelEx");
  if (!config->numAttrs) violation("cuLaunchKernelEx: no attributes, so cuLaunchKernel would have done");
  return launch("cuLaunchKernelEx", function, *config, params, extra, lock);
}

// -- the linker: text in, text out; tensor maps: the arguments themselves --------------------------------------------

namespace {

struct Linking {
  std::string text;
  char *info = nullptr, *error = nullptr;
  std::vector<uint8_t> image;
};

}  // namespace

EXPORT CUresult CUDAAPI cuLinkCreate_v2(unsigned int n, CUjit_option* options, void** values, CUlinkState* state) {
  ENTER("cuLinkCreate_v2");
  auto* linking = new Linking;
  for (unsigned i = 0; i < n; i++) {
    if (options[i] == CU_JIT_INFO_LOG_BUFFER) linking->info = static_cast<char*>(values[i]);
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER) linking->error = static_cast<char*>(values[i]);
    if (options[i] == CU_JIT_MAX_REGISTERS)
      linking->text = "// registers " + std::to_string(reinterpret_cast<uintptr_t>(values[i])) + "\n";
  }
  *state = reinterpret_cast<CUlinkState>(linking);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void* data, size_t bytes,
                                         const char* name, unsigned int n, CUjit_option*, void**) {
  ENTER("cuLinkAddData_v2");
  auto* linking = reinterpret_cast<Linking*>(state);
  const std::string text(static_cast<char*>(data), bytes);
  if (n || (type == CU_JIT_INPUT_PTX && text.back() != 0)) return bad("cuLinkAddData: arguments");
  if (text.find("nonsense") != std::string::npos) {
    put_text(std::string("error in ") + (name ? name : "?"), linking->error, 256);
    return CUDA_ERROR_INVALID_PTX;
  }
  linking->text += text.c_str();
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuLinkComplete(CUlinkState state, void** image, size_t* bytes) {
  ENTER("cuLinkComplete");
  auto* linking = reinterpret_cast<Linking*>(state);
  linking->image.assign(linking->text.begin(), linking->text.end());
  linking->image.push_back(0);
  put_text("linked", linking->info, 256);
  *image = linking->image.data();
  *bytes = linking->image.size();
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuLinkDestroy(CUlinkState state) {
  ENTER("cuLinkDestroy");
  delete reinterpret_cast<Linking*>(state);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                               void* address, const cuuint64_t* dim, const cuuint64_t* strides,
                                               const cuuint32_t* box, const cuuint32_t* element_strides,
                                               CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                               CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  ENTER("cuTensorMapEncodeTiled");
  if (rank > 1 && !strides) return bad("cuTensorMapEncodeTiled: strides");
  if (element_strides[0] == 0) return CUDA_ERROR_INVALID_VALUE;
  const cuuint64_t words[16] = {reinterpret_cast<cuuint64_t>(address),
                                dim[0],
                                dim[rank - 1],
                                rank > 1 ? strides[0] : 0,
                                box[rank - 1],
                                element_strides[rank - 1],
                                type,
                                rank,
                                interleave,
                                swizzle,
                                promotion,
                                fill};
  std::memcpy(map, words, sizeof words);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuTensorMapEncodeIm2col(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                                void* address, const cuuint64_t* dim, const cuuint64_t* strides,
                                                const int* lower, const int* upper, cuuint32_t channels,
                                                cuuint32_t pixels, const cuuint32_t* element_strides,
                                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                                CUtensorMapFloatOOBfill) {
  ENTER("cuTensorMapEncodeIm2col");
  const cuuint64_t words[16] = {reinterpret_cast<cuuint64_t>(address),
                                dim[rank - 1],
                                strides[rank - 2],
                                static_cast<cuuint64_t>(lower[0]),
                                static_cast<cuuint64_t>(upper[rank - 3]),
                                channels,
                                pixels,
                                element_strides[0],
                                type};
  std::memcpy(map, words, sizeof words);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  ENTER("cuTensorMapReplaceAddress");
  std::memcpy(map, &address, sizeof address);
  return CUDA_SUCCESS;
}

// -- occupancy: numbers that depend on every argument ---------------------------------------------------------------

EXPORT CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function,
                                                                             int threads, size_t shared,
                                                                             unsigned int flags) {
  ENTER("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags");
  if (!d.functions.contains(reinterpret_cast<Function*>(function)) || threads <= 0)
    return bad("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags: arguments");
  *blocks = 2048 / threads - static_cast<int>(shared / 1024) - static_cast<int>(flags);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, CUfunction function, int blocks,
                                                                int threads) {
  ENTER("cuOccupancyAvailableDynamicSMemPerBlock");
  if (!d.functions.contains(reinterpret_cast<Function*>(function)) || blocks <= 0 || threads <= 0)
    return bad("cuOccupancyAvailableDynamicSMemPerBlock: arguments");
  *bytes = (200u << 10) / static_cast<unsigned>(blocks) + static_cast<unsigned>(threads);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuOccupancyMaxActiveClusters(int* clusters, CUfunction function, const CUlaunchConfig* c) {
  ENTER("cuOccupancyMaxActiveClusters");
  if (!d.functions.contains(reinterpret_cast<Function*>(function)) || c->numAttrs != 1)
    return bad("cuOccupancyMaxActiveClusters: arguments");
  *clusters = static_cast<int>(132 / c->attrs[0].value.clusterDim.x);
  return CUDA_SUCCESS;
}
EXPORT CUresult CUDAAPI cuOccupancyMaxPotentialClusterSize(int* blocks, CUfunction function, const CUlaunchConfig* c) {
  ENTER("cuOccupancyMaxPotentialClusterSize");
  if (!d.functions.contains(reinterpret_cast<Function*>(function)) || !c->blockDimX)
    return bad("cuOccupancyMaxPotentialClusterSize: arguments");
  *blocks = 8;
  return CUDA_SUCCESS;
}
