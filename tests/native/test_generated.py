# SPDX-License-Identifier: Apache-2.0
"""What the generator writes, compiled."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from codegen.__main__ import ROOT, outputs, write
from codegen.emit import wire
from codegen.ops import OPS


def test_formatter_prints_any_bytes_within_its_room(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.fail("no g++ on this machine", pytrace=False)
    (tmp_path / "main.cc").write_text(
        """
        #include "dispatch.gen.h"
        #include <cstdio>
        #include <cstring>
        using namespace devproxy::wire;
        int main() {
          unsigned char req[256];
          std::memset(req, 0xff, sizeof req);
          char out[512];
          for (unsigned opcode = 0; opcode < 0x600; ++opcode)
            for (size_t bytes : {0, 1, 7, 8, 64, 256})
              for (size_t room : {1, 2, 17, 512}) {
                const size_t n = format_message(opcode, req, bytes, out, room);
                if (n >= room || out[n] != 0) return 1;
              }
          COPY_req copy{};
          copy.dst = 0x2000'0000'0000, copy.bytes = 64;
          format_message(static_cast<uint16_t>(Opcode::COPY), &copy, sizeof copy, out, sizeof out);
          std::puts(out);
          format_message(0x7777, &copy, sizeof copy, out, sizeof out);
          std::puts(out);
          format_message(static_cast<uint16_t>(Opcode::COPY), &copy, 4, out, sizeof out);
          std::puts(out);
        }
        """
    )
    for name in ("handle_kind.gen.h", "wire.gen.h", "dispatch.gen.h", "format.gen.cc"):
        write(tmp_path / name, outputs()[f"wire/{name}"])
    sources = [str(tmp_path / "main.cc"), str(tmp_path / "format.gen.cc")]
    flags = [
        "-std=c++20",
        "-Wall",
        "-Werror",
        "-fsanitize=address,undefined",
        f"-I{tmp_path}",
        f"-I{ROOT}",
    ]
    subprocess.run([compiler, *flags, *sources, "-o", str(tmp_path / "main")], check=True)
    done = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=True)
    copy, unknown, cut = done.stdout.splitlines()
    assert copy.startswith("COPY stream=0 dst=0x200000000000 src=0 bytes=64 ")
    assert unknown == f"opcode 0x7777, {wire.layout(OPS['COPY'].req)} bytes"
    assert cut == f"COPY cut to 4 of {wire.layout(OPS['COPY'].req)} bytes"
