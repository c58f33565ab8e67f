"""Environments that misbehave: what was drawn is kept, the others go on, nothing waits for ever, a reason is named."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch

from tests.environments.played import Echo, raises
from tunesmith.base.config.sections import EnvironmentSection
from tunesmith.base.core.errors import EnvironmentFailedError, InputError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.pack import completion_of_rows, pack
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams, Trajectory, Turn
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.models.turns import parse_answer
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.learn.environments.calls import Calls
from tunesmith.learn.environments.contract import Call, Reply, Said, ToolEpisode, ToolResult
from tunesmith.learn.environments.episodes import Conversations, said_of
from tunesmith.learn.environments.sources import opener

PROMPTS = [Prompt(str(i), ({"role": "user", "content": text},)) for i, text in enumerate("abcd")]
LOADED = tiny_model("llama", dtype=torch.float32, max_position_embeddings=1024)


class Counts:
    """An environment in TRL's form."""

    def look(self, place: str) -> str:
        """Look there.

        Args:
            place: Where.
        """
        return f"nothing at {place}"


def draw(make: Callable[[], Any], n: int = 2, context: int = 256, **section: Any) -> list[list[Completion]]:
    options = {"max_turns": 3, "timeout_s": 5.0, "max_reply_tokens": 24, **section}
    talks = Conversations(
        lambda calls: made if hasattr(made := make(), "step") else ToolEpisode(made, (), calls.wait),
        LOADED.tokenizer,
        EnvironmentSection(**options),
        max_new_tokens=6,
        context=context,
    )
    engine = open_engine(LOADED.model, LOADED.tokenizer)
    try:
        groups = talks.draw(engine, PROMPTS, n, SamplingParams(seed=3))
    finally:
        talks.close()
    return [list(group.completions) for group in groups]


def of(completion: Completion) -> Trajectory:
    assert completion.trajectory is not None
    return completion.trajectory


@pytest.mark.parametrize(
    ("breaks", "reason", "error"),
    [
        (raises, "error", "ZeroDivisionError: in the environment"),
        (lambda: time.sleep(30), "time_limit", "longer than 0.5 s"),
        (lambda: None, "error", "step returned NoneType"),
        (lambda: Reply(reward=float("nan")), "error", "the reward is nan"),
        (lambda: Reply(reward="high"), "error", "could not convert"),
        (lambda: exec("raise SystemExit(3)"), "error", "SystemExit"),
    ],
    ids=["raises", "hangs", "returns nothing", "NaN", "no number", "exits"],
)
def test_one_that_breaks_ends_its_own_trajectories_alone(breaks, reason, error) -> None:
    usual = draw(Echo)
    found = draw(lambda: Echo(breaks), timeout_s=0.5)
    for one in found[1]:
        assert of(one).stop_reason == reason
        assert error in str(of(one).error)
        assert of(one).reward is None
        assert [turn.stop for turn in of(one).turns] == [turn.stop for turn in of(usual[1][found[1].index(one)]).turns][
            :2
        ]
    for prompt in (0, 2, 3):
        assert [one.token_ids for one in found[prompt]] == [one.token_ids for one in usual[prompt]]
        assert [of(one).reward for one in found[prompt]] == [3.0, 3.0]


@pytest.mark.parametrize("at", ["reset", "reward"])
def test_one_that_breaks_at_its_begin_or_end(at) -> None:
    found = draw(lambda: Echo(raises, at))
    assert {of(one).stop_reason for one in found[1]} == {"error"}
    assert {of(one).reward for one in found[0]} == {3.0}
    if at == "reset":
        assert all(one.num_sampled == 0 for one in found[1])


def test_a_reward_that_comes_too_late_is_none() -> None:
    usual = draw(Echo)
    found = draw(lambda: Echo(lambda: time.sleep(1) or 5.0, "reward"), timeout_s=0.3)
    for one, before in zip(found[1], usual[1], strict=True):
        assert (of(one).stop_reason, of(one).reward) == ("time_limit", None)
        assert one.token_ids == before.token_ids


