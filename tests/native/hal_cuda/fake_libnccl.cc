// SPDX-License-Identifier: Apache-2.0
// An NCCL over the fake driver (fake_libcuda.cc) that believes nothing: for tests of hal/cuda's communicators without a GPU.
//
// It has the calls of nccl_table.h. Ranks are processes of one host. Collectives really run, in the order of their streams,
// on the memory of the fake GPUs; reductions have the software GPU's order, so the tests' oracle is the same. As NCCL's, a
// communicator that need not block does its work on threads of its own: a group comes into its stream late, some of them
// by milliseconds (FAKE_NCCL_LATE_US: at most so late), so what overtakes one gives wrong numbers. A pair's first send or
// receive is late until the other rank comes there. A communicator's end waits for the other ranks'. Communicators of one
// group run one after another in their stream, in the order in which the group names them, as NCCL's kernels would.
//
// Misuse ends the process with a line: a communicator that is asked while it is busy, by two threads at once, or after its
// end; a group that ends on another thread; a rank that has the other context; a communicator that is destroyed while work
// is under way; memory that is none of the device's; a group that ends while another one is not in its stream yet, since their order would
// be anybody's guess, and NCCL wants the same one at all ranks. FAKE_NCCL_MANY=1 allows it, for several of the job's GPUs
// in one process: natively they are several. FAKE_NCCL_WRONG=1: reductions give wrong numbers, so right ones are not this NCCL's. Two ranks of one GPU are refused.
//
// It shows that hal/cuda keeps the rules as NCCL's documentation has them. It shows nothing about NCCL.
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "devproxy/csrc/args/comm.h"
#include "devproxy/hal/cuda/nccl_table.h"
#include "devproxy/hal/soft/comm/reduce.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using devproxy::comm_type_bytes;
using devproxy::CommKind;
using devproxy::CommReduction;
using devproxy::CommType;
using devproxy::hal::cuda::NcclComm;
using devproxy::hal::cuda::NcclStream;

