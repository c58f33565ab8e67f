"""PPO for scripts written for TRL's PPOTrainer, which TRL removed after 1.12: its constructor and config, on our PPO.

Shape legend: B sequences, S positions.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState

from tunesmith.base.config.sections import RolloutSection
from tunesmith.base.core.errors import InputError, ModelError, TrainingError
from tunesmith.base.core.seeds import derive
from tunesmith.base.core.trace import trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models import lora
from tunesmith.engine.models.heads import Critic, RewardModel
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase, disable_dropout
from tunesmith.engine.models.optimizer import MasterAdamW
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.integrations.trl.ppo_config import PPOConfig, check_config, optimizer_section, ppo_section, set_sizes
from tunesmith.learn.algorithms import kl
from tunesmith.learn.rewards.model import ModelReward
from tunesmith.learn.rewards.outcome import Sample, Scored
from tunesmith.learn.rewards.scorer import Scorer
from tunesmith.learn.trainers.ppo import PPO
from tunesmith.learn.trainers.rollouts import Rollouts
from tunesmith.learn.trainers.setup import say

_MAX_REFUSED = 5
_SHOWN_SAMPLES = 5


@dataclass
class OnlineTrainerState(TrainerState):
    """The state of the trainer, with the number of completions drawn so far."""

    episode: int = 0


def critic_of(value_model: PreTrainedModel) -> Critic:
    """`value_model`, a classifier with one label, as a critic on its own parameters, head included."""
    head: Any = getattr(value_model, "score", None)
    if getattr(head, "out_features", None) != 1:
        raise ModelError(
            f"value_model is a {type(value_model).__name__} without a linear `score` of one label; load it with "
            "`AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)`"
        )
    critic = Critic(value_model)
    critic.value_head.weight = head.weight
    if head.bias is None:
        critic.value_head.bias.requires_grad_(False)
    else:
        critic.value_head.bias = head.bias
    return critic


class SampledIdsReward(ModelReward):
    """A reward model that reads the tokens as they were drawn, at the last one, as TRL's PPO does.

    `missing_eos_penalty` is subtracted from the score of a completion without end-of-sequence token.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: PPOConfig) -> None:
        if not isinstance(model, PreTrainedModel):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(
                f"reward_model is a {type(model).__name__}; give a sequence classifier of transformers with one label"
            )
        size = args.local_rollout_forward_batch_size
        scorer = RewardModel(model, tokenizer)
        scorer.pad_id = None  # TRL's PPO reads the logits itself
        super().__init__(scorer, "reward_model", policy_tokenizer=tokenizer, micro_batch_size=size)
        self._penalty = args.missing_eos_penalty or 0.0

    def outcomes(self, samples: Sequence[Sample], extras: Mapping[str, object] | None = None) -> Scored:
        """The score of each sample, less the penalty."""
        scored, eos_id = super().outcomes(samples, extras), self.model.tokenizer.eos_token_id
        for place, sample in enumerate(samples):
            outcome = scored.outcomes[place]
            if isinstance(outcome, float) and eos_id not in sample.completion.token_ids:
                scored.outcomes[place] = outcome - self._penalty
        return scored

    def encode(self, sample: Sample) -> tuple[int, ...]:
        """The prompt and the completion as they were drawn."""
        return sample.prompt_token_ids + sample.completion.token_ids


