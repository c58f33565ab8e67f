"""The process that draws for the server: requests that come together, and what it refuses."""

import io
import json
import platform
import queue
import subprocess
import sys

import psutil
import pytest

from tunesmith.apps.workflows.model_worker import MAX_MODELS, Worker, main
from tunesmith.engine.models.tiny import tiny_model

TINY = {"name": "tiny:llama", "dtype": "float32"}
FORGETTING = """
import psutil, torch
from tunesmith.apps.workflows.model_worker import MAX_MODELS, Speaker, Worker
from tunesmith.base.core.system import keep_freed_memory

keep_freed_memory()
worker, between = Worker(lambda replies: None), []
for number in range(MAX_MODELS):
    worker.speakers[str(number)] = Speaker(torch.zeros(50 * 2**20), None, 0)
    between.append(bytearray(2**20))
before = psutil.Process().memory_info().rss
worker.speaker({"name": "tiny:llama", "dtype": "float32"})
print((before - psutil.Process().memory_info().rss) / 2**20)
"""
CONVERSATIONS = (("The film was",), ("A story", " begins", "It ends"))
SAMPLING = {"max_new_tokens": 6, "temperature": 1.0}


def request(id, *turns, model=TINY, sampling=SAMPLING, as_text=False):
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
    return {"id": id, "model": model, "messages": messages, "sampling": sampling, "as_text": as_text}


@pytest.fixture(scope="module")
def worker():
    """A worker whose replies are collected in `replies`."""
    replies = []
    made = Worker(replies.extend)
    yield made, replies


def work(worker, *requests):
    """The replies to `requests` that wait together, by id."""
    made, replies = worker
    replies.clear()
    waiting = queue.SimpleQueue()
    for one in requests:
        waiting.put(one)
    made.work(waiting, idle_s=0.01)
    return {one["id"]: [reply for reply in replies if reply["id"] == one["id"]] for one in requests}


def answer_of(replies):
    """The only answer."""
    (answer,) = [one["answer"] for one in replies if "answer" in one]
    return answer


def test_texts_come_in_pieces_whose_sum_is_the_answer(worker):
    found = work(worker, *(request(k, *turns, as_text=True) for k, turns in enumerate(CONVERSATIONS)))
    for replies in found.values():
        answer = answer_of(replies)
        assert "".join(one.get("text", "") for one in replies) == answer["text"]
        assert 1 <= len(answer["token_ids"]) == len(answer["logps"]) <= 6
        assert replies[-1]["done"] and replies[0]["begun"]["prompt"] == answer["prompt"]
    assert answer_of(found[0])["prompt"] == "The film was"
    assert answer_of(found[1])["prompt"] == "A story begins\nIt ends"


def test_what_cannot_be_answered_costs_no_other_request(worker):
    found = work(
        worker, request(0, "x " * 20_000), request(1, "The film was"), request(2, "hi", model={"name": "no/such"})
    )
    assert found[0] == [{"id": 0, "error": found[0][0]["error"], "kind": "context"}]
    assert "the model's context holds" in found[0][0]["error"]
    assert answer_of(found[1])
    assert found[2][0]["kind"] == "model" and "no/such" in found[2][0]["error"]


def test_a_prompt_may_be_read_alone_also_one_that_leaves_no_room_for_an_answer(worker):
    found = work(worker, {**request(0, "x " * 20_000), "n": 0}, request(1, "The film was"))
    begun, done = found[0]
    assert len(begun["begun"]["prompt_ids"]) > begun["begun"]["context"] and done == {"id": 0, "done": True}
    assert answer_of(found[1])


def test_an_answer_names_the_stop_string_that_ended_it(worker):
    letters = {**SAMPLING, "logit_bias": {str(token): 50 for token in range(68, 94)}, "seed": 1}
    whole = answer_of(work(worker, request(0, "The film was", sampling=letters))[0])
    assert whole["finish_reason"] == "length" and whole["stop_string"] is None
    stops = ["never in it", whole["text"][3:5], whole["text"][2:4]]
    cut = answer_of(work(worker, request(0, "The film was", sampling={**letters, "stop_strings": stops}))[0])
    assert cut["text"] == whole["text"][:2] and cut["stop_string"] == stops[2]
    ended = {**letters, "logit_bias": {"2": 100}, "stop_strings": stops}
    assert answer_of(work(worker, request(0, "The film was", sampling=ended))[0])["stop_string"] is None


