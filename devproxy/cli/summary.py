# SPDX-License-Identifier: Apache-2.0
"""What --summary says when the job has ended: what ran where, and that the job never held the device."""

from __future__ import annotations

from typing import Any

from devproxy.machine import show_bytes


def build(
    job: str,
    device: str,
    wall_s: float,
    exit_code: int,
    gpus: list[dict[str, Any]],
    proof: dict[str, Any],
) -> dict[str, Any]:
    """The summary as --json writes it. gpus: each server's last statistics, or {"gpu", "lost"}."""
    return {
        "job": job,
        "device": device,
        "wall_s": round(wall_s, 3),
        "exit_code": exit_code,
        "gpus": gpus,
        "proof": proof,
    }


def lines(summary: dict[str, Any]) -> list[str]:
    """The same for people, one line each."""
    simulated = {"soft": " simulated", "record": " recording"}.get(summary["device"], "")
    out = [
        f"job {summary['job']} ran {summary['wall_s']:.1f} s on {len(summary['gpus'])}{simulated} GPU(s),"
        f" exit code {summary['exit_code']}"
    ]
    out += [_gpu(gpu) for gpu in summary["gpus"]]
    out.append(_proof(summary["proof"]))
    return out


def _gpu(gpu: dict[str, Any]) -> str:
    if "lost" in gpu:
        return f"  GPU {gpu['gpu']}: {gpu['lost']}"
    totals, memory = gpu.get("totals", {}), gpu.get("memory", {})
    return (
        f"  GPU {gpu['gpu']} ({gpu.get('name', '?')}, server process {gpu.get('pid', '?')}):"
        f" {totals.get('launches', 0):,} launches of {totals.get('calls', 0):,} calls,"
        f" H2D {show_bytes(totals.get('h2d_bytes', 0))}, D2H {show_bytes(totals.get('d2h_bytes', 0))},"
        f" peak memory {show_bytes(memory.get('peak', 0))} of {show_bytes(memory.get('total', 0))},"
        f" busy {totals.get('busy_us', 0) / 1e6:.1f} s"
    )


def _proof(proof: dict[str, Any]) -> str:
    if not proof["looks"]:
        return "  the job ended before it could be looked at"
    if proof["held_device"]:
        return "  the job HELD THE DEVICE: " + "; ".join(proof["violations"][:3])
    return (
        f"  the job never held the device: {proof['looks']} look(s) at {proof['processes']} process(es),"
        f" {proof['device_ranges']} device range(s) all PROT_NONE,"
        f" {proof['device_nodes']} /dev/nvidia* open, no server memory mapped or open"
    )
