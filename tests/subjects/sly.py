# SPDX-License-Identifier: Apache-2.0
"""Gets what CRIU cannot dump after the preflight has looked: a userfaultfd, as soon as an image is begun.

The staging folder, which the job sees in its own job folder, is made between the look and the cut.
"""

import ctypes
import os
import time

from common import Steps, options

NR_USERFAULTFD = 323  # x86-64
STAGING = os.path.join(os.environ["DEVPROXY_JOB_DIR"], "staging")


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    o = options(__doc__)
    steps = Steps(o)
    held = -1
    for _ in steps:
        until = time.monotonic() + o.seconds_per_step
        while time.monotonic() < until:
            begun = os.path.exists(STAGING)
            if begun and held < 0:
                held = libc.syscall(NR_USERFAULTFD, os.O_CLOEXEC)
            elif not begun and held >= 0:
                os.close(held)
                held = -1
            time.sleep(0.0002)
        steps.say()


if __name__ == "__main__":
    main()
