# SPDX-License-Identifier: Apache-2.0
"""The shape of the first example that everybody runs: a small convolutional net, ten classes, one epoch after the other."""

import argparse

import report
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, dropout=0.5):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.dropout1, self.dropout2 = nn.Dropout2d(dropout / 2), nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(2304, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def digits(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.rand(count, 1, 28, 28, generator=generator),
        torch.randint(10, (count,), generator=generator),
    )


def train(model, device, loader, optimizer, epoch):
    model.train()
    for i, (data, target) in enumerate(loader):
        data, target = data.to(device, non_blocking=True), target.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        report.step((epoch - 1) * len(loader) + i + 1, f"loss {loss.item():.6f}")


def test(model, device, loader):
    model.eval()
    loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (
                output.argmax(1, keepdim=True)
                .eq(target.view_as(output.argmax(1, True)))
                .sum()
                .item()
            )
    print(f"test loss {loss / len(loader.dataset):.6f} correct {correct}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=5)
    o = parser.parse_args()
    torch.manual_seed(6)
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    more = (
        {"num_workers": o.workers, "pin_memory": True} if use_cuda else {"num_workers": o.workers}
    )
    train_loader = DataLoader(digits(480, 1), batch_size=16, shuffle=True, **more)
    test_loader = DataLoader(digits(64, 2), batch_size=32, **more)
    model = Net(o.dropout).to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, o.epochs + 1):
        train(model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
        torch.save(model.state_dict(), f"{o.out}-mnist.pt")
    print("device", device)
    report.digest(model=model.state_dict(), optimizer=optimizer.state_dict()["state"])


if __name__ == "__main__":
    main()
