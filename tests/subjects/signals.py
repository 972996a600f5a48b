# SPDX-License-Identifier: Apache-2.0
"""Handlers, masks, interval timers, alarm, a sleeping thread, the monotonic clock, a child that is waited for."""

import signal
import threading
import time

from common import Digest, Steps, check, options


def main() -> None:
    o = options(__doc__, alarm_s=2)
    counts = {"timer": 0, "alarm": 0, "user": 0, "thread": 0}

    def ticks(number: int, frame: object) -> None:
        counts["timer"] += 1

    def rings(number: int, frame: object) -> None:
        counts["alarm"] += 1
        signal.alarm(o.alarm_s)

    def user(number: int, frame: object) -> None:
        counts["user"] += 1

    signal.signal(signal.SIGVTALRM, ticks)
    signal.signal(signal.SIGALRM, rings)
    signal.signal(signal.SIGUSR1, user)
    signal.signal(signal.SIGUSR2, user)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.02, 0.02)
    signal.alarm(o.alarm_s)
    signal.raise_signal(signal.SIGUSR2)  # stays pending until the end
    ends = threading.Event()

    def sleeps() -> None:
        while not ends.wait(0.05):
            counts["thread"] += 1

    thread = threading.Thread(target=sleeps)
    thread.start()
    last = time.monotonic()
    steps = Steps(o)
    for step in steps:
        signal.raise_signal(signal.SIGUSR1)
        check(counts["user"] == step, f"{counts['user']} user signals at step {step}")
        check(signal.getsignal(signal.SIGVTALRM) is ticks, "handler")
        check(signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN, "ignored signal")
        check(signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, []), "mask")
        check(signal.SIGUSR2 in signal.sigpending(), "pending signal")
        check(abs(signal.getitimer(signal.ITIMER_VIRTUAL)[1] - 0.02) < 0.005, "interval timer")
        now = time.monotonic()
        check(now >= last, f"the monotonic clock went back by {last - now} s")
        gap, last = now - last, now
        burn = time.process_time() + 0.02
        while time.process_time() < burn:
            pass
        steps.say(
            f"timer {counts['timer']} alarm {counts['alarm']} thread {counts['thread']} gap {gap:.3f}"
        )
    ends.set()
    thread.join()
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # it would end the interpreter while that ends
    check(counts["timer"] > 0, "the timer never ticked")
    before = counts["user"]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    check(counts["user"] == before + 1, "the pending signal was lost")
    digest = Digest()
    digest.add("user", counts["user"])
    digest.finish()


if __name__ == "__main__":
    main()
