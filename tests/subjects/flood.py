# SPDX-License-Identifier: Apache-2.0
"""Writes numbered lines of many lengths without a pause, in one of several ways, until the file `stop` is there.

flood.py buffered|raw|libc [--rate BYTES_PER_S]. Line n is "n xxx...": its length follows from n. The last says "end n".
"""

import argparse
import ctypes
import os
import sys
import time

LONGEST = 9000  # more than PIPE_BUF: such a write may be cut into two by the kernel


def line(number: int) -> bytes:
    return b"%d %s\n" % (number, b"x" * (number * 7919 % LONGEST))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["buffered", "raw", "libc"])
    parser.add_argument("--rate", type=int, default=0)
    o = parser.parse_args()
    libc = ctypes.CDLL(None)
    stdout = ctypes.c_void_p.in_dll(libc, "stdout")
    raw = open(1, "wb", buffering=0, closefd=False)

    def write(data: bytes) -> None:
        if o.way == "buffered":
            sys.stdout.buffer.write(data)
        elif o.way == "libc":
            libc.fwrite(data, 1, len(data), stdout)
        else:
            raw.write(data)  # as python -u does: what write(2) did not take is lost

    number = written = 0
    begin = time.monotonic()
    while number % 50 or not os.path.exists("stop"):
        number += 1
        data = line(number)
        write(data)
        written += len(data)
        if o.rate and written > o.rate / 20:
            time.sleep(max(0.0, 0.05 - (time.monotonic() - begin)))
            begin, written = time.monotonic(), 0
    write(b"end %d\n" % number)
    sys.stdout.flush()
    libc.fflush(None)


if __name__ == "__main__":
    main()
