"""`tunesmith compare`: two models by name, the same prompts and seeds, one scorer.

Shape legend: B sequences, T completion tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tunesmith.batch.pack import chunks, pack
from tunesmith.batch.rollout import Group, SamplingParams
from tunesmith.config.sections import ModelSection, PromptsSection, RewardSource
from tunesmith.data.prompts import load_prompts
from tunesmith.evaluation.compare import Comparison, Side, compare
from tunesmith.kernels.native import Kernels
from tunesmith.models.language_model import LanguageModel, language_model
from tunesmith.models.load import load_policy
from tunesmith.models.loaded import LoadedModel
from tunesmith.models.logprob import token_logps
from tunesmith.reports.html import write_comparison_report
from tunesmith.rewards.scorer import Scorer
from tunesmith.rollout.factory import Backend, open_engine

_GROUPS_PER_PASS = 4


def summed_logps(model: LanguageModel) -> Callable[[Sequence[Group]], list[float]]:
    """A function from groups to the log-prob in nats of each completion, summed over its tokens, at temperature 1."""

    @torch.no_grad()
    def logps(groups: Sequence[Group]) -> list[float]:
        sums: list[float] = []
        for some in chunks(groups, _GROUPS_PER_PASS):
            batch = pack(some, pad_id=0, device=model.module.device)
            scores = token_logps(model, batch.ids_BS, batch.lengths_B, prompt_lengths_B=batch.prompt_lengths_B)
            sums += scores.logp_BT.double().sum(dim=1).tolist()
        return sums

    return logps


def side(name: str, loaded: LoadedModel, *, backend: Backend = "native", batch_size: int = 64) -> Side:
    """A loaded model as one side of a comparison; `backend` draws its completions."""
    model = language_model(loaded.model, Kernels())
    engine = open_engine(model, loaded.tokenizer, backend=backend, batch_size=batch_size)
    return Side(name, engine, summed_logps(model))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    """How two models are compared; with `out`, also an HTML page there. `trust_remote_code` runs code that the models
    bring along; a reward model's is never run.
    """

    num_completions: int = 8
    max_new_tokens: int = 32
    seed: int = 0
    trust_remote_code: bool = False
    out: Path | None = None


def run_comparison(
    before: str, after: str, prompts: str, scorer: str, options: ComparisonOptions | None = None
) -> Comparison:
    """The comparison of the models named `before` and `after` on the prompts of a file.

    `scorer` is what a recipe's `reward.source` may be. Raises InputError for a model, file or scorer that cannot be
    used.
    """
    options = options or ComparisonOptions()
    loaded_before, loaded_after = (
        load_policy(ModelSection(name=name, trust_remote_code=options.trust_remote_code)) for name in (before, after)
    )
    rows = load_prompts(prompts, PromptsSection(source=prompts))
    judge = Scorer([RewardSource(source=scorer)], policy_tokenizer=loaded_before.tokenizer)
    result = compare(
        side(before, loaded_before),
        side(after, loaded_after),
        rows,
        judge,
        SamplingParams(max_new_tokens=options.max_new_tokens),
        num_completions=options.num_completions,
        seed=options.seed,
    )
    if options.out is not None:
        write_comparison_report(options.out, result.to_json(), title=f"{before} and {after}")
    return result
