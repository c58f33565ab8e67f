"""Conversations of several turns: the same tokens whenever replies come, by whatever engine, and no token twice."""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
import torch
from integrity import prefilled

from tunesmith.base.core.trace import Trace, trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.dialogue import in_rounds
from tunesmith.engine.rollout.engine import Continuation, Dialogue
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.native_engine import NativeEngine

NUM, TURNS, MAX_TOKENS = 24, 4, 4 * 12 + 3 * 9
SAMPLING = SamplingParams(max_new_tokens=12, seed=5)


class Talk:
    """Replies with ids that depend on what was said alone, after `delay` seconds, and keeps every turn."""

    def __init__(self, starts: Sequence[tuple[int, ...]], delay: Callable[[], float] | None) -> None:
        self._delay = delay
        self.fronts = list(starts)
        self.turns: list[list[tuple[tuple[int, ...], Completion]]] = [[] for _ in starts]

    def __call__(self, index: int, turn: Completion) -> Future[Continuation | None]:
        self.turns[index].append((self.fronts[index], turn))
        reply: Future[Continuation | None] = Future()
        new = random.Random(sum(turn.token_ids)).choices(range(3, 259), k=1 + sum(turn.token_ids) % 9)
        self.fronts[index] += (*turn.token_ids, *new)
        is_last = len(self.turns[index]) == TURNS
        what = None if is_last else Continuation(self.fronts[index], 6 + len(new) % 7)
        if self._delay is None:
            reply.set_result(what)
        else:
            threading.Timer(self._delay(), reply.set_result, [what]).start()
        return reply

    @property
    def drawn(self) -> list[list[tuple[tuple[int, ...], tuple[float, ...]]]]:
        return [[(turn.token_ids, turn.raw_logps) for _, turn in turns] for turns in self.turns]


def starts(num: int = NUM) -> list[Prompt]:
    draw = random.Random(1)
    shared = draw.choices(range(3, 259), k=20)
    lengths = [draw.randrange(1, 50) for _ in range(num)]
    ids = [(shared + draw.choices(range(3, 259), k=length)) if length % 2 else shared for length in lengths]
    return [Prompt(str(index), "", token_ids=tuple(one)) for index, one in enumerate(ids)]


def talk_with(
    loaded: LoadedModel, delay: Callable[[], float] | None, num: int = NUM, **options: int
) -> tuple[Talk, Trace]:
    engine = open_engine(language_model(loaded.model, Kernels()), loaded.tokenizer, **options)  # type: ignore[arg-type]
    prompts = starts(num)
    talk = Talk([prompt.token_ids or () for prompt in prompts], delay)
    with trace() as record:
        engine.converse(prompts, SAMPLING, Dialogue(talk, MAX_TOKENS))
    return talk, record


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def at_once(loaded: LoadedModel) -> tuple[Talk, Trace]:
    return talk_with(loaded, None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{}, {"num_slots": 3}], ids=str)
def test_tokens_do_not_depend_on_when_replies_come(loaded, at_once, seed, options) -> None:
    draw = random.Random(seed)
    late, _ = talk_with(loaded, lambda: draw.choice((0.0, 0.0, 0.01, 0.05)), **options)
    assert late.drawn == at_once[0].drawn


def test_rounds_draw_the_same_tokens(loaded, at_once) -> None:
    engine = open_engine(language_model(loaded.model, Kernels()), loaded.tokenizer)
    assert isinstance(engine, NativeEngine)
    prompts = starts()
    talk = Talk([prompt.token_ids or () for prompt in prompts], None)
    in_rounds(
        lambda asked, own, keys: engine.generate(asked, 1, own, keys=keys),
        prompts,
        SAMPLING,
        Dialogue(talk, MAX_TOKENS),
    )
    assert talk.drawn == at_once[0].drawn


def test_no_token_is_computed_twice(at_once) -> None:
    talk, record = at_once
    first = [turns[0][0] for turns in talk.turns]
    # Of each further turn: the last sampled token, whose keys are not computed when it is drawn, and the reply.
    further = sum(
        len(new) - len(old) - len(turn.token_ids) + 1
        for turns in talk.turns
        for (old, turn), (new, _) in itertools.pairwise(turns)
    )
    assert prefilled(record) <= sum(map(len, first)) + further


def test_blocks_that_had_to_go_are_computed_again_with_the_same_bits(loaded) -> None:
    plenty, usual = talk_with(loaded, lambda: 0.002, 100)
    short, again = talk_with(loaded, lambda: 0.002, 100, kv_cache_mb=1)
    assert prefilled(again) > prefilled(usual)
    assert short.drawn == plenty.drawn


def test_log_probs_are_the_trainers(loaded, at_once) -> None:
    model = language_model(loaded.model, Kernels())
    for turns in at_once[0].turns[:6]:
        front, turn = turns[-1]
        ids = torch.tensor([[*front, *turn.token_ids]])
        with torch.no_grad():
            logps = token_logps(
                model, ids, torch.tensor([ids.shape[1]]), prompt_lengths_B=torch.tensor([len(front)])
            ).logp_BT
        assert tuple(logps[0].tolist()) == turn.raw_logps


def test_an_error_of_a_reply_ends_the_call_and_frees_all(loaded) -> None:
    engine = open_engine(language_model(loaded.model, Kernels()), loaded.tokenizer)
    assert isinstance(engine, NativeEngine)

    def fails(index: int, turn: Completion) -> Future[Continuation | None]:
        reply: Future[Continuation | None] = Future()
        reply.set_exception(ZeroDivisionError("in a tool"))
        return reply

    with pytest.raises(ZeroDivisionError, match="in a tool"):
        engine.converse(starts(), SAMPLING, Dialogue(fails, MAX_TOKENS))
    assert engine._cache is not None
    assert engine._cache.tables.num_free == engine._cache.tables.num_blocks
