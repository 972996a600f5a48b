// SPDX-License-Identifier: Apache-2.0
// devproxy_raw, and libc's syscall() with io_uring taken out.
//
// CRIU cannot dump an io_uring, and libuv (inside torch's TCPStore) makes one through syscall(); neither
// UV_USE_IO_URING=0 nor USE_LIBUV=0 stops it. ENOSYS is what a kernel without io_uring answers (io_uring_setup(2)), and
// libuv then goes its old way. Everything else passes unchanged.
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <sys/syscall.h>

#include "devproxy/csrc/hostlib/note.h"

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)

long devproxy_raw(long number, long a, long b, long c, long d, long e, long f) {
  long result;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = f;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  return result;
}

__attribute__((used, visibility("hidden"))) long devproxy_syscall_failed(long result) {
  errno = (int)-result;
  return -1;
}

// As libc's: no frame of its own, so that syscall(SYS_vfork) and the like find the stack that they expect.
// 425..427: io_uring_setup, io_uring_enter, io_uring_register (<asm/unistd_64.h>, the same numbers on every machine).
__asm__(
    ".text\n"
    ".globl syscall\n"
    ".type syscall, @function\n"
    ".p2align 4\n"
    "syscall:\n"
    ".cfi_startproc\n"
    "  endbr64\n"
    "  lea -425(%rdi), %rax\n"
    "  cmp $2, %rax\n"
    "  jbe 2f\n"
    "  mov %rdi, %rax\n"
    "  mov %rsi, %rdi\n"
    "  mov %rdx, %rsi\n"
    "  mov %rcx, %rdx\n"
    "  mov %r8, %r10\n"
    "  mov %r9, %r8\n"
    "  mov 8(%rsp), %r9\n"
    "  syscall\n"
    "  cmp $-4095, %rax\n"
    "  jae 1f\n"
    "  ret\n"
    "2: mov $-38, %rax\n"  // -ENOSYS
    "1: mov %rax, %rdi\n"
    "  jmp devproxy_syscall_failed\n"
    ".cfi_endproc\n"
    ".size syscall, .-syscall\n");

#elif defined(__aarch64__)

long devproxy_raw(long number, long a, long b, long c, long d, long e, long f) {
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  register long x4 __asm__("x4") = e;
  register long x5 __asm__("x5") = f;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return x0;
}

EXPORT long syscall(long number, ...) {
  va_list args;
  va_start(args, number);
  const long a = va_arg(args, long), b = va_arg(args, long), c = va_arg(args, long);
  const long d = va_arg(args, long), e = va_arg(args, long), f = va_arg(args, long);
  va_end(args);
  const long result = number >= 425 && number <= 427 ? -ENOSYS : devproxy_raw(number, a, b, c, d, e, f);
  if (result >= 0 || result < -4095) return result;
  errno = (int)-result;
  return -1;
}

#else
#error "libdevproxy_host knows x86-64 and aarch64"
#endif
