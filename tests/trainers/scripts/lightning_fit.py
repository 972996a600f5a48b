# SPDX-License-Identifier: Apache-2.0
"""lightning.Trainer: an autoencoder, ModelCheckpoint, CSVLogger, learning-rate monitor, progress bar."""

import argparse

import lightning as L
import report
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(L.LightningModule):
    def __init__(self, width=64, dropout=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Linear(784, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout)
        )
        self.decoder = nn.Linear(width, 784)

    def loss(self, batch):
        (x,) = batch
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Say(Callback):
    def on_train_batch_end(self, trainer, *_):
        report.step(trainer.global_step)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--precision", default="32-true")
    o = parser.parse_args()
    L.seed_everything(4, workers=True)
    images = torch.rand(320, 784, generator=torch.Generator().manual_seed(5))
    train = DataLoader(
        TensorDataset(images[:256]),
        batch_size=8,
        shuffle=True,
        num_workers=o.workers,
        persistent_workers=o.workers > 0,
    )
    val = DataLoader(TensorDataset(images[256:]), batch_size=16)
    model = AutoEncoder(dropout=o.dropout)
    trainer = L.Trainer(
        max_epochs=o.epochs,
        accelerator="auto",
        devices=1,
        precision=o.precision,
        default_root_dir=o.out,
        logger=CSVLogger(o.out, name="csv", flush_logs_every_n_steps=10),
        log_every_n_steps=4,
        callbacks=[
            ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
            LearningRateMonitor(),
            Say(),
        ],
        gradient_clip_val=1.0,
    )
    trainer.fit(model, train, val)
    print("device", trainer.strategy.root_device)
    report.digest(model=model.state_dict(), optimizer=trainer.optimizers[0].state_dict()["state"])


if __name__ == "__main__":
    main()
