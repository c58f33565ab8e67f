"""Requests that come and go: each has the completions that it has by itself, and leaves nothing behind."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from tunesmith.base.core.errors import ContextFullError, InputError, TunesmithError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.native_engine import NativeEngine
from tunesmith.engine.rollout.open_batch import Ask, ContinuousBatch, OneByOne, OpenBatch, Piece, open_batch

VOCABULARY = 259
SETTINGS = (
    SamplingParams(max_new_tokens=20, seed=1),
    SamplingParams(max_new_tokens=9, temperature=0.0),
    SamplingParams(max_new_tokens=30, temperature=0.7, top_k=20, top_p=0.9, seed=2),
    SamplingParams(max_new_tokens=25, repetition_penalty=1.3, min_p=0.01, seed=3),
    SamplingParams(max_new_tokens=25, min_new_tokens=4, logit_bias={65: 9.0}, stop_strings=("AA", "qz"), seed=4),
)


@dataclass(slots=True)
class Client:
    """What a request was handed."""

    prompt: Prompt
    n: int
    sampling: SamplingParams
    pieces: list[Piece] = field(default_factory=list[Piece])
    errors: list[TunesmithError] = field(default_factory=list[TunesmithError])
    is_stopped: bool = False

    def ask(self, **more: float) -> Ask:
        return Ask(
            prompt=self.prompt,
            n=self.n,
            sampling=self.sampling,
            on_piece=self.pieces.append,
            on_error=self.errors.append,
            is_stopped=lambda: self.is_stopped,
            **more,  # type: ignore[arg-type]
        )

    @property
    def completions(self) -> list[Completion]:
        ended = {piece.sample: piece.completion for piece in self.pieces if piece.completion is not None}
        return [ended[sample] for sample in sorted(ended)]

    def text(self, sample: int) -> str:
        return "".join(piece.text for piece in self.pieces if piece.sample == sample)


def engine_of(loaded: LoadedModel, **options: int) -> NativeEngine:
    engine = open_engine(language_model(loaded.model, Kernels()), loaded.tokenizer, **options)  # type: ignore[arg-type]
    assert isinstance(engine, NativeEngine)
    return engine


def continuous(engine: NativeEngine, num_slots: int = 8, kv_cache_mb: int | None = None) -> ContinuousBatch:
    batch = open_batch(engine, num_slots=num_slots, kv_cache_mb=kv_cache_mb)
    assert isinstance(batch, ContinuousBatch)
    return batch


def prompts(num: int) -> list[Prompt]:
    draw = random.Random(1)
    shared = tuple(draw.choices(range(3, VOCABULARY), k=20))
    rests = [tuple(draw.choices(range(3, VOCABULARY), k=draw.randrange(1, 40))) for _ in range(num)]
    return [Prompt(str(index), "", token_ids=(shared if index % 2 else ()) + rest) for index, rest in enumerate(rests)]


def ids(length: int, seed: int = 0) -> Prompt:
    return Prompt("long", "", token_ids=tuple(random.Random(seed).choices(range(3, VOCABULARY), k=length)))


def drain(batch: OpenBatch) -> None:
    while batch.step():
        pass


def num_free(batch: ContinuousBatch) -> int:
    return batch._cache.tables.num_free


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model("llama", dtype=torch.float32)


@pytest.mark.parametrize("num_slots", [2, 8])
def test_a_request_has_the_completions_that_it_has_alone(loaded: LoadedModel, num_slots: int) -> None:
    batch, alone = continuous(engine_of(loaded), num_slots), engine_of(loaded)
    clients = [Client(prompt, 1 + i % 3, SETTINGS[i % 5]) for i, prompt in enumerate(prompts(15))]
    for place, client in enumerate(clients):  # they come while others are drawn
        batch.add(client.ask())
        for _ in range(place % 4):
            batch.step()
    drain(batch)
    for client in clients:
        (group,) = alone.generate([client.prompt], client.n, client.sampling)
        assert client.completions == list(group.completions)
        assert [client.text(sample) for sample in range(client.n)] == [one.text for one in group.completions]
        for sample, one in enumerate(group.completions):
            drawn = [token for piece in client.pieces if piece.sample == sample for token in piece.token_ids]
            assert drawn == list(one.token_ids)
    assert not batch.step()
    assert num_free(batch) == batch._cache.tables.num_blocks


def test_the_next_turn_of_a_chat_computes_its_new_tokens_alone(loaded: LoadedModel) -> None:
    batch = continuous(engine_of(loaded))
    first = Client(ids(50), 1, SamplingParams(max_new_tokens=40, min_new_tokens=40, seed=7))
    batch.add(first.ask())
    drain(batch)
    before = batch._scheduler.usage.prefill_tokens
    assert before == 50
    said = (*(first.prompt.token_ids or ()), *first.completions[0].token_ids)
    second = Client(Prompt("2", "", token_ids=(*said, 70, 71, 72)), 1, SamplingParams(max_new_tokens=12, seed=8))
    batch.add(second.ask())
    drain(batch)
    # Whole blocks of 16 are kept: 80 of the 89 tokens that were computed.
    assert batch._scheduler.usage.prefill_tokens - before == 93 - 80
    (group,) = engine_of(loaded).generate([second.prompt], 1, second.sampling)
    assert second.completions == list(group.completions)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 9])
def test_whoever_goes_leaves_no_block_behind_and_disturbs_nobody(
    loaded: LoadedModel, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.engine.rollout.open_batch._PREFILL_TOKENS", 50)
    batch, alone = continuous(engine_of(loaded), num_slots=3), engine_of(loaded)
    long = ids(210)  # computed in several steps, and shared
    going = [Client(long, 4, SETTINGS[0]), Client(prompts(3)[1], 2, SETTINGS[2]), Client(long, 1, SETTINGS[2])]
    staying = [Client(long, 1, SETTINGS[3]), Client(prompts(3)[2], 2, SETTINGS[0])]
    for one in (going[0], staying[0], going[1], going[2], staying[1]):
        batch.add(one.ask())
    for _ in range(num_steps):
        batch.step()
    seen = []
    for one in going:
        one.is_stopped = True
        seen.append(len(one.pieces))
    drain(batch)
    assert [len(one.pieces) for one in going] == seen
    for client in staying:
        (group,) = alone.generate([client.prompt], client.n, client.sampling)
        assert client.completions == list(group.completions)
    assert num_free(batch) == batch._cache.tables.num_blocks
    assert not batch._open and not batch._sampling


def reference_logits(loaded: LoadedModel, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return loaded.model(torch.tensor([list(token_ids)])).logits[0, -1].double()


def test_penalties_are_openais(loaded: LoadedModel) -> None:
    batch = continuous(engine_of(loaded))
    sampling = SamplingParams(max_new_tokens=30, min_new_tokens=30, temperature=0.0)
    plain, both = (Client(prompts(1)[0], 1, sampling) for _ in range(2))
    batch.add(plain.ask())
    batch.add(both.ask(presence_penalty=0.6, frequency_penalty=0.4))
    drain(batch)
    assert plain.completions[0].token_ids != both.completions[0].token_ids
    ended = both.completions[0].token_ids
    stops = batch._engine.request([both.prompt], 1, sampling).limits.stop_ids
    for place, token in enumerate(ended):
        logits = reference_logits(loaded, (*(both.prompt.token_ids or ()), *ended[:place]))
        for earlier in set(ended[:place]):
            logits[earlier] -= 0.6 + 0.4 * ended[:place].count(earlier)
        logits[list(stops)] = float("-inf")
        assert logits[token] >= logits.max() - 1e-4


def test_scores_are_those_of_the_model_at_temperature_1(loaded: LoadedModel) -> None:
    batch = continuous(engine_of(loaded))
    client = Client(prompts(1)[0], 2, SamplingParams(max_new_tokens=8, temperature=0.3, seed=3))
    batch.add(client.ask(num_top=4))
    drain(batch)
    for sample, completion in enumerate(client.completions):
        scores = [score for piece in client.pieces if piece.sample == sample for score in piece.scores]
        assert [score.token_id for score in scores] == list(completion.token_ids)
        for place, score in enumerate(scores):
            front = (*(client.prompt.token_ids or ()), *completion.token_ids[:place])
            expected = torch.log_softmax(reference_logits(loaded, front), -1)
            assert score.logp == pytest.approx(float(expected[score.token_id]), abs=1e-4)
            assert [token for token, _ in score.top] == torch.topk(expected, 4).indices.tolist()
            assert [logp for _, logp in score.top] == pytest.approx(torch.topk(expected, 4).values.tolist(), abs=1e-4)


def test_what_cannot_be_served_is_refused_and_what_breaks_ends_with_an_error(loaded: LoadedModel) -> None:
    batch = continuous(engine_of(loaded), kv_cache_mb=1)
    capacity = 16 * (batch._cache.tables.num_blocks - 1)
    context = loaded.model.config.max_position_embeddings
    with pytest.raises(ContextFullError):
        batch.add(Client(ids(10), 1, SamplingParams(max_new_tokens=max(capacity, context))).ask())
    with pytest.raises(InputError, match="0 to 20"):
        batch.add(Client(ids(10), 1, SETTINGS[0]).ask(num_top=21))
    (stop,) = batch._engine.request([ids(3)], 1, SETTINGS[0]).limits.stop_ids
    others = [token for token in range(VOCABULARY) if token != stop]
    forbidding = SamplingParams(min_new_tokens=1, logit_bias=dict.fromkeys(others, float("-inf")))
    broken, (beside, after) = Client(ids(10), 1, forbidding), (Client(ids(11 + i), 1, SETTINGS[0]) for i in (0, 1))
    batch.add(broken.ask())
    batch.add(beside.ask())
    drain(batch)
    assert broken.errors and beside.errors and not broken.completions
    batch.add(after.ask())
    drain(batch)
    assert not after.errors and after.completions
    assert num_free(batch) == batch._cache.tables.num_blocks


def test_other_engines_draw_one_request_after_the_other(loaded: LoadedModel) -> None:
    engine = open_engine(loaded.model, loaded.tokenizer, backend="transformers")
    batch = open_batch(engine)
    assert isinstance(batch, OneByOne)
    with pytest.raises(InputError, match="transformers"):
        batch.add(Client(ids(3), 1, SETTINGS[0]).ask(num_top=1))
    clients = [Client(prompt, 2, replace(SETTINGS[0], seed=place)) for place, prompt in enumerate(prompts(3))]
    clients.append(Client(ids(3), 1, replace(SETTINGS[0], max_new_tokens=100_000)))
    for one in clients:
        batch.add(one.ask())
    clients[1].is_stopped = True
    drain(batch)
    assert not clients[1].pieces
    assert isinstance(clients[3].errors[0], ContextFullError)
    for client in (clients[0], clients[2]):
        assert [client.text(sample) for sample in (0, 1)] == [one.text for one in client.completions]
        assert len(client.completions) == 2
