# SPDX-License-Identifier: Apache-2.0
"""Two runs of one of torch's programs (tests/subjects/gpu/torch_cases.py), natively and through the proxy: started, and compared."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STICKY = 17  # exit code of tests/subjects/gpu/torch_cases.py
START_S = 100.0  # until the first line: importing torch from a cold disk, loading it in the server
SILENT_S = 60.0  # between two lines: more than a case's own alarm
AGAIN = 12  # times that a process is begun behind a case that ended it


@dataclass
class Side:
    """One program on one side: what it has written so far, also in an earlier call, and what went wrong with it."""

    title: str
    command: Sequence[str]
    env: dict[str, str]
    lines: Path
    log: Path
    wanted: tuple[str, ...] = ()  # the cases that are asked for, where they are named
    silent_s: float = SILENT_S
    trouble: list[str] = field(default_factory=list)
    before: Callable[[], None] | None = None  # it runs

    def read(self) -> dict[str, dict[str, Any]]:
        """By case."""
        return {facts["case"]: facts for facts in self._facts() if "case" in facts}

    def plan(self) -> list[str]:
        plans = [facts["plan"] for facts in self._facts() if "plan" in facts]
        return plans[-1] if plans else []

    def last(self) -> str:
        """The case that is begun or done last."""
        begun = [facts.get("begin") or facts.get("case") for facts in self._facts()]
        return next((str(name) for name in reversed(begun) if name), "")

    def _facts(self) -> list[dict[str, Any]]:
        found = []
        with contextlib.suppress(OSError):
            for line in self.lines.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):  # the last one may be half there
                    found.append(json.loads(line))
        return found

    def add(self, **facts: Any) -> None:
        with open(self.lines, "a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(facts) + "\n")

    def run(self, seconds: float, patience: float = 1.0) -> None:
        """Until all is done or the time is over. A case at which the process dies or hangs is noted and passed by."""
        deadline = time.monotonic() + seconds
        if self.before:
            self.before()
        for _ in range(AGAIN):
            left = deadline - time.monotonic()
            if left < 5:
                return
            after = self.last()
            done = len(self.read())
            code = self._once(left, after, patience)
            facts = self._facts()
            if facts and facts[-1].get("end") in ("all", "time"):
                return
            if time.monotonic() >= deadline or (self.wanted and set(self.wanted) <= set(self.read())):  # fmt: skip
                return
            begun = self.last()
            if begun and begun not in self.read():
                how = "it hung" if code is None else f"the process ended with {how_it_ended(code)}"
                self.add(case=begun, died=how)
                self.trouble.append(f"{begun}: {how}")
            elif code != STICKY or len(self.read()) == done:
                self.trouble.append(f"{how_it_ended(code)} before any case: {self.said()}")
                return

    def said(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return " | ".join(line for line in lines[-3:] if line.strip())[:600]

    def _once(self, seconds: float, after: str, patience: float) -> int | None:
        """The exit code; None where it was killed because nothing came."""
        line = [*self.command, "--json", str(self.lines), "--seconds", f"{seconds - 3:.0f}"]
        if after:
            line += ["--after", after]
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                line, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        begin = seen_at = time.monotonic()
        size, quiet = self._size(), START_S
        while (code := process.poll()) is None:
            time.sleep(0.05)
            now = time.monotonic()
            if self._size() != size:
                size, seen_at, quiet = self._size(), now, self.silent_s
            if now - seen_at > quiet * patience or now - begin > seconds + 4:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(3)
                return None
        return code

    def _size(self) -> int:
        return self.lines.stat().st_size if self.lines.exists() else 0


def how_it_ended(code: int | None) -> str:
    if code is None:
        return "no end"
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(number).name}"
    return f"exit code {code}"


def run_both(sides: Sequence[Side], seconds: float, at_once: bool, patience: float = 1.0) -> None:
    """At once, on one GPU: the numbers do not depend on who else is there. Else each has half of the time, the second
    also what the first leaves."""
    if not at_once:
        begin = time.monotonic()
        for number, side in enumerate(sides):
            left = seconds - (time.monotonic() - begin)
            side.run(left / (len(sides) - number), patience)
        return
    threads = [threading.Thread(target=side.run, args=(seconds, patience)) for side in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- verdicts: a kind and why -----------------------------------------------------------------------------------------

BITWISE, UNSTEADY, DIFFERENT, RAISES, OTHER_WORDS, NO_NATIVE, NO_SAMPLES, INPUTS, PROXY_ERROR, NOT_REACHED = (
    "bitwise",
    "not deterministic natively",
    "different",
    "raises alike",
    "raises in other words",
    "no native result",
    "no samples",
    "other inputs: not compared",
    "error in the proxy",
    "not reached",
)  # fmt: skip
WRONG = (DIFFERENT, PROXY_ERROR)
Verdict = tuple[str, str]
_WORST = (BITWISE, RAISES, OTHER_WORDS, NO_NATIVE, INPUTS, UNSTEADY, DIFFERENT, PROXY_ERROR)


def ended_badly(facts: dict[str, Any]) -> str:
    """Of a whole case: it took its process with it, or raised."""
    return str(facts.get("died") or facts.get("sticky") or facts.get("error") or "")


def compare_op(native: dict[str, Any] | None, proxied: dict[str, Any] | None) -> Verdict:
    if native is None or proxied is None:
        return NOT_REACHED, ""
    if ended_badly(native):
        return NO_NATIVE, ended_badly(native)
    if "no_samples" in native:
        return NO_SAMPLES, native["no_samples"]
    if ended_badly(proxied) and "samples" not in proxied:
        return PROXY_ERROR, ended_badly(proxied)
    if "no_samples" in proxied:
        return PROXY_ERROR, f"samples: {proxied['no_samples']}"
    ours, theirs = native["samples"], proxied["samples"]
    if len(ours) != len(theirs):
        return DIFFERENT, f"{len(theirs)} samples, natively {len(ours)}"
    found = [compare_sample(n, a, b) for n, (a, b) in enumerate(zip(ours, theirs))]
    if not found:
        return NO_SAMPLES, "none of this type"
    worst = max(found, key=lambda verdict: _WORST.index(verdict[0]))
    if ended_badly(proxied) and worst[0] not in WRONG:
        return PROXY_ERROR, ended_badly(proxied)
    return worst


def compare_sample(number: int, native: dict[str, Any], proxied: dict[str, Any]) -> Verdict:
    if native["in"] != proxied["in"]:
        return INPUTS, f"sample {number}"
    a, b = native.get("error"), proxied.get("error")
    if a and b:
        if a == b:
            return RAISES, a
        kind = OTHER_WORDS if a.split(":")[0] == b.split(":")[0] else DIFFERENT
        return kind, f"sample {number}: raises {b!r}, natively {a!r}"
    if a:
        return (UNSTEADY if native.get("unsteady") else DIFFERENT), f"sample {number}: natively {a}"
    if b:
        return PROXY_ERROR, f"sample {number}: {b}"
    for what in ("out", "grad"):
        if why := compare_tensors(f"sample {number}: {what}", native.get(what), proxied.get(what)):
            return (UNSTEADY if native.get("unsteady") else DIFFERENT), why
    if (native.get("grad_error") or "") != (proxied.get("grad_error") or ""):
        a, b = native.get("grad_error"), proxied.get("grad_error")
        if a and b and a.split(":")[0] == b.split(":")[0]:
            return OTHER_WORDS, f"sample {number}: gradient raises {b!r}, natively {a!r}"
        return (DIFFERENT if a else PROXY_ERROR), f"sample {number}: gradient: {b or 'raises nothing'}, natively {a or 'nothing'}"  # fmt: skip
    return (UNSTEADY, f"sample {number}") if native.get("unsteady") else (BITWISE, "")


def compare_tensors(what: str, native: Any, proxied: Any) -> str:
    if native is None or proxied is None:
        return "" if native == proxied else f"{what}: only on one side"
    if len(native) != len(proxied):
        return f"{what}: {len(proxied)} tensors, natively {len(native)}"
    for number, (a, b) in enumerate(zip(native, proxied)):
        if a[1] != b[1]:
            return f"{what} {number}: {b[1]}, natively {a[1]}"
        if a[0] != b[0]:
            return f"{what} {number}: other bits; {b[1]}, sum {b[3]}, natively {a[3]}"
        if a[2] != b[2]:
            return f"{what} {number}: strides {b[2]}, natively {a[2]}"
    return ""


def compare_result(native: dict[str, Any] | None, proxied: dict[str, Any] | None, key: str) -> Verdict:  # fmt: skip
    """Of a case whose answer lies under `key`: all of it must be the same."""
    if native is None or proxied is None:
        return NOT_REACHED, ""
    if ended_badly(native) and key not in native:
        if ended_badly(proxied) and key not in proxied:
            same = ended_badly(native) == ended_badly(proxied)
            return (RAISES if same else OTHER_WORDS), f"natively {ended_badly(native)}; proxied {ended_badly(proxied)}"  # fmt: skip
        return NO_NATIVE, ended_badly(native)
    if key not in proxied:
        return PROXY_ERROR, ended_badly(proxied) or "no answer"
    if why := first_difference(native[key], proxied[key]):
        return (UNSTEADY if native.get("unsteady") else DIFFERENT), why
    return (UNSTEADY, "") if native.get("unsteady") else (BITWISE, "")


def first_difference(native: Any, proxied: Any, path: str = "") -> str:
    if isinstance(native, dict) and isinstance(proxied, dict):
        for key in [*native, *(k for k in proxied if k not in native)]:
            if why := first_difference(native.get(key), proxied.get(key), f"{path}.{key}".strip(".")):  # fmt: skip
                return why
        return ""
    if isinstance(native, list) and isinstance(proxied, list) and len(native) == len(proxied):
        for number, (a, b) in enumerate(zip(native, proxied)):
            if why := first_difference(a, b, f"{path}[{number}]"):
                return why
        return ""
    return "" if native == proxied else f"{path}: {short(proxied)}, natively {short(native)}"


def short(value: Any) -> str:
    return json.dumps(value)[:160]


@dataclass
class Table:
    """What became of all cases."""

    verdicts: dict[str, Verdict]

    def names(self, *kinds: str) -> dict[str, str]:
        return {name: why for name, (kind, why) in self.verdicts.items() if kind in kinds}

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for kind, _ in self.verdicts.values():
            found[kind] = found.get(kind, 0) + 1
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def fraction(self) -> float | None:
        """Bitwise equal, of those that have a native result that is the same twice."""
        good = len(self.names(BITWISE, RAISES, OTHER_WORDS))
        of = good + len(self.names(*WRONG))
        return round(good / of, 5) if of else None


def table(
    names: Sequence[str],
    native: dict[str, dict[str, Any]],
    proxied: dict[str, dict[str, Any]],
    verdict: Callable[[dict[str, Any] | None, dict[str, Any] | None], Verdict],
) -> Table:
    return Table({name: verdict(native.get(name), proxied.get(name)) for name in names})
