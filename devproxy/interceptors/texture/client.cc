// SPDX-License-Identifier: Apache-2.0
// Arrays, texture and surface objects. An array is a virtual handle. An object is the number that the device gave: the
// job puts it into parameter blocks that nobody looks into, so no other number would do.
#include "devproxy/interceptors/texture/client.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "devproxy/interceptors/graph/hooks.h"
#include "devproxy/interceptors/memory/client.h"

namespace devproxy::sa::texture {

using client::DeviceState;
using client::place_of;
using wire::Opcode;

ArrayMap& arrays() {
  static auto* map = new ArrayMap;
  return *map;
}

namespace {

// -- shapes ---------------------------------------------------------------------------------------------------------

constexpr unsigned kFlagsOfCuda = 0x1ff;  // cuda.h, CUDA_ARRAY3D_*
constexpr unsigned kFlagsHere =
    CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_SURFACE_LDST | CUDA_ARRAY3D_CUBEMAP | CUDA_ARRAY3D_TEXTURE_GATHER;

// Formats of cuda.h that are no plain numbers: planar, normalised, packed, block-compressed.
bool is_other_format(unsigned format) { return format == 0x50 || (format >= 0x91 && format <= 0xcb); }

CUresult check_format(const char* call, unsigned format, unsigned channels) {
  if (array_element_bytes(format, channels) != 0) return CUDA_SUCCESS;
  if (!is_other_format(format)) return CUDA_ERROR_INVALID_VALUE;
  client::log(client::Level::kWarn,
              "%s is refused: format 0x%x; arrays and textures have 1, 2 or 4 channels of 8-, 16- or 32-bit integers, "
              "half or float",
              call, format);
  return CUDA_ERROR_NOT_SUPPORTED;
}

// cuda.h, cuArray3DCreate: the table of valid extents. A limit that the device does not tell is its own affair.
bool fits(const ArrayShape& s, const DeviceProps& props) {
  auto within = [&](uint64_t value, CUdevice_attribute limit) {
    const int32_t most = props.attributes[limit];
    return most <= 0 || value <= static_cast<uint64_t>(most);
  };
  const bool layered = s.flags & CUDA_ARRAY3D_LAYERED, cube = s.flags & CUDA_ARRAY3D_CUBEMAP;
  const bool surface = s.flags & CUDA_ARRAY3D_SURFACE_LDST;
  auto all = [&](CUdevice_attribute w, CUdevice_attribute h, CUdevice_attribute d) {
    return within(s.width, w) && (s.height == 0 || within(s.height, h)) && (s.depth == 0 || within(s.depth, d));
  };
#define DP_TEXTURE(name) CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE##name
#define DP_SURFACE(name) CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE##name
  if (cube) {
    if (!layered)
      return within(s.width, DP_TEXTURE(CUBEMAP_WIDTH)) && (!surface || within(s.width, DP_SURFACE(CUBEMAP_WIDTH)));
    return within(s.width, DP_TEXTURE(CUBEMAP_LAYERED_WIDTH)) && within(s.depth, DP_TEXTURE(CUBEMAP_LAYERED_LAYERS)) &&
           (!surface || (within(s.width, DP_SURFACE(CUBEMAP_LAYERED_WIDTH)) &&
                         within(s.depth, DP_SURFACE(CUBEMAP_LAYERED_LAYERS))));
  }
  if (layered && s.height == 0)
    return all(DP_TEXTURE(1D_LAYERED_WIDTH), DP_TEXTURE(1D_WIDTH), DP_TEXTURE(1D_LAYERED_LAYERS)) &&
           (!surface || all(DP_SURFACE(1D_LAYERED_WIDTH), DP_SURFACE(1D_WIDTH), DP_SURFACE(1D_LAYERED_LAYERS)));
  if (layered)
    return all(DP_TEXTURE(2D_LAYERED_WIDTH), DP_TEXTURE(2D_LAYERED_HEIGHT), DP_TEXTURE(2D_LAYERED_LAYERS)) &&
           (!surface ||
            all(DP_SURFACE(2D_LAYERED_WIDTH), DP_SURFACE(2D_LAYERED_HEIGHT), DP_SURFACE(2D_LAYERED_LAYERS)));
  if (s.depth != 0)
    return (all(DP_TEXTURE(3D_WIDTH), DP_TEXTURE(3D_HEIGHT), DP_TEXTURE(3D_DEPTH)) ||
            all(DP_TEXTURE(3D_WIDTH_ALTERNATE), DP_TEXTURE(3D_HEIGHT_ALTERNATE), DP_TEXTURE(3D_DEPTH_ALTERNATE))) &&
           (!surface || all(DP_SURFACE(3D_WIDTH), DP_SURFACE(3D_HEIGHT), DP_SURFACE(3D_DEPTH)));
  if (s.height == 0)
    return within(s.width, DP_TEXTURE(1D_WIDTH)) && (!surface || within(s.width, DP_SURFACE(1D_WIDTH)));
  if ((s.flags & CUDA_ARRAY3D_TEXTURE_GATHER) &&
      !(within(s.width, DP_TEXTURE(2D_GATHER_WIDTH)) && within(s.height, DP_TEXTURE(2D_GATHER_HEIGHT))))
    return false;
  return within(s.width, DP_TEXTURE(2D_WIDTH)) && within(s.height, DP_TEXTURE(2D_HEIGHT)) &&
         (!surface || (within(s.width, DP_SURFACE(2D_WIDTH)) && within(s.height, DP_SURFACE(2D_HEIGHT))));
#undef DP_TEXTURE
#undef DP_SURFACE
}

CUresult check_shape(const char* call, const ArrayShape& s, const DeviceProps& props) {
  if (s.flags & ~kFlagsOfCuda) return CUDA_ERROR_INVALID_VALUE;
  if (s.flags & ~kFlagsHere) {
    client::log(client::Level::kWarn,
                "%s is refused: flags 0x%x; depth textures, attachments, sparse, deferred and video arrays are not "
                "supported yet",
                call, s.flags);
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (const CUresult rc = check_format(call, s.format, s.channels); rc != CUDA_SUCCESS) return rc;
  const bool layered = s.flags & CUDA_ARRAY3D_LAYERED;
  ArrayExtent extent;
  if (!array_extent(s, &extent) || (layered && s.depth == 0)) return CUDA_ERROR_INVALID_VALUE;
  if (!layered && s.depth != 0 && s.height == 0) return CUDA_ERROR_INVALID_VALUE;
  if (s.flags & CUDA_ARRAY3D_CUBEMAP)
    if (s.width != s.height || (layered ? s.depth % 6 != 0 : s.depth != 6)) return CUDA_ERROR_INVALID_VALUE;
  // cuda.h: a gather needs two dimensions.
  if ((s.flags & CUDA_ARRAY3D_TEXTURE_GATHER) && (s.height == 0 || s.depth != 0)) return CUDA_ERROR_INVALID_VALUE;
  return fits(s, props) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult create(const char* call, CUarray* pHandle, const ArrayShape& s) {
  DP_CURRENT(d);
  if (const CUresult rc = check_shape(call, s, d->conn().props()); rc != CUDA_SUCCESS) return rc;
  uint64_t value = 0;
  ArrayObj* const array = arrays().add(d->ordinal(), &value);
  if (!array) return CUDA_ERROR_OUT_OF_MEMORY;
  *array = {d, s, {}, client::current_context()};
  (void)array_extent(s, &array->extent);
  const wire::ARRAY_CREATE_req req{VHandle{value}, s.width, s.height, s.depth, s.format, s.channels, s.flags, 0};
  if (const int32_t rc = d->conn().call(Opcode::ARRAY_CREATE, req); rc != kOk) {
    arrays().remove(value);
    return result(rc);
  }
  arrays().publish(value);
  *pHandle = handle<CUarray>(value);
  return CUDA_SUCCESS;
}

int32_t destroy_array(uint64_t value, DeviceState* d) {
  arrays().remove(value);
  return d->conn().post(Opcode::ARRAY_DESTROY, wire::ARRAY_DESTROY_req{VHandle{value}});
}

}  // namespace

// -- arrays ---------------------------------------------------------------------------------------------------------

CUresult cuArrayCreate_v2(CUarray* pHandle, const CUDA_ARRAY_DESCRIPTOR* p) {
  return create("cuArrayCreate", pHandle, {p->Width, p->Height, 0, p->Format, p->NumChannels, 0, 0});
}

CUresult cuArray3DCreate_v2(CUarray* pHandle, const CUDA_ARRAY3D_DESCRIPTOR* p) {
  return create("cuArray3DCreate", pHandle, {p->Width, p->Height, p->Depth, p->Format, p->NumChannels, p->Flags, 0});
}

CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR* out, CUarray hArray) {
  const ArrayObj* a = arrays().get(bits(hArray));
  if (!a) return CUDA_ERROR_INVALID_HANDLE;
  *out = {a->shape.width, a->shape.height, static_cast<CUarray_format>(a->shape.format), a->shape.channels};
  return CUDA_SUCCESS;
}

CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR* out, CUarray hArray) {
  const ArrayObj* a = arrays().get(bits(hArray));
  if (!a) return CUDA_ERROR_INVALID_HANDLE;
  const ArrayShape& s = a->shape;
  *out = {s.width, s.height, s.depth, static_cast<CUarray_format>(s.format), s.channels, s.flags};
  return CUDA_SUCCESS;
}

CUresult cuArrayDestroy(CUarray hArray) {
  const ArrayObj* a = arrays().get(bits(hArray));
  if (!a) return CUDA_ERROR_INVALID_HANDLE;
  // Like memory: any stream may use it until all have come this far.
  DeviceState* const d = a->device;
  if (const int32_t rc = d->wait_all(); rc != kOk) return result(rc);
  return result(destroy_array(bits(hArray), d));
}

// -- texture and surface objects --------------------------------------------------------------------------------------

namespace {

struct Object {
  VHandle name;  // between client and server, for the replay log
  uint64_t context = 0;
  CUDA_RESOURCE_DESC resource{};
  CUDA_TEXTURE_DESC texture{};
  CUDA_RESOURCE_VIEW_DESC view{};
  bool has_view = false;
};
// A number is the device's, and textures and surfaces may be counted apart.
using Key = std::tuple<int, TextureKind, uint64_t>;

std::mutex g_objects_mu;  // guards the table and the serial; a leaf
std::map<Key, Object>& objects() {
  static auto* map = new std::map<Key, Object>;
  return *map;
}

CUresult find(TextureKind kind, uint64_t value, Object* out) {
  DP_CURRENT(d);
  std::lock_guard lock(g_objects_mu);
  const auto it = objects().find({d->ordinal(), kind, value});
  if (it == objects().end()) return CUDA_ERROR_INVALID_VALUE;
  *out = it->second;
  return CUDA_SUCCESS;
}

// Linear memory that a texture shows: this device's own, and live.
CUresult check_memory(const char* call, DeviceState* d, CUdeviceptr address, uint64_t bytes) {
  if (address == 0 || bytes == 0 || !memory::known(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const client::Place place = place_of(address);
  if (place.device != d->ordinal()) return CUDA_ERROR_INVALID_VALUE;
  if (place.pinned) {
    client::log(client::Level::kWarn, "%s is refused for pinned and managed memory; textures show device memory", call);
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult describe(const char* call, DeviceState* d, const CUDA_RESOURCE_DESC& r, TextureArgs* out) {
  if (r.flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto& attributes = d->conn().props().attributes;
  auto aligned = [&](uint64_t value, CUdevice_attribute to) {
    return attributes[to] <= 0 || value % static_cast<uint64_t>(attributes[to]) == 0;
  };
  auto within = [&](uint64_t value, CUdevice_attribute limit) {
    return attributes[limit] <= 0 || value <= static_cast<uint64_t>(attributes[limit]);
  };
  out->resource = static_cast<uint32_t>(r.resType);
  switch (r.resType) {
    case CU_RESOURCE_TYPE_ARRAY: {
      const ArrayObj* a = arrays().get(bits(r.res.array.hArray));
      if (!a || a->device != d) return CUDA_ERROR_INVALID_VALUE;
      out->array = bits(r.res.array.hArray);
      return CUDA_SUCCESS;
    }
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
      client::log(client::Level::kWarn, "%s is refused for a mipmapped array: those are not supported yet", call);
      return CUDA_ERROR_NOT_SUPPORTED;
    case CU_RESOURCE_TYPE_LINEAR: {
      const auto& l = r.res.linear;
      if (const CUresult rc = check_format(call, l.format, l.numChannels); rc != CUDA_SUCCESS) return rc;
      if (!aligned(l.devPtr, CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT)) return CUDA_ERROR_INVALID_VALUE;
      if (!within(l.sizeInBytes / array_element_bytes(l.format, l.numChannels),
                  CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH))
        return CUDA_ERROR_INVALID_VALUE;
      out->address = l.devPtr, out->bytes = l.sizeInBytes, out->format = l.format, out->channels = l.numChannels;
      return check_memory(call, d, l.devPtr, l.sizeInBytes);
    }
    case CU_RESOURCE_TYPE_PITCH2D: {
      const auto& p = r.res.pitch2D;
      if (const CUresult rc = check_format(call, p.format, p.numChannels); rc != CUDA_SUCCESS) return rc;
      if (!aligned(p.devPtr, CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT) ||
          !aligned(p.pitchInBytes, CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT) ||
          !within(p.width, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH) ||
          !within(p.height, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT) ||
          !within(p.pitchInBytes, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH))
        return CUDA_ERROR_INVALID_VALUE;
      uint64_t row, span;
      if (p.width == 0 || p.height == 0 ||
          __builtin_mul_overflow(p.width, array_element_bytes(p.format, p.numChannels), &row) || p.pitchInBytes < row ||
          __builtin_mul_overflow(p.height - 1, p.pitchInBytes, &span) || __builtin_add_overflow(span, row, &span))
        return CUDA_ERROR_INVALID_VALUE;
      out->address = p.devPtr, out->bytes = span, out->format = p.format, out->channels = p.numChannels;
      out->width = p.width, out->height = p.height, out->pitch = p.pitchInBytes;
      return check_memory(call, d, p.devPtr, span);
    }
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

bool describe(const CUDA_TEXTURE_DESC& t, TextureArgs* out) {
  constexpr unsigned kFlags = CU_TRSF_READ_AS_INTEGER | CU_TRSF_NORMALIZED_COORDINATES | CU_TRSF_SRGB |
                              CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION | CU_TRSF_SEAMLESS_CUBEMAP;
  if ((t.flags & ~kFlags) || static_cast<unsigned>(t.filterMode) > CU_TR_FILTER_MODE_LINEAR ||
      static_cast<unsigned>(t.mipmapFilterMode) > CU_TR_FILTER_MODE_LINEAR)
    return false;
  for (int i = 0; i < 3; ++i) {
    if (static_cast<unsigned>(t.addressMode[i]) > CU_TR_ADDRESS_MODE_BORDER) return false;
    out->address_mode[i] = t.addressMode[i];
  }
  if (t.flags & CU_TRSF_SEAMLESS_CUBEMAP) {
    const ArrayObj* a = out->array ? arrays().get(out->array) : nullptr;
    if (!a || !(a->shape.flags & CUDA_ARRAY3D_CUBEMAP)) return false;
  }
  out->filter_mode = t.filterMode, out->flags = t.flags, out->max_anisotropy = t.maxAnisotropy;
  out->mipmap_filter_mode = t.mipmapFilterMode, out->mipmap_level_bias = t.mipmapLevelBias;
  out->min_mipmap_level = t.minMipmapLevelClamp, out->max_mipmap_level = t.maxMipmapLevelClamp;
  std::copy_n(t.borderColor, 4, out->border);
  return true;
}

// cuda.h: only of arrays. Whether the view suits the array is the driver's to say.
bool describe(const CUDA_RESOURCE_VIEW_DESC& v, TextureArgs* out) {
  if (!out->array || static_cast<unsigned>(v.format) > CU_RES_VIEW_FORMAT_UNSIGNED_BC7) return false;
  out->has_view = 1, out->view_format = v.format;
  out->view_width = v.width, out->view_height = v.height, out->view_depth = v.depth;
  out->first_level = v.firstMipmapLevel, out->last_level = v.lastMipmapLevel;
  out->first_layer = v.firstLayer, out->last_layer = v.lastLayer;
  return true;
}

CUresult create_object(DeviceState* d, const TextureArgs& args, Object object, uint64_t* value) {
  static uint64_t serial = 0;
  {
    std::lock_guard lock(g_objects_mu);
    object.name = VHandle::make(HandleKind::kTexture, ++serial, 0);
  }
  object.context = client::current_context();
  wire::TEXTURE_CREATE_req req{};
  req.texture = object.name;
  wire::TEXTURE_CREATE_rep rep{};
  client::Reply reply{&rep, sizeof(rep), nullptr, 0};
  if (const int32_t rc = d->conn().call_bulk(Opcode::TEXTURE_CREATE, req, {&args, sizeof(args)}, &reply); rc != kOk)
    return result(rc);
  std::lock_guard lock(g_objects_mu);
  objects()[{d->ordinal(), static_cast<TextureKind>(args.kind), rep.value}] = object;
  *value = rep.value;
  return CUDA_SUCCESS;
}

CUresult destroy_object(TextureKind kind, uint64_t value) {
  DP_CURRENT(d);
  // A kernel that was launched may still fetch through it.
  Object object;
  if (const CUresult rc = find(kind, value, &object); rc != CUDA_SUCCESS) return rc;
  if (const int32_t rc = d->wait_all(); rc != kOk) return result(rc);
  {
    std::lock_guard lock(g_objects_mu);
    const auto it = objects().find({d->ordinal(), kind, value});
    if (it == objects().end() || it->second.name != object.name) return CUDA_ERROR_INVALID_VALUE;
    objects().erase(it);
  }
  return result(d->conn().post(Opcode::TEXTURE_DESTROY, wire::TEXTURE_DESTROY_req{object.name}));
}

}  // namespace

CUresult cuTexObjectCreate(CUtexObject* pTexObject, const CUDA_RESOURCE_DESC* pResDesc,
                           const CUDA_TEXTURE_DESC* pTexDesc, const CUDA_RESOURCE_VIEW_DESC* pResViewDesc) {
  DP_CURRENT(d);
  TextureArgs args;
  args.kind = static_cast<uint32_t>(TextureKind::kTexture);
  if (const CUresult rc = describe("cuTexObjectCreate", d, *pResDesc, &args); rc != CUDA_SUCCESS) return rc;
  if (!describe(*pTexDesc, &args) || (pResViewDesc && !describe(*pResViewDesc, &args))) return CUDA_ERROR_INVALID_VALUE;
  Object object{{}, 0, *pResDesc, *pTexDesc, {}, pResViewDesc != nullptr};
  if (pResViewDesc) object.view = *pResViewDesc;
  uint64_t value = 0;
  const CUresult rc = create_object(d, args, object, &value);
  if (rc == CUDA_SUCCESS) *pTexObject = value;
  return rc;
}

CUresult cuTexObjectDestroy(CUtexObject texObject) { return destroy_object(TextureKind::kTexture, texObject); }

CUresult cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC* pResDesc, CUtexObject texObject) {
  Object object;
  const CUresult rc = find(TextureKind::kTexture, texObject, &object);
  if (rc == CUDA_SUCCESS) *pResDesc = object.resource;
  return rc;
}

CUresult cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC* pTexDesc, CUtexObject texObject) {
  Object object;
  const CUresult rc = find(TextureKind::kTexture, texObject, &object);
  if (rc == CUDA_SUCCESS) *pTexDesc = object.texture;
  return rc;
}

CUresult cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC* pResViewDesc, CUtexObject texObject) {
  Object object;
  if (const CUresult rc = find(TextureKind::kTexture, texObject, &object); rc != CUDA_SUCCESS) return rc;
  if (!object.has_view) return CUDA_ERROR_INVALID_VALUE;
  *pResViewDesc = object.view;
  return CUDA_SUCCESS;
}

CUresult cuSurfObjectCreate(CUsurfObject* pSurfObject, const CUDA_RESOURCE_DESC* pResDesc) {
  DP_CURRENT(d);
  if (pResDesc->resType != CU_RESOURCE_TYPE_ARRAY) return CUDA_ERROR_INVALID_VALUE;
  TextureArgs args;
  args.kind = static_cast<uint32_t>(TextureKind::kSurface);
  if (const CUresult rc = describe("cuSurfObjectCreate", d, *pResDesc, &args); rc != CUDA_SUCCESS) return rc;
  // cuda.h, CUDA_ARRAY3D_SURFACE_LDST: without it, no surface.
  if (!(arrays().get(args.array)->shape.flags & CUDA_ARRAY3D_SURFACE_LDST)) return CUDA_ERROR_INVALID_VALUE;
  uint64_t value = 0;
  const CUresult rc = create_object(d, args, {{}, 0, *pResDesc, {}, {}, false}, &value);
  if (rc == CUDA_SUCCESS) *pSurfObject = value;
  return rc;
}

CUresult cuSurfObjectDestroy(CUsurfObject surfObject) { return destroy_object(TextureKind::kSurface, surfObject); }

CUresult cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC* pResDesc, CUsurfObject surfObject) {
  Object object;
  const CUresult rc = find(TextureKind::kSurface, surfObject, &object);
  if (rc == CUDA_SUCCESS) *pResDesc = object.resource;
  return rc;
}

// The messages' results are those of a context that is going: nobody is left to be told.
void end_context(uint64_t context) {
  std::vector<std::pair<int, VHandle>> gone;
  {
    std::lock_guard lock(g_objects_mu);
    for (auto it = objects().begin(); it != objects().end();) {
      const bool over = it->second.context == context;
      if (over) gone.push_back({std::get<0>(it->first), it->second.name});
      it = over ? objects().erase(it) : std::next(it);
    }
  }
  for (const auto& [device, name] : gone)
    if (DeviceState* d = client::device_state_if_attached(device))
      (void)d->conn().post(Opcode::TEXTURE_DESTROY, wire::TEXTURE_DESTROY_req{name});
  std::vector<std::pair<uint64_t, DeviceState*>> mine;
  arrays().for_each([&](uint64_t value, const ArrayObj& a) {
    if (a.context == context) mine.push_back({value, a.device});
  });
  for (const auto& [value, d] : mine) (void)destroy_array(value, d);
}

}  // namespace devproxy::sa::texture