namespace {

constexpr int kSuccess = 0, kCudaError = 1, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7;
constexpr uint32_t kRanks = 16;
constexpr uint64_t kSlotBytes = 256 << 10, kBoxBytes = 16 << 10;

[[noreturn]] void misuse(const std::string& what) {
  std::fprintf(stderr, "fake NCCL: misuse: %s\n", what.c_str());
  std::abort();
}

// What the ranks share.
struct Box {
  std::atomic<uint64_t> written, read;
  uint8_t data[kBoxBytes];
};
struct Shared {
  std::atomic<uint32_t> ranks, joined;
  std::atomic<int32_t> pids[kRanks], gpus[kRanks];
  std::atomic<bool> gone[kRanks];
  std::atomic<bool> connected[kRanks][kRanks][2];  // from, to: does the sender, the receiver know the way
  std::atomic<uint64_t> arrived;
  uint8_t scalars[kRanks][16];
  uint8_t slots[kRanks][kSlotBytes];
  Box boxes[kRanks][kRanks];
};

struct Cuda {
  decltype(&cuLaunchHostFunc) launch;
  decltype(&cuCtxSetCurrent) set_current;
  void* (*primary)();
  void* (*current)();
  int (*gpu)();
  int (*is_mapped)(uint64_t addr, uint64_t bytes);
};

const Cuda& cuda() {
  static const Cuda table = [] {
    void* lib = dlopen(std::getenv("DEVPROXY_CUDA_DRIVER"), RTLD_NOW);
    if (!lib) misuse("DEVPROXY_CUDA_DRIVER names no driver");
    const auto find = [&]<class F>(F* to, const char* name) { *to = reinterpret_cast<F>(dlsym(lib, name)); };
    Cuda c{};
    find(&c.launch, "cuLaunchHostFunc");
    find(&c.set_current, "cuCtxSetCurrent");
    find(&c.primary, "fake_primary");
    find(&c.current, "fake_current");
    find(&c.gpu, "fake_gpu");
    find(&c.is_mapped, "fake_is_mapped");
    return c;
  }();
  return table;
}

struct Work {
  CommKind kind;
  CommType type;
  CommReduction reduction = CommReduction::kSum;
  int root = 0;  // or the peer
  const uint8_t* send = nullptr;
  uint8_t* recv = nullptr;
  size_t count = 0;
  uint64_t scalar = 0;  // of kPreMulSum
  bool scalar_on_device = false;
};

struct Reduction {
  bool live = true, on_device = false;
  CommType type;
  uint64_t scalar = 0;
};

// The n-th look in a row at what another rank does: tests run many ranks on two cores.
void nap(unsigned n) { usleep(20u << std::min(n / 8, 5u)); }

uint64_t number_of(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace

struct ncclComm {
  uint64_t magic = 0x4e43434cfaceULL;
  Shared* shared = nullptr;
  int ranks = 0, rank = 0;
  std::atomic<int> state{kInProgress};
  std::atomic<bool> aborted{false}, finalized{false};
  std::atomic<int> inside{0};                      // calls of the caller's
  std::atomic<uint64_t> launched{0}, executed{0};  // groups
  std::atomic<int> threads{0};
  uint64_t barriers = 0;
  std::vector<Reduction> reductions;
};

namespace {

// Stands around a call.
class Use {
 public:
  Use(NcclComm comm, const char* what) : comm_(comm) {
    if (!comm || comm->magic != 0x4e43434cfaceULL)
      misuse(std::string(what) + ": no communicator, or one that has ended");
    if (comm->inside.fetch_add(1) != 0) misuse(std::string(what) + ": two threads at once");
    if (comm->state == kInProgress) misuse(std::string(what) + ": the last call is still in progress");
    if (comm->finalized) misuse(std::string(what) + ": it was finalized");
  }
  ~Use() { comm_->inside.fetch_sub(1); }

 private:
  NcclComm comm_;
};

void require_context(const char* what) {
  if (!cuda().current() || cuda().current() != cuda().primary())
    misuse(std::string(what) + ": the thread is not in the primary context");
}

void require_mapped(const void* at, uint64_t bytes, const char* what) {
  if (bytes && !cuda().is_mapped(reinterpret_cast<uint64_t>(at), bytes))
    misuse(std::string(what) + ": memory that is none of the device's");
}

// -- execution, on a stream's thread ----------------------------------------------------------------------------------

bool barrier(ncclComm& c) {
  c.barriers++;
  c.shared->arrived.fetch_add(1);
  for (unsigned n = 0; c.shared->arrived.load() < c.barriers * static_cast<uint64_t>(c.ranks); n++) {
    if (c.aborted) return false;
    nap(n);
  }
  return true;
}

// The elements first .. first + n of what this rank gives, into its slot; then `take`, when all have; then nobody reads
// any more.
template <class Take>
bool exchange(ncclComm& c, const uint8_t* from, uint64_t bytes, Take take) {
  if (from) std::memcpy(c.shared->slots[c.rank], from, bytes);
  if (!barrier(c)) return false;
  take();
  return barrier(c);
}

bool reduce_part(ncclComm& c, const Work& w, uint64_t skip, uint8_t* to) {
  const uint64_t element = comm_type_bytes(w.type), most = kSlotBytes / element;
  for (uint64_t done = 0; done < w.count; done += most) {
    const uint64_t n = std::min(most, w.count - done);
    const bool ok = exchange(c, w.send + skip + done * element, n * element, [&] {
      if (!to) return;
      devproxy::hal::soft::Reduction r;
      r.type = w.type, r.op = w.reduction;
      for (int i = 0; i < c.ranks; i++) r.inputs.push_back(c.shared->slots[i]);
      if (w.reduction == CommReduction::kPreMulSum)
        for (int i = 0; i < c.ranks; i++) r.scalars.push_back(c.shared->scalars[i]);
      std::vector<uint8_t> out(n * element);
      r.outputs = {out.data()};
      devproxy::hal::soft::reduce(r, 0, n);
      static const bool wrong = number_of("FAKE_NCCL_WRONG", 0) != 0;
      if (wrong) out.front() ^= 1;
      std::memcpy(to + done * element, out.data(), out.size());
    });
    if (!ok) return false;
  }
  return true;
}

bool collective(ncclComm& c, const Work& w) {
  const uint64_t element = comm_type_bytes(w.type), part = w.count * element;
  const auto ranks = static_cast<uint64_t>(c.ranks), rank = static_cast<uint64_t>(c.rank);
  if (w.reduction == CommReduction::kPreMulSum) {
    if (w.scalar_on_device) require_mapped(reinterpret_cast<void*>(w.scalar), element, "a scalar");
    std::memcpy(c.shared->scalars[c.rank],
                w.scalar_on_device ? reinterpret_cast<const void*>(w.scalar) : static_cast<const void*>(&w.scalar),
                element);
  }
  switch (w.kind) {
    case CommKind::kAllReduce:
      require_mapped(w.send, part, "AllReduce"), require_mapped(w.recv, part, "AllReduce");
      return reduce_part(c, w, 0, w.recv);
    case CommKind::kReduce:
      require_mapped(w.send, part, "Reduce");
      if (c.rank == w.root) require_mapped(w.recv, part, "Reduce");
      return reduce_part(c, w, 0, c.rank == w.root ? w.recv : nullptr);
    case CommKind::kReduceScatter:
      require_mapped(w.send, part * ranks, "ReduceScatter"), require_mapped(w.recv, part, "ReduceScatter");
      for (uint64_t to = 0; to < ranks; to++)
        if (!reduce_part(c, w, to * part, to == rank ? w.recv : nullptr)) return false;
      return true;
    case CommKind::kBroadcast:
    case CommKind::kAllGather: {
      const bool all = w.kind == CommKind::kAllGather, gives = all || c.rank == w.root;
      if (gives) require_mapped(w.send, part, "a collective");
      require_mapped(w.recv, all ? part * ranks : part, "a collective");
      for (uint64_t done = 0; done < part; done += kSlotBytes) {
        const uint64_t n = std::min(kSlotBytes, part - done);
        const bool ok = exchange(c, gives ? w.send + done : nullptr, n, [&] {
          for (uint64_t r = 0; all && r < ranks; r++) std::memcpy(w.recv + r * part + done, c.shared->slots[r], n);
          if (!all) std::memcpy(w.recv + done, c.shared->slots[w.root], n);
        });
        if (!ok) return false;
      }
      return true;
    }
    default: misuse("a collective that there is not");
  }
}

// Sends and receives of a group: all at once, those of a pair in order.
bool pairs(ncclComm& c, const std::vector<Work>& works) {
  struct Way {
    bool sends;
    int peer;
    std::deque<std::pair<uint8_t*, uint64_t>> left;
  };
  std::vector<Way> ways;
  for (const Work& w : works) {
    const bool sends = w.kind == CommKind::kSend;
    auto* const at = sends ? const_cast<uint8_t*>(w.send) : w.recv;
    const uint64_t bytes = w.count * comm_type_bytes(w.type);
    require_mapped(at, bytes, "a send or receive");
    auto way =
        std::find_if(ways.begin(), ways.end(), [&](const Way& o) { return o.sends == sends && o.peer == w.root; });
    if (way == ways.end()) way = ways.insert(way, {sends, w.root, {}});
    way->left.emplace_back(at, bytes);
  }
  unsigned idle = 0;
  for (bool all = false; !all;) {
    all = true;
    bool moved = false;
    for (Way& way : ways) {
      while (!way.left.empty()) {
        auto& [at, bytes] = way.left.front();
        Box& box = way.sends ? c.shared->boxes[c.rank][way.peer] : c.shared->boxes[way.peer][c.rank];
        const uint64_t written = box.written.load(), read = box.read.load();
        const uint64_t from = way.sends ? written : read;
        uint64_t n = std::min(bytes, way.sends ? kBoxBytes - (written - read) : written - read);
        n = std::min(n, kBoxBytes - from % kBoxBytes);
        if (n == 0 && bytes != 0) break;
        uint8_t* const there = box.data + from % kBoxBytes;
        std::memcpy(way.sends ? there : at, way.sends ? at : there, n);
        (way.sends ? box.written : box.read).fetch_add(n);
        at += n, bytes -= n, moved = true;
        if (bytes == 0) way.left.pop_front();
      }
      all &= way.left.empty();
    }
    if (c.aborted) return false;
    idle = moved ? 0 : idle + 1;
    if (!all && !moved) nap(idle);
  }
  return true;
}

struct Kernel {
  ncclComm* comm;
  uint64_t turn;
  std::vector<Work> works;
};

void CUDA_CB run(void* cookie) {
  const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(cookie));
  ncclComm& c = *kernel->comm;
  for (unsigned n = 0; c.executed != kernel->turn && !c.aborted; n++) nap(n);
  std::vector<Work> paired;
  bool ok = !c.aborted;
  for (const Work& w : kernel->works) {
    if (w.kind == CommKind::kSend || w.kind == CommKind::kRecv)
      paired.push_back(w);
    else
      ok = ok && collective(c, w);
  }
  ok = ok && pairs(c, paired);
  c.executed++;
}

// -- groups -----------------------------------------------------------------------------------------------------------

struct Part {
  NcclComm comm;
  CUstream stream;
  std::vector<Work> works;
};
std::atomic<int> g_launching{0};
thread_local int t_depth = 0;
thread_local std::vector<Part> t_parts;

int add(NcclComm comm, NcclStream stream, const Work& work, const char* what) {
  if (t_depth == 0) misuse(std::string(what) + ": outside of a group");
  const Use use(comm, what);
  if (comm->state != kSuccess) return comm->state;
  if (work.root < 0 || work.root >= comm->ranks) return kInvalidArgument;
  auto* const s = reinterpret_cast<CUstream>(stream);
  auto part = std::find_if(t_parts.begin(), t_parts.end(), [&](const Part& p) { return p.comm == comm; });
  if (part == t_parts.end()) part = t_parts.insert(part, {comm, s, {}});
  if (part->stream != s) misuse(std::string(what) + ": a group over two streams");
  part->works.push_back(work);
  return kSuccess;
}

Work reduces(CommKind kind, const void* send, void* recv, size_t count, int type, int op, int root, NcclComm comm) {
  Work w{kind, static_cast<CommType>(type)};
  w.send = static_cast<const uint8_t*>(send), w.recv = static_cast<uint8_t*>(recv), w.count = count, w.root = root;
  if (op < 5) {
    w.reduction = static_cast<CommReduction>(op);
  } else {
    const auto which = static_cast<size_t>(op - 5);
    if (which >= comm->reductions.size() || !comm->reductions[which].live) misuse("a reduction that there is not");
    const Reduction& r = comm->reductions[which];
    if (r.type != w.type) misuse("a reduction of another type");
    w.reduction = CommReduction::kPreMulSum, w.scalar = r.scalar, w.scalar_on_device = r.on_device;
  }
  return w;
}

void connect(ncclComm& c, const std::vector<Work>& works) {
  std::vector<std::pair<std::atomic<bool>*, std::atomic<bool>*>> ways;  // own, the other's
  for (const Work& w : works) {
    if (w.kind == CommKind::kSend)
      ways.emplace_back(&c.shared->connected[c.rank][w.root][0], &c.shared->connected[c.rank][w.root][1]);
    if (w.kind == CommKind::kRecv)
      ways.emplace_back(&c.shared->connected[w.root][c.rank][1], &c.shared->connected[w.root][c.rank][0]);
  }
  for (const auto& [own, other] : ways) own->store(true);
  for (const auto& [own, other] : ways)
    for (unsigned n = 0; !other->load() && !c.aborted; n++) nap(n);
}

std::atomic<int64_t> g_exactly{-1};

uint64_t late_us() {
  if (const int64_t exactly = g_exactly; exactly >= 0) return static_cast<uint64_t>(exactly);
  static const uint64_t most = number_of("FAKE_NCCL_LATE_US", 2000);
  thread_local uint64_t dice = std::hash<std::thread::id>()(std::this_thread::get_id());
  dice = dice * 6364136223846793005u + 1442695040888963407u;
  return most == 0 ? 0 : (dice >> 40) % ((dice >> 60) == 0 ? most : std::min<uint64_t>(most, 100)) + 1;
}

}  // namespace

// Every group from now on comes into its stream exactly so late.
EXPORT void fake_nccl_late(uint64_t us) { g_exactly = static_cast<int64_t>(us); }

// -- the calls --------------------------------------------------------------------------------------------------------

EXPORT int ncclGetVersion(int* version) { return *version = 22703, kSuccess; }
EXPORT const char* ncclGetErrorString(int result) { return result == kInvalidUsage ? "invalid usage" : "of the fake"; }
EXPORT const char* ncclGetLastError(NcclComm) { return ""; }

EXPORT int ncclGetUniqueId(DevproxyNcclId* id) {
  const int fd = memfd_create("fake-nccl", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, sizeof(Shared)) != 0) misuse("no memory for a communicator");
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->internal, sizeof id->internal, "/proc/%d/fd/%d", getpid(), fd);
  return kSuccess;
}

