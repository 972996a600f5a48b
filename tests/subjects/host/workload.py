# SPDX-License-Identifier: Apache-2.0
"""A job for tests/integration/test_files.py: does file operations in two halves, with a cut between them.

argv: root folder, JSON file with {"before": [...], "after": [...]}. Prints "cut" and waits for a line in between.
An operation is [name, argument...]; one that fails with OSError was not possible there, as in any shell script.
"""

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = sys.argv[1]
os.chdir(ROOT)


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def patch(path, text):
    with open(path, "r+") as file:
        file.write(text)


def save_over(path, text):
    with open(path + ".tmp", "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def mkstemp_over(path, text):
    fd, name = tempfile.mkstemp(dir=".")
    os.write(fd, text.encode())
    os.close(fd)
    os.rename(name, path)


def c_mkstemp(path, text):
    name = ctypes.create_string_buffer(b"c-XXXXXX")
    fd = ctypes.CDLL(None).mkstemp(name)
    os.write(fd, text.encode())
    os.close(fd)
    os.rename(name.value, path)


def mmap_write(path, text):
    data = text.encode() or b"m"
    with open(path, "r+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096) as view:
            view[: len(data)] = data


def copy_range(source, target):
    with open(source, "rb") as a, open(target, "wb") as b:
        os.copy_file_range(a.fileno(), b.fileno(), 1 << 20)


def sendfile(source, target):
    with open(source, "rb") as a, open(target, "wb") as b:
        os.sendfile(b.fileno(), a.fileno(), 0, 1 << 20)


def shell(path, text):
    subprocess.run(["sh", "-c", 'printf %s "$1" >> "$0"', path, text], check=True)


def spawn(path, text):
    argv = ["sh", "-c", 'printf %s "$1" > "$0"', path, text]
    os.waitpid(os.posix_spawn("/bin/sh", argv, os.environ), 0)


def spawn_onto(path, text):
    opens = [(os.POSIX_SPAWN_OPEN, 1, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)]
    argv = ["sh", "-c", 'printf %s "$0"', text]
    os.waitpid(os.posix_spawn("/bin/sh", argv, os.environ, file_actions=opens), 0)


def tmpfile(path, text):
    """A file that gets its first name late."""
    fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o644)
    os.write(fd, text.encode())
    os.link(f"/proc/self/fd/{fd}", path)
    os.close(fd)


def fork(path, text):
    if (pid := os.fork()) == 0:
        try:
            append(path, text)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def truncate(path, size):
    os.truncate(path, size)


OPERATIONS = {
    "write": write,
    "append": append,
    "patch": patch,
    "save_over": save_over,
    "mkstemp_over": mkstemp_over,
    "c_mkstemp": c_mkstemp,
    "mmap_write": mmap_write,
    "copyfile": shutil.copyfile,
    "copy_range": copy_range,
    "sendfile": sendfile,
    "shell": shell,
    "spawn": spawn,
    "spawn_onto": spawn_onto,
    "tmpfile": tmpfile,
    "fork": fork,
    "truncate": truncate,
    "unlink": os.unlink,
    "rename": os.rename,
    "link": os.link,
    "symlink": os.symlink,
    "mkdir": os.mkdir,
    "rmdir": os.rmdir,
    "rmtree": shutil.rmtree,
}


def run(operations):
    for name, *arguments in operations:
        try:
            OPERATIONS[name](*arguments)
        except OSError:
            pass


def main():
    with open(sys.argv[2]) as file:
        plan = json.load(file)
    run(plan["before"])
    print("cut", flush=True)
    sys.stdin.readline()
    run(plan["after"])


main()
