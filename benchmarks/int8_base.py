"""Adapters on a base in 8 bits (`model.base: int8`) against the same on a base in the model's dtype.

Each training is a process of its own: PPO and GRPO on sums, with LoRA, in turns. Of each: the largest difference of the
engine's log-probs from the trainer's, which is to be 0, the time of a step, and the peak of memory. Then what rounding
costs the base itself: the perplexity of film reviews, the KL to the base as it was, and the right sums of greedy
answers. With --large also one GRPO step of a configuration with 1.7 billion random weights, and its peak of memory; it
writes 3.4 GB to a temporary folder. Data: the folder TUNESMITH_DATA.
"""

import gzip
import json
import math
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common import Say, benchmark, head, in_turns, paired, print_table, run
from benchmarks.process import Contender, Process
from tunesmith import train
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.runs.folder import read_jsonl
from tunesmith.collect.data.prompts import arithmetic_prompts
from tunesmith.collect.data.sources import data_path
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.rollout.factory import open_engine

BASES = ("model", "int8")
_REVIEWS = "sentiment/imdb5k.text2vec.jsonl.gz"
_LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""Sizes of SmolLM2-1.7B."""


class Training(Contender):
    """One training of adapters."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def train(self) -> dict[str, Any]:
        """Differences of log-probs and times of the steps, and the peak of memory."""
        values = dict(self._settings)
        algorithm, values["progress"] = values.pop("algorithm"), False
        self.peak()  # that of the process that started this one
        with tempfile.TemporaryDirectory() as place:
            done = getattr(train, algorithm)(**values, **{"run.dir": place})
            rows: list[dict[str, Any]] = list(read_jsonl(done.run_dir / "metrics.jsonl"))
        return {
            "logp_diff_max": max(row["rollout/logp_diff_max"] for row in rows),
            "step_s": median(row["time/step_s"] for row in rows),
            "rollout_s": median(row["time/rollout_s"] for row in rows),
            "reference_s": median(row.get("time/reference_s", 0.0) for row in rows),
            "forward_s": median(row["time/update/forward_s"] for row in rows),
            "backward_s": median(row["time/update/backward_s"] for row in rows),
            "reward": fmean(row["reward"] for row in rows[-5:]),
            "peak_gb": self.peak(),
        }


class Writing(Contender):
    """Writes the large model, in a process of its own, whose memory is given back."""

    def __init__(self, place: str) -> None:
        self._place = place

    def write(self, tokenizer_of: str) -> None:
        """A folder with random weights in bfloat16, and the tokenizer of another model."""
        small = load_policy(tokenizer_of)
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=small.model.config.vocab_size, **_LARGE)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(self._place)
        small.tokenizer.save_pretrained(self._place)


def settings_of(algorithm: str, base: str, options: Namespace) -> dict[str, Any]:
    """The arguments of one training."""
    drawn = {"prompts_per_step": 4, "max_new_tokens": 6} if options.quick else {}
    if algorithm == "grpo":
        drawn |= {"completions_per_prompt": 8}
    return {
        "algorithm": algorithm,
        "model": "tiny:llama" if options.quick else options.model,
        "prompts": "arithmetic",
        "reward": "unique_chars" if options.quick else "arithmetic",
        "steps": options.steps,
        "model.dtype": options.dtype,
        "model.lora.rank": 16,
        "model.base": base,
        "rollout": {"prompts_per_step": 16, "max_new_tokens": 4, **drawn},
        "optimizer.learning_rate": 5e-4,
        "run.num_threads": options.threads,
        "run.checkpoint_every": 0,
    }


def trainings(options: Namespace, say: Say) -> dict[str, Any]:
    """Of each algorithm, figures of both bases, and their ratios round by round."""
    found: dict[str, Any] = {}
    for algorithm in ("grpo", "ppo"):

        def side(base: str, algorithm: str = algorithm) -> dict[str, Any]:
            settings = settings_of(algorithm, base, options)
            with Process("benchmarks.int8_base:Training", settings, num_threads=options.threads) as process:
                return process.call("train")

        answers, load = in_turns({base: lambda _, base=base: side(base) for base in BASES}, options.rounds, say)
        plain, rounded = (answers[base] for base in BASES)
        found[algorithm] = {
            base: {name: [one[name] for one in answers[base]] for name in answers[base][0]} for base in BASES
        }
        for name in ("step_s", "rollout_s", "peak_gb"):
            ratios = paired([one[name] for one in plain], [one[name] for one in rounded])
            found[algorithm] |= ratios.facts(name.removesuffix("_s").removesuffix("_gb") + "_ratio")
        found[algorithm] |= load
        say(f"{algorithm}: a step {found[algorithm]['step_ratio_median']:.2f} times as fast")
    return found


