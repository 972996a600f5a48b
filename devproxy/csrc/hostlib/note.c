// SPDX-License-Identifier: Apache-2.0
// The journal of changed files: <job folder>/files.journal, read by devproxy/checkpoint/files/journal.py.
//
// A record is one line, written by one write() to a file opened with O_APPEND, so records of different processes do not
// mix; the descriptor is closed at once, so a dump finds none. "<kind> <dev> <ino> <path>\n", bytes below 0x20, 0x7f
// and the backslash as \xHH:
//   C  the name is not there and is about to be made       W  it is there and is about to be changed or removed
//   M  as W, through a shared mapping                      R  a directory is about to be renamed: <old>\t<new>
// Written *before* the call. A freeze between the two finds a record too many, never one too few; a C is always
// written, so a reader may forget a name that was made and is gone again. W and M are written once for each name and
// inode by each process: the set of those is a table without locks, and what a full table forgets costs a record too
// many.
//
// After the first image there is a link <job folder>/files.undo to a folder. From then on the first W of a name also
// keeps what was there, because no image has it: <folder>/<hash of the path>. Two processes at once: each publishes its
// copy (without replacing) before it changes the file, so the copy that is published first was complete before any
// change. Its extended attributes and ACLs lie beside it, because the folder's file system may know none: <hash>.x, for
// each the name, a NUL, the length of the value (4 bytes, in this machine's order) and the value. A file without any has
// no <hash>.x.
#define _GNU_SOURCE
#include "devproxy/csrc/hostlib/note.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define RAW1(n, a) devproxy_raw(n, (long)(a), 0, 0, 0, 0, 0)
#define RAW2(n, a, b) devproxy_raw(n, (long)(a), (long)(b), 0, 0, 0, 0)
#define RAW3(n, a, b, c) devproxy_raw(n, (long)(a), (long)(b), (long)(c), 0, 0, 0)
#define RAW4(n, a, b, c, d) devproxy_raw(n, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)

enum {
  kPath = 4096,  // PATH_MAX with its NUL
  kHead = 64,    // "<kind> <dev> <ino> "
  kSeen = 1 << 15,
  kProbes = 16,
  kAttributes = 1 << 16,  // XATTR_LIST_MAX and XATTR_SIZE_MAX
};

static _Atomic int g_state;  // 0 not looked yet, 1 on, 2 off
static char g_job_dir[512];
static char g_hidden[512];  // folder of all jobs: nothing below it is the job's
static uint64_t g_most_bytes = 1ull << 30;
static _Atomic uint64_t g_seen[kSeen];  // 0 is free

static size_t length(const char* s) {
  size_t n = 0;
  while (s[n]) ++n;
  return n;
}

static char* put(char* to, const char* from, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = from[i];
  return to + n;
}

static char* put_text(char* to, const char* from) { return put(to, from, length(from)); }

static char* put_number(char* to, uint64_t v) {
  char digits[20];
  int n = 0;
  do digits[n++] = (char)('0' + v % 10);
  while (v /= 10);
  while (n) *to++ = digits[--n];
  return to;
}

static uint64_t fnv(uint64_t h, const void* data, size_t n) {
  const unsigned char* p = data;
  for (size_t i = 0; i < n; ++i) h = (h ^ p[i]) * 0x100000001b3ull;
  return h;
}

static const uint64_t kFnvStart = 0xcbf29ce484222325ull;

// Two threads may both do this; they write the same bytes, and the state is set after them.
static bool look(void) {
  const char* dir = getenv("DEVPROXY_JOB_DIR");
  size_t n = dir ? length(dir) : 0;
  while (n > 1 && dir[n - 1] == '/') --n;
  if (n < 2 || dir[0] != '/' || n + 32 > sizeof(g_job_dir)) {
    atomic_store_explicit(&g_state, 2, memory_order_release);
    return false;
  }
  put(g_job_dir, dir, n);
  while (n > 1 && dir[n - 1] != '/') --n;
  put(g_hidden, dir, n > 1 ? n : 0);  // with its slash
  const char* most = getenv("DEVPROXY_FILES_MAX");
  if (most && *most) {
    uint64_t v = 0;
    for (; *most >= '0' && *most <= '9'; ++most) v = v * 10 + (uint64_t)(*most - '0');
    g_most_bytes = v;
  }
  atomic_store_explicit(&g_state, 1, memory_order_release);
  return true;
}

