# SPDX-License-Identifier: Apache-2.0
"""devproxy.Client: what a call becomes for devproxyd."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devproxy import api
from devproxy.control import client


class Recorder:
    """In the place of the connection: keeps the request."""

    def restore(self, request: Any, watcher: Any) -> Iterator[client.Result]:
        self.request = request
        yield client.Result("image-1", {}, None)


def test_restore_names_image_store_and_the_folder_for_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = types.SimpleNamespace(url=f"file://{tmp_path}")
    image = types.SimpleNamespace(id="j-20260101T000000-1", job="j")
    monkeypatch.setattr(api.stores_, "open_stores", lambda named: [store])
    monkeypatch.setattr(api.stores_, "find_image", lambda stores, wanted: (store, image))
    monkeypatch.chdir(tmp_path)
    made = api.Client()
    made._client = recorder = Recorder()  # type: ignore[assignment]
    made.restore("latest", name="j2", files="copy", gpus=[1])
    request = recorder.request
    assert (request.image, request.name, list(request.gpus)) == (image.id, "j2", [1])
    assert tmp_path.as_posix() in str(request.store)
    assert str(tmp_path / "copy") in str(request.files)
    made.restore("latest")
    assert recorder.request.name == "j" and str(tmp_path) not in str(recorder.request.files)
