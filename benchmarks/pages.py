"""First paint, interaction and memory of each page, at 10,000 runs, a million votes and a million points.

It makes a folder of runs, one of them with a million points, and that of a live loop with a million votes and a million
points, serves both, and looks at every page with headless Chromium. First paint is First Contentful Paint, interaction
the longest Event Timing of what somebody does on the page (from the key or click to the next frame), medians over
rounds, each in a new window. The bars: first paint below 0.3 s, interaction below 100 ms.
"""

import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import Say, benchmark, head, load_facts, measure_load, print_table, run
from tunesmith.base.core.errors import InputError
from tunesmith.collect.store.records import CampaignSettings
from tunesmith.collect.store.runs import RunStore
from tunesmith.collect.store.votes import VoteStore

PAINT_S, INTERACTION_MS = 0.3, 100.0
"""The bars."""

NUM_METRICS = 20
NUM_VERSIONS = 50
NUM_RATERS = 10

# Event Timing has the durations of events from 16 ms on, in steps of 8 ms.
_OBSERVER = """
window.durations = [];
new PerformanceObserver((list) => list.getEntries().forEach(({ duration }) => window.durations.push(duration)))
  .observe({ type: "event", durationThreshold: 16, buffered: true });
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of runs, of votes, and of points of one run and of the live loop."""

    runs: int
    votes: int
    points: int


@dataclass(frozen=True, slots=True)
class Look:
    """A page: its path, a selector that appears when it shows its data, and what somebody does there."""

    path: str
    ready: str
    act: Callable[[Any], None]


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures of the benchmark. Raises InputError without playwright or Chromium, before anything is measured."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise InputError("playwright is not installed; install the group `dev` of this repository") from None
    sizes = Sizes(20, 200, 2_000) if options.quick else Sizes(10_000, 1_000_000, 1_000_000)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        say(f"making {sizes.runs:,} runs, {sizes.votes:,} votes and {sizes.points:,} points, twice")
        make_runs(folder / "runs", sizes)
        make_live(folder / "live", sizes)
        servers = {
            "studio": stack.enter_context(served("studio", str(folder / "runs"))),
            "serve": stack.enter_context(served("serve", "--dir", str(folder / "live"))),
        }
        play = stack.enter_context(sync_playwright())
        browser = play.chromium.launch(executable_path=options.browser, args=["--no-sandbox", "--disable-gpu"])
        stack.callback(browser.close)
        load, pages = measure_load(), {}
        for name, server in servers.items():
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            context.new_page().goto(server["login_url"])
            if name == "studio":
                wait_until_read(context, server["url"], sizes.runs)
            for look in looks(name, context, server["url"]):
                pages[f"{name} {look.path}"] = page_facts(context, server["url"], look, options.rounds)
                say(f"  {name} {look.path}: {pages[f'{name} {look.path}']}")
            context.close()
        memory = {name: server["process"].memory_info().rss / 1e6 for name, server in servers.items()}
    return {
        **head(options, "pages", "quick", "rounds", packages=("fastapi", "playwright")),
        "sizes": {"runs": sizes.runs, "votes": sizes.votes, "points": sizes.points},
        "bars": {"paint_s": PAINT_S, "interaction_ms": INTERACTION_MS},
        "pages": pages,
        "server_mb": memory,
        "passed": all(one["passed"] for one in pages.values()),
        "load": load_facts([load]),
    }


def looks(server: str, context: Any, url: str) -> list[Look]:
    """The pages of a server."""
    if server == "serve":
        return [
            Look("/vote", "main[data-state=ready]", lambda page: page.keyboard.press("1")),
            Look("/watch", "#chart-reward path.line", act_on_charts),
            Look("/raters", "#rows tr, table tr", lambda page: page.get_by_label("Name").fill("grace")),
        ]
    rows = context.request.get(f"{url}/api/v1/runs?text=long").json()["rows"]
    others = context.request.get(f"{url}/api/v1/runs?limit=3&text=grpo").json()["rows"]
    query = "&".join(f"run={row['id']}" for row in [*rows, *others])
    return [
        Look("/runs", "#rows tr", act_on_list),
        Look("/runs/new", "#start:not([disabled])", lambda page: page.get_by_label("Steps").press_sequentially("12")),
        Look(f"/runs/{rows[0]['id']}", "#chart-reward path.line", act_on_charts),
        Look(f"/compare?{query}", "#chart-reward path.line", lambda page: page.get_by_label("minutes").check()),
    ]


