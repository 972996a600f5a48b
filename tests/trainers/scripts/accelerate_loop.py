# SPDX-License-Identifier: Apache-2.0
"""A training loop of one's own with accelerate: BERT for classification, accumulation, clipping, save_state."""

import argparse

import report
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-steps", type=int, default=30)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--mixed", default="no")
    o = parser.parse_args()
    set_seed(2)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=o.mixed,
        log_with="tensorboard",
        project_dir=o.out,
    )
    accelerator.init_trackers("runs")
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=200, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=96, max_position_embeddings=32, num_labels=3,
            hidden_dropout_prob=o.dropout, attention_probs_dropout_prob=o.dropout,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randint(200, (480, 24), generator=generator),
        torch.randint(3, (480,), generator=generator),
    )
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=o.workers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, o.steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    step, model_losses = 0, []
    model.train()
    while step < o.steps:
        for tokens, labels in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=labels).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            step += 1
            model_losses.append(loss.item())
            accelerator.log({"loss": loss.item()}, step=step)
            report.step(step)
            if step % o.save_steps == 0:
                accelerator.save_state(f"{o.out}/state-{step}")
            if step == o.steps:
                break
    accelerator.end_training()
    print("device", accelerator.device)
    report.digest(
        model=accelerator.get_state_dict(model),
        optimizer=optimizer.state_dict()["state"],
        losses=model_losses,
    )


if __name__ == "__main__":
    main()
