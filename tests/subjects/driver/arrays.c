// SPDX-License-Identifier: Apache-2.0
/* Arrays: descriptors, copies in every direction between host (pageable, pinned), device and arrays with odd pitches
 * and origins, streams, errors. The words:
 *
 * arrays           on any device; texture and surface objects are expected to be refused (the software GPU)
 * arrays objects   and objects are made, asked and destroyed
 * arrays loop S    steps with S milliseconds between them over living arrays and objects, until the file $ARRAYS_STOP
 * is there, then "digest done": for a checkpoint in the middle. The numbers of the objects have a gap. $ARRAYS_OBJECTS:
 * "none" makes no objects; "array" or "memory" also one that shows an array or memory that is gone, which is destroyed
 * when the file $ARRAYS_HEAL is there */
#include <stddef.h>

#include "program.h"

typedef struct {
  size_t width, height, depth;
  CUarray_format format;
  unsigned channels, flags;
  size_t element;
} Shape;

static const Shape kShapes[] = {
    {1000, 0, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0, 1},
    {33, 0, 0, CU_AD_FORMAT_FLOAT, 4, 0, 16},
    {300, 200, 0, CU_AD_FORMAT_HALF, 1, 0, 2},
    {301, 203, 0, CU_AD_FORMAT_SIGNED_INT16, 4, CUDA_ARRAY3D_SURFACE_LDST, 8},
    {40, 30, 7, CU_AD_FORMAT_UNSIGNED_INT32, 2, 0, 8},
    {17, 0, 6, CU_AD_FORMAT_SIGNED_INT8, 2, CUDA_ARRAY3D_LAYERED, 2},
    {31, 9, 5, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_SURFACE_LDST, 4},
    {20, 20, 6, CU_AD_FORMAT_UNSIGNED_INT16, 1, CUDA_ARRAY3D_CUBEMAP, 2},
    {16, 16, 12, CU_AD_FORMAT_SIGNED_INT32, 1, CUDA_ARRAY3D_CUBEMAP | CUDA_ARRAY3D_LAYERED, 4},
    {64, 64, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_TEXTURE_GATHER, 4},
    {5000, 13, 3, CU_AD_FORMAT_FLOAT, 4, 0, 16}, /* six rows fill a staging chunk */
    {40000, 3, 0, CU_AD_FORMAT_FLOAT, 4, 0, 16}, /* a row does not fit into one */
};
enum { kShapeCount = sizeof kShapes / sizeof *kShapes };

static CUarray make(const Shape* s) {
  CUDA_ARRAY3D_DESCRIPTOR d = {s->width, s->height, s->depth, s->format, s->channels, s->flags};
  CUarray a;
  CHECK(cuArray3DCreate(&a, &d));
  return a;
}

static uint8_t byte_at(size_t i, unsigned salt) { return (uint8_t)(i * 167 + (i >> 8) * 13 + salt); }

static void fill_bytes(uint8_t* p, size_t n, unsigned salt) {
  for (size_t i = 0; i < n; ++i) p[i] = byte_at(i, salt);
}

/* The extents of a box and how memory holds it: from `first` on, rows `pitch` apart, slices `rows` rows apart. */
typedef struct {
  size_t width, height, depth, first, pitch, rows, bytes;
} Layout;

static Layout layout(size_t width, size_t height, size_t depth, size_t x, size_t y, size_t z, size_t more) {
  Layout l = {width, height, depth, 0, width + x + more, height + y + more / 5, 0};
  l.first = (z * l.rows + y) * l.pitch + x;
  l.bytes = (z + depth) * l.rows * l.pitch + 64;
  return l;
}

typedef enum { HOST, PINNED, DEVICE, UNIFIED } Place;

static void put(CUDA_MEMCPY3D* c, int is_src, Place place, void* host, CUdeviceptr device, const Layout* l, size_t x,
                size_t y, size_t z) {
  const CUmemorytype type = place == UNIFIED  ? CU_MEMORYTYPE_UNIFIED
                            : place == DEVICE ? CU_MEMORYTYPE_DEVICE
                                              : CU_MEMORYTYPE_HOST;
  if (is_src) {
    c->srcMemoryType = type, c->srcHost = host, c->srcDevice = device, c->srcPitch = l->pitch, c->srcHeight = l->rows;
    c->srcXInBytes = x, c->srcY = y, c->srcZ = z;
  } else {
    c->dstMemoryType = type, c->dstHost = host, c->dstDevice = device, c->dstPitch = l->pitch, c->dstHeight = l->rows;
    c->dstXInBytes = x, c->dstY = y, c->dstZ = z;
  }
}

static void put_array(CUDA_MEMCPY3D* c, int is_src, CUarray a, size_t x, size_t y, size_t z) {
  if (is_src)
    c->srcMemoryType = CU_MEMORYTYPE_ARRAY, c->srcArray = a, c->srcXInBytes = x, c->srcY = y, c->srcZ = z;
  else
    c->dstMemoryType = CU_MEMORYTYPE_ARRAY, c->dstArray = a, c->dstXInBytes = x, c->dstY = y, c->dstZ = z;
}