class PPOTrainer(Trainer):
    """TRL 1.12's PPOTrainer, on our PPO: `learner` is a `trainers.ppo.PPO` on the modules that were given.

    `train_dataset` has a column `input_ids` with the tokens of prompts; `eval_dataset` too, for `generate_completions`.
    Without `ref_model` the reference is a copy of the model, or the model without its adapters.

    Raises:
        InputError: for arguments that cannot be followed, naming each.
    """

    learner: PPO

    def __init__(  # noqa: PLR0913 - TRL's constructor
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        model: PreTrainedModel,
        ref_model: PreTrainedModel | None,
        reward_model: PreTrainedModel,
        train_dataset: Any,
        value_model: PreTrainedModel,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
    ) -> None:
        if train_dataset is None or not hasattr(train_dataset, "__len__"):
            raise InputError("train_dataset must be a dataset with a length and a column `input_ids`")
        if ref_model is model:
            raise InputError("model and ref_model are one object; give a copy, or None for a copy that is made here")
        if any(optimizers):
            raise InputError("optimizers are given, but PPO has its own AdamW; set its arguments in PPOConfig")
        check_config(args)
        set_sizes(args, len(train_dataset))
        if peft_config is not None:
            model = lora.peft().get_peft_model(model, peft_config, autocast_adapter_dtype=False)
        args.save_only_model = True  # TRL's PPO cannot be resumed, so the optimizer's state would be of no use
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
        )
        self.state = OnlineTrainerState(**{**vars(self.state), "max_steps": args.num_total_batches})
        self.policy_model, self.ref_model, self.value_model = model, ref_model, value_model
        self.reward_model = reward_model
        self.stop_token_id = processing_class.eos_token_id if args.stop_token == "eos" else args.stop_token_id
        self.learner = self._build(args, processing_class)

    def _build(self, args: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> PPO:
        """The learner on the models, all of them on the trainer's device and without dropout."""
        given = (self.policy_model, self.value_model, self.reward_model, self.ref_model)
        for module in (module for module in given if module is not None):
            disable_dropout(module.to(args.device))  # type: ignore[arg-type]
            module.eval()
        for module in (self.policy_model, self.value_model) if args.gradient_checkpointing else ():
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            module.train()
        module: Any = self.policy_model
        policy = language_model(module.get_base_model() if hasattr(module, "peft_config") else module)
        if self.ref_model is None:
            self.ref_model = lora.twin(policy.module)
            lora.take_off(self.ref_model)
        reference = language_model(self.ref_model.requires_grad_(False).eval(), policy.kernels)
        critic, section = critic_of(self.value_model), ppo_section(args)
        num_steps = args.num_total_batches or 0
        optimizer = MasterAdamW(
            nn.ModuleDict({"policy": policy.module, "critic": critic}),
            optimizer_section(args),
            total_steps=num_steps * section.num_epochs * section.num_minibatches,
            kernels=policy.kernels,
        )
        size = args.local_rollout_forward_batch_size
        engine = open_engine(policy, tokenizer, weight_version=lambda: optimizer.weight_version, batch_size=size)
        scorer = Scorer([SampledIdsReward(self.reward_model, tokenizer, args)])
        drawing = RolloutSection(
            prompts_per_step=args.batch_size or 1, max_new_tokens=args.response_length, temperature=args.temperature
        )
        rollouts = Rollouts(engine, scorer, drawing, args.seed, num_steps)
        controller = kl.Controller(args.kl_coef)
        return PPO(section, rollouts, policy, reference, optimizer, controller, tokenizer, critic=critic)

    def train(self) -> None:  # type: ignore[override]
        """Train for `num_total_batches` batches. Metrics are logged after each, under TRL's names.

        Raises:
            TrainingError: if 5 updates in a row are not finite.
        """
        args: Any = self.args
        state: Any = self.state
        num_rows = len(self.train_dataset)  # type: ignore[arg-type]
        state.global_step, state.episode, state.num_train_epochs = 0, 0, args.total_episodes / num_rows
        state.compute_steps(args, state.max_steps)
        begin_s = time.monotonic()
        self.control = self.callback_handler.on_train_begin(args, state, self.control)
        for index, prompts in zip(range(args.num_total_batches), self._batches(), strict=False):
            self.control = self.callback_handler.on_step_begin(args, state, self.control)
            with trace() as times, self._stop_ids():
                result = self.learner.step(prompts, index)
            if result.report is not None and result.report.num_refused_in_row >= _MAX_REFUSED:
                raise TrainingError(f"{_MAX_REFUSED} updates in a row were not finite: {result.report.bad_part}")
            state.episode += args.batch_size
            state.global_step += 1
            state.epoch = state.episode / num_rows
            drawn: Any = [row["token_ids"] for row in result.batch()]
            self.log(
                {
                    **result.metrics,
                    **times.metrics(),
                    "eps": int(state.episode / (time.monotonic() - begin_s)),
                    "episode": state.episode,
                    "policy/entropy_avg": result.metrics["entropy"],
                    "val/num_eos_tokens": sum(ids.count(self.learner.tokenizer.eos_token_id) for ids in drawn),
                }
            )
            self.control = self.callback_handler.on_step_end(args, state, self.control)
            self._save_if_asked()
            every = max(1, args.num_total_batches // args.num_sample_generations) if args.num_sample_generations else 0
            if every and index % every == 0:
                self.generate_completions(sampling=True)
            if self.control.should_training_stop:
                break
        self.control = self.callback_handler.on_train_end(args, state, self.control)
        self._save_if_asked()

    def generate_completions(self, sampling: bool = False) -> list[dict[str, object]]:
        """Rows with `query`, `model response` and `score` of the prompts of `eval_dataset`, drawn almost greedily; with
        `sampling` of its first batch alone. The first rows are printed, all go to wandb if it is in use.
        """
        args: Any = self.args
        if self.eval_dataset is None:
            return []
        rows: list[dict[str, object]] = []
        dataset: Any = self.eval_dataset
        loader = DataLoader(dataset, args.per_device_eval_batch_size, collate_fn=self.data_collator)
        settings = SamplingParams(args.response_length, temperature=0.01, seed=derive(args.seed, "samples"))
        for batch in loader:
            prompts = self._prompts(batch, "eval_dataset")
            with self._stop_ids():
                groups = self.learner.rollouts.engine.generate(prompts, 1, settings)
            scores = self.learner.rollouts.scorer.score(groups).total_PG[:, 0].tolist()
            for group, score in zip(groups, scores, strict=True):
                text = group.completions[0].text
                rows.append({"query": group.prompt.content, "model response": text, "score": score})
            if sampling:
                break
        for row in rows[:_SHOWN_SAMPLES]:
            say("\n".join(f"{name}: {value}" for name, value in row.items()) + "\n", enabled=not args.disable_tqdm)
        if "wandb" in args.report_to:
            import wandb  # pyright: ignore[reportMissingImports]

            if wandb.run is not None:
                table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
                wandb.log({"completions": table})
        return rows

    def create_model_card(self, model_name: Any = None, dataset_name: Any = None, tags: Any = None, **_: Any) -> None:
        """Write the model card, with the arguments that TRL's trainers take."""
        super().create_model_card(model_name=model_name, dataset=dataset_name, tags=tags or ["trl", "ppo", "tunesmith"])

    def _save_if_asked(self) -> None:
        if self.control.should_save:
            self._save_checkpoint(self.policy_model, trial=None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _batches(self) -> Iterator[list[Prompt]]:
        """The prompts of each step, in an order that depends on the seed alone; the rest of an epoch is left out."""
        args: Any = self.args
        dataset: Any = self.train_dataset
        order = torch.Generator().manual_seed(args.seed)
        loader = DataLoader(
            dataset, args.batch_size, shuffle=True, collate_fn=self.data_collator, drop_last=True, generator=order
        )
        while True:
            for batch in loader:
                yield self._prompts(batch, "train_dataset")

    def _prompts(self, batch: Any, source: str) -> list[Prompt]:
        """The rows of a padded batch as prompts of the tokens that are no padding."""
        ids_BS, tokenizer = batch["input_ids"], self.learner.tokenizer
        mask_BS = batch.get("attention_mask", ids_BS != tokenizer.pad_token_id)
        rows = [tuple(ids_S[mask_S.bool()].tolist()) for ids_S, mask_S in zip(ids_BS, mask_BS, strict=True)]
        return [
            Prompt(f"{source}[{number}]", str(tokenizer.decode(list(ids), skip_special_tokens=True)), token_ids=ids)
            for number, ids in enumerate(rows)
        ]

    @contextmanager
    def _stop_ids(self) -> Iterator[None]:
        """Completions end with `stop_token_id` alone; without one they all have `response_length` tokens."""
        config: Any = self.learner.policy.module.generation_config
        own, config.eos_token_id = config.eos_token_id, [] if self.stop_token_id is None else self.stop_token_id
        try:
            yield
        finally:
            config.eos_token_id = own
