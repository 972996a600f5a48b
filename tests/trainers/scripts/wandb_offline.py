# SPDX-License-Identifier: Apache-2.0
"""wandb in offline mode: its own service process, a socket to it, a run folder; the model is a small LSTM."""

import argparse

import report
import torch
import torch.nn.functional as F
import wandb
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--steps", type=int, default=120)
    o = parser.parse_args()
    torch.manual_seed(14)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = wandb.init(mode="offline", project="trainers", dir=".", config=vars(o))
    lstm, head = nn.LSTM(16, 32, batch_first=True).to(device), nn.Linear(32, 4).to(device)
    optimizer = torch.optim.RMSprop([*lstm.parameters(), *head.parameters()], lr=1e-3)
    for step in range(1, o.steps + 1):
        x, y = torch.rand(8, 12, 16).to(device), torch.randint(4, (8,)).to(device)
        loss = F.cross_entropy(head(lstm(x)[0][:, -1]), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss.item()})
        report.step(step)
    run.finish()
    print("device", device)
    report.digest(lstm=lstm.state_dict(), head=head.state_dict())


if __name__ == "__main__":
    main()
