"""What people ask of generation: stop strings of every kind."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest

from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.device.engine import DeviceEngine
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.workers.engine import Workers

START, A, B = "<|im_start|>", "a", "b"
LOADED = tiny_model("llama")
IDS = {1: START, **{LOADED.tokenizer(letter)["input_ids"][0]: letter for letter in (A, B)}}
"""The tokens that may be drawn, and their texts."""

PROMPTS = [Prompt("one", "One"), Prompt("two", "Another")]


def native() -> Iterator[Engine]:
    yield open_engine(LOADED.model, LOADED.tokenizer)


def transformers() -> Iterator[Engine]:
    yield open_engine(LOADED.model, LOADED.tokenizer, backend="transformers")


def device() -> Iterator[Engine]:
    yield DeviceEngine(language_model(LOADED.model, Kernels()), LOADED.tokenizer)


def workers() -> Iterator[Engine]:
    engine = open_engine(LOADED.model, LOADED.tokenizer, backend=Workers(1))
    yield engine
    engine.unload()


@pytest.fixture(scope="module", params=[native, transformers, device, workers])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One engine after another."""
    yield from request.param()


def draw(engine: Engine, stops: Sequence[str] = (), min_new_tokens: int = 0) -> tuple[list[Completion], list[str]]:
    """Completions of the tokens in `IDS`, and their texts as they were streamed."""
    streamed: dict[tuple[int, int], str] = defaultdict(str)

    def take(prompt: int, sample: int, text: str) -> None:
        streamed[prompt, sample] += text

    bias = {token: -100.0 for token in range(259) if token not in IDS}
    sampling = SamplingParams(
        max_new_tokens=24,
        min_new_tokens=min_new_tokens,
        temperature=2.0,
        logit_bias=bias,
        stop_strings=tuple(stops),
        seed=3,
    )
    groups = engine.generate(PROMPTS, 8, sampling, on_text=take)
    drawn = [completion for group in groups for completion in group.completions]
    return drawn, [streamed[prompt, sample] for prompt in range(len(PROMPTS)) for sample in range(8)]


def ended(token_ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str]:
    """The number of tokens, and the text, of a completion that would go on with `token_ids`, by definition."""
    for count in range(1, len(token_ids) + 1):
        pieces = [IDS[token] for token in token_ids[:count]]
        marked, plain = "".join(pieces), "".join(piece for piece in pieces if piece != START)
        found = [(stop, (marked if START in stop else plain).find(stop)) for stop in stops]
        cuts = [len(marked[:at].replace(START, "")) if START in stop else at for stop, at in found if at >= 0]
        if cuts:
            return count, plain[: min(cuts)]
    return len(token_ids), plain


@pytest.mark.parametrize(
    "stops",
    [
        [START],
        ["ab" + START],
        [START + "b"],
        ["a" + START + "b"],
        [START + START],
        ["aa" + START + "bb", "abab"],
        ["abb"],
        ["bba", "b" + START + "a"],
    ],
)
def test_stop_strings_match_special_tokens_and_across_them(engine: Engine, stops: list[str]) -> None:
    """People stop at `<|im_end|>` or at the name of a turn by its text, streaming or not. Reported: issue 45.15."""
    whole, _ = draw(engine)
    drawn, streamed = draw(engine, stops)
    assert any(len(one.token_ids) < 24 for one in drawn), "no case stops"
    for one, long, text in zip(drawn, whole, streamed, strict=True):
        count, expected = ended(long.token_ids, stops)
        assert (one.token_ids, one.text) == (long.token_ids[:count], expected)
        assert text == expected


def test_a_stop_string_before_the_least_number_of_tokens_is_text(engine: Engine) -> None:
    """`min_new_tokens` with a stop string that is a special token. Reported: issue 45.15."""
    whole, _ = draw(engine)
    drawn, streamed = draw(engine, [START], min_new_tokens=9)
    for one, long, text in zip(drawn, whole, streamed, strict=True):
        count = next((n for n in range(9, 25) if long.token_ids[n - 1] == 1), 24)
        shown = [IDS[token] for token in long.token_ids[:count] if token != 1]
        assert (one.token_ids, one.text, text) == (long.token_ids[:count], "".join(shown), "".join(shown))
