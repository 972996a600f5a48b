// SPDX-License-Identifier: Apache-2.0
// Memory that graphs allocate. A graph's allocation is an allocation of the client like any other, made with its node:
// so its address holds for all launches, it is in every dump, and no device needs to know of it. What a launch adds is
// bookkeeping: whether the memory is allocated now, and by whom it may be freed.
//
// So the memory of a graph's allocations is never used for two of them, and OUT_OF_MEMORY is said when a node is added,
// not by a launch. cuda.h lets a driver do better, and asks for none of it.
#include <string.h>

#include <algorithm>
#include <utility>

#include "devproxy/csrc/client/alloc_bidir.h"
#include "devproxy/interceptors/graph/client_graph.h"
#include "devproxy/interceptors/graph/hooks.h"

namespace devproxy::sa::graph {

using client::DeviceState;
using client::log;
using client::StreamObj;

constinit std::atomic<size_t> g_memories{0};

namespace {

struct Entry {
  std::weak_ptr<GraphMemory> memory;
  uint64_t owner = 0;                                // handle of the graph with its node
  bool freed_inside = false, freed_outside = false;  // that graph, or another one, has a free node for it
};
struct Account {
  uint64_t used = 0;
  uint64_t high[2] = {};  // of what is used, of what is reserved: each is reset by itself
};

std::mutex g_memory_mu;  // a leaf: guards what follows, and the last part of GraphMemory. Not held where one may go.
std::unordered_map<uint64_t, Entry>& entries() {
  static auto* m = new std::unordered_map<uint64_t, Entry>;  // never destroyed: threads outlive static destruction
  return *m;
}
Account g_accounts[client::kMaxDevices];

bool is_device(int device) { return device >= 0 && device < client::device_count(); }

// g_memory_mu held.
void note(GraphMemory* m, uint32_t stream, uint64_t position) {
  std::erase_if(m->uses, [&](const client::Use& u) {
    return u.stream == stream || m->d->conn().completed(u.stream, u.position);
  });
  m->uses.push_back({stream, position});
}

// Of one allocation, also when it is gone.
bool same(const std::weak_ptr<GraphMemory>& a, const std::weak_ptr<GraphMemory>& b) {
  return !a.owner_before(b) && !b.owner_before(a);
}

std::shared_ptr<GraphMemory> memory_at(CUdeviceptr ptr) {
  std::lock_guard lock(g_memory_mu);
  const auto it = entries().find(ptr);
  return it == entries().end() ? nullptr : it->second.memory.lock();
}

// cuda.h, CUDA_MEM_ALLOC_NODE_PARAMS.
int32_t check(const CUDA_MEM_ALLOC_NODE_PARAMS& p) {
  const CUmemPoolProps& pool = p.poolProps;
  if (p.bytesize == 0 || pool.handleTypes != CU_MEM_HANDLE_TYPE_NONE) return kInvalidValue;
  if (pool.allocType != CU_MEM_ALLOCATION_TYPE_PINNED || pool.location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    if (pool.allocType == CU_MEM_ALLOCATION_TYPE_INVALID || pool.location.type == CU_MEM_LOCATION_TYPE_INVALID)
      return kInvalidValue;
    log(client::Level::kWarn, "a graph's allocation is refused that is not device memory of one GPU");
    return kNotSupported;
  }
  const auto devices = static_cast<size_t>(client::device_count());
  if (!is_device(pool.location.id) || p.accessDescCount > devices || (p.accessDescCount && !p.accessDescs))
    return kInvalidValue;
  for (size_t i = 0; i < p.accessDescCount; ++i) {
    const CUmemAccessDesc& a = p.accessDescs[i];
    if (a.location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_device(a.location.id)) return kInvalidValue;
    const bool own = a.location.id == pool.location.id, none = a.flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
    if (own && none) return kInvalidValue;
    if (!own && !none) {
      log(client::Level::kWarn, "a graph's allocation on GPU %d that GPU %d uses is refused: there is no peer access",
          pool.location.id, a.location.id);
      return kNotSupported;
    }
  }
  return kOk;
}

}  // namespace

GraphMemory::~GraphMemory() {
  if (addr == 0) return;
  {
    std::lock_guard lock(g_memory_mu);
    entries().erase(addr);
    g_accounts[d->ordinal()].used -= bytes;
  }
  g_memories.fetch_sub(1, std::memory_order_relaxed);
  // An error only says that the server is gone, and then its memory is too.
  static_cast<void>(d->free_behind(addr, uses));
}

// -- nodes ----------------------------------------------------------------------------------------------------------

int32_t refuse_memory(const char* what) {
  log(client::Level::kWarn, "%s is refused for a graph that allocates or frees memory", what);
  return kNotSupported;
}

int32_t fill_alloc(Node* n, const CUDA_MEM_ALLOC_NODE_PARAMS& p) {
  if (const int32_t rc = check(p); rc != kOk) return rc;
  int32_t error = kOk;
  DeviceState* d = client::device_state(p.poolProps.location.id, &error);
  if (!d) return error;
  auto m = std::make_shared<GraphMemory>();
  const uint64_t addr = d->allocate_for_graph(p.bytesize, &error);
  if (!addr) return error;
  m->d = d;
  m->addr = addr;
  m->bytes = BidirAllocator::round_up(p.bytesize);
  if (p.accessDescCount) m->access.assign(p.accessDescs, p.accessDescs + p.accessDescCount);
  m->given = p;
  m->given.accessDescs = m->access.empty() ? nullptr : m->access.data();
  m->given.dptr = addr;
  {
    std::lock_guard lock(g_memory_mu);
    entries()[addr].memory = m;
    Account& a = g_accounts[d->ordinal()];
    a.used += m->bytes;
    for (uint64_t& high : a.high) high = std::max(high, a.used);
  }
  g_memories.fetch_add(1, std::memory_order_relaxed);
  n->type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
  n->device = d->ordinal();
  n->memory = std::move(m);
  return kOk;
}

int32_t fill_free(Node* n, CUdeviceptr ptr) {
  const auto m = memory_at(ptr);
  if (!m) return kInvalidValue;
  n->type = CU_GRAPH_NODE_TYPE_MEM_FREE;
  n->device = m->d->ordinal();
  n->freed = m;
  n->freed_addr = ptr;
  return kOk;
}

int32_t admit_memory(Graph* g, const Node& n) {
  if (!is_memory(n.type)) return kOk;
  if (g->inside) return refuse_memory("a child graph");
  std::lock_guard lock(g_memory_mu);
  if (n.memory) {
    entries()[n.memory->addr].owner = g->handle;
  } else {
    const auto it = entries().find(n.freed_addr);
    if (it == entries().end() || it->second.memory.expired() || !same(it->second.memory, n.freed)) return kInvalidValue;
    Entry& e = it->second;
    // cuda.h, cuGraphAddMemAllocNode: memory is freed in its own graph or in others, and once in each.
    const bool own = e.owner == g->handle;
    const bool again = std::any_of(g->nodes.begin(), g->nodes.end(), [&](const auto& other) {
      return other->type == CU_GRAPH_NODE_TYPE_MEM_FREE && same(other->freed, n.freed);
    });
    if (again || e.freed_inside || (own && e.freed_outside)) return kInvalidValue;
    (own ? e.freed_inside : e.freed_outside) = true;
  }
  g->has_memory = true;
  return kOk;
}

bool same_memory(const Node& to, const Node& from) { return to.memory == from.memory && same(to.freed, from.freed); }

CUresult cuGraphAddMemAllocNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS* nodeParams) {
  CUgraphNodeParams p{};
  p.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
  memcpy(&p.alloc, nodeParams, sizeof *nodeParams);
  const CUresult rc = graph::cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, nullptr, numDependencies, &p);
  if (rc == CUDA_SUCCESS) nodeParams->dptr = p.alloc.dptr;
  return rc;
}

CUresult cuGraphAddMemFreeNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                               size_t numDependencies, CUdeviceptr dptr) {
  CUgraphNodeParams p{};
  p.type = CU_GRAPH_NODE_TYPE_MEM_FREE;
  p.free.dptr = dptr;
  return graph::cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, nullptr, numDependencies, &p);
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS* params_out) {
  std::lock_guard lock(mu());
  const Node* n = node_of(hNode);
  if (!n || !n->memory) return CUDA_ERROR_INVALID_VALUE;
  *params_out = n->memory->given;
  return CUDA_SUCCESS;
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr* dptr_out) {
  std::lock_guard lock(mu());
  const Node* n = node_of(hNode);
  if (!n || n->type != CU_GRAPH_NODE_TYPE_MEM_FREE) return CUDA_ERROR_INVALID_VALUE;
  *dptr_out = n->freed_addr;
  return CUDA_SUCCESS;
}

// -- launches -------------------------------------------------------------------------------------------------------

void gather_memory(Exec* x) {
  for (const Node* n : x->order) {
    if (!n->memory) continue;
    const bool returned = std::any_of(x->order.begin(), x->order.end(), [&](const Node* other) {
      return other->type == CU_GRAPH_NODE_TYPE_MEM_FREE && same(other->freed, n->memory);
    });
    (returned ? x->returns : x->leaves).push_back(n->memory);
  }
  for (const Node* n : x->order) {
    const bool own =
        std::any_of(x->returns.begin(), x->returns.end(), [&](const auto& m) { return same(n->freed, m); });
    if (n->type == CU_GRAPH_NODE_TYPE_MEM_FREE && !own) x->frees.push_back(n->freed);
  }
}

