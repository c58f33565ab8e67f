"""The exception tree. A message says what was given, what is allowed, and what to change.

The command line maps a raised `TunesmithError` to its `exit_code` and prints the message without a traceback; anything
else that escapes is a defect of Tunesmith and keeps its traceback.
"""

from pathlib import Path


class TunesmithError(Exception):
    """Root of all errors that Tunesmith raises on purpose."""

    exit_code = 1


class InputError(TunesmithError, ValueError):
    """The user gave something that cannot be used; nothing was changed. Exit code 2."""

    exit_code = 2


class ContextFullError(InputError):
    """A prompt leaves too little of the model's context for the completion."""


class ConfigError(InputError):
    """A recipe, config file or `--a.b value` override is wrong: unknown key, bad value, unreadable file.

    The message has a line for each of `problems`.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        lines = [f"{len(problems)} problems in the recipe", *(f"  {problem}" for problem in problems)]
        super().__init__(problems[0] if len(problems) == 1 else "\n".join(lines))


class DataError(InputError):
    """Prompts or preference rows are wrong; the message names file and line."""


class ModelError(InputError):
    """A model or tokenizer cannot be found, read or used for this purpose."""


class RewardError(InputError):
    """A reward function cannot be loaded, or returned an invalid score; the message names function and sample."""


class EnvironmentFailedError(TunesmithError):
    """An environment cannot go on: it fails or hangs in every episode. Exit code 2; the last checkpoint is kept."""

    exit_code = 2


class RunError(InputError):
    """A run folder is missing, incomplete or already in use."""


class CheckpointError(RunError):
    """A checkpoint is damaged or of a version that this release cannot read."""


class TrainingError(TunesmithError):
    """Training cannot continue: too many non-finite steps in a row. The last good checkpoint is kept."""


class LostRankError(TrainingError):
    """An exchange of ranks failed: another one ended, or did not arrive in time."""


class ServerError(TunesmithError):
    """A rollout server is away, or draws from other weights, for longer than the run may wait. Exit code 2.

    The run saved a checkpoint.
    """

    exit_code = 2


class HubError(TunesmithError):
    """The Hugging Face hub cannot be reached, or refuses what was asked. Exit code 2; nothing of a run was changed."""

    exit_code = 2


class StoppedError(TunesmithError):
    """A signal asked the run to stop; it saved a checkpoint first. The exit code is 128 plus the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class ProfiledError(TunesmithError):
    """The run was started for a profile, which is recorded in `run_dir`; it ended there."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(f"{run_dir} was started for a profile, and ended when that was recorded")
        self.run_dir = run_dir


class NativeUnavailableError(InputError):
    """A C++ kernel was requested and cannot be compiled or loaded on this machine; the message says why."""


class TritonUnavailableError(InputError):
    """A Triton kernel was requested and cannot run on this machine or on these tensors; the message says why."""


class MissingDependencyError(InputError):
    """An optional package is required; the message names the extra to install."""


class StoreError(InputError):
    """A database file cannot be opened: damaged, in use by another server, or written by a newer release."""


class StoreInUseError(StoreError):
    """Another process has the database, which it alone may write."""


class UnknownPersonError(StoreError):
    """Nobody of this name is in the store."""


class NameTakenError(StoreError):
    """Another rater has this name, maybe in another spelling."""


class DataDeletedError(StoreError):
    """The data of this rater was deleted, and their access ended: nothing of theirs is stored any more."""


class VoteError(InputError):
    """A vote, ranking or written answer is invalid; nothing was stored."""


class UnknownPresentationError(VoteError):
    """The presentation does not exist, or was shown to another rater; which of both is not revealed."""


class VoteConflictError(VoteError):
    """The vote is too late: the item has all its votes, the campaign is closed, or the time to undo is over."""
