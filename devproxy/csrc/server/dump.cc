#include "devproxy/csrc/server/dump.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <thread>

#include "devproxy/csrc/base/fault.h"

namespace devproxy::server {

namespace {

constexpr uint64_t kPieceBytes = 16u << 20;

struct File {
  int fd = -1;
  File(const std::string& path, int flags) : fd(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600)) {}
  ~File() {
    if (fd >= 0) close(fd);
  }
};

std::string json_bytes(const std::string& text) {
  return '"' + base64(reinterpret_cast<const uint8_t*>(text.data()), text.size()) + '"';
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

Status write_all(int fd, const void* from, uint64_t bytes, uint64_t offset) {
  const auto* at = static_cast<const uint8_t*>(from);
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n = pwrite(fd, at + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Status::from_errno(kOutOfMemory, "writing");
    done += static_cast<uint64_t>(n);
  }
  return {};
}

Status read_all(int fd, void* to, uint64_t bytes, uint64_t offset) {
  auto* at = static_cast<uint8_t*>(to);
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n = pread(fd, at + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Status::from_errno(kUnknown, "reading");
    if (n == 0) return {kInvalidImage, "the file is shorter than its table says"};
    done += static_cast<uint64_t>(n);
  }
  return {};
}

Status copy_pieces(const std::vector<Piece>& pieces, const std::function<Status(const Piece&)>& copy) {
  std::vector<Piece> small;
  for (const Piece& p : pieces)
    for (uint64_t done = 0; done < p.bytes; done += kPieceBytes)
      small.push_back({p.addr + done, p.offset + done, std::min(kPieceBytes, p.bytes - done)});
  std::atomic<size_t> next{0};
  std::mutex mu;
  Status first;
  auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < small.size();) {
      Status s = copy(small[i]);
      if (s.ok()) continue;
      std::lock_guard lock(mu);
      if (first.ok()) first = std::move(s);
      next = small.size();
    }
  };
  std::thread helper;
  if (small.size() > 1) helper = std::thread(work);
  work();
  if (helper.joinable()) helper.join();
  return first;
}

Status write_file(const std::string& path, const std::string& text) {
  const std::string part = path + ".part";
  {
    const File file(part, O_WRONLY | O_CREAT | O_TRUNC);
    if (file.fd < 0) return Status::from_errno(kFileNotFound, "making " + part);
    if (Status s = write_all(file.fd, text.data(), text.size(), 0); !s.ok()) return std::move(s).with(part);
  }
  if (rename(part.c_str(), path.c_str()) != 0) return Status::from_errno(kUnknown, "renaming " + part);
  return {};
}

StatusOr<std::string> read_file(const std::string& path) {
  const File file(path, O_RDONLY);
  struct stat info;
  if (file.fd < 0 || fstat(file.fd, &info) != 0) return Status::from_errno(kFileNotFound, "opening " + path);
  std::string text(static_cast<size_t>(info.st_size), 0);
  if (Status s = read_all(file.fd, text.data(), text.size(), 0); !s.ok()) return std::move(s).with(path);
  return text;
}

std::vector<Piece> device_pieces(const Connection& connection) {
  std::vector<Piece> pieces;
  uint64_t offset = 0;
  connection.device_mirror.for_each_live([&](uint64_t addr, uint64_t bytes, uint32_t) {
    pieces.push_back({addr, offset, bytes});
    offset += bytes;
  });
  for (const auto& [addr, variable] : connection.variables) {
    pieces.push_back({addr, offset, variable.bytes});
    offset += variable.bytes;
  }
  return pieces;
}

std::vector<ArrayPiece> array_pieces(Connection& connection) {
  const std::vector<Piece> ranges = device_pieces(connection);
  uint64_t offset = ranges.empty() ? 0 : ranges.back().offset + ranges.back().bytes;
  std::vector<ArrayPiece> pieces;
  for (const ReplayLog::Entry& entry : connection.replay.entries()) {
    const Connection::ArrayObject* array = entry.creates ? connection.arrays.find(entry.handle) : nullptr;
    if (!array) continue;
    pieces.push_back({entry.handle, offset});
    offset += array->extent.bytes();
  }
  return pieces;
}

namespace {

// Behind the ranges. A piece is some rows: an array has no addresses to cut it by.
Status dump_arrays(Connection& connection, const std::string& path, uint64_t* end) {
  const std::vector<ArrayPiece> pieces = array_pieces(connection);
  if (pieces.empty()) return {};
  const File file(path, O_WRONLY);
  if (file.fd < 0) return Status::from_errno(kFileNotFound, "opening " + path);
  for (const ArrayPiece& piece : pieces) {
    const Connection::ArrayObject& array = *connection.arrays.find(piece.handle);
    const uint64_t row = array.extent.width_bytes, all = array.extent.rows * array.extent.slices;
    const uint64_t at_once = std::max<uint64_t>(1, kPieceBytes / row);
    std::vector<uint8_t> bounce(std::min(at_once, all) * row);
    for (uint64_t done = 0; done < all; done += at_once) {
      const uint64_t rows = std::min(at_once, all - done);
      Status s = connection.space().read_array(array.array, done, rows, bounce.data());
      if (s.ok()) s = write_all(file.fd, bounce.data(), rows * row, piece.offset + done * row);
      if (!s.ok()) return std::move(s).with("writing an array's contents to " + path);
    }
    *end = piece.offset + all * row;
  }
  return {};
}

}  // namespace