static inline bool on(void) {
  const int state = atomic_load_explicit(&g_state, memory_order_acquire);
  if (__builtin_expect(state == 0, 0)) return look();
  return state == 1;
}

__attribute__((constructor(101))) static void loaded(void) { on(); }

static bool seen(uint64_t key) {
  for (unsigned i = 0; i < kProbes; ++i) {
    const uint64_t v = atomic_load_explicit(&g_seen[(key + i) % kSeen], memory_order_relaxed);
    if (v == key) return true;
    if (v == 0) return false;
  }
  return false;
}

static void remember(uint64_t key) {
  for (unsigned i = 0; i < kProbes; ++i) {
    uint64_t expected = 0;
    if (atomic_compare_exchange_strong(&g_seen[(key + i) % kSeen], &expected, key) || expected == key) return;
  }
  atomic_store_explicit(&g_seen[key % kSeen], key, memory_order_relaxed);  // forgets another, which costs a record
}

static uint64_t key_of(char kind, const char* path, const struct stat* st) {
  uint64_t h = fnv(kFnvStart, &kind, 1);
  h = fnv(h, path, length(path));
  h = fnv(h, &st->st_dev, sizeof(st->st_dev));
  h = fnv(h, &st->st_ino, sizeof(st->st_ino));
  h ^= h >> 29;
  return h ? h : 1;
}

static bool starts(const char* path, const char* with) {
  while (*with)
    if (*path++ != *with++) return false;
  return true;
}

static bool contains(const char* path, const char* part) {
  for (; *path; ++path)
    if (starts(path, part)) return true;
  return false;
}

// Kernel views and devices are no files; byte-code caches are made again from their sources by whoever needs them.
static bool ignored(const char* path) {
  if (path[0] != '/') return true;  // memfd:, pipe:, (unreachable)
  if (starts(path, "/proc/") || starts(path, "/sys/")) return true;
  if (starts(path, "/dev/") && !starts(path, "/dev/shm/")) return true;
  if (starts(path, "/memfd:")) return true;
  if (g_hidden[0] && starts(path, g_hidden)) return true;
  const size_t n = length(g_job_dir);
  if (starts(path, g_job_dir) && (path[n] == '/' || path[n] == 0)) return true;
  return contains(path, "/__pycache__/");
}

// /proc/self/fd/N -> to[0..kPath); the length, or 0.
static size_t name_of_fd(int fd, char* to) {
  char link[32];
  char* end = put_text(link, "/proc/self/fd/");
  *put_number(end, (uint64_t)fd) = 0;
  const long n = RAW4(SYS_readlinkat, AT_FDCWD, link, to, kPath - 1);
  if (n <= 0 || n >= kPath - 1) return 0;
  to[n] = 0;
  return (size_t)n;
}

// Without /proc or a free descriptor: the name as it was given. Links in it stay; the reader resolves what it finds.
static size_t name_by_text(int dirfd, const char* path, size_t bytes, char* to) {
  size_t n = 0;
  if (path[0] != '/') {
    if (dirfd == AT_FDCWD) {
      const long got = RAW2(SYS_getcwd, to, kPath);
      if (got <= 0) return 0;
      n = length(to);
    } else {
      n = name_of_fd(dirfd, to);
    }
    if (n == 0 || n + 1 + bytes >= kPath) return 0;
    if (to[n - 1] != '/') to[n++] = '/';
  }
  if (n + bytes >= kPath) return 0;
  *put(to + n, path, bytes) = 0;
  return n + bytes;
}

