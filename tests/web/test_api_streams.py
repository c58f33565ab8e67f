"""Streams of the API that cannot go on: each ends with an error of its form."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from form_parts import CHAT, MESSAGES, RESPONSES, TEXT, asked_in, conforms, events_of, kind_of_error, stream
from server_parts import Client
from tunesmith.apps.cli.main import main
from tunesmith.collect.store.vote_reader import VoteReader

pytest.importorskip("openai")

from openai.types.responses import ResponseStreamEvent


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("said", "told"), [("die in it", "has ended|ended"), ("half an answer", "its log says why")])
def test_a_stream_that_cannot_go_on_ends_with_an_error_of_its_form(calling, path, said, told):
    last = stream(calling, path, asked_in(path, said))[-1]
    if path == RESPONSES:
        conforms(ResponseStreamEvent, last)
        error = last["response"]["error"]
        assert last["type"] == "response.failed" and error["code"] == "server_error"
    else:
        error = last["error"]
        assert (kind_of_error(last) if path == MESSAGES else error["type"]) in ("api_error", "server_error")
    assert re.search(told, error["message"])


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
@pytest.mark.usefixtures("own_logging")
def test_a_stream_whose_user_is_deleted_meanwhile_says_so_and_is_not_stored(calling, path, tmp_path):
    key, gate = Client(calling.url, calling.facts["key"]), tmp_path / "go"
    ada = Client(calling.url, key.send("POST", "/v1/user_tokens", {"user": "ada"}).json["token"])
    body = {**asked_in(path, f"wait for {gate}"), "stream": True}
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(ada.send, "POST", path, body)
        while b"tunesmith_open_requests 1.0" not in key.send("GET", "/metrics").body:
            assert not job.done()
        assert main(["users", "delete", "ada", "--key", "key", "--dir", str(calling.folder), "--yes"]) == 0
        gate.touch()
        last = events_of(job.result())[-1]
    if path == RESPONSES:
        conforms(ResponseStreamEvent, last)
        assert (last["type"], last["code"]) == ("error", "invalid_api_key")
    elif path == MESSAGES:
        assert kind_of_error(last) == "authentication_error"
    else:
        assert last["error"]["code"] == "invalid_api_key"
    with closing(VoteReader.open(calling.folder / "votes.db")) as reader:
        assert "ada" not in {one.user for one in reader.inferences_after(0)}
