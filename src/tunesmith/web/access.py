"""Who may call what: one table of all routes. The guard denies every request that no line of it allows."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Access = Literal["public", "rater", "admin"]
"""`public` needs no login; `rater` anyone who is logged in; `admin` only admins."""

API = "/api/v1"
"""Prefix of everything that answers in JSON."""

_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")

MAX_BODY = 64 * 1024
"""Bytes of a request body where a rule says nothing else."""

MAX_TEXT_BODY = 2 * 1024 * 1024
"""Bytes of a body with a written answer."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`methods` on `path` are open to `access`. A path is written as in the routes: `/join/{invite}`.

    `max_body` bounds the request's body in bytes. `is_page`: without a login the answer is the login page.
    """

    methods: tuple[str, ...]
    path: str
    access: Access
    max_body: int = MAX_BODY
    is_page: bool = False


@dataclass(frozen=True, slots=True)
class RouteTable:
    """All rules, in the order in which they are tried."""

    rules: Sequence[Rule]
    _patterns: Sequence[re.Pattern[str]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_patterns", tuple(_pattern(rule.path) for rule in self.rules))

    def find(self, method: str, path: str) -> Rule | None:
        """The rule for this request, or None if nothing allows it. HEAD is asked for as GET is."""
        wanted = "GET" if method == "HEAD" else method
        for rule in self.at(path):
            if wanted in rule.methods:
                return rule
        return None

    def at(self, path: str) -> Iterable[Rule]:
        """The rules of this path, for any method."""
        return (rule for rule, pattern in zip(self.rules, self._patterns, strict=True) if pattern.fullmatch(path))


def _pattern(path: str) -> re.Pattern[str]:
    """The paths that a template such as `/join/{invite}` stands for; `{name:path}` may hold slashes."""
    pattern, end = "", 0
    for match in _PARAMETER.finditer(path):
        pattern += re.escape(path[end : match.start()]) + ("(?:.*)" if match[2] else "[^/]+")
        end = match.end()
    return re.compile(pattern + re.escape(path[end:]), re.DOTALL)


RULES: tuple[Rule, ...] = (
    Rule(("GET",), "/static/{path:path}", "public"),
    Rule(("GET",), "/login", "public"),
    Rule(("GET",), "/join/{invite}", "public"),
    Rule(("GET",), "/", "rater", is_page=True),
    Rule(("GET",), "/vote", "rater", is_page=True),
    Rule(("GET",), "/raters", "admin", is_page=True),
    Rule(("POST",), f"{API}/session", "public"),
    Rule(("GET", "DELETE"), f"{API}/session", "rater"),
    Rule(("POST",), f"{API}/join", "public"),
    Rule(("GET",), f"{API}/openapi.json", "rater"),
    Rule(("GET",), f"{API}/next", "rater"),
    Rule(("GET",), f"{API}/progress", "rater"),
    Rule(("GET",), f"{API}/guidelines", "rater"),
    Rule(("PUT", "DELETE"), f"{API}/presentations/{{token}}/vote", "rater"),
    Rule(("PUT",), f"{API}/presentations/{{token}}/ranking", "rater"),
    Rule(("PUT",), f"{API}/presentations/{{token}}/demonstration", "rater", max_body=MAX_TEXT_BODY),
    Rule(("GET", "POST"), f"{API}/raters", "admin"),
    Rule(("DELETE",), f"{API}/raters/{{rater_id}}", "admin"),
    Rule(("POST",), f"{API}/versions/{{version}}/rollback", "admin"),
    Rule(("GET",), f"{API}/stats", "admin"),
    Rule(("GET",), f"{API}/export", "admin"),
)
"""The routes of voting and of administration. The watch page brings its own (`watch.RULES`)."""
