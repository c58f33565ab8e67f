import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.core.errors import StoreError
from tunesmith.web import logins
from tunesmith.web.logins import KEY_FILE, Links, Sessions, read_key

OURS = Sessions(b"k" * 32)


def test_a_cookie_stands_for_its_rater_until_it_expires():
    signed = OURS.sign(7, 1000)
    assert OURS.read(signed, 999) == 7
    assert OURS.read(signed, 1000) is None
    assert Sessions(b"x" * 32).read(signed, 0) is None
    assert Sessions(b"x" * 32).cookie != OURS.cookie


@given(st.text(), st.integers(0, 60))
def test_whatever_is_forged_is_nobody(text, place):
    signed = OURS.sign(7, 1e12)
    for forged in (text, signed[:place] + text + signed[place:], f"{text}.{signed}"):
        assert forged == signed or OURS.read(forged, 0) is None


def test_the_key_is_made_once_and_private(tmp_path):
    key = read_key(tmp_path)
    assert read_key(tmp_path) == key and len(key) == 32
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    (tmp_path / KEY_FILE).write_bytes(b"")
    with pytest.raises(StoreError, match="remove it"):
        read_key(tmp_path)


def test_a_link_works_once_and_not_for_ever(monkeypatch):
    links = Links()
    token = links.make(3)
    assert links.use("other") is None
    assert links.use(token) == 3
    assert links.use(token) is None
    monkeypatch.setattr(logins, "LINK_MINUTES", -1)
    assert links.use(links.make(3)) is None
