"""A game of several turns from TextArena's package: demonstrations by a program, then GRPO on the game's own reward.

    pip install textarena
    python examples/textarena_game.py
    python examples/textarena_game.py --seed 1 --steps 10

The game is GuessTheNumber-v0: find a number from 1 to 20 by guesses, each answered by "higher" or "lower". A program
that halves the range wins every game. Prints the mean reward of the program, of the model, of the model after SFT on
games of the program, and after GRPO, on games that none was trained on. With smollm2 on two cores it takes about ten
minutes.
"""

import argparse
import re
from itertools import pairwise
from statistics import fmean

from tunesmith import Prompt, SamplingParams, load_policy, open_engine, train
from tunesmith.base.config.sections import EnvironmentSection
from tunesmith.learn.environments.calls import Calls
from tunesmith.learn.environments.contract import Said
from tunesmith.learn.environments.episodes import Conversations
from tunesmith.learn.environments.sources import opener

GAME = EnvironmentSection(source="textarena:GuessTheNumber-v0", max_turns=10, max_reply_tokens=200)
Messages = list[dict[str, object]]


def program(messages: Messages) -> str:
    """The guess that halves what is left, from what was guessed and how the game answered."""
    low, high = 1, 20
    for guess, answer in pairwise(messages):
        if guess["role"] == "assistant":
            number = int(re.findall(r"\d+", str(guess["content"]))[0])
            low, high = (number + 1, high) if "higher" in str(answer["content"]) else (low, number - 1)
    return f"[{(low + high) // 2}]"


def game_of_program(seed: int) -> tuple[Messages, float]:
    """A game that the program plays, as messages, and its reward."""
    open_episode = opener(GAME)
    assert open_episode is not None
    episode = open_episode(Calls(30))
    opening = episode.reset({"prompt": [{"role": "user", "content": "Play."}], "seed": seed, "task": seed})
    said = opening if isinstance(opening, str) else opening or ()
    messages: Messages = [{"role": "user", "content": said}] if isinstance(said, str) else [dict(one) for one in said]
    total = 0.0
    for _ in range(GAME.max_turns):
        guess = program(messages)
        messages.append({"role": "assistant", "content": guess})
        reply = episode.step(Said(guess))
        total += reply.reward or 0.0
        if reply.done or not reply.messages:
            break
        messages += [dict(message) for message in reply.messages]
    return messages, total + (episode.reward() or 0.0)


def mean_reward(model: str, num_games: int) -> float:
    """The mean reward of `model` over held-out games, by greedy play."""
    loaded, open_episode = load_policy(model), opener(GAME)
    assert open_episode is not None
    talks = Conversations(open_episode, loaded.tokenizer, GAME, max_new_tokens=12, context=None)
    prompts = [Prompt(f"held out {n}", ({"role": "user", "content": "Play."},), {"task": n}) for n in range(num_games)]
    engine = open_engine(loaded.model, loaded.tokenizer)
    groups = talks.draw(engine, prompts, 1, SamplingParams(max_new_tokens=12, temperature=0, seed=12_345))
    found = [one.trajectory for group in groups for one in group.completions]
    return fmean(one.reward or 0.0 for one in found if one is not None)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--games", type=int, default=200, help="games of the program")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--held-out", type=int, default=60)
    options = parser.parse_args()
    shared = {"run.seed": options.seed, "model.num_trainable_layers": 10}
    games = [game_of_program(1000 * (options.seed + 1) + number) for number in range(options.games)]
    print(f"mean reward of the program: {fmean(reward for _, reward in games):.2f}", flush=True)
    shown = train.sft(
        model=options.model,
        demonstrations=[{"messages": messages} for messages, _ in games],
        steps=options.games // 8,
        **{**shared, "sft.demonstrations_per_step": 8, "optimizer.learning_rate": 3e-4},
    )
    before, after_sft = (mean_reward(name, options.held_out) for name in (options.model, str(shown.run_dir / "final")))
    print(f"of the model: {before:.2f}; after SFT: {after_sft:.2f}", flush=True)
    run = train.grpo(
        model=str(shown.run_dir / "final"),
        prompts=[{"prompt": [{"role": "user", "content": "Play."}], "task": number} for number in range(200)],
        environment=GAME.model_dump(exclude_unset=True),
        steps=options.steps,
        rollout={"max_new_tokens": 12, "prompts_per_step": 8, "completions_per_prompt": 6},
        grpo={"kl": 0},
        **{**shared, "optimizer.learning_rate": 5e-5},
    )
    print(f"after GRPO: {mean_reward(str(run.run_dir / 'final'), options.held_out):.2f}")


if __name__ == "__main__":
    main()
