// SPDX-License-Identifier: Apache-2.0
// User objects, and the reaper: one thread that calls their destructors and lets go of what a graph still uses on the
// device when its handle is gone.
#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <deque>

#include "devproxy/interceptors/graph/client_graph.h"

namespace devproxy::sa::graph {

namespace {

constexpr uint64_t kObjectTag = 0xc3;
constexpr unsigned kMaxCount = 0x7fffffff;  // cuda.h: not larger than INT_MAX

class Reaper {
 public:
  struct Item {
    client::DeviceState* d = nullptr;  // nullptr: at once
    uint32_t stream = 0;
    uint64_t position = 0;
    std::shared_ptr<void> last;  // let go first
    CUhostFn fn = nullptr;
    void* data = nullptr;
    bool ready() const { return !d || d->conn().completed(stream, position) || d->conn().error_now_and_then() != kOk; }
  };

  void add(Item item) {
    std::lock_guard lock(mu_);
    items_.push_back(std::move(item));
    if (!started_) {
      pthread_t t;
      started_ = pthread_create(&t, nullptr, &Reaper::run, this) == 0;
      if (started_) pthread_detach(t);
    }
    wake_.notify_one();
  }

 private:
  static void* run(void* self) {
    static_cast<Reaper*>(self)->loop();
    return nullptr;
  }

  void loop() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);  // the job's signals are for the job's own threads
    std::unique_lock lock(mu_);
    for (;;) {
      wake_.wait(lock, [&] { return !items_.empty(); });
      // An item that waits holds up no other: a destructor may be what its launch waits for.
      bool any = false;
      for (size_t i = 0; i < items_.size(); ++i) {
        if (!items_[i].ready()) continue;
        Item item = std::move(items_[i]);
        items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(i));
        lock.unlock();
        item.last.reset();
        if (item.fn) item.fn(item.data);
        lock.lock();
        any = true;
        break;
      }
      if (!any) wake_.wait_for(lock, std::chrono::milliseconds(2));
    }
  }

  std::mutex mu_;
  std::condition_variable wake_;
  std::deque<Item> items_;
  bool started_ = false;
};

Reaper& reaper() {
  static auto* r = new Reaper;  // never destroyed
  return *r;
}

std::mutex g_object_mu;  // a leaf
std::unordered_map<uint64_t, UserObject*>& objects() {
  static auto* m = new std::unordered_map<uint64_t, UserObject*>;
  return *m;
}

UserObject* object_of(CUuserObject h) {
  std::lock_guard lock(g_object_mu);
  const auto it = objects().find(bits(h));
  return it == objects().end() ? nullptr : it->second;
}

}  // namespace

void when_complete(client::DeviceState* d, uint32_t stream_index, uint64_t position, std::shared_ptr<void> then) {
  Reaper::Item item;
  item.d = d;
  item.stream = stream_index;
  item.position = position;
  item.last = std::move(then);
  reaper().add(std::move(item));
}

void retain(UserObject* o, uint64_t count) {
  std::lock_guard lock(g_object_mu);
  o->count += count;
}

void release(UserObject* o, uint64_t count) {
  {
    std::lock_guard lock(g_object_mu);
    o->count -= std::min(count, o->count);
    if (o->count) return;
    objects().erase(o->handle);
  }
  Reaper::Item item;
  item.fn = o->destroy;
  item.data = o->data;
  reaper().add(std::move(item));
  delete o;
}

CUresult cuUserObjectCreate(CUuserObject* object_out, void* ptr, CUhostFn destroy, unsigned int initialRefcount,
                            unsigned int flags) {
  if (flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC || initialRefcount == 0 || initialRefcount > kMaxCount)
    return CUDA_ERROR_INVALID_VALUE;
  static uint64_t serial = 0;
  std::lock_guard lock(g_object_mu);
  auto* o = new UserObject{kObjectTag << 56 | ++serial << 4, initialRefcount, destroy, ptr};
  objects()[o->handle] = o;
  *object_out = handle<CUuserObject>(o->handle);
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned int count) {
  UserObject* o = object_of(object);
  if (!o || count == 0 || count > kMaxCount) return CUDA_ERROR_INVALID_VALUE;
  retain(o, count);
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned int count) {
  UserObject* o = object_of(object);
  if (!o || count == 0 || count > kMaxCount) return CUDA_ERROR_INVALID_VALUE;
  release(o, count);
  return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph hGraph, CUuserObject object, unsigned int count, unsigned int flags) {
  if (flags & ~static_cast<unsigned>(CU_GRAPH_USER_OBJECT_MOVE)) return CUDA_ERROR_INVALID_VALUE;
  UserObject* o = object_of(object);
  if (!o || count == 0 || count > kMaxCount) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mu());
  Graph* g = graph_of(hGraph);
  if (!g) return CUDA_ERROR_INVALID_VALUE;
  if (!(flags & CU_GRAPH_USER_OBJECT_MOVE)) retain(o, count);
  g->objects[o] += count;
  return CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph hGraph, CUuserObject object, unsigned int count) {
  UserObject* o = object_of(object);
  if (!o || count == 0 || count > kMaxCount) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mu());
  Graph* g = graph_of(hGraph);
  if (!g) return CUDA_ERROR_INVALID_VALUE;
  const auto it = g->objects.find(o);
  if (it == g->objects.end() || it->second < count) return CUDA_ERROR_INVALID_VALUE;
  it->second -= count;
  if (it->second == 0) g->objects.erase(it);
  release(o, count);
  return CUDA_SUCCESS;
}

}  // namespace devproxy::sa::graph