EXPORT int ncclCommInitRankConfig(NcclComm* to, int ranks, DevproxyNcclId id, int rank,
                                  devproxy::hal::cuda::NcclConfig* config) {
  require_context("ncclCommInitRankConfig");
  if (!config || config->magic != 0xcafebeef || config->blocking != 0) misuse("a communicator that blocks");
  if (ranks < 1 || ranks > static_cast<int>(kRanks) || rank < 0 || rank >= ranks) return kInvalidArgument;
  const int fd = open(id.internal, O_RDWR | O_CLOEXEC);
  if (fd < 0) return 2;
  void* const at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return 2;
  auto* const comm = new ncclComm;
  comm->shared = static_cast<Shared*>(at), comm->ranks = ranks, comm->rank = rank;
  *to = comm;
  comm->threads++;
  std::thread([comm] {
    Shared& s = *comm->shared;
    uint32_t agreed = 0;
    int result = kSuccess;
    if (!s.ranks.compare_exchange_strong(agreed, static_cast<uint32_t>(comm->ranks)) &&
        agreed != static_cast<uint32_t>(comm->ranks))
      result = kInvalidArgument;
    s.pids[comm->rank] = getpid();
    s.gpus[comm->rank] = cuda().gpu();
    s.joined++;
    while (result == kSuccess && s.joined < static_cast<uint32_t>(comm->ranks) && !comm->aborted) usleep(300);
    for (int r = 0; result == kSuccess && r < comm->ranks; r++)
      if (r != comm->rank && s.gpus[r] == cuda().gpu()) result = kInvalidUsage;  // one GPU, two ranks
    usleep(static_cast<useconds_t>(late_us()));
    comm->state = result;
    comm->threads--;
  }).detach();
  return kInProgress;
}

