# SPDX-License-Identifier: Apache-2.0
"""An image goes from the staging folders into the store: hashed, compressed, uploaded, committed; then old ones go."""

from __future__ import annotations

from functools import partial
from typing import Any

from devproxy import fault
from devproxy.checkpoint import image
from devproxy.checkpoint.errors import DamagedPack
from devproxy.checkpoint.manifest import Image as StoredImage
from devproxy.checkpoint.writer import Writer
from devproxy.control import coordinator_api as api
from devproxy.control.coordinate.image_operation import ImageOperation
from devproxy.control.coordinate.job import Job
from devproxy.control.operation import still_s
from devproxy.errors import DevproxyError
from devproxy.node.participant import Dump
from devproxy.node.stages import Stages
from devproxy.node.together import all_of

STORE_TRIES = 3  # of one image, each of which may find another damaged pack

fault.register("upload", "before the first chunk goes into the store")
fault.register("before_commit", "all chunks are in the store, the manifest is not")
fault.register("after_commit", "the image is whole, the coordinator has not noted it")
fault.register("prune", "before old images are removed")


def put_away(job: Job, op: ImageOperation) -> None:
    """Hash, compress, upload; the manifest is the last thing written."""
    for tries_left in reversed(range(STORE_TRIES)):
        try:
            summary, sizes = _upload(job, op)
            break
        except DamagedPack as error:
            # The staged data is still there, and the next upload does not rely on that pack.
            if not tries_left:
                raise
            op.stages.beside("upload", f"once more: pack {error.pack} is damaged")
    spec, stages = job.spec, op.stages
    about = f"image {summary.id} in store {spec.store}"
    op.facts = api.ImageFacts(
        id=summary.id,
        job=spec.job,
        job_id=spec.job_id,
        created_unix_s=summary.created,
        device_bytes=sizes["device"],
        host_bytes=sizes["host"],
        shared_bytes=sizes["shared"],
        files_bytes=sizes["file"],
        new_bytes=sizes["new"],
        deduplicated_bytes=sizes["deduplicated"],
        stored_bytes=sizes["stored"],
        total_s=stages.elapsed_s(),
        store=spec.store,
    )
    job.images.add(summary.id)
    if warning := job.images.clock_warning(summary.created):
        op.warnings.append(warning)
    stages.reach("after the commit", "removing old images", about)
    fault.point("after_commit")
    try:
        fault.point("prune")
        job.images.prune(summary.id)
    except (OSError, DevproxyError) as error:
        op.warnings.append(f"old images were not removed: {error}")


def _upload(job: Job, op: ImageOperation) -> tuple[StoredImage, dict[str, Any]]:
    """One try. Raises DamagedPack where another one helps."""
    epoch = job.images.epoch
    assert epoch is not None
    spec, stages = job.spec, op.stages
    stages.name, stages.object = "upload", f"store {spec.store}"
    with job.images.store().writer(image.new_id(spec.job)) as writer:
        about = f"image {writer.image_id} in store {spec.store}"
        with stages.at("upload", "storing", about):
            fault.point("upload")
            if (of := len(op.dumps)) > 1:
                all_of([partial(d.put_share, writer, n, of) for n, d in enumerate(op.dumps)])
                writer.flush()
                writer.look_again()
            trees = all_of([partial(_put, dump, writer, stages) for dump in op.dumps])
            if len(trees) > 1:
                writer.look_again()  # other hosts have put chunks
            build = image.put_build(writer, job.lib)
        with stages.at("commit", "writing the manifest", about):
            fault.point("before_commit")
            costs = {
                "still_s": still_s(op.dumps),
                "freeze_s": max(dump.freeze_s for dump in op.dumps),
                "total_s": stages.elapsed_s(),
                "stages": stages.seconds,
            }
            body = image.manifest(
                trees,
                build,
                spec=spec.as_json(),
                epoch=epoch,
                sequence=job.images.next_sequence(),
                costs=costs,
                warnings=op.all_warnings(),
            )
            try:
                summary = writer.commit(body)
            finally:
                if writer.whole:
                    op.whole = job.images.last = writer.image_id
            _say_renewed(op, writer)
            return summary, writer.sizes()


def _put(dump: Dump, writer: Writer, stages: Stages) -> dict[str, Any]:
    return dump.put(writer, lambda done, total: stages.say("storing", done, total))


def _say_renewed(op: ImageOperation, writer: Writer) -> None:
    if writer.renewed:
        op.warnings.append(
            f"pack {', '.join(sorted(writer.renewed)[:3])} of the store is damaged, or was changed since it was written:"
            " what this image needs of it was stored anew. devproxy images verify says which images are whole"
        )
