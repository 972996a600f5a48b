# SPDX-License-Identifier: Apache-2.0
"""In the shape of a DCGAN: two nets and two optimizers, transposed convolutions, loader workers, the legacy tensor types, a
file for each epoch."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
cuda = torch.cuda.is_available()
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor


def weights(m: nn.Module) -> None:
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


generator = nn.Sequential(
    nn.ConvTranspose2d(16, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
    nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
)  # fmt: skip
criterion = nn.BCELoss()
if cuda:
    generator, discriminator, criterion = generator.cuda(), discriminator.cuda(), criterion.cuda()
generator.apply(weights)
discriminator.apply(weights)
loader = DataLoader(
    TensorDataset(torch.rand(192, 1, 16, 16) * 2 - 1), batch_size=16, shuffle=True, num_workers=2
)
makes = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
tells = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
fixed = torch.randn(4, 16, 1, 1).type(Tensor)
for epoch in range(6):
    for i, (images,) in enumerate(loader):
        real = images.type(Tensor)
        valid, fake = Tensor(len(real)).fill_(1.0), Tensor(len(real)).fill_(0.0)
        tells.zero_grad()
        on_real = criterion(discriminator(real), valid)
        on_real.backward()
        made = generator(torch.randn(len(real), 16, 1, 1).type(Tensor))
        on_fake = criterion(discriminator(made.detach()), fake)
        on_fake.backward()
        tells.step()
        makes.zero_grad()
        fooled = criterion(discriminator(made), valid)
        fooled.backward()
        makes.step()
        time.sleep(0.03)  # bigger nets
        if i % 4 == 0:
            print(
                f"[{epoch}][{i}] Loss_D: {on_real + on_fake:.6f} Loss_G: {fooled.item():.6f}",
                flush=True,
            )
    torch.save(generator.state_dict(), f"net_epoch_{epoch}.pth")
    print(f"sample {generator(fixed).abs().mean().item():.6f}")