EXPORT int ncclCommGetAsyncError(NcclComm comm, int* error) {
  if (comm->magic != 0x4e43434cfaceULL) misuse("ncclCommGetAsyncError: one that has ended");
  *error = comm->state;
  return kSuccess;
}

EXPORT int ncclCommFinalize(NcclComm comm) {
  {
    const Use use(comm, "ncclCommFinalize");
    comm->state = kInProgress;
  }
  comm->finalized = true;
  comm->threads++;
  std::thread([comm] {
    for (unsigned n = 0; comm->executed < comm->launched; n++) nap(n);
    comm->state = kSuccess;
    comm->threads--;
  }).detach();
  return kInProgress;
}

// As NCCL's proxies may: until the others have left too, or their processes have ended. FAKE_NCCL_LEAVE_MS: at most so long.
static void wait_for_others(ncclComm& c) {
  static const uint64_t most_ms = number_of("FAKE_NCCL_LEAVE_MS", 100);
  c.shared->gone[c.rank] = true;
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(most_ms);
  for (int r = 0; r < c.ranks; r++)
    while (c.shared->pids[r] != 0 && !c.shared->gone[r] && kill(c.shared->pids[r], 0) == 0 &&
           std::chrono::steady_clock::now() < until)
      usleep(300);
}

EXPORT int ncclCommDestroy(NcclComm comm) {
  if (comm->magic != 0x4e43434cfaceULL) misuse("ncclCommDestroy: one that has ended");
  if (!comm->finalized || comm->state == kInProgress) misuse("ncclCommDestroy: it was not finalized");
  wait_for_others(*comm);
  for (unsigned n = 0; comm->threads != 0; n++) nap(n);
  comm->magic = 0;  // stays, so that a late use shows
  return kSuccess;
}

