"""Conversations whose tools are slow: the engine that goes on with the others against rounds, and exactness.

64 conversations of four turns with the model; the time of a tool is log-normal (median 0.2 s, the slowest about 5 s),
a function of conversation and turn. Both ways draw the same tokens, which is checked, and alternate in one process.
`busy_share` is the share of the time in which the engine computes. `recomputed_tokens` are tokens of earlier turns that
a later one computed again. `exactness` compares the log-prob of each drawn token with the trainer's pass over the whole
conversation. With smollm2 on two cores it takes about a quarter of an hour.
"""

import math
import random
import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from benchmarks.common import Say, benchmark, head, in_turns, load_warning, paired, print_table, run, spread_text
from benchmarks.environment_step import measure_step
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import TrainingError
from tunesmith.base.core.trace import trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, SamplingParams
from tunesmith.engine.models.language_model import LanguageModel, language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.rollout.dialogue import in_rounds
from tunesmith.engine.rollout.engine import Continuation, Dialogue
from tunesmith.engine.rollout.native_engine import NativeEngine

TURNS, REPLY_TOKENS, NEW_TOKENS = 4, 12, 24
MEDIAN_S, SIGMA = 0.2, 1.25


class Tools:
    """Replies with ids drawn by conversation and turn, each after its own time; keeps what was drawn."""

    def __init__(self, fronts: Sequence[tuple[int, ...]], vocabulary: int, seed: int, *, slow: bool) -> None:
        self._vocabulary, self._seed, self._slow = vocabulary, seed, slow
        self.fronts = list(fronts)
        self.turns: list[list[tuple[int, Completion]]] = [[] for _ in fronts]

    def __call__(self, index: int, turn: Completion) -> "Future[Continuation | None]":
        """The reply to a turn."""
        reply: Future[Continuation | None] = Future()
        self.turns[index].append((len(self.fronts[index]), turn))
        draw = random.Random(f"{self._seed} {index} {len(self.turns[index])}")
        ids = draw.choices(range(10, self._vocabulary), k=REPLY_TOKENS)
        is_last = len(self.turns[index]) == TURNS
        self.fronts[index] += (*turn.token_ids, *(() if is_last else ids))
        what = None if is_last else Continuation(self.fronts[index], NEW_TOKENS)
        delay_s = MEDIAN_S * math.exp(SIGMA * draw.gauss(0, 1)) if self._slow else 0.0
        threading.Timer(delay_s, reply.set_result, [what]).start()
        return reply

    @property
    def drawn(self) -> list[list[tuple[int, ...]]]:
        """The ids of all turns."""
        return [[turn.token_ids for _, turn in turns] for turns in self.turns]


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures of the benchmark."""
    loaded = load_policy(ModelSection(name=options.model, dtype=options.dtype))
    model = language_model(loaded.model)
    engine = NativeEngine(model, loaded.tokenizer)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    num = 8 if options.quick else options.trajectories
    draw = random.Random(options.seed)
    prompts = [
        Prompt(str(index), "", token_ids=tuple(draw.choices(range(10, vocabulary), k=32))) for index in range(num)
    ]
    most = TURNS * (NEW_TOKENS + REPLY_TOKENS)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, seed=options.seed)

    def drawn(way: str, slow: bool) -> tuple[Tools, dict[str, float], float]:
        tools = Tools([prompt.token_ids or () for prompt in prompts], vocabulary, options.seed, slow=slow)
        dialogue = Dialogue(tools, most)
        begun_s = time.perf_counter()
        with trace() as record:
            if way == "ours":
                engine.converse(prompts, sampling, dialogue)
            else:
                in_rounds(lambda p, s, keys: engine.generate(p, 1, s, keys=keys), prompts, sampling, dialogue)
        return tools, record.metrics(), time.perf_counter() - begun_s

    _, first, _ = drawn("ours", slow=False)  # packs weights, touches memory for the first time, and finds no prefix
    results: dict[str, list[tuple[Tools, dict[str, float], float]]] = {"ours": [], "rounds": []}

    def take(way: str) -> float:
        results[way].append(drawn(way, slow=True))
        return results[way][-1][2]

    seconds, load = in_turns(
        {way: lambda _, way=way: take(way) for way in results},
        options.rounds,
        say,
        lambda taken: ", ".join(f"{way} {values[-1]:.1f} s" for way, values in taken.items()),
    )
    ours = results["ours"][0]
    if any(one[0].drawn != ours[0].drawn for way in results.values() for one in way):
        raise TrainingError("the two ways drew different tokens")
    # Of a prompt all tokens; of each further turn the reply, and the turn's last token, whose keys were not computed.
    needed = sum(len(prompt.token_ids or ()) for prompt in prompts) + num * (TURNS - 1) * (REPLY_TOKENS + 1)
    return {
        **head(options, "environments", "model", "dtype", "quick", "rounds", "seed"),
        "load": load,
        "conversations": num,
        "turns": TURNS,
        "engine": {
            "seconds": {way: statistics.median(values) for way, values in seconds.items()},
            **paired(seconds["rounds"], seconds["ours"]).facts("ratio"),
            "busy_share": statistics.median(map(_busy, results["ours"])),
            "lockstep_busy_share": statistics.median(map(_busy, results["rounds"])),
        },
        "recomputed_tokens": _figure(first, "prefill_tokens") - needed,
        "exactness": _exactness(model, ours[0]),
        **({} if options.no_step else {"step": measure_step(options, say)}),
    }


def _figure(metrics: Mapping[str, float], name: str) -> float:
    return sum(value for key, value in metrics.items() if key.rpartition("/")[2] == name)


def _busy(taken: tuple[Tools, Mapping[str, float], float]) -> float:
    """The share of the time in which the engine does not wait for a reply."""
    _, metrics, seconds = taken
    return 1 - _figure(metrics, "reply_s") / seconds


@torch.no_grad()
def _exactness(model: LanguageModel, tools: Tools) -> dict[str, float]:
    """The log-probs of all drawn tokens against those of the trainer's pass over whole conversations, in nats."""
    largest, num_tokens = 0.0, 0
    for front, turns in zip(tools.fronts, tools.turns, strict=True):
        first = turns[0][0]
        ids_BS = torch.tensor([front])
        lengths_B, prompt_lengths_B = torch.tensor([len(front)]), torch.tensor([first])
        logp_T = token_logps(model, ids_BS, lengths_B, prompt_lengths_B=prompt_lengths_B).logp_BT[0].double()
        for start, turn in turns:
            drawn = torch.tensor(turn.raw_logps, dtype=torch.float64)
            own = logp_T[start - first : start - first + len(drawn)]
            largest = max(largest, (own - drawn).abs().max().item())
            num_tokens += len(drawn)
    return {"trajectories": len(tools.turns), "drawn_tokens": num_tokens, "largest_difference": largest}


def _show(facts: Mapping[str, Any]) -> None:
    engine = facts["engine"]
    print_table(
        ["way", "seconds", "busy share"],
        [
            ["ours", f"{engine['seconds']['ours']:.1f}", f"{engine['busy_share']:.2f}"],
            ["rounds", f"{engine['seconds']['rounds']:.1f}", f"{engine['lockstep_busy_share']:.2f}"],
        ],
    )
    print(f"rounds over ours: {spread_text(engine)}; tokens computed again: {facts['recomputed_tokens']:.0f}")
    if step := facts.get("step"):
        print(f"step: {step['ours_s']:.1f} s against TRL's {step['trl_s']:.1f} s, {spread_text(step)}")
    print(f"largest difference to the trainer's log-probs: {facts['exactness']['largest_difference']:g} nats")
    print(load_warning(facts).strip())


main = benchmark(
    measure,
    _show,
    *("model", "dtype", "threads", "rounds", "seed", "quick"),
    no_step={"action": "store_true", "help": "leave out the step against TRL's"},
    trajectories={"type": int, "default": 64, "metavar": "N", "help": "conversations"},
)


if __name__ == "__main__":
    run("environments")
