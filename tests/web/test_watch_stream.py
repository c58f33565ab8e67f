import asyncio
import http.client
import json
import os
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from dataclasses import replace
from unittest.mock import patch
from urllib.parse import urlsplit

from tunesmith.collect.store.metric_log import MetricLog
from tunesmith.collect.store.records import PolicyVersion
from tunesmith.collect.store.runs import RunReader, RunStore
from tunesmith.collect.store.vote_watch import VoteWatch
from tunesmith.collect.web.watch import events
from tunesmith.collect.web.watch_data import WatchData


class Events:
    """Server-sent events of a real connection, as they come."""

    def __init__(self, response):
        self.response = response

    def next(self):
        """The next event: (name, data, id), or None at the end. Comments and the time to retry are passed over."""
        fields = {}
        while raw := self.response.readline():
            text = raw.decode().rstrip("\n")
            if text:
                key, _, value = text.partition(": ")
                fields[key] = value
            elif "data" in fields:
                return fields["event"], json.loads(fields["data"]), fields.get("id")
            else:
                fields = {}
        return None

    def until(self, name, holds=lambda data: True):
        """The next event of this name for which `holds`."""
        while (event := self.next()) is not None:
            if event[0] == name and holds(event[1]):
                return event
        raise AssertionError(f"the stream ended before an event {name}")


