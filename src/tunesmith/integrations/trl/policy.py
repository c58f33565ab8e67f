"""GRPO and RLOO of TRL with our rollout engine and packed log-probs; everything else is TRL's own code.

Shape legend: B rows, C completion columns.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from trl.trainer import grpo_trainer, rloo_trainer

from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.core.seeds import derive
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, SamplingParams
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import context_length
from tunesmith.engine.rollout.engine import Dialogue, Engine
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.integrations.trl.model import PackedTrainer, Twin, drops_in_adapters, evaluating, unwrapped
from tunesmith.integrations.trl.tool_loop import Turns, loop_at_once
from tunesmith.integrations.trl_support import GENERATION

_SAMPLING = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Arguments of generation that the engine has under the same name."""

_LOGPS = "_get_per_token_logps_and_entropies"


@dataclass(frozen=True, slots=True)
class Options:
    """Options that TRL's configuration has no field for.

    Args:
        skips_equal_groups: Leave rows whose advantage is 0 out of the forward and backward passes, where they change
            nothing: without a KL term, entropy bonus or entropy quantile, and not with the loss "bnpo". The entropy in
            the metrics is then that of the other rows.
        corrects_importance: Apply TRL's importance correction, with its `vllm_importance_sampling_*` settings and
            metrics, to whatever drew the completions: our engine or a `rollout_func`. GRPO only.
        concurrent_tools: Call the tools of different completions at the same time, in threads, and go on drawing
            meanwhile. Off: one after the other in the main thread and in rounds, as TRL does. GRPO only.
    """

    skips_equal_groups: bool = False
    corrects_importance: bool = False
    concurrent_tools: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """Completions whose log-probs are those of the trainer to the bit, and the model that they were drawn from."""

    model: LanguageModel
    prompt_ids: Sequence[Sequence[int]]
    completions: Sequence[Completion]

    def logps(self, ids_BS: torch.Tensor, mask_BS: torch.Tensor, num_columns: int) -> torch.Tensor | None:
        """logp_BC of these very rows, padded as TRL does; None if they are others."""
        start = ids_BS.shape[1] - num_columns
        if len(ids_BS) != len(self.completions):
            return None
        logp_BC = torch.zeros(len(ids_BS), num_columns)
        for row, (ids, prompt, drawn) in enumerate(
            zip(ids_BS.tolist(), self.prompt_ids, self.completions, strict=True)
        ):
            length = len(drawn.token_ids)
            if ids[start - len(prompt) : start + length] != [*prompt, *drawn.token_ids]:
                return None
            logp_BC[row, :length] = torch.tensor(drawn.raw_logps)
        return logp_BC * mask_BS[:, start:]


