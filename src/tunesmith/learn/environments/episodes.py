"""Trajectories: conversations of a policy with its environments, as one sequence of ids each.

Ids that were drawn are kept as they are; only new messages are turned into ids, as the text that the chat template adds
behind the turn. `Conversations.draw` is the whole of it: it opens an episode for each completion, lets the engine draw
the turns, replies to each in a thread of its own, and returns groups as `Engine.generate` does.
"""

import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunesmith.base.config.sections import EnvironmentSection
from tunesmith.base.core.errors import DataError, EnvironmentFailedError, InputError, TunesmithError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.seeds import derive
from tunesmith.base.schema.records import Message, Prompt
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams, StopReason, Trajectory, Turn
from tunesmith.engine.distributed.ranks import gathered, rank, share_of
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.models.tokenizer import encode_prompt
from tunesmith.engine.models.tool_messages import as_template_takes, with_tools
from tunesmith.engine.models.turns import Answer, call_ends, next_turn, parse_answer, reply_ranges
from tunesmith.engine.rollout.engine import Continuation, Dialogue, Engine
from tunesmith.engine.rollout.sampler import noise_keys
from tunesmith.learn.environments.calls import Calls, Open, Shared, TimeLimitError
from tunesmith.learn.environments.contract import Call, Episode, Reply, Said, clean, instance_in
from tunesmith.learn.environments.processes import Processes

_log = get_logger(__name__)

MOST_MALFORMED = 3
"""A trajectory ends after as many turns in a row whose calls cannot be read."""


@dataclass(slots=True)
class _Sample:
    """A sequence of ids while it grows: those in front of it, and behind them what was drawn and replied."""

    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list[int])
    logps: list[float] = field(default_factory=list[float])
    raw_logps: list[float] = field(default_factory=list[float])
    values: list[float] = field(default_factory=list[float])
    turns: list[Turn] = field(default_factory=list[Turn])

    def add_turn(self, turn: Completion) -> None:
        """Append what was drawn."""
        start = len(self.token_ids)
        self.token_ids += turn.token_ids
        self.logps += turn.logps
        self.raw_logps += turn.raw_logps
        self.values += turn.values or ()
        self.turns.append(Turn(start, len(self.token_ids)))

    def add_reply(self, ids: Sequence[int], *, has_values: bool) -> None:
        """Append ids that nobody drew."""
        zeros = [0.0] * len(ids)
        self.token_ids += ids
        self.logps += zeros
        self.raw_logps += zeros
        self.values += zeros if has_values else ()


@dataclass(frozen=True, slots=True, eq=False)
class Hosted:
    """An episode and the thread that its calls are made in."""

    episode: Episode
    calls: Calls

    def run(self, call: Callable[[Episode], Any]) -> Any:
        """The result of a call of the episode."""
        return self.calls.run(lambda: call(self.episode))

    def end(self) -> Future[None]:
        """Have the thread close the episode and end, once the calls in it have ended."""
        closed = self.calls.submit(self.episode.close)
        self.calls.end()
        return closed


def hosted(open_episode: Open, shared: Shared, is_wanted: Callable[[Hosted], bool] = lambda made: True) -> Hosted:
    """A new episode in a thread of its own. `is_wanted` is asked in that thread: an episode that took too long to be
    made may not be wanted any more, and ends at once.

    Raises:
        InputError: it cannot be made.
    """
    calls = Calls(shared)

    def make() -> Hosted:
        made = Hosted(open_episode(calls), calls)
        if not is_wanted(made):
            made.end()
        return made

    try:
        return calls.run(make)
    except TunesmithError:
        calls.end()
        raise
    except TimeLimitError as error:
        raise InputError(f"the environment cannot be made: {error}; raise environment.timeout_s") from error
    except Exception as error:
        calls.end()
        raise InputError(
            f"the environment cannot be made ({type(error).__name__}: {error}); correct it, or its arguments"
        ) from error


@dataclass(slots=True, eq=False)
class _State:
    """A trajectory while it is drawn. `max_tokens` may stand behind its first prompt."""

    prompt: Prompt
    messages: list[Message]
    num_before: int
    sample: _Sample
    earlier: list[_Sample] = field(default_factory=list[_Sample])
    hosted: Hosted | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int = 0
    shown: Prompt | None = None
    num_turns: int = 0
    num_malformed: int = 0
    last: Completion | None = None
    reason: StopReason | None = None
    reward: float | None = None
    error: str | None = None