// The absolute name, without links in its folders (and, when followed, in its last part). The length, or 0.
static size_t resolve(int dirfd, const char* path, bool there, bool follow, char* to) {
  size_t bytes = length(path);
  while (bytes > 1 && path[bytes - 1] == '/') --bytes;
  if (bytes == 0 || bytes >= kPath) return 0;
  if (there) {
    const int flags = O_PATH | O_CLOEXEC | (follow ? 0 : O_NOFOLLOW);
    const long fd = RAW4(SYS_openat, dirfd, path, flags, 0);
    if (fd >= 0) {
      const size_t n = name_of_fd((int)fd, to);
      RAW1(SYS_close, fd);
      if (n) return n;
    }
    return name_by_text(dirfd, path, bytes, to);
  }
  size_t cut = bytes;
  while (cut > 0 && path[cut - 1] != '/') --cut;
  if (cut == 0) {
    to[0] = '.';
    to[1] = 0;
  } else {
    *put(to, path, cut) = 0;
  }
  const long fd = RAW4(SYS_openat, dirfd, to, O_PATH | O_CLOEXEC | O_DIRECTORY, 0);
  if (fd >= 0) {
    size_t n = name_of_fd((int)fd, to);
    RAW1(SYS_close, fd);
    if (n && n + 1 + (bytes - cut) < kPath) {
      if (to[n - 1] != '/') to[n++] = '/';
      *put(to + n, path + cut, bytes - cut) = 0;
      return n + (bytes - cut);
    }
  }
  if (fd == -ENOENT || fd == -ENOTDIR) return 0;  // the call will fail
  return name_by_text(dirfd, path, bytes, to);
}

static void append(const char* record, size_t bytes) {
  char name[sizeof(g_job_dir) + 16];
  *put_text(put_text(name, g_job_dir), "/files.journal") = 0;
  const int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
  const long fd = RAW4(SYS_openat, AT_FDCWD, name, flags, 0600);
  if (fd < 0) return;
  // tmpfs writes all or, when it is full, nothing or a part; the reader drops a line that it cannot read.
  RAW3(SYS_write, fd, record, bytes);
  RAW1(SYS_close, fd);
}

static bool plain(const char* s) {
  for (; *s; ++s)
    if ((unsigned char)*s < 0x20 || *s == 0x7f || *s == '\\') return false;
  return true;
}

static char* put_escaped(char* to, const char* s) {
  static const char kHex[] = "0123456789abcdef";
  for (; *s; ++s) {
    const unsigned char c = (unsigned char)*s;
    if (c >= 0x20 && c != 0x7f && c != '\\') {
      *to++ = (char)c;
      continue;
    }
    to = put(to, "\\x", 2);
    *to++ = kHex[c >> 4];
    *to++ = kHex[c & 15];
  }
  return to;
}

static char* put_head(char* to, char kind, const struct stat* st) {
  *to++ = kind;
  *to++ = ' ';
  to = put_number(to, st->st_dev);
  *to++ = ' ';
  to = put_number(to, st->st_ino);
  *to++ = ' ';
  return to;
}

// Rare, and 16 KiB of stack: not part of the usual frame.
__attribute__((noinline)) static void append_escaped(char kind, const struct stat* st, const char* path) {
  char record[kHead + 4 * kPath];
  char* end = put_escaped(put_head(record, kind, st), path);
  *end++ = '\n';
  append(record, (size_t)(end - record));
}

static bool shared_file_system(int fd) {
  struct statfs fs;
  if (RAW2(SYS_fstatfs, fd, &fs) != 0) return false;
  switch ((uint32_t)fs.f_type) {
    case 0x6969u:      // nfs
    case 0xfe534d42u:  // smb2, smb3
    case 0xff534d42u:  // cifs
    case 0x0bd00bd0u:  // lustre
    case 0x00c36400u:  // ceph
    case 0x65735546u:  // fuse
    case 0x01021997u:  // 9p
      return true;
    default: return false;
  }
}

// Data extents of `from` to the same places in `to`. True when all of it was copied.
static bool copy_data(int from, int to, int64_t bytes) {
  if (RAW3(SYS_ioctl, to, FICLONE, from) == 0) return true;
  if (RAW2(SYS_ftruncate, to, bytes) != 0) return false;
  int64_t at = 0;
  while (at < bytes) {
    int64_t data = RAW3(SYS_lseek, from, at, SEEK_DATA);
    if (data == -ENXIO) return true;  // a hole up to the end
    int64_t end = data < 0 ? bytes : RAW3(SYS_lseek, from, data, SEEK_HOLE);
    if (data < 0) data = at;
    if (end < 0 || end > bytes) end = bytes;
    int64_t in = data, out = data;
    while (in < end) {
      long n = devproxy_raw(SYS_copy_file_range, from, (long)&in, to, (long)&out, end - in, 0);
      if (n < 0) {  // two kinds of file systems: EXDEV
        if (RAW3(SYS_lseek, to, out, SEEK_SET) < 0) return false;
        n = RAW4(SYS_sendfile, to, from, &in, end - in);
        if (n > 0) out = in;
      }
      if (n <= 0) return false;
    }
    at = end;
  }
  return true;
}

