"""The table of routes and who may call them. The guard denies every request that no rule allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from starlette.routing import compile_path

Access = Literal["public", "rater", "admin", "generate", "feedback", "key"]
"""`public` needs no login. On pages, `rater` is any login of a person and `admin` that of an admin; on routes of the
API it is a scope of a key. `key` is any key, and no token of a user of one."""

API = "/api/v1"
"""Prefix of all routes that answer in JSON."""

MAX_BODY = 64 * 1024
"""Default limit of a request body, in bytes."""

MAX_TEXT_BODY = 2 * 1024 * 1024
"""Limit of a body with a written answer, in bytes."""

MAX_FILE = 2 * 1024**3
"""Limit of an imported file, in bytes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Opens `methods` on `path`, a template such as `/join/{invite}`, to `access`.

    `max_body` limits the request body in bytes. `is_page`: without a login, redirect to the login page. `is_file`: the
    body is a file of any type, which the route reads as it comes, instead of JSON. `policy` is a content security
    policy in place of the usual one.
    """

    methods: tuple[str, ...]
    path: str
    access: Access
    max_body: int = MAX_BODY
    is_page: bool = False
    is_file: bool = False
    policy: str = ""


def is_api(path: str) -> bool:
    """True for the API's routes, whose callers have keys, and whose errors have OpenAI's form."""
    return path.startswith(("/v1/", "/inference/")) or path in ("/health", "/metrics")


def is_anthropics(path: str) -> bool:
    """True for the API's routes whose errors have Anthropic's form."""
    return path.startswith("/v1/messages")


class RouteTable:
    """All rules; the first match applies."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self._patterns = [compile_path(rule.path)[0] for rule in rules]

    def find(self, method: str, path: str) -> Rule | None:
        """The rule for this request, None if nothing allows it. HEAD follows the rule of GET."""
        wanted = "GET" if method == "HEAD" else method
        return next((rule for rule in self.at(path) if wanted in rule.methods), None)

    def at(self, path: str) -> list[Rule]:
        """The rules of this path, for any method."""
        return [rule for rule, pattern in zip(self.rules, self._patterns, strict=True) if pattern.fullmatch(path)]


RULES: tuple[Rule, ...] = (
    Rule(("GET",), "/static/{path:path}", "public"),
    Rule(("GET",), "/login", "public"),
    Rule(("GET",), "/join/{invite}", "public"),
    Rule(("GET",), "/", "rater", is_page=True),
    Rule(("GET",), "/vote", "rater", is_page=True),
    Rule(("GET",), "/votes", "rater", is_page=True),
    Rule(("GET",), "/watch", "rater", is_page=True),
    Rule(("GET",), "/raters", "admin", is_page=True),
    Rule(("GET",), "/data", "admin", is_page=True),
    Rule(("POST",), f"{API}/session", "public"),
    Rule(("GET", "DELETE"), f"{API}/session", "rater"),
    Rule(("POST",), f"{API}/join", "public"),
    Rule(("GET",), f"{API}/openapi.json", "rater"),
    Rule(("GET",), f"{API}/next", "rater"),
    Rule(("GET",), f"{API}/votes", "rater"),
    Rule(("GET",), f"{API}/raters/me", "rater"),
    Rule(("GET",), f"{API}/progress", "rater"),
    Rule(("GET",), f"{API}/guidelines", "rater"),
    Rule(("PUT", "DELETE"), f"{API}/presentations/{{token}}/vote", "rater"),
    Rule(("PUT",), f"{API}/presentations/{{token}}/ranking", "rater"),
    Rule(("PUT",), f"{API}/presentations/{{token}}/demonstration", "rater", max_body=MAX_TEXT_BODY),
    Rule(("GET", "POST"), f"{API}/raters", "admin"),
    Rule(("GET",), f"{API}/raters/estimates", "admin"),
    Rule(("DELETE",), f"{API}/raters/{{rater_id}}", "admin"),
    Rule(("POST",), f"{API}/versions/{{version}}/rollback", "admin"),
    Rule(("GET",), f"{API}/audit", "admin"),
    Rule(("GET",), f"{API}/stats", "admin"),
    Rule(("GET",), f"{API}/export", "admin"),
    Rule(("GET",), f"{API}/imports", "admin"),
    Rule(("POST",), f"{API}/imports", "admin", max_body=MAX_FILE, is_file=True),
)
"""Routes of the pages, of voting and of administration."""
