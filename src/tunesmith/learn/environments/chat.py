"""A conversation with a person in which the model's calls are made, or its answers are the moves of a game."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

from tunesmith.base.config.sections import EnvironmentSection
from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.records import Message, Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.models.tool_messages import with_tools
from tunesmith.engine.models.turns import call_ends, parse_answer
from tunesmith.learn.environments.calls import Shared, TimeLimitError
from tunesmith.learn.environments.contract import Episode, Reply, Said, clean
from tunesmith.learn.environments.episodes import Hosted, Open, checked, ended_by, hosted, said_of, shortened


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of a turn: `messages` for the history, that of the model first, and `lines` to show. `goes_on` if the
    model's next turn follows, else the person's.
    """

    messages: tuple[Message, ...]
    lines: tuple[str, ...] = ()
    goes_on: bool = False


class Partner:
    """Tools or an environment beside a person who chats with the model.

    An episode begins with a line of the person, and ends as a trajectory does, or where a call breaks; `has_begun` is
    false then. An answer without a call ends the model's part alone.

    Raises:
        InputError: the tokenizer has no chat template, or the environment cannot be made.
    """

    def __init__(self, open_episode: Open, tokenizer: PreTrainedTokenizerBase, section: EnvironmentSection) -> None:
        if not tokenizer.chat_template:
            raise InputError(
                "tools and environments need a model with a chat template, and this one has none; take an "
                "instruction-tuned model, or chat with --no-tools"
            )
        self._open, self._tokenizer, self._section = open_episode, tokenizer, section
        self._shared = Shared(section.timeout_s)
        self._hosted: Hosted | None = hosted(open_episode, self._shared)
        self._given: list[float] = []
        self.has_begun = False

    def begin(self, line: str, seed: int) -> tuple[Message, ...]:
        """The first messages of a conversation that begins with `line`, with what the environment adds.

        Raises:
            InputError: the environment raised, or took too long.
        """
        self._given = []
        self.has_begun = True
        given: Message = {"role": "user", "content": line}
        opening = self._guarded(lambda episode: episode.reset({"prompt": [given], "seed": seed}))
        if isinstance(opening, str) or opening is None:
            return ({**given, "content": f"{line}{clean(opening or '')}"},)
        return tuple({**one, "content": clean(str(one.get("content", "")))} for one in opening)

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The prompt of the model's next turn."""
        tools = self._opened().episode.tools
        return with_tools(self._tokenizer, Prompt("chat", tuple(messages), {"tools": list(tools)} if tools else {}))

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` of a turn, which also ends where a call does."""
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *call_ends(self._tokenizer)))

    def reply(self, group: Group, num_turns: int) -> Step:
        """Make the calls of turn `num_turns` behind the person's, or take it as a move.

        Raises:
            InputError: the environment raised, or a call took too long; the episode is over.
            KeyboardInterrupt: on Ctrl-C, which leaves a call that runs; the episode is over.
        """
        turn, tools = group.completions[0], self._opened().episode.tools
        stop_ids = ended_by(turn)
        answer = parse_answer(self._tokenizer, group.prompt_token_ids, turn.token_ids, tools, stop_ids=stop_ids)
        said = said_of(turn, answer, has_tools=bool(tools))
        reply: Reply = self._guarded(lambda episode: checked(episode.step(said)))
        replies = tuple(shortened(self._tokenizer, one, self._section.max_reply_tokens) for one in reply.messages)
        lines = _lines(said, replies, reply.reward)
        if reply.reward is not None:
            self._given.append(reply.reward)
        is_answer = not said.calls and not reply.messages and bool(tools)
        ends = reply.done and not is_answer
        is_last = not (is_answer or ends) and num_turns >= self._section.max_turns
        if is_last:
            lines.append(f"[{self._section.max_turns} turns (environment.max_turns), so it is your turn]")
        if ends:
            whole: float | None = self._guarded(lambda episode: episode.reward())
            total = sum(self._given) + (whole or 0.0)
            lines.append(f"[ended: {reply.reason}, reward {total:g}; your next line begins anew]")
            self.has_begun = False
        goes_on = not (is_answer or ends or is_last)
        return Step((answer.message, *replies), tuple(lines), goes_on)

    def _guarded(self, call: Callable[[Episode], Any]) -> Any:
        """The result of a call of the episode, which is over if it raises, hangs or is interrupted."""
        own = self._opened()
        try:
            return own.run(call)
        except (TimeLimitError, KeyboardInterrupt) as error:
            self._hosted, self.has_begun = None, False
            own.end()
            if isinstance(error, KeyboardInterrupt):
                raise
            raise InputError(
                f"a call of the tools or the environment failed: {error} (environment.timeout_s)"
            ) from error
        except BaseException as error:
            self._hosted, self.has_begun = None, False
            wait([own.end()], self._section.timeout_s)
            raise InputError(f"the environment raised {type(error).__name__}: {error}") from error

    def _opened(self) -> Hosted:
        if self._hosted is None:
            self._hosted = hosted(self._open, self._shared)
        return self._hosted

    def close(self) -> None:
        """Close the episode."""
        if self._hosted is not None:
            wait([self._hosted.end()], self._section.timeout_s)
            self._hosted = None


def _lines(said: Said, replies: Sequence[Message], reward: float | None) -> list[str]:
    """Each call with its answer, or what the environment said, and what was given for the turn."""
    lines: list[str] = []
    for index, message in enumerate(replies):
        if index < len(said.calls) and (call := said.calls[index]).name:
            lines.append(f"[call {call.name} {json.dumps(dict(call.arguments), ensure_ascii=False, default=str)}]")
        lines.append(f"[{'answer' if said.calls else 'environment'} {message['content']}]")
    return lines if reward is None else [*lines, f"[reward {reward:g}]"]
