# SPDX-License-Identifier: Apache-2.0
"""Is there a terminal, how large is it, and what is typed into it?"""

import os
import select
import sys

from common import Digest, Steps, options


def main() -> None:
    o = options(__doc__)
    typed = ""
    steps = Steps(o)
    for _ in steps:
        terminals = "".join("y" if os.isatty(fd) else "n" for fd in (0, 1, 2))
        size = "none"
        for fd in (0, 1, 2):
            if os.isatty(fd):
                size = "{0.columns}x{0.lines}".format(os.get_terminal_size(fd))
                break
        foreground = "-"
        if os.isatty(0):
            foreground = "y" if os.tcgetpgrp(0) == os.getpgrp() else "n"
            while select.select([0], [], [], 0)[0]:
                line = sys.stdin.buffer.raw.readline()
                if not line:
                    break
                typed = line.decode().strip()
        steps.say(f"terminals {terminals} size {size} foreground {foreground} typed {typed!r}")
    Digest().finish()


if __name__ == "__main__":
    main()
