import stat
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.core.errors import StoreError
from tunesmith.collect.store.records import Rater
from tunesmith.collect.web import logins
from tunesmith.collect.web.logins import KEY_FILE, Ended, Sessions, new_link, read_key, user_of


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return Ended(tmp_path_factory.mktemp("sessions") / "ended", 0)


@pytest.fixture(scope="module")
def ours(ended):
    return Sessions(b"k" * 32, ended)


def test_a_token_of_a_user_says_who_it_is_for_until_it_expires(ours, ended):
    key = Rater(7, "app", "rater", None, 0.0, scopes=("generate", "feedback"))
    token = ours.sign_user(user_of(key, "Zoë|1.x", 9, ("generate",)), 1000)
    assert ours.read_user(token, 999) == (7, 9, "Zoë|1.x", ("generate",))
    assert ours.read_user(token, 1000) is None
    assert Sessions(b"x" * 32, ended).read_user(token, 0) is None
    assert ours.read_user(ours.sign(7, 1000), 0) is None and ours.read(token, 0) is None


def test_a_cookie_stands_for_its_rater_until_it_expires(ours, ended):
    signed = ours.sign(7, 1000)
    assert ours.read(signed, 999) == 7
    assert ours.read(signed, 1000) is None
    assert Sessions(b"x" * 32, ended).read(signed, 0) is None
    assert Sessions(b"x" * 32, ended).cookie != ours.cookie


@given(st.text(), st.integers(0, 60))
def test_whatever_is_forged_is_nobody(ours, text, place):
    signed = ours.sign(7, 1e12)
    for forged in (text, signed[:place] + text + signed[place:], f"{text}.{signed}"):
        assert forged == signed or ours.read(forged, 0) is None


def test_the_key_is_made_once_and_private(tmp_path):
    key = read_key(tmp_path)
    assert read_key(tmp_path) == key and len(key) == 32
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    (tmp_path / KEY_FILE).write_bytes(b"")
    with pytest.raises(StoreError, match="remove it"):
        read_key(tmp_path)


def test_a_link_works_once_and_not_for_ever(tmp_path, monkeypatch):
    def open_sessions():
        return Sessions(read_key(tmp_path), Ended(tmp_path / "ended", time.time()))

    sessions, token = open_sessions(), new_link(tmp_path, 3)
    assert sessions.use_link("other") is None and sessions.read(token, 0) is None
    assert sessions.use_link(token) == 3
    assert sessions.use_link(token) is None
    assert open_sessions().use_link(token) is None
    monkeypatch.setattr(logins, "LINK_MINUTES", -1)
    assert sessions.use_link(new_link(tmp_path, 3)) is None


def test_what_was_ended_is_kept_until_it_would_have_expired(tmp_path):
    file = tmp_path / "ended"
    ended = Ended(file, 0)
    assert ended.add("a", 100) and ended.add("b", 200) and not ended.add("a", 100)
    with file.open("a") as more:
        more.write("torn by a crash")
    later = Ended(file, 150)
    assert "b" in later and "a" not in later and len(file.read_text().splitlines()) == 1
    file.unlink()
    file.mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        later.add("c", 300)
    assert "c" not in later
