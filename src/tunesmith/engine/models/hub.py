"""Uploads to the Hugging Face hub, or to a server with its interface that HF_ENDPOINT names, by `huggingface_hub`.

A push is one commit, made when every file has arrived: until then the repository stays as it was. The token is that of
HF_TOKEN or of `hf auth login`; it is given to the library alone.
"""

import json
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from tunesmith.base.config.yaml_text import is_list, is_mapping
from tunesmith.base.core.errors import HubError, InputError

MARK = "tunesmith.json"
"""In a repository: the run whose model it holds, and the files that were pushed."""

_PLAIN = frozenset({".gitattributes", ".gitignore", "README.md", "LICENSE", "LICENSE.txt", "LICENSE.md"})
"""Files of a repository without a model; the hub makes the first, and its pages offer the others."""

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Found:
    """A repository as it is: its newest commit, files, and, of one that was pushed by Tunesmith, run and files."""

    commit: str
    is_private: bool
    files: Sequence[str]
    run_id: str = ""
    run: str = ""
    pushed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Pushed:
    """The address of the repository, the commit, and the files that the commit removed."""

    url: str
    commit: str
    removed: Sequence[str]


def check_name(flag: str, name: str) -> None:
    """Raise InputError unless `name`, which `flag` gives, is OWNER/NAME as the hub allows it."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"{flag} is {name!r}, which the hub does not allow: {error}") from None
    if "/" not in name:
        raise InputError(f"{flag} is {name!r}; give OWNER/NAME, where OWNER is a user or an organisation of the hub")


def _is_trouble(status: int) -> bool:
    """True if a server answers so because it is broken or has too much to do, not because of what it was asked for."""
    return status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


@contextmanager
def offline() -> Generator[None]:
    """Nobody is contacted by the hub's library within the block: what is not on this machine is an error."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


