# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer: a tiny GPT-2 made from a configuration, random tokens, checkpoints and TensorBoard on the way."""

import argparse

import report
import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Tokens(Dataset):
    def __init__(self, count, length, vocabulary):
        self.text = torch.randint(
            vocabulary, (count, length), generator=torch.Generator().manual_seed(7)
        )

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        return {"input_ids": self.text[i], "labels": self.text[i]}


class Say(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        report.step(state.global_step)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-steps", type=int, default=25)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=64)
    o = parser.parse_args()
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=32,
            n_embd=o.width,
            n_layer=2,
            n_head=2,
            resid_pdrop=o.dropout,
            embd_pdrop=o.dropout,
            attn_pdrop=o.dropout,
        )  # fmt: skip
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=o.out,
            max_steps=o.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            warmup_steps=10,
            lr_scheduler_type="cosine",
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=40,
            save_steps=o.save_steps,
            save_total_limit=2,
            dataloader_num_workers=o.workers,
            report_to="tensorboard",
            seed=1,
        ),
        train_dataset=Tokens(512, 32, 256),
        eval_dataset=Tokens(32, 32, 256),
        callbacks=[Say()],
    )
    trainer.train()
    trainer.save_model()
    print("device", trainer.args.device)
    report.digest(model=model.state_dict(), optimizer=trainer.optimizer.state_dict()["state"])


if __name__ == "__main__":
    main()
