# SPDX-License-Identifier: Apache-2.0
"""In the shape of a compiled trainer: torch.compile of a model with dropout, a schedule, gradients of two micro-batches."""

import torch
from torch import nn

torch.manual_seed(1337)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(
    nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10)
).to(device)
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
data = torch.randn(4096, 64, device=device)
labels = (data[:, :10] + 0.5 * data[:, 10:20]).argmax(1)

for step in range(400):
    for _ in range(2):
        rows = torch.randint(0, len(data), (256,), device=device)
        loss = nn.functional.cross_entropy(compiled(data[rows]), labels[rows])
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()
    print(f"step {step} loss {loss.item():.6f} lr {schedule.get_last_lr()[0]:.2e}", flush=True)
