"""Rewards of turns: GRPO that compares whole trajectories, beside GRPO that compares turns.

    python examples/turn_rewards.py
    python examples/turn_rewards.py --seeds 0 1 --steps 20

In each of four turns the environment names a letter, and the turn earns 1 if the answer begins with it. A trajectory
that is right in one turn and wrong in three has the same advantage in all of them, unless turns are compared. Prints
the mean reward of a trajectory (at most 4) over the first and the last three steps of both. With smollm2 on two cores
a training takes about four minutes.
"""

import argparse
import random
from collections.abc import Mapping
from statistics import fmean

from tunesmith import train
from tunesmith.learn.environments.contract import Reply, Said


class Letters:
    """Names a letter and rewards an answer that begins with it, four times."""

    tools = ()

    def reset(self, row: Mapping[str, object]) -> str:
        """The first letter."""
        draw = random.Random(int(str(row["seed"])))
        self._letters = [draw.choice("ABCDEFGHILMNOPRSTW") for _ in range(4)]
        self._num = 0
        return f" Say one word that begins with {self._letters[0]}."

    def step(self, said: Said) -> Reply:
        """Reward the word, and name the next letter."""
        reward = float(said.text.strip().upper().startswith(self._letters[self._num]))
        self._num += 1
        if self._num == len(self._letters):
            return Reply(reward=reward, done=True, reason="tool_ended")
        text = f"Say one word that begins with {self._letters[self._num]}."
        return Reply(({"role": "user", "content": text},), reward)

    def reward(self) -> float | None:
        """Nothing for the whole."""
        return None

    def close(self) -> None:
        """Nothing to free."""


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for seed in options.seeds:
        for by_turn in (False, True):
            run = train.grpo(
                model=options.model,
                prompts=[[{"role": "user", "content": f"Round {number}."}] for number in range(200)],
                environment_factory=Letters,
                steps=options.steps,
                environment={"max_turns": 4, "max_reply_tokens": 32},
                rollout={"max_new_tokens": 8, "prompts_per_step": 8, "completions_per_prompt": 8},
                grpo={"kl": 0, "turn_advantages": by_turn},
                optimizer={"learning_rate": 5e-5},
                **{"run.seed": seed, "model.num_trainable_layers": 10},
            )
            rewards = [row["reward"] for row in run.metrics]
            name = "turns compared" if by_turn else "trajectories compared"
            print(f"seed {seed}, {name}: {fmean(rewards[:3]):.2f} at first, {fmean(rewards[-3:]):.2f} at the end")


if __name__ == "__main__":
    main()
