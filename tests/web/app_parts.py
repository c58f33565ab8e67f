"""The app in this process, with raters of every kind."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from starlette.testclient import TestClient

from tunesmith.collect.store.records import KeySettings
from tunesmith.collect.store.runs import RunReader
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.allowed import Allowed
from tunesmith.collect.web.api.endpoint import Endpoint
from tunesmith.collect.web.app import create_app
from tunesmith.collect.web.arena import Arena, Contestant, Conversation, of_live_loop
from tunesmith.collect.web.drawing import Drawer
from tunesmith.collect.web.jobs import Jobs
from tunesmith.collect.web.run_index import id_of
from tunesmith.collect.web.settings import Limits, ServerSettings
from tunesmith.collect.web.studio import Studio
from tunesmith.collect.web.wanted import Wanted

URL = "http://127.0.0.1:8000"
RUN = "20260101-120000-ppo-ab12"
RUN_ID = id_of(Path("runs", RUN), Path("runs"))
JOB_ID = hashlib.sha256(b"key").hexdigest()[:12]
TALK_ID = "0" * 32
GENEROUS = Limits(rate_per_s=1e6, burst=1_000_000, failures=1_000_000)


@dataclass
class Parts:
    app: FastAPI
    store: VoteStore
    admin: str
    rater: str
    jobs: Jobs
    key: str

    def client(self, token: str = "", address: str = "127.0.0.1") -> TestClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return TestClient(
            self.app,
            base_url=URL,
            headers=headers,
            follow_redirects=False,
            client=(address, 1),
            raise_server_exceptions=False,
        )


def make_run(path: Path, recipe: str = "algorithm: ppo\nmodel:\n  name: smollm2\n", *rows: dict) -> Path:
    """A run folder that has ended."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(recipe)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "report.html").write_text("<!doctype html><title>report</title>")
    return path


@contextmanager
def app_in(folder: Path, limits: Limits = GENEROUS, hosts: tuple[str, ...] = (), origins=()) -> Iterator[Parts]:
    """The app over a fresh folder with one run, and one that waits; a rater, and an admin in a conversation."""
    settings = ServerSettings(folder, hosts=hosts, limits=limits, origins=origins)
    make_run(folder / "runs" / RUN)
    with (
        VoteStore.open(settings.votes_place) as store,
        closing(RunReader.open(settings.runs_path)) as runs,
        Studio(folder / "runs") as studio,
        Jobs(folder / "jobs", Allowed(folder / "runs", folder / "runs" / ".studio"), max_runs=0) as jobs,
    ):
        jobs.add(Wanted("grpo", settings=(("model.name", "tiny:llama"),)), "key")
        with Drawer(folder / "model_worker.log") as drawer:
            models, is_deleted = partial(of_live_loop, folder, runs), store.reader.is_deleted
            arena = Arena(folder / "arena", drawer, models, keeps_first=True, is_deleted=is_deleted)
            tiny = Contestant("tiny:llama", {"name": "tiny:llama"}, {})
            endpoint = Endpoint(drawer, lambda: [tiny], "tiny")
            app = create_app(settings, store, runs, studio, jobs, arena, endpoint)
            admin, rater = store.add_rater("ada", "admin"), store.add_rater("rob")
            talk = Conversation(TALK_ID, admin.rater.id, [])
            (folder / "arena" / f"{TALK_ID}.json").write_text(talk.to_json())
            key = store.add_rater("client", key=KeySettings(("generate", "feedback")))
            yield Parts(app, store, admin.token, rater.token, jobs, key.token)
