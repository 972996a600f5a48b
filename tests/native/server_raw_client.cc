// SPDX-License-Identifier: Apache-2.0
// The server against a client that knows only the wire. usage: server_raw_client SERVER MODULE.so [case...]
#include "tests/native/server_raw_client.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <thread>

#include "devproxy/csrc/args/array.h"
#include "devproxy/csrc/wire/array.h"
#include "devproxy/csrc/wire/graph_step.h"

using namespace devproxy;
using namespace devproxy::test;
using wire::Opcode;

namespace {

std::string g_server;
std::vector<uint8_t> g_image;

constexpr VHandle kModule = VHandle::make(HandleKind::kModule, 1, 0);
constexpr VHandle kAdd = VHandle::make(HandleKind::kFunction, 1, 0);
constexpr VHandle kNap = VHandle::make(HandleKind::kFunction, 2, 0);
constexpr VHandle kBad = VHandle::make(HandleKind::kFunction, 3, 0);
VHandle stream(uint16_t i) { return VHandle::make(HandleKind::kStream, i, i); }
VHandle event(uint64_t i) { return VHandle::make(HandleKind::kEvent, i, 0); }

struct AddParams {
  uint64_t out, in, count;
  int32_t value;
  int32_t pad = 0;
};

void prepare(RawClient& c) {
  c.credit(256 << 20);
  EXPECT(c.load(kModule, g_image) == kOk);
  EXPECT(c.function(kModule, kAdd, "add") == kOk);
  EXPECT(c.function(kModule, kNap, "nap") == kOk);
}

uint64_t add(RawClient& c, VHandle s, uint64_t out, uint64_t in, uint64_t count, int32_t value) {
  const AddParams p{out, in, count, value};
  return c.launch(kAdd, s, &p, sizeof p);
}

uint64_t nap(RawClient& c, VHandle s, uint64_t us) { return c.launch(kNap, s, &us, sizeof us); }

int32_t value_at(RawClient& c, uint64_t addr) {
  int32_t v = -1;
  c.d2h(kLegacyStream, &v, addr, 4);
  return v;
}

void wait_gone(const TestServer& server, int files) {
  const uint64_t until = now_us() + kTimeoutUs;
  while (server.files() != files) {
    EXPECT(now_us() < until);
    usleep(10'000);
  }
}

void basics() {
  TestServer server(g_server);
  EXPECT(server.ready_line == "ready\n");
  RawClient c(server.socket_path, true);
  EXPECT(c.nop() == kOk);
  EXPECT(std::string(c.attached.props.name) == "devproxy Software GPU" && c.attached.props.attributes[10] == 32);
  prepare(c);
  std::vector<uint8_t> tail;
  EXPECT(c.function(kModule, kBad, "no such thing", &tail) == kNotFound);
  EXPECT(c.function(kModule, kBad, "add", &tail) == kOk);
  EXPECT(tail.size() == sizeof(wire::FUNCTION_GET_rep) + 16 * 4 + 4 * 8);  // attributes, parameters

  const uint64_t a = c.base(), b = c.base() + (1 << 20);
  c.alloc(a, 4096);
  c.alloc(b, 4096);
  std::vector<int32_t> in(1024), out(1024);
  for (int i = 0; i < 1024; i++) in[static_cast<size_t>(i)] = i;
  const uint64_t p = c.h2d(kLegacyStream, a, in.data(), 4096);
  add(c, kLegacyStream, b, a, 1024, 5);
  c.d2h(kLegacyStream, out.data(), b, 4096);
  for (int i = 0; i < 1024; i++) EXPECT(out[static_cast<size_t>(i)] == i + 5);
  // A block of parameters that ends before the last one.
  const AddParams short_of_value{b, a, 1024, 6};
  c.wait(0, c.launch(kAdd, kLegacyStream, &short_of_value, offsetof(AddParams, value)));
  EXPECT(c.take_late_error() == kInvalidValue && value_at(c, b) == 5);
  // Nothing was linked, so there is no part of it.
  EXPECT(c.call(Opcode::LINK_FETCH, wire::LINK_FETCH_req{0, 0, 64}) == kNotFound);
  EXPECT(c.call(Opcode::LINK_FETCH, wire::LINK_FETCH_req{~uint64_t{0} - 31, 0, 64}) == kNotFound);
  EXPECT(c.call(Opcode::LINK_FETCH, wire::LINK_FETCH_req{0, kChunks, 64}) == kInvalidValue);
  c.wait(0, p);
  EXPECT(c.view.control()->chunk_busy[0].load() == 0);

  // A rectangle, a set of 16-bit elements, and the pinned window.
  c.post(Opcode::MEMSET, wire::MEMSET_req{kLegacyStream, a, 64, 8, 4, 0xabcd, 2});
  c.post(Opcode::COPY_2D, wire::COPY_2D_req{kLegacyStream, b, a, 16, 64, 16, 4, 0, 0, 0, 0});
  c.post(Opcode::HOST_ALLOC, wire::HOST_ALLOC_req{c.pinned_base(), 4096});
  c.wait(0, c.post(Opcode::COPY, wire::COPY_req{kLegacyStream, c.pinned_base(), b, 64, 1, 0, 0, 0}));
  for (int i = 0; i < 32; i++) EXPECT(reinterpret_cast<uint16_t*>(c.pinned_base())[i] == 0xabcd);
  reinterpret_cast<int32_t*>(c.pinned_base())[0] = 77;
  add(c, kLegacyStream, b, c.pinned_base(), 1, 1);  // a kernel reads the pinned window where the client sees it
  EXPECT(value_at(c, b) == 78);

  // Globals of modules.
  wire::MODULE_GLOBAL_rep global;
  EXPECT(c.call(Opcode::MODULE_GLOBAL, wire::MODULE_GLOBAL_req{kModule, 5, 0}, "table", 5, &tail) == kOk);
  std::memcpy(&global, tail.data(), sizeof global);
  EXPECT(global.bytes == 16 && value_at(c, global.addr + 8) == 3);
  EXPECT(c.call(Opcode::MODULE_GLOBAL, wire::MODULE_GLOBAL_req{kModule, 5, 0}, "other", 5) == kNotFound);
  c.post(Opcode::MODULE_UNLOAD, wire::MODULE_UNLOAD_req{kModule});
  const uint64_t late = add(c, kLegacyStream, b, a, 1, 1);  // its function has gone
  c.wait(0, late);
  EXPECT(c.take_late_error() == kInvalidHandle);
  EXPECT(c.load(kModule, g_image) == kOk && c.function(kModule, kAdd, "add") == kOk);  // again, under the same name
  EXPECT(c.load(VHandle::make(HandleKind::kModule, 9, 0), {1, 2, 3}) == kInvalidImage);
  auto cut = g_image;
  cut.resize(5000);
  EXPECT(c.load(VHandle::make(HandleKind::kModule, 9, 0), cut) == kInvalidImage);

  const std::string stats = server.stats();
  EXPECT(stats.find("\"clients_now\":1") != std::string::npos && stats.find("\"sticky\":\"\"") != std::string::npos);
  EXPECT(c.server_lives());
}

void memory_is_accounted() {
  TestServer server(g_server, {}, "", 0, "16777216");
  RawClient c(server.socket_path);
  std::vector<uint8_t> tail;
  auto granted = [&] {
    wire::MEM_CREDIT_rep rep;
    std::memcpy(&rep, tail.data(), sizeof rep);
    return rep.granted;
  };
  EXPECT(c.call(Opcode::MEM_CREDIT, wire::MEM_CREDIT_req{12 << 20, 1}, nullptr, 0, &tail) == kOk &&
         granted() == 12 << 20);
  EXPECT(c.call(Opcode::MEM_CREDIT, wire::MEM_CREDIT_req{12 << 20, 1 << 20}, nullptr, 0, &tail) == kOk &&
         granted() == 1 << 20);
  EXPECT(c.call(Opcode::MEM_CREDIT, wire::MEM_CREDIT_req{12 << 20, 4 << 20}) == kOutOfMemory);
  c.post(Opcode::MEM_CREDIT_RETURN, wire::MEM_CREDIT_RETURN_req{8 << 20});
  EXPECT(c.call(Opcode::MEM_INFO, wire::MEM_INFO_req{}, nullptr, 0, &tail) == kOk);
  wire::MEM_INFO_rep info;
  std::memcpy(&info, tail.data(), sizeof info);
  EXPECT(info.total == 16 << 20 && info.free == 11 << 20);
  c.alloc(c.base(), 6 << 20);  // 5 MiB are granted
  EXPECT(c.nop() == kOk && c.take_late_error() == kOutOfMemory);
  c.alloc(c.base(), 4 << 20);
  c.alloc(c.base() + 4096, 4096);
  EXPECT(c.nop() == kOk && c.take_late_error() == kInvalidValue);
  c.free(c.base() + 4096);
  EXPECT(c.nop() == kOk && c.take_late_error() == kInvalidValue);

  // A second client of the same server has its own range; when it goes, its credit comes back.
  {
    RawClient d(server.socket_path);
    EXPECT(d.attached.slot != c.attached.slot);
    d.credit(11 << 20);
    EXPECT(c.call(Opcode::MEM_CREDIT, wire::MEM_CREDIT_req{1, 1}) == kOutOfMemory);
  }
  wait_gone(server, 4);
  c.credit(11 << 20);
}

void streams_and_events() {
  TestServer server(g_server);
  RawClient c(server.socket_path);
  prepare(c);
  const uint64_t a = c.base(), b = a + 4096, d = b + 4096;
  for (uint64_t addr : {a, b, d}) c.alloc(addr, 4096);
  c.fill(kLegacyStream, a, 1024, 1);
  c.create_stream(stream(1), 1);  // non-blocking
  c.create_stream(stream(2), 1);
  c.create_stream(stream(3), 0);

  // An event orders two non-blocking streams; the second would win without it.
  c.post(Opcode::EVENT_CREATE, wire::EVENT_CREATE_req{event(1), 0, 0});
  c.post(Opcode::EVENT_CREATE, wire::EVENT_CREATE_req{event(2), 0, 0});
  c.post(Opcode::STREAM_WAIT_EVENT, wire::STREAM_WAIT_EVENT_req{stream(2), event(1)});  // never recorded: no wait
  c.post(Opcode::EVENT_RECORD, wire::EVENT_RECORD_req{event(2), stream(1)});
  nap(c, stream(1), 50'000);
  add(c, stream(1), b, a, 1024, 10);
  const uint64_t recorded = c.post(Opcode::EVENT_RECORD, wire::EVENT_RECORD_req{event(1), stream(1)});
  EXPECT(c.call(Opcode::EVENT_ELAPSED, wire::EVENT_ELAPSED_req{event(2), event(1)}) == kNotReady);
  c.post(Opcode::STREAM_WAIT_EVENT, wire::STREAM_WAIT_EVENT_req{stream(2), event(1)});
  const uint64_t last = add(c, stream(2), d, b, 1024, 100);
  EXPECT(!c.complete(2, last));
  c.wait(2, last);
  EXPECT(c.complete(1, recorded));
  EXPECT(value_at(c, d) == 111);
  std::vector<uint8_t> tail;
  EXPECT(c.call(Opcode::EVENT_ELAPSED, wire::EVENT_ELAPSED_req{event(2), event(1)}, nullptr, 0, &tail) == kOk);
  wire::EVENT_ELAPSED_rep elapsed;
  std::memcpy(&elapsed, tail.data(), sizeof elapsed);
  EXPECT(elapsed.ms >= 49 && elapsed.ms < 5000);

  // The legacy stream waits for a blocking stream, and the blocking one for it.
  nap(c, stream(3), 30'000);
  add(c, stream(3), b, a, 1024, 20);
  add(c, kLegacyStream, d, b, 1024, 1000);
  const uint64_t third = add(c, stream(3), b, d, 1024, 1);
  c.wait(3, third);
  EXPECT(value_at(c, d) == 1021 && value_at(c, b) == 1022);
  // It does not wait for a non-blocking one.
  const uint64_t slow = nap(c, stream(1), 300'000);
  EXPECT(value_at(c, d) == 1021);
  EXPECT(!c.complete(1, slow));

  // Memory freed behind a command that still waits in a stream stays good for that command, and only for it.
  add(c, stream(1), b, a, 1024, 30);
  c.free(a);
  const uint64_t before = add(c, stream(1), d, b, 1024, 0);
  c.wait(1, before);
  EXPECT(value_at(c, d) == 31 && c.view.control()->sticky_error.load() == 0);

  // A stream's index is used again while the old stream still works: the counter never goes back.
  nap(c, stream(3), 50'000);
  c.post(Opcode::STREAM_DESTROY, wire::STREAM_DESTROY_req{stream(3)});
  const VHandle again = VHandle::make(HandleKind::kStream, 77, 3);
  c.create_stream(again, 1);
  const uint64_t p = add(c, again, b, d, 1024, 0);
  c.wait(3, p);
  usleep(80'000);
  EXPECT(c.complete(3, p));
  // The old handle is stale; its command is refused, but completes.
  const uint64_t stale = nap(c, stream(3), 1);
  c.wait(3, stale);
  EXPECT(c.take_late_error() == kInvalidHandle);
  EXPECT(c.view.control()->sticky_error.load() == 0);
}

void host_functions() {
  TestServer server(g_server);
  RawClient c(server.socket_path);
  prepare(c);
  const uint64_t a = c.base();
  c.alloc(a, 4096);
  c.fill(kLegacyStream, a, 1024, 1);
  c.post(Opcode::HOST_FUNC, wire::HOST_FUNC_req{kLegacyStream, 5});
  const uint64_t p = add(c, kLegacyStream, a, a, 1024, 1);
  HostFuncEntry& entry = c.view.control()->hostfuncs[5];
  const uint64_t until = now_us() + kTimeoutUs;
  while (entry.token.load() != 5) EXPECT(now_us() < until);
  usleep(20'000);
  EXPECT(!c.complete(0, p));
  entry.token.store(0);
  c.post(Opcode::HOST_FUNC_DONE, wire::HOST_FUNC_DONE_req{5});
  c.wait(0, p);
  EXPECT(value_at(c, a) == 2);
  c.post(Opcode::HOST_FUNC_DONE, wire::HOST_FUNC_DONE_req{5});
  EXPECT(c.nop() == kOk && c.take_late_error() == kInvalidValue);
  c.post(Opcode::HOST_FUNC, wire::HOST_FUNC_req{kLegacyStream, 6});  // left unanswered: the client goes, the server too
}

void faults_stick() {
  for (const char* name : {"assert_fails", "throws"}) {
    TestServer server(g_server);
    RawClient c(server.socket_path);
    prepare(c);
    RawClient other(server.socket_path);
    EXPECT(c.function(kModule, kBad, name) == kOk);
    c.alloc(c.base(), 4096);
    c.fill(kLegacyStream, c.base(), 1, 3);
    const uint64_t bad = c.launch(kBad, kLegacyStream, nullptr, 0);
    const uint64_t after = c.fill(kLegacyStream, c.base(), 1, 4);
    c.wait(0, after);
    EXPECT(bad < after);
    EXPECT(c.view.control()->sticky_error.load() == (name[0] == 'a' ? kAssert : kLaunchFailed));
    EXPECT(std::strstr(c.view.control()->sticky_text, name[0] == 'a' ? "x > 0" : "thrown on purpose"));
    EXPECT(std::strstr(c.view.control()->sticky_text, name));
    EXPECT(c.nop() != kOk);
    EXPECT(other.nop() == kOk && other.view.control()->sticky_error.load() == 0);
    EXPECT(server.stats().find(name) != std::string::npos);
  }
  // A range that is not allocated: the kernel's own check.
  TestServer server(g_server);
  RawClient c(server.socket_path);
  prepare(c);
  c.wait(0, add(c, kLegacyStream, c.base(), c.base(), 16, 1));
  EXPECT(c.view.control()->sticky_error.load() == kIllegalAddress);
}

void crashes_are_told() {
  for (const std::string name : {"crash", "overflow", "aborts"})
    for (const bool on_stream : {false, true}) {
      TestServer server(g_server);
      RawClient c(server.socket_path);
      prepare(c);
      EXPECT(c.function(kModule, kBad, name) == kOk);
      c.create_stream(stream(1), 1);
      const uint64_t p = c.launch(kBad, on_stream ? stream(1) : kLegacyStream, nullptr, 0);
      c.wait(on_stream ? 1 : 0, p + (1 << 30));  // everything is complete
      EXPECT(c.state() == ServerState::kGone);
      EXPECT(c.view.control()->sticky_error.load() == (name == "aborts" ? kLaunchFailed : kIllegalAddress));
      EXPECT(std::strstr(c.view.control()->sticky_text, ("'" + name + "'").c_str()));
      EXPECT(server.wait() == 134);
      EXPECT(server.files() == 0);
    }
}

void malformed_messages_poison_one() {
  TestServer server(g_server);
  RawClient good(server.socket_path);
  const std::vector<std::function<void(RawClient&)>> attacks = {
      [](RawClient& c) { c.post_bytes(0x7777, nullptr, 0, nullptr, 0, 0, 0); },
      [](RawClient& c) { c.post_bytes(0xffff, nullptr, 0, nullptr, 0, 0, 0); },
      [](RawClient& c) { c.post_bytes(1, nullptr, 0, nullptr, 0, 0, kReplySlots); },
      [](RawClient& c) { c.post_bytes(0x0111, nullptr, 0, nullptr, 0, 0, 0); },  // COPY without its fields
      [](RawClient& c) {                                                         // bulk longer than the message
        c.post(Opcode::LAUNCH, wire::LAUNCH_req{kAdd, kLegacyStream, 1, 1, 1, 1, 1, 1, 0, 0, 1 << 30, 0});
      },
      [](RawClient& c) {  // chunk numbers that do not exist
        const uint16_t index = 60000;
        c.post(Opcode::IMAGE_PUT, wire::IMAGE_PUT_req{1, 2, 100, 0, 100, 1}, &index, 2);
      },
      [](RawClient& c) { c.post(Opcode::COPY, wire::COPY_req{kLegacyStream, 0, 0, 8, 2, 2, 0, 1000}); },
      [](RawClient& c) {  // a record of impossible length
        const auto r = c.view.ring().reserve(64);
        reinterpret_cast<MsgHeader*>(c.view.ring().at(r.pos))->commit.store(0x7fffffc1);
        futex_wake(&c.view.control()->doorbell.sleeping, 1);
      },
      [](RawClient& c) {  // the consumer's own counter, moved by a lap
        c.nop();
        const auto r = c.view.ring().reserve(64);
        c.view.control()->head.value.store(r.pos + kRingBytes);
        reinterpret_cast<MsgHeader*>(c.view.ring().at(r.pos))->commit.store(64);
        futex_wake(&c.view.control()->doorbell.sleeping, 1);
      },
  };
  for (const auto& attack : attacks) {
    RawClient bad(server.socket_path);
    attack(bad);
    bad.wait(0, UINT64_MAX);  // nobody hangs
    EXPECT(bad.state() == ServerState::kPoisoned);
    EXPECT(bad.view.control()->sticky_error.load() == kUnknown);
    EXPECT(good.nop() == kOk);
  }
}

bool says(const TestServer& server, const std::string& text) { return server.stats().find(text) != std::string::npos; }

void images_are_kept_once() {
  TestServer server(g_server);
  const ImageHash hash = image_hash(g_image.data(), g_image.size());
  const std::string size = std::to_string(g_image.size());
  const auto other = VHandle::make(HandleKind::kModule, 7, 0), third = VHandle::make(HandleKind::kModule, 8, 0);
  bool known = true;
  RawClient c(server.socket_path);
  EXPECT(c.load_known(kModule, hash, g_image.size(), &known) == kOk && !known);
  EXPECT(c.load(kModule, g_image) == kOk);
  // By the same process and by another: no bytes.
  EXPECT(c.load_known(other, hash, g_image.size(), &known) == kOk && known);
  {
    RawClient d(server.socket_path);
    EXPECT(d.load_known(kModule, hash, g_image.size(), &known) == kOk && known);
    EXPECT(d.function(kModule, kAdd, "add") == kOk);
    EXPECT(says(server, "\"images\":{\"kept\":1,\"kept_bytes\":" + size +
                            ",\"loads\":3,\"loads_known\":2,\"received_bytes\":" + size + "}"));
    // A hash that is known, with another length: a mistake or a lie, and nothing is loaded.
    EXPECT(d.load_known(third, hash, g_image.size() - 1, &known) == kInvalidValue && !known);
    EXPECT(d.load_known(third, hash, 0, &known) == kInvalidValue && !known);
    EXPECT(d.load_known(third, hash, g_image.size(), &known) == kOk && known);
  }
  // Its end is seen by a thread of the server's own.
  for (int i = 0; i < 500 && !says(server, "\"clients_now\":1,"); i++) usleep(20'000);
  EXPECT(says(server, "\"clients_now\":1,"));
  // An image under a name that is not its own is not taken, whole or in pieces that do not follow each other.
  std::vector<uint8_t> text(1000, 7);
  auto put = [&](const ImageHash& as, uint64_t bytes, uint64_t offset, uint32_t n) {
    c.post(Opcode::IMAGE_PUT, wire::IMAGE_PUT_req{as.low, as.high, bytes, offset, n, 0}, text.data(), n);
  };
  const ImageHash forged{hash.low ^ 1, hash.high}, right = image_hash(text.data(), text.size());
  put(forged, 1000, 0, 1000);
  EXPECT(c.load_known(third, forged, 1000, &known) == kOk && !known);
  put(right, 1000, 0, 500), put(right, 1000, 400, 500);
  EXPECT(c.load_known(third, right, 1000, &known) == kOk && !known);
  put(right, 1000, 500, 500);  // the piece that was due: now it is whole; a text is no module
  EXPECT(c.load_known(third, right, 1000, &known) == kInvalidImage);
  // Lengths that cannot be are an error of the call's thread, and the connection goes on.
  put(right, 1000, 900, 500), put(right, 0, 0, 500), put(right, 3ull << 30, 0, 500), put(right, 1000, ~0ull, 500);
  EXPECT(c.state() == ServerState::kRunning);
  // The last one who holds it lets it go.
  EXPECT(says(server, "\"kept\":1,"));
  for (const VHandle module : {kModule, other}) c.post(Opcode::MODULE_UNLOAD, wire::MODULE_UNLOAD_req{module});
  EXPECT(c.nop() == kOk);
  // That may be d's: who has gone is not counted among the clients from that moment, and its own thread takes it down.
  for (int i = 0; i < 500 && !says(server, "\"kept\":0,\"kept_bytes\":0,"); i++) usleep(20'000);
  EXPECT(says(server, "\"kept\":0,\"kept_bytes\":0,"));
  EXPECT(c.load_known(third, hash, g_image.size(), &known) == kOk && !known);
}

// A launch's steps have ring positions of their own, inside of its record: one that is too short for them is refused.
void graph_launches_have_room() {
  TestServer server(g_server);
  RawClient c(server.socket_path);
  const VHandle graph = VHandle::make(HandleKind::kGraph, 1, 0);
  c.post(Opcode::EVENT_CREATE, wire::EVENT_CREATE_req{event(1), 0, 0});
  constexpr uint32_t kRecords = 500;
  struct Step {
    wire::GraphStepHead head;
    wire::EVENT_RECORD_req record;
  };
  static_assert(sizeof(Step) == 32);
  const auto op = static_cast<uint16_t>(Opcode::EVENT_RECORD);
  const std::vector<Step> steps(kRecords, {{op, sizeof(wire::EVENT_RECORD_req), 0, 0}, {event(1), {}}});
  const auto bytes = static_cast<uint32_t>(steps.size() * sizeof(Step));
  // Steps whose ends are missing: of a head, of a request, of bulk data.
  for (uint32_t n : {8u, 16u, 24u, 40u, 56u})
    EXPECT(c.call(Opcode::GRAPH_CREATE, wire::GRAPH_CREATE_req{graph, n, 0}, steps.data(), n) == kInvalidValue);
  std::vector<uint8_t> launched(sizeof(wire::GraphStepHead) + sizeof(wire::LAUNCH_req) + 64);
  const auto all = static_cast<uint32_t>(launched.size());
  for (uint32_t claimed : {65u, 1u << 20, 0xfffffff1u, 0xffffffffu}) {
    const wire::GraphStepHead head{static_cast<uint16_t>(Opcode::LAUNCH), sizeof(wire::LAUNCH_req), claimed, 0};
    std::memcpy(launched.data(), &head, sizeof head);
    EXPECT(c.call(Opcode::GRAPH_CREATE, wire::GRAPH_CREATE_req{graph, all, 0}, launched.data(), all) == kInvalidValue);
  }
  EXPECT(c.call(Opcode::GRAPH_CREATE, wire::GRAPH_CREATE_req{graph, bytes, 0}, steps.data(), bytes) == kOk);
  const std::vector<uint8_t> filling(2 * kRecords + 2 - sizeof(wire::GRAPH_LAUNCH_req));
  auto launch = [&](size_t inline_bytes) {
    const auto n = static_cast<uint32_t>(inline_bytes);
    const wire::GRAPH_LAUNCH_req req{graph, kLegacyStream, 0, n, 0};
    c.wait(0, c.post(Opcode::GRAPH_LAUNCH, req, filling.data(), n));
    return c.take_late_error();
  };
  EXPECT(launch(filling.size()) == kOk);
  EXPECT(launch(filling.size() - 1) == kInvalidValue);
  // In a chunk there is no room at all, however long the bulk data is.
  c.view.control()->chunk_busy[3].store(1);
  const uint16_t chunk = 3;
  const wire::GRAPH_LAUNCH_req req{graph, kLegacyStream, 0, kChunkBytes, 1};
  c.wait(0, c.post(Opcode::GRAPH_LAUNCH, req, &chunk, sizeof chunk));
  EXPECT(c.take_late_error() == kInvalidValue);
  EXPECT(launch(filling.size()) == kOk);
}

// Shapes, boxes and objects that no client of ours sends: answered, or a late error, and the memory is given back.
void arrays_are_checked() {
  TestServer server(g_server, {}, "", 0, "16777216");
  RawClient c(server.socket_path);
  c.credit(4 << 20);
  c.alloc(c.base(), 65536);
  auto array = [](uint64_t i) { return VHandle::make(HandleKind::kArray, i, 0); };
  auto create = [&](VHandle handle, uint64_t w, uint64_t h, uint64_t d, uint32_t format = 0x20, uint32_t channels = 1) {
    return c.call(Opcode::ARRAY_CREATE, wire::ARRAY_CREATE_req{handle, w, h, d, format, channels, 0, 0});
  };
  EXPECT(create(array(1), 64, 8, 2) == kOk);
  EXPECT(create(array(1), 64, 8, 2) == kInvalidHandle);
  EXPECT(create(event(1), 64, 8, 2) == kInvalidHandle);
  EXPECT(create(array(2), 0, 8, 2) == kInvalidValue);
  EXPECT(create(array(2), 64, 8, 2, 0x20, 3) == kInvalidValue);
  EXPECT(create(array(2), 64, 8, 2, 0xb0) == kInvalidValue);
  EXPECT(create(array(2), UINT64_MAX, UINT64_MAX, UINT64_MAX) == kInvalidValue);
  EXPECT(create(array(2), 4096, 4096, 0) == kOutOfMemory);  // 64 MiB of 16
  EXPECT(create(array(2), 1024, 1024, 0) == kOk);
  EXPECT(create(array(3), 1024, 2048, 1) == kOutOfMemory);  // counted beside the credit
  c.post(Opcode::ARRAY_DESTROY, wire::ARRAY_DESTROY_req{array(2)});
  EXPECT(create(array(3), 1024, 1536, 1) == kOk);
  c.post(Opcode::ARRAY_DESTROY, wire::ARRAY_DESTROY_req{array(3)});
  EXPECT(c.take_late_error() == kOk);

  const ArrayCopySide whole{array(1).value, 0, 0, 0, 0, 0, kArraySpace, {}};
  const ArrayCopySide memory{c.base(), 256, 8, 0, 0, 0, 0, {}};
  auto copy = [&](const ArrayCopyArgs& args, size_t bytes = sizeof(ArrayCopyArgs)) {
    wire::ARRAY_COPY_req r{};
    r.stream = kLegacyStream;
    r.chunk_release = 1;
    r.bulk_bytes = static_cast<uint32_t>(bytes);
    c.view.control()->chunk_busy[0].store(1);
    c.wait(0, c.post(Opcode::ARRAY_COPY, r, &args, bytes));
    EXPECT(c.view.control()->chunk_busy[0].load() == 0);  // also of one that is refused
    return c.take_late_error();
  };
  const ArrayCopyArgs good{whole, memory, 256, 8, 2};
  EXPECT(copy(good) == kOk);
  auto bad = [&](auto change) {
    ArrayCopyArgs args = good;
    change(args);
    return copy(args) == kInvalidValue;
  };
  EXPECT(bad([](ArrayCopyArgs& a) { a.dst.x_bytes = 4; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.dst.x_bytes = 2, a.width_bytes = 128; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.dst.y = 1; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.dst.z = UINT32_MAX; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.slices = 3; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.rows = UINT64_MAX; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.rows = 0; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.src.pitch = 255; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.src.pitch = UINT64_MAX; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.src.slice_rows = 7; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.src.slice_rows = 1 << 20; }));  // beyond the allocation
  EXPECT(bad([](ArrayCopyArgs& a) { a.src.space = 1; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.src.space = 2, a.src.place = kChunkBytes * kChunks; }));
  EXPECT(bad([](ArrayCopyArgs& a) { a.src.space = 9; }));
  EXPECT(bad([&](ArrayCopyArgs& a) { a.dst = memory; }));  // no array at all
  EXPECT(bad([&](ArrayCopyArgs& a) { a.dst.place = array(3).value; }));
  EXPECT(copy(good, sizeof good - 8) == kInvalidValue);

  TextureArgs texture;
  texture.array = array(1).value;
  auto show = [&](const TextureArgs& args) {
    wire::TEXTURE_CREATE_req r{};
    r.texture = VHandle::make(HandleKind::kTexture, 1, 0);
    r.bulk_bytes = sizeof args;
    return c.call(Opcode::TEXTURE_CREATE, r, &args, sizeof args);
  };
  EXPECT(show(texture) == kNotSupported);  // the software GPU has no texture units
  TextureArgs wrong = texture;
  wrong.kind = 2;
  EXPECT(show(wrong) == kInvalidValue);
  wrong = texture, wrong.resource = 1;
  EXPECT(show(wrong) == kInvalidValue);
  wrong = texture, wrong.array = array(3).value;
  EXPECT(show(wrong) == kInvalidValue);
  wrong.resource = 2, wrong.address = c.base(), wrong.bytes = 65537, wrong.format = 0x20, wrong.channels = 1;
  EXPECT(show(wrong) == kInvalidValue);
  wrong.bytes = 4096, wrong.kind = 1;  // a surface of linear memory
  EXPECT(show(wrong) == kInvalidValue);
  c.post(Opcode::TEXTURE_DESTROY, wire::TEXTURE_DESTROY_req{VHandle::make(HandleKind::kTexture, 1, 0)});
  EXPECT(c.nop() == kOk && c.take_late_error() == kInvalidHandle);
  EXPECT(c.server_lives());
}

void killed_clients_leave_nothing() {
  TestServer server(g_server);
  for (int round = 0; round < 3; round++) {
    const pid_t child = fork();
    if (child == 0) {
      RawClient c(server.socket_path);
      prepare(c);
      c.alloc(c.base(), 64 << 20);
      c.create_stream(stream(1));
      c.post(Opcode::HOST_FUNC, wire::HOST_FUNC_req{stream(1), 5});
      c.wait(0, c.fill(kLegacyStream, c.base(), 16 << 20, 1));
      for (;;) add(c, stream(round & 1), c.base(), c.base(), 1000, 1);
    }
    usleep(200'000);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    wait_gone(server, 1);
  }
  RawClient c(server.socket_path);
  c.credit(1 << 30);  // all of it is there
  EXPECT(server.stats().find("\"used\":0") != std::string::npos);
}

void leaves_with_the_lease() {
  TestServer server(g_server);
  {
    RawClient c(server.socket_path);
    EXPECT(c.nop() == kOk);
    server.end_lease();
    usleep(100'000);
    EXPECT(c.nop() == kOk);  // a client keeps it
  }
  EXPECT(server.wait() == 0);
  EXPECT(server.files() == 0);
}

void sigterm_tells_clients() {
  TestServer server(g_server);
  RawClient c(server.socket_path);
  prepare(c);
  const uint64_t p = nap(c, kLegacyStream, 60'000'000);  // outlasts the server's patience
  usleep(50'000);
  kill(server.pid, SIGTERM);
  c.wait(0, p);
  EXPECT(c.state() == ServerState::kGone);
  EXPECT(server.wait() == 0);
  EXPECT(server.files() == 0);
}

void two_servers_of_a_job() {
  TestServer first(g_server, {}, "", 0);
  TestServer second(g_server, {}, first.dir(), 1);
  RawClient a(first.socket_path), b(second.socket_path);
  EXPECT(a.attached.slot != b.attached.slot);
  EXPECT(std::memcmp(a.attached.props.uuid, b.attached.props.uuid, 16) != 0);
  // Here they share one ledger, as two jobs on one GPU do.
  a.credit(1000 << 20);
  EXPECT(b.call(Opcode::MEM_CREDIT, wire::MEM_CREDIT_req{100 << 20, 100 << 20}) == kOutOfMemory);
  kill(first.pid, SIGKILL);
  EXPECT(first.wait() == 256 + SIGKILL);
  b.credit(1000 << 20);                            // the dead server's entry is dropped
  TestServer third(g_server, {}, first.dir(), 0);  // and its place can be taken
  EXPECT(third.ready_line == "ready\n");
  TestServer fourth(g_server, {}, first.dir(), 0);
  EXPECT(fourth.ready_line.starts_with("error: another server already listens") && fourth.wait() == 2);
}

void bad_hellos_are_refused() {
  TestServer server(g_server);
  auto ask = [&](auto change) {
    const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s", server.socket_path.c_str());
    EXPECT(connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    AttachRequest hello{kAttachMagic, AttachKind::kClient, {}, 1, 0xffffffff};
    std::memcpy(hello.abi_id, wire::kAbiId, 32);
    change(hello);
    EXPECT(send(socket, &hello, sizeof hello, 0) == sizeof hello);
    AttachReply reply{};
    EXPECT(recv(socket, &reply, sizeof reply, MSG_WAITALL) == sizeof reply);
    close(socket);
    return reply;
  };
  AttachReply reply = ask([](AttachRequest& r) { r.abi_id[0] ^= 1; });
  EXPECT(reply.status == AttachStatus::kAbiDiffers && std::strstr(reply.text, "different builds"));
  EXPECT(std::memcmp(reply.abi_id, wire::kAbiId, 32) == 0);
  EXPECT(ask([](AttachRequest& r) { r.magic = 1; }).status == AttachStatus::kRefused);
  EXPECT(ask([](AttachRequest& r) { r.kind = static_cast<AttachKind>(9); }).status == AttachStatus::kRefused);
  const AttachReply facts = ask([](AttachRequest& r) { r.kind = AttachKind::kFacts; });
  EXPECT(facts.status == AttachStatus::kOk && facts.props.name[0] && facts.segment_name[0] == 0);
  EXPECT(ask([](AttachRequest& r) { r.wanted_slot = kMaxSlots; }).status == AttachStatus::kNoSlot);
  RawClient c(server.socket_path);
  const uint32_t taken = c.attached.slot;
  EXPECT(ask([&](AttachRequest& r) { r.wanted_slot = taken; }).status == AttachStatus::kNoSlot);
  const AttachReply fifth = ask([](AttachRequest& r) { r.wanted_slot = 5; });
  EXPECT(fifth.status == AttachStatus::kOk && fifth.slot == 5);
}

void a_flood_behind_a_stream_fills_the_ring() {
  TestServer server(g_server);
  RawClient c(server.socket_path);
  prepare(c);
  c.alloc(c.base(), 4096);
  c.create_stream(stream(1), 1);
  nap(c, stream(1), 300'000);
  uint64_t p = 0;
  for (int i = 0; i < 200'000; i++) p = nap(c, stream(1), 0);  // more than the server keeps; post waits for space
  c.wait(1, p);
  EXPECT(c.nop() == kOk && c.view.control()->sticky_error.load() == 0);
}

void cuts_under_load() {
  TestServer server(g_server);
  RawClient c(server.socket_path);
  prepare(c);
  const uint64_t a = c.base(), b = a + 4096;
  c.alloc(a, 4096);
  c.alloc(b, 4096);
  c.create_stream(stream(1), 1);
  c.fill(kLegacyStream, a, 1024, 0);
  c.wait(0, c.fill(kLegacyStream, b, 1024, 0));
  std::atomic<bool> done{false};
  std::atomic<int> cuts{0};
  std::thread coordinator([&] {
    RawControl control(server.socket_path);
    const std::string dir = server.dir() + "/staging";
    EXPECT(mkdir(dir.c_str(), 0700) == 0);
    while (!done.load()) {
      EXPECT(control.ok("{\"op\":\"cut\",\"wait_ms\":0,\"drain_ms\":5000}"));
      EXPECT(!control.ok("{\"op\":\"cut\"}"));  // it is parked
      EXPECT(control.ok("{\"op\":\"can_dump\"}"));
      if (cuts % 4 == 0) {
        EXPECT(control.ok("{\"op\":\"dump\",\"dir\":\"" + dir + "\"}"));
        EXPECT(control.ok("{\"op\":\"dump_shared\",\"dir\":\"" + dir + "\"}"));
      }
      EXPECT(control.ok("{\"op\":\"resume\"}"));
      EXPECT(!control.ok("{\"op\":\"dump\",\"dir\":\"" + dir + "\"}") && !control.ok("{\"op\":\"leave\"}"));
      EXPECT(!control.ok("nonsense") && !control.ok("{\"op\":\"nonsense\"}"));
      cuts++;
      usleep(1000);
    }
  });
  int n = 0;
  for (const uint64_t until = now_us() + 1'500'000; now_us() < until; n++) {
    add(c, kLegacyStream, a, a, 1024, 1);
    const uint64_t p = add(c, stream(1), b, b, 1024, 2);
    c.alloc(a + (1 << 20), 65536);
    c.free(a + (1 << 20));
    if (n % 16 == 0) {
      const uint64_t token = static_cast<uint64_t>(n) + 1;
      c.post(Opcode::HOST_FUNC, wire::HOST_FUNC_req{stream(1), token});
      HostFuncEntry& entry = c.view.control()->hostfuncs[token % kHostFuncs];
      const uint64_t late = now_us() + kTimeoutUs;
      while (entry.token.load() != token) EXPECT(now_us() < late);
      entry.token.store(0);
      c.post(Opcode::HOST_FUNC_DONE, wire::HOST_FUNC_DONE_req{token});
      c.wait(1, p);
    }
  }
  EXPECT(value_at(c, a) == n);
  done = true;
  coordinator.join();
  EXPECT(value_at(c, b) == 2 * n && cuts > 20);
  EXPECT(c.nop() == kOk && c.take_late_error() == 0);
}

void chaos_is_legal() {
  for (const char* seed : {"1", "2", "3"}) {
    TestServer server(g_server, {"--chaos", seed});
    RawClient c(server.socket_path);
    prepare(c);
    const uint64_t a = c.base();
    c.alloc(a, 4096);
    c.create_stream(stream(1));
    c.create_stream(stream(2), 1);
    c.post(Opcode::EVENT_CREATE, wire::EVENT_CREATE_req{event(1), 0, 0});
    c.fill(kLegacyStream, a, 1024, 0);
    for (int i = 0; i < 100; i++) {  // every second value goes through another stream, ordered by what CUDA promises
      add(c, kLegacyStream, a, a, 1024, 1);
      add(c, stream(1), a, a, 1024, 1);
      c.post(Opcode::EVENT_RECORD, wire::EVENT_RECORD_req{event(1), stream(1)});
      c.post(Opcode::STREAM_WAIT_EVENT, wire::STREAM_WAIT_EVENT_req{stream(2), event(1)});
      add(c, stream(2), a, a, 1024, 1);
      c.post(Opcode::EVENT_RECORD, wire::EVENT_RECORD_req{event(1), stream(2)});
      c.post(Opcode::STREAM_WAIT_EVENT, wire::STREAM_WAIT_EVENT_req{kLegacyStream, event(1)});
    }
    EXPECT(value_at(c, a) == 300);
  }
}

void round_trip_time() {
  TestServer server(g_server);
  RawClient c(server.socket_path);
  prepare(c);
  c.alloc(c.base(), 4096);
  c.fill(kLegacyStream, c.base(), 1024, 0);
  for (int i = 0; i < 1000; i++) c.nop();
  const uint64_t t0 = now_us();
  for (int i = 0; i < 20000; i++) c.nop();
  const uint64_t t1 = now_us();
  uint64_t p = 0;
  for (int i = 0; i < 200000; i++) p = add(c, kLegacyStream, c.base(), c.base(), 1, 1);
  c.wait(0, p);
  const uint64_t t2 = now_us();
  for (int i = 0; i < 100000; i++) {
    c.alloc(c.base() + (1 << 20), 4096);
    c.free(c.base() + (1 << 20));
  }
  c.nop();
  const uint64_t t3 = now_us();
  EXPECT(value_at(c, c.base()) == 200000);
  std::printf("  nop round trip %.2f us, launch through %.3f us, alloc+free %.3f us\n",
              static_cast<double>(t1 - t0) / 20000.0, static_cast<double>(t2 - t1) / 200000.0,
              static_cast<double>(t3 - t2) / 100000.0);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::pair<std::string, void (*)()>> cases = {
      {"basics", basics},
      {"memory_is_accounted", memory_is_accounted},
      {"streams_and_events", streams_and_events},
      {"host_functions", host_functions},
      {"faults_stick", faults_stick},
      {"crashes_are_told", crashes_are_told},
      {"malformed_messages_poison_one", malformed_messages_poison_one},
      {"images_are_kept_once", images_are_kept_once},
      {"graph_launches_have_room", graph_launches_have_room},
      {"arrays_are_checked", arrays_are_checked},
      {"killed_clients_leave_nothing", killed_clients_leave_nothing},
      {"leaves_with_the_lease", leaves_with_the_lease},
      {"sigterm_tells_clients", sigterm_tells_clients},
      {"two_servers_of_a_job", two_servers_of_a_job},
      {"bad_hellos_are_refused", bad_hellos_are_refused},
      {"a_flood_behind_a_stream_fills_the_ring", a_flood_behind_a_stream_fills_the_ring},
      {"cuts_under_load", cuts_under_load},
      {"chaos_is_legal", chaos_is_legal},
      {"round_trip_time", round_trip_time},
  };
  if (argc == 2 && std::string(argv[1]) == "--list") {
    for (const auto& [name, run] : cases) std::printf("%s\n", name.c_str());
    return 0;
  }
  if (argc < 3) return std::fprintf(stderr, "usage: %s SERVER MODULE.so [case...]\n", argv[0]), 2;
  g_server = argv[1];
  g_image = read_file(argv[2]);
  for (const auto& [name, run] : cases) {
    if (argc > 3 && std::find(argv + 3, argv + argc, name) == argv + argc) continue;
    std::printf("%s\n", name.c_str());
    std::fflush(stdout);
    run();
  }
  std::printf("ok\n");
  return 0;
}
