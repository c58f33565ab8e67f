"""How programs start, stop and lose ours: schedulers, two starts at once, killed processes, forked ones."""

import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from tunesmith.base.core.errors import InputError, RunError
from tunesmith.base.core.system import name_file
from tunesmith.base.runs.folder import RUN_ID, RunFolder
from tunesmith.base.runs.listing import plan_removal, remove
from tunesmith.base.runs.lock import RunLock, only_start
from tunesmith.collect.data.vote_files import write_rows
from tunesmith.collect.web.logins import read_key
from tunesmith.engine.models.assets import write_folder
from tunesmith.observe.profiling import request as requests
from tunesmith.observe.profiling.request import Request

NUM_AT_ONCE = 8


def at_once(do: "multiprocessing.process.BaseProcess | object", *arguments: object) -> list[object]:
    """The outcomes of `do(*arguments)` in as many threads, which begin together: a result or an error of ours."""
    barrier, outcomes = threading.Barrier(NUM_AT_ONCE), []

    def one() -> None:
        barrier.wait()
        try:
            outcomes.append(do(*arguments))  # type: ignore[operator]
        except (RunError, InputError, FileExistsError) as error:
            outcomes.append(error)

    threads = [threading.Thread(target=one) for _ in range(NUM_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_of_two_starts_with_one_run_id_the_loser_leaves_the_winners_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler starts a job twice with one --run-id, in the same second. Reported: issue 45.16."""
    monkeypatch.setenv(RUN_ID, "job")
    outcomes = at_once(RunFolder.create, tmp_path, "ppo", {"algorithm": "ppo"})
    winners = [one.path for one in outcomes if isinstance(one, RunFolder)]
    assert winners
    assert all((path / name).is_file() for path in winners for name in ("recipe.yaml", "environment.json"))
    assert sorted(tmp_path.iterdir()) == sorted(set(winners))  # a second may have passed between two of them
    for error in outcomes:
        if isinstance(error, RunError):
            assert "the id job" in str(error)


def test_runs_of_the_same_second_find_a_free_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep starts many runs of one name at once: a name that is taken is no error. Reported: issue 45.16."""
    monkeypatch.delenv(RUN_ID, raising=False)
    tokens = iter(["aa", "aa", "bb"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(tokens))
    first, second = (RunFolder.create(tmp_path, "ppo", {}) for _ in range(2))
    assert (first.path.name[-2:], second.path.name[-2:]) == ("aa", "bb")


def test_a_second_process_of_a_run_id_waits_for_the_first(tmp_path: Path) -> None:
    """A job is requeued while its first process lives, which has no checkpoint yet. Reported: issue 45.16."""
    with only_start(tmp_path, "job"):
        with only_start(tmp_path, "other"):
            pass
        with pytest.raises(RunError, match="at work on the run job"), only_start(tmp_path, "job"):
            pass
    with only_start(tmp_path, "job"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_killed_process_leaves_its_run_id_free(tmp_path: Path) -> None:
    """A node is lost, and the job starts again under its id. Reported: issue 45.16."""
    context = multiprocessing.get_context("fork")
    entered = context.Event()

    def hold() -> None:
        with only_start(tmp_path, "job"):
            entered.set()
            threading.Event().wait()

    process = context.Process(target=hold)
    process.start()
    entered.wait()
    with pytest.raises(RunError), only_start(tmp_path, "job"):
        pass
    process.kill()
    process.join()
    with only_start(tmp_path, "job"):
        pass


def test_two_exports_to_one_file_write_one(tmp_path: Path) -> None:
    """Two cron jobs export votes to the same name: nothing is overwritten. Reported: issue 45.16."""
    dest = tmp_path / "votes.jsonl"
    outcomes = at_once(write_rows, dest, [{"a": 1}], "jsonl")
    assert sorted(map(str, outcomes)).count("1") == 1
    assert dest.read_text() == '{"a": 1}\n'
    assert list(tmp_path.iterdir()) == [dest]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_taken_name_is_not_replaced(tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems without hard links behave as others do. Reported: issue 45.16."""
    if not has_links:

        def refuse(*_: object) -> None:
            raise PermissionError(1, "no links here")

        monkeypatch.setattr(os, "link", refuse)
    aside, path = tmp_path / "aside", tmp_path / "path"
    aside.write_text("new")
    path.write_text("old")
    with pytest.raises(FileExistsError):
        name_file(aside, path)
    assert (path.read_text(), aside.read_text()) == ("old", "new")
    path.unlink()
    name_file(aside, path)
    assert path.read_text() == "new"
    assert not aside.exists()


def test_two_servers_that_begin_at_once_have_one_key(tmp_path: Path) -> None:
    """A supervisor starts two servers on one folder, or kills one while it writes its key. Reported: issue 45.16."""
    keys = at_once(read_key, tmp_path)
    assert len(set(keys)) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_model_folder_is_put_back_where_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network disk fails in the middle of a save: the model of before is still there. Reported: issue 45.16."""
    folder = tmp_path / "final"
    write_folder(folder, lambda aside: (aside / "config.json").write_text("old") and None)
    replace = os.replace

    def fails_once(source: Path, dest: Path) -> None:
        if Path(source).name == "content":
            raise OSError(5, "Input/output error")
        replace(source, dest)

    monkeypatch.setattr(os, "replace", fails_once)
    with pytest.raises(OSError, match="Input/output"):
        write_folder(folder, lambda aside: (aside / "config.json").write_text("new") and None)
    assert (folder / "config.json").read_text() == "old"
    monkeypatch.undo()
    with pytest.raises(OSError, match="not empty"):
        write_folder(folder, lambda aside: (aside / "config.json").write_text("new") and None, replaces=False)
    assert (folder / "config.json").read_text() == "old"


def test_only_ones_own_request_for_a_profile_is_withdrawn(tmp_path: Path) -> None:
    """Two people attach a profiler to one run, one after the other. Reported: issue 45.16."""
    with RunLock(tmp_path):
        first = requests.ask(tmp_path, 1)
        assert requests.take(tmp_path) == first
        second = requests.ask(tmp_path, 2)
        requests.withdraw(tmp_path, first)
        requests.drop_old(tmp_path)
        assert requests.take(tmp_path) == second
        requests.withdraw(tmp_path, Request("", 1))  # there is none


def test_a_run_that_begins_in_a_folder_that_is_removed_is_seen(tmp_path: Path) -> None:
    """Somebody removes a comparison while a run of it begins. Reported: issue 45.16."""
    demo = RunFolder.create(tmp_path, "demo", {"demo": {}}).path
    removal = plan_removal([demo], tmp_path, checkpoints_only=False)
    new = RunFolder.create(demo, "ppo", {"algorithm": "ppo"}).path
    with pytest.raises(RunError, match="begun meanwhile"):
        remove(removal)
    assert (new / "recipe.yaml").is_file()