class Conversations:
    """Draws trajectories with episodes that `open_episode` makes; an episode is used again for another trajectory,
    unless something broke in it.

    Raises:
        InputError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        open_episode: Open,
        tokenizer: PreTrainedTokenizerBase,
        section: EnvironmentSection,
        *,
        max_new_tokens: int,
        context: int | None,
    ) -> None:
        if not tokenizer.chat_template:
            raise InputError(
                "an environment talks in messages, but the tokenizer has no chat template; take an instruction-tuned "
                "model"
            )
        self._open = open_episode
        self._tokenizer = tokenizer
        self._section = section
        self._context = context or 1_000_000
        self._max_new_tokens = max_new_tokens
        self.max_tokens = section.tokens_of(max_new_tokens)
        self._shared = Shared(math.inf if isinstance(open_episode, Processes) else section.timeout_s)
        self._idle: list[Hosted] = []
        self._lent: list[_State] = []
        self._made: set[Hosted] = set()
        self._is_closed = False
        self._lock = threading.Lock()
        self._said_errors: set[str] = set()

    def draw(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        on_group: Callable[[int, Group], None] | None = None,
        *,
        keeps: bool = False,
    ) -> list[Group]:
        """`n` trajectories behind each prompt, as one group each. Of several ranks each draws its share of the prompts,
        and has their instances (`Trajectory.environment`): until the next call, unless that `keeps` them too.

        The episodes of a prompt begin with the same seed, a function of that of `sampling` and of the prompt.

        Raises:
            InputError: a prompt does not fit the context.
            EnvironmentFailedError: every trajectory broke.
        """
        if not keeps:
            self._take_back()
        with ThreadPoolExecutor(self._section.max_calls, thread_name_prefix="tunesmith-turn") as pool:
            own = share_of(prompts, all_ranks=True)
            seeds = [derive(sampling.seed or 0, "environment", prompt.id) for prompt in own]
            rows = [row for row in zip(own, seeds, strict=True) for _ in range(n)]
            states = list(pool.map(lambda row: self._begin(*row), rows))
            try:
                version = self._converse(engine, states, sampling, pool)
            finally:
                self._lent += states
        drawn: list[Group] = []
        for index, prompt in enumerate(own):
            of_prompt = states[index * n : (index + 1) * n]
            front = of_prompt[0].sample if not of_prompt[0].earlier else of_prompt[0].earlier[0]
            completions = tuple(_completion(state, front.prompt_ids) for state in of_prompt)
            drawn.append(Group(of_prompt[0].shown or prompt, front.prompt_ids, completions, version))
        groups = gathered(drawn, "trajectories", all_ranks=True)
        for place, group in zip(share_of(range(len(prompts)), all_ranks=True), drawn, strict=True):
            groups[place] = group  # with its instances, which are not gathered
        ended = [(group.prompt.id, one.trajectory) for group in groups for one in group.completions]
        _check([(prompt_id, trajectory.error) for prompt_id, trajectory in ended if trajectory is not None])
        if on_group is not None:
            for index, group in enumerate(groups):
                on_group(index, group)
        return groups

    def begun(self, prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
        """`prompts` as the first turns of trajectories read them, with what `reset` says and the tools.

        Raises InputError if none leaves room in the context.
        """
        states: list[_State] = []
        for prompt in prompts:
            states.append(self._begin(prompt, seed))
            self._give_back(states[-1])
        if all(len(state.sample.prompt_ids) >= self._context for state in states):
            raise self._no_room(states)
        return [state.prompt for state in states]

    def _no_room(self, states: Sequence[_State]) -> InputError:
        longest = max((len(state.sample.prompt_ids) for state in states), default=0)
        return InputError(
            f"no prompt leaves room behind it: the longest has {longest} tokens, and the model's context holds "
            f"{self._context}; shorten the prompts or the descriptions of the tools"
        )

    def _converse(
        self, engine: Engine, states: Sequence[_State], sampling: SamplingParams, pool: ThreadPoolExecutor
    ) -> int:
        """Draw all turns; returns the version of the weights."""
        for state in states:
            state.max_tokens = min(self.max_tokens, self._context - len(state.sample.prompt_ids))
            if state.max_tokens < 1 and state.reason is None:
                state.reason = "context_full"
        going = [state for state in states if state.reason is None]
        first = tuple(min(self._max_new_tokens, state.max_tokens) for state in going)
        # Equal prompts have noise by their number, and a call has one setting: so all ranks are to know of all.
        own = [(rank(), state.sample.prompt_ids, limit) for state, limit in zip(going, first, strict=True)]
        of_all = gathered(own, "first prompts", all_ranks=True)
        if not of_all:
            _check([(state.prompt.id, state.error) for state in states])
            raise self._no_room(states)
        keys = noise_keys([ids for _, ids, _ in of_all], 1)
        limits = [limit for _, _, limit in of_all]
        sampling = replace(
            sampling,
            max_new_tokens=min(limits),
            min_new_tokens=min(sampling.min_new_tokens, *limits),
            stop_token_ids=(*sampling.stop_token_ids, *call_ends(self._tokenizer)),
        )

        def on_turn(index: int, turn: Completion) -> Future[Continuation | None]:
            return pool.submit(self._reply, going[index], turn)

        fronts = [replace(state.prompt, token_ids=state.sample.prompt_ids) for state in going]
        own_keys = tuple(key for key, (number, _, _) in zip(keys, of_all, strict=True) if number == rank())
        most = max((state.max_tokens for state in going), default=0)
        version = engine.converse(fronts, sampling, Dialogue(on_turn, most, first, own_keys))
        return max(gathered([version], "version", all_ranks=True))

    def _begin(self, prompt: Prompt, seed: int) -> _State:
        """The trajectory before its first turn, in an episode that has begun."""
        content = prompt.content
        given: tuple[Message, ...] = ({"role": "user", "content": content},) if isinstance(content, str) else content
        state = _State(prompt, list(given), len(given), _Sample(()))
        state.hosted = self._take()
        row = {**prompt.columns, "prompt": [dict(message) for message in given], "seed": seed}
        # Tools may change, but the model has read those with which its trajectory began.
        opening, state.tools = self._guarded(state, lambda one: (one.reset(row), list(one.tools))) or (None, ())
        if isinstance(opening, str) and opening:
            state.messages = [*given[:-1], {**given[-1], "content": f"{given[-1]['content']}{clean(opening)}"}]
        elif opening is not None and not isinstance(opening, str):
            state.messages = [{**one, "content": clean(str(one.get("content", "")))} for one in opening]
        if state.messages != list(given):
            state.shown = replace(prompt, content=tuple(state.messages))
        columns = {**prompt.columns, "tools": state.tools} if state.tools else prompt.columns
        content: Any = tuple(state.messages)
        state.prompt = with_tools(self._tokenizer, replace(prompt, content=content, columns=columns, token_ids=None))
        state.messages = list(state.prompt.content)  # type: ignore[arg-type]
        state.num_before = len(state.messages)
        state.sample = _Sample(encode_prompt(self._tokenizer, state.prompt))
        return state

    def _reply(self, state: _State, turn: Completion) -> Continuation | None:
        """The continuation of a turn; None if the trajectory ended."""
        sample = state.sample
        state.last, state.num_turns = turn, state.num_turns + 1
        front = (*sample.prompt_ids, *sample.token_ids)
        sample.add_turn(turn)
        tools: Any = state.prompt.columns.get("tools") or state.tools
        answer = parse_answer(self._tokenizer, front, turn.token_ids, tools, stop_ids=ended_by(turn))
        begun_s = time.perf_counter()
        reply: Reply | None = self._guarded(
            state, lambda episode: checked(episode.step(said_of(turn, answer, has_tools=bool(tools))))
        )
        reply_s = time.perf_counter() - begun_s
        before = tuple(state.messages)
        state.messages.append(answer.message)
        if reply is None:
            return self._end(state)
        num_failed = reply.num_failed
        sample.turns[-1] = replace(
            sample.turns[-1],
            reward=reply.reward,
            reply_s=reply_s,
            num_calls=len(answer.calls) + (answer.malformed is not None),
            num_failed=num_failed,
        )
        state.num_malformed = state.num_malformed + 1 if answer.malformed is not None else 0
        if reply.messages:
            reply = replace(reply, messages=tuple(map(self._cut, reply.messages)))
        state.reason = self._reason(state, turn, reply)
        if state.reason is not None:
            state.messages += reply.messages
            return self._end(state)
        return self._continue(state, before, answer.message, turn, reply)

    def _reason(self, state: _State, turn: Completion, reply: Reply) -> StopReason | None:
        """The reason to end the trajectory with this turn, None if it goes on."""
        if reply.done or not reply.messages:
            is_cut = turn.finish_reason == "length" and reply.reason == "completed"
            return "max_tokens" if is_cut else reply.reason
        if state.num_malformed >= MOST_MALFORMED:
            return "malformed"
        return "max_turns" if state.num_turns >= self._section.max_turns else None

    def _continue(
        self, state: _State, before: Sequence[Message], answer: Message, turn: Completion, reply: Reply
    ) -> Continuation | None:
        """The ids of the reply behind the turn, or those of a new sample if the template rewrites the history."""
        sample = state.sample
        conversation = self._tokenizer, state.prompt, before, answer, turn.token_ids, reply.messages
        state.messages += reply.messages
        try:
            ids = next_turn(*conversation, stop_ids=ended_by(turn))
            if ids is None:
                content: Any = as_template_takes(self._tokenizer, state.messages)
                front = encode_prompt(self._tokenizer, replace(state.prompt, content=content))
            else:
                front = (*sample.prompt_ids, *sample.token_ids, *ids)
        except DataError as error:  # a template may refuse a turn of the user behind a result
            state.reason, state.error = "error", str(error)
            return self._end(state)
        first = state.earlier[0] if state.earlier else sample
        room = len(first.prompt_ids) + state.max_tokens - len(front)
        if room < 1:
            state.reason = "context_full" if self._context <= len(front) + self._max_new_tokens else "max_tokens"
            return self._end(state)
        if ids is None:
            state.earlier.append(sample)
            state.sample = _Sample(front)
        else:
            if self._section.reply_loss_coef and not sample.turns[-1].num_failed:  # of a failed call the text is ours
                found = reply_ranges(self._tokenizer, state.prompt, (*before, answer), reply.messages, ids)
                start = len(sample.token_ids)
                ranges = tuple(range(start + part.start, start + part.stop) for part in found)
                sample.turns[-1] = replace(sample.turns[-1], replies=ranges)
            sample.add_reply(ids, has_values=turn.values is not None)
        return Continuation(front, min(self._max_new_tokens, room))

    def _end(self, state: _State) -> None:
        """Ask for the reward of an episode that nothing broke."""
        if state.error is None:
            state.reward = self._guarded(state, lambda episode: _number(episode.reward()))

    def _cut(self, message: Message) -> Message:
        return shortened(self._tokenizer, message, self._section.max_reply_tokens)

    def _guarded(self, state: _State, call: Callable[[Episode], Any]) -> Any:
        """The result of a call of the trajectory's episode; None, and the reason noted, if it raises or hangs."""
        hosted = state.hosted
        if hosted is None:
            return None
        try:
            return hosted.run(call)
        except (InputError, EnvironmentFailedError):
            raise
        except TimeLimitError as error:
            state.reason, state.error = "time_limit", f"TimeLimitError: {error} (environment.timeout_s)"
            self._end_hosted(hosted, wait_s=0.0)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - an environment may raise anything, an exit too
            state.reason, state.error = "error", f"{type(error).__name__}: {error}{_place_of(error)}"
            self._end_hosted(hosted, wait_s=self._section.timeout_s)  # a server may have no room beside its session
        state.hosted = None  # broken: nobody knows its state
        with self._lock:
            if (kind := state.error.partition(":")[0]) not in self._said_errors:
                self._said_errors.add(kind)
                _log.warning(
                    "the environment broke a trajectory of prompt %s (%s); it is left out, and the others go on. "
                    "Correct the environment; further ones of this kind are counted in environment/errors.",
                    state.prompt.id,
                    state.error,
                )
        return None

    def check(self) -> None:
        """Make an episode, for the first trajectory.

        Raises:
            InputError: the environment cannot be made, or a tool of it has no schema.
        """

        def whole(calls: Calls) -> Episode:
            episode = self._open(calls)
            list(episode.tools)  # of several environments, those of all
            return episode

        try:
            self._idle.append(hosted(whole, self._shared, self._is_wanted))
        except BaseException:
            self.close()
            raise

    def _take(self) -> Hosted:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return hosted(self._open, self._shared, self._is_wanted)

    def _is_wanted(self, made: Hosted) -> bool:
        """Note an episode that was made, in its own thread; False if the run has ended meanwhile."""
        with self._lock:
            if not self._is_closed:
                self._made.add(made)
            return not self._is_closed

    def _take_back(self) -> None:
        """Let the instances of earlier trajectories be used again."""
        lent, self._lent = self._lent, []
        for state in lent:
            self._give_back(state)

    def _give_back(self, state: _State) -> None:
        if state.hosted is not None:
            with self._lock:
                self._idle.append(state.hosted)
            state.hosted = None

    def _end_hosted(self, hosted: Hosted, wait_s: float) -> None:
        """Close an episode that broke, and wait that long for it, unless the run closes it already."""
        with self._lock:
            is_open = hosted in self._made
            self._made.discard(hosted)
        if is_open:
            wait([hosted.end()], wait_s)

    def close(self) -> None:
        """Close all episodes, however they take that."""
        with self._lock:
            made, self._made, self._is_closed = self._made, set(), True
            self._idle.clear()
        wait([hosted.end() for hosted in made], self._section.timeout_s)
        if isinstance(self._open, Processes):
            self._open.close()


