// SPDX-License-Identifier: Apache-2.0
#include "devproxy/hal/links/tls.h"

#include <dlfcn.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "devproxy/csrc/base/futex.h"

namespace devproxy::hal {

namespace {

constexpr int kTurnMs = 50;
constexpr size_t kReadAheadBytes = 128 << 10;
constexpr unsigned char kIdentity[] = "devproxy";
constexpr unsigned char kCipher[] = {0x13, 0x01};  // TLS_AES_128_GCM_SHA256

#define DP_TEXT_OF(x) #x
#define DP_TEXT(x) DP_TEXT_OF(x)
constexpr const char* kLibrary =
    "libssl.so." DP_TEXT(OPENSSL_SHLIB_VERSION);  // of the headers that this was compiled with

#define DP_SSL_FUNCTIONS(X)                \
  X(BIO_clear_flags)                       \
  X(BIO_get_data)                          \
  X(BIO_get_new_index)                     \
  X(BIO_meth_new)                          \
  X(BIO_meth_set_create)                   \
  X(BIO_meth_set_ctrl)                     \
  X(BIO_meth_set_read)                     \
  X(BIO_meth_set_write)                    \
  X(BIO_new)                               \
  X(BIO_set_data)                          \
  X(BIO_set_flags)                         \
  X(BIO_set_init)                          \
  X(ERR_clear_error)                       \
  X(ERR_peek_error)                        \
  X(ERR_reason_error_string)               \
  X(OPENSSL_init_ssl)                      \
  X(SSL_CIPHER_find)                       \
  X(SSL_CTX_ctrl)                          \
  X(SSL_CTX_new)                           \
  X(SSL_CTX_set_ciphersuites)              \
  X(SSL_CTX_set_num_tickets)               \
  X(SSL_CTX_set_psk_find_session_callback) \
  X(SSL_CTX_set_psk_use_session_callback)  \
  X(SSL_SESSION_free)                      \
  X(SSL_SESSION_new)                       \
  X(SSL_SESSION_set1_master_key)           \
  X(SSL_SESSION_set_cipher)                \
  X(SSL_SESSION_set_protocol_version)      \
  X(SSL_do_handshake)                      \
  X(SSL_free)                              \
  X(SSL_get_ex_data)                       \
  X(SSL_get_error)                         \
  X(SSL_has_pending)                       \
  X(SSL_key_update)                        \
  X(SSL_new)                               \
  X(SSL_read_ex)                           \
  X(SSL_session_reused)                    \
  X(SSL_set_accept_state)                  \
  X(SSL_set_bio)                           \
  X(SSL_set_connect_state)                 \
  X(SSL_set_default_read_buffer_len)       \
  X(SSL_set_ex_data)                       \
  X(SSL_set_read_ahead)                    \
  X(SSL_set_verify)                        \
  X(SSL_write_ex)                          \
  X(TLS_method)

struct OpenSsl {
#define X(name) decltype(&::name) name = nullptr;
  DP_SSL_FUNCTIONS(X)
#undef X
  SSL_CTX* context = nullptr;
  BIO_METHOD* method = nullptr;
  std::string trouble;
};

const OpenSsl& openssl();

SSL* ssl_of(void* ssl) { return static_cast<SSL*>(ssl); }

// -- OpenSSL calls these ----------------------------------------------------------------------------------------------

int write_wire(BIO* bio, const char* from, int bytes) {
  auto* const wire = static_cast<TlsWire*>(openssl().BIO_get_data(bio));
  if (bytes > 0) wire->out.insert(wire->out.end(), from, from + bytes);
  return bytes;
}

int read_wire(BIO* bio, char* to, int bytes) {
  auto* const wire = static_cast<TlsWire*>(openssl().BIO_get_data(bio));
  openssl().BIO_clear_flags(bio, BIO_FLAGS_RWS | BIO_FLAGS_SHOULD_RETRY);
  ssize_t n;
  do n = recv(wire->fd, to, static_cast<size_t>(bytes), 0);
  while (n < 0 && errno == EINTR);
  if (n < 0 && errno == EAGAIN)
    openssl().BIO_set_flags(bio, BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY);
  else if (n <= 0)
    wire->hung_up = true;
  return static_cast<int>(n);
}

long control_wire(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

int create_wire(BIO* bio) { return openssl().BIO_set_init(bio, 1), 1; }

SSL_SESSION* session_of(SSL* ssl) {
  const OpenSsl& its = openssl();
  const DataKey& key = static_cast<const TlsWire*>(its.SSL_get_ex_data(ssl, 0))->key;
  SSL_SESSION* const made = its.SSL_SESSION_new();
  const SSL_CIPHER* const cipher = its.SSL_CIPHER_find(ssl, kCipher);
  if (made && cipher && its.SSL_SESSION_set1_master_key(made, key.data(), key.size()) == 1 &&
      its.SSL_SESSION_set_cipher(made, cipher) == 1 && its.SSL_SESSION_set_protocol_version(made, TLS1_3_VERSION) == 1)
    return made;
  its.SSL_SESSION_free(made);
  return nullptr;
}

int use_key(SSL* ssl, const EVP_MD*, const unsigned char** identity, size_t* length, SSL_SESSION** session) {
  *identity = kIdentity, *length = sizeof kIdentity - 1;
  *session = session_of(ssl);
  return *session != nullptr;
}

int find_key(SSL* ssl, const unsigned char* identity, size_t length, SSL_SESSION** session) {
  *session = nullptr;
  if (length != sizeof kIdentity - 1 || std::memcmp(identity, kIdentity, length) != 0) return 1;  // nobody we know
  *session = session_of(ssl);
  return *session != nullptr;
}

// -- the library ------------------------------------------------------------------------------------------------------

std::string load_openssl(OpenSsl* its) {
  void* const handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* const why = dlerror();
    return std::string("OpenSSL cannot be loaded (") + (why ? why : kLibrary) +
           "): install the package that has it, on Debian libssl" DP_TEXT(OPENSSL_SHLIB_VERSION);
  }
#define X(name)                                                            \
  its->name = reinterpret_cast<decltype(its->name)>(dlsym(handle, #name)); \
  if (!its->name) return std::string(kLibrary) + " has no " #name ": install another version of it";
  DP_SSL_FUNCTIONS(X)
#undef X
  return "";
}

std::string set_up_openssl(OpenSsl* its) {
  // The host's openssl.cnf is for what speaks with strangers; here both ends are of one build. No clean-up at exit: other
  // threads may be in it then.
  its->OPENSSL_init_ssl(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, nullptr);
  its->method = its->BIO_meth_new(its->BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "devproxy link");
  SSL_CTX* const context = its->context = its->SSL_CTX_new(its->TLS_method());
  // No tickets: who has accepted a connection says nothing more on it (frame.h).
  if (!its->method || !context || its->BIO_meth_set_create(its->method, create_wire) != 1 ||
      its->BIO_meth_set_read(its->method, read_wire) != 1 || its->BIO_meth_set_write(its->method, write_wire) != 1 ||
      its->BIO_meth_set_ctrl(its->method, control_wire) != 1 ||
      its->SSL_CTX_ctrl(context, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, nullptr) != 1 ||
      its->SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") != 1 ||
      its->SSL_CTX_set_num_tickets(context, 0) != 1)
    return std::string(kLibrary) + " has no TLS 1.3 with AES-GCM: install another version of it";
  its->SSL_CTX_ctrl(context, SSL_CTRL_SET_SESS_CACHE_MODE, SSL_SESS_CACHE_OFF, nullptr);
  its->SSL_CTX_set_psk_use_session_callback(context, use_key);
  its->SSL_CTX_set_psk_find_session_callback(context, find_key);
  return "";
}

// As long as the process, see OPENSSL_INIT_NO_ATEXIT.
const OpenSsl& openssl() {
  static const OpenSsl* const its = [] {
    auto* const made = new OpenSsl;
    made->trouble = load_openssl(made);
    if (made->trouble.empty()) made->trouble = set_up_openssl(made);
    return made;
  }();
  return *its;
}

const char* openssl_reason() {
  const unsigned long error = openssl().ERR_peek_error();
  const char* const text = error ? openssl().ERR_reason_error_string(error) : nullptr;
  return text ? text : "no reason given";
}

}  // namespace

// -- the first contact ------------------------------------------------------------------------------------------------

Status Tls::load() {
  const std::string& trouble = openssl().trouble;
  return trouble.empty() ? Status() : Status(kNotSupported, "encrypting: " + trouble);
}

StatusOr<std::unique_ptr<Tls>> Tls::shake_hands(int fd, Role role, const DataKey& key, uint64_t until_us,
                                                const std::atomic<bool>& closing, uint64_t bytes_of_a_key) {
  if (Status loaded = load(); !loaded.ok()) return loaded;
  std::unique_ptr<Tls> made(new Tls(fd, key, bytes_of_a_key));
  const OpenSsl& its = openssl();
  if (!made->begin(role)) return Status(kUnknown, std::string("OpenSSL has made no connection: ") + openssl_reason());
  SSL* const ssl = ssl_of(made->ssl_);
  for (;;) {
    its.ERR_clear_error();
    const int done = its.SSL_do_handshake(ssl);
    const int error = done == 1 ? SSL_ERROR_NONE : its.SSL_get_error(ssl, done);
    const std::string refused = error == SSL_ERROR_NONE || error == SSL_ERROR_WANT_READ ? "" : made->refusal(role);
    // Also where it has failed: the other end is told so.
    if (!made->flush(until_us, closing) && refused.empty()) return Status(kUnknown, "it has hung up");
    if (!refused.empty()) return Status(kNotPermitted, refused);
    if (error == SSL_ERROR_NONE) break;
    pollfd look{fd, POLLIN, 0};
    poll(&look, 1, kTurnMs);
    if (now_us() > until_us || closing.load(std::memory_order_acquire)) return Status(kNotReady, "it does not answer");
  }
  // Without the key there is nothing by which either end could know the other, so OpenSSL has refused; once more here.
  if (its.SSL_session_reused(ssl) != 1) return Status(kNotPermitted, "it has not shown that it knows this job's key");
  return made;
}

bool Tls::begin(Role role) {
  const OpenSsl& its = openssl();
  its.ERR_clear_error();
  SSL* const ssl = its.SSL_new(its.context);
  if (!ssl) return false;
  ssl_ = ssl;
  BIO* const bio = its.BIO_new(its.method);
  if (!bio || its.SSL_set_ex_data(ssl, 0, &wire_) != 1) return false;
  its.BIO_set_data(bio, &wire_);
  its.SSL_set_bio(ssl, bio, bio);
  if (role == Role::kOpener) {
    its.SSL_set_verify(ssl, SSL_VERIFY_PEER, nullptr);  // no certificate is good enough
    its.SSL_set_connect_state(ssl);
  } else {
    its.SSL_set_read_ahead(ssl, 1);
    its.SSL_set_default_read_buffer_len(ssl, kReadAheadBytes);
    its.SSL_set_accept_state(ssl);
  }
  return true;
}

std::string Tls::refusal(Role role) const {
  const unsigned long error = openssl().ERR_peek_error();
  const int why = error ? ERR_GET_REASON(error) : 0;
  if (why >= SSL_AD_REASON_OFFSET || why == SSL_R_BINDER_DOES_NOT_VERIFY) return "it has another key than this job's";
  if (wire_.hung_up) return role == Role::kOpener ? "it takes no encrypted connection" : "it has hung up";
  return std::string("the encrypted connection fails: ") + openssl_reason();
}

bool Tls::flush(uint64_t until_us, const std::atomic<bool>& closing) {
  size_t at = 0;
  while (at < wire_.out.size()) {
    const ssize_t n = send(wire_.fd, wire_.out.data() + at, wire_.out.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) at += static_cast<size_t>(n);
    if (n >= 0 || errno == EINTR) continue;
    if (errno != EAGAIN || now_us() > until_us || closing.load(std::memory_order_acquire)) return false;
    pollfd look{wire_.fd, POLLOUT, 0};
    poll(&look, 1, kTurnMs);
  }
  wire_.out.clear();
  return true;
}

Tls::~Tls() {
  if (ssl_) openssl().SSL_free(ssl_of(ssl_));
}

// -- bytes --------------------------------------------------------------------------------------------------------------

bool Tls::seal(const void* from, size_t bytes) {
  const OpenSsl& its = openssl();
  SSL* const ssl = ssl_of(ssl_);
  its.ERR_clear_error();
  if (sealed_bytes_ >= bytes_of_a_key_) {
    if (its.SSL_key_update(ssl, SSL_KEY_UPDATE_NOT_REQUESTED) != 1) return false;
    sealed_bytes_ = 0;
  }
  size_t done = 0;
  if (bytes != 0 && (its.SSL_write_ex(ssl, from, bytes, &done) != 1 || done != bytes)) return false;
  sealed_bytes_ += bytes;
  return true;
}

int Tls::read(void* to, size_t bytes, size_t* got) {
  const OpenSsl& its = openssl();
  SSL* const ssl = ssl_of(ssl_);
  its.ERR_clear_error();
  if (its.SSL_read_ex(ssl, to, bytes, got) == 1) return 1;
  const int error = its.SSL_get_error(ssl, 0);
  if (error == SSL_ERROR_WANT_READ) return 0;
  if (!wire_.hung_up) wrong_ = openssl_reason();
  return -1;
}

bool Tls::has_pending() const { return openssl().SSL_has_pending(ssl_of(ssl_)) == 1; }

}  // namespace devproxy::hal
