# SPDX-License-Identifier: Apache-2.0
"""numba-cuda's own tests, one module in one process: a line per test, `test <name> ok`, or how it ended.

numba_tests.py --list PACKAGE      names its modules, one a line
numba_tests.py MODULE              runs one; DONE is the last line
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import unittest
from typing import Any


class Lines(unittest.TestResult):
    def say(self, test: unittest.TestCase, how: str) -> None:
        name = test.id().replace("numba.cuda.tests.", "").replace(" ", "_")
        print(f"test {name} {how}", flush=True)

    def because(self, test: unittest.TestCase, word: str, error: Any) -> None:
        text = " ".join(f"{error[0].__name__}: {error[1]}".split())
        self.say(test, f"{word} {text[:300]}")

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.say(test, "ok")

    def addError(self, test: Any, error: Any) -> None:
        self.because(test, "error", error)

    def addFailure(self, test: Any, error: Any) -> None:
        self.because(test, "failed", error)

    def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
        if error:
            self.because(test, "failed", error)

    def addSkip(self, test: Any, reason: str) -> None:
        self.say(test, f"skipped {reason}")

    def addExpectedFailure(self, test: Any, error: Any) -> None:
        self.say(test, "ok")


def main(arguments: list[str]) -> None:
    if arguments[0] == "--list":
        importlib.import_module("numba.cuda.testing")  # what each of them needs, pytest among it
        package = importlib.import_module(arguments[1])
        for module in pkgutil.iter_modules(package.__path__):
            if module.name.startswith("test_"):
                print(f"{arguments[1]}.{module.name}")
        return
    suite = unittest.defaultTestLoader.loadTestsFromName(arguments[0])
    suite.run(Lines())
    print("DONE", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