Status dump_device(Connection& connection, const std::string& path, uint64_t* bytes) {
  const std::vector<Piece> pieces = device_pieces(connection);
  *bytes = pieces.empty() ? 0 : pieces.back().offset + pieces.back().bytes;
  Status ranges = dump_pieces(path, pieces, [&](int fd, const Piece& p) -> Status {
    if (Status s = DP_FAULT(server_dump_mid); !s.ok()) return s;
    if (const void* view = connection.space().host_view(p.addr, p.bytes)) return write_all(fd, view, p.bytes, p.offset);
    std::vector<uint8_t> bounce(p.bytes);
    if (Status s = connection.space().read(p.addr, bounce.data(), p.bytes); !s.ok()) return s;
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
  const SegmentView& view = connection.view();
  const ControlPage* control = view.control();

  // The segment: everything before the ring, the ring from head to tail (a record that is reserved and half written
  // belongs to a thread that will go on writing it), the chunks in use. The other lines of the ring are as good as new:
  // the first word of each is 0.
  std::vector<Range> used = {{0, kRingOffset}};
  const uint64_t head = connection.position();
  const uint64_t in_ring = std::min<uint64_t>(control->tail.value.load(std::memory_order_acquire) - head, kRingBytes);
  const uint64_t first = head % kRingBytes, before_end = std::min<uint64_t>(in_ring, kRingBytes - first);
  if (before_end) used.push_back({kRingOffset + first, before_end});
  if (in_ring > before_end) used.push_back({kRingOffset, in_ring - before_end});
  for (uint32_t i = 0; i < kChunks; i++)
    if (control->chunk_busy[i].load(std::memory_order_acquire))
      used.push_back({kChunksOffset + i * kChunkBytes, kChunkBytes});
  // Chunks that have pages: the client relies on it, so a restore gives them pages again.
  std::vector<Range> pages, window;
  if (Status s = data_extents(connection.segment_path(), &pages); !s.ok()) return s;
  // The whole window by what has pages, not by the mirror: the client may use memory whose HOST_ALLOC is still unread.
  if (Status s = data_extents(connection.pinned_path(), &window); !s.ok()) return s;

  const File segment(connection.segment_path(), O_RDONLY);
  if (segment.fd < 0) return Status::from_errno(kFileNotFound, "opening " + connection.segment_path());
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
    pin_pieces.push_back({connection.pinned_begin() + r.addr, offset, r.bytes});
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

// What the client was told about the device when it attached, asks nobody about again, and relies on.
std::string Connection::told_json() const {
  const hal::Caps caps = parts_.device->caps();
  const hal::Properties& p = parts_.device->properties();
  auto flag = [](const char* name, bool on) { return '"' + std::string(name) + (on ? "\":true" : "\":false"); };
  return "{" + flag("kernels_see_host_window", caps.kernels_see_host_window) + ',' +
         flag("keeps_host_pages", caps.keeps_host_pages) + ',' + json_number("major", static_cast<uint64_t>(p.major)) +
         ',' + json_number("minor", static_cast<uint64_t>(p.minor)) + '}';
}

StatusOr<std::string> Connection::state_json() {
  if (std::string why = undumpable(); !why.empty()) return Status(kNotSupported, std::move(why));
  // The driver's own buffer dies with its context; the text goes on.
  if (any_prints) gather_output();
  std::string device, pinned, array_text, events_text, log, tokens, limits_text;
  for (const auto& [limit, value] : limits) limits_text += (limits_text.empty() ? "" : ",") + pair_json(limit, value);
  uint64_t offset = 0;  // as device_pieces() places them
  device_mirror.for_each_live([&](uint64_t addr, uint64_t bytes, uint32_t flags) {
    device += (device.empty() ? "{" : ",{") + json_number("addr", addr) + ',' + json_number("bytes", bytes) + ',' +
              json_number("flags", flags) + ',' + json_number("offset", offset) + '}';
    offset += bytes;
  });
  for (const auto& [addr, v] : variables) {
    device += (device.empty() ? "{" : ",{") + json_number("addr", addr) + ',' + json_number("bytes", v.bytes) + ',' +
              json_number("offset", offset) + ',' + json_number("module", v.module.value) +
              ",\"name\":" + json_string(v.name) + ",\"given\":" + (v.given ? "true" : "false") + '}';
    offset += v.bytes;
  }
  for (const ArrayPiece& piece : array_pieces(*this))
    array_text += (array_text.empty() ? "{" : ",{") + json_number("handle", piece.handle.value) + ',' +
                  json_number("offset", piece.offset) + ',' +
                  json_number("bytes", arrays.find(piece.handle)->extent.bytes()) + '}';
  pinned_mirror.for_each_live(
      [&](uint64_t addr, uint64_t bytes, uint32_t) { pinned += (pinned.empty() ? "" : ",") + pair_json(addr, bytes); });
  std::string windows;
  for (const Window& w : windows_)
    windows += (windows.empty() ? "{" : ",{") + json_number("number", w.number) + ',' + json_number("gpu", w.gpu) +
               ',' + json_number("slot", w.slot) + '}';
  Status failed;
  events.for_each([&](VHandle handle, const hal::EventRef& event) {
    auto time = space_->event_time_ns(event);
    if (!time.ok()) failed = time.status();
    if (time.ok() && *time) events_text += (events_text.empty() ? "" : ",") + pair_json(handle.value, *time);
  });
  if (!failed.ok()) return std::move(failed).with("reading the events of client " + std::to_string(number()));
  for (const ReplayLog::Entry& e : replay.entries()) {
    log += (log.empty() ? "{" : ",{") + json_number("opcode", e.opcode) + ',' + json_number("handle", e.handle.value) +
           ',' + json_number("key", e.key) + ",\"request\":\"" + base64(e.request.data(), e.request.size()) + '"';
    std::vector<uint8_t> now;  // a graph's steps change in place, so they are asked of the graph
    if (const StoredGraph* graph = e.creates ? graphs.find(e.handle) : nullptr) now = graph->encoded();
    const std::vector<uint8_t>& bulk = now.empty() ? e.bulk : now;
    if (!bulk.empty()) log += ",\"bulk\":\"" + base64(bulk.data(), bulk.size()) + '"';
    if (const hal::ModuleRef* module = e.creates ? modules.find(e.handle) : nullptr) {
      std::string globals;
      for (const auto& global : space_->globals(*module))
        globals += (globals.empty() ? "" : ",") + std::to_string(global.addr);
      log += ",\"globals\":[" + globals + "]";
      auto state = space_->save_module(*module);
      if (!state.ok()) return std::move(state).status().with("saving a module of client " + std::to_string(number()));
      if (!state->empty()) log += ",\"state\":\"" + base64(state->data(), state->size()) + '"';
    }
    if (const TextureObject* texture = e.creates ? textures.find(e.handle) : nullptr)
      log += ',' + json_number("value", texture->texture->value);
    log += '}';
  }
  for (const uint64_t token : host_functions_) tokens += (tokens.empty() ? "" : ",") + std::to_string(token);
  const Counters& n = counters_;
  return "{" + json_number("number", number()) + ',' + json_number("pid", peer_.pid) + ',' +
         json_number("slot", slot_) + (peer_.framework ? ",\"framework\":true" : "") + ",\"told\":" + told_json() +
         ',' + json_number("position", position_) + ',' + json_number("credit_bytes", credit_bytes) + ',' +
         json_number("client_bytes", client_bytes) + ',' + json_number("globals_bytes", globals_bytes) + ',' +
         json_number("arrays_bytes", arrays_bytes) + ",\"device\":[" + device + "],\"arrays\":[" + array_text +
         "],\"pinned\":[" + pinned + "],\"windows\":[" + windows + "],\"events\":[" + events_text + "]," +
         json_number("event_clock_ns", space_->event_clock_ns()) + ",\"limits\":[" + limits_text +
         "],\"output\":" + json_bytes(output_text) + ",\"errors\":" + json_bytes(error_text) + ",\"log\":[" + log +
         "],\"host_functions\":[" + tokens + "],\"fault\":{" +
         json_number("code", static_cast<uint64_t>(lifeline_->fault_code())) +
         ",\"text\":" + json_string(lifeline_->fault_text()) + ",\"ended\":" + (lifeline_->ended() ? "true" : "false") +
         ",\"poisoned\":" + (poisoned_ ? "true" : "false") + "},\"counters\":{" + json_number("calls", n.calls) + ',' +
         json_number("launches", n.launches) + ',' + json_number("h2d_bytes", n.h2d_bytes) + ',' +
         json_number("d2h_bytes", n.d2h_bytes) + ',' + json_number("d2d_bytes", n.d2d_bytes) + ',' +
         json_number("memset_bytes", n.memset_bytes) + ',' + json_number("allocs", n.allocs) + ',' +
         json_number("frees", n.frees) + ',' + json_number("busy_us", n.busy_us) + ',' +
         json_number("peak_bytes", n.peak_bytes) + "}}";
}

}  // namespace devproxy::server