// Comes back when nothing of it runs any more.
EXPORT int ncclCommAbort(NcclComm comm) {
  if (comm->magic != 0x4e43434cfaceULL) misuse("ncclCommAbort: one that has ended");
  comm->aborted = true;
  for (unsigned n = 0; comm->threads != 0; n++) nap(n);
  wait_for_others(*comm);
  comm->magic = 0;
  return kSuccess;
}

EXPORT int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, NcclComm comm) {
  const Use use(comm, "ncclRedOpCreatePreMulSum");
  Reduction r;
  r.type = static_cast<CommType>(type), r.on_device = residence == 0;
  if (r.on_device)
    r.scalar = reinterpret_cast<uint64_t>(scalar);
  else
    std::memcpy(&r.scalar, scalar, comm_type_bytes(r.type));
  comm->reductions.push_back(r);
  *op = static_cast<int>(comm->reductions.size()) + 4;
  return kSuccess;
}

EXPORT int ncclRedOpDestroy(int op, NcclComm comm) {
  const Use use(comm, "ncclRedOpDestroy");
  const auto which = static_cast<size_t>(op - 5);
  if (which >= comm->reductions.size() || !comm->reductions[which].live) misuse("ncclRedOpDestroy: there is none");
  comm->reductions[which].live = false;
  return kSuccess;
}

