"""A model of lm-eval that computes by exact forward passes and draws by the rollout engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    handle_stop_sequences,
    normalize_gen_kwargs,
    resolve_max_length,
)
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)

from tunesmith.base.core.errors import DataError, InputError
from tunesmith.base.runs.progress import progress
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.conversation import prompt_text
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.tokenizer import encode_prompt, encode_rendered
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.learn.evaluation.continuations import Continuation, likelihoods
from tunesmith.learn.evaluation.kept import KeptAnswers, identity
from tunesmith.learn.evaluation.texts import kept_texts

DEFAULT_NEW_TOKENS = 256
"""Of a task that names no limit; the same as of lm-eval's own models."""

_WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1, "length_penalty": 1.0, "use_cache": True}
"""Settings of generation that the engine does not have, with the value that changes nothing; so do None and false."""


class TunesmithLM(TemplateLM):
    """A loaded model for `lm_eval.simple_evaluate(model=...)`.

    Log-likelihoods are those of the trainer's forward pass in float32, with contexts that several continuations share
    computed once; texts are drawn by the native engine, all of a task at once. Contexts that are too long lose their
    beginning, as with lm-eval's own models. `seed` is of tasks that sample. Answers are kept in the file `kept`, and
    those that are there are not computed again.

    Example:
        >>> lm = TunesmithLM(load_policy("smollm2"))
        >>> lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"])["results"]
    """

    def __init__(
        self, loaded: LoadedModel, *, seed: int = 0, shows_progress: bool = False, kept: Path | None = None
    ) -> None:
        super().__init__()
        self.tokenizer = loaded.tokenizer
        self._model = language_model(loaded.model)
        self._engine = open_engine(self._model, loaded.tokenizer)
        self._seed = seed
        self._shows_progress = shows_progress
        self.kept = KeptAnswers(kept, "" if kept is None else identity(self._model, loaded.tokenizer))

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return cast(int, self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the begin-of-sequence token, else that of the end."""
        begin = cast(int | None, self.tokenizer.bos_token_id)
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """Tokens of the model's context, by lm-eval's own rule."""
        return resolve_max_length(self._model.module.config, self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text; with None as a prompt, with the special token that the tokenizer begins texts with."""
        if add_special_tokens is False or not string:
            return list(encode_rendered(self.tokenizer, string))
        return list(encode_prompt(self.tokenizer, Prompt("", string)))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, for the assistant to answer, or to go on with its last message.

        Raises:
            ModelError: there is no chat template.
        """
        named = Prompt("of the task", ())
        try:
            return prompt_text(self.tokenizer, named, chat_history, continues=not add_generation_prompt)
        except DataError:  # a template without system messages
            rest = [message for message in chat_history if message["role"] != "system"]
            return prompt_text(self.tokenizer, named, rest, continues=not add_generation_prompt)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As lm-eval's, with one bar of progress in place of two."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, Sequence[int], Sequence[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._continuation(context, ids) for _, context, ids in requests]
        with progress("likelihoods", len(rows), enabled=self._shows_progress) as reporter:
            found = likelihoods(self._model, rows, on_progress=reporter.update, kept=self.kept)
        answers = [(one.logp, one.is_greedy) for one in found]
        for request, answer in zip(requests, answers, strict=True):
            if (texts := request[0]) is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _continuation(self, context: Sequence[int], ids: Sequence[int]) -> Continuation:
        """What fits in the model's context, of which the last token predicts nothing; one token of context is kept."""
        whole = (*context, *ids)[-(self.max_length + 1) :]
        place = max(1, len(whole) - len(ids))
        return Continuation(whole[:place], whole[place:])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """The log-likelihood of each text in windows of the model's context, each token once."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, (logp, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[index] += logp
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """The text behind each context up to a stop string; those of equal settings are drawn together.

        Raises:
            InputError: a task asks for what the engine does not have, or for more tokens than the context holds.
        """
        settings: dict[str, tuple[SamplingParams, list[int]]] = {}
        for index, request in enumerate(requests):
            given = repr(sorted(request.args[1].items()))
            if given not in settings:
                settings[given] = self.sampling_of(request.args[1], str(request.task_name)), []
            settings[given][1].append(index)
        texts = [""] * len(requests)
        with progress("texts", len(requests), enabled=self._shows_progress) as reporter:
            num_done = 0
            for sampling, places in settings.values():
                prompts = [self._prompt(requests[place].args[0], sampling.max_new_tokens) for place in places]
                drawn = kept_texts(
                    self._engine,
                    prompts,
                    sampling,
                    self.kept,
                    on_progress=lambda done, before=num_done: reporter.update(before + done),
                )
                for place, text in zip(places, drawn, strict=True):
                    texts[place] = text
                num_done += len(places)
        self._engine.unload()
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _prompt(self, context: str, max_new_tokens: int) -> Prompt:
        ids = self.tok_encode(context) or [self.prefix_token_id]
        return Prompt("of the task", context, token_ids=tuple(ids[-(self.max_length - max_new_tokens) :]))

    def sampling_of(self, given: Mapping[str, Any], task: str) -> SamplingParams:
        """The settings of a task's generation for the engine.

        Raises:
            InputError: as of `generate_until`.
        """
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), DEFAULT_NEW_TOKENS))
        stops = handle_stop_sequences(wanted.pop("until"), None)
        num_tokens = wanted.pop("max_gen_toks")
        wanted.pop("temperature", None)  # 0 where none is given
        temperature = float(given.get("temperature", 1.0)) if wanted.pop("do_sample") else 0.0
        if num_tokens >= self.max_length:
            raise InputError(
                f"the task {task} draws {num_tokens} tokens, but the model's context holds {self.max_length}; set "
                "max_gen_toks in the task's generation_kwargs to less"
            )
        own = ("top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens")
        chosen = {name: wanted.pop(name) for name in own if wanted.get(name) is not None}
        unknown = {
            name: value
            for name, value in wanted.items()
            if value is not None and value is not False and value != _WITHOUT_EFFECT.get(name)
        }
        if unknown:
            raise InputError(
                f"the task {task} draws with {', '.join(f'{k}={v!r}' for k, v in unknown.items())}, which the engine "
                f"does not have; it has until, max_gen_toks, do_sample, temperature, {', '.join(own)}"
            )
        return SamplingParams(
            num_tokens,
            temperature=temperature,
            stop_strings=tuple(dict.fromkeys(stop for stop in stops if stop)),
            seed=self._seed,
            **chosen,
        )
