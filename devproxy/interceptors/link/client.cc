// SPDX-License-Identifier: Apache-2.0
// Linking and tensor maps: what only the driver can compute. The inputs of a link are kept here and travel together.
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "devproxy/csrc/args/link.h"
#include "devproxy/csrc/wire/link.h"
#include "devproxy/interceptors/client_common.h"

namespace devproxy::sa::link {

using client::DeviceState;
using wire::Opcode;

namespace {

struct Input {
  uint32_t type = 0;
  std::string name;
  std::vector<uint8_t> data;
};

// A text buffer of the job and the option that receives how much of it was filled.
struct LogBuffer {
  char* text = nullptr;
  size_t bytes = 0;
  void** filled = nullptr;

  void fill(const uint8_t* from, size_t n) const {
    if (!text || !bytes) return;
    n = std::min(n, bytes - 1);
    memcpy(text, from, n);
    text[n] = 0;
    // cuda.h: the option's value becomes the number of bytes filled.
    if (filled) *filled = reinterpret_cast<void*>(n ? n + 1 : 0);
  }
};

struct Link {
  DeviceState* device = nullptr;
  std::vector<LinkOption> options;
  LogBuffer info, error;
  std::vector<Input> inputs;
  std::vector<uint8_t> image;  // cubinOut points into it until the link is destroyed
};

// A server keeps the image that this process linked last until it is fetched: one link at a time.
std::mutex g_link_mu;  // taken before g_mu, and held over the questions
std::mutex g_mu;       // guards the table; a link itself is one thread's at a time, as with the driver
std::unordered_map<uint64_t, Link*>& links() {
  static auto* m = new std::unordered_map<uint64_t, Link*>;
  return *m;
}

Link* link_of(CUlinkState state) {
  std::lock_guard lock(g_mu);
  const auto it = links().find(bits(state));
  return it == links().end() ? nullptr : it->second;
}

// Options that are numbers go to the driver as they are; buffers stay here; others would point into this process.
CUresult take_options(unsigned n, CUjit_option* options, void** values, Link* out) {
  if (n && (!options || !values)) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < n; ++i) {
    switch (options[i]) {
      case CU_JIT_INFO_LOG_BUFFER: out->info.text = static_cast<char*>(values[i]); break;
      case CU_JIT_ERROR_LOG_BUFFER: out->error.text = static_cast<char*>(values[i]); break;
      case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
        out->info.bytes = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(values[i]));
        out->info.filled = &values[i];
        break;
      case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
        out->error.bytes = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(values[i]));
        out->error.filled = &values[i];
        break;
      case CU_JIT_MAX_REGISTERS:
      case CU_JIT_OPTIMIZATION_LEVEL:
      case CU_JIT_TARGET_FROM_CUCONTEXT:
      case CU_JIT_TARGET:
      case CU_JIT_FALLBACK_STRATEGY:
      case CU_JIT_GENERATE_DEBUG_INFO:
      case CU_JIT_LOG_VERBOSE:
      case CU_JIT_GENERATE_LINE_INFO:
      case CU_JIT_CACHE_MODE:
      case CU_JIT_POSITION_INDEPENDENT_CODE:
        if (out->options.size() == kMaxLinkOptions) return CUDA_ERROR_INVALID_VALUE;
        out->options.push_back({static_cast<uint32_t>(options[i]), 0, reinterpret_cast<uintptr_t>(values[i])});
        break;
      default:
        client::log(client::Level::kWarn, "cuLinkCreate refuses option %d: nobody has compared it with its header yet",
                    static_cast<int>(options[i]));
        return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return CUDA_SUCCESS;
}

void put(std::vector<uint8_t>* to, const void* from, size_t n) {
  const auto* p = static_cast<const uint8_t*>(from);
  to->insert(to->end(), p, p + n);
  to->resize((to->size() + 7) & ~size_t{7});
}

// Links what there is and answers with the driver's own result.
int32_t run(Link* l, uint64_t* image_bytes) {
  std::vector<uint8_t> bulk;
  const LinkHead head{static_cast<uint32_t>(l->options.size()), static_cast<uint32_t>(l->inputs.size())};
  put(&bulk, &head, sizeof(head));
  for (const LinkOption& option : l->options) put(&bulk, &option, sizeof(option));
  for (const Input& input : l->inputs) {
    const LinkInputHead of{input.type, static_cast<uint32_t>(input.name.size()), input.data.size()};
    put(&bulk, &of, sizeof(of));
    put(&bulk, input.name.data(), input.name.size());
    put(&bulk, input.data.data(), input.data.size());
  }
  wire::LINK_req req{};
  wire::LINK_rep rep{};
  uint8_t logs[sizeof(ReplySlot::data)];
  client::Reply reply{&rep, sizeof(rep), logs, sizeof(logs)};
  const int32_t rc = l->device->conn().call_bulk(Opcode::LINK, req, {bulk.data(), bulk.size()}, &reply);
  if (rc != kOk) return rc;
  if (rep.info_bytes > reply.tail_got || rep.error_bytes > reply.tail_got - rep.info_bytes) return kUnknown;
  if (l->inputs.empty()) return rep.result;  // only asked whether there is a linker
  l->info.fill(logs, rep.info_bytes);
  l->error.fill(logs + rep.info_bytes, rep.error_bytes);
  *image_bytes = rep.image_bytes;
  return rep.result;
}

int32_t fetch(Link* l, uint64_t bytes) {
  client::Attachment& conn = l->device->conn();
  l->image.resize(bytes);
  int32_t rc = kOk;
  const uint32_t chunk = conn.take_chunk(&rc);
  if (chunk == kChunks) return rc;
  for (uint64_t done = 0; done < bytes && rc == kOk;) {
    const uint64_t n = std::min<uint64_t>(bytes - done, kChunkBytes);
    rc = conn.call(Opcode::LINK_FETCH, wire::LINK_FETCH_req{done, chunk, static_cast<uint32_t>(n)});
    if (rc == kOk) memcpy(l->image.data() + done, conn.chunk(chunk), n);
    done += n;
  }
  conn.free_chunk(chunk);
  return rc;
}

}  // namespace

