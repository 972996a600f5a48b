# SPDX-License-Identifier: Apache-2.0
"""timm: a small model of its, mixup, averaged weights, its factories for optimizer and schedule, its CheckpointSaver."""

import argparse
import os
import random

import numpy
import report
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, CheckpointSaver, ModelEmaV3, dispatch_clip_grad, random_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--model", default="resnet10t")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--opt", default="adamw")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--amp", default="")
    o = parser.parse_args()
    random_seed(8)
    os.makedirs(o.out, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = {"img_size": 32, "patch_size": 8} if o.model.startswith("vit") else {}
    model = timm.create_model(o.model, num_classes=10, drop_path_rate=o.dropout, **size).to(device)
    ema = ModelEmaV3(model, decay=0.99)
    optimizer = create_optimizer_v2(model, opt=o.opt, lr=1e-3, weight_decay=0.05)
    schedule = CosineLRScheduler(optimizer, t_initial=o.epochs, warmup_t=1, warmup_lr_init=1e-5)
    saver = CheckpointSaver(
        model, optimizer, model_ema=ema, checkpoint_dir=o.out, recovery_dir=o.out, max_history=2
    )
    generator = torch.Generator().manual_seed(9)
    images = TensorDataset(
        torch.rand(128, 3, 32, 32, generator=generator),
        torch.randint(10, (128,), generator=generator),
    )
    loader = DataLoader(
        images, 8, shuffle=True, num_workers=o.workers, pin_memory=True, drop_last=True
    )
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10)
    loss_fn = SoftTargetCrossEntropy().to(device)
    step = 0
    for epoch in range(o.epochs):
        losses = AverageMeter()
        model.train()
        for pictures, labels in loader:
            pictures, labels = pictures.to(device, non_blocking=True), labels.to(device)
            pictures, labels = mixup(pictures, labels)
            if o.amp:
                with torch.autocast(device.type, getattr(torch, o.amp)):
                    loss = loss_fn(model(pictures), labels)
            else:
                loss = loss_fn(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            ema.update(model, step=step)
            losses.update(loss.item(), pictures.size(0))
            step += 1
            report.step(step, f"loss {losses.avg:.6f}")
        schedule.step(epoch + 1)
        saver.save_checkpoint(epoch, metric=-losses.avg)
    print("device", device)
    report.digest(
        model=model.state_dict(),
        ema=ema.module.state_dict(),
        optimizer=optimizer.state_dict()["state"],
        numpy=numpy.random.rand(),
        python=random.random(),
    )


if __name__ == "__main__":
    main()