@pytest.mark.parametrize(
    ("says", "error"),
    [(3, "TypeError: reset returned int; return a text, or None"), ({"a": 1}, "TypeError: reset returned dict")],
)
def test_a_reset_that_returns_no_text_breaks_its_trajectory(says, error) -> None:
    class Numbers(Counts):
        def reset(self, prompt: Sequence[Mapping[str, Any]]) -> Any:
            return says if prompt[-1]["content"] == "b" else None

    found = draw(Numbers, context=1000)
    assert all(str(of(one).error).startswith(error) for one in found[1])
    assert all(of(one).error is None for one in found[0])


def test_what_a_tool_returns_is_a_text_to_the_model() -> None:
    given: list[Any] = [None, 3, {"a": [1]}, [None], b"a", {"a": object}]

    def gives() -> Any:
        """Give the next."""
        return given.pop(0)

    episode = ToolEpisode(None, [gives], lambda result: result)
    reply = episode.step(Said("", tuple(Call("gives") for _ in given)))
    texts = [message["content"] for message in reply.messages]
    assert texts == ["", "3", '{"a": [1]}', "[null]", "b'a'", "{'a': <class 'object'>}"]


def test_tools_that_change_are_those_that_a_trajectory_began_with() -> None:
    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "description": "a", "parameters": {"type": "object"}}}

    seen: list[tuple[Prompt, int]] = []

    class Changes(Echo):
        def reset(self, row: Mapping[str, Any]) -> Any:
            super().reset(row)
            self.tools = [tool(f"of_{row['prompt'][-1]['content']}")]

        def step(self, said: Said) -> Reply:
            self.tools = [tool(f"turn_{self.num}")]
            return super().step(said)

    talks = Conversations(
        lambda calls: Changes(), LOADED.tokenizer, EnvironmentSection(max_turns=3), max_new_tokens=6, context=1000
    )
    engine = open_engine(LOADED.model, LOADED.tokenizer)
    for _ in range(2):  # instances are used again, for other prompts
        groups = talks.draw(engine, PROMPTS, 2, SamplingParams(seed=3))
        for prompt, group in zip("abcd", groups, strict=True):
            text = LOADED.tokenizer.decode(group.prompt_token_ids)
            assert f'"of_{prompt}"' in text
            assert "turn_" not in text
            assert all(of(one).stop_reason == "max_turns" for one in group.completions)
        seen += [(group.prompt, len(group.completions)) for group in groups]
    assert seen[:4] == seen[4:]


def test_an_instance_that_is_refused_or_made_too_late_is_closed() -> None:
    made: list[Echo] = []

    class Refused(Counts):
        def __init__(self) -> None:
            made.append(self)  # type: ignore[arg-type]

        def close(self) -> None:
            self.is_closed = True

    with pytest.raises(InputError, match="two tools have the same name"):
        opener(EnvironmentSection(), tools=[Counts().look], environment_factory=Refused)(Calls(5.0))  # type: ignore[misc]
    assert [one.is_closed for one in made] == [True]
    ended = threading.Event()

    class Late(Echo):
        def __init__(self) -> None:
            ended.wait(60)
            super().__init__()
            self._is_bad = False
            made.append(self)

    with pytest.raises(InputError, match=r"took longer than 0.3 s; raise environment.timeout_s"):
        draw(Late, timeout_s=0.3)
    assert len(made) == 1
    ended.set()
    for _ in range(100):
        if len(made) > 1 and all(one.is_closed for one in made):
            break
        time.sleep(0.05)
    assert len(made) > 1 and all(one.is_closed for one in made)


def test_where_every_trajectory_breaks_the_reason_is_named() -> None:
    class Broken(Echo):
        def step(self, said: Said) -> Reply:
            raise ConnectionError("the server is away")

    with pytest.raises(
        EnvironmentFailedError, match=r"every one of 8 trajectories.*ConnectionError: the server is away"
    ):
        draw(Broken)