CUresult cuLinkCreate_v2(unsigned int numOptions, CUjit_option* options, void** optionValues, CUlinkState* stateOut) {
  DP_CURRENT(d);
  auto* l = new Link;
  l->device = d;
  CUresult rc = take_options(numOptions, options, optionValues, l);
  uint64_t none = 0;
  if (rc == CUDA_SUCCESS) {
    std::lock_guard lock(g_link_mu);
    rc = result(run(l, &none));  // has the device a linker
  }
  if (rc != CUDA_SUCCESS) {
    delete l;
    return rc;
  }
  static uint64_t serial = 0;
  std::lock_guard lock(g_mu);
  const uint64_t value = 0x7eull << 56 | ++serial;
  links()[value] = l;
  *stateOut = handle<CUlinkState>(value);
  return CUDA_SUCCESS;
}

// A bad input is found when it is linked: CUDA may also say so there.
CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void* data, size_t size, const char* name,
                          unsigned int numOptions, CUjit_option*, void**) {
  Link* l = link_of(state);
  if (!l) return CUDA_ERROR_INVALID_HANDLE;
  if (size == 0 || static_cast<unsigned>(type) >= CU_JIT_NUM_INPUT_TYPES) return CUDA_ERROR_INVALID_VALUE;
  if (numOptions) {
    client::log(client::Level::kWarn, "cuLinkAddData refuses options of one input; give them to cuLinkCreate");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (l->inputs.size() == kMaxLinkInputs) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto* p = static_cast<const uint8_t*>(data);
  l->inputs.push_back({static_cast<uint32_t>(type), name ? name : "", {p, p + size}});
  return CUDA_SUCCESS;
}

// Opened here: the server may run with another root or working directory.
CUresult cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char* path, unsigned int numOptions,
                          CUjit_option* options, void** optionValues) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_FILE_NOT_FOUND;
  struct stat st{};
  std::vector<uint8_t> data;
  bool whole = fstat(fd, &st) == 0 && st.st_size > 0;
  if (whole) {
    data.resize(static_cast<size_t>(st.st_size));
    for (size_t done = 0; whole && done < data.size();) {
      const ssize_t n = read(fd, data.data() + done, data.size() - done);
      if (n < 0 && errno == EINTR) continue;
      whole = n > 0;
      done += whole ? static_cast<size_t>(n) : 0;
    }
  }
  close(fd);
  if (!whole) return CUDA_ERROR_INVALID_IMAGE;
  return link::cuLinkAddData_v2(state, type, data.data(), data.size(), path, numOptions, options, optionValues);
}

CUresult cuLinkComplete(CUlinkState state, void** cubinOut, size_t* sizeOut) {
  Link* l = link_of(state);
  if (!l) return CUDA_ERROR_INVALID_HANDLE;
  if (l->inputs.empty()) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(g_link_mu);
  int32_t rc = kNotFound;
  for (int attempt = 0; attempt < 3 && rc == kNotFound; ++attempt) {  // a checkpoint in between: it is linked again
    uint64_t bytes = 0;
    rc = run(l, &bytes);
    if (rc == kOk) rc = fetch(l, bytes);
  }
  if (rc != kOk) return result(rc);
  *cubinOut = l->image.data();
  *sizeOut = l->image.size();
  return CUDA_SUCCESS;
}

