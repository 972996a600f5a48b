# SPDX-License-Identifier: Apache-2.0
"""A small residual network: convolutions, batch norm with running averages, SGD with momentum."""

import torch
import torch.nn.functional as F
from common import Digest, Steps, device, options, seed
from torch import nn


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.down = nn.Identity()
        if stride != 1 or inner != outer:
            self.down = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.down(x))


def main() -> None:
    o = options(__doc__, width=16, batch=4, save="")
    seed(2)
    where = device()
    w = o.width
    model = nn.Sequential(
        nn.Conv2d(3, w, 3, 1, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU(),
        Block(w, w, 1), Block(w, 2 * w, 2), Block(2 * w, 4 * w, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, 10),
    ).to(where)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    losses = []
    steps = Steps(o)
    for _ in steps:
        x, y = torch.randn(o.batch, 3, 32, 32).to(where), torch.randint(0, 10, (o.batch,)).to(where)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        steps.say(f"loss {losses[-1]:.6f}")
    if o.save:
        torch.save((model.state_dict(), optimizer.state_dict()), o.save)
    digest = Digest()
    digest.add("model", model.state_dict())
    digest.add("optimizer", optimizer.state_dict())
    digest.add("losses", losses)
    digest.add_random_states()
    digest.finish()


if __name__ == "__main__":
    main()
