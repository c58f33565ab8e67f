"""Families of transformers, each as a tiny random model: the engine that it gets, and whether it does its work.

`engine` is native, or transformers with the `reason`. `greedy_equal`: greedy tokens of the engine are those of
`transformers.generate` one prompt at a time, in float64. `logp_diff_max`: largest difference in nats between a log-prob
that the engine recorded and the trainer's, in float32. `trains`: three GRPO steps have gradients, and none is refused.
`speed`: tokens per second of the native engine over those of `generate` at its best batch, for mixtures of
8 experts, width 256, 16 prompts of 32 tokens x 32. With --write the table goes into docs/models.md.
"""

import re
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from benchmarks.common import ROOT, Say, benchmark, machine_facts, print_table, run
from tunesmith import train
from tunesmith.base.config.sections import TINY_FAMILIES
from tunesmith.base.core.errors import TunesmithError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.pack import pack
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.language_model import FullForward, language_model
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine

MIXTURES = ("mixtral", "olmoe", "qwen3_moe")

_PAGE = ROOT / "docs" / "models.md"
_TABLE = re.compile(r"(<!-- families: .* -->\n).*?(<!-- end of families -->)", re.DOTALL)
_WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def prompts_of(count: int, length: int | None = None) -> list[Prompt]:
    """Prompts of random tokens, of `length` or of 1 to 40."""
    generator = torch.Generator().manual_seed(0)
    lengths = [length or int(torch.randint(1, 41, (1,), generator=generator)) for _ in range(count)]
    ids = [torch.randint(3, 259, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(str(index), "", token_ids=tuple(one)) for index, one in enumerate(ids)]


def greedy_equal(family: str) -> bool:
    """True if greedy tokens are those of transformers."""
    loaded, sampling = tiny_model(family, dtype=torch.float64), SamplingParams(max_new_tokens=12, temperature=0.0)
    loaded.model.config._experts_implementation = "eager"  # the default has no float64
    plain = open_engine(loaded.model, loaded.tokenizer, backend="transformers", batch_size=1)
    both = [one.generate(prompts_of(8), 1, sampling) for one in (open_engine(loaded.model, loaded.tokenizer), plain)]
    ours, theirs = ([group.completions[0].token_ids for group in groups] for groups in both)
    return ours == theirs


@torch.no_grad()
def logp_difference(family: str) -> float:
    """Largest difference between the engine's log-probs and the trainer's, in nats."""
    loaded = tiny_model(family)
    model = language_model(loaded.model)
    groups = open_engine(model, loaded.tokenizer).generate(prompts_of(6), 3, SamplingParams(max_new_tokens=8, seed=0))
    rows = pack(groups, pad_id=2)
    scores = token_logps(model, rows.ids_BS, rows.lengths_B, prompt_lengths_B=rows.prompt_lengths_B)
    drawn = [torch.tensor(one.raw_logps) for group in groups for one in group.completions]
    pairs = zip(drawn, scores.logp_BT, strict=True)
    return max(float((logp_T - row_T[: len(logp_T)]).abs().max()) for logp_T, row_T in pairs)


def trains(family: str) -> bool:
    """True if three GRPO steps have gradients, all of them finite."""
    with tempfile.TemporaryDirectory() as folder:
        given: Mapping[str, Any] = {
            "run": {"dir": folder, "num_threads": torch.get_num_threads(), "checkpoint_every": 0},
            "model.dtype": "float32",
            "rollout.max_new_tokens": 6,
            "rollout.prompts_per_step": 2,
            "rollout.completions_per_prompt": 4,
        }
        result = train.grpo(model=f"tiny:{family}", prompts=["A", "B b"], reward=_odd, steps=3, progress=False, **given)
    gradients = [row["grad_norm"] for row in result.metrics]
    return len(gradients) == 3 and max(gradients) > 0 and not any(row["refused_steps"] for row in result.metrics)


def _odd(completions: Sequence[str], **_: object) -> list[float]:
    return [sum(map(ord, text)) % 17 / 17 for text in completions]


def family_facts(family: str) -> dict[str, object]:
    """The row of a family."""
    backend = language_model(tiny_model(family).model).backend
    is_native = not isinstance(backend, FullForward)
    facts: dict[str, object] = {"engine": "native" if is_native else "transformers"}
    if isinstance(backend, FullForward):
        facts["reason"] = backend.reason
    return facts | {
        "greedy_equal": greedy_equal(family),
        "logp_diff_max": logp_difference(family),
        "trains": trains(family),
    }


def speed(family: str, rounds: int) -> dict[str, float]:
    """Tokens per second of both engines in turns, the best of each, and the ratio."""
    loaded = tiny_model(family, **_WIDE, intermediate_size=512, moe_intermediate_size=512)
    sampling = SamplingParams(max_new_tokens=32, min_new_tokens=32, seed=0)
    names: tuple[Any, ...] = ("native", "transformers")
    engines = {name: open_engine(loaded.model, loaded.tokenizer, backend=name) for name in names}
    best = dict.fromkeys(engines, 0.0)
    for _ in range(rounds + 1):  # the first warms up
        for name, engine in engines.items():
            start = time.perf_counter()
            groups = engine.generate(prompts_of(16, 32), 2, sampling)
            count = sum(len(one.token_ids) for group in groups for one in group.completions)
            best[name] = max(best[name], count / (time.perf_counter() - start))
    return {f"{name}_tokens_s": rate for name, rate in best.items()} | {"ratio": best["native"] / best["transformers"]}


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All families, or those asked for."""
    transformers.logging.set_verbosity_error()
    rows: dict[str, object] = {}
    for family in options.family or TINY_FAMILIES:
        try:
            rows[family] = family_facts(family)
        except (TunesmithError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            rows[family] = {"engine": "none", "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
        say(f"{family}: {rows[family]}")
    facts: dict[str, object] = {**machine_facts(), "families": rows}
    if not options.quick:
        facts["speed"] = {family: speed(family, options.rounds) for family in MIXTURES}
        say(f"speed: {facts['speed']}")
    if options.write:
        _write_table(rows)
    return facts


def _write_table(rows: Mapping[str, Any]) -> None:
    """Write the families into docs/models.md, between its two marks."""
    lines = ["| family | engine | greedy tokens equal | log-probs differ by | trains |", "|" + " --- |" * 5]
    lines += ["| " + " | ".join(cells) + " |" for cells in _cells(rows)]
    page = _PAGE.read_text(encoding="utf-8")
    table = "\n".join(lines)
    _PAGE.write_text(_TABLE.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", page), encoding="utf-8")


def _cells(rows: Mapping[str, Any]) -> list[list[str]]:
    words = {True: "yes", False: "no", None: "-"}
    return [
        [
            family,
            row["engine"] + (f": {row['reason']}" if "reason" in row else ""),
            words[row.get("greedy_equal")],
            f"{row['logp_diff_max']:.2g}" if "logp_diff_max" in row else "-",
            words[row.get("trains")],
        ]
        for family, row in rows.items()
    ]


def show(facts: Mapping[str, Any]) -> None:
    """Print the table."""
    print_table(["family", "engine", "greedy", "logp", "trains"], _cells(facts["families"]))
    for family, row in facts.get("speed", {}).items():
        print(f"{family}: {row['native_tokens_s']:.0f} tokens/s, {row['ratio']:.2f} times generate")


main = benchmark(
    measure,
    show,
    "quick",
    rounds={"default": 3},
    family={"action": "append", "metavar": "F", "help": "one family; repeatable. All if left out"},
    write={"action": "store_true", "help": "write the table into docs/models.md"},
)


if __name__ == "__main__":
    run("families")
