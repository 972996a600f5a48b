# SPDX-License-Identifier: Apache-2.0
"""hydra makes the configuration and the folder of the run; peft trains LoRA matrices of a tiny Llama."""

import logging

import hydra
import report
import torch
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path="conf", config_name="lora")
def main(config: DictConfig) -> None:
    log.info("configuration\n%s", OmegaConf.to_yaml(config))
    options = OmegaConf.to_container(config)
    set_seed(config.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = LlamaForCausalLM(LlamaConfig(**options["model"]))
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options["lora"])).to(device)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=config.lr)
    text = torch.randint(
        config.model.vocab_size, (64, 24), generator=torch.Generator().manual_seed(12)
    )
    model.train()
    for step in range(1, config.steps + 1):
        batch = text[torch.randperm(64)[:8]].to(device)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.info("loss %.6f", loss.item())
        report.step(step)
        if step % 40 == 0:
            model.save_pretrained(f"adapter-{step}")
    print("device", device)
    report.digest(model=model.state_dict(), optimizer=optimizer.state_dict()["state"])


if __name__ == "__main__":
    main()
