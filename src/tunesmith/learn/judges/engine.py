"""A judge that our own engine draws from: any model that Tunesmith loads, such as a run folder."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tunesmith.base.config.judge import JudgeSettings
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, SamplingParams
from tunesmith.engine.models.fingerprint import fingerprint
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import context_length
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase, encode_prompt
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.learn.judges.asking import RefusedError, Reply
from tunesmith.learn.judges.rubric import Question

_OPTIONS = ("top_p", "top_k", "min_p", "repetition_penalty", "logit_bias")
_AMONG = 1000.0
"""Added to the logits of the tokens that a verdict may be."""

_LABEL_OPENING = "\n\nVerdict:"
"""What a model without a chat template goes on from."""


class EngineAsker:
    """Draws a judge's answers here, from the model that `settings.model` names."""

    batch_size = 32
    num_threads = 1
    can_wait = False

    def __init__(self, settings: JudgeSettings) -> None:
        if unknown := sorted(set(settings.options) - {*_OPTIONS}):
            raise InputError(
                f"the judge's `options` have {', '.join(unknown)}, which our own engine does not know; there are "
                f"{', '.join(_OPTIONS)}"
            )
        loaded = load_policy(ModelSection(name=settings.model))
        known = language_model(loaded.model)
        self._settings = settings
        self._tokenizer = loaded.tokenizer
        self._engine = open_engine(known, loaded.tokenizer)
        self._context = context_length(loaded.model)
        self.name = settings.model
        weights = fingerprint(known.module, kernels=known.kernels)
        template = str(loaded.tokenizer.chat_template)
        named = f"{weights.digest(list(weights.tensors))} {template}"
        self.identity = hashlib.sha256(named.encode("utf-8", "surrogatepass")).hexdigest()
        if not settings.explain and settings.mode == "graded":
            self._among(tuple(map(str, range(settings.scale[0], settings.scale[1] + 1))))

    def most_tokens(self, question: Question) -> int:
        """The tokens of the question, and those that an answer may have. Raises RefusedError if the context, if it is
        known, cannot hold them.
        """
        num = len(encode_prompt(self._tokenizer, self._prompt(question))) + self._num_new
        if self._context is not None and num > self._context:
            raise RefusedError(
                f"{num} tokens of question and answer are beyond the context of {self.name}, {self._context}"
            )
        return num

    def ask(self, questions: Sequence[Question], seed: int) -> list[Reply]:
        """The replies to questions of one kind."""
        prompts = [self._prompt(question) for question in questions]
        groups = self._engine.generate(prompts, 1, self._sampling(questions[0].labels, seed))
        return [_reply(group.prompt_token_ids, group.completions[0]) for group in groups]

    def abort(self) -> None:
        """Do nothing: a draw ends with its batch."""

    @property
    def _num_new(self) -> int:
        return self._settings.answer_tokens if self._settings.explain else 1

    def _prompt(self, question: Question) -> Prompt:
        if self._tokenizer.chat_template:
            return Prompt("judge", question.messages)
        (message,) = question.messages
        return Prompt("judge", f"{message['content']}{_LABEL_OPENING}")

    def _sampling(self, labels: Sequence[str], seed: int) -> SamplingParams:
        options: dict[str, Any] = dict(self._settings.options)
        given = cast(Mapping[str, float], options.pop("logit_bias", {}))
        bias = {int(token): float(value) for token, value in given.items()}
        if not self._settings.explain:
            for token in self._among(labels):
                bias[token] = bias.get(token, 0.0) + _AMONG
        return SamplingParams(
            max_new_tokens=self._num_new,
            temperature=self._settings.temperature or 0.0,
            seed=seed,
            logit_bias=bias,
            **options,
        )

    def _among(self, labels: Sequence[str]) -> list[int]:
        """The tokens that are one of `labels`, with and without a space before. Raises InputError for a label that is
        no single token.
        """
        found: list[int] = []
        for label in labels:
            ids = [_ids(self._tokenizer, text) for text in (label, f" {label}")]
            single = [one[0] for one in ids if len(one) == 1]
            if not single:
                raise InputError(
                    f"{self.name} writes the verdict {label} with several tokens, so it cannot be drawn alone; set "
                    "`explain: true`, or a `scale` within 0 to 9"
                )
            found += single
        return list(dict.fromkeys(found))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _reply(prompt_ids: Sequence[int], drawn: Completion) -> Reply:
    return Reply(drawn.text.encode("utf-8", "replace").decode(), len(prompt_ids) + len(drawn.token_ids))
