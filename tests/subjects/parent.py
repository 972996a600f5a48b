# SPDX-License-Identifier: Apache-2.0
"""cheap.py with a child that sleeps, and that it never waits for."""

import subprocess

import cheap

if __name__ == "__main__":
    subprocess.Popen(["sleep", "100000"])
    cheap.main()
