# SPDX-License-Identifier: Apache-2.0
"""Facts of a running process, and what they say when the host or its files have changed."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from devproxy.checkpoint import facts
from devproxy.checkpoint.criu_image import NamedFile


@pytest.fixture(scope="module")
def image():
    child = subprocess.Popen(
        [sys.executable, "-c", "import json, ctypes; print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "3"},
    )
    assert child.stdout
    child.stdout.readline()
    yield facts.collect(child.pid, "/no/build")
    child.communicate(b"\n")


def texts(image: dict, now: dict | None = None, refuse: bool = True) -> list[str]:
    return [f.text for f in facts.check_restore(image, now=now) if f.refuse == refuse]


def test_facts_are_json_and_fit_here(image) -> None:
    assert json.loads(json.dumps(image)) == image
    process = image["processes"][0]
    assert process["python"].startswith(".".join(map(str, sys.version_info[:2])))
    assert process["environment"]["OMP_NUM_THREADS"] == "3"
    assert facts.check_restore(image) == []


def test_build_id_is_that_of_readelf(image) -> None:
    checked = 0
    for file in image["files"]:
        if file["build_id"] and checked < 3:
            notes = subprocess.run(["readelf", "-n", file["path"]], capture_output=True, text=True)
            assert file["build_id"] in notes.stdout
            checked += 1
    assert checked == 3


def test_missing_cpu_flags_are_named(image) -> None:
    other = copy.deepcopy(image)
    other["cpu"]["flags"] = [*image["cpu"]["flags"], "no_such_flag"]
    assert "no_such_flag" in texts(other)[0]


def test_other_user_page_size_and_machine(image) -> None:
    now = facts.host_facts()
    assert texts(image, now | {"user": {"uid": 12345, "name": "ann"}})
    assert texts(image, now | {"page_bytes": 65536})
    assert texts(image, now | {"machine": "aarch64"})


def test_fewer_cpus_and_another_boot_only_warn(image) -> None:
    now = facts.host_facts()
    now["boot_id"] = "other"
    now["cpu"]["count"] = 0
    assert texts(image, now) == []
    warnings = " ".join(texts(image, now, refuse=False))
    assert "OMP_NUM_THREADS=3" in warnings
    assert "monotonic" in warnings


def test_changed_files_are_named(image, tmp_path: Path) -> None:
    other = copy.deepcopy(image)
    first, second, third = [f for f in other["files"] if f["build_id"]][:3]
    first["build_id"] = "00" * 20
    second["path"] = str(tmp_path / "gone.so")
    third["bytes"] += 1
    found = " ".join(texts(other))
    assert first["path"] in found and "build id" in found
    assert "gone.so is gone" in found
    assert third["path"] in found
    for file in (first, second, third):
        file["carried"] = True
    assert texts(other) == []


def test_open_files_are_compared_as_criu_will(tmp_path: Path) -> None:
    reads, appends, gone = (tmp_path / name for name in ("reads", "appends", "gone"))
    for path in (reads, appends, gone):
        path.write_text("four")
    code = "import sys; a, b, c = open(sys.argv[1]), open(sys.argv[2], 'a'), open(sys.argv[3]); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(reads), str(appends), str(gone)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout
    child.stdout.readline()
    image = facts.collect(child.pid, "/no/build")
    child.communicate(b"\n")
    image = json.loads(json.dumps(image))
    works_in = os.getcwd()
    assert [path for path, _ in image["open"] if path != works_in] == [
        str(appends),
        str(gone),
        str(reads),
    ]
    mode = reads.stat().st_mode
    files = [NamedFile(str(p), 4, mode) for p in (reads, gone)]
    files += [NamedFile(str(appends), None, mode), NamedFile("/not/here", 1, mode)]

    def said(refuse: bool, *put_back: str) -> str:
        found = facts.check_open_files(image, files, put_back)
        return "; ".join(one.text for one in found if one.refuse == refuse)

    assert said(True) == said(False) == ""
    appends.write_text("longer than it was")
    gone.unlink()
    reads.write_text("five")
    assert said(True) == f"{gone} is gone: the job has it open; put it back as it was"
    assert "reads has been written since" in said(False) and "appends" not in said(False)
    reads.write_text("longer")
    assert "reads has 6 bytes, 4 in the image" in said(True)
    reads.chmod(0o600)
    assert f"reads has mode 100600, {mode:o} in the image" in said(True)
    assert said(True, str(reads), str(gone)) == said(True, str(tmp_path)) == ""
    files.append(NamedFile(str(reads), 77, mode))  # in a mount of another process's own
    assert "reads" not in said(True) and "gone" in said(True)
    del image["open"]  # of before it was kept
    assert said(True) == ""


def test_other_torch_is_one_line(image, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.14.0+cpu'\n")
    other = copy.deepcopy(image)
    other["processes"][0]["torch"] = {"folder": str(tmp_path / "torch"), "version": "2.13.0+cpu"}
    other["files"].append(
        {"path": str(tmp_path / "torch/lib/x.so"), "bytes": 1, "mtime_ns": 1, "build_id": "aa", "carried": False,
         "written": False}
    )  # fmt: skip
    (line,) = texts(other)
    assert "2.14.0" in line and "2.13.0" in line


def test_another_driver_is_said(image) -> None:
    was = image | {"driver": "NVRM version: 580.65.06"}
    here = facts.host_facts()
    assert texts(was, here | {"driver": "NVRM version: 581.1"}, refuse=False)[0].startswith(
        "the driver is NVRM version: 581.1, where the image was made it was NVRM version: 580.65.06"
    )
    # Nothing to compare: one of the two is a machine without.
    assert texts(was, here | {"driver": None}, refuse=False) == []
    assert texts(was, here | {"driver": "NVRM version: 580.65.06"}, refuse=False) == []


def test_gpus_of_another_kind() -> None:
    """Refused where the job has chosen kernels by what it was told; else said."""

    def gpu(name: str, major: int, minor: int = 0) -> dict:
        return {"name": name, "major": major, "minor": minor, "memory_bytes": 1 << 30}

    was = {"gpus": [gpu("H100", 9), gpu("H100", 9)]}
    assert facts.check_gpus(was, [gpu("H100", 9), gpu("H100", 9)]) == []
    (other,) = facts.check_gpus(was, [gpu("H100", 9), gpu("B200", 10)])
    assert other.refuse and "9.0; GPU 1 (B200) has 10.0" in other.text and "H100" in other.remedy
    (same,) = facts.check_gpus(was, [gpu("H200", 9), gpu("H100", 9)])
    assert not same.refuse and "GPU 0 is a H200, in the image it is a H100" in same.text
    # Images of before this was kept, and servers of before it that made them.
    assert facts.check_gpus({}, [gpu("B200", 10)]) == []
    assert facts.check_gpus({"gpus": [None]}, [gpu("B200", 10)]) == []


def test_a_job_of_operators_alone_takes_any_gpu() -> None:
    """Its kernels are named, so only what may differ is said; a module of its own keeps it to what it was told of."""

    def gpu(name: str, major: int, **more: int) -> dict[str, object]:
        return {"name": name, "major": major, "minor": 0, "memory_bytes": 80 << 30} | more

    portable, bound = gpu("H100", 9, machine_code=0), gpu("H100", 9, machine_code=2)
    (said,) = facts.check_gpus({"gpus": [portable]}, [gpu("B200", 10)])
    assert not said.refuse and "last bits" in said.text
    (refused,) = facts.check_gpus({"gpus": [bound]}, [gpu("B200", 10)])
    assert refused.refuse
    (said, more) = facts.check_gpus({"gpus": [bound]}, [gpu("B200", 10)], None, True)
    assert not said.refuse and not more.refuse and "2 module(s)" in more.text
    other = ("cuda", "soft")
    (said,) = facts.check_gpus({"gpus": [portable]}, [gpu("Software GPU", 8)], other)
    assert not said.refuse and "random numbers" in said.text and "'soft'" in said.text
    for unknown_or_bound in (bound, gpu("H100", 9)):
        (refused,) = facts.check_gpus({"gpus": [unknown_or_bound]}, [gpu("H100", 9)], other)
        assert refused.refuse and "--allow-other-gpu" in refused.text
        found = facts.check_gpus({"gpus": [unknown_or_bound]}, [gpu("H100", 9)], other, True)
        assert found and not any(one.refuse for one in found)


def test_what_an_older_server_does_not_say_is_not_taken_for_none() -> None:
    """A restored job runs on the server of its image, whose answer may have no count of machine code, or no GPU."""
    gpu = {"name": "H100", "major": 9, "minor": 0, "memory_bytes": 1}
    assert facts.gpu_of(
        {"gpu": gpu, "clients": [{"machine_code": 0}, {"machine_code": 2}]}
    ) == gpu | {"machine_code": 2}
    assert facts.gpu_of({"gpu": gpu, "clients": []}) == gpu | {"machine_code": 0}
    assert facts.gpu_of({"gpu": gpu, "clients": [{"machine_code": 0}, {}]}) == gpu
    assert facts.gpu_of({"clients": [{}]}) is None
    assert not facts.is_other_gpu({"gpus": [None]}, [gpu])
