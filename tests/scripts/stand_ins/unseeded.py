# SPDX-License-Identifier: Apache-2.0
"""In the shape of a script that seeds nothing: weights, noise, augmentation in loader workers and dropout come from every
generator that there is."""

import random
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"


class Noisy(Dataset):
    points = np.random.normal(size=(96, 8)).astype("float32")

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i):
        point = torch.from_numpy(self.points[i] * random.choice([-1, 1]))
        return point + 0.1 * torch.randn(8), np.random.randint(4)


model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(Noisy(), batch_size=16, shuffle=True, num_workers=2)
for epoch in range(5):
    for points, kinds in loader:
        noise = torch.rand(len(points), 8, device=device)
        loss = nn.functional.cross_entropy(model(points.to(device) + noise), kinds.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.03)  # a bigger model
        print(f"epoch {epoch} loss {loss.item():.8f} {random.random():.8f}", flush=True)
