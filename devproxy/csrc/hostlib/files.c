// SPDX-License-Identifier: Apache-2.0
// The interposers: libc's functions that make, change, rename or remove a file by name. Each tells devproxy_note first
// and then calls the next library's function. read, write and opening for reading are not touched (one test of the
// flags). What comes past them: static programs, raw system calls, and changes through descriptors from outside the
// job, which the functions on descriptors below catch in part.
#define _GNU_SOURCE
#define _LARGEFILE64_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "devproxy/csrc/hostlib/note.h"

#define EXPORT __attribute__((visibility("default")))

// dlsym gives the same answer to every thread; no lock, so nothing is held over fork. It does not allocate when it
// finds the name (glibc 2.34 and later), and musl and glibc have every name used here or nobody calls it.
#define REAL(result, name, ...)                                    \
  typedef result (*name##_fn)(__VA_ARGS__);                        \
  static name##_fn next_##name;                                    \
  static name##_fn real_##name(void) {                             \
    name##_fn f = __atomic_load_n(&next_##name, __ATOMIC_RELAXED); \
    if (__builtin_expect(f != NULL, 1)) return f;                  \
    const int saved = errno;                                       \
    f = (name##_fn)(uintptr_t)dlsym(RTLD_NEXT, #name);             \
    errno = saved;                                                 \
    __atomic_store_n(&next_##name, f, __ATOMIC_RELAXED);           \
    return f;                                                      \
  }

static bool changes(int flags) {
  if (flags & O_PATH) return false;
  if ((flags & O_TMPFILE) == O_TMPFILE) return false;  // has no name; linkat gives it one
  return (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) != 0;
}

static inline void note_open(int dirfd, const char* path, int flags) {
  if (__builtin_expect(!changes(flags), 1)) return;
  devproxy_note(dirfd, path, (flags & O_CREAT ? kNoteCreates : 0) | (flags & (O_NOFOLLOW) ? kNoteNoFollow : 0));
}

static bool wants_mode(int flags) { return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE; }

#define OPEN(name)                                    \
  REAL(int, name, const char*, int, ...)              \
  EXPORT int name(const char* path, int flags, ...) { \
    mode_t mode = 0;                                  \
    if (wants_mode(flags)) {                          \
      va_list args;                                   \
      va_start(args, flags);                          \
      mode = va_arg(args, mode_t);                    \
      va_end(args);                                   \
    }                                                 \
    note_open(AT_FDCWD, path, flags);                 \
    return real_##name()(path, flags, mode);          \
  }
#define OPENAT(name)                                             \
  REAL(int, name, int, const char*, int, ...)                    \
  EXPORT int name(int dirfd, const char* path, int flags, ...) { \
    mode_t mode = 0;                                             \
    if (wants_mode(flags)) {                                     \
      va_list args;                                              \
      va_start(args, flags);                                     \
      mode = va_arg(args, mode_t);                               \
      va_end(args);                                              \
    }                                                            \
    note_open(dirfd, path, flags);                               \
    return real_##name()(dirfd, path, flags, mode);              \
  }
// What fortified programs call when no mode is given.
#define OPEN_2(name)                             \
  REAL(int, name, const char*, int)              \
  EXPORT int name(const char* path, int flags);  \
  EXPORT int name(const char* path, int flags) { \
    note_open(AT_FDCWD, path, flags);            \
    return real_##name()(path, flags);           \
  }
#define OPENAT_2(name)                                      \
  REAL(int, name, int, const char*, int)                    \
  EXPORT int name(int dirfd, const char* path, int flags);  \
  EXPORT int name(int dirfd, const char* path, int flags) { \
    note_open(dirfd, path, flags);                          \
    return real_##name()(dirfd, path, flags);               \
  }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
OPEN_2(__open_2)
OPEN_2(__open64_2)
OPENAT_2(__openat_2)
OPENAT_2(__openat64_2)

#define CREAT(name)                                \
  REAL(int, name, const char*, mode_t)             \
  EXPORT int name(const char* path, mode_t mode) { \
    note_open(AT_FDCWD, path, O_WRONLY | O_CREAT); \
    return real_##name()(path, mode);              \
  }
CREAT(creat)
CREAT(creat64)

static void note_stream(const char* path, const char* mode) {
  bool writes = false;
  bool creates = false;
  for (const char* m = mode; *m && *m != ','; ++m) {
    if (*m == 'w' || *m == 'a') creates = true;
    if (*m == '+') writes = true;
  }
  if (writes || creates) devproxy_note(AT_FDCWD, path, creates ? kNoteCreates : 0);
}

#define FOPEN(name)                                       \
  REAL(FILE*, name, const char*, const char*)             \
  EXPORT FILE* name(const char* path, const char* mode) { \
    note_stream(path, mode);                              \
    return real_##name()(path, mode);                     \
  }
#define FREOPEN(name)                                                   \
  REAL(FILE*, name, const char*, const char*, FILE*)                    \
  EXPORT FILE* name(const char* path, const char* mode, FILE* stream) { \
    if (path) note_stream(path, mode);                                  \
    return real_##name()(path, mode, stream);                           \
  }
FOPEN(fopen)
FOPEN(fopen64)
FREOPEN(freopen)
FREOPEN(freopen64)

// The child opens it inside libc, where nobody can tell.
REAL(int, posix_spawn_file_actions_addopen, posix_spawn_file_actions_t*, int, const char*, int, mode_t)
EXPORT int posix_spawn_file_actions_addopen(posix_spawn_file_actions_t* actions, int fd, const char* path, int flags,
                                            mode_t mode) {
  note_open(AT_FDCWD, path, flags);
  return real_posix_spawn_file_actions_addopen()(actions, fd, path, flags, mode);
}

REAL(FILE*, fdopen, int, const char*)
EXPORT FILE* fdopen(int fd, const char* mode) {
  if (mode[0] == 'w' || mode[0] == 'a' || (mode[0] && mode[1] == '+')) devproxy_note_fd(fd);
  return real_fdopen()(fd, mode);
}

// mkstemp chooses the name inside libc, where nobody can tell it before the file is there: so it is done here.
static int from_template(char* template, int suffix, int flags, int directory) {
  static const char kLetters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
  const int saved = errno;
  const size_t bytes = strlen(template);
  if (suffix < 0 || bytes < (size_t)suffix + 6 || memcmp(template + bytes - (size_t)suffix - 6, "XXXXXX", 6) != 0) {
    errno = EINVAL;
    return -1;
  }
  char* x = template + bytes - (size_t)suffix - 6;
  for (int tries = 0; tries < 10000; ++tries) {
    uint64_t random = 0;
    if (devproxy_raw(SYS_getrandom, (long)&random, sizeof(random), 0, 0, 0, 0) != sizeof(random)) break;
    for (int i = 0; i < 6; ++i, random /= 62) x[i] = kLetters[random % 62];
    const int result =
        directory ? mkdir(template, 0700) : open(template, (flags & ~O_ACCMODE) | O_RDWR | O_CREAT | O_EXCL, 0600);
    if (result >= 0) {
      errno = saved;
      return result;
    }
    if (errno != EEXIST) {
      memcpy(x, "XXXXXX", 6);
      return -1;
    }
  }
  memcpy(x, "XXXXXX", 6);
  errno = EEXIST;
  return -1;
}

EXPORT int mkstemp(char* template) { return from_template(template, 0, 0, 0); }
EXPORT int mkstemp64(char* template) { return from_template(template, 0, 0, 0); }
EXPORT int mkostemp(char* template, int flags) { return from_template(template, 0, flags, 0); }
EXPORT int mkostemp64(char* template, int flags) { return from_template(template, 0, flags, 0); }
EXPORT int mkstemps(char* template, int suffix) { return from_template(template, suffix, 0, 0); }
EXPORT int mkstemps64(char* template, int suffix) { return from_template(template, suffix, 0, 0); }
EXPORT int mkostemps(char* template, int suffix, int flags) { return from_template(template, suffix, flags, 0); }
EXPORT int mkostemps64(char* template, int suffix, int flags) { return from_template(template, suffix, flags, 0); }
EXPORT char* mkdtemp(char* template) { return from_template(template, 0, 0, 1) == 0 ? template : NULL; }

// -- names that come and go -------------------------------------------------------------------------------------------
enum { kGoes = kNoteNoFollow | kNoteAnyKind, kComes = kNoteNoFollow | kNoteAnyKind | kNoteCreates };

REAL(int, rename, const char*, const char*)
EXPORT int rename(const char* from, const char* to) {
  devproxy_note_rename(AT_FDCWD, from, AT_FDCWD, to);
  return real_rename()(from, to);
}

REAL(int, renameat, int, const char*, int, const char*)
EXPORT int renameat(int from_fd, const char* from, int to_fd, const char* to) {
  devproxy_note_rename(from_fd, from, to_fd, to);
  return real_renameat()(from_fd, from, to_fd, to);
}

REAL(int, renameat2, int, const char*, int, const char*, unsigned)
EXPORT int renameat2(int from_fd, const char* from, int to_fd, const char* to, unsigned flags) {
  devproxy_note_rename(from_fd, from, to_fd, to);
  return real_renameat2()(from_fd, from, to_fd, to, flags);
}

REAL(int, unlink, const char*)
EXPORT int unlink(const char* path) {
  devproxy_note(AT_FDCWD, path, kGoes);
  return real_unlink()(path);
}

REAL(int, unlinkat, int, const char*, int)
EXPORT int unlinkat(int dirfd, const char* path, int flags) {
  devproxy_note(dirfd, path, kGoes);
  return real_unlinkat()(dirfd, path, flags);
}

REAL(int, remove, const char*)
EXPORT int remove(const char* path) {
  devproxy_note(AT_FDCWD, path, kGoes);
  return real_remove()(path);
}

REAL(int, rmdir, const char*)
EXPORT int rmdir(const char* path) {
  devproxy_note(AT_FDCWD, path, kGoes);
  return real_rmdir()(path);
}

REAL(int, mkdir, const char*, mode_t)
EXPORT int mkdir(const char* path, mode_t mode) {
  devproxy_note(AT_FDCWD, path, kComes);
  return real_mkdir()(path, mode);
}

REAL(int, mkdirat, int, const char*, mode_t)
EXPORT int mkdirat(int dirfd, const char* path, mode_t mode) {
  devproxy_note(dirfd, path, kComes);
  return real_mkdirat()(dirfd, path, mode);
}

REAL(int, link, const char*, const char*)
EXPORT int link(const char* from, const char* to) {
  devproxy_note(AT_FDCWD, from, kGoes);  // from now on it can be changed by another name
  devproxy_note(AT_FDCWD, to, kComes);
  return real_link()(from, to);
}

REAL(int, linkat, int, const char*, int, const char*, int)
EXPORT int linkat(int from_fd, const char* from, int to_fd, const char* to, int flags) {
  devproxy_note(from_fd, from, flags & AT_SYMLINK_FOLLOW ? 0 : kGoes);
  devproxy_note(to_fd, to, kComes);
  return real_linkat()(from_fd, from, to_fd, to, flags);
}

REAL(int, symlink, const char*, const char*)
EXPORT int symlink(const char* target, const char* path) {
  devproxy_note(AT_FDCWD, path, kComes);
  return real_symlink()(target, path);
}

REAL(int, symlinkat, const char*, int, const char*)
EXPORT int symlinkat(const char* target, int dirfd, const char* path) {
  devproxy_note(dirfd, path, kComes);
  return real_symlinkat()(target, dirfd, path);
}

REAL(int, truncate, const char*, off_t)
EXPORT int truncate(const char* path, off_t bytes) {
  devproxy_note(AT_FDCWD, path, 0);
  return real_truncate()(path, bytes);
}

REAL(int, truncate64, const char*, off64_t)
EXPORT int truncate64(const char* path, off64_t bytes) {
  devproxy_note(AT_FDCWD, path, 0);
  return real_truncate64()(path, bytes);
}

// Named POSIX shared memory is a file of /dev/shm; CRIU stores none of its content.
enum { kShmPath = 300 };
static bool shm_path(const char* prefix, const char* name, char path[kShmPath]) {
  while (*name == '/') ++name;
  const int bytes = snprintf(path, kShmPath, "/dev/shm/%s%s", prefix, name);
  return *name && bytes > 0 && bytes < kShmPath;
}
static bool semaphore_path(const char* name, char path[kShmPath]) { return shm_path("sem.", name, path); }

static void note_shm(const char* name, unsigned flags) {
  char path[kShmPath];
  if (shm_path("", name, path)) devproxy_note(AT_FDCWD, path, flags);
}

REAL(int, shm_open, const char*, int, mode_t)
EXPORT int shm_open(const char* name, int flags, mode_t mode) {
  if (changes(flags)) note_shm(name, kNoteNoFollow | (flags & O_CREAT ? kNoteCreates : 0));
  return real_shm_open()(name, flags, mode);
}

REAL(int, shm_unlink, const char*)
EXPORT int shm_unlink(const char* name) {
  note_shm(name, kGoes);
  return real_shm_unlink()(name);
}

// A named semaphore is a file too. sem_open makes it under a name of its own, links the right one to it and removes the
// first, by which the mapping is known from then on; CRIU cannot open that at a restore. So it is mapped once more, under
// the name that stays. Whoever may not ask which file it is gets no image either, and keeps what sem_open gave.
static void map_by_name(void* semaphore, const char* path) {
  const int saved = errno;
  const long page = sysconf(_SC_PAGESIZE);
  char mapping[64];
  snprintf(mapping, sizeof(mapping), "/proc/self/map_files/%lx-%lx", (long)semaphore, (long)semaphore + page);
  const int fd = (int)devproxy_raw(SYS_openat, AT_FDCWD, (long)path, O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0, 0, 0);
  struct stat mapped, named;
  if (fd >= 0 && stat(mapping, &mapped) == 0 && fstat(fd, &named) == 0 && mapped.st_dev == named.st_dev &&
      mapped.st_ino == named.st_ino) {
    devproxy_note_map(fd);
    devproxy_raw(SYS_mmap, (long)semaphore, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  }
  if (fd >= 0) devproxy_raw(SYS_close, fd, 0, 0, 0, 0, 0);
  errno = saved;
}

REAL(sem_t*, sem_open, const char*, int, ...)
EXPORT sem_t* sem_open(const char* name, int flags, ...) {
  if (!(flags & O_CREAT)) return real_sem_open()(name, flags);
  va_list args;
  va_start(args, flags);
  const mode_t mode = va_arg(args, mode_t);
  const unsigned value = va_arg(args, unsigned);
  va_end(args);
  char path[kShmPath];
  const bool named = semaphore_path(name, path);
  if (named) devproxy_note(AT_FDCWD, path, kNoteNoFollow | kNoteCreates);
  sem_t* const semaphore = real_sem_open()(name, flags, mode, value);
  if (named && semaphore != SEM_FAILED) map_by_name(semaphore, path);
  return semaphore;
}

REAL(int, sem_unlink, const char*)
EXPORT int sem_unlink(const char* name) {
  char path[kShmPath];
  if (semaphore_path(name, path)) devproxy_note(AT_FDCWD, path, kGoes);
  return real_sem_unlink()(name);
}

// -- through a descriptor ---------------------------------------------------------------------------------------------
REAL(int, ftruncate, int, off_t)
EXPORT int ftruncate(int fd, off_t bytes) {
  devproxy_note_fd(fd);
  return real_ftruncate()(fd, bytes);
}

REAL(int, ftruncate64, int, off64_t)
EXPORT int ftruncate64(int fd, off64_t bytes) {
  devproxy_note_fd(fd);
  return real_ftruncate64()(fd, bytes);
}

REAL(int, posix_fallocate, int, off_t, off_t)
EXPORT int posix_fallocate(int fd, off_t offset, off_t bytes) {
  devproxy_note_fd(fd);
  return real_posix_fallocate()(fd, offset, bytes);
}

REAL(int, posix_fallocate64, int, off64_t, off64_t)
EXPORT int posix_fallocate64(int fd, off64_t offset, off64_t bytes) {
  devproxy_note_fd(fd);
  return real_posix_fallocate64()(fd, offset, bytes);
}

REAL(int, fallocate, int, int, off_t, off_t)
EXPORT int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  devproxy_note_fd(fd);
  return real_fallocate()(fd, mode, offset, bytes);
}

REAL(int, fallocate64, int, int, off64_t, off64_t)
EXPORT int fallocate64(int fd, int mode, off64_t offset, off64_t bytes) {
  devproxy_note_fd(fd);
  return real_fallocate64()(fd, mode, offset, bytes);
}

REAL(ssize_t, copy_file_range, int, off64_t*, int, off64_t*, size_t, unsigned)
EXPORT ssize_t copy_file_range(int in, off64_t* in_at, int out, off64_t* out_at, size_t bytes, unsigned flags) {
  devproxy_note_fd(out);
  return real_copy_file_range()(in, in_at, out, out_at, bytes, flags);
}

REAL(ssize_t, sendfile, int, int, off_t*, size_t)
EXPORT ssize_t sendfile(int out, int in, off_t* at, size_t bytes) {
  devproxy_note_fd(out);
  return real_sendfile()(out, in, at, bytes);
}

REAL(ssize_t, sendfile64, int, int, off64_t*, size_t)
EXPORT ssize_t sendfile64(int out, int in, off64_t* at, size_t bytes) {
  devproxy_note_fd(out);
  return real_sendfile64()(out, in, at, bytes);
}

REAL(ssize_t, splice, int, off64_t*, int, off64_t*, size_t, unsigned)
EXPORT ssize_t splice(int in, off64_t* in_at, int out, off64_t* out_at, size_t bytes, unsigned flags) {
  devproxy_note_fd(out);
  return real_splice()(in, in_at, out, out_at, bytes, flags);
}

// Allocators call mmap, some before anything is ready: so no dlsym here, the system call is the function.
static void* map(void* address, size_t bytes, int prot, int flags, int fd, off64_t offset) {
  if (__builtin_expect(fd >= 0 && (flags & MAP_TYPE) != MAP_PRIVATE && !(flags & MAP_ANONYMOUS), 0))
    devproxy_note_map(fd);
  const long result = devproxy_raw(SYS_mmap, (long)address, (long)bytes, prot, flags, fd, (long)offset);
  if (result >= 0 || result < -4095) return (void*)result;
  errno = (int)-result;
  return MAP_FAILED;
}
EXPORT void* mmap(void* address, size_t bytes, int prot, int flags, int fd, off_t offset) {
  return map(address, bytes, prot, flags, fd, offset);
}
EXPORT void* mmap64(void* address, size_t bytes, int prot, int flags, int fd, off64_t offset) {
  return map(address, bytes, prot, flags, fd, offset);
}
