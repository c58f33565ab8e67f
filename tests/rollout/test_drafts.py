"""Guessed tokens: whatever is guessed, nothing but the number of steps depends on it."""

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tunesmith.base.config.schema import RECIPES
from tunesmith.base.config.sections import TINY_FAMILIES, LoraSection
from tunesmith.base.core.errors import TrainingError
from tunesmith.base.core.trace import span, trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
from tunesmith.engine.kernels.linear.exact import is_by_onednn
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.lora import AdapterBase, add_adapters
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout import native_engine
from tunesmith.engine.rollout.drafts import MOST_RUNNING, Memory, RowLimits, rows_for
from tunesmith.engine.rollout.engine import Continuation, Dialogue
from tunesmith.engine.rollout.factory import open_engine, own_backend
from tunesmith.engine.rollout.native_engine import Native, NativeEngine
from tunesmith.engine.rollout.open_batch import Ask, ContinuousBatch, Piece, open_batch

has_onednn = is_by_onednn(torch.ones(2, 2), torch.ones(2, 2))
needs_onednn = pytest.mark.skipif(not has_onednn, reason="torch has no oneDNN here, so nothing is exact in float32")
NATIVE_FAMILIES = tuple(family for family in TINY_FAMILIES if family != "exaone4")  # which transformers draws
FEW = {65: 9.0, 66: 8.5, 67: 8.0, 130: 8.0}
"""A bias that leaves few tokens likely, so that guesses are right now and then."""
SETTINGS = (
    SamplingParams(max_new_tokens=40, temperature=0.0),
    SamplingParams(max_new_tokens=30, temperature=0.7, top_k=20, top_p=0.9, logit_bias=FEW, seed=2),
    SamplingParams(max_new_tokens=30, repetition_penalty=1.3, min_p=0.01, logit_bias=FEW, seed=3),
    SamplingParams(max_new_tokens=30, min_new_tokens=9, logit_bias=FEW, stop_strings=("ACA", "BBA"), seed=4),
    SamplingParams(max_new_tokens=30, min_new_tokens=3, logit_bias=FEW, stop_token_ids=(67,), seed=5),
)


