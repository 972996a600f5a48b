# SPDX-License-Identifier: Apache-2.0
"""Finds what in a job's process tree CRIU cannot dump or a restore would lose, and names it, before anything is stopped.

It looks through /proc and sock_diag from outside, and the job runs on. It is called with the pid (as we see it) of the
first process of the job's PID namespace.

Each rule was tried against CRIU 4.2.1, kernel 6.18, `--external mnt[] --tcp-established --network-lock skip --file-locks
--link-remap`, by dump and restore (tests/integration/test_dumpable.py does it again):

| found in the tree | CRIU | here |
|---|---|---|
| unix stream, seqpacket, dgram socket connected to an outsider | dump fails | refused; the proxy's own: waited for |
| unix sockets among themselves, one end closed, data in flight, SCM_RIGHTS in flight | works | - |
| unix connection not accepted yet, with data written | dump fails: "Non-empty write queue" | refused, transient |
| TCP among themselves, closed ends, listeners | works (--tcp-established) | - |
| TCP not accepted yet | dump fails: "In-flight connection" | refused, transient |
| TCP to outside | not a failure; the other side goes on alone | warned, strict: refused |
| UDP, unconnected or connected; packet, raw, netlink sockets | works | connected UDP: warned |
| UDP with unread datagrams | works, and they are lost | refused, transient |
| periodic timerfd that has expired, unread | works, and it fires once and never again | mended in the image (criu_image.wind_up_timers) |
| inotify with unread events | works, and they are lost | refused, transient |
| eventfd semaphore; eventfd above 32 bits | works, and it is a plain counter of 32 bits | refused |
| AIO context in a root without /dev/null | dump works; restore fails: "Can't open /dev/null for aio" | refused |
| POSIX timer that signals one thread | dump works; restore fails: "Can't create posix timer" | refused |
| pid namespace that no child has entered yet | works, and it is gone | refused |
| System V semaphores and message queues, no IPC namespace | works, and they are lost | refused (sysv says whose they are) |
| netlink socket with unread messages | dump fails | refused, transient |
| vsock, MPTCP; other families, ping sockets [inferred] | dump fails | refused |
| io_uring, perf event, userfaultfd, bpf map, landlock rule set | dump fails | refused |
| eventfd, epoll, signalfd, timerfd, inotify, fanotify, pidfd (also of the dead), memfd, AIO | works | - |
| memfd_secret mapping | dump fails | refused |
| System V shared memory, no IPC namespace | dump fails | refused |
| POSIX message queue | dump fails | refused |
| unlinked file with more than the ghost limit of allocated bytes, open or mapped | dump fails | refused |
| memfd of huge pages | dump fails | refused |
| unlinked file that has another name | dump works; restore fails after --leave-running | refused; a named semaphore has its name (csrc/hostlib/files.c) |
| file hidden by a later mount | dump fails: "link remap" | refused |
| unlinked directory, O_PATH, file of a dead process in /proc | works | - |
| O_TMPFILE | works, and it can be given no name any more | - |
| nested pid, user, ipc, uts, net, time, cgroup namespace | dump fails | refused |
| nested mount namespace, tmpfs, bind, overlay, proc mount of the job, chroot | works, but not a chroot in a nested namespace | - |
| process that shares its working folder or memory (CLONE_FS, CLONE_VM) with another | dump fails | - |
| unread message on a unix socket with SO_PASSCRED | dump fails | - |
| unread unix datagram of a sender with a name | works, and the sender is lost | - |
| unix socket bound through /proc; descriptor at RLIMIT_NOFILE - 1 | dump works, restore fails | - |
| seccomp filter, stopped processes, zombies, sessions without leader | works | - |
| zombie leader whose threads live | dump fails | refused |
| traced process | dump fails | refused, with the tracer's name |
| process of another uid, without CAP_SYS_RESOURCE on our side | dump fails | refused |
| session or group leader outside the PID namespace | dump fails | refused |
| file locks, leases | works (--file-locks) | - |
| pipe whose other end only an outsider holds | dump works, restore gives end of file or SIGPIPE | refused |
| pipe with both ends inside that an outsider holds too | works inside | warned |
| FIFO in the file system | works by path | - |
| pipe of packets (O_DIRECT) | dump fails | refused |
| devices null, zero, full, random, urandom, kmsg, tty, ptmx; a pty with its master inside | works | - |
| a terminal whose master is outside; any other device, open or mapped | dump fails | refused |

check.check_tree goes over the tree; each other module knows one kind of obstacle.
"""
