# SPDX-License-Identifier: Apache-2.0
"""Everything that is to be found out on a GPU, in one command: see gpucheck/__init__.py.

    python3 gpu_check.py [--out DIR] [--driver PATH] [--limit SECONDS] [--only STAGE,... | --second | --third] [--list]

Standard library only, and the Python side of devproxy: py/ beside this file in a bundle, a checkout around it elsewhere.
"""

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
BUNDLED = os.path.join(HERE, "py")
sys.path[:0] = [HERE, BUNDLED if os.path.isdir(BUNDLED) else os.path.dirname(HERE)]

from gpucheck.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(__file__, sys.argv[1:]))
