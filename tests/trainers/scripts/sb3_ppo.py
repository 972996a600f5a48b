# SPDX-License-Identifier: Apache-2.0
"""stable-baselines3: PPO on CartPole, numpy on the host and the policy on the device, TensorBoard, its checkpoints."""

import argparse

import report
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, CheckpointCallback


class Say(BaseCallback):
    rollouts = 0

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        self.rollouts += 1
        report.step(self.rollouts)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--rollouts", type=int, default=20)
    o = parser.parse_args()
    model = PPO(
        "MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=4, seed=15, device="auto",
        tensorboard_log=o.out, verbose=1,
    )  # fmt: skip
    model.learn(
        64 * o.rollouts, callback=CallbackList([Say(), CheckpointCallback(256, o.out, "ppo")])
    )
    print("device", model.device)
    report.digest(policy=model.policy.state_dict())


if __name__ == "__main__":
    main()