__attribute__((noinline)) static void keep_link(long undo, const char* name, const char* path) {
  char target[kPath];
  const long n = RAW4(SYS_readlinkat, AT_FDCWD, path, target, kPath - 1);
  if (n <= 0) return;
  target[n] = 0;
  RAW3(SYS_symlinkat, target, undo, name);
}

// As devproxy/checkpoint/files/xattrs.py keeps them.
static bool is_kept(const char* attribute) {
  return starts(attribute, "user.") || starts(attribute, "system.posix_acl_") ||
         starts(attribute, "security.capability");
}

// names: as flistxattr(2) gives them. record: room for one attribute.
static bool write_attributes(int from, int to, const char* names, long bytes, char* record) {
  for (const char* name = names; name < names + bytes; name += length(name) + 1) {
    if (!is_kept(name)) continue;
    char* value = put(record, name, length(name) + 1) + sizeof(uint32_t);
    const long size = RAW4(SYS_fgetxattr, from, name, value, kAttributes);
    if (size == -ENODATA) continue;  // somebody has just removed it
    if (size < 0) return false;
    const uint32_t stored = (uint32_t)size;
    put(value - sizeof(stored), (const char*)&stored, sizeof(stored));
    const long all = value + size - record;
    if (RAW3(SYS_write, to, record, all) != all) return false;
  }
  return true;
}

static char* name_temporary(char* to, const char* name, const char* kind) {
  char* end = put_text(put_text(to, name), kind);
  end = put_number(end, (uint64_t)devproxy_raw(SYS_gettid, 0, 0, 0, 0, 0, 0));
  *end = 0;
  return to;
}