bool memory_is_free(const Exec& x) {
  if (!x.image->has_memory) return true;
  std::vector<std::shared_ptr<GraphMemory>> foreign;
  for (const auto& m : x.frees) foreign.push_back(m.lock());
  std::lock_guard lock(g_memory_mu);
  auto live = [](const auto& m) { return m && m->self; };
  if (!std::all_of(foreign.begin(), foreign.end(), live)) return false;
  if (x.flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) return true;
  return std::none_of(x.leaves.begin(), x.leaves.end(), live) && std::none_of(x.returns.begin(), x.returns.end(), live);
}

void memory_launched(Exec* x, uint32_t stream_index, uint64_t position) {
  if (!x->image->has_memory) return;
  std::vector<std::shared_ptr<GraphMemory>> gone;
  for (const auto& m : x->frees) gone.push_back(m.lock());
  gone.insert(gone.end(), x->returns.begin(), x->returns.end());
  std::lock_guard lock(g_memory_mu);
  for (const auto& m : x->leaves) {
    note(m.get(), stream_index, position);
    m->self = m;
  }
  for (const auto& m : gone) {
    if (!m) continue;  // somebody else has freed it meanwhile, and its graph is gone
    note(m.get(), stream_index, position);
    m->self.reset();  // `gone` has it still
  }
}

void forget_memory(Exec* x) {
  if (!x->image->has_memory) return;
  x->leaves.clear();
  x->returns.clear();
  for (Node* n : x->order) n->memory.reset();
}

// -- outside of graphs ----------------------------------------------------------------------------------------------

MemoryState memory_state(CUdeviceptr ptr) {
  const auto m = memory_at(ptr);
  if (!m) return MemoryState::kNone;
  std::lock_guard lock(g_memory_mu);
  return m->self ? MemoryState::kLive : MemoryState::kIdle;
}

CUresult free_memory(CUdeviceptr ptr, StreamObj* s) {
  const auto m = memory_at(ptr);
  if (!m) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(g_memory_mu);
  if (!m->self) return CUDA_ERROR_INVALID_VALUE;
  m->self.reset();  // `m` has it still
  if (s)
    note(m.get(), s->index, s->last.load(std::memory_order_acquire));
  else
    m->uses.clear();
  return CUDA_SUCCESS;
}

void free_all_memory(DeviceState* d) {
  std::vector<std::shared_ptr<GraphMemory>> all;
  std::lock_guard lock(g_memory_mu);
  for (const auto& [addr, entry] : entries())
    if (auto m = entry.memory.lock()) all.push_back(std::move(m));
  for (const auto& m : all)
    if (m->d == d) m->self.reset();
}

// Nothing is held back: what no graph has any more was given back at once.
CUresult cuDeviceGraphMemTrim(CUdevice device) { return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void* value) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard lock(g_memory_mu);
  const Account& a = g_accounts[device];
  auto* out = static_cast<cuuint64_t*>(value);
  switch (attr) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: *out = a.used; return CUDA_SUCCESS;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: *out = a.high[0]; return CUDA_SUCCESS;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: *out = a.high[1]; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void* value) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (attr != CU_GRAPH_MEM_ATTR_USED_MEM_HIGH && attr != CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
    return CUDA_ERROR_INVALID_VALUE;
  if (*static_cast<cuuint64_t*>(value) != 0) return CUDA_ERROR_INVALID_VALUE;  // cuda.h: it can only be reset
  std::lock_guard lock(g_memory_mu);
  Account& a = g_accounts[device];
  a.high[attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH] = a.used;
  return CUDA_SUCCESS;
}

}  // namespace devproxy::sa::graph