class FastPolicy(PackedTrainer):
    """The common part of GRPO and RLOO."""

    options: Options = Options()
    _engine: Engine | None
    _live: LanguageModel | None
    _twin: Twin | None
    _drawn: Drawn | None

    def __init__(self, *args: Any, options: Options | None = None, **kwargs: Any) -> None:
        self.options = options or Options()
        super().__init__(*args, **kwargs)

    def start(self, options: Options | None = None) -> None:
        """See `PackedTrainer.start`."""
        super().start()
        self.options = options or self.options
        self._engine = self._live = self._twin = self._drawn = None
        self._num_calls = (-1, 0)  # of `_draw`, at a step

    def _ready(self, prompt_ids: Sequence[Sequence[int]], *, has_images: bool) -> tuple[Engine, SamplingParams] | None:
        """The engine and its settings, None if TRL is to draw."""
        self._drawn = None
        sampling = None if self.use_vllm else self._sampling()
        reason = self._reason_not_to_draw(prompt_ids, sampling, has_images=has_images)
        engine = None if reason else self._current_engine()
        if engine is None or not isinstance(sampling, SamplingParams):
            if reason and not self.use_vllm:
                self.live_models.say("generation", reason)
            return None
        return engine, replace(sampling, seed=self._seed())

    def _draw(self, prompt_ids: Sequence[Sequence[int]], *, has_images: bool) -> list[Completion] | None:
        """A completion for each of `prompt_ids`, where equal neighbours are drawn as a group; None: TRL draws."""
        ready = self._ready(prompt_ids, has_images=has_images)
        if ready is None:
            return None
        engine, sampling = ready
        runs = [(ids, len(tuple(same))) for ids, same in groupby(map(tuple, prompt_ids))]
        num = math.gcd(*(count for _, count in runs))
        prompts = [
            Prompt(str(index), "", token_ids=ids)
            for index, (ids, count) in enumerate(runs)
            for _ in range(count // num)
        ]
        try:
            with evaluating(unwrapped(self.model)):
                groups = engine.generate(prompts, num, sampling)
        except (InputError, TrainingError) as error:  # of damaged weights, for example; TRL may still draw
            self.live_models.say("generation", str(error))
            return None
        completions = [completion for group in groups for completion in group.completions]
        self._keep(prompt_ids, completions, engine, sampling)
        return completions

    def _keep(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        engine: Engine,
        sampling: SamplingParams,
    ) -> None:
        """Keep whole completions if their log-probs are those of the trainer."""
        with evaluating(unwrapped(self.model)):
            is_exact = engine.is_exact
        is_trainers = is_exact and sampling.temperature == self.temperature and self._is_trls(_LOGPS)
        if is_trainers and self._live is not None and not drops_in_adapters(self._live.module):
            self._drawn = Drawn(self._live, prompt_ids, completions)

    def _reason_not_to_draw(
        self, prompt_ids: Sequence[Sequence[int]], sampling: SamplingParams | str | None, *, has_images: bool
    ) -> str:
        if not self._is_trls("_generate_single_turn"):
            return "the trainer's class has a _generate_single_turn of its own"
        if sampling is None:
            return "use_vllm is on"
        if isinstance(sampling, str):
            return sampling
        if self.use_transformers_continuous_batching:
            return "use_transformers_continuous_batching is on"
        if has_images:
            return "the prompts have images"
        module = unwrapped(self.model)
        if getattr(module.generate, "__module__", "") != "transformers.generation.utils":
            return "the model's generate was replaced"
        longest, context = max(map(len, prompt_ids)) + sampling.max_new_tokens, context_length(module)
        if context is not None and longest > context:
            return f"a prompt and its completion may take {longest} tokens, and the model's context is {context}"
        return "" if min(map(len, prompt_ids)) else "a prompt is empty"

    def _is_trls(self, name: str) -> bool:
        """True if the method that ours replaces is TRL's, and not that of a user's class."""
        classes = type(self).__mro__
        replaced = next(one for one in classes[classes.index(FastPolicy) + 1 :] if name in vars(one))
        return replaced.__module__.startswith("trl.")

    def _sampling(self) -> SamplingParams | str:
        """The settings of TRL's generation, or why the engine does not have them."""
        given: Mapping[str, Any] = {name: value for name, value in self.generation_kwargs.items() if value is not None}
        unknown = given.keys() - GENERATION
        if unknown or not given.get("do_sample") or given.get("num_beams", 1) != 1:
            return f"generation_kwargs have {', '.join(sorted(unknown)) or 'greedy or beam search'}"
        stop_ids, stops = given.get("eos_token_id", ()), given.get("stop_strings", ())
        return SamplingParams(
            **{name: given[name] for name in _SAMPLING if name in given},
            stop_token_ids=(stop_ids,) if isinstance(stop_ids, int) else tuple(stop_ids),
            stop_strings=(stops,) if isinstance(stops, str) else tuple(stops),
            logit_bias=dict.fromkeys(given.get("suppress_tokens", ()), -math.inf),
        )

    def _current_engine(self) -> Engine | None:
        """The engine on the live model, as it is now; None if the model is not known.

        Under autocast to bfloat16 it draws from a copy in bfloat16, whose log-probs are those of the packed pass.
        """
        with evaluating(unwrapped(self.model)), self.accelerator.autocast():
            live = self.live_models.get(self.model)
            casts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        if live is not self._live:
            self._live, self._twin, self._engine = live, None, None
            if live is not None:
                if casts and any(parameter.dtype != torch.bfloat16 for parameter in live.module.parameters()):
                    self._twin = Twin(live, torch.bfloat16)
                model = live if self._twin is None else self._twin.model
                self._engine = open_engine(model, self._tokenizer, weight_version=lambda: int(self.state.global_step))
        elif self._twin is not None:
            self._twin.refresh()
        return self._engine

    def _seed(self) -> int:
        """The seed of a call: a function of the trainer's seed, the step, the process, and the calls of this step."""
        step = int(self.state.global_step)
        index = self._num_calls[1] if self._num_calls[0] == step else 0
        self._num_calls = step, index + 1
        return derive(self.args.seed, "rollout", step, index, int(self.accelerator.process_index))

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        self._drawn = None
        if self._engine is not None and self.model.training:
            self._engine.unload()  # the update needs the memory, and changes the weights
        return found

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self._drawn is not None and not torch.is_grad_enabled() and not kwargs.get("compute_entropy"):
            with self.accelerator.autocast():
                is_drawn = self.live_models.get(model) is self._drawn.model  # not with other adapters, or none
            logp_BC = self._drawn.logps(input_ids, attention_mask, logits_to_keep) if is_drawn else None
            if logp_BC is not None:
                return logp_BC, None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self._buffered_inputs is not before and not self._depends_on_micro_batches():
            steps = int(self.args.steps_per_generation)
            window = math.gcd(steps, int(self.args.gradient_accumulation_steps))
            batches = self._buffered_inputs
            self._buffered_inputs = [
                batch for start in range(0, steps, window) for batch in by_prompt(batches[start : start + window])
            ]
            inputs = self._buffered_inputs[self._step % steps]
        return inputs

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.options.skips_equal_groups and self.model.training:
            if reason := self._reason_not_to_skip():
                self.live_models.say("groups of equal rewards in the update", reason)
            else:
                inputs = without_zero_advantages(inputs)
        return super()._compute_loss(model, inputs)

    def _depends_on_micro_batches(self) -> str:
        """The terms of the loss that depend on which rows a micro-batch has; empty if there are none."""
        return ""

    def _reason_not_to_skip(self) -> str:
        return self._depends_on_micro_batches()


class FastGRPO(FastPolicy):
    """Mixin before TRL's GRPO trainer."""

    _turns: Turns | None = None
    _has_turns = False

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> Any:
        has_images = bool(images or multimodal_fields or has_tool_images)
        drawn = self._turn(prompt_ids) if self._has_turns and not has_images else None
        if drawn is None:
            self._end_turns()  # one call of the engine at a time
            drawn = self._draw(prompt_ids, has_images=has_images)
        if drawn is None:
            ids, logps = super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
            return ids, unknown_logps(ids) if logps is None and (self.tools or self._corrects) else logps
        return self._as_trl(drawn)

    def _as_trl(self, drawn: Sequence[Completion | None]) -> tuple[list[list[int]], list[list[Any]]]:
        """Ids and log-probs, none of a turn for which there is no room."""
        ids = [[] if one is None else list(one.token_ids) for one in drawn]
        if self.generation_kwargs["temperature"] != self.temperature:
            return ids, unknown_logps(ids)
        # The model's, not the sampler's: TRL compares them with the trainer's, which know nothing of top_p.
        return ids, [[] if one is None else list(one.raw_logps) for one in drawn]

    def _turn(self, prompt_ids: Sequence[Sequence[int]]) -> Sequence[Completion | None] | None:
        """The next turn of each conversation, the first if there are none; None: they are to be drawn otherwise."""
        try:
            if self._turns is not None:
                self._drawn = None  # it has the first turns alone
                return self._turns.round(prompt_ids)
            return self._first_turn(prompt_ids)
        except (InputError, TrainingError) as error:
            self.live_models.say("generation", str(error))
        except LookupError:
            pass  # a tool loop of the user's, which changes what was drawn
        self._has_turns = False
        return None

    def _first_turn(self, prompt_ids: Sequence[Sequence[int]]) -> Sequence[Completion | None] | None:
        ready = self._ready(prompt_ids, has_images=False)
        if ready is None:
            return None
        engine, sampling = ready
        if sampling.max_new_tokens != self.max_completion_length:
            return None
        prompts = [Prompt(str(index), "", token_ids=tuple(ids)) for index, ids in enumerate(prompt_ids)]

        def converse(dialogue: Dialogue) -> None:
            with evaluating(unwrapped(self.model)):
                engine.converse(prompts, sampling, dialogue)

        self._turns = Turns(converse, prompt_ids, sampling.max_new_tokens)
        drawn = self._turns.first()
        self._keep(prompt_ids, [one for one in drawn if one is not None], engine, sampling)
        return drawn

    def _end_turns(self) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.end()

    def _tool_call_loop(
        self,
        prompts: Any,
        prompt_ids: Any,
        completion_ids: Any,
        completions: Any,
        logprobs: Any,
        images: Any,
        multimodal_fields: Any,
    ) -> Any:
        batch = prompts, prompt_ids, completion_ids, completions, logprobs
        is_plain = not self._is_vlm and self._is_trls("_tool_call_loop")
        if self._turns is None or not self.options.concurrent_tools or not is_plain:
            return super()._tool_call_loop(*batch, images, multimodal_fields)
        self._drawn = None
        return loop_at_once(self, self._turns, self._as_trl, batch)

    @property
    def _corrects(self) -> bool:
        return self.options.corrects_importance

    def _generate(self, prompts: Any) -> Any:
        self._has_turns = bool(self.tools) and self.rollout_func is None
        try:
            with self._as_vllm(getattr(self.args, "use_vllm", self.use_vllm)):  # TRL's tests have arguments without it
                found = list(super()._generate(prompts))
        finally:
            self._has_turns = False
            self._end_turns()
        if found[4] is None and self._corrects:
            found[4] = unknown_logps(found[1])
        return tuple(found)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self._as_vllm(self.use_vllm or self._corrects):
            return super()._generate_and_score_completions(inputs)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        with self._as_vllm(self.use_vllm or self._corrects):
            return super()._compute_loss(model, inputs)

    @contextmanager
    def _as_vllm(self, is_vllm: bool) -> Iterator[None]:
        """Let TRL take its branches for vLLM, which correct importance weights, or not."""
        before, self.use_vllm = self.use_vllm, is_vllm
        try:
            yield
        finally:
            self.use_vllm = before

    def _depends_on_micro_batches(self) -> str:
        terms = {
            "there is an entropy bonus": self._entropy_bonus_enabled,
            "top_entropy_quantile is below 1": self.top_entropy_quantile < 1,
            'the loss is "bnpo"': self.loss_type == "bnpo",
        }
        return ", ".join(name for name, holds in terms.items() if holds)

    def _reason_not_to_skip(self) -> str:
        return "beta is not 0" if self.beta else self._depends_on_micro_batches()


class FastRLOO(FastPolicy):
    """Mixin before TRL's RLOO trainer."""

    def _generate_single_turn(self, prompt_ids: Any, images: Any, multimodal_fields: Any) -> Any:
        drawn = self._draw(prompt_ids, has_images=bool(images or multimodal_fields))
        if drawn is None:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields)
        return [list(one.token_ids) for one in drawn]


