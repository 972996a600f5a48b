// SPDX-License-Identifier: Apache-2.0
// Graphs and stream capture through the runtime: nodes by host address, every form of a node's parameters there and
// back, updates, errors. The kernels are a module of the device under test, registered as the compiler's code does it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "program.h"

extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFatBinaryEnd(void**);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*);
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int);
}

struct Wrapper {
  uint32_t magic, version;
  const void* image;
  const void* more;
};

static char affine_host, fill_host, table_host;
constexpr uint64_t kCount = 1024;
constexpr size_t kBytes = kCount * 4;

static void register_all() {
  static Wrapper wrapper;
  const int fd = open(getenv("TEST_KERNELS"), O_RDONLY | O_CLOEXEC);
  struct stat st;
  EXPECT(fd >= 0 && fstat(fd, &st) == 0);
  const void* image = mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  EXPECT(image != MAP_FAILED);
  close(fd);
  wrapper = {0x466243b1, 1, image, nullptr};
  void** module = __cudaRegisterFatBinary(&wrapper);
  __cudaRegisterFunction(module, &affine_host, &affine_host, "affine", -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  __cudaRegisterFunction(module, &fill_host, &fill_host, "fill", -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  __cudaRegisterVar(module, &table_host, &table_host, "table", 0, 16, 0, 0);
  __cudaRegisterFatBinaryEnd(module);
}

static void* words() {
  void* p;
  CHECK(cudaMalloc(&p, kBytes));
  CHECK(cudaMemset(p, 0, kBytes));
  CHECK(cudaDeviceSynchronize());
  return p;
}

static void expect_words(const void* device, uint32_t value) {
  std::vector<uint32_t> all(kCount);
  CHECK(cudaMemcpy(all.data(), device, kBytes, cudaMemcpyDeviceToHost));
  for (const uint32_t w : all)
    if (w != value) {
      fprintf(stderr, "a word is %u, expected %u\n", w, value);
      exit(1);
    }
}

struct Affine {
  void* words;
  uint32_t factor, add;
  uint64_t count = kCount;
  void* list[4] = {&words, &factor, &add, &count};
  cudaKernelNodeParams node() {
    cudaKernelNodeParams p{};
    p.func = &affine_host;
    p.gridDim = p.blockDim = dim3(1);
    p.kernelParams = list;
    return p;
  }
};

static void launch(void* p, uint32_t factor, uint32_t add, cudaStream_t s) {
  Affine a{p, factor, add};
  CHECK(cudaLaunchKernel(&affine_host, dim3(1), dim3(1), a.list, 0, s));
}

static void CUDART_CB add_to(void* data) { ++*static_cast<std::atomic<int>*>(data); }

static void run(cudaGraph_t g, cudaStream_t s) {
  cudaGraphExec_t x;
  CHECK(cudaGraphInstantiate(&x, g, 0));
  CHECK(cudaGraphUpload(x, s));
  CHECK(cudaGraphLaunch(x, s));
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaGraphExecDestroy(x));
}

static void nodes(cudaStream_t s) {
  void *p = words(), *q = words();
  cudaGraph_t g, again;
  CHECK(cudaGraphCreate(&g, 0));
  cudaGraphNode_t k, m, c, h, to, from, back;
  Affine a{p, 2, 5};
  cudaKernelNodeParams params = a.node();
  CHECK(cudaGraphAddKernelNode(&k, g, nullptr, 0, &params));
  a.add = 99;  // copied
  cudaKernelNodeParams got{};
  CHECK(cudaGraphKernelNodeGetParams(k, &got));
  EXPECT(got.func == &affine_host);
  EXPECT(got.gridDim.x == 1 && got.extra == nullptr);
  EXPECT(*static_cast<uint32_t*>(got.kernelParams[2]) == 5);
  uint32_t six = 6;
  void* changed[] = {got.kernelParams[0], got.kernelParams[1], &six, got.kernelParams[3]};
  got.kernelParams = changed;
  CHECK(cudaGraphKernelNodeSetParams(k, &got));
  got.func = changed;
  EXPECT_RESULT(cudaGraphKernelNodeSetParams(k, &got), cudaErrorInvalidDeviceFunction);

  cudaMemsetParams set{};
  set.dst = q;
  set.value = 7;
  set.elementSize = 4;
  set.width = kCount;
  set.height = 1;
  CHECK(cudaGraphAddMemsetNode(&m, g, &k, 1, &set));
  cudaMemsetParams set_back{};
  CHECK(cudaGraphMemsetNodeGetParams(m, &set_back));
  EXPECT(set_back.dst == q && set_back.value == 7 && set_back.width == kCount);
  set_back.value = 8;
  CHECK(cudaGraphMemsetNodeSetParams(m, &set_back));

  std::vector<uint32_t> host(kCount), other(kCount);
  CHECK(cudaGraphAddMemcpyNode1D(&c, g, &m, 1, host.data(), p, kBytes, cudaMemcpyDeviceToHost));
  cudaMemcpy3DParms box{};
  CHECK(cudaGraphMemcpyNodeGetParams(c, &box));
  EXPECT(box.kind == cudaMemcpyDeviceToHost && box.srcPtr.ptr == p && box.dstPtr.ptr == host.data());
  EXPECT(box.extent.width == kBytes && box.extent.height == 1 && box.extent.depth == 1);
  box.dstPtr.ptr = other.data();
  CHECK(cudaGraphMemcpyNodeSetParams(c, &box));
  box.dstPtr.ptr = nullptr;
  EXPECT_RESULT(cudaGraphMemcpyNodeSetParams(c, &box), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaGraphAddMemcpyNode1D(&to, g, nullptr, 0, q, p, 4, static_cast<cudaMemcpyKind>(9)),
                cudaErrorInvalidMemcpyDirection);
  CHECK(cudaGraphAddMemcpyNode1D(&back, g, &c, 1, q, p, kBytes / 2, cudaMemcpyDefault));

  // a variable of device code, there and back
  uint32_t table[4] = {1, 2, 3, 4}, seen[4] = {};
  CHECK(
      cudaGraphAddMemcpyNodeToSymbol(&to, g, nullptr, 0, &table_host, table, sizeof table, 0, cudaMemcpyHostToDevice));
  CHECK(cudaGraphAddMemcpyNodeFromSymbol(&from, g, &to, 1, seen, &table_host, 8, 8, cudaMemcpyDeviceToHost));
  EXPECT_RESULT(cudaGraphAddMemcpyNodeFromSymbol(&from, g, &to, 1, seen, &seen, 8, 8, cudaMemcpyDeviceToHost),
                cudaErrorInvalidSymbol);
  std::atomic<int> calls{0};
  const cudaHostNodeParams function{add_to, &calls};
  CHECK(cudaGraphAddHostNode(&h, g, &from, 1, &function));
  cudaHostNodeParams function_back{};
  CHECK(cudaGraphHostNodeGetParams(h, &function_back));
  EXPECT(function_back.fn == add_to && function_back.userData == &calls);
  cudaGraphNodeType type;
  CHECK(cudaGraphNodeGetType(h, &type));
  EXPECT(type == cudaGraphNodeTypeHost);
  cudaLaunchAttributeValue value{}, value_back{};
  value.priority = -1;
  CHECK(cudaGraphKernelNodeSetAttribute(k, cudaLaunchAttributePriority, &value));
  CHECK(cudaGraphKernelNodeGetAttribute(k, cudaLaunchAttributePriority, &value_back));
  EXPECT(value_back.priority == -1);
  CHECK(cudaGraphDebugDotPrint(g, "/dev/null", cudaGraphDebugDotFlagsVerbose));

  CHECK(cudaGraphClone(&again, g));
  run(g, s);
  expect_words(p, 6);
  EXPECT(other[0] == 6 && other[kCount - 1] == 6 && host[0] == 0);
  std::vector<uint32_t> half(kCount);
  CHECK(cudaMemcpy(half.data(), q, kBytes, cudaMemcpyDeviceToHost));
  EXPECT(half[0] == 6 && half[kCount / 2 - 1] == 6 && half[kCount / 2] == 8);
  EXPECT(seen[0] == 3 && seen[1] == 4 && seen[2] == 0);
  EXPECT(calls == 1);
  run(again, s);
  expect_words(p, 18);
  EXPECT(calls == 2);

  // the one form for all
  cudaGraph_t any;
  cudaGraphNode_t n, last;
  CHECK(cudaGraphCreate(&any, 0));
  Affine b{q, 0, 40};
  cudaGraphNodeParams np{};
  np.type = cudaGraphNodeTypeKernel;
  np.kernel.func = &affine_host;
  np.kernel.gridDim = np.kernel.blockDim = dim3(1);
  np.kernel.kernelParams = b.list;
#if CUDART_VERSION >= 13000
  CHECK(cudaGraphAddNode(&n, any, nullptr, nullptr, 0, &np));
#else
  CHECK(cudaGraphAddNode(&n, any, nullptr, 0, &np));
#endif
  b.factor = 1;
  b.add = 2;
  cudaGraphEdgeData programmatic{};
  programmatic.type = cudaGraphDependencyTypeProgrammatic;
  programmatic.from_port = cudaGraphKernelNodePortProgrammatic;
#if CUDART_VERSION >= 13000
  CHECK(cudaGraphAddNode(&last, any, &n, &programmatic, 1, &np));
#else
  CHECK(cudaGraphAddNode_v2(&last, any, &n, &programmatic, 1, &np));
#endif
  size_t count = 1;
  cudaGraphNode_t one = nullptr, two = nullptr;
  cudaGraphEdgeData data{};
#if CUDART_VERSION >= 13000
  EXPECT_RESULT(cudaGraphGetEdges(any, &one, &two, nullptr, &count), cudaErrorLossyQuery);
  CHECK(cudaGraphGetEdges(any, &one, &two, &data, &count));
#else
  EXPECT_RESULT(cudaGraphGetEdges(any, &one, &two, &count), cudaErrorLossyQuery);
  CHECK(cudaGraphGetEdges_v2(any, &one, &two, &data, &count));
#endif
  EXPECT(count == 1 && one == n && two == last && data.type == cudaGraphDependencyTypeProgrammatic);
  cudaGraphNodeParams empty{};
  empty.type = cudaGraphNodeTypeGraph;
  empty.graph.graph = any;
  cudaGraph_t outer;
  CHECK(cudaGraphCreate(&outer, 0));
#if CUDART_VERSION >= 13000
  CHECK(cudaGraphAddNode(&n, outer, nullptr, nullptr, 0, &empty));
#else
  CHECK(cudaGraphAddNode(&n, outer, nullptr, 0, &empty));
#endif
  run(outer, s);
  expect_words(q, 42);
  for (cudaGraph_t each : {g, again, any, outer}) CHECK(cudaGraphDestroy(each));
  EXPECT_RESULT(cudaGraphDestroy(g), cudaErrorInvalidValue);
  EXPECT(cudaGetLastError() == cudaErrorInvalidValue);  // as any failure of the runtime
  CHECK(cudaFree(p));
  CHECK(cudaFree(q));
}

static void captures(cudaStream_t s) {
  void *p = words(), *q = words();
  cudaStream_t side;
  cudaEvent_t fork, join;
  CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  auto record = [&](uint32_t add) {
    cudaGraph_t g;
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    launch(p, 1, add, s);
    CHECK(cudaEventRecord(fork, s));
    CHECK(cudaStreamWaitEvent(side, fork, 0));
    CHECK(cudaMemsetAsync(q, 1, kBytes, side));
    CHECK(cudaEventRecord(join, side));
    launch(p, 2, 0, s);
    CHECK(cudaStreamWaitEvent(s, join, 0));
    CHECK(cudaMemcpyAsync(q, p, kBytes / 2, cudaMemcpyDeviceToDevice, s));
    CHECK(cudaStreamEndCapture(s, &g));
    size_t n = 0;
    CHECK(cudaGraphGetNodes(g, nullptr, &n));
    EXPECT(n == 4);
    return g;
  };
  cudaGraph_t g = record(3), g2 = record(10);
  expect_words(p, 0);
  cudaGraphExec_t x;
  cudaGraphInstantiateParams how{};
  CHECK(cudaGraphInstantiateWithParams(&x, g, &how));
  EXPECT(how.result_out == cudaGraphInstantiateSuccess);
  CHECK(cudaGraphLaunch(x, s));
  CHECK(cudaStreamSynchronize(s));
  expect_words(p, 6);
  cudaGraphExecUpdateResultInfo info{};
  CHECK(cudaGraphExecUpdate(x, g2, &info));
  EXPECT(info.result == cudaGraphExecUpdateSuccess);
  CHECK(cudaGraphLaunch(x, s));
  CHECK(cudaStreamSynchronize(s));
  expect_words(p, 32);
  cudaGraphNode_t all[4];
  size_t n = 4;
  CHECK(cudaGraphGetNodes(g, all, &n));
  Affine a{p, 0, 1};
  cudaKernelNodeParams params = a.node();
  CHECK(cudaGraphExecKernelNodeSetParams(x, all[0], &params));
  CHECK(cudaGraphLaunch(x, s));
  CHECK(cudaStreamSynchronize(s));
  expect_words(p, 2);
  unsigned enabled = 0;
  CHECK(cudaGraphNodeSetEnabled(x, all[0], 0));
  CHECK(cudaGraphNodeGetEnabled(x, all[0], &enabled));
  EXPECT(enabled == 0);
  CHECK(cudaGraphLaunch(x, s));
  CHECK(cudaStreamSynchronize(s));
  expect_words(p, 4);
  cudaGraph_t shorter;
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
  launch(p, 1, 1, s);
  CHECK(cudaStreamEndCapture(s, &shorter));
  EXPECT_RESULT(cudaGraphExecUpdate(x, shorter, &info), cudaErrorGraphExecUpdateFailure);
  EXPECT(info.result == cudaGraphExecUpdateErrorTopologyChanged);

  // what may not be called meanwhile, by the thread's mode
  void* more;
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  EXPECT_RESULT(cudaMalloc(&more, 16), cudaErrorStreamCaptureUnsupported);
  cudaGraph_t none = g;
  EXPECT_RESULT(cudaStreamEndCapture(s, &none), cudaErrorStreamCaptureInvalidated);
  EXPECT(none == nullptr);
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  CHECK(cudaMalloc(&more, 16));
  CHECK(cudaFree(more));
  CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  CHECK(cudaStreamEndCapture(s, &none));
  CHECK(cudaGraphDestroy(none));
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  EXPECT_RESULT(cudaEventQuery(fork), cudaErrorCapturedEvent);
  CHECK(cudaStreamEndCapture(s, &none));
  CHECK(cudaGraphDestroy(none));

  // user objects go with the last that holds them
  static std::atomic<int> gone{0};
  cudaUserObject_t object;
  CHECK(cudaUserObjectCreate(&object, &gone, add_to, 1, cudaUserObjectNoDestructorSync));
  CHECK(cudaGraphRetainUserObject(g, object, 1, cudaGraphUserObjectMove));
  cudaGraphExec_t y;
  CHECK(cudaGraphInstantiateWithFlags(&y, g, 0));
  for (cudaGraph_t each : {g, g2, shorter}) CHECK(cudaGraphDestroy(each));
  usleep(5000);
  EXPECT(gone == 0);
  CHECK(cudaGraphExecDestroy(y));
  for (int i = 0; i < 2000 && gone == 0; ++i) usleep(1000);
  EXPECT(gone == 1);
  CHECK(cudaGraphExecDestroy(x));
  CHECK(cudaStreamDestroy(side));
  CHECK(cudaEventDestroy(fork));
  CHECK(cudaEventDestroy(join));
  CHECK(cudaFree(p));
  CHECK(cudaFree(q));
}

static uint64_t graph_bytes(cudaGraphMemAttributeType which) {
  uint64_t value = ~0ull;
  CHECK(cudaDeviceGetGraphMemAttribute(0, which, &value));
  return value;
}

// Memory that graphs allocate: by nodes, by the one form for all, in a capture.
static void memory_nodes(cudaStream_t s) {
  void* out = words();
  cudaGraph_t g, taker;
  cudaGraphNode_t alloc, fill, copy, release;
  cudaMemAllocNodeParams wanted{}, got{};
  wanted.poolProps.allocType = cudaMemAllocationTypePinned;
  wanted.poolProps.location.type = cudaMemLocationTypeDevice;
  wanted.bytesize = kBytes;
  cudaMemAccessDesc access{};
  access.location.type = cudaMemLocationTypeDevice;
  access.flags = cudaMemAccessFlagsProtReadWrite;
  wanted.accessDescs = &access;
  wanted.accessDescCount = 1;
  CHECK(cudaGraphCreate(&g, 0));
  CHECK(cudaGraphAddMemAllocNode(&alloc, g, nullptr, 0, &wanted));
  EXPECT(wanted.dptr != nullptr);
  CHECK(cudaGraphMemAllocNodeGetParams(alloc, &got));
  EXPECT(got.dptr == wanted.dptr && got.bytesize == kBytes && got.accessDescCount == 1);
  EXPECT(got.accessDescs[0].flags == cudaMemAccessFlagsProtReadWrite);
  EXPECT(got.poolProps.allocType == cudaMemAllocationTypePinned && got.poolProps.location.id == 0);
  cudaMemsetParams set{};
  set.dst = wanted.dptr;
  set.value = 9;
  set.elementSize = 4;
  set.width = kCount;
  set.height = 1;
  CHECK(cudaGraphAddMemsetNode(&fill, g, &alloc, 1, &set));
  // a second one by the form for all, which its own graph frees
  cudaGraphNodeParams any{};
  any.type = cudaGraphNodeTypeMemAlloc;
  any.alloc.poolProps = wanted.poolProps;
  any.alloc.bytesize = kBytes;
#if CUDART_VERSION >= 13000
  CHECK(cudaGraphAddNode(&alloc, g, &fill, nullptr, 1, &any));
#else
  CHECK(cudaGraphAddNode(&alloc, g, &fill, 1, &any));
#endif
  void* inner = any.alloc.dptr;
  EXPECT(inner != nullptr && inner != wanted.dptr);
  CHECK(cudaGraphAddMemcpyNode1D(&copy, g, &alloc, 1, inner, wanted.dptr, kBytes, cudaMemcpyDeviceToDevice));
  CHECK(cudaGraphAddMemcpyNode1D(&copy, g, &copy, 1, out, inner, kBytes, cudaMemcpyDeviceToDevice));
  cudaGraphNodeParams freeing{};
  freeing.type = cudaGraphNodeTypeMemFree;
  freeing.free.dptr = inner;
#if CUDART_VERSION >= 13000
  CHECK(cudaGraphAddNode(&release, g, &copy, nullptr, 1, &freeing));
#else
  CHECK(cudaGraphAddNode(&release, g, &copy, 1, &freeing));
#endif
  void* freed = nullptr;
  CHECK(cudaGraphMemFreeNodeGetParams(release, &freed));
  EXPECT(freed == inner);
  cudaGraphNodeType type;
  CHECK(cudaGraphNodeGetType(release, &type));
  EXPECT(type == cudaGraphNodeTypeMemFree);
  EXPECT_RESULT(cudaGraphAddMemFreeNode(&release, g, &copy, 1, inner), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaGraphAddMemFreeNode(&release, g, &copy, 1, out), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaGraphClone(&taker, g), cudaErrorNotSupported);

  CHECK(cudaGraphCreate(&taker, 0));
  CHECK(cudaGraphAddMemFreeNode(&release, taker, nullptr, 0, wanted.dptr));
  cudaGraphExec_t x, y, second;
  CHECK(cudaGraphInstantiate(&x, g, 0));
  EXPECT_RESULT(cudaGraphInstantiate(&second, g, 0), cudaErrorNotSupported);
  CHECK(cudaGraphInstantiate(&y, taker, 0));
  EXPECT_RESULT(cudaFree(wanted.dptr), cudaErrorInvalidValue);
  for (int round = 0; round < 3; ++round) {
    CHECK(cudaMemset(out, 0, kBytes));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaGraphLaunch(x, s));
    EXPECT_RESULT(cudaGraphLaunch(x, s), cudaErrorInvalidValue);
    EXPECT_RESULT(cudaFree(inner), cudaErrorInvalidValue);
    CHECK(cudaStreamSynchronize(s));
    expect_words(out, 9);
    expect_words(wanted.dptr, 9);
    if (round == 0) CHECK(cudaGraphLaunch(y, s));
    if (round == 1) CHECK(cudaFree(wanted.dptr));
    if (round == 2) CHECK(cudaFreeAsync(wanted.dptr, s));
  }
  EXPECT(graph_bytes(cudaGraphMemAttrUsedMemCurrent) >= 2 * kBytes);
  CHECK(cudaGraphExecDestroy(x));
  CHECK(cudaGraphExecDestroy(y));
  CHECK(cudaGraphDestroy(g));
  CHECK(cudaGraphDestroy(taker));
  CHECK(cudaDeviceGraphMemTrim(0));
  EXPECT(graph_bytes(cudaGraphMemAttrUsedMemCurrent) == 0 && graph_bytes(cudaGraphMemAttrReservedMemCurrent) == 0);
  EXPECT(graph_bytes(cudaGraphMemAttrUsedMemHigh) >= 2 * kBytes);
  uint64_t zero = 0;
  CHECK(cudaDeviceSetGraphMemAttribute(0, cudaGraphMemAttrUsedMemHigh, &zero));
  EXPECT(graph_bytes(cudaGraphMemAttrUsedMemHigh) == 0);
  EXPECT_RESULT(cudaDeviceGraphMemTrim(7), cudaErrorInvalidDevice);

  // in a capture: one freed there, one left; launched over and over, since each launch frees what the last one left
  void *left = nullptr, *short_lived = nullptr;
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  CHECK(cudaMallocAsync(&left, kBytes, s));
  CHECK(cudaMallocAsync(&short_lived, kBytes, s));
  CHECK(cudaMemsetAsync(short_lived, 0, kBytes, s));
  launch(short_lived, 1, 4, s);
  CHECK(cudaMemcpyAsync(left, short_lived, kBytes, cudaMemcpyDeviceToDevice, s));
  CHECK(cudaFreeAsync(short_lived, s));
  EXPECT_RESULT(cudaFreeAsync(out, s), cudaErrorInvalidValue);  // no graph has allocated it
  CHECK(cudaStreamEndCapture(s, &g));
  CHECK(cudaGraphInstantiate(&x, g, cudaGraphInstantiateFlagAutoFreeOnLaunch));
  for (int round = 0; round < 3; ++round) {
    CHECK(cudaGraphLaunch(x, s));
    launch(left, 10, 2, s);
    CHECK(cudaStreamSynchronize(s));
    expect_words(left, 42);
  }
  CHECK(cudaGraphExecDestroy(x));
  CHECK(cudaGraphDestroy(g));
  expect_words(left, 42);
  CHECK(cudaFree(left));
  EXPECT(graph_bytes(cudaGraphMemAttrUsedMemCurrent) == 0);
  CHECK(cudaFree(out));
}

int main() {
  register_all();
  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  nodes(s);
  captures(s);
  memory_nodes(s);
  return pass("graphs");
}