def act_on_list(page: Any) -> None:
    """Tick a run, and look for others."""
    page.locator("#rows input").first.check()
    page.get_by_label("Find").press_sequentially("0042")


def act_on_charts(page: Any) -> None:
    """Smooth the curves, point at one, and look for a metric."""
    page.locator("#smoothing").focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.locator("#chart-reward svg").hover()
    page.locator("#all-metrics summary").click()
    page.locator("#search").press_sequentially("metric")


def page_facts(context: Any, url: str, look: Look, num_rounds: int) -> dict[str, object]:
    """Medians over the rounds of first paint, time until the data is there, longest interaction, and memory."""
    found: list[tuple[float, ...]] = []
    for _ in range(num_rounds):
        page = context.new_page()
        page.add_init_script(_OBSERVER)
        start = time.perf_counter()
        page.goto(f"{url}{look.path}")
        page.wait_for_selector(look.ready)
        ready_s = time.perf_counter() - start
        look.act(page)
        page.wait_for_timeout(400)
        paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0")
        longest_ms = page.evaluate("Math.max(0, ...window.durations)")
        session = context.new_cdp_session(page)
        session.send("Performance.enable")
        metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        found.append((paint_ms / 1000, ready_s, longest_ms, metrics["JSHeapUsedSize"] / 1e6))
        page.close()
    paint_s, ready_s, interaction_ms, heap_mb = (statistics.median(values) for values in zip(*found, strict=True))
    return {
        "paint_s": paint_s,
        "ready_s": ready_s,
        "interaction_ms": interaction_ms,  # 0: all below 16 ms
        "heap_mb": heap_mb,
        "passed": 0 < paint_s < PAINT_S and interaction_ms < INTERACTION_MS,
    }


@contextmanager
def served(*words: str) -> Iterator[dict[str, Any]]:
    """A server as a process: `url`, `login_url` and `process`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tunesmith", *words, "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield {**json.loads(process.stdout.readline()), "process": psutil.Process(process.pid)}
    finally:
        process.terminate()
        process.wait()


def wait_until_read(context: Any, url: str, num_runs: int) -> None:
    """Wait until the studio has read all runs, which it does in the background."""
    while context.request.get(f"{url}/api/v1/runs").json()["num_read"] < num_runs:
        time.sleep(1)


def make_runs(root: Path, sizes: Sizes) -> None:
    """Short runs that have ended, and a long one whose name has the word long."""
    recipe = "algorithm: grpo\nmodel: {name: smollm2}\nrun: {steps: 3}\n"
    rows = "".join(json.dumps(row) + "\n" for row in metric_rows(3))
    for number in range(sizes.runs - 1):
        time_of_day = f"{number // 3600:02d}{number // 60 % 60:02d}{number % 60:02d}"
        make_run(root / f"20260101-{time_of_day}-grpo-{number:05d}", recipe, rows)
    long = "".join(json.dumps(row) + "\n" for row in metric_rows(sizes.points // NUM_METRICS))
    make_run(root / "20260102-000000-long-00000", recipe, long)


def make_run(path: Path, recipe: str, rows: str) -> None:
    """The folder of a run."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    (path / "metrics.jsonl").write_text(rows, encoding="utf-8")
    (path / "result.json").write_text('{"minutes": 1.0}', encoding="utf-8")


def metric_rows(num_steps: int) -> Iterator[Mapping[str, float]]:
    """A row of `NUM_METRICS` metrics for each step."""
    names = ("reward", "objective/kl", "entropy", "loss", "time/step_s")
    names += tuple(f"metric/{number}" for number in range(NUM_METRICS - len(names)))
    for step in range(1, num_steps + 1):
        yield {"step": step, **{name: (step * 7919 % 1000) / 1000 + place for place, name in enumerate(names)}}