def test_a_request_that_was_stopped_is_not_drawn_further(worker):
    made, replies = worker
    made.stopped.add(1)
    found = work(worker, request(0, "The film was"), request(1, "The cast was"))
    assert answer_of(found[0]) and found[1] == []
    pieces = []
    made.reply = lambda replies: (pieces.extend(replies), "text" in replies[-1] and made.stopped.add(2))
    work(worker, request(2, "The film was", sampling={"max_new_tokens": 200, "temperature": 1.0}))
    made.reply = replies.extend
    made.stopped.clear()  # ids are used again by other tests
    assert len(pieces) < 20 and "text" in pieces[-1]
    assert answer_of(work(worker, request(3, "The film was"))[3])  # the engine is as it was


def test_a_model_with_a_template_reads_messages_and_few_models_are_kept(worker, tmp_path):
    built = tiny_model("llama")
    built.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    for name in range(MAX_MODELS):
        built.model.save_pretrained(tmp_path / str(name))
        built.tokenizer.save_pretrained(tmp_path / str(name))
    found = work(
        worker, *(request(name, "hi", model={"name": str(tmp_path / str(name))}) for name in range(MAX_MODELS))
    )
    assert answer_of(found[0])["prompt"] == ({"role": "user", "content": "hi"},)
    as_text = work(worker, request(0, "hi", model={"name": str(tmp_path / "0")}, as_text=True))
    assert answer_of(as_text[0])["prompt"] == "hi"
    assert len(worker[0].speakers) == MAX_MODELS


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to give memory back")
def test_the_memory_of_a_model_that_is_forgotten_is_given_back():
    done = subprocess.run([sys.executable, "-c", FORGETTING], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 100  # of 200 MiB, less what the new model takes


def test_content_comes_in_pieces_also_where_tools_may_be_called(worker, tmp_path):
    built = tiny_model("llama")
    told = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    built.tokenizer.chat_template = told + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    built.model.save_pretrained(tmp_path)
    built.tokenizer.save_pretrained(tmp_path)
    letters = {str(token): 50 for token in range(68, 94)}
    sampling = {"max_new_tokens": 12, "seed": 1, "logit_bias": letters}
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]

    def ask(**more):
        one = request(0, "hi", model={"name": str(tmp_path)}, sampling={**sampling, **more})
        replies = work(worker, {**one, "tools": tools, "n": 2})[0]
        texts = [[one.get("text", "") for one in replies if one.get("sample") == sample] for sample in range(2)]
        messages = {one["sample"]: one["answer"]["message"] for one in replies if "answer" in one}
        return texts, [messages[sample]["content"] for sample in range(2)]

    texts, contents = ask()
    assert list(map("".join, texts)) == contents
    assert all(len("".join(pieces[:-1])) >= 10 for pieces in texts)
    first = contents[0]
    texts, stopped = ask(stop_strings=[first[4:6]])
    assert list(map("".join, texts)) == stopped and stopped[0] == first[: first.index(first[4:6])]


def test_a_model_larger_than_the_free_memory_is_not_loaded(worker, tmp_path, monkeypatch):
    built = tiny_model("llama")
    built.model.save_pretrained(tmp_path)
    free = psutil.virtual_memory()._replace(available=10)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    found = work(worker, request(0, "hi", model={"name": str(tmp_path)}))
    assert found[0][0]["kind"] == "model" and "0.0 GB are free" in found[0][0]["error"]


def test_requests_and_replies_are_lines_of_json():
    replies = io.StringIO()
    main(io.StringIO(json.dumps(request(7, "The film was")) + "\n"), replies)
    lines = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert {one["id"] for one in lines} == {7} and answer_of(lines) and lines[-1]["done"]


def test_an_engine_that_fails_costs_its_requests_and_the_next_one_loads_the_model_again(worker, monkeypatch):
    made, _ = worker
    work(worker, request(0, "The film was"))
    (key,) = [key for key in made.speakers if "tiny" in key]
    monkeypatch.setattr(made.speakers[key].batch, "step", lambda: 1 / 0)
    found = work(worker, request(0, "The film was"), request(1, "The cast was"))
    assert [found[id][-1]["kind"] for id in (0, 1)] == ["engine", "engine"]
    assert "ZeroDivisionError" in found[0][-1]["error"]
    assert answer_of(work(worker, request(0, "The film was"))[0])