def test_each_kind_of_failure_is_told_once(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        draw(lambda: Echo(raises))
    assert len([one for one in caplog.records if "broke a trajectory" in one.message]) == 1


def test_a_reply_that_is_too_long_is_cut_in_the_middle() -> None:
    class Floods(Echo):
        def step(self, said: Said) -> Reply:
            return Reply(({"role": "user", "content": "ab" * 500_000},))

    for one in draw(Floods)[0]:
        replies = [message["content"] for message in of(one).messages if message["role"] == "user"]
        assert all(len(text) < 60 and "[... cut ...]" in text for text in replies)


@pytest.mark.parametrize(("limit", "reason"), [({"max_tokens": 60}, "max_tokens"), ({"context": 80}, "context_full")])
def test_a_context_that_fills_up_ends_the_trajectory(limit, reason) -> None:
    usual = draw(Echo, max_turns=100, context=1000, max_tokens=200)
    found = draw(Echo, max_turns=100, **limit)
    for one, longer in zip(itertools.chain(*found), itertools.chain(*usual), strict=True):
        assert of(one).stop_reason == reason
        assert len(of(one).turns) > 1
        assert 40 < len(one.token_ids) <= 60
        assert longer.token_ids[: len(one.token_ids)] == one.token_ids
        assert one.finish_reason == "length"


def test_an_episode_is_used_again_unless_something_broke_in_it() -> None:
    made: list[Echo] = []

    def make() -> Echo:
        made.append(Echo(raises))
        return made[-1]

    draw(make)
    assert len(made) == 8
    assert all(one.is_closed for one in made)


def test_what_was_not_sampled_is_masked_and_has_no_log_prob() -> None:
    engine = open_engine(LOADED.model, LOADED.tokenizer)
    talks = Conversations(
        lambda calls: Echo(), LOADED.tokenizer, EnvironmentSection(max_turns=3), max_new_tokens=6, context=256
    )
    groups = talks.draw(engine, PROMPTS, 2, SamplingParams(seed=3))
    sequences = pack(groups, 0)
    assert completion_of_rows(groups) == list(range(8))
    for row, one in enumerate(one for group in groups for one in group.completions):
        mask = sequences.mask_BT[row]
        assert mask.sum() == one.num_sampled == sum(turn.stop - turn.start for turn in of(one).turns)
        assert not mask.all()
        assert sequences.raw_logp_BT[row][~mask].abs().sum() == 0
        assert (sequences.raw_logp_BT[row][mask] < 0).all()


def test_calls_of_an_episode_are_made_in_one_thread_until_it_is_closed() -> None:
    threads: list[set[int]] = []

    class Bound(Echo):
        def __init__(self) -> None:
            super().__init__()
            self.seen = {threading.get_ident()}
            threads.append(self.seen)

        def step(self, said: Said) -> Reply:
            self.seen.add(threading.get_ident())
            return super().step(said)

        def close(self) -> None:
            self.seen.add(threading.get_ident())
            super().close()

    draw(Bound)
    assert [len(seen) for seen in threads] == [1] * 8
    assert len(set.union(*threads)) == 8


def test_to_an_environment_without_tools_the_whole_answer_is_said() -> None:
    said = "<tool_call>{"
    turn = Completion((5,), (-1.0,), (-1.0,), said, "stop")
    answer = parse_answer(LOADED.tokenizer, "", LOADED.tokenizer(said)["input_ids"])
    assert answer.malformed is not None
    assert said_of(turn, answer, has_tools=False) == Said(said)
    assert said_of(turn, answer, has_tools=True).calls[0].error == answer.malformed


def test_an_episode_that_hangs_is_closed_once_its_call_ends() -> None:
    ended = threading.Event()
    made: list[Echo] = []

    def make() -> Echo:
        made.append(Echo(lambda: ended.wait(60) and None))
        return made[-1]

    draw(make, timeout_s=0.3)
    assert [one.is_closed for one in made] == [not one._is_bad for one in made]
    ended.set()
    for _ in range(100):
        if all(one.is_closed for one in made):
            break
        time.sleep(0.05)
    assert all(one.is_closed for one in made)


def test_halves_of_surrogate_pairs_break_nothing() -> None:
    class Odd(Echo):
        def reset(self, row: Mapping[str, Any]) -> Any:
            super().reset(row)
            return " \udc80"

        def step(self, said: Said) -> Reply:
            return Reply(({"role": "user", "content": "a\ud83d"},))

    assert {of(one).stop_reason for group in draw(Odd) for one in group} == {"max_turns"}


def test_an_opening_without_room_ends_its_own_trajectory_and_shortens_no_other() -> None:
    class Long(Echo):
        def reset(self, row: Mapping[str, Any]) -> Any:
            super().reset(row)
            return "x" * 300 if self._is_bad else None

    usual, found = draw(Echo, max_turns=4), draw(lambda: Long(raises, "never"), max_turns=4)
    assert {of(one).stop_reason for one in found[1]} == {"context_full"}
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in usual[0]]

    class Half(Long):
        def reset(self, row: Mapping[str, Any]) -> Any:
            return "x" * 200 if super().reset(row) else None

    half = draw(lambda: Half(raises, "never"), max_turns=4)
    assert all(0 < len(one.token_ids) < 40 for one in half[1])
    assert [one.token_ids for one in half[0]] == [one.token_ids for one in usual[0]]


