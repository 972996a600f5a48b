# SPDX-License-Identifier: Apache-2.0
"""Small data of our own, in the files that public scripts read: what they would download is not there.

prepare.py mnist DIR [TRAIN TEST]    DIR/MNIST/raw: images of ten blobs that move (IDX, LeCun's page of MNIST)
prepare.py text FILE [BYTES]         words of a small alphabet, drawn by a Markov chain
prepare.py images DIR [COUNT SIDE]   DIR/a/*.png: two-coloured gradients
prepare.py series FILE [ROWS]        a CSV: date, six waves with noise, and their sum (ETT's columns)
prepare.py planetoid DIR [NAME]      DIR/ind.NAME.*: copies of what the repository GCNII carries
prepare.py cora DIR                  DIR/cora.content, cora.cites: 2708 papers in 7 classes, 1433 words (LINQS)
"""

from __future__ import annotations

import datetime
import glob
import os
import shutil
import struct
import sys
from collections.abc import Callable

import numpy as np


def mnist(folder: str, train: str = "1280", test: str = "256") -> None:
    raw = os.path.join(folder, "MNIST", "raw")
    os.makedirs(raw, exist_ok=True)
    draw = np.random.default_rng(1)
    across = np.arange(28)
    for name, count in (("train", int(train)), ("t10k", int(test))):
        labels = draw.integers(0, 10, count).astype(np.uint8)
        x = 6 + 4 * (labels % 4) + draw.normal(0, 1, count)
        y = 7 + 6 * (labels // 4) + draw.normal(0, 1, count)
        square = (across[None, None, :] - x[:, None, None]) ** 2
        square = square + (across[None, :, None] - y[:, None, None]) ** 2
        images = (255 * np.exp(-square / 12)).astype(np.uint8)
        with open(os.path.join(raw, f"{name}-images-idx3-ubyte"), "wb") as file:
            file.write(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
        with open(os.path.join(raw, f"{name}-labels-idx1-ubyte"), "wb") as file:
            file.write(struct.pack(">II", 2049, count) + labels.tobytes())


def text(path: str, size: str = "60000") -> None:
    draw = np.random.default_rng(2)
    words = ["".join(draw.choice(list("abcdefghij"), draw.integers(2, 7))) for _ in range(200)]
    lines = ["O God, O God!"]  # what minGPT's script begins its samples with
    at, said = 0, 0
    while said < int(size):
        line = []
        for _ in range(int(draw.integers(4, 14))):
            at = int(at * 7 + draw.integers(0, 9)) % len(words)
            line.append(words[at])
        lines.append(" ".join(line))
        said += len(lines[-1]) + 1
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="ascii") as file:
        file.write("\n".join(lines) + "\n")


def images(folder: str, count: str = "64", side: str = "64") -> None:
    from PIL import Image

    os.makedirs(os.path.join(folder, "a"), exist_ok=True)
    draw = np.random.default_rng(3)
    ramp = np.linspace(0, 1, int(side))[:, None, None]
    for number in range(int(count)):
        first, second = draw.integers(0, 256, (2, 1, 1, 3))
        pixels = np.broadcast_to(first + (second - first) * ramp, (int(side), int(side), 3))
        turned = np.rot90(pixels, number % 4).astype(np.uint8)
        Image.fromarray(np.ascontiguousarray(turned)).save(f"{folder}/a/{number:05d}.png")


def series(path: str, rows: str = "1200") -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    draw = np.random.default_rng(4)
    hours = np.arange(int(rows))
    waves = [
        np.sin(2 * np.pi * hours / 24 / (1 + k)) + draw.normal(0, 0.1, len(hours)) for k in range(6)
    ]
    columns = np.stack([*waves, sum(waves)], axis=1)
    begin = datetime.datetime(2016, 7, 1)
    with open(path, "w", encoding="ascii") as file:
        file.write("date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n")
        for hour, row in zip(hours, columns, strict=True):
            at = begin + datetime.timedelta(hours=int(hour))
            file.write(
                f"{at:%Y-%m-%d %H:%M:%S}," + ",".join(f"{value:.6f}" for value in row) + "\n"
            )


def cora(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    names = [
        "Case_Based", "Genetic_Algorithms", "Neural_Networks", "Probabilistic_Methods", "Reinforcement_Learning",
        "Rule_Learning", "Theory",
    ]  # fmt: skip
    draw = np.random.default_rng(5)
    kinds = draw.integers(0, len(names), 2708)
    with open(os.path.join(folder, "cora.content"), "w", encoding="ascii") as file:
        for paper, kind in enumerate(kinds):
            words = (draw.random(1433) < 0.01).astype(int)
            words[200 * kind : 200 * kind + 200] |= (draw.random(200) < 0.05).astype(int)
            file.write("\t".join([str(paper), *map(str, words), names[kind]]) + "\n")
    with open(os.path.join(folder, "cora.cites"), "w", encoding="ascii") as file:
        for paper, kind in enumerate(kinds):
            near = np.flatnonzero(kinds == kind)
            for other in draw.choice(near, 2):
                file.write(f"{other}\t{paper}\n")


def planetoid(folder: str, name: str = "cora") -> None:
    os.makedirs(folder, exist_ok=True)
    for path in glob.glob(
        os.path.join(os.environ["DEVPROXY_SCRIPTS"], "GCNII/data", f"ind.{name}.*")
    ):
        shutil.copy(path, folder)


def main() -> None:
    made: dict[str, Callable[..., None]] = {
        "mnist": mnist, "text": text, "images": images, "series": series, "cora": cora, "planetoid": planetoid,
    }  # fmt: skip
    made[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