def bases(options: Namespace, say: Say) -> dict[str, Any]:
    """Perplexity and greedy sums of each base, without adapters' effect, and the KL between them."""
    texts = reviews(8 if options.quick else options.reviews)
    loaded = {base: _loaded(base, options) for base in BASES}
    logps = {base: [_logp(one, text) for text in texts] for base, one in loaded.items()}
    num_tokens = sum(len(each) for each in logps["model"])
    kl = sum(
        float((plain.exp() * (plain - rounded)).sum())
        for plain, rounded in zip(logps["model"], logps["int8"], strict=True)
    )
    found: dict[str, Any] = {"num_tokens": num_tokens, "kl_per_token": kl / num_tokens}
    for base, each in logps.items():
        nats = -sum(
            float(logp_TV.gather(1, _ids(loaded[base], text)[1:, None]).sum())
            for logp_TV, text in zip(each, texts, strict=True)
        )
        found[base] = {"perplexity": math.exp(nats / num_tokens), "right_sums": _right_sums(loaded[base], options)}
    found["perplexity_ratio"] = found["int8"]["perplexity"] / found["model"]["perplexity"]
    say(f"perplexity {found['model']['perplexity']:.3f}, in 8 bits {found['int8']['perplexity']:.3f}")
    return found


def reviews(count: int) -> list[str]:
    """The first `count` film reviews of the data folder."""
    with gzip.open(data_path(f"data:{_REVIEWS}"), "rt", encoding="utf-8") as file:
        return [json.loads(next(file))["text"] for _ in range(count)]


def _loaded(base: str, options: Namespace) -> LoadedModel:
    name = "tiny:llama" if options.quick else options.model
    section = {"name": name, "dtype": options.dtype, "base": base, "lora": {"rank": 1}}
    return load_policy(ModelSection.model_validate(section))


def _ids(loaded: LoadedModel, text: str) -> torch.Tensor:
    return torch.tensor(loaded.tokenizer(text)["input_ids"][:200])


@torch.no_grad()
def _logp(loaded: LoadedModel, text: str) -> torch.Tensor:
    """Log-probs `[T - 1, V]` of the tokens after each but the last of a text."""
    return loaded.model(_ids(loaded, text)[None]).logits[0, :-1].float().log_softmax(-1)


def _right_sums(loaded: LoadedModel, options: Namespace) -> float:
    prompts = arithmetic_prompts()[:: 120 if options.quick else 6]
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
    groups = open_engine(loaded.model, loaded.tokenizer).generate(prompts, 1, sampling)
    right = [group.completions[0].text.split("\n")[0].strip() for group in groups]
    return fmean(text == str(group.prompt.columns["answer"]) for text, group in zip(right, groups, strict=True))


def large(options: Namespace, say: Say) -> dict[str, Any]:
    """One GRPO step of 1.7 billion weights on each base, and its peak of memory."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        with Process("benchmarks.int8_base:Writing", place, num_threads=options.threads) as process:
            process.call("write", options.model)
        for base in BASES:
            settings = settings_of("grpo", base, options)
            settings |= {"model": place, "steps": 1, "model.dtype": "bfloat16", "grpo": {"micro_batch_size": 8}}
            settings |= {"prompts": "films", "reward": "unique_chars"}  # which random weights do not all get 0 of
            settings["rollout"] = {"prompts_per_step": 2, "completions_per_prompt": 8, "max_new_tokens": 16}
            with Process("benchmarks.int8_base:Training", settings, num_threads=options.threads) as process:
                found[base] = process.call("train")
            say(f"1.7 billion weights, base {base}: {found[base]['peak_gb']:.2f} GB, {found[base]['step_s']:.0f} s")
    return found


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures."""
    facts = head(options, "int8_base", "quick", "model", "dtype", "steps", "rounds", "threads", "reviews")
    facts["base"] = bases(options, say)
    facts["trainings"] = trainings(options, say)
    return {**facts, **({"large": large(options, say)} if options.large else {})}


def _show(facts: Mapping[str, Any]) -> None:
    base = facts["base"]
    rows: list[Sequence[str]] = [
        [name, f"{base[name]['perplexity']:.3f}", f"{base[name]['right_sums']:.3f}"] for name in BASES
    ]
    print_table(["base", "perplexity", "right sums"], rows)
    print(f"KL of a token {base['kl_per_token']:.4f} nats")
    for algorithm, one in facts["trainings"].items():
        worst = max(max(one[name]["logp_diff_max"]) for name in BASES)
        print(
            f"{algorithm}: step {one['step_ratio_median']:.2f}x, rollout {one['rollout_ratio_median']:.2f}x, "
            f"memory {one['peak_ratio_median']:.2f}x, logp_diff_max {worst:g}"
        )
    for name, one in facts.get("large", {}).items():
        print(f"1.7 billion weights, base {name}: peak {one['peak_gb']:.2f} GB, step {one['step_s']:.1f} s")


main = benchmark(
    measure,
    _show,
    "quick",
    "model",
    "dtype",
    "rounds",
    "threads",
    steps={"type": int, "default": 20, "metavar": "N", "help": "steps of each training"},
    reviews={"type": int, "default": 64, "metavar": "N", "help": "film reviews, of which 200 tokens are scored"},
    large={"action": "store_true", "help": "also a step of 1.7 billion weights"},
)

if __name__ == "__main__":
    run("int8_base")
