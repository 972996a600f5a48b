# SPDX-License-Identifier: Apache-2.0
"""The command line of devproxy-run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devproxy.cli.run import parse
from devproxy.errors import Refused
from devproxy.node.environment import job_environment
from devproxy.node.spec import JobSpec, check_encryption, parse_every


def test_all_options() -> None:
    line = (
        "--device soft --gpus 2 --gpu-memory=1GiB --name j --chaos 7 --summary --json -- a --b -- c"
    )
    o = parse(line.split())
    assert (o.device, o.gpus, o.gpu_memory_bytes, o.name, o.chaos) == ("soft", 2, 1 << 30, "j", 7)
    assert o.summary
    assert o.json
    assert o.command == ["a", "--b", "--", "c"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no command"),
        ("--", "no command"),
        ("python x.py", "before --"),
        ("--device tpu -- a", "unknown device 'tpu'"),
        ("--gpus 0 -- a", "number from 1"),
        ("--gpus x -- a", "number from 1"),
        ("--gpus 65 -- a", "number from 1"),
        ("--gpus -- a", "needs a value"),
        ("--gpu-memory 4X -- a", "not a memory size"),
        ("--name a/b -- a", "not a job name"),
        ("--chaos -1 -- a", "number from 0"),
        ("--frobnicate -- a", "unknown option"),
        ("--devic=soft -- a", r"unknown option '--devic=soft': did you mean --device\? see:"),
        ("--summary=1 -- a", "unknown option"),
        ("--encrypt-data=1 -- a", "unknown option"),
        ("--gpu 0,x -- a", "no list of GPUs"),
        ("--checkpoint-every soon -- a", "no interval"),
        ("--checkpoint-every 0steps -- a", "no interval"),
        ("--keep 0 -- a", "number from 1"),
        ("--cut-wait -1 -- a", "not a time"),
        ("--barrier maybe -- a", "unknown barrier"),
        ("--files-max 0 -- a", "not a memory size"),
    ],
)
def test_bad_lines(line: str, says: str) -> None:
    with pytest.raises(Refused, match=says) as caught:
        parse(line.split())
    assert "\n" not in str(caught.value)


@given(
    st.lists(
        st.sampled_from(["--", "--gpus", "--json", "--name", "x", "1", "--device", "-"]), max_size=6
    )
)
def test_any_line_is_parsed_or_refused(line: list[str]) -> None:
    try:
        assert parse(line).command
    except Refused:
        pass


def test_environment(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").touch()
    lib = str(tmp_path)
    monkeypatch.setenv("LD_PRELOAD", f"/x/libfoo.so {lib}/libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/y")
    monkeypatch.setenv("PYTHONPATH", "/z")
    spec = JobSpec(
        job="j", job_id="1234", command=["a"], program="/a", cwd="/", device="soft",
        gpu_memory_bytes=1, build="b", abi="00", store="/s",
    )  # fmt: skip
    env = job_environment(spec, 3, lib, "/build/pylib", "/shm/.job")
    assert (
        env["LD_PRELOAD"] == f"{lib}/libcuda.so.1:/x/libfoo.so"
    )  # only what exists, once, ours first
    assert env["LD_LIBRARY_PATH"] == f"{lib}:/y"
    assert env["TRITON_LIBCUDA_PATH"] == lib
    assert env["PYTHONPATH"] == "/build/pylib:/z"
    assert env["DEVPROXY_JOB_ID"] == "1234"
    assert (env["DEVPROXY_JOB_DIR"], env["DEVPROXY_GPUS"], env["DEVPROXY_DEVICE"]) == (
        "/shm/.job",
        "3",
        "soft",
    )


def test_checkpoint_options() -> None:
    o = parse("--gpu 3,1 --store /s --checkpoint-every 50steps --keep 2 --cut-wait 2s -- a".split())
    assert (o.on, o.gpus, o.store, o.keep, o.cut_wait_ms) == ([3, 1], 2, "/s", 2, 2000)
    assert [parse(f"{b} -- a".split()).barrier for b in ("", "--barrier meta")] == ["auto", "meta"]
    assert parse_every(o.every) == (0.0, 50)
    assert [parse_every(t)[0] for t in ("30s", "10m", "1h", "500ms")] == [30, 600, 3600, 0.5]


def test_encryption_is_for_what_devproxy_carries() -> None:
    assert parse("--encrypt-data --nodes 2 -- a".split()).encrypt_data
    check_encryption("soft")
    with pytest.raises(Refused, match="on --device cuda devproxy does not carry the data of GPUs"):
        check_encryption("cuda")


def test_spec_travels() -> None:
    spec = JobSpec(
        job="j", job_id="1", command=["a", "b"], program="/a", cwd="/", device="soft", gpus=[2],
        gpu_memory_bytes=1, chaos=3, build="b", abi="00", store="/s", every="30s", keep=5,
    )  # fmt: skip
    assert JobSpec(**spec.as_json()).as_json() == spec.as_json()
    assert JobSpec(**spec.as_json() | {"encrypt_data": True}).encrypt_data
    # What an image from before there was a choice says; its servers know no metas.
    assert not spec.carries_metas
    assert JobSpec(**(spec.as_json() | {"barrier": "auto"})).carries_metas