class Head(nn.Module):
    """A value head: one number of each row."""

    def forward(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return hidden_RH.float().sin().sum(-1)


def engine_of(loaded: LoadedModel, **options: Any) -> NativeEngine:
    engine = NativeEngine(language_model(loaded.model, Kernels()), loaded.tokenizer, **options)
    assert engine.has_drafts
    return engine


def prompts(num: int, seed: int = 0) -> list[Prompt]:
    """Prompts of 1 to 60 tokens that repeat themselves."""
    draw = random.Random(seed)
    words = [draw.choices(range(3, 259), k=draw.randrange(1, 7)) for _ in range(4)]
    texts = [list(itertools.chain(*draw.choices(words, k=draw.randrange(1, 12)))) for _ in range(num)]
    return [Prompt(str(index), "", token_ids=tuple(text)) for index, text in enumerate(texts)]


def both(engine: NativeEngine, asked: Sequence[Prompt], n: int, sampling: SamplingParams) -> tuple[list[Group], int]:
    """The groups, which are the same with guesses and without, and the number of right guesses."""
    engine.has_drafts = False
    plain = engine.generate(asked, n, sampling)
    assert engine.drafts is None
    engine.has_drafts = True
    drafted = engine.generate(asked, n, sampling)
    assert drafted == plain
    assert engine.drafts is not None
    assert engine.drafts.num_right <= engine.drafts.num_guessed
    return drafted, engine.drafts.num_right


def cases() -> list[Any]:
    """Each family in float32, and some otherwise; the rest nightly."""
    often = ("llama", "gemma3", "qwen3", "gpt2", "gpt_oss", "mixtral")
    return [
        pytest.param(family, weights, marks=() if weights == "float32" or family in often else pytest.mark.nightly)
        for family in NATIVE_FAMILIES
        for weights in ("float32", "bfloat16", "int8")
    ]


@needs_onednn
@pytest.mark.parametrize(("family", "weights"), cases())
def test_everything_that_is_recorded_is_the_same(family: str, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model(family, dtype=torch.bfloat16 if weights == "bfloat16" else torch.float32)
    loaded.model.config._experts_implementation = "eager"
    if weights == "bfloat16" and language_model(loaded.model, Kernels()).decoder is None:
        pytest.skip("transformers draws this random model in bfloat16")
    engine = engine_of(loaded, settings=Native("int8" if weights == "int8" else "model"), value_head=Head())
    if weights == "bfloat16" and not engine.is_exact:
        pytest.skip("no instructions for bfloat16 here")
    monkeypatch.setattr(native_engine, "rows_for", lambda *_, **__: RowLimits(most=8, cost=0.001))  # guess a lot
    num_guessed = num_right = 0
    for number, sampling in enumerate(SETTINGS):
        num_right += both(engine, prompts(1 + number % 2, number), 1 + number % 2, sampling)[1]
        assert engine.drafts is not None
        num_guessed += engine.drafts.num_guessed
    assert 0 < num_right < num_guessed


@needs_onednn
def test_many_seeds() -> None:
    engine, num_right, reasons = engine_of(tiny_model("gemma3")), 0, set[str]()
    for seed in range(60):
        sampling = replace(SETTINGS[1 + seed % 4], seed=seed)
        groups, right = both(engine, prompts(1 + seed % 3, seed), 1 + seed % 2, sampling)
        num_right += right
        reasons |= {one.finish_reason for group in groups for one in group.completions}
    assert num_right > 300
    assert reasons == {"stop", "length"}


@needs_onednn
@pytest.mark.parametrize("weights", ["model", "int8"])
def test_adapters(weights: Any) -> None:
    loaded = tiny_model("llama")
    add_adapters(loaded.model, LoraSection(rank=4), AdapterBase("tiny:llama"))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if ".lora_" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    engine = engine_of(loaded, settings=Native(weights))
    assert sum(both(engine, prompts(2, seed), 2, sampling)[1] for seed, sampling in enumerate(SETTINGS)) > 20


@needs_onednn
def test_fewer_steps_and_as_many_tokens() -> None:
    engine, steps = engine_of(tiny_model("gemma3")), dict[bool, float]()
    for engine.has_drafts in (False, True):
        with trace() as work, span("draw"):
            (group,) = engine.generate(prompts(1), 1, SETTINGS[0])
        steps[engine.has_drafts] = work.sums["draw/decode_steps"]
        assert work.sums["draw/slots_used"] == pytest.approx(work.out_of["draw/slots_used"])
    assert steps[False] == len(group.completions[0].token_ids) - 1
    assert steps[True] < 0.7 * steps[False]


@needs_onednn
def test_the_cache_is_neither_overrun_nor_kept() -> None:
    engine = engine_of(tiny_model("llama"), kv_cache_mb=1, num_slots=3)
    for seed in range(10):
        both(engine, prompts(5, seed), 3, replace(SETTINGS[1], max_new_tokens=100, seed=seed))
    assert engine._cache is not None
    assert engine._cache.tables.num_free == engine._cache.tables.num_blocks


@needs_onednn
def test_text_and_progress_come_as_without() -> None:
    engine, heard = engine_of(tiny_model("llama")), list[list[Any]]()

    def hear() -> None:
        said: list[Any] = []
        heard.append(said)
        engine.generate(
            prompts(1),
            1,
            SETTINGS[3],
            on_text=lambda *piece: said.append(piece),
            on_progress=lambda *numbers: said.append(numbers),
            on_group=lambda index, group: said.append((index, group)),
        )

    for engine.has_drafts in (False, True):
        hear()
    assert heard[0] == heard[1]
    assert len(heard[0]) > 3


@needs_onednn
def test_conversations() -> None:
    engine, said = engine_of(tiny_model("llama")), list[list[tuple[int, Completion]]]()
    asked = prompts(3, 7)

    def converse() -> None:
        turns: list[tuple[int, Completion]] = []
        fronts = [prompt.token_ids or () for prompt in asked]

        def on_turn(index: int, turn: Completion) -> Future[Continuation | None]:
            turns.append((index, turn))
            fronts[index] += (*turn.token_ids, 70, 71, 65)
            reply: Future[Continuation | None] = Future()
            num_turns = sum(one == index for one, _ in turns)
            reply.set_result(None if num_turns == 3 else Continuation(fronts[index], 20))
            return reply

        engine.converse(asked, replace(SETTINGS[1], max_new_tokens=20), Dialogue(on_turn, max_tokens=90))
        said.append(sorted(turns, key=lambda one: one[0]))

    for engine.has_drafts in (False, True):
        converse()
    assert said[0] == said[1]
    assert engine.drafts is not None
    assert engine.drafts.num_right > 5


class Client:
    """What a request of an open batch was handed, and when it goes away."""

    def __init__(self, prompt: Prompt, sampling: SamplingParams, stops_after: int, **more: Any) -> None:
        self.pieces: list[Piece] = []
        self.ask = Ask(
            prompt=prompt,
            n=2,
            sampling=sampling,
            on_piece=self.pieces.append,
            on_error=lambda error: pytest.fail(str(error)),
            is_stopped=lambda: len(self.pieces) >= stops_after,
            **more,
        )

    def of(self, sample: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.sample == sample]


def served(engine: NativeEngine, *, drafts: bool) -> tuple[list[Client], ContinuousBatch]:
    """Requests that come one after the other, some of which go away."""
    engine.has_drafts = drafts
    batch = open_batch(engine, num_slots=4, kv_cache_mb=4)
    assert isinstance(batch, ContinuousBatch)
    clients = [
        Client(
            prompt,
            SETTINGS[index % len(SETTINGS)],
            stops_after=11 if index % 3 == 2 else 1000,
            num_top=index % 4,
            presence_penalty=0.5 * (index % 2),
            frequency_penalty=0.2 * (index % 3),
        )
        for index, prompt in enumerate(prompts(12, 3))
    ]
    for client in clients:
        batch.add(client.ask)
        for _ in range(15):
            batch.step()
    while batch.step():
        pass
    return clients, batch


@needs_onednn
@pytest.mark.parametrize("weights", ["model", "int8"])
def test_requests_of_a_server(weights: Any) -> None:
    engine = engine_of(tiny_model("llama"), settings=Native(weights))
    (plain, _), (drafted, batch) = (served(engine, drafts=drafts) for drafts in (False, True))
    for one, other in zip(plain, drafted, strict=True):
        for sample in range(2):
            pieces, expected = other.of(sample), one.of(sample)
            count = min(len(pieces), len(expected))  # of one that goes away, either side may have drawn more
            assert pieces[:count] == expected[:count]
            assert other.ask.is_stopped() or count == len(pieces) == len(expected)
    assert batch._drafts is not None
    assert batch._drafts.num_right > 20
    assert batch._cache.tables.num_free == batch._cache.tables.num_blocks


@needs_onednn
def test_what_the_server_remembers_is_what_was_drawn() -> None:
    engine, (prompt,) = engine_of(tiny_model("llama")), prompts(1, 5)
    batch = open_batch(engine, num_slots=2, kv_cache_mb=4)
    first = Client(prompt, SETTINGS[1], stops_after=1000)
    batch.add(first.ask)
    while batch.step():
        pass
    said = first.of(0)[-1].completion
    assert said is not None
    following = replace(prompt, token_ids=((prompt.token_ids or ()) + said.token_ids + (65, 70)))
    second = Client(following, SETTINGS[1], stops_after=1000)
    batch.add(second.ask)
    while batch.step():
        pass
    plain = engine_of(tiny_model("llama"))
    plain.has_drafts = False
    (group,) = plain.generate([following], 2, SETTINGS[1])
    assert [second.of(sample)[-1].completion for sample in range(2)] == list(group.completions)


@needs_onednn
def test_only_few_completions_are_guessed_and_only_where_bits_allow_it() -> None:
    engine = engine_of(tiny_model("gemma3"))
    sampling = replace(SETTINGS[0], min_new_tokens=40)
    engine.generate(prompts(MOST_RUNNING + 1, 1), 1, sampling)
    assert engine.drafts is not None
    assert engine.drafts.num_guessed == 0
    engine.generate(prompts(MOST_RUNNING, 1), 1, sampling)
    assert engine.drafts.num_guessed > 0
    double = engine_of(tiny_model("gemma3", dtype=torch.float64))
    double.generate(prompts(1), 1, sampling)
    assert double.drafts is None


@needs_onednn
def test_where_nothing_is_right_little_is_guessed() -> None:
    engine = engine_of(tiny_model("llama"))
    sampling = SamplingParams(max_new_tokens=200, min_new_tokens=200, temperature=2.0, seed=0)
    _, num_right = both(engine, prompts(1), 1, sampling)
    assert engine.drafts is not None
    assert num_right <= engine.drafts.num_guessed < 40


@needs_onednn
def test_another_answer_is_guessed_from_the_first_until_the_weights_change() -> None:
    loaded = tiny_model("llama")
    engine, (prompt,) = engine_of(loaded), prompts(1, 2)
    sampling = SamplingParams(max_new_tokens=40, temperature=0.0, logit_bias={65: 1.0})
    both(engine, [prompt], 1, sampling)
    _, again = both(engine, [prompt], 1, sampling)
    assert again >= 25
    assert engine.memory.places(prompt.token_ids or ())[1]
    with torch.no_grad():
        next(loaded.model.parameters()).mul_(1.01)
    engine.generate(prompts(1, 3), 1, sampling)
    assert not engine.memory.places(prompt.token_ids or ())[1]


@needs_onednn
def test_damaged_weights_are_named_behind_a_right_guess() -> None:
    """A row that was computed for a guess is not finite: the layer is found in the step that computed it."""
    loaded = tiny_model("gemma3")
    engine, (prompt,) = engine_of(loaded), prompts(1)
    (group,) = engine.generate([prompt], 1, SETTINGS[0])
    assert engine.drafts is not None
    run, embedding = engine.drafts.run, loaded.model.get_input_embeddings().weight
    taken: list[int] = []

    def damage(runner: Any, plan: Any, *given: Any) -> Any:
        output = run(runner, plan, *given)
        if plan.is_computed and not taken:
            taken.append(1)
            with torch.no_grad():
                embedding.fill_(float("nan"))  # type: ignore[operator]
            output.logits_RV.fill_(float("nan"))
        return output

    engine.drafts.run = damage  # type: ignore[method-assign]
    engine.open_drafts = lambda: engine.drafts  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="not finite from"):
        engine.generate([prompt], 1, SETTINGS[0])
    assert taken
    assert group.completions


def test_a_repetition_is_guessed_beyond_its_end() -> None:
    places, has_prompt = Memory().places((5, 6))
    assert not has_prompt
    tokens = [5, 6, 7, 8, 6, 7]
    places.add(tokens, 0)
    assert places.find(tokens) == (2, tokens, 3)
    tokens += [8, 6, 7, 8, 6]
    places.add(tokens, 6)
    length, text, behind = places.find(tokens)
    assert (length, text[behind:]) == (7, [7, 8, 6])
    assert places.find([1, 2, 3])[0] == 0


def test_old_texts_make_room() -> None:
    memory = Memory()
    for number in range(3):
        places, _ = memory.places((number,))
        places.add([number] * 30_000, 0)
    assert [memory.places((number,))[1] for number in (2, 1, 0)] == [True, True, False]


def test_rows_that_are_cheap() -> None:
    assert rows_for("int8", torch.float32, has_experts=False).most == 5
    assert rows_for("model", torch.bfloat16, has_experts=False).most == 8
    assert rows_for("model", torch.bfloat16, has_experts=True).cost == 0.4


def test_a_recipe_turns_it_off() -> None:
    recipe = RECIPES["grpo"].model_validate({"rollout": {"drafts": False}})
    loaded = tiny_model("llama")
    backend = own_backend(recipe.rollout)  # type: ignore[attr-defined]
    assert backend == Native("model", drafts=False)
    engine = open_engine(loaded.model, loaded.tokenizer, backend=backend)
    assert isinstance(engine, NativeEngine)
    engine.generate(prompts(1), 1, SETTINGS[0])
    assert engine.drafts is None
