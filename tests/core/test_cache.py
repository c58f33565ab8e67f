"""The cache folder follows the environment."""

from pathlib import Path

from tunesmith.core.cache import cache_folder


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("TUNESMITH_CACHE", "/y")
    assert cache_folder() == Path("/y")
    monkeypatch.delenv("TUNESMITH_CACHE")
    assert cache_folder() == Path("/x/tunesmith")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "tunesmith"
