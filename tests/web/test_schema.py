"""Requests made up from the OpenAPI description: whatever comes, nothing answers 500."""

import sys

import pytest
from hypothesis import HealthCheck, settings

from app_parts import app_in
from tunesmith.apps.workflows import model_worker
from tunesmith.collect.store.records import Candidate, NewItem
from tunesmith.collect.web import drawing
from tunesmith.collect.web.access import API, is_api

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, app_in(tmp_path_factory.mktemp("app")) as made:
        # Tests of the arena in the same process have put another one in its place.
        patch.setattr(drawing, "command", lambda *, stays: [sys.executable, "-m", model_worker.__name__])
        campaign = made.app.state.services.campaign()
        made.store.add_items(campaign.id, [NewItem(f"p{i}", (Candidate("a"), Candidate("b"))) for i in range(50)])
        yield made


@pytest.fixture(scope="module")
def schema(parts):
    return schemathesis.openapi.from_dict(parts.app.openapi())


def test_nothing_made_from_the_description_answers_500(parts, schema):
    admin, key = parts.client(parts.admin), parts.client(parts.key)
    names = []
    for found in schema.get_all_operations():
        operation = found.ok()
        names.append(operation.label)
        _send_many(key if is_api(operation.path) else admin, operation)
    assert len(names) >= 30


def _send_many(client, operation):
    from hypothesis import given

    @settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def send(case):
        arguments = case.as_transport_kwargs(base_url="http://127.0.0.1:8000")
        path = arguments["url"].removeprefix("http://127.0.0.1:8000")
        if path.endswith(f"{API}/session") and arguments["method"] == "DELETE":
            return
        answer = client.request(
            arguments["method"],
            path,
            params=arguments.get("params"),
            json=arguments.get("json"),
            headers={"Content-Type": "application/json"} if "json" in arguments else None,
        )
        assert answer.status_code < 500, (operation.label, answer.text)

    send()