def make_live(folder: Path, sizes: Sizes) -> None:
    """A live loop with votes between its versions, metrics, and some items that wait for votes."""
    folder.mkdir()
    with VoteStore.open(folder / "votes.db") as store:
        campaign = store.set_campaign(CampaignSettings()).id
        raters = [store.add_rater(f"rater {number}").rater.id for number in range(NUM_RATERS)]
    RunStore.open(folder / "runs.db").close()
    rows = "".join(json.dumps(row) + "\n" for row in metric_rows(sizes.points // NUM_METRICS))
    (folder / "metrics.jsonl").write_text(rows, encoding="utf-8")
    num_items = -(-sizes.votes // NUM_RATERS) + 100
    with sqlite3.connect(folder / "votes.db") as votes:
        fill_votes(votes, campaign, raters, num_items, sizes.votes)
    with sqlite3.connect(folder / "runs.db") as runs:
        versions = (
            (version, 1.7e9 + version, f"v{version}", 0, True, version == NUM_VERSIONS, "")
            for version in range(NUM_VERSIONS + 1)
        )
        columns = "version, created_at, path, num_votes, accepted, serving, note"
        runs.executemany(f"INSERT INTO policy_versions ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", versions)


def fill_votes(votes: sqlite3.Connection, campaign: int, raters: Sequence[int], num_items: int, num_votes: int) -> None:
    """Prompts, items with a candidate of the base and one of a version, and a vote of each rater on most of them."""

    def insert(table: str, columns: str, rows: Iterator[tuple[object, ...]]) -> None:
        places = ", ".join("?" * (columns.count(",") + 1))
        votes.executemany(f"INSERT INTO {table} ({columns}) VALUES ({places})", rows)

    items = range(1, num_items + 1)
    insert(
        "prompts", "id, campaign_id, content_json, sha256", ((i, campaign, f'"Prompt {i}"', f"{i:064d}") for i in items)
    )
    insert(
        "candidates",
        "id, prompt_id, text, weight_version, source_id",
        ((2 * i - n, i, f" answer {n} of {i}", n and 1 + i % NUM_VERSIONS, "") for i in items for n in (1, 0)),
    )
    insert(
        "items",
        "id, campaign_id, prompt_id, kind, is_gold, heldout, is_open",
        ((i, campaign, i, "pair", False, False, i > num_items - 100) for i in items),
    )
    insert(
        "item_candidates",
        "item_id, position, candidate_id",
        ((i, side, 2 * i - 1 + side) for i in items for side in (0, 1)),
    )
    numbers = [(n, *divmod(n - 1, len(raters))) for n in range(1, num_votes + 1)]  # of a vote, its item and its rater
    insert(
        "presentations",
        "id, item_id, rater_id, token, order_json, seed, shown_at, lease_until, state",
        ((n, 1 + i, raters[r], f"{n:043d}", "[0, 1]", 0, 1.7e9, 1.7e9, "done") for n, i, r in numbers),
    )
    insert(
        "votes",
        "presentation_id, revision, verdict, reason, chosen_candidate_id, rejected_candidate_id, created_at",
        ((n, 1, "left", "", 2 * i + 2 - (n % 3 != 0), 2 * i + 2 - (n % 3 == 0), 1.7e9 + n) for n, i, _ in numbers),
    )


def show(figures: Mapping[str, Any]) -> None:
    """Print the figures."""
    rows = [
        (
            name.split("?")[0],
            f"{one['paint_s']:.2f}",
            f"{one['ready_s']:.2f}",
            f"{one['interaction_ms']:.0f}",
            f"{one['heap_mb']:.0f}",
            "yes" if one["passed"] else "NO",
        )
        for name, one in figures["pages"].items()
    ]
    print_table(("page", "first paint s", "data s", "interaction ms", "heap MB", "within"), rows)
    print("\nservers: " + ", ".join(f"{name} {size:.0f} MB" for name, size in figures["server_mb"].items()))


main = benchmark(
    measure, show, *("rounds", "quick"), browser={"default": "/usr/bin/chromium", "metavar": "FILE", "help": "Chromium"}
)


if __name__ == "__main__":
    run("pages")
