"""What a recipe would do, without doing it: for `--dry-run`. Loads model and data, writes nothing."""

from dataclasses import dataclass

from tunesmith.config.schema import PPORecipe, RewardRecipe
from tunesmith.data.collate import encode_pairs, mean_prompt_tokens, prefix_prompts
from tunesmith.data.pairs import load_pairs
from tunesmith.data.prompts import load_prompts
from tunesmith.models.freeze import freeze_lower_layers, keep_lower_layers
from tunesmith.models.load import load_policy
from tunesmith.rewards.scorer import Scorer
from tunesmith.schema.records import plain_text
from tunesmith.trainers.estimate import ppo_estimate, reward_estimate
from tunesmith.trainers.reward import mean_pair_tokens


@dataclass(frozen=True, slots=True)
class Preview:
    """Size of the model, memory by part in GB, number of prompts or pairs, and the first of them as text."""

    model: str
    num_parameters: int
    memory_gb: dict[str, float]
    num_items: int
    sample: str


def preview(cfg: RewardRecipe | PPORecipe) -> Preview:
    """The preview of `cfg`; raises what its run would raise for a model, data or reward that cannot be used."""
    loaded = load_policy(cfg.model)
    if isinstance(cfg, RewardRecipe):
        keep_lower_layers(loaded.model, cfg.reward_model.num_layers)
    freeze_lower_layers(loaded.model, cfg.model.num_trainable_layers)
    if isinstance(cfg, RewardRecipe):
        pairs = load_pairs(cfg.pairs.source)
        encoded = encode_pairs(pairs, loaded.tokenizer, cfg.pairs.max_tokens)
        estimate = reward_estimate(loaded.model, cfg, pair_tokens=mean_pair_tokens(encoded))
        first = pairs[0]
        texts = (plain_text(first.prompt.content), plain_text(first.chosen), plain_text(first.rejected))
        sample = "prompt: {}\nchosen: {}\nrejected: {}".format(*texts)
        return Preview(cfg.model.name, estimate.num_parameters, estimate.memory_gb, len(pairs), sample)
    prompts = load_prompts(cfg.prompts.source, cfg.prompts)
    if cfg.prompts.prefix_tokens:
        prompts = prefix_prompts(prompts, loaded.tokenizer, cfg.prompts.prefix_tokens, cfg.run.seed)
    scorer = Scorer(cfg.reward, policy_tokenizer=loaded.tokenizer)
    estimate = ppo_estimate(
        loaded.model,
        cfg,
        prompt_tokens=mean_prompt_tokens(prompts, loaded.tokenizer),
        num_reward_models=scorer.num_models,
    )
    sample = f"prompt: {plain_text(prompts[0].content)}"
    return Preview(cfg.model.name, estimate.num_parameters, estimate.memory_gb, len(prompts), sample)
