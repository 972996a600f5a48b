// SPDX-License-Identifier: Apache-2.0
#include "devproxy/csrc/server/dump.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "devproxy/csrc/base/fault.h"
#include "devproxy/csrc/server/connection.h"
#include "devproxy/csrc/server/staged_dump.h"
#include "devproxy/csrc/server/state_files.h"
#include "devproxy/csrc/server/state_record.h"

namespace devproxy::server {

namespace {

// Where a sparse file holds pages.
Status data_extents(const std::string& path, std::vector<Range>* extents) {
  const File file(path, O_RDONLY);
  if (file.fd < 0) return Status::from_errno(kFileNotFound, "opening " + path);
  for (off_t at = 0;;) {
    const off_t data = lseek(file.fd, at, SEEK_DATA);
    if (data < 0 && errno == ENXIO) return {};
    const off_t hole = data < 0 ? -1 : lseek(file.fd, data, SEEK_HOLE);
    if (hole < 0) return Status::from_errno(kUnknown, "looking for the used parts of " + path);
    extents->push_back({static_cast<uint64_t>(data), static_cast<uint64_t>(hole - data)});
    at = hole;
  }
}

Status dump_pieces(const std::string& path, const std::vector<Piece>& pieces,
                   const std::function<Status(int fd, const Piece&)>& write) {
  const File file(path, O_WRONLY | O_CREAT | O_TRUNC);
  if (file.fd < 0) return Status::from_errno(kFileNotFound, "making " + path);
  return copy_pieces(pieces, [&](const Piece& p) { return write(file.fd, p); }).with("writing " + path);
}

// Behind the ranges. A piece is some rows: an array has no addresses to cut it by.
Status dump_arrays(Connection& connection, StagedWriter& file, uint64_t* end) {
  const std::vector<ArrayPiece> pieces = connection.state().array_pieces(*end);
  for (const ArrayPiece& piece : pieces) {
    const ArrayObject& array = *connection.state().arrays().find(piece.handle);
    const uint64_t row = array.extent.width_bytes, all = array.extent.rows * array.extent.slices;
    const uint64_t at_once = std::max<uint64_t>(1, kPieceBytes / row);
    std::vector<uint8_t> bounce(std::min(at_once, all) * row);
    for (uint64_t done = 0; done < all; done += at_once) {
      const uint64_t rows = std::min(at_once, all - done);
      Status s = connection.device().read_array(array.array, done, rows, bounce.data());
      if (s.ok()) s = file.write_own(bounce.data(), rows * row, piece.offset + done * row);
      if (!s.ok()) return std::move(s).with("writing an array's contents");
    }
    *end = piece.offset + all * row;
  }
  return {};
}

Status dump_device_into(Connection& connection, StagedWriter& file, DeviceBytes* bytes) {
  const std::vector<Piece> pieces = connection.memory().pieces();
  Status s = copy_pieces(pieces, [&](const Piece& p) -> Status {
    if (Status fault = DP_FAULT(server_dump_mid); !fault.ok()) return fault;
    if (const void* view = connection.device().host_view(p.addr, p.bytes)) return file.write(view, p.bytes, p.offset);
    return connection.device().read_pieces(p.addr, p.bytes, [&](const void* from, size_t bytes, size_t at) {
      return file.write(from, bytes, p.offset + at);
    });
  });
  bytes->all = end_of(pieces);
  if (s.ok()) s = dump_arrays(connection, file, &bytes->all);
  if (s.ok()) s = file.finish(bytes->all);
  bytes->written = file.written_bytes();
  return s;
}

}  // namespace

Status dump_device(Connection& connection, const std::string& dir, BlockIndex* index, DeviceBytes* bytes) {
  auto file = StagedWriter::make(dir, connection.parts().gpu, connection.number(), index);
  if (!file.ok()) return file.status();
  return dump_device_into(connection, **file, bytes).with("writing " + (*file)->path());
}

Status dump_images(ImageStore& store, const std::string& path, ServerRecord* state) {
  std::vector<Piece> pieces;
  std::vector<ImageStore::Ref> images = store.all();
  // One order, so that the next dump's file begins with the same chunks.
  std::sort(images.begin(), images.end(), [](const auto& a, const auto& b) { return a->hash.low < b->hash.low; });
  uint64_t offset = 0;
  for (const auto& image : images) {
    state->images.push_back({image->hash.low, image->hash.high, image->bytes.size()});
    pieces.push_back({reinterpret_cast<uint64_t>(image->bytes.data()), offset, image->bytes.size()});
    offset += image->bytes.size();
  }
  return dump_pieces(path, pieces, [](int fd, const Piece& p) {
    return write_all(fd, reinterpret_cast<const void*>(p.addr), p.bytes, p.offset);
  });
}

StatusOr<std::vector<ImageStore::Ref>> restore_images(ImageStore& store, const ServerRecord& state,
                                                      const std::string& path) {
  std::vector<ImageStore::Ref> images;
  const File file(path, O_RDONLY);
  if (file.fd < 0) return Status::from_errno(kFileNotFound, "opening " + path);
  uint64_t offset = 0;
  for (const auto& [low, high, n_bytes] : state.images) {
    const ImageHash hash{low, high};
    if (n_bytes > kMaxImageBytes)
      return Status(kInvalidImage, path + ": the state claims an image of impossible length");
    std::vector<uint8_t> bytes(n_bytes);
    if (Status s = read_all(file.fd, bytes.data(), bytes.size(), offset); !s.ok()) return std::move(s).with(path);
    offset += bytes.size();
    if (image_hash(bytes.data(), bytes.size()) != hash)
      return Status(kInvalidImage, path + ": a module image has another content than the state says");
    images.push_back(store.put(hash, std::move(bytes)));
  }
  return images;
}

Status dump_shared(Connection& connection, const std::string& dir, SharedClientRecord* shared) {
  const std::string stem = "gpu" + std::to_string(connection.parts().gpu) + "-" + std::to_string(connection.number());
  const SegmentView& view = connection.endpoint().view();
  const ControlPage* control = view.control();

  // The segment: everything before the ring, the ring from head to tail (a record that is reserved and half written
  // belongs to a thread that will go on writing it), the chunks in use. The other lines of the ring are as good as new:
  // the first word of each is 0.
  std::vector<Range> used = {{0, kRingOffset}};
  const uint64_t head = connection.endpoint().position();
  const uint64_t in_ring = std::min<uint64_t>(control->tail.value.load(std::memory_order_acquire) - head, kRingBytes);
  const uint64_t first = head % kRingBytes, before_end = std::min<uint64_t>(in_ring, kRingBytes - first);
  if (before_end) used.push_back({kRingOffset + first, before_end});
  if (in_ring > before_end) used.push_back({kRingOffset, in_ring - before_end});
  for (uint32_t i = 0; i < kChunks; i++)
    if (control->chunk_busy[i].load(std::memory_order_acquire))
      used.push_back({kChunksOffset + i * kChunkBytes, kChunkBytes});
  // Chunks that have pages: the client relies on it, so a restore gives them pages again.
  std::vector<Range> pages, window;
  if (Status s = data_extents(connection.endpoint().segment_path(), &pages); !s.ok()) return s;
  // The whole window by what has pages, not by the mirror: the client may use memory whose HOST_ALLOC is still unread.
  if (Status s = data_extents(connection.endpoint().pinned_path(), &window); !s.ok()) return s;

  const File segment(connection.endpoint().segment_path(), O_RDONLY);
  if (segment.fd < 0) return Status::from_errno(kFileNotFound, "opening " + connection.endpoint().segment_path());
  shared->number = connection.number();
  std::vector<Piece> seg_pieces, pin_pieces;
  // One behind the other in the dump's file, from their places in the job's, which starts at `base` in memory.
  auto place = [](const std::vector<Range>& ranges, uint64_t base, ExtentsRecord* about, std::vector<Piece>* pieces) {
    for (const Range& r : ranges) {
      about->extents.emplace_back(r.addr, r.bytes);
      pieces->push_back({base + r.addr, about->bytes, r.bytes});
      about->bytes += r.bytes;
    }
  };
  place(used, 0, &shared->segment, &seg_pieces);
  place(window, connection.endpoint().pinned_begin(), &shared->pinned, &pin_pieces);
  for (const Range& r : pages) shared->segment.pages.emplace_back(r.addr, r.bytes);
  Status s = dump_pieces(dir + "/" + stem + ".seg", seg_pieces, [&](int fd, const Piece& p) -> Status {
    std::vector<uint8_t> bounce(p.bytes);
    if (Status r = read_all(segment.fd, bounce.data(), p.bytes, p.addr); !r.ok()) return r;
    return write_all(fd, bounce.data(), p.bytes, p.offset);
  });
  if (s.ok()) s = DP_FAULT(server_shared_mid);
  if (s.ok())
    s = dump_pieces(dir + "/" + stem + ".pin", pin_pieces, [&](int fd, const Piece& p) {
      return write_all(fd, reinterpret_cast<const void*>(p.addr), p.bytes, p.offset);
    });
  return s;
}

}  // namespace devproxy::server