class Hub:
    """The repository `name` of the hub, for the owner of the token.

    Raises:
        InputError: there is no token.
        HubError: the hub cannot be reached, or refuses; this holds for all methods.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        token = get_token()
        if token is None:
            raise InputError(
                "there is no token for the hub: set HF_TOKEN, or log in with `hf auth login`; it needs write access"
            )
        self._token, self._user = token, ""
        self._api = HfApi(token=token)
        with self._telling("the token"):
            self._user = str(self._api.whoami().get("name", ""))

    @property
    def url(self) -> str:
        """The page of the repository."""
        return f"{self._api.endpoint}/{self.name}"

    def look(self) -> Found | None:
        """The repository as it is; None if there is none that the token may see."""
        with self._telling("what is there"):
            try:
                info = self._api.model_info(self.name)
            except RepositoryNotFoundError:
                return None
            files = [one.rfilename for one in info.siblings or ()]
            found = Found(info.sha or "", bool(info.private), files)
            if MARK not in files:
                return found
            with tempfile.TemporaryDirectory() as folder:
                file = self._api.hf_hub_download(self.name, MARK, revision=info.sha, local_dir=folder)
                text = Path(file).read_bytes()
        try:
            mark: object = json.loads(text)
        except ValueError:
            return found
        if not is_mapping(mark):
            return found
        pushed = [str(one) for one in rows] if is_list(rows := mark.get("files")) else []
        return Found(found.commit, found.is_private, files, str(mark.get("id", "")), str(mark.get("run", "")), pushed)

    def removed(
        self, found: Found | None, files: Sequence[str], run_id: str, *, is_public: bool, replaces: bool
    ) -> list[str]:
        """The files there that a push of `files` of the run `run_id` removes: those of an earlier push of this
        run, or, if the repository holds another model and `replaces`, all others.

        Raises:
            InputError: it holds another model and is not to be replaced, or has another visibility.
        """
        if found is None:
            return []
        if found.is_private == is_public:
            asked = "private; leave --public out" if is_public else "public; add --public"
            raise InputError(f"{self.name} is {asked}, or change its visibility in its settings on the hub")
        others = [one for one in found.files if one not in files and one != ".gitattributes"]
        if _PLAIN.issuperset(found.files):
            return []
        if found.run_id == run_id:
            return [one for one in others if one in found.pushed]
        if not replaces:
            there = [one for one in found.files if one != ".gitattributes"]
            more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
            raise InputError(
                f"{self.name} holds {f'the model of run {found.run}' if found.run else 'other files'} "
                f"({', '.join(there[:_SHOWN])}{more}); give another name, or --overwrite: then a new commit has this "
                "model in their place, and they stay in the history"
            )
        return others

    def push(
        self,
        files: Mapping[str, Path | bytes],
        found: Found | None,
        removed: Sequence[str],
        *,
        is_public: bool,
        title: str,
        shows_progress: bool = True,
    ) -> Pushed:
        """Send `files` and remove `removed`, in one commit upon `found`; without `found`, the repository is made."""
        if not shows_progress:
            disable_progress_bars()
        if found is None:
            with self._telling("a new repository"):
                self._api.create_repo(self.name, private=not is_public, exist_ok=False)
        before = found.commit if found else self._newest()
        sent = [CommitOperationAdd(path, content) for path, content in sorted(files.items())]
        gone = [CommitOperationDelete(path, is_folder=False) for path in removed]
        with self._telling("the files", lambda is_refused: self._changed(before, is_refused=is_refused)):
            done = self._api.create_commit(
                self.name, [*sent, *gone], commit_message=title, parent_commit=found.commit if found else None
            )
        return Pushed(self.url, done.oid, removed)

    def _newest(self) -> str:
        """The newest commit; empty if the hub does not say it."""
        try:
            return self._api.model_info(self.name).sha or ""
        except Exception:  # noqa: BLE001 - as in `_telling`
            return ""

    def _changed(self, before: str, *, is_refused: bool) -> str:
        """What a push that failed has changed, where the newest commit was `before`: a hub that did not refuse it may
        have made the commit, and its answer alone was lost.
        """
        again = "the run is as it was; push again: what has arrived whole is not sent twice"
        if is_refused or (before and self._newest() == before):
            return f"nothing in {self.name} has changed, and {again}"
        return f"{self.name} has all of the commit or nothing of it, which its page shows, and {again}"

    @contextmanager
    def _telling(self, what: str, after: Callable[[bool], str] = lambda _: "") -> Generator[None]:
        """Raise HubError, which says what was asked for, and nothing of the token, for any error of the library.

        It ends with what `after` makes of whether the hub refused, and so did nothing.
        """
        try:
            yield
        except OfflineModeIsEnabled:
            raise HubError("HF_HUB_OFFLINE is set, so nothing can be sent; unset it") from None
        except Exception as error:  # noqa: BLE001 - of one of two HTTP clients, by the version, or of the storage
            cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
            if isinstance(cause, HfHubHTTPError):
                text, is_refused = self._refusal(cause, what), not _is_trouble(cause.response.status_code)
            else:
                text, is_refused = self._failure(error, what), False
            more = after(is_refused)
            raise HubError(text.replace(self._token, "***") + (f"; {more}" if more else "")) from None

    def _refusal(self, error: HfHubHTTPError, what: str) -> str:
        status = error.response.status_code
        said = f": {error.server_message}" if error.server_message else ""
        told = f"{self._api.endpoint} refused {what} ({status}{said})"
        if status == HTTPStatus.UNAUTHORIZED:
            return f"{told}; it does not know the token: set HF_TOKEN to another one, or `hf auth login --force`"
        if status == HTTPStatus.FORBIDDEN:
            return f"{told}; the token of {self._user} may not write to {self.name}: give a name of yours, or a token"
        if _is_trouble(status):
            return f"{self._api.endpoint} cannot answer now ({status}{said}), asked for {what}; try again later"
        return told

    def _failure(self, error: Exception, what: str) -> str:
        reason = error.__cause__ or error
        text = " ".join(str(reason).split())
        if isinstance(reason, json.JSONDecodeError | AttributeError | LookupError | TypeError):
            return f"{self._api.endpoint} answered otherwise than a hub, asked for {what}: see HF_ENDPOINT, or a proxy"
        if isinstance(reason, ValueError):
            return f"{self._api.endpoint} did not accept {what}: {text}"
        return f"{self._api.endpoint} cannot be reached, or the connection broke off ({type(reason).__name__}: {text})"
