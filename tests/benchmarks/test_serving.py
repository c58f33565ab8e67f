"""`benchmarks.serving`: every chat is answered whole, by our server and by another one."""

import json

import pytest

from benchmarks.serving import ANSWER_TOKENS, TURNS, main


@pytest.mark.nightly
def test_a_smoke_run_has_the_figures_of_each_number_of_chats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "tiny:llama", "--quick", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["sides"]["ours"].keys() == {"1", "4"} and found["beside"] is None
    assert (found["turns"], found["answer_tokens"]) == (TURNS, ANSWER_TOKENS)
    assert all(one["tokens_per_s"] > 0 for one in found["sides"]["ours"].values())


def test_an_address_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--against", "127.0.0.1:8001"]) == 2
    assert "NAME=URL" in capsys.readouterr().err
