"""What a recipe would do, without doing it: for `--dry-run`. Loads model and data, writes nothing."""

from dataclasses import dataclass

from tunesmith.config.schema import AnyRecipe, RewardRecipe, SFTRecipe
from tunesmith.data.sets import demonstration_sets, preference_sets
from tunesmith.models.freeze import freeze_lower_layers, keep_lower_layers
from tunesmith.models.load import load_policy
from tunesmith.models.loaded import context_length
from tunesmith.rewards.scorer import Scorer
from tunesmith.schema.records import plain_text
from tunesmith.trainers.estimate import policy_estimate, reward_estimate, sft_estimate
from tunesmith.trainers.reward import mean_pair_tokens
from tunesmith.trainers.rollouts import prompt_sets
from tunesmith.trainers.sft import mean_tokens


@dataclass(frozen=True, slots=True)
class Preview:
    """Size of the model, memory by part in GB, number of prompts or pairs, and the first of them as text."""

    model: str
    num_parameters: int
    memory_gb: dict[str, float]
    num_items: int
    sample: str


def preview(cfg: AnyRecipe) -> Preview:
    """The preview of `cfg`; raises what its run would raise for a model, data or reward that cannot be used."""
    loaded = load_policy(cfg.model)
    if isinstance(cfg, RewardRecipe):
        keep_lower_layers(loaded.model, cfg.reward_model.num_layers)
    freeze_lower_layers(loaded.model, cfg.model.num_trainable_layers)
    if isinstance(cfg, RewardRecipe):
        pairs = preference_sets(cfg.pairs, loaded.tokenizer, cfg.run.seed, room=context_length(loaded.model))
        estimate = reward_estimate(loaded.model, cfg, pair_tokens=mean_pair_tokens(pairs.train))
        num_pairs = len(pairs.train) + len(pairs.heldout)
        return Preview(cfg.model.name, estimate.num_parameters, estimate.memory_gb, num_pairs, pairs.sample)
    if isinstance(cfg, SFTRecipe):
        room = context_length(loaded.model)
        shown = demonstration_sets(cfg.demonstrations, loaded.tokenizer, cfg.run.seed, room=room)
        estimate = sft_estimate(loaded.model, cfg, mean_tokens=mean_tokens(shown.train))
        num_rows = len(shown.train) + len(shown.heldout)
        return Preview(cfg.model.name, estimate.num_parameters, estimate.memory_gb, num_rows, shown.sample)
    sets = prompt_sets(cfg, loaded, None)
    scorer = Scorer(cfg.reward, policy_tokenizer=loaded.tokenizer)
    estimate = policy_estimate(loaded.model, cfg, prompt_tokens=sets.mean_tokens, num_reward_models=scorer.num_models)
    sample = f"prompt: {plain_text(sets.train[0].content)}"
    num_prompts = len(sets.train) + len(sets.heldout)
    return Preview(cfg.model.name, estimate.num_parameters, estimate.memory_gb, num_prompts, sample)