def _place_of(error: BaseException) -> str:
    """The function, file and line in which an error was raised; empty for one of another process."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _check(errors: Sequence[tuple[str, str | None]]) -> None:
    """Raise EnvironmentFailedError if each trajectory, of the prompt with an id, has an error."""
    if errors and all(error is not None for _, error in errors):
        raise EnvironmentFailedError(
            f"the environment broke every one of {len(errors)} trajectories; of prompt {errors[0][0]}: {errors[0][1]}"
        )


def shortened(tokenizer: PreTrainedTokenizerBase, message: Message, limit: int) -> Message:
    """`message`, without the middle of a content of more than `limit` tokens."""
    content = clean(str(message.get("content", "")))
    if len(content) <= limit:  # a token has a character or more, but for bytes of rare ones
        return {**message, "content": content}
    content = content if len(content) <= 40 * limit else f"{content[: 20 * limit]}{content[-20 * limit :]}"
    ids = tokenizer(content, add_special_tokens=False)["input_ids"]
    if len(ids) <= limit:
        return {**message, "content": content}
    half = limit // 2
    head, tail = (tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:half], ids[-half:]))
    return {**message, "content": f"{head}\n[... cut ...]\n{tail}"}


def ended_by(turn: Completion) -> tuple[int, ...]:
    """The id that ended a turn, if one did."""
    return turn.token_ids[-1:] if turn.finish_reason == "stop" else ()


def said_of(turn: Completion, answer: Answer, *, has_tools: bool) -> Said:
    """The turn as the episode takes it: its calls; to one without tools the whole text."""
    if not has_tools and (answer.calls or answer.malformed is not None):
        return Said(turn.text)  # to a game the whole answer is the move, whatever it looks like
    calls = [Call(one.name, one.arguments) for one in answer.calls]
    if answer.malformed is not None:
        calls.append(Call("", {}, answer.malformed))
    content = answer.message.get("content")
    return Said(content if isinstance(content, str) else turn.text, tuple(calls))


def _number(value: object) -> float | None:
    """A reward as a number, None if there is none. Raises ValueError for one that is not finite."""
    if value is None:
        return None
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}; return a finite number, or None")
    return number


def checked(reply: object) -> Reply:
    """`reply`, its reward as a number. Raises TypeError for what is no reply."""
    if not isinstance(reply, Reply):
        raise TypeError(f"step returned {type(reply).__name__}; return a Reply")
    return replace(reply, reward=_number(reply.reward))


def _completion(state: _State, front: tuple[int, ...]) -> Completion:
    """The completion of a trajectory that ended; `front` is the prompt of its group."""
    reason: StopReason = state.reason or "error"
    turns = [turn for sample in (*state.earlier, state.sample) for turn in sample.turns]
    rewards = [turn.reward for turn in turns if turn.reward is not None]
    if state.reward is not None:
        rewards.append(state.reward)
    reward = sum(rewards) if rewards and state.error is None else None
    said = tuple(state.messages[state.num_before :])
    messages = said or ({"role": "assistant", "content": ""},)  # reward functions expect one
    is_cut = reason in ("max_turns", "max_tokens", "context_full")
    instance = None if state.hosted is None else instance_in(state.hosted.episode)

    def completion(sample: _Sample, earlier: tuple[Completion, ...] = ()) -> Completion:
        return Completion(
            tuple(sample.token_ids),
            tuple(sample.logps),
            tuple(sample.raw_logps),
            "" if state.last is None else state.last.text,
            "length" if is_cut else "stop",
            tuple(sample.values) if sample.values else None,
            trajectory=Trajectory(tuple(sample.turns), messages, reason, reward, state.error, instance),
            prompt_ids=None if sample.prompt_ids == front else sample.prompt_ids,
            earlier=earlier,
        )

    return completion(state.sample, tuple(map(completion, state.earlier)))