static void run(CUDA_MEMCPY3D* c, size_t width, size_t height, size_t depth, CUstream stream) {
  c->WidthInBytes = width, c->Height = height, c->Depth = depth;
  if (!stream) {
    CHECK(cuMemcpy3D(c));
    return;
  }
  CHECK(cuMemcpy3DAsync(c, stream));
  CHECK(cuStreamSynchronize(stream));
}

static CUdeviceptr g_device;
static uint8_t *g_pinned, *g_pageable, *g_back;
static const size_t kRoom = 64u << 20;

/* A box of the array out of, and back into, memory of each kind; what lies beside it stays as it was. */
static void round_trip(const Shape* s, Place from, Place to, CUstream stream) {
  const size_t element = s->element, rows = s->height ? s->height : 1, slices = s->depth ? s->depth : 1;
  const size_t width = s->width * element;
  const size_t ax = s->width > 3 ? 2 * element : 0, ay = rows > 2 ? 1 : 0, az = slices > 1 ? 1 : 0;
  const size_t bw = width - ax - (s->width > 3 ? element : 0), bh = rows - ay, bd = slices - az;
  CUarray first = make(s), second = make(s);

  /* all of both arrays, packed: what the box is cut into */
  const Layout whole = layout(width, rows, slices, 0, 0, 0, 0);
  CUDA_MEMCPY3D c = {0};
  for (int i = 0; i < 2; ++i) {
    fill_bytes(g_pageable, whole.bytes, i ? 200 : 1);
    memset(&c, 0, sizeof c);
    put(&c, 1, HOST, g_pageable, 0, &whole, 0, 0, 0);
    put_array(&c, 0, i ? second : first, 0, 0, 0);
    run(&c, width, rows, slices, NULL);
  }

  /* the box: memory -> first, first -> second (elsewhere in it where there is room), second -> memory */
  const Layout in = layout(bw, bh, bd, 5, 3, 1, 11), out = layout(bw, bh, bd, 9, 2, 2, 26);
  EXPECT(in.bytes < kRoom && out.bytes < kRoom && whole.bytes < kRoom);
  uint8_t* source = from == PINNED ? g_pinned : g_pageable;
  fill_bytes(source, in.bytes, 77);
  if (from == DEVICE || from == UNIFIED) CHECK(cuMemcpyHtoD(g_device, source, in.bytes));
  memset(&c, 0, sizeof c);
  put(&c, 1, from, source, g_device, &in, 5, 3, 1);
  put_array(&c, 0, first, ax, ay, az);
  run(&c, bw, bh, bd, stream);
  memset(&c, 0, sizeof c);
  put_array(&c, 1, first, ax, ay, az);
  put_array(&c, 0, second, 0, 0, 0);
  run(&c, bw, bh, bd, stream);
  uint8_t* sink = to == PINNED ? g_pinned : g_back;
  memset(sink, 0xee, out.bytes);
  if (to == DEVICE || to == UNIFIED) CHECK(cuMemcpyHtoD(g_device, sink, out.bytes));
  memset(&c, 0, sizeof c);
  put_array(&c, 1, second, 0, 0, 0);
  put(&c, 0, to, sink, g_device, &out, 9, 2, 2);
  run(&c, bw, bh, bd, stream);
  if (to == DEVICE || to == UNIFIED) {
    CHECK(cuMemcpyDtoH(g_back, g_device, out.bytes));
    sink = g_back;
  }
  size_t touched = 0;
  for (size_t z = 0; z < bd; ++z)
    for (size_t y = 0; y < bh; ++y)
      for (size_t x = 0; x < bw; ++x) {
        const size_t at = out.first + (z * out.rows + y) * out.pitch + x;
        EXPECT_EQ(sink[at], byte_at(in.first + (z * in.rows + y) * in.pitch + x, 77));
        sink[at] = 0xee;
        ++touched;
      }
  EXPECT_EQ(touched, bw * bh * bd);
  for (size_t i = 0; i < out.bytes; ++i)
    if (sink[i] != 0xee) EXPECT_EQ(i, (size_t)-1);

  /* both arrays whole again: the box is where it was put, and nothing else has changed */
  for (int i = 0; i < 2; ++i) {
    memset(&c, 0, sizeof c);
    put_array(&c, 1, i ? second : first, 0, 0, 0);
    put(&c, 0, HOST, g_back, 0, &whole, 0, 0, 0);
    run(&c, width, rows, slices, NULL);
    const size_t ox = i ? 0 : ax, oy = i ? 0 : ay, oz = i ? 0 : az;
    for (size_t z = 0; z < slices; ++z)
      for (size_t y = 0; y < rows; ++y)
        for (size_t x = 0; x < width; ++x) {
          const int inside = x >= ox && x < ox + bw && y >= oy && y < oy + bh && z >= oz && z < oz + bd;
          const size_t at = (z * rows + y) * width + x;
          const uint8_t want = inside ? byte_at(in.first + ((z - oz) * in.rows + y - oy) * in.pitch + x - ox, 77)
                                      : byte_at(at, i ? 200 : 1);
          if (g_back[at] != want) EXPECT_EQ(g_back[at], want);
        }
  }
  CHECK(cuArrayDestroy(first));
  CHECK(cuArrayDestroy(second));
}