CUresult cuLinkDestroy(CUlinkState state) {
  std::lock_guard lock(g_mu);
  const auto it = links().find(bits(state));
  if (it == links().end()) return CUDA_ERROR_INVALID_HANDLE;
  delete it->second;
  links().erase(it);
  return CUDA_SUCCESS;
}

// -- tensor maps ----------------------------------------------------------------------------------------------------

namespace {

CUresult encode(const TensorMapArgs& args, CUtensorMap* out) {
  DP_CURRENT(d);
  static_assert(sizeof(CUtensorMap) == kTensorMapBytes);
  uint8_t map[kTensorMapBytes];
  wire::TENSOR_MAP_req req{};
  client::Reply reply{nullptr, 0, map, sizeof(map)};
  const int32_t rc = d->conn().call_bulk(Opcode::TENSOR_MAP, req, {&args, sizeof(args)}, &reply);
  if (rc == kOk && reply.tail_got != sizeof(map)) return CUDA_ERROR_UNKNOWN;
  if (rc == kOk) memcpy(out, map, sizeof(map));
  return result(rc);
}

// What all kinds have in common; false where there are no such dimensions.
bool describe(TensorMapArgs* a, TensorMapKind kind, CUtensorMapDataType type, cuuint32_t rank, void* address,
              const cuuint64_t* dim, const cuuint64_t* strides, const cuuint32_t* element_strides) {
  if (rank == 0 || rank > kTensorRank || (rank > 1 && !strides)) return false;
  a->kind = static_cast<uint32_t>(kind);
  a->data_type = static_cast<uint32_t>(type);
  a->rank = rank;
  a->address = reinterpret_cast<uint64_t>(address);
  a->has_strides = strides != nullptr;
  std::copy_n(dim, rank, a->dim);
  if (rank > 1) std::copy_n(strides, rank - 1, a->strides);
  std::copy_n(element_strides, rank, a->element_strides);
  return true;
}

}  // namespace

CUresult cuTensorMapEncodeTiled(CUtensorMap* tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank,
                                void* globalAddress, const cuuint64_t* globalDim, const cuuint64_t* globalStrides,
                                const cuuint32_t* boxDim, const cuuint32_t* elementStrides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill) {
  TensorMapArgs a;
  if (!describe(&a, TensorMapKind::kTiled, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides,
                elementStrides))
    return CUDA_ERROR_INVALID_VALUE;
  std::copy_n(boxDim, tensorRank, a.box);
  a.interleave = interleave, a.swizzle = swizzle, a.l2_promotion = l2Promotion, a.oob_fill = oobFill;
  return encode(a, tensorMap);
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap* tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank,
                                 void* globalAddress, const cuuint64_t* globalDim, const cuuint64_t* globalStrides,
                                 const int* pixelBoxLowerCorner, const int* pixelBoxUpperCorner,
                                 cuuint32_t channelsPerPixel, cuuint32_t pixelsPerColumn,
                                 const cuuint32_t* elementStrides, CUtensorMapInterleave interleave,
                                 CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2Promotion,
                                 CUtensorMapFloatOOBfill oobFill) {
  TensorMapArgs a;
  // cuda.h: ranks 3 to 5; the corners have an element for each spatial dimension, which are two less.
  if (tensorRank < 3 || !describe(&a, TensorMapKind::kIm2col, tensorDataType, tensorRank, globalAddress, globalDim,
                                  globalStrides, elementStrides))
    return CUDA_ERROR_INVALID_VALUE;
  std::copy_n(pixelBoxLowerCorner, tensorRank - 2, a.lower);
  std::copy_n(pixelBoxUpperCorner, tensorRank - 2, a.upper);
  a.channels = channelsPerPixel, a.pixels = pixelsPerColumn;
  a.interleave = interleave, a.swizzle = swizzle, a.l2_promotion = l2Promotion, a.oob_fill = oobFill;
  return encode(a, tensorMap);
}

CUresult cuTensorMapReplaceAddress(CUtensorMap* tensorMap, void* globalAddress) {
  TensorMapArgs a;
  a.kind = static_cast<uint32_t>(TensorMapKind::kReplaceAddress);
  a.address = reinterpret_cast<uint64_t>(globalAddress);
  memcpy(a.map, tensorMap, sizeof(a.map));
  return encode(a, tensorMap);
}

}  // namespace devproxy::sa::link
