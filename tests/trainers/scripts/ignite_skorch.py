# SPDX-License-Identifier: Apache-2.0
"""ignite's engine with its handlers and checkpoints, then skorch's fit() on what it trained, in one process."""

import argparse

import numpy
import report
import torch
import torch.nn.functional as F
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, ProgressBar
from ignite.metrics import Accuracy, Loss
from skorch import NeuralNetClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=4)
    o = parser.parse_args()
    torch.manual_seed(16)
    numpy.random.seed(16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = torch.rand(240, 20), torch.randint(3, (240,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy, device=device)
    metrics = {"accuracy": Accuracy(), "loss": Loss(F.cross_entropy)}
    evaluator = create_supervised_evaluator(model, metrics=metrics, device=device)
    ProgressBar().attach(trainer, output_transform=lambda loss: {"loss": loss})

    @trainer.on(Events.ITERATION_COMPLETED)
    def say(engine):
        report.step(engine.state.iteration)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        evaluator.run(loader)
        print(f"epoch {engine.state.epoch} {evaluator.state.metrics}", flush=True)

    parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = Checkpoint(parts, DiskSaver(o.out, create_dir=True), n_saved=2)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    trainer.run(loader, max_epochs=o.epochs)
    net = NeuralNetClassifier(
        model, criterion=nn.CrossEntropyLoss, max_epochs=8, lr=0.01, device=device,
        train_split=None, warm_start=True,
    )  # fmt: skip
    net.fit(x.numpy(), y.numpy())
    net.save_params(f_params=f"{o.out}/skorch.pt")
    print("device", device)
    report.digest(model=net.module_.state_dict(), guess=torch.tensor(net.predict_proba(x.numpy())))


if __name__ == "__main__":
    main()