static void descriptors(void) {
  for (int i = 0; i < kShapeCount; ++i) {
    const Shape* s = &kShapes[i];
    CUarray a = make(s);
    CUDA_ARRAY3D_DESCRIPTOR d;
    CUDA_ARRAY_DESCRIPTOR flat;
    memset(&d, 0xff, sizeof d), memset(&flat, 0xff, sizeof flat);
    CHECK(cuArray3DGetDescriptor(&d, a));
    EXPECT(d.Width == s->width && d.Height == s->height && d.Depth == s->depth);
    EXPECT(d.Format == s->format && d.NumChannels == s->channels && d.Flags == s->flags);
    CHECK(cuArrayGetDescriptor(&flat, a));
    EXPECT(flat.Width == s->width && flat.Height == s->height && flat.Format == s->format);
    EXPECT_EQ(flat.NumChannels, s->channels);
    CHECK(cuArrayDestroy(a));
    EXPECT_RESULT(cuArrayDestroy(a), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_RESULT(cuArrayGetDescriptor(&flat, a), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_RESULT(cuArray3DGetDescriptor(&d, a), CUDA_ERROR_INVALID_HANDLE);
  }
  CUDA_ARRAY_DESCRIPTOR two = {50, 20, CU_AD_FORMAT_UNSIGNED_INT8, 4};
  CUarray a;
  CHECK(cuArrayCreate(&a, &two));
  CUDA_ARRAY3D_DESCRIPTOR d;
  CHECK(cuArray3DGetDescriptor(&d, a));
  EXPECT(d.Width == 50 && d.Height == 20 && d.Depth == 0 && d.Flags == 0 && d.NumChannels == 4);
  CHECK(cuArrayDestroy(a));
}

static void bad_shapes(void) {
  static const struct {
    CUDA_ARRAY3D_DESCRIPTOR d;
    CUresult result;
  } kBad[] = {
      {{0, 4, 0, CU_AD_FORMAT_FLOAT, 1, 0}, CUDA_ERROR_INVALID_VALUE},
      {{4, 4, 0, CU_AD_FORMAT_FLOAT, 3, 0}, CUDA_ERROR_INVALID_VALUE},
      {{4, 4, 0, CU_AD_FORMAT_FLOAT, 0, 0}, CUDA_ERROR_INVALID_VALUE},
      {{4, 4, 0, (CUarray_format)0x7, 1, 0}, CUDA_ERROR_INVALID_VALUE},
      {{4, 0, 4, CU_AD_FORMAT_FLOAT, 1, 0}, CUDA_ERROR_INVALID_VALUE},
      {{4, 4, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_LAYERED}, CUDA_ERROR_INVALID_VALUE},
      {{4, 5, 6, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP}, CUDA_ERROR_INVALID_VALUE},
      {{4, 4, 5, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP}, CUDA_ERROR_INVALID_VALUE},
      {{4, 4, 9, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP | CUDA_ARRAY3D_LAYERED}, CUDA_ERROR_INVALID_VALUE},
      {{4, 0, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_TEXTURE_GATHER}, CUDA_ERROR_INVALID_VALUE},
      {{4, 4, 0, CU_AD_FORMAT_FLOAT, 1, 0x8000}, CUDA_ERROR_INVALID_VALUE},
      {{1u << 30, 4, 0, CU_AD_FORMAT_FLOAT, 1, 0}, CUDA_ERROR_INVALID_VALUE},
      {{4, 4, 0, CU_AD_FORMAT_NV12, 4, 0}, CUDA_ERROR_NOT_SUPPORTED},
      {{4, 4, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_SPARSE}, CUDA_ERROR_NOT_SUPPORTED},
  };
  CUarray a = (CUarray)7;
  for (size_t i = 0; i < sizeof kBad / sizeof *kBad; ++i)
    EXPECT_RESULT(cuArray3DCreate(&a, &kBad[i].d), kBad[i].result);
  EXPECT(a == (CUarray)7);
  EXPECT_RESULT(cuArray3DCreate(&a, NULL), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuArray3DCreate(NULL, &kBad[0].d), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuArrayDestroy(NULL), CUDA_ERROR_INVALID_HANDLE);
  CUmipmappedArray m;
  EXPECT_RESULT(cuMipmappedArrayCreate(&m, &kBad[0].d, 1), CUDA_ERROR_NOT_SUPPORTED);
}

static void bad_copies(void) {
  const Shape s = {10, 8, 0, CU_AD_FORMAT_FLOAT, 1, 0, 4};
  CUarray a = make(&s), other;
  const CUDA_MEMCPY3D good = {.srcMemoryType = CU_MEMORYTYPE_HOST,
                              .srcHost = g_pageable,
                              .srcPitch = 40,
                              .dstMemoryType = CU_MEMORYTYPE_ARRAY,
                              .dstArray = a,
                              .WidthInBytes = 40,
                              .Height = 8,
                              .Depth = 1};
  CUDA_MEMCPY3D c = good;
  CHECK(cuMemcpy3D(&c));
#define WRONG(change)                                        \
  do {                                                       \
    c = good;                                                \
    change;                                                  \
    EXPECT_RESULT(cuMemcpy3D(&c), CUDA_ERROR_INVALID_VALUE); \
  } while (0)
  WRONG(c.dstXInBytes = 4);
  WRONG(c.dstY = 1);
  WRONG(c.dstZ = 1);
  WRONG(c.Depth = 2);
  WRONG(c.WidthInBytes = 44);
  WRONG(c.WidthInBytes = 38); /* no whole elements */
  WRONG((c.WidthInBytes = 20, c.dstXInBytes = 2));
  WRONG(c.srcPitch = 36);
  WRONG((c.srcXInBytes = 4, c.WidthInBytes = 40)); /* more than the pitch */
  WRONG(c.srcHeight = 7);
  WRONG(c.srcHost = NULL);
  WRONG(c.dstArray = NULL);
  WRONG(c.dstArray = (CUarray)g_pageable);
  WRONG(c.dstLOD = 1);
  WRONG((c.srcMemoryType = CU_MEMORYTYPE_DEVICE, c.srcDevice = (CUdeviceptr)g_pageable));
  WRONG((c.srcMemoryType = CU_MEMORYTYPE_DEVICE, c.srcDevice = g_device + kRoom - 100));
  WRONG(c.srcMemoryType = (CUmemorytype)9);
  WRONG(c.dstY = (size_t)-1);
  WRONG(c.Height = (size_t)1 << 62);
  c = good, c.WidthInBytes = 0; /* nothing is copied */
  CHECK(cuMemcpy3D(&c));
  const Shape wide = {10, 8, 0, CU_AD_FORMAT_FLOAT, 2, 0, 8};
  other = make(&wide);
  c = good, put_array(&c, 1, other, 0, 0, 0);
  EXPECT_RESULT(cuMemcpy3D(&c), CUDA_ERROR_INVALID_VALUE); /* elements of another size */
  CHECK(cuArrayDestroy(other));
  CHECK(cuArrayDestroy(a));
  c = good;
  EXPECT_RESULT(cuMemcpy3D(&c), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyHtoA(a, 0, g_pageable, 8), CUDA_ERROR_INVALID_VALUE);
}

/* cuMemcpy2D and the copies of runs of bytes. */
static void other_calls(CUstream stream) {
  const Shape plane = {64, 16, 0, CU_AD_FORMAT_UNSIGNED_INT32, 1, 0, 4},
              line = {256, 0, 0, CU_AD_FORMAT_FLOAT, 1, 0, 4};
  CUarray a = make(&plane), b = make(&line), c1 = make(&line);
  fill_bytes(g_pageable, 300 * 16, 3);
  CUDA_MEMCPY2D c = {.srcMemoryType = CU_MEMORYTYPE_HOST,
                     .srcHost = g_pageable,
                     .srcPitch = 300,
                     .srcXInBytes = 7,
                     .srcY = 1,
                     .dstMemoryType = CU_MEMORYTYPE_ARRAY,
                     .dstArray = a,
                     .dstXInBytes = 8,
                     .dstY = 2,
                     .WidthInBytes = 200,
                     .Height = 11};
  CHECK(cuMemcpy2D(&c));
  CUDA_MEMCPY2D out = {.srcMemoryType = CU_MEMORYTYPE_ARRAY,
                       .srcArray = a,
                       .srcXInBytes = 8,
                       .srcY = 2,
                       .dstMemoryType = CU_MEMORYTYPE_HOST,
                       .dstHost = g_pinned,
                       .dstPitch = 220,
                       .WidthInBytes = 200,
                       .Height = 11};
  memset(g_pinned, 0, 220 * 11);
  CHECK(cuMemcpy2DAsync(&out, stream));
  CHECK(cuStreamSynchronize(stream));
  for (size_t y = 0; y < 11; ++y)
    for (size_t x = 0; x < 220; ++x) EXPECT_EQ(g_pinned[y * 220 + x], x < 200 ? byte_at((y + 1) * 300 + 7 + x, 3) : 0);
  CHECK(cuMemcpy2DUnaligned(&c));

  fill_bytes(g_pageable, 1024, 9);
  CHECK(cuMemcpyHtoA(b, 16, g_pageable, 1008));
  CHECK(cuMemcpyAtoA(c1, 0, b, 16, 1008));
  CHECK(cuMemcpyAtoD(g_device, c1, 4, 1000));
  CHECK(cuMemcpyDtoA(b, 24, g_device + 8, 800));
  memset(g_back, 0, 1024);
  CHECK(cuMemcpyAtoH(g_back, b, 24, 800));
  for (size_t i = 0; i < 800; ++i) EXPECT_EQ(g_back[i], byte_at(i + 12, 9));
  fill_bytes(g_pinned, 1024, 31);
  CHECK(cuMemcpyHtoAAsync(b, 0, g_pinned, 1024, stream));
  CHECK(cuMemcpyAtoHAsync(g_pinned + 4096, b, 4, 1020, stream));
  CHECK(cuStreamSynchronize(stream));
  EXPECT(memcmp(g_pinned + 4096, g_pinned + 4, 1020) == 0);
  EXPECT_RESULT(cuMemcpyHtoA(b, 0, g_pageable, 1028), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyHtoA(b, 2, g_pageable, 8), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyHtoA(a, 0, g_pageable, 8), CUDA_ERROR_INVALID_VALUE); /* two dimensions */
  EXPECT_RESULT(cuMemcpyAtoD((CUdeviceptr)g_back, b, 0, 8), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuArrayDestroy(a));
  CHECK(cuArrayDestroy(b));
  CHECK(cuArrayDestroy(c1));
}

/* A pageable source is free when the call returns; what comes behind a closed gate waits, also into an array. */
static void order(CUstream stream) {
  const Shape s = {1000, 50, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0, 1};
  CUarray a = make(&s);
  static Gate gate;
  CUDA_MEMCPY2D in = {.srcMemoryType = CU_MEMORYTYPE_HOST,
                      .srcHost = g_pageable,
                      .srcPitch = 1000,
                      .dstMemoryType = CU_MEMORYTYPE_ARRAY,
                      .dstArray = a,
                      .WidthInBytes = 1000,
                      .Height = 50};
  CUDA_MEMCPY2D out = {.srcMemoryType = CU_MEMORYTYPE_ARRAY,
                       .srcArray = a,
                       .dstMemoryType = CU_MEMORYTYPE_HOST,
                       .dstHost = g_pinned,
                       .dstPitch = 1000,
                       .WidthInBytes = 1000,
                       .Height = 50};
  memset(g_pageable, 1, 50000);
  CHECK(cuMemcpy2D(&in));
  memset(g_pinned, 0, 50000);
  close_gate(&gate, stream);
  fill_bytes(g_pageable, 50000, 5);
  CHECK(cuMemcpy2DAsync(&in, stream));
  memset(g_pageable, 0x55, 50000);
  CHECK(cuMemcpy2DAsync(&out, stream));
  EXPECT_EQ(g_pinned[0], 0);
  EXPECT_RESULT(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
  open_gate(&gate);
  CHECK(cuStreamSynchronize(stream));
  for (size_t i = 0; i < 50000; ++i) EXPECT_EQ(g_pinned[i], byte_at(i, 5));

  /* a copy of an array is no node of a graph yet: refused by name, and the capture with it */
  CUgraph graph;
  CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  EXPECT_RESULT(cuMemcpy2DAsync(&out, stream), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_RESULT(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CUarray none;
  const CUDA_ARRAY_DESCRIPTOR d = {4, 4, CU_AD_FORMAT_FLOAT, 1};
  EXPECT_RESULT(cuArrayCreate(&none, &d), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_RESULT(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK(cuArrayDestroy(a));
}

static CUDA_RESOURCE_DESC of_array(CUarray a) {
  CUDA_RESOURCE_DESC r = {.resType = CU_RESOURCE_TYPE_ARRAY};
  r.res.array.hArray = a;
  return r;
}

static void objects(void) {
  const Shape s = {64, 32, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_SURFACE_LDST, 4},
              plain = {64, 32, 0, CU_AD_FORMAT_HALF, 2, 0, 4};
  CUarray a = make(&s), p = make(&plain);
  CUDA_TEXTURE_DESC how = {.flags = CU_TRSF_NORMALIZED_COORDINATES,
                           .filterMode = CU_TR_FILTER_MODE_LINEAR,
                           .maxAnisotropy = 4,
                           .borderColor = {1, 2, 3, 4}};
  how.addressMode[0] = CU_TR_ADDRESS_MODE_MIRROR, how.addressMode[1] = CU_TR_ADDRESS_MODE_BORDER;
  CUDA_RESOURCE_VIEW_DESC view = {.format = CU_RES_VIEW_FORMAT_FLOAT_1X32, .width = 64, .height = 32}, view_back;
  CUDA_RESOURCE_DESC r = of_array(a), back;
  CUDA_TEXTURE_DESC how_back;
  CUtexObject t = 0, viewed = 0, linear = 0, pitched = 0;
  CUsurfObject surface = 0;
  CHECK(cuTexObjectCreate(&t, &r, &how, NULL));
  CHECK(cuTexObjectCreate(&viewed, &r, &how, &view));
  CHECK(cuSurfObjectCreate(&surface, &r));
  EXPECT(t != 0 && viewed != 0 && t != viewed && surface != 0);
  memset(&back, 0xff, sizeof back), memset(&how_back, 0xff, sizeof how_back);
  CHECK(cuTexObjectGetResourceDesc(&back, t));
  EXPECT(back.resType == CU_RESOURCE_TYPE_ARRAY && back.res.array.hArray == a);
  CHECK(cuTexObjectGetTextureDesc(&how_back, t));
  EXPECT(memcmp(&how, &how_back, offsetof(CUDA_TEXTURE_DESC, reserved)) == 0);
  EXPECT_RESULT(cuTexObjectGetResourceViewDesc(&view_back, t), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuTexObjectGetResourceViewDesc(&view_back, viewed));
  EXPECT(view_back.format == view.format && view_back.width == 64 && view_back.height == 32);
  CHECK(cuSurfObjectGetResourceDesc(&back, surface));
  EXPECT(back.res.array.hArray == a);

  CUDA_RESOURCE_DESC l = {.resType = CU_RESOURCE_TYPE_LINEAR}, q = {.resType = CU_RESOURCE_TYPE_PITCH2D};
  l.res.linear.devPtr = g_device, l.res.linear.format = CU_AD_FORMAT_UNSIGNED_INT32, l.res.linear.numChannels = 4;
  l.res.linear.sizeInBytes = 65536;
  q.res.pitch2D.devPtr = g_device, q.res.pitch2D.format = CU_AD_FORMAT_UNSIGNED_INT8, q.res.pitch2D.numChannels = 1;
  q.res.pitch2D.width = 100, q.res.pitch2D.height = 50, q.res.pitch2D.pitchInBytes = 512;
  CHECK(cuTexObjectCreate(&linear, &l, &how, NULL));
  CHECK(cuTexObjectCreate(&pitched, &q, &how, NULL));
  CHECK(cuTexObjectGetResourceDesc(&back, linear));
  EXPECT(back.res.linear.devPtr == g_device && back.res.linear.sizeInBytes == 65536);

  CUtexObject none = 99;
#define NO_TEXTURE(resource, description, v) \
  EXPECT_RESULT(cuTexObjectCreate(&none, resource, description, v), CUDA_ERROR_INVALID_VALUE)
  CUDA_RESOURCE_DESC w = r;
  w.flags = 1;
  NO_TEXTURE(&w, &how, NULL);
  w = of_array(NULL);
  NO_TEXTURE(&w, &how, NULL);
  w = l, w.res.linear.devPtr += 4;
  NO_TEXTURE(&w, &how, NULL);
  w = l, w.res.linear.devPtr = (CUdeviceptr)g_pageable & ~(CUdeviceptr)4095;
  NO_TEXTURE(&w, &how, NULL);
  w = l, w.res.linear.sizeInBytes = kRoom + 1;
  NO_TEXTURE(&w, &how, NULL);
  w = l, w.res.linear.numChannels = 3;
  NO_TEXTURE(&w, &how, NULL);
  w = q, w.res.pitch2D.width = 600;
  NO_TEXTURE(&w, &how, NULL);
  w = q, w.res.pitch2D.height = kRoom;
  NO_TEXTURE(&w, &how, NULL);
  w = r, w.resType = (CUresourcetype)8;
  NO_TEXTURE(&w, &how, NULL);
  NO_TEXTURE(&l, &how, &view);
  NO_TEXTURE(&r, NULL, NULL);
  CUDA_TEXTURE_DESC bad = how;
  bad.addressMode[2] = (CUaddress_mode)4;
  NO_TEXTURE(&r, &bad, NULL);
  bad = how, bad.filterMode = (CUfilter_mode)2;
  NO_TEXTURE(&r, &bad, NULL);
  bad = how, bad.flags |= 0x100;
  NO_TEXTURE(&r, &bad, NULL);
  bad = how, bad.flags |= CU_TRSF_SEAMLESS_CUBEMAP;
  NO_TEXTURE(&r, &bad, NULL);
  w = r, w.resType = CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
  EXPECT_RESULT(cuTexObjectCreate(&none, &w, &how, NULL), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(none, 99);
  w = of_array(p);
  EXPECT_RESULT(cuSurfObjectCreate(&none, &w), CUDA_ERROR_INVALID_VALUE); /* not made for surfaces */
  EXPECT_RESULT(cuSurfObjectCreate(&none, &l), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuTexObjectDestroy(0x7777), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuTexObjectDestroy(t));
  EXPECT_RESULT(cuTexObjectDestroy(t), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuTexObjectGetResourceDesc(&back, t), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuTexObjectDestroy(viewed));
  CHECK(cuTexObjectDestroy(linear));
  CHECK(cuTexObjectDestroy(pitched));
  CHECK(cuSurfObjectDestroy(surface));
  EXPECT_RESULT(cuSurfObjectDestroy(surface), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuArrayDestroy(a));
  CHECK(cuArrayDestroy(p));
}

/* A context takes its arrays and objects along. */
static void contexts(CUdevice dev, int with_objects) {
  CUcontext before, ctx;
  CHECK(cuCtxGetCurrent(&before));
  CHECK(cuCtxCreate(&ctx, NULL, 0, dev));
  const Shape s = {8, 8, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_SURFACE_LDST, 4};
  CUarray a = make(&s);
  CUsurfObject surface = 0;
  CUDA_RESOURCE_DESC r = of_array(a);
  if (with_objects) CHECK(cuSurfObjectCreate(&surface, &r));
  CHECK(cuCtxDestroy(ctx));
  CHECK(cuCtxSetCurrent(before));
  EXPECT_RESULT(cuArrayDestroy(a), CUDA_ERROR_INVALID_HANDLE);
  if (with_objects) EXPECT_RESULT(cuSurfObjectDestroy(surface), CUDA_ERROR_INVALID_VALUE);
}

static void memory_is_counted(void) {
  size_t before, during, after, total;
  const Shape s = {4096, 1024, 0, CU_AD_FORMAT_FLOAT, 4, 0, 16}; /* 64 MiB */
  CHECK(cuMemGetInfo(&before, &total));
  CUarray a = make(&s);
  CHECK(cuMemGetInfo(&during, &total));
  CHECK(cuArrayDestroy(a));
  CHECK(cuMemGetInfo(&after, &total));
  EXPECT(before - during >= 64u << 20);
  EXPECT_EQ(before, after);
  CUarray all[64];
  int made = 0;
  CUresult rc = CUDA_SUCCESS;
  CUDA_ARRAY3D_DESCRIPTOR d = {4096, 1024, 0, CU_AD_FORMAT_FLOAT, 4, 0};
  while (made < 64 && (rc = cuArray3DCreate(&all[made], &d)) == CUDA_SUCCESS) ++made;
  EXPECT_EQ(rc, CUDA_ERROR_OUT_OF_MEMORY);
  while (made) CHECK(cuArrayDestroy(all[--made]));
}

static uint32_t word_of(unsigned step, size_t i) { return (uint32_t)(step * 2654435761u + i * 40503u); }

/* In each step: the step's words into one array, compared in the next; the others are compared with what they got at
 * the start; the objects answer for what they were made of. */
static int is_there(const char* variable) {
  const char* path = getenv(variable);
  return path != NULL && access(path, F_OK) == 0;
}

static int loop(unsigned ms) {
  const Shape plane = {100, 40, 0, CU_AD_FORMAT_UNSIGNED_INT32, 1, CUDA_ARRAY3D_SURFACE_LDST, 4},
              box = {33, 20, 9, CU_AD_FORMAT_UNSIGNED_INT32, 4, 0, 16},
              layers = {50, 0, 7, CU_AD_FORMAT_UNSIGNED_INT32, 1, CUDA_ARRAY3D_LAYERED, 4};
  CUarray gone = make(&box), a = make(&plane), b = make(&box), c = make(&layers);
  const char* which = getenv("ARRAYS_OBJECTS") ? getenv("ARRAYS_OBJECTS") : "";
  const int with_objects = strcmp(which, "none") != 0;
  int dangling = strcmp(which, "array") == 0 || strcmp(which, "memory") == 0;
  CUdeviceptr lost;
  CHECK(cuMemAlloc(&lost, 65536));
  CUtexObject early = 0, t = 0, l = 0;
  CUsurfObject s = 0;
  CUDA_RESOURCE_DESC of_a = of_array(a), of_gone = of_array(gone), linear = {.resType = CU_RESOURCE_TYPE_LINEAR}, back;
  CUDA_TEXTURE_DESC how = {.flags = 0};
  linear.res.linear.devPtr = g_device, linear.res.linear.format = CU_AD_FORMAT_FLOAT;
  linear.res.linear.numChannels = 1, linear.res.linear.sizeInBytes = 4096;
  if (with_objects) { /* of two numbers one will be free when the job is restored, the others are behind it */
    CUtexObject first;
    CUDA_RESOURCE_DESC of_lost = linear;
    of_lost.res.linear.devPtr = lost;
    CHECK(cuTexObjectCreate(&first, &of_a, &how, NULL));
    CHECK(cuTexObjectCreate(&early, strcmp(which, "memory") ? &of_gone : &of_lost, &how, NULL));
    CHECK(cuTexObjectCreate(&t, &of_a, &how, NULL));
    CHECK(cuSurfObjectCreate(&s, &of_a));
    CHECK(cuTexObjectCreate(&l, &linear, &how, NULL));
    CHECK(cuTexObjectDestroy(first));
    if (!dangling) CHECK(cuTexObjectDestroy(early));
  }
  CHECK(cuArrayDestroy(gone));
  CHECK(cuMemFree(lost));
  uint32_t *words = malloc(1 << 20), *got = malloc(1 << 20);
  const CUDA_MEMCPY3D in = {.srcMemoryType = CU_MEMORYTYPE_HOST,
                            .srcHost = words,
                            .dstMemoryType = CU_MEMORYTYPE_ARRAY},
                      out = {.srcMemoryType = CU_MEMORYTYPE_ARRAY, .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = got};
  const struct {
    CUarray array;
    size_t width, height, depth;
  } kept[] = {{b, 33 * 16, 20, 9}, {c, 200, 1, 7}};
  for (int i = 0; i < 2; ++i) {
    CUDA_MEMCPY3D copy = in;
    for (size_t k = 0; k < 1 << 18; ++k) words[k] = word_of(1000 + (unsigned)i, k);
    copy.dstArray = kept[i].array, copy.srcPitch = kept[i].width;
    run(&copy, kept[i].width, kept[i].height, kept[i].depth, NULL);
  }
  for (unsigned step = 0; !is_there("ARRAYS_STOP"); ++step) {
    CUDA_MEMCPY3D copy = out;
    if (dangling && is_there("ARRAYS_HEAL")) {
      CHECK(cuTexObjectDestroy(early));
      dangling = 0;
      printf("healed\n");
    }
    if (step) {
      copy.srcArray = a, copy.dstPitch = 400;
      run(&copy, 400, 40, 1, NULL);
      for (size_t k = 0; k < 4000; ++k) EXPECT_EQ(got[k], word_of(step - 1, k));
    }
    for (int i = 0; i < 2; ++i) {
      copy = out, copy.srcArray = kept[i].array, copy.dstPitch = kept[i].width;
      run(&copy, kept[i].width, kept[i].height, kept[i].depth, NULL);
      const size_t n = kept[i].width / 4 * kept[i].height * kept[i].depth;
      for (size_t k = 0; k < n; ++k) EXPECT_EQ(got[k], word_of(1000 + (unsigned)i, k));
    }
    for (size_t k = 0; k < 4000; ++k) words[k] = word_of(step, k);
    copy = in, copy.dstArray = a, copy.srcPitch = 400;
    run(&copy, 400, 40, 1, NULL);
    if (with_objects) {
      CHECK(cuTexObjectGetResourceDesc(&back, t));
      EXPECT(back.res.array.hArray == a);
      CHECK(cuTexObjectGetResourceDesc(&back, l));
      EXPECT(back.res.linear.devPtr == g_device);
    }
    printf("arrays step %u\n", step);
    fflush(stdout);
    usleep(ms * 1000);
  }
  if (with_objects) {
    CHECK(cuTexObjectDestroy(t));
    CHECK(cuTexObjectDestroy(l));
    CHECK(cuSurfObjectDestroy(s));
  }
  CHECK(cuArrayDestroy(a));
  CHECK(cuArrayDestroy(b));
  CHECK(cuArrayDestroy(c));
  printf("digest done\n");
  return 0;
}

int main(int argc, char** argv) {
  const CUdevice dev = start();
  const int with_objects = argc > 1 && strcmp(argv[1], "objects") == 0;
  CHECK(cuMemAlloc(&g_device, kRoom));
  if (argc > 2 && strcmp(argv[1], "loop") == 0) return loop((unsigned)atoi(argv[2]));
  CHECK(cuMemAllocHost((void**)&g_pinned, kRoom));
  g_pageable = malloc(kRoom), g_back = malloc(kRoom);
  CUstream stream;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  descriptors();
  bad_shapes();
  bad_copies();
  for (int i = 0; i < kShapeCount; ++i) {
    round_trip(&kShapes[i], HOST, HOST, NULL);
    round_trip(&kShapes[i], PINNED, DEVICE, stream);
    round_trip(&kShapes[i], DEVICE, PINNED, stream);
    round_trip(&kShapes[i], UNIFIED, UNIFIED, NULL);
    round_trip(&kShapes[i], HOST, PINNED, stream);
  }
  other_calls(stream);
  order(stream);
  contexts(dev, with_objects);
  memory_is_counted();
  if (with_objects) {
    objects();
  } else {
    const Shape s = {8, 8, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_SURFACE_LDST, 4};
    CUarray a = make(&s);
    CUDA_RESOURCE_DESC r = of_array(a);
    CUDA_TEXTURE_DESC how = {.flags = 0};
    unsigned long long none = 0;
    EXPECT_RESULT(cuTexObjectCreate(&none, &r, &how, NULL), CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_RESULT(cuSurfObjectCreate(&none, &r), CUDA_ERROR_NOT_SUPPORTED);
    CHECK(cuArrayDestroy(a));
  }
  return pass("arrays");
}