@contextmanager
def stream(client, after=0, last_event_id=None):
    place = urlsplit(client.url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    headers = {"Authorization": f"Bearer {client.token}"} | ({"Last-Event-ID": last_event_id} if last_event_id else {})
    with closing(connection):
        connection.request("GET", f"/api/v1/stream?after={after}", headers=headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.getheader("content-type").startswith("text/event-stream")
        assert response.getheader("cache-control") == "no-store"
        yield Events(response)


def values(event):
    _, data, _ = event
    return [(step, data["names"][place], value) for _, step, _, place, value in data["rows"]]


def test_a_client_gets_all_topics_at_once_and_then_only_what_is_new(server, trainer):
    trainer.add_version(PolicyVersion(version=0, created_at=1.0, serving=True))
    trainer.add_metrics(1, {"reward": 0.5})
    with stream(server.admin()) as found:
        assert values(found.until("metrics")) == [(1, "reward", 0.5)]
        assert found.until("versions")[1]["versions"][0]["serving"] is True
        trainer.add_metrics(2, {"reward": 0.25, "kl": float("nan")})
        assert sorted(values(found.until("metrics"))) == [(2, "kl", None), (2, "reward", 0.25)]
        trainer.add_version(PolicyVersion(version=1, created_at=2.0))
        assert len(found.until("versions")[1]["versions"]) == 2
        trainer.beat("learning")
        assert found.until("state", lambda data: data["kind"] == "running")[1]["doing"] == "learning"


def test_a_client_that_comes_back_gets_each_metric_once_also_from_another_process(server, trainer):
    client = server.admin()
    trainer.add_metrics(1, {"reward": 1.0})
    with stream(client) as found:
        last_id = found.until("metrics")[2]
    trainer.add_metrics(2, {"reward": 2.0})
    server.stop()
    trainer.add_metrics(3, {"reward": 3.0})
    server.start()
    with stream(client, last_event_id=last_id) as found:
        assert values(found.until("metrics")) == [(2, "reward", 2.0), (3, "reward", 3.0)]


def test_the_browsers_own_memory_counts_more_than_the_address_it_began_with(server, trainer):
    client = server.admin()
    trainer.add_metrics(1, {"reward": 1.0})
    names = client.get("/metrics/names").json
    trainer.add_metrics(2, {"reward": 2.0})
    with stream(client, after=0, last_event_id=str(names["cursor"])) as found:
        assert values(found.until("metrics")) == [(2, "reward", 2.0)]
    with stream(client, after=names["cursor"], last_event_id="nonsense") as found:
        assert values(found.until("metrics")) == [(2, "reward", 2.0)]


def test_a_trainer_that_was_killed_is_said_to_be_dead(server, trainer):
    done = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    trainer.beat("learning")
    with stream(server.admin()) as found:
        found.until("state", lambda data: data["kind"] == "running")
        trainer.close()
        with RunStore.open(server.folder / "runs.db") as other:
            set_pid(other, done.pid)
        found.until("state", lambda data: data["kind"] == "running")
        done.kill()
        done.wait()
        found.until("state", lambda data: data["kind"] == "dead")


def set_pid(store, pid):
    """Let the heartbeat be that of another process, as if it had written it itself."""
    with patch.object(os, "getpid", lambda: pid):
        store.beat("learning")


def test_the_server_ends_at_a_signal_while_streams_are_open(server):
    client = server.admin()
    with stream(client) as one, stream(client) as other:
        one.until("state")
        other.until("state")
        assert server.stop() == 0


def test_each_rater_has_so_many_streams_and_a_closed_one_makes_room(server):
    client = server.admin()
    limit = 16
    with open_streams(client, limit) as opened:
        refused = client.get("/stream?after=0")
        assert refused.status == 429
        assert "too many streams" in refused.json["detail"]
        opened.pop().close()
        for _ in range(100):
            connection = connect(client)
            if connection is not None:
                connection.close()
                return
        raise AssertionError("a closed stream made no room")


@contextmanager
def open_streams(client, count):
    connections = [connect(client) for _ in range(count)]
    try:
        yield connections
    finally:
        for one in connections:
            one.close()


def connect(client):
    place = urlsplit(client.url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    connection.request("GET", "/api/v1/stream?after=0", headers={"Authorization": f"Bearer {client.token}"})
    response = connection.getresponse()
    if response.status == 200:
        response.readline()
        return connection
    connection.close()
    threading.Event().wait(0.1)
    return None


def test_who_is_not_logged_in_gets_no_page_no_numbers_and_no_stream(server):
    nobody = replace(server.admin(), token="")
    for path in ("/versions", "/metrics/names", "/metrics?name=reward", "/stream"):
        assert nobody.get(path).status == 401, path
    assert nobody.send("GET", "/watch").status == 303


def test_queries_out_of_range_are_refused(server):
    admin = server.admin()
    for query in ("", "name=", "name=a&after=-1", f"name=a&after={10**20}", "name=a&points=0", "name=a&points=x"):
        assert admin.get(f"/metrics?{query}").status == 422, query


def test_many_points_come_thinned_with_their_extremes(server, trainer):
    count = 60_000
    spike = 43_457
    rows = [{"step": step, "reward": 9.0 if step == spike else step % 100 / 100} for step in range(count)]
    trainer.files.append("metrics.jsonl", rows)
    (found,) = server.admin().get("/metrics?name=reward&points=600").json["series"]
    assert found["num_points"] == count
    assert found["is_sampled"] is True
    assert len(found["points"]) <= 1_300
    values_by_step = {step: value for _, step, _, value in found["points"]}
    assert values_by_step[spike] == 9.0
    assert min(values_by_step) == 0
    assert max(values_by_step) >= count - 2_000


def test_a_quiet_stream_is_kept_alive_by_comments_and_ends_with_the_server(tmp_path):
    async def collect():
        shutdown, texts = asyncio.Event(), []
        with closing(RunReader.open(tmp_path / "runs.db")) as runs, closing(VoteWatch(tmp_path / "votes.db")) as votes:
            data = WatchData(MetricLog(tmp_path), runs, votes)
            async for text in events(data, shutdown, 0, poll_s=0.01, keep_alive_s=0.03):
                texts.append(text)
                if text.startswith(":"):
                    shutdown.set()
        return texts

    texts = asyncio.run(collect())
    assert texts[0].startswith("retry: ")
    assert texts[-1] == ": still here\n\n"
