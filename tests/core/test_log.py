"""Logging: to stderr, one handler, each warning once where asked."""

import pytest

from tunesmith.base.core import log

pytestmark = pytest.mark.usefixtures("own_logging")


def test_records_go_to_stderr_and_stdout_stays_empty(capsys: pytest.CaptureFixture[str]):
    log.configure()
    log.get_logger("tunesmith.engine.rollout").info("128 completions")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "128 completions\n"


def test_configuring_twice_does_not_double_the_lines(capsys: pytest.CaptureFixture[str]):
    log.configure()
    log.configure()
    log.get_logger("x").warning("once")
    assert capsys.readouterr().err == "once\n"


@pytest.mark.parametrize(
    ("flags", "shown"),
    [({}, "iw"), ({"verbose": True}, "diw"), ({"quiet": True}, "w")],
    ids=["plain", "verbose", "quiet"],
)
def test_flags_choose_the_level(flags: dict[str, bool], shown: str, capsys: pytest.CaptureFixture[str]):
    log.configure(**flags)
    logger = log.get_logger("x")
    logger.debug("d")
    logger.info("i")
    logger.warning("w")
    assert capsys.readouterr().err.replace("\n", "") == shown


def test_every_logger_is_of_the_tree():
    assert log.get_logger("tunesmith.collect.data.rows").name == "tunesmith.collect.data.rows"
    assert log.get_logger("my_script").name == "tunesmith.my_script"


def test_once_says_a_message_a_single_time(capsys: pytest.CaptureFixture[str]):
    log.configure()
    once = log.Once(log.get_logger("x"))
    assert [once.warning("slow path"), once.warning("slow path"), once.warning("other")] == [True, False, True]
    assert capsys.readouterr().err == "slow path\nother\n"