// Published before the copy, and only while there is none: what was read before that look is from before any change.
static bool publish_attributes(int from, long undo, const char* name, const char* names, long bytes, char* record) {
  char temporary[64], published[64];
  *put_text(put_text(published, name), ".x") = 0;
  name_temporary(temporary, name, ".y");
  RAW3(SYS_unlinkat, undo, temporary, 0);  // of a dead thread of that number
  const long to = RAW4(SYS_openat, undo, temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (to < 0) return false;
  bool whole = write_attributes(from, (int)to, names, bytes, record);
  RAW1(SYS_close, to);
  if (whole && RAW3(SYS_faccessat, undo, name, F_OK) != 0)
    whole = RAW4(SYS_renameat, undo, temporary, undo, published) == 0;
  RAW3(SYS_unlinkat, undo, temporary, 0);
  return whole;
}

// True when all are kept, or there are none.
__attribute__((noinline)) static bool keep_attributes(int from, long undo, const char* name) {
  const long any = RAW3(SYS_flistxattr, from, 0, 0);
  if (any == 0 || any == -EOPNOTSUPP) return true;
  // Not on the stack, which may be a signal handler's.
  const long room = 3 * kAttributes;
  const long memory = devproxy_raw(SYS_mmap, 0, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory < 0 && memory > -4096) return false;
  char* names = (char*)memory;
  const long bytes = RAW3(SYS_flistxattr, from, names, kAttributes);
  bool kept = false;
  for (const char* one = names; one < names + bytes && !kept; one += length(one) + 1) kept = is_kept(one);
  const bool whole = kept ? publish_attributes(from, undo, name, names, bytes, names + kAttributes) : bytes >= 0;
  RAW2(SYS_munmap, memory, room);
  return whole;
}

// Under another name first: mkdir(2) takes the umask from the mode.
__attribute__((noinline)) static void keep_folder(const struct stat* st, long undo, const char* name,
                                                  const char* resolved) {
  const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  const long from = RAW4(SYS_openat, AT_FDCWD, resolved, flags, 0);
  if (from < 0) return;
  char temporary[64];
  name_temporary(temporary, name, ".t");
  RAW3(SYS_unlinkat, undo, temporary, AT_REMOVEDIR);  // of a dead thread of that number
  if (RAW3(SYS_mkdirat, undo, temporary, 0700) == 0) {
    const long to = RAW4(SYS_openat, undo, temporary, flags, 0);
    if (to >= 0) {
      RAW3(SYS_fchown, to, st->st_uid, st->st_gid);
      RAW2(SYS_fchmod, to, st->st_mode & 07777);
      RAW1(SYS_close, to);
      if (keep_attributes((int)from, undo, name))
        devproxy_raw(SYS_renameat2, undo, (long)temporary, undo, (long)name, RENAME_NOREPLACE, 0);
    }
    RAW3(SYS_unlinkat, undo, temporary, AT_REMOVEDIR);
  }
  RAW1(SYS_close, from);
}

static void keep_undo(const struct stat* st, const char* resolved) {
  char name[sizeof(g_job_dir) + 64];
  *put_text(put_text(name, g_job_dir), "/files.undo") = 0;
  const long undo = RAW4(SYS_openat, AT_FDCWD, name, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
  if (undo < 0) return;  // no image yet: nothing to go back to
  char* end = name;
  const uint64_t hash = fnv(kFnvStart, resolved, length(resolved));
  for (int i = 60; i >= 0; i -= 4) *end++ = "0123456789abcdef"[(hash >> i) & 15];
  *end = 0;
  long from = -1;
  if (RAW3(SYS_faccessat, undo, name, F_OK) == 0) goto out;
  *put_text(end, ".m") = 0;
  if (RAW3(SYS_faccessat, undo, name, F_OK) == 0) goto out;
  *end = 0;
  if (S_ISDIR(st->st_mode)) {
    keep_folder(st, undo, name, resolved);
    goto out;
  }
  if (S_ISLNK(st->st_mode)) {
    keep_link(undo, name, resolved);
    goto out;
  }
  if (!S_ISREG(st->st_mode)) goto out;
  // No hard link, not even when the name goes: who has the file open may still write, and CRIU takes an open file
  // without a name for deleted only when it has no link.
  if ((uint64_t)st->st_size > g_most_bytes) goto out;
  from = RAW4(SYS_openat, AT_FDCWD, resolved, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
  if (from < 0 || shared_file_system((int)from)) goto out;
  char temporary[64];
  name_temporary(temporary, name, ".t");
  RAW3(SYS_unlinkat, undo, temporary, 0);  // of a dead thread of that number
  const long to = RAW4(SYS_openat, undo, temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (to < 0) goto out;
  const bool whole = copy_data((int)from, (int)to, st->st_size) && keep_attributes((int)from, undo, name);
  RAW3(SYS_fchown, to, st->st_uid, st->st_gid);
  RAW2(SYS_fchmod, to, st->st_mode & 07777);
  const struct timespec times[2] = {st->st_atim, st->st_mtim};
  RAW4(SYS_utimensat, to, 0, times, 0);
  RAW1(SYS_close, to);
  if (whole) devproxy_raw(SYS_renameat2, undo, (long)temporary, undo, (long)name, RENAME_NOREPLACE, 0);
  RAW3(SYS_unlinkat, undo, temporary, 0);
out:
  if (from >= 0) RAW1(SYS_close, from);
  RAW1(SYS_close, undo);
}

// `record` has the resolved path at kHead.
static void write_record(char kind, const struct stat* st, char* record) {
  char* path = record + kHead;
  if (!plain(path)) {
    append_escaped(kind, st, path);
    return;
  }
  char head[kHead];
  const size_t n = (size_t)(put_head(head, kind, st) - head);
  const size_t bytes = length(path);
  put(path - n, head, n);
  path[bytes] = '\n';
  append(path - n, n + bytes + 1);
  path[bytes] = 0;
}

static void note(int dirfd, const char* path, unsigned flags, int links);

// A link that leads nowhere: the call makes the file that it names.
__attribute__((noinline)) static void note_behind_link(int dirfd, const char* path, unsigned flags, int links) {
  char target[kPath];
  char folder[kPath];
  const long n = RAW4(SYS_readlinkat, dirfd, path, target, kPath - 1);
  size_t cut = length(path);
  if (n <= 0 || cut >= kPath) return;
  target[n] = 0;
  while (cut > 0 && path[cut - 1] != '/') --cut;
  if (cut == 0) {
    note(dirfd, target, flags, links);
    return;
  }
  *put(folder, path, cut) = 0;
  const long fd = RAW4(SYS_openat, dirfd, folder, O_PATH | O_CLOEXEC | O_DIRECTORY, 0);
  if (fd < 0) return;
  note((int)fd, target, flags, links);
  RAW1(SYS_close, fd);
}

void devproxy_note(int dirfd, const char* path, unsigned flags) {
  if (on()) note(dirfd, path, flags, 0);
}

static void note(int dirfd, const char* path, unsigned flags, int links) {
  const bool follow = !(flags & kNoteNoFollow);
  struct stat st = {0};
  const long rc = RAW4(SYS_newfstatat, dirfd, path, &st, follow ? 0 : AT_SYMLINK_NOFOLLOW);
  if (rc != 0 && (rc != -ENOENT || !(flags & kNoteCreates))) return;  // the call will fail, or is none of ours
  const bool there = rc == 0;
  if (there && !(flags & kNoteAnyKind) && !S_ISREG(st.st_mode)) return;
  if (there && st.st_nlink == 0) return;  // /proc/self/fd/N of a file without a name
  if (!there && follow && RAW4(SYS_newfstatat, dirfd, path, &st, AT_SYMLINK_NOFOLLOW) == 0) {
    if (S_ISLNK(st.st_mode) && links < 8) note_behind_link(dirfd, path, flags, links + 1);
    return;
  }
  const uint64_t key = there ? key_of('W', path, &st) : 0;
  if (there && seen(key)) return;
  char record[kHead + kPath];
  const size_t n = resolve(dirfd, path, there, follow, record + kHead);
  if (n == 0) return;
  if (!ignored(record + kHead)) {
    // What this process has made itself it has written already, and no older image wants it.
    const uint64_t made = fnv(kFnvStart, record + kHead, n) | 1;
    const bool known = there && seen(made);
    if (!known) write_record(there ? 'W' : 'C', &st, record);
    if (!there) {
      remember(made);
    } else if (!known) {
      keep_undo(&st, record + kHead);
    }
  }
  if (there) remember(key);
}

static void note_fd(int fd, char kind) {
  struct stat st;
  if (RAW2(SYS_fstat, fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_nlink == 0) return;
  const uint64_t key = key_of(kind, "", &st);
  if (seen(key)) return;
  char record[kHead + kPath];
  const size_t n = name_of_fd(fd, record + kHead);
  if (n == 0) return;
  if (!ignored(record + kHead)) {
    const bool known = seen(fnv(kFnvStart, record + kHead, n) | 1);
    if (!known || kind == 'M') write_record(kind, &st, record);
    if (!known) keep_undo(&st, record + kHead);
  }
  remember(key);
}

void devproxy_note_fd(int fd) {
  if (on()) note_fd(fd, 'W');
}

void devproxy_note_map(int fd) {
  if (!on()) return;
  const long flags = RAW3(SYS_fcntl, fd, F_GETFL, 0);
  if (flags >= 0 && (flags & O_ACCMODE) == O_RDWR) note_fd(fd, 'M');
}

__attribute__((noinline)) static void record_directory(int old_dirfd, const char* old_path, int new_dirfd,
                                                       const char* new_path, const struct stat* st) {
  char name[kPath];
  char record[kHead + 8 * kPath];
  char* end = put_head(record, 'R', st);
  if (resolve(old_dirfd, old_path, true, false, name) == 0 || ignored(name)) return;
  end = put_escaped(end, name);
  *end++ = '\t';
  if (resolve(new_dirfd, new_path, false, false, name) == 0) return;
  end = put_escaped(end, name);
  *end++ = '\n';
  append(record, (size_t)(end - record));
}

void devproxy_note_rename(int old_dirfd, const char* old_path, int new_dirfd, const char* new_path) {
  if (!on()) return;
  struct stat st;
  if (RAW4(SYS_newfstatat, old_dirfd, old_path, &st, AT_SYMLINK_NOFOLLOW) != 0) return;
  if (S_ISDIR(st.st_mode)) {
    record_directory(old_dirfd, old_path, new_dirfd, new_path, &st);
    return;
  }
  devproxy_note(old_dirfd, old_path, kNoteNoFollow | kNoteAnyKind);
  devproxy_note(new_dirfd, new_path, kNoteNoFollow | kNoteAnyKind | kNoteCreates);
}
