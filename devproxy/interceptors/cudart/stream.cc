// SPDX-License-Identifier: Apache-2.0
// Streams, events, host functions: the runtime's handles are the driver's.
#include "cudart_decl.gen.h"
#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart::stream {

cudaError_t cudaStreamCreate(cudaStream_t* pStream) { return result(cuStreamCreate(pStream, CU_STREAM_DEFAULT)); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* pStream, unsigned int flags) {
  return result(cuStreamCreate(pStream, flags));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* pStream, unsigned int flags, int priority) {
  return result(cuStreamCreateWithPriority(pStream, flags, priority));
}

cudaError_t cudaStreamGetPriority(cudaStream_t hStream, int* priority) {
  return result(cuStreamGetPriority(stream_of(hStream), priority));
}

// Attributes and their values have the driver's numbers and bytes; what the driver knows is checked there.
static_assert(sizeof(cudaStreamAttrValue) == sizeof(CUstreamAttrValue));
static_assert(static_cast<int>(cudaLaunchAttributeMemSyncDomain) == CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN);

cudaError_t cudaStreamCopyAttributes(cudaStream_t dst, cudaStream_t src) {
  return result(cuStreamCopyAttributes(stream_of(dst), stream_of(src)));
}

cudaError_t cudaStreamGetAttribute(cudaStream_t hStream, cudaStreamAttrID attr, cudaStreamAttrValue* value_out) {
  return result(cuStreamGetAttribute(stream_of(hStream), static_cast<CUstreamAttrID>(attr),
                                     reinterpret_cast<CUstreamAttrValue*>(value_out)));
}

cudaError_t cudaStreamSetAttribute(cudaStream_t hStream, cudaStreamAttrID attr, const cudaStreamAttrValue* value) {
  return result(cuStreamSetAttribute(stream_of(hStream), static_cast<CUstreamAttrID>(attr),
                                     reinterpret_cast<const CUstreamAttrValue*>(value)));
}

cudaError_t cudaCtxResetPersistingL2Cache() { return result(cuCtxResetPersistingL2Cache()); }

cudaError_t cudaStreamGetFlags(cudaStream_t hStream, unsigned int* flags) {
  return result(cuStreamGetFlags(stream_of(hStream), flags));
}

cudaError_t cudaStreamGetId(cudaStream_t hStream, unsigned long long* streamId) {
  return result(cuStreamGetId(stream_of(hStream), streamId));
}

#if CUDART_VERSION >= 12080
cudaError_t cudaStreamGetDevice(cudaStream_t hStream, int* device) {
  CUdevice found = 0;
  CUcontext context = nullptr;
  CUresult rc = cuStreamGetCtx(stream_of(hStream), &context);
  if (rc == CUDA_SUCCESS) rc = cuCtxPushCurrent(context);
  if (rc != CUDA_SUCCESS) return result(rc);
  rc = cuCtxGetDevice(&found);
  static_cast<void>(cuCtxPopCurrent(&context));
  *device = found;
  return result(rc);
}
#endif

cudaError_t cudaStreamAttachMemAsync(cudaStream_t stream, void* devPtr, size_t length, unsigned int flags) {
  return result(cuStreamAttachMemAsync(stream_of(stream), reinterpret_cast<CUdeviceptr>(devPtr), length, flags));
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return result(cuStreamDestroy(stream)); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  return result(cuStreamWaitEvent(stream_of(stream), event, flags));
}

// cudaError_t numbers what CUresult numbers, so the driver may call the program's function as it is.
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* userData,
                                  unsigned int flags) {
  return result(cuStreamAddCallback(stream_of(stream), reinterpret_cast<CUstreamCallback>(callback), userData, flags));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void* userData) {
  return result(cuLaunchHostFunc(stream_of(stream), fn, userData));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return result(cuStreamSynchronize(stream_of(stream))); }

cudaError_t cudaStreamQuery(cudaStream_t stream) { return result(cuStreamQuery(stream_of(stream))); }

// -- captures: modes and states have the driver's numbers
// --------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  auto own = static_cast<CUstreamCaptureMode>(*mode);
  const CUresult rc = cuThreadExchangeStreamCaptureMode(&own);
  *mode = static_cast<cudaStreamCaptureMode>(own);
  return result(rc);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* pCaptureStatus) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult rc = cuStreamIsCapturing(stream_of(stream), &status);
  *pCaptureStatus = static_cast<cudaStreamCaptureStatus>(status);
  return result(rc);
}

namespace {
cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status_out, unsigned long long* id_out,
                         cudaGraph_t* graph_out, const cudaGraphNode_t** dependencies_out,
                         const cudaGraphEdgeData** edges_out, size_t* count_out) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  // An edge's data is the same eight bytes in both headers.
  static_assert(sizeof(cudaGraphEdgeData) == sizeof(CUgraphEdgeData));
  const CUresult rc = cuStreamGetCaptureInfo_v3(stream_of(stream), &status, &id, graph_out, dependencies_out,
                                                reinterpret_cast<const CUgraphEdgeData**>(edges_out), count_out);
  *status_out = static_cast<cudaStreamCaptureStatus>(status);
  if (id_out != nullptr) *id_out = id;
  return result(rc);
}
}  // namespace

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* captureStatus_out,
                                     unsigned long long* id_out, cudaGraph_t* graph_out,
                                     const cudaGraphNode_t** dependencies_out, const cudaGraphEdgeData** edgeData_out,
                                     size_t* numDependencies_out) {
  return capture_info(stream, captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out,
                      numDependencies_out);
}
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* captureStatus_out,
                                     unsigned long long* id_out) {
  return capture_info(stream, captureStatus_out, id_out, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* captureStatus_out,
                                        unsigned long long* id_out, cudaGraph_t* graph_out,
                                        const cudaGraphNode_t** dependencies_out, size_t* numDependencies_out) {
  return capture_info(stream, captureStatus_out, id_out, graph_out, dependencies_out, nullptr, numDependencies_out);
}
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, cudaStreamCaptureStatus* captureStatus_out,
                                        unsigned long long* id_out, cudaGraph_t* graph_out,
                                        const cudaGraphNode_t** dependencies_out,
                                        const cudaGraphEdgeData** edgeData_out, size_t* numDependencies_out) {
  return capture_info(stream, captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out,
                      numDependencies_out);
}
#endif

}  // namespace devproxy::sa::cudart::stream

// -- events -----------------------------------------------------------------------------------------------------------

namespace devproxy::sa::cudart::event {

cudaError_t cudaEventCreate(cudaEvent_t* event) { return result(cuEventCreate(event, CU_EVENT_DEFAULT)); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  return result(cuEventCreate(event, flags));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return result(cuEventRecord(event, stream_of(stream)));
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
  return result(cuEventRecordWithFlags(event, stream_of(stream), flags));
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return result(cuEventQuery(event)); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return result(cuEventSynchronize(event)); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return result(cuEventDestroy(event)); }

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return result(cuEventElapsedTime(ms, start, end));
}

#if CUDART_VERSION < 13000
cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return result(cuEventElapsedTime(ms, start, end));
}
#endif

}  // namespace devproxy::sa::cudart::event
