# SPDX-License-Identifier: Apache-2.0
"""parallel.py's ways, started by a launcher as people write it: multiprocessing.spawn and an address of its own. No rank
finds RANK, WORLD_SIZE or MASTER_ADDR in its environment. --meet says how the ranks meet: tcp or file."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from typing import Any

import common
import torch.multiprocessing as mp


def rank_main(rank: int, options: Any, nonce: str, address: str) -> None:
    import parallel

    common.NONCE = nonce
    parallel.train(options, rank, init_method=address, rank=rank, world_size=options.ranks)


def main() -> None:
    options = common.options(__doc__ or "", way="ddp", ranks=4, meet="tcp")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        common.check(name not in os.environ, f"{name} is set")
    if options.meet == "tcp":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    else:
        address = f"file://{tempfile.mkdtemp(prefix='ranks-', dir=os.getcwd())}/meet"
    mp.spawn(rank_main, args=(options, common.NONCE, address), nprocs=options.ranks)


if __name__ == "__main__":
    sys.exit(main())
