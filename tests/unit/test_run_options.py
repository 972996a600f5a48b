"""The command line of devproxy-run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devproxy.cli.run import job_environment, parse
from devproxy.errors import Refused
from devproxy.runtime import JobFolder


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
        ("--summary=1 -- a", "unknown option"),
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
    env = job_environment(
        JobFolder("j", "/shm/j", -1), parse(["--gpus", "3", "--", "a"]), "soft", lib
    )
    assert (
        env["LD_PRELOAD"] == f"{lib}/libcuda.so.1:/x/libfoo.so"
    )  # only what exists, once, ours first
    assert env["LD_LIBRARY_PATH"] == f"{lib}:/y"
    assert env["TRITON_LIBCUDA_PATH"] == lib
    assert env["PYTHONPATH"].endswith("hal/soft/torch/pylib:/z")
    assert (env["DEVPROXY_JOB_DIR"], env["DEVPROXY_GPUS"], env["DEVPROXY_DEVICE"]) == (
        "/shm/j",
        "3",
        "soft",
    )