def test_an_environment_that_cannot_be_made_is_named() -> None:
    def fails_to_begin() -> None:
        raise OSError("no such server")

    with pytest.raises(InputError, match=r"the environment cannot be made .OSError: no such server"):
        draw(fails_to_begin)


def test_turns_are_counted_through_the_samples_of_a_trajectory() -> None:
    def sample(*turns: Turn, earlier: tuple[Completion, ...] = ()) -> Completion:
        zeros = (0.0,) * 6
        trajectory = Trajectory(turns, (), "completed", 1.0)
        return Completion((5,) * 6, zeros, zeros, "", "stop", trajectory=trajectory, prompt_ids=(7, 8), earlier=earlier)

    first = sample(Turn(0, 2, 0.5), Turn(3, 4))
    whole, other = sample(Turn(1, 3, 0.25), earlier=(first,)), sample(Turn(0, 6, 1.0))
    groups = [Group(PROMPTS[0], (9,), (whole, other), 0)]
    sequences = pack(groups, 0)
    assert completion_of_rows(groups) == [0, 0, 1]
    assert sequences.ids_BS[:, :2].tolist() == [[7, 8]] * 3
    assert sequences.mask_BT.int().tolist() == [[1, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0], [1] * 6]
    assert sequences.turns is not None
    assert sequences.turns.index_BT.tolist() == [[0, 0, 0, 1, 0, 0], [0, 2, 2, 0, 0, 0], [0] * 6]
    assert sequences.turns.reward_BT.tolist() == [[0, 0.5, 0, 0, 0, 0], [0, 0, 0.25, 0, 0, 0], [0] * 5 + [1.0]]
    assert pack(groups, 0, rows=[1]).turns.reward_BT.tolist() == [[0] * 5 + [1.0]]


class Tools:
    """Add numbers."""

    def add(self, a: int, b: int) -> ToolResult:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        return ToolResult(a + b, reward=0.5, done=a + b > 9)

    async def wait(self, name: str) -> str:
        """Wait.

        Args:
            name: Whom for.
        """
        return f"{name} came"

    @property
    def costly(self) -> str:
        raise RuntimeError("a property is not to be asked for its value")

    @staticmethod
    def ends() -> None:
        """End the interpreter."""
        raise SystemExit(3)

    def _hidden(self) -> None:
        return None


def test_a_method_without_type_hints_is_refused() -> None:
    class Vague:
        def add(self, a, b):
            return a + b

    with pytest.raises(InputError, match="tool `add` has no schema"):
        ToolEpisode(Vague(), (), lambda result: result)


def test_public_methods_are_tools() -> None:
    episode = ToolEpisode(Tools(), (), lambda result: result)
    assert [tool["function"]["name"] for tool in episode.tools] == ["add", "wait", "ends"]


