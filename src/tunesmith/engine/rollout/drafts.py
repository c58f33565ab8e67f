"""Several tokens of a completion from one step: guesses from the text so far, kept as far as they are what is drawn.

A step of few rows takes its time to read the weights, so further rows cost next to nothing. The next tokens are guessed
where the last ones occurred before: in the prompt, in the completion, and in other completions of the prompt (Saxena
2023, prompt lookup decoding; Leviathan et al. 2023). The step computes the rows behind the guesses too. Each token is
drawn as ever, one after the other, from the row that belongs to it, with noise that is a function of its position. If
it is the guess, the next row is there already; otherwise the rows behind it are forgotten. So nothing but the time
depends on the guesses, as long as the bits of a row do not depend on the rows beside it.

Shape legend: R rows that tokens are sampled from, K guessed tokens, H hidden, V vocabulary.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from tunesmith.base.schema.weights import Weights
from tunesmith.engine.rollout.runner import Runner, StepOutput
from tunesmith.engine.rollout.scheduler import Plan
from tunesmith.engine.rollout.sequence import Sequence

MOST_RUNNING = 4
"""Completions that are drawn at a time, at most, for tokens to be guessed."""

_LONGEST_MATCH = 8
"""Tokens that are compared. Whether a guess is right depends on their number, so shares are counted for each."""

_PLACES = 16
"""Latest places of a token that are looked at."""

_FIRST_SHARES = (0.0, 0.15, 0.25, 0.35, 0.45, 0.55, 0.6, 0.65, 0.7)
"""Share of right guesses by the number of tokens that match, before any is known."""

_FIRST_WEIGHT = 4.0
"""Guesses that `_FIRST_SHARES` counts as."""

_KEPT = 0.96
"""Weight of what was counted before, with each new guess: the last 25 decide."""

_MOST_KEPT = 65536
"""Tokens of prompts and completions that a `Memory` has."""


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Rows of a step with guesses, at most: as many as the kernels multiply with one reading of the weights. A further
    row takes `cost` times as long as a step of one row.
    """

    most: int
    cost: float


def rows_for(weights: Weights, dtype: torch.dtype, *, has_experts: bool) -> RowLimits:
    """The limits for such weights. Costs are those of SmolLM2-135M on a Zen 4 core; they are constants, so that the
    order in which groups end does not depend on the machine's load.
    """
    most, cost = (5, 0.04) if weights == "int8" else (8 if dtype == torch.bfloat16 else 6, 0.08)
    return RowLimits(most, 0.4) if has_experts else RowLimits(most, cost)  # rows seldom have the same experts


_MARGIN = 1.5
"""A guess must be worth so many times what its row costs: chances and costs are estimates, and to take a row has a
price too."""


class _Places:
    """The places of each token in a prompt and its completions, and the share of right guesses from them."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._places: dict[int, list[tuple[list[int], int]]] = {}
        self._right = [_FIRST_WEIGHT * share for share in _FIRST_SHARES]
        self._count = [_FIRST_WEIGHT] * len(_FIRST_SHARES)

    def add(self, tokens: list[int], first: int) -> None:
        """Note the places from `first` on that another token follows. `tokens` grows with its completion."""
        self.num_tokens += len(tokens) - first
        for place in range(max(0, first - 1), len(tokens) - 1):
            places = self._places.setdefault(tokens[place], [])
            places.append((tokens, place))
            if len(places) > _PLACES:
                del places[0]

    def find(self, tokens: list[int]) -> tuple[int, list[int], int]:
        """Number of the last `tokens` that occurred before, at most 8, and where: a text and the place behind them."""
        longest, found, behind = 0, tokens, 0
        for text, place in reversed(self._places.get(tokens[-1], ())):
            length = 1
            while length < _LONGEST_MATCH and length <= place and length < len(tokens):
                if text[place - length] != tokens[-1 - length]:
                    break
                length += 1
            if length > longest:
                longest, found, behind = length, text, place + 1
                if length == _LONGEST_MATCH:
                    break
        return longest, found, behind

    def share(self, length: int) -> float:
        """Share of right guesses behind `length` equal tokens."""
        return self._right[length] / self._count[length]

    def judge(self, length: int, is_right: bool) -> None:
        """Count a guess behind `length` equal tokens."""
        self._right[length] = _KEPT * self._right[length] + is_right
        self._count[length] = _KEPT * self._count[length] + 1


class Memory:
    """Texts of the prompts that were drawn last, for other completions of them. Forget it when the weights change: what
    it holds decides when groups end, and a run that is resumed begins without one.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, ...], _Places] = OrderedDict()

    def places(self, prompt_ids: tuple[int, ...]) -> tuple[_Places, bool]:
        """The places of a prompt, and True if they have the prompt itself."""
        known = self._kept.pop(prompt_ids, None)
        self._kept[prompt_ids] = places = known or _Places()
        while len(self._kept) > 1 and sum(one.num_tokens for one in self._kept.values()) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return places, known is not None

    def forget(self) -> None:
        """Drop all."""
        self._kept.clear()


