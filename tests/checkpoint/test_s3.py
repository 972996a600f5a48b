# SPDX-License-Identifier: Apache-2.0
"""The whole life of a job whose images lie in an S3 store: moto's server on 127.0.0.1."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

from tests.checkpoint.world import SUBJECTS, World, without_pauses

STEPS = 70  # more than the gate lets it do while it is looked at (world.AHEAD)
# Without PyTorch: the store sees pages and chunks, and moto's server is slow with hundreds of megabytes.
JOB = (
    sys.executable,
    str(SUBJECTS / "cheap.py"),
    *("--steps", str(STEPS), "--seconds-per-step", "0.2"),
)
BUCKET = "images"


@pytest.fixture
def s3() -> Iterator[World]:
    """A world whose store is s3://images/prefix."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    world = World(**settings)
    world.hold()
    world.store = f"s3://{BUCKET}/prefix"  # type: ignore[assignment]
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=settings["AWS_ENDPOINT_URL"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    try:
        yield world
    finally:
        world.close()
        server.stop()


def test_the_whole_life(s3: World) -> None:
    alone = World()
    try:
        assert alone.run(*without_pauses(JOB)).wait(200) == 0, alone.tail()
        digest = alone.digest()
    finally:
        alone.close()

    s3.run(*JOB, options=("--keep", "2"))
    s3.wait_step(6)
    first = s3.ctl_json("checkpoint", "j")
    s3.wait_step(max(s3.steps()) + 2)
    second = s3.ctl_json("checkpoint", "j")
    assert second["new_bytes"] < first["new_bytes"]  # type: ignore[operator]
    s3.wait_step(max(s3.steps()) + 2)
    third = s3.ctl_json("checkpoint", "j")
    assert [i["id"] for i in s3.images()] == [second["id"], third["id"]]
    assert all(i["whole"] for i in s3.images())
    s3.wait_step(max(s3.steps()) + 3)
    s3.kill_everything()

    s3.ctl("restore", "j", "--store", str(s3.store), "--output", "log")
    s3.wait_step(max(s3.steps()) + 2)
    s3.ctl("suspend", "j")
    s3.ctl("resume", "j")
    s3.wait_end()
    assert len(s3.nonces()) == 1, s3.tail()
    assert s3.steps() == list(range(1, STEPS + 1)), s3.tail()
    assert s3.digest() == digest

    before = s3.images()
    assert len(before) == 2
    s3.ctl("images", "gc", "--store", str(s3.store))
    assert s3.images() == before
    assert all(i["whole"] for i in s3.images())
    assert os.path.basename(str(s3.store)) == "prefix"