def test_what_a_tool_raises_is_told_and_what_it_gives_ends_the_episode() -> None:
    episode = ToolEpisode(Tools(), (), lambda result: result)
    calls = (
        Call("ends"),
        Call("none"),
        Call("add", {"a": 1}),
        Call("add", {"a": 4, "b": 6}),
        Call("add", {"a": 1, "b": 1}),
    )
    reply = episode.step(Said("", calls))
    texts = [message["content"] for message in reply.messages]
    assert texts[0] == "Error: SystemExit: 3"
    assert texts[1] == "Error: there is no tool 'none'; there are add, wait, ends"
    assert texts[2] == "Error: add: missing a required argument: 'b'"
    assert texts[3:] == ["10"]
    assert (reply.reward, reply.done, reply.reason, reply.num_failed) == (0.5, True, "tool_ended", 2)


def takes(
    count: int,
    share: float = 0.0,
    deep: bool = False,
    name: str = "",
    places: list[int] | None = None,
    unit: Literal["m", "km"] = "m",
    limit: int = None,  # type: ignore[assignment]  # noqa: RUF013 - as people write it
) -> str:
    """Say what came.

    Args:
        count: A number.
        share: A share.
        deep: Yes or no.
        name: A name.
        places: Numbers.
        unit: Of length.
        limit: At most.
    """
    return repr((count, share, deep, name, places, unit, limit))


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"count": "3"}, (3, 0.0, False, "", None, "m", None)),
        ({"count": 3.0, "share": 3, "limit": None}, (3, 3.0, False, "", None, "m", None)),
        ({"count": 1, "share": "0.5", "deep": "true"}, (1, 0.5, True, "", None, "m", None)),
        ({"count": 1, "deep": "False", "name": "3"}, (1, 0.0, False, "3", None, "m", None)),
        ({"count": 1, "name": 3, "limit": "4"}, (1, 0.0, False, "3", None, "m", 4)),
        ({"count": 1, "places": "[1, 2]"}, (1, 0.0, False, "", [1, 2], "m", None)),
        ({"count": 1, "places": ["1", 2.0]}, (1, 0.0, False, "", [1, 2], "m", None)),
        ({"count": 1, "places": "null", "unit": "km"}, (1, 0.0, False, "", None, "km", None)),
    ],
)
def test_arguments_are_taken_as_they_are_meant(given, taken) -> None:
    reply = ToolEpisode(None, [takes], lambda result: result).step(Said("", (Call("takes", given),)))
    assert reply.messages[0]["content"] == repr(taken)
    assert reply.num_failed == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": "three"}, """the argument 'count' is "three", expected is {"type": "integer"}"""),
        ({"count": 3.5}, """'count' is 3.5, expected is {"type": "integer"}"""),
        ({"count": True}, """'count' is true, expected is {"type": "integer"}"""),
        ({"count": 1, "share": [1]}, """'share' is [1], expected is {"type": "number"}"""),
        ({"count": 1, "deep": 2}, """'deep' is 2, expected is {"type": "boolean"}"""),
        ({"count": 1, "name": None}, """'name' is null, expected is {"type": "string"}"""),
        ({"count": 1, "unit": "mile"}, """'unit' is "mile", expected is {"enum": ["m", "km"], "type": "string"}"""),
        ({"count": "9" * 1000 + "x"}, f"""'count' is "{"9" * 99}..., expected is"""),
    ],
)
def test_an_argument_of_another_kind_is_named_to_the_model(given, message) -> None:
    reply = ToolEpisode(None, [takes], lambda result: result).step(Said("", (Call("takes", given),)))
    assert str(reply.messages[0]["content"]).startswith("Error: takes: the argument '")
    assert message in str(reply.messages[0]["content"])
    assert reply.num_failed == 1


def test_an_object_without_anything_of_an_environment_is_refused() -> None:
    class Nothing:
        pass

    with pytest.raises(InputError, match="Nothing is no environment"):
        ToolEpisode(Nothing(), (), lambda result: result)