@dataclass(slots=True, eq=False)
class _Known:
    """A running completion: its `tokens`, those of the prompt included, and the guess of the next one,
    `text[behind]`, behind `length` equal tokens. `rows` are computed for the tokens `guessed`, from `used` on.
    """

    places: _Places
    tokens: list[int]
    length: int = 0
    text: list[int] = field(default_factory=list[int])
    behind: int = 0
    guessed: list[int] = field(default_factory=list[int])
    used: int = 0
    rows: StepOutput | None = None

    def follow(self, sequence: Sequence) -> None:
        """Take the tokens that were drawn, and guess the next one."""
        count = sequence.position - len(self.tokens)
        if count == 1 and self.length:
            self.places.judge(self.length, self.text[self.behind] == sequence.token_ids[-1])
        if count:
            first = len(self.tokens)
            self.tokens.extend(sequence.token_ids[-count:])
            self.places.add(self.tokens, first)
            self.look()

    def look(self) -> None:
        """Guess the next token."""
        self.length, self.text, self.behind = self.places.find(self.tokens)

    def chances(self, most: int) -> list[float]:
        """Probability that the first guess is right, that the first two are, and so on; `most` of them at most."""
        if not self.length:
            return []
        if self.text is not self.tokens:  # else the guesses continue the text that they are taken from
            most = min(most, len(self.text) - self.behind)
        chances: list[float] = []
        for index in range(most):
            share = self.places.share(min(self.length + index, _LONGEST_MATCH))
            chances.append(share * chances[-1] if chances else share)
        return chances

    def guess(self, count: int) -> list[int]:
        """The next `count` tokens."""
        guessed = self.text[self.behind : self.behind + count]
        while len(guessed) < count:  # a repetition: the text goes on with what was guessed
            guessed.append(guessed[len(guessed) - (len(self.tokens) - self.behind)])
        return guessed


class Drafts:
    """Guesses for one call, or one open batch."""

    def __init__(self, memory: Memory, limits: RowLimits) -> None:
        self._memory = memory
        self._limits = limits
        self._known: dict[Sequence, _Known] = {}
        self.passed: Plan | None = None
        """The last plan that the model computed."""
        self.num_guessed = self.num_right = 0

    def ready(self, sequences: list[Sequence]) -> list[Sequence]:
        """See `scheduler.Drafter`."""
        if not self._known or len(sequences) > MOST_RUNNING:
            return []
        return [one for one in sequences if (known := self._known.get(one)) and self._is_ready(known, one)]

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        """See `scheduler.Drafter`. As many guesses as make the expected tokens of a second the most."""
        for gone in self._known.keys() - set(sequences):
            self._known.pop(gone).follow(gone)
        if len(sequences) > MOST_RUNNING:
            return []
        most, row_cost = self._limits.most - len(sequences), self._limits.cost
        chances: list[tuple[float, int]] = []
        for index, sequence in enumerate(sequences):
            known = self._known_of(sequence)
            chances += [(chance, index) for chance in known.chances(min(most, sequence.num_left - 1))]
        counts = [0] * len(sequences)
        expected, cost = float(len(sequences)), 1 + row_cost * (len(sequences) - 1)
        for chance, index in sorted(chances, reverse=True)[:most]:
            if chance * cost <= _MARGIN * row_cost * expected:
                break
            counts[index] += 1
            expected, cost = expected + chance, cost + row_cost
        if not any(counts):
            return []
        return [self._known[one].guess(count) for one, count in zip(sequences, counts, strict=True)]

    def run(self, runner: Runner, plan: Plan, storage: torch.Tensor, block_tables: torch.Tensor) -> StepOutput:
        """The rows that `plan.drawn` are sampled from: computed now, or by an earlier step."""
        if plan.is_computed:
            return self._taken(plan.sequences)
        self.passed = plan
        output = runner.run(plan, storage, block_tables)
        return self._first_rows(plan, output) if plan.drafts else output

    def _known_of(self, sequence: Sequence) -> _Known:
        known = self._known.get(sequence)
        if known is None:
            places, has_prompt = self._memory.places(sequence.prompt_ids)
            tokens = [*sequence.prompt_ids, *sequence.token_ids]
            known = self._known[sequence] = _Known(places, tokens)
            places.add(tokens, len(sequence.prompt_ids) if has_prompt else 0)
            known.look()
        else:
            known.follow(sequence)
        known.rows = None
        return known

    def _is_ready(self, known: _Known, sequence: Sequence) -> bool:
        """True if the last token is the guess behind which a row is left."""
        if known.rows is None:
            return False
        known.follow(sequence)
        if known.guessed[known.used] != known.tokens[-1]:
            known.rows = None
            return False
        known.used += 1
        self.num_right += 1
        return True

    def _first_rows(self, plan: Plan, output: StepOutput) -> StepOutput:
        """Those of `plan.drawn`; the rows of guesses are kept."""
        rows, row = list[int](), 0
        for sequence, guessed in zip(plan.sequences, plan.drafts, strict=True):
            rows.append(row)
            if guessed:
                known, end = self._known[sequence], row + 1 + len(guessed)
                known.guessed, known.used = guessed, 0
                known.rows = StepOutput(output.hidden_RH[row + 1 : end], output.logits_RV[row + 1 : end])
                self.num_guessed += len(guessed)
            row += 1 + len(guessed)
        return StepOutput(output.hidden_RH[rows], output.logits_RV[rows])

    def _taken(self, sequences: list[Sequence]) -> StepOutput:
        """The rows behind the guesses that were right."""
        hidden, logits = list[torch.Tensor](), list[torch.Tensor]()
        for sequence in sequences:
            known = self._known[sequence]
            assert known.rows is not None
            hidden.append(known.rows.hidden_RH[known.used - 1])
            logits.append(known.rows.logits_RV[known.used - 1])
            if known.used == len(known.guessed):
                known.rows = None
        if len(logits) == 1:
            return StepOutput(hidden[0][None], logits[0][None])
        return StepOutput(torch.stack(hidden), torch.stack(logits))
