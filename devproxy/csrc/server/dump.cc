#include "devproxy/csrc/server/dump.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "devproxy/csrc/base/fault.h"
#include "devproxy/csrc/server/connection.h"
#include "devproxy/csrc/server/state_files.h"

namespace devproxy::server {

namespace {

uint64_t end_of(const std::vector<Piece>& pieces) {
  return pieces.empty() ? 0 : pieces.back().offset + pieces.back().bytes;
}

std::string pair_json(uint64_t a, uint64_t b) { return '[' + std::to_string(a) + ',' + std::to_string(b) + ']'; }

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

}  // namespace

namespace {

// Behind the ranges. A piece is some rows: an array has no addresses to cut it by.
Status dump_arrays(Connection& connection, const std::string& path, uint64_t* end) {
  const std::vector<ArrayPiece> pieces = connection.state().array_pieces(*end);
  if (pieces.empty()) return {};
  const File file(path, O_WRONLY);
  if (file.fd < 0) return Status::from_errno(kFileNotFound, "opening " + path);
  for (const ArrayPiece& piece : pieces) {
    const ArrayObject& array = *connection.state().arrays().find(piece.handle);
    const uint64_t row = array.extent.width_bytes, all = array.extent.rows * array.extent.slices;
    const uint64_t at_once = std::max<uint64_t>(1, kPieceBytes / row);
    std::vector<uint8_t> bounce(std::min(at_once, all) * row);
    for (uint64_t done = 0; done < all; done += at_once) {
      const uint64_t rows = std::min(at_once, all - done);
      Status s = connection.device().read_array(array.array, done, rows, bounce.data());
      if (s.ok()) s = write_all(file.fd, bounce.data(), rows * row, piece.offset + done * row);
      if (!s.ok()) return std::move(s).with("writing an array's contents to " + path);
    }
    *end = piece.offset + all * row;
  }
  return {};
}

}  // namespace

Status dump_device(Connection& connection, const std::string& path, uint64_t* bytes) {
  const std::vector<Piece> pieces = connection.memory().pieces();
  *bytes = end_of(pieces);
  Status ranges = dump_pieces(path, pieces, [&](int fd, const Piece& p) -> Status {
    if (Status s = DP_FAULT(server_dump_mid); !s.ok()) return s;
    if (const void* view = connection.device().host_view(p.addr, p.bytes))
      return write_all(fd, view, p.bytes, p.offset);
    std::vector<uint8_t> bounce(p.bytes);
    if (Status s = connection.device().read(p.addr, bounce.data(), p.bytes); !s.ok()) return s;
    return write_all(fd, bounce.data(), p.bytes, p.offset);
  });
  return ranges.ok() ? dump_arrays(connection, path, bytes) : ranges;
}

StatusOr<std::string> dump_images(ImageStore& store, const std::string& path) {
  std::string table;
  std::vector<Piece> pieces;
  std::vector<ImageStore::Ref> images = store.all();
  // One order, so that the next dump's file begins with the same chunks.
  std::sort(images.begin(), images.end(), [](const auto& a, const auto& b) { return a->hash.low < b->hash.low; });
  uint64_t offset = 0;
  for (const auto& image : images) {
    table += (table.empty() ? "[" : ",[") + std::to_string(image->hash.low) + ',' + std::to_string(image->hash.high) +
             ',' + std::to_string(image->bytes.size()) + ']';
    pieces.push_back({reinterpret_cast<uint64_t>(image->bytes.data()), offset, image->bytes.size()});
    offset += image->bytes.size();
  }
  Status s = dump_pieces(path, pieces, [](int fd, const Piece& p) {
    return write_all(fd, reinterpret_cast<const void*>(p.addr), p.bytes, p.offset);
  });
  if (!s.ok()) return s;
  return "[" + table + "]";
}

StatusOr<std::vector<ImageStore::Ref>> restore_images(ImageStore& store, const Json& table, const std::string& path) {
  std::vector<ImageStore::Ref> images;
  const File file(path, O_RDONLY);
  if (file.fd < 0) return Status::from_errno(kFileNotFound, "opening " + path);
  uint64_t offset = 0;
  for (const Json& row : table.items) {
    const ImageHash hash{row[0].u64(), row[1].u64()};
    if (row[2].u64() > kMaxImageBytes)
      return Status(kInvalidImage, path + ": the state claims an image of impossible length");
    std::vector<uint8_t> bytes(row[2].u64());
    if (Status s = read_all(file.fd, bytes.data(), bytes.size(), offset); !s.ok()) return std::move(s).with(path);
    offset += bytes.size();
    if (image_hash(bytes.data(), bytes.size()) != hash)
      return Status(kInvalidImage, path + ": a module image has another content than the state says");
    images.push_back(store.put(hash, std::move(bytes)));
  }
  return images;
}

Status dump_shared(Connection& connection, const std::string& dir, std::string* json, uint64_t* bytes) {
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
  std::string seg_json, pin_json, page_json;
  std::vector<Piece> seg_pieces, pin_pieces;
  uint64_t offset = 0;
  for (const Range& r : used) {
    seg_json += (offset ? "," : "") + pair_json(r.addr, r.bytes);
    seg_pieces.push_back({r.addr, offset, r.bytes});
    offset += r.bytes;
  }
  const uint64_t seg_bytes = offset;
  offset = 0;
  for (const Range& r : window) {
    pin_json += (offset ? "," : "") + pair_json(r.addr, r.bytes);
    pin_pieces.push_back({connection.endpoint().pinned_begin() + r.addr, offset, r.bytes});
    offset += r.bytes;
  }
  for (const Range& r : pages) page_json += (page_json.empty() ? "" : ",") + pair_json(r.addr, r.bytes);
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
  if (!s.ok()) return s;
  *bytes = seg_bytes + offset;
  *json = "{" + json_number("number", connection.number()) + ",\"segment\":{" + json_number("bytes", seg_bytes) +
          ",\"extents\":[" + seg_json + "],\"pages\":[" + page_json + "]},\"pinned\":{" + json_number("bytes", offset) +
          ",\"extents\":[" + pin_json + "]}}";
  return {};
}

std::string Connection::told_json() const {
  const hal::Caps caps = device_.caps();
  const hal::Properties& p = device_.properties();
  auto flag = [](const char* name, bool on) { return '"' + std::string(name) + (on ? "\":true" : "\":false"); };
  return "{" + flag("kernels_see_host_window", caps.kernels_see_host_window) + ',' +
         flag("keeps_host_pages", caps.keeps_host_pages) + ',' + json_number("major", static_cast<uint64_t>(p.major)) +
         ',' + json_number("minor", static_cast<uint64_t>(p.minor)) + '}';
}

StatusOr<std::string> Connection::state_json() {
  if (std::string why = undumpable(); !why.empty()) return Status(kNotSupported, std::move(why));
  auto objects = state_.save(device_, end_of(memory_.pieces()));
  if (!objects.ok()) return std::move(objects).status().with("saving client " + std::to_string(number()));
  std::string tokens;
  for (const uint64_t token : host_functions_.tokens()) tokens += (tokens.empty() ? "" : ",") + std::to_string(token);
  const Counters& n = counters_;
  return "{" + json_number("number", number()) + ',' + json_number("pid", peer_.pid) + ',' +
         json_number("slot", slot_) + (peer_.framework ? ",\"framework\":true" : "") + ",\"told\":" + told_json() +
         ',' + json_number("position", endpoint_.position()) + ',' + memory_.save() + ',' + windows_.save() + ',' +
         *objects + ",\"host_functions\":[" + tokens + "],\"fault\":{" +
         json_number("code", static_cast<uint64_t>(endpoint_.lifeline().fault_code())) +
         ",\"text\":" + json_string(endpoint_.lifeline().fault_text()) +
         ",\"ended\":" + (endpoint_.lifeline().ended() ? "true" : "false") +
         ",\"poisoned\":" + (poisoned_ ? "true" : "false") + "},\"counters\":{" + json_number("calls", n.calls) + ',' +
         json_number("launches", n.launches) + ',' + json_number("h2d_bytes", n.h2d_bytes) + ',' +
         json_number("d2h_bytes", n.d2h_bytes) + ',' + json_number("d2d_bytes", n.d2d_bytes) + ',' +
         json_number("memset_bytes", n.memset_bytes) + ',' + json_number("allocs", n.allocs) + ',' +
         json_number("frees", n.frees) + ',' + json_number("busy_us", n.busy_us) + ',' +
         json_number("peak_bytes", n.peak_bytes) + "}}";
}

}  // namespace devproxy::server