class GRPOTrainer(FastGRPO, grpo_trainer.GRPOTrainer):
    """TRL's GRPO trainer, faster: the same arguments, and `options` (`Options`)."""


class RLOOTrainer(FastRLOO, rloo_trainer.RLOOTrainer):
    """TRL's RLOO trainer, faster: the same arguments, and `options` (`Options`)."""


def unknown_logps(completion_ids: Sequence[Sequence[int]]) -> list[list[None]]:
    """Log-probs of completions whose sampler gave none, as TRL marks them: they get no importance correction."""
    return [[None] * len(ids) for ids in completion_ids]


def by_prompt(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The micro-batches of an optimizer step with the rows of a prompt together, so that it is computed once.

    TRL shuffles all rows. Batches that hold anything but tensors, such as those of images, are left as they are.
    """
    values = [value for batch in batches for value in batch.values() if value is not None]
    sizes = [len(batch["prompt_ids"]) for batch in batches]
    if not all(isinstance(value, torch.Tensor) for value in values) or "pixel_values" in batches[0]:
        return list(batches)
    is_of_rows = {name for name, value in batches[0].items() if value is not None and value.dim()}
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in is_of_rows}
    prompts = rows["prompt_ids"].tolist()
    order = torch.tensor(sorted(range(len(prompts)), key=prompts.__getitem__))
    parts = {name: value[order].split(sizes) for name, value in rows.items()}
    return [
        {name: parts[name][index] if name in parts else value for name, value in batch.items()}
        for index, batch in enumerate(batches)
    ]


def without_zero_advantages(inputs: dict[str, Any]) -> dict[str, Any]:
    """`inputs` with empty completions where the advantage is 0, which leaves loss and gradient as they are."""
    advantages = inputs["advantages"]
    keeps_B = (advantages if advantages.dim() == 1 else advantages.abs().sum(1)) != 0
    if not bool(keeps_B.any()):
        keeps_B[0] = True  # a pass has to have a token
    changed = {"completion_mask": inputs["completion_mask"] * keeps_B[:, None]}
    for name in ("old_per_token_logps", "old_logps"):  # of a row without tokens the trainer's log-prob is 0
        if inputs.get(name) is not None:
            value = inputs[name]
            changed[name] = value * (keeps_B if value.dim() == 1 else keeps_B[:, None])
    return {**inputs, **changed}
