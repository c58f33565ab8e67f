"""The program of a process that holds episodes for the training."""

import pickle
from concurrent.futures import Future
from functools import partial
from typing import Any

from tunesmith.base.core.child import serve
from tunesmith.base.core.log import escape_what_cannot_be_encoded
from tunesmith.learn.environments.calls import Calls, Open, Shared
from tunesmith.learn.environments.contract import Episode
from tunesmith.learn.environments.processes import Failure, Setup
from tunesmith.learn.environments.sources import opener


def main() -> None:
    """Answer calls of episodes, until the training closes the connection."""
    escape_what_cannot_be_encoded()  # what an environment prints may be anything
    serve(_Held)


class _Held:
    """The episodes that this process holds, each with a thread for its calls."""

    def __init__(self, setup: bytes) -> None:
        self._failure, self._open, self._shared = _opened(setup)
        self._calls: dict[int, Calls] = {}
        self._episodes: dict[int, Episode] = {}

    def __call__(self, message: tuple[int, str, int, bytes]) -> "tuple[int, bytes] | Future[tuple[int, bytes]]":
        """The number of a call and its answer, once there is one."""
        number, method, key, argument = message
        if method == "begin":
            return number, pickle.dumps(self._failure)
        if method == "open":
            self._calls[key] = Calls(self._shared)
        future = self._calls[key].submit(partial(self._answered, number, method, key, argument))
        if method == "close":
            self._calls.pop(key).end()
        return future

    def _answered(self, number: int, method: str, key: int, argument: bytes) -> tuple[int, bytes]:
        try:
            return number, pickle.dumps(self._result(method, key, pickle.loads(argument)))
        except BaseException as error:  # noqa: BLE001 - an environment may raise anything, an exit too
            if method == "open":
                self._calls.pop(key).end()
            return number, pickle.dumps(Failure.of(error))

    def _result(self, method: str, key: int, argument: Any) -> object:
        if method == "open":
            assert self._open is not None
            self._episodes[key] = self._open(self._calls[key])
            return list(self._episodes[key].tools)
        if method == "close":
            return self._episodes.pop(key).close()
        episode = self._episodes[key]
        if method == "reset":
            return episode.reset(argument), list(episode.tools)
        return episode.step(argument) if method == "step" else episode.reward()


def _opened(setup: bytes) -> tuple[Failure | None, Open | None, Shared]:
    """The function that makes episodes, or the error that keeps it from doing so."""
    try:
        given: Setup = pickle.loads(setup)
    except Exception as error:  # noqa: BLE001 - loading it runs code of the user's
        text = (
            f"what was given as tools or environment_factory cannot be loaded in a process ({error}): a script that is "
            "run is no module; put it into a file that the script imports, or set environment.processes: 0"
        )
        return Failure("InputError", text, is_input=True), None, Shared(0.0)
    section = given.section.model_copy(update={"processes": 0})
    try:
        open_episode = opener(section, tools=given.tools, environment_factory=given.environment_factory)
    except Exception as error:  # noqa: BLE001 - and so does this
        return Failure.of(error), None, Shared(0.0)
    return None, open_episode, Shared(section.timeout_s)


if __name__ == "__main__":
    main()
