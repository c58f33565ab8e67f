"""The page of import and export, and its routes."""

import json
import time

import pytest

from app_parts import app_in
from page_parts import faults_of
from server_parts import pairs
from tunesmith.collect.data.pairs import load_preferences
from tunesmith.collect.store.records import CampaignSettings
from tunesmith.collect.web.access import API, MAX_FILE

ASKED = [{"role": "user", "content": "Q"}]
ROW = {"prompt": "P", "chosen": "a", "rejected": "b", "rater": "ann"}


@pytest.fixture
def parts(tmp_path):
    with app_in(tmp_path) as made:
        yield made


def sent(client, rows, name="pairs.jsonl", **query):
    """The state in which an import ends."""
    body = "".join(json.dumps(row) + "\n" for row in rows).encode()
    headers = {"content-type": "application/octet-stream"}
    begun = client.post(f"{API}/imports", params={"name": name, **query}, content=body, headers=headers)
    assert begun.status_code == 202, begun.text
    while True:
        (state,) = (one for one in client.get(f"{API}/imports").json() if one["number"] == begun.json()["number"])
        if state["state"] in ("done", "failed"):
            return state
        time.sleep(0.02)


def test_a_file_is_imported_while_the_server_runs(parts, tmp_path):
    admin = parts.client(parts.store.add_rater("root", "admin").token)
    rows = [{**ROW, "prompt": f"p{number}"} for number in range(1200)]
    state = sent(admin, rows, labels="votes", heldout="true")
    assert (state["state"], state["num_done"], state["num_rows"]) == ("done", 1200, 1200)
    assert state["message"] == "1200 votes added, 0 were there already"
    assert "1200 items that were there are gold" in sent(admin, rows, labels="gold")["message"]
    assert parts.store.reader.stats().raters[0].num_gold == 1200
    assert list((tmp_path / "uploads").iterdir()) == []


def test_what_is_wrong_with_a_file_is_said_with_its_line(parts, tmp_path):
    admin = parts.client(parts.store.add_rater("root", "admin").token)
    state = sent(admin, [{**ROW, "rater": ["x"]}], name="my votes.jsonl", labels="votes")
    assert state["state"] == "failed"
    assert "my votes.jsonl:1: `rater` is a list" in state["message"]
    assert str(tmp_path) not in state["message"]
    assert "unknown kind of file" in sent(admin, [ROW], name="votes.xlsx")["message"]
    assert "1 bad row" in sent(admin, [{}], name="../../etc/votes.jsonl")["message"]
    assert list((tmp_path / "uploads").iterdir()) == []
    assert parts.store.reader.stats().num_items == 0


def test_bad_rows_are_named_and_the_others_of_an_export_of_another_tool_are_votes(parts):
    admin = parts.client(parts.store.add_rater("root", "admin").token)
    turns = {f"conversation_{side}": [*ASKED, {"role": "assistant", "content": side}] for side in "ab"}
    battle = {**turns, "model_a": "m", "model_b": "n", "winner": "model_a", "judge": "j"}
    state = sent(admin, [battle, {**battle, "winner": "none"}], name="battles.jsonl")
    assert state["state"] == "done"
    assert state["message"].startswith("battles of LMArena: 1 votes added, 0 were there already; 1 bad rows left out")
    assert "battles.jsonl:2: `winner` is 'none'" in state["message"]


def test_only_admins_send_files_and_only_as_files(parts):
    rater = parts.client(parts.store.add_rater("eve").token)
    admin = parts.client(parts.store.add_rater("root", "admin").token)
    octets = {"content-type": "application/octet-stream"}
    address = f"{API}/imports?name=x.jsonl"
    assert rater.post(address, content=b"{}", headers=octets).status_code == 403
    assert rater.get("/data").status_code == rater.get(f"{API}/export").status_code == 403
    assert admin.post(address, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    too_large = {**octets, "content-length": str(MAX_FILE + 1)}
    assert admin.post(address, content=b"{}", headers=too_large).status_code == 413
    assert admin.post(f"{API}/imports?name=..", content=b"{}", headers=octets).status_code == 422
    assert admin.get(f"{API}/imports").json() == []


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_an_export_is_a_file_that_trainers_read(parts, tmp_path, form):
    admin = parts.client(parts.store.add_rater("root", "admin").token)
    parts.store.set_campaign(CampaignSettings())
    chat = [{"role": "user", "content": 'Say "hi",\nplease'}]
    turn = {name: [{"role": "assistant", "content": f"{name}; x"}] for name in ("chosen", "rejected")}
    rows = [ROW, {**ROW, "prompt": "Q", "tie": True}, {"prompt": chat, **turn, "rater": 3, "heldout": "yes"}]
    assert sent(admin, rows, labels="votes")["state"] == "done"
    reply = admin.get(f"{API}/export", params={"format": form, "decided": "true"})
    assert reply.headers["content-disposition"] == f'attachment; filename="votes.{form}"'
    path = tmp_path / f"votes.{form}"
    path.write_bytes(reply.content)
    first, second = load_preferences(path)
    assert (first.prompt.content, first.chosen, first.prompt.columns["heldout"]) == ("P", "a", False)
    assert (second.prompt.content, second.chosen) == (tuple(chat), tuple(turn["chosen"]))
    assert (second.prompt.columns["heldout"], second.prompt.columns["rater"]) == (True, "3")
    assert admin.get(f"{API}/export", params={"kind": "rankings", "format": form}).content == b""


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_sends_a_file_and_shows_what_came_of_it(serve, visit, tmp_path, width):
    server = serve(pairs(2))
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({**ROW, "prompt": f"p{number}"}) + "\n" for number in range(300)))
    page = visit.open(server, width)
    page.get_by_role("link", name="Data").click()
    page.get_by_role("button", name="Import").wait_for()
    assert faults_of(page) == []
    page.get_by_label("File", exact=True).set_input_files(file)
    page.get_by_label("What the file says").select_option("votes")
    page.get_by_role("button", name="Import").click()
    page.get_by_text("300 votes added, 0 were there already").wait_for()
    page.get_by_role("status").get_by_text("Imported.").wait_for()
    assert faults_of(page) == []
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "votes.jsonl"
    file.write_text('{"prompt": "x"}\n')
    page.get_by_label("File", exact=True).set_input_files(file)
    page.get_by_role("button", name="Import").click()
    page.get_by_text("pairs.jsonl:1: no column `chosen`").wait_for()
