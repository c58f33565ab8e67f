import json
import math
import shutil
import tempfile
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunesmith.base.core.errors import StoreError
from tunesmith.base.runs.lock import HOLDER_FILE, RunLock
from tunesmith.collect.store import run_tail
from tunesmith.collect.store.run_tail import METRICS_FILE, POSITION_FILE, WATCH_FOLDER, Follower, RunTail, run_state
from tunesmith.collect.store.runs import RunReader, RunStore


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "20260101-120000-ppo-ab12"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("algorithm: ppo\n")
    return folder


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def line(step, **values):
    return json.dumps({"step": step, **values}) + "\n"


def append(run, *lines):
    with (run / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def copied(place, name="reward"):
    reader = RunReader.open(place / "runs.db")
    found = [(one.step, one.value) for one in reader.series(name, points=5_000).points]
    reader.close()
    return found


def follow_once(run, place):
    tail = RunTail(run, place)
    while tail.poll():
        pass
    tail.close()


def test_each_number_of_each_line_becomes_a_metric_of_its_step(run, place):
    append(run, line(1, reward=0.5, kl=2, refused=True, note="words", bad=None), line(2, reward=-1.5))
    follow_once(run, place)
    assert copied(place) == [(1, 0.5), (2, -1.5)]
    assert copied(place, "kl") == [(1, 2.0)]
    assert copied(place, "bad") == [(1, None)]
    reader = RunReader.open(place / "runs.db")
    assert reader.metric_names() == ["bad", "kl", "reward"]


def test_times_add_up_from_the_start_of_the_run(run, place):
    append(run, line(1, **{"time/step_s": 2.0}), line(2, **{"time/step_s": 3.5}))
    follow_once(run, place)
    reader = RunReader.open(place / "runs.db")
    first, second = reader.series("time/step_s").points
    assert first.time == pytest.approx((run / "recipe.yaml").stat().st_mtime + 2.0)
    assert second.time - first.time == pytest.approx(3.5)


def test_a_line_without_its_end_waits_for_it(run, place):
    tail = RunTail(run, place)
    append(run, line(1, reward=1.0), '{"step": 2, "rew')
    tail.poll()
    assert copied(place) == [(1, 1.0)]
    append(run, 'ard": 2.0}\n')
    tail.poll()
    assert copied(place) == [(1, 1.0), (2, 2.0)]


def test_a_file_that_is_not_there_yet_is_waited_for(run, place):
    tail = RunTail(run, place)
    assert tail.poll() is False
    append(run, line(1, reward=1.0))
    tail.poll()
    assert copied(place) == [(1, 1.0)]


def test_lines_and_names_that_cannot_be_stored_are_left_out(run, place):
    with (run / METRICS_FILE).open("wb") as file:
        file.write(b"no json\n[1]\n\xff\xfe\n")
        file.write(b'{"step": 3, "reward": 1.0, "lone \\ud800": 2.0, "nul \\u0000": 1.0, "": 4.0}\n')
        file.write(b'{"step": 4, "reward": NaN, "long": 1e400}\n')
    follow_once(run, place)
    assert copied(place) == [(3, 1.0), (4, None)]
    assert copied(place, "long") == [(4, None)]


def test_a_line_longer_than_a_portion_is_read_whole(run, place):
    names = {f"metric/{number:06d}": float(number) for number in range(60_000)}
    append(run, line(1, **names), line(2, reward=1.0))
    assert (run / METRICS_FILE).stat().st_size > 1 << 20
    follow_once(run, place)
    assert copied(place) == [(2, 1.0)]
    assert copied(place, "metric/059999") == [(1, 59_999.0)]


def test_opening_again_goes_on_where_it_was(run, place):
    append(run, line(1, reward=1.0))
    follow_once(run, place)
    append(run, line(2, reward=2.0))
    follow_once(run, place)
    assert copied(place) == [(1, 1.0), (2, 2.0)]


def test_rows_that_were_written_before_a_crash_but_not_noted_come_once(run, place):
    append(run, line(1, reward=1.0))
    follow_once(run, place)
    noted = (place / POSITION_FILE).read_bytes()
    append(run, line(2, reward=2.0))
    follow_once(run, place)
    (place / POSITION_FILE).write_bytes(noted)
    follow_once(run, place)
    assert copied(place) == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("damaged", [b"", b"{", b'{"offset": 3}', b'{"other": 1}'])
def test_without_a_usable_note_everything_is_copied_anew(run, place, damaged):
    append(run, line(1, reward=1.0), line(2, reward=2.0))
    follow_once(run, place)
    (place / POSITION_FILE).write_bytes(damaged)
    follow_once(run, place)
    assert copied(place) == [(1, 1.0), (2, 2.0)]


def test_a_removed_database_is_made_anew(run, place):
    append(run, line(1, reward=1.0), line(2, reward=2.0))
    follow_once(run, place)
    for file in place.glob("runs.db*"):
        file.unlink()
    follow_once(run, place)
    assert copied(place) == [(1, 1.0), (2, 2.0)]


def test_a_run_that_is_cut_back_to_its_checkpoint_loses_the_steps_after_it_at_once(run, place):
    tail = RunTail(run, place)
    lines = [line(step, reward=float(step)) for step in range(1, 7)]
    append(run, *lines)
    tail.poll()
    with (run / METRICS_FILE).open("r+b") as file:
        file.truncate(len("".join(lines[:4])))
    tail.poll()
    assert copied(place) == [(step, float(step)) for step in range(1, 5)]
    append(run, line(5, reward=50.0))
    tail.poll()
    assert copied(place)[-2:] == [(4, 4.0), (5, 50.0)]


def test_a_run_that_was_cut_back_and_did_fewer_steps_meanwhile_is_copied_anew(run, place):
    append(run, *(line(step, reward=float(step)) for step in range(1, 9)))
    follow_once(run, place)
    (run / METRICS_FILE).unlink()
    append(run, *(line(step, reward=10.0 * step) for step in range(1, 4)))
    follow_once(run, place)
    assert copied(place) == [(step, 10.0 * step) for step in range(1, 4)]


def test_a_run_that_was_cut_back_and_went_on_meanwhile_is_copied_anew(run, place):
    append(run, *(line(step, reward=float(step)) for step in range(1, 5)))
    follow_once(run, place)
    (run / METRICS_FILE).unlink()
    append(run, *(line(step, reward=10.0 * step) for step in range(1, 9)))
    follow_once(run, place)
    assert copied(place) == [(step, 10.0 * step) for step in range(1, 9)]


def test_ids_only_grow_also_when_the_file_is_copied_anew(run, place):
    append(run, line(1, reward=1.0))
    tail = RunTail(run, place)
    tail.poll()
    reader = RunReader.open(place / "runs.db")
    before = reader.last_metric_id()
    (run / METRICS_FILE).write_text(line(1, reward=5.0))
    tail.poll()
    assert [one.value for one in reader.metrics_after(before)] == [5.0]


def test_two_cannot_follow_into_one_place(run, place):
    tail = RunTail(run, place)
    with pytest.raises(StoreError, match="in use by another process"):
        RunTail(run, place)
    tail.close()


def test_a_run_is_followed_while_somebody_asks_for_it_and_its_state_is_told(run, monkeypatch):
    append(run, line(1, reward=1.0))
    with RunLock(run), Follower() as follower:
        folder = follower.folder(run)
        assert folder == run / WATCH_FOLDER
        reader = RunReader.open(folder / "runs.db")
        assert wait_for(lambda: reader.last_metric_id() > 0)
        append(run, line(2, reward=2.0))
        assert wait_for(lambda: len(reader.series("reward").points) == 2)
        assert wait_for(lambda: reader.heartbeat().state == "running")
        monkeypatch.setattr(run_tail, "IDLE_S", 0.0)
        assert wait_for(lambda: not is_locked_database(folder))
        append(run, line(3, reward=3.0))
        monkeypatch.setattr(run_tail, "IDLE_S", 30.0)
        assert follower.folder(run) == folder
        assert wait_for(lambda: len(reader.series("reward").points) == 3)
    shutil.rmtree(run / WATCH_FOLDER)


def is_locked_database(folder):
    try:
        RunStore.open(folder / "runs.db").close()
    except StoreError:
        return True
    return False


def test_a_second_watcher_keeps_its_files_aside_and_removes_them(run, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    append(run, line(1, reward=1.0))
    with Follower() as follower:
        folder = follower.folder(run)
        assert not list(temporary.iterdir())  # a server that is killed leaves nothing behind
        with Follower() as second:
            other = second.folder(run)
            assert other != folder
            reader = RunReader.open(other / "runs.db")
            assert wait_for(lambda: reader.last_metric_id() > 0)
        assert not other.exists()


def test_of_many_runs_the_last_ones_asked_for_are_followed(run, monkeypatch):
    monkeypatch.setattr(run_tail, "MAX_FOLLOWED", 1)
    other = run.parent / "other"
    other.mkdir()
    with Follower() as follower:
        first, second = follower.folder(run), follower.folder(other)
        assert wait_for(lambda: not is_locked_database(first))
        assert is_locked_database(second)


def test_the_state_of_a_run_follows_from_its_lock_and_its_files(run):
    assert run_state(run) == "stopped"
    with RunLock(run):
        assert run_state(run) == "running"
    (run / HOLDER_FILE).write_text("{}")
    assert run_state(run) == "died"
    (run / "result.json").write_text("{}")
    assert run_state(run) == "finished"


def wait_for(holds):
    for _ in range(400):
        if holds():
            return True
        time.sleep(0.05)
    return False


values = st.one_of(st.none(), st.floats(-100, 100))
actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(values, min_size=1, max_size=4)),
        st.tuples(st.just("cut"), st.integers(0, 6)),
        st.tuples(st.just("poll"), st.none()),
        st.tuples(st.just("reopen"), st.none()),
        st.tuples(st.just("forget"), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions)
def test_whatever_happens_to_the_file_the_copy_is_what_it_says_in_the_end(tmp_path_factory, actions):
    folder = tmp_path_factory.mktemp("run")
    place = folder / "place"
    place.mkdir()
    lines = []
    tail = RunTail(folder, place)
    number = 0.0
    for kind, argument in actions:
        if kind == "append":
            for value in argument:
                # No two lines are ever equal, as with the times that a trainer writes.
                number += 1
                lines.append(line(len(lines) + 1, reward=value, number=number))
            (folder / METRICS_FILE).write_text("".join(lines))
        elif kind == "cut":
            lines = lines[:argument]
            (folder / METRICS_FILE).write_text("".join(lines))
        elif kind == "poll":
            tail.poll()
        else:
            tail.close()
            if kind == "forget":
                (place / POSITION_FILE).unlink(missing_ok=True)
            tail = RunTail(folder, place)
    while tail.poll():
        pass
    tail.close()
    expected = [json.loads(text) for text in lines]
    assert copied(place, "number") == [(row["step"], row["number"]) for row in expected]
    assert copied(place) == [(row["step"], row["reward"]) for row in expected]
    assert all(value is None or math.isfinite(value) for _, value in copied(place))
