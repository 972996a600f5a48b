// SPDX-License-Identifier: Apache-2.0
// What the interposers tell: "this process is about to change the file of that name". Everything here works on raw
// system calls and the stack: safe in signal handlers, before any constructor, after exit and in a vfork child; errno
// stays.
#pragma once

#include <stdbool.h>
#include <stddef.h>

enum NoteFlags {
  kNoteCreates = 1,   // the call makes the name if it is not there
  kNoteNoFollow = 2,  // the call acts on the name, not on what a symbolic link leads to
  kNoteAnyKind = 4,   // not only regular files: the name itself comes or goes
};

// The file that `path` names for `dirfd`, as in openat. Writes a record unless this process has already written it.
void devproxy_note(int dirfd, const char* path, unsigned flags);
// The file behind a descriptor that is about to be changed through it.
void devproxy_note_fd(int fd);
// As note_fd, for a shared mapping: its later changes show in no time stamp.
void devproxy_note_map(int fd);
// A directory is about to be renamed: everything below it changes its name.
void devproxy_note_rename(int old_dirfd, const char* old_path, int new_dirfd, const char* new_path);

// One system call: the kernel's answer, -errno for an error. errno is not touched.
long devproxy_raw(long number, long a, long b, long c, long d, long e, long f);