EXPORT int ncclGroupStart() { return t_depth++, kSuccess; }

EXPORT int ncclGroupEnd() {
  if (t_depth == 0) misuse("ncclGroupEnd: no group of this thread");
  if (--t_depth > 0) return kSuccess;
  std::vector<Part> parts = std::move(t_parts);
  t_parts.clear();
  if (parts.empty()) return kSuccess;
  for (const Part& part : parts) {
    const Use use(part.comm, "ncclGroupEnd");
    part.comm->state = kInProgress;
    part.comm->threads++;
  }
  // A pair is connected at its first send or receive, which may last until the other rank comes there.
  bool paired = false;
  for (const Part& part : parts)
    for (const Work& w : part.works) paired |= w.kind == CommKind::kSend || w.kind == CommKind::kRecv;
  static const bool many = number_of("FAKE_NCCL_MANY", 0) != 0;
  if (g_launching != 0 && !many) misuse("ncclGroupEnd: the last group is not in its stream yet");
  if (!paired) g_launching++;
  std::thread([parts = std::move(parts), paired] {
    usleep(static_cast<useconds_t>(late_us()));
    for (const Part& part : parts) connect(*part.comm, part.works);
    cuda().set_current(static_cast<CUcontext>(cuda().primary()));
    for (const Part& part : parts) {
      ncclComm& c = *part.comm;
      int result = kSuccess;
      if (!c.aborted) {
        auto* const kernel = new Kernel{&c, c.launched++, part.works};
        if (cuda().launch(part.stream, &run, kernel) != CUDA_SUCCESS) result = kCudaError;
      }
      if (&part == &parts.back() && !paired) g_launching--;
      c.state = result;
      c.threads--;
    }
  }).detach();
  return kInProgress;
}

EXPORT int ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, NcclComm comm, NcclStream s) {
  return add(comm, s, reduces(CommKind::kAllReduce, send, recv, count, type, op, 0, comm), "ncclAllReduce");
}
EXPORT int ncclReduce(const void* send, void* recv, size_t count, int type, int op, int root, NcclComm comm,
                      NcclStream s) {
  return add(comm, s, reduces(CommKind::kReduce, send, recv, count, type, op, root, comm), "ncclReduce");
}
EXPORT int ncclReduceScatter(const void* send, void* recv, size_t count, int type, int op, NcclComm comm,
                             NcclStream s) {
  return add(comm, s, reduces(CommKind::kReduceScatter, send, recv, count, type, op, 0, comm), "ncclReduceScatter");
}
EXPORT int ncclBroadcast(const void* send, void* recv, size_t count, int type, int root, NcclComm comm, NcclStream s) {
  return add(comm, s, reduces(CommKind::kBroadcast, send, recv, count, type, 0, root, comm), "ncclBroadcast");
}
EXPORT int ncclAllGather(const void* send, void* recv, size_t count, int type, NcclComm comm, NcclStream s) {
  return add(comm, s, reduces(CommKind::kAllGather, send, recv, count, type, 0, 0, comm), "ncclAllGather");
}
EXPORT int ncclSend(const void* from, size_t count, int type, int peer, NcclComm comm, NcclStream s) {
  return add(comm, s, reduces(CommKind::kSend, from, nullptr, count, type, 0, peer, comm), "ncclSend");
}
EXPORT int ncclRecv(void* to, size_t count, int type, int peer, NcclComm comm, NcclStream s) {
  return add(comm, s, reduces(CommKind::kRecv, nullptr, to, count, type, 0, peer, comm), "ncclRecv");
}
