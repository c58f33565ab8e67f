"""Seconds until a person sees the first word of an answer: in the arena after Enter, and in `tunesmith chat`.

A run of one step and its base model answer side by side in the arena of `tunesmith studio`, in a real browser; the time
is from the key to the first text in the page, of the first message, for which models are loaded, and of later ones.
`tunesmith chat` runs in a terminal of its own, in the model's dtype and with `--weights int8` in turns; the time is
from the start of the command to the prompt, and from Enter to the first word. Leave the machine alone meanwhile.
"""

import os
import pty
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, get_args

from benchmarks.common import Say, benchmark, head, load_facts, measure_load, print_table, run
from benchmarks.pages import served, wait_until_read
from tunesmith import train
from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.schema.weights import Weights

MESSAGES = (
    "What is a good name for a brown dog?",
    "Tell me about the sea in two sentences.",
    "How do I boil an egg?",
    "Why is the sky blue?",
)
WEIGHTS = get_args(Weights)
_PROMPT = b"> "
_LONGEST_S = 120

_WATCH = """
document.querySelector("#message").addEventListener("keydown", () => { window.pressed = performance.now(); });
window.seen = [];
new MutationObserver(() => {
  document.querySelectorAll(".turn:last-of-type .answer .passage").forEach((one, side) => {
    if (!window.seen[side] && window.pressed && !["", "…"].includes(one.textContent)) {
      window.seen[side] = performance.now() - window.pressed;
    }
  });
}).observe(document.body, { childList: true, subtree: true, characterData: true });
"""


def arena(options: Namespace, say: Say) -> dict[str, Any]:
    """Seconds to the first word of the first and of the second model, of the first message and of the others.

    Raises:
        InputError: playwright is not installed.
        TrainingError: a model does not answer.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise InputError("playwright is not installed; install the group `dev` of this repository") from None
    model = {"model.dtype": "float32"} if options.quick else {"model.num_trainable_layers": 1}
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        rows = [{"prompt": "What is the sky?", "completion": " Blue."}] * 2
        settings = {"sft.demonstrations_per_step": 2, "demonstrations.heldout_fraction": 0.0, "run.dir": place, **model}
        train.sft(model=_model(options), demonstrations=rows, steps=1, progress=False, **settings)
        server = stack.enter_context(served("studio", place))
        play = stack.enter_context(sync_playwright())
        browser = play.chromium.launch(executable_path=options.browser, args=["--no-sandbox", "--disable-gpu"])
        stack.callback(browser.close)
        context = browser.new_context()
        context.new_page().goto(server["login_url"], wait_until="networkidle")
        wait_until_read(context, server["url"], 1)
        found: list[list[float]] = []
        for number in range(options.rounds + 1):
            found.append(conversation(context, server["url"], MESSAGES[number % len(MESSAGES)]))
            say(f"arena: first words after {found[-1][0]:.2f} and {found[-1][1]:.2f} s")
    first, *later = found
    sides = ("first_word_s", "other_word_s")
    return {
        "loading": dict(zip(sides, first, strict=True)),
        **{name: median(one[side] for one in later) for side, name in enumerate(sides)},
    }


def conversation(context: Any, url: str, message: str) -> list[float]:
    """Seconds from Enter to the first text of each answer to a message, the faster one first."""
    page = context.new_page()
    page.goto(f"{url}/arena")
    page.wait_for_selector("#message:not([disabled])")
    page.evaluate(_WATCH)
    page.locator("#message").fill(message)
    page.locator("#message").press("Enter")
    until_s = time.perf_counter() + _LONGEST_S
    while not all(seen := page.evaluate("[window.seen[0], window.seen[1]]")):
        if time.perf_counter() > until_s:
            raise TrainingError(f"no answer in the arena within {_LONGEST_S} s")
        page.wait_for_timeout(50)
    page.close()
    return sorted(value / 1000 for value in seen)


@contextmanager
def terminal(words: list[str]) -> Iterator[int]:
    """A command in a terminal of its own; the descriptor of the other end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "tunesmith", *words], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        yield ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(place: int, text: bytes) -> bytes:
    """What a terminal shows until `text` is among it."""
    shown = b""
    while text not in shown:
        shown += os.read(place, 4096)
    return shown


def chat(options: Namespace, weights: str) -> dict[str, Any]:
    """Seconds to the prompt and to the first word of each answer, and between the pieces of text after it."""
    words = ["chat", _model(options), "--weights", weights, "--max-new-tokens", "24"]
    start_s, firsts, gaps = time.perf_counter(), list[float](), list[float]()
    with terminal(words) as place:
        read_until(place, _PROMPT)
        ready_s = time.perf_counter() - start_s
        for number in range(options.rounds):
            first, *later = pieces_s(place, MESSAGES[number % len(MESSAGES)])
            firsts.append(first)
            gaps += later
    return {"ready_s": ready_s, "first_word_s": median(firsts), "between_s": median(gaps) if gaps else None}


def pieces_s(place: int, message: str) -> list[float]:
    """Seconds to the first piece of the answer in a terminal, and between that and each that follows.

    Raises:
        TrainingError: the answer is empty.
    """
    last_s, found = time.perf_counter(), list[float]()
    os.write(place, message.encode() + b"\n")
    whole = shown = read_until(place, b"\n").split(b"\n", 1)[1]  # what follows the echo of the line
    while not whole.endswith(_PROMPT):
        if shown.strip():
            now_s = time.perf_counter()
            found.append(now_s - last_s)
            last_s = now_s
        shown = os.read(place, 4096)
        whole += shown
    if not found:
        raise TrainingError(f"tunesmith chat showed no answer to {message!r}")
    return found


def _model(options: Namespace) -> str:
    return "tiny:llama" if options.quick else options.model


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """Figures of the arena, and of chats with each kind of weights."""
    load = measure_load()
    found: dict[str, Any] = {"arena": arena(options, say)}
    sides = {weights: [chat(options, weights) for _ in range(1 if options.quick else 2)] for weights in WEIGHTS}
    found["chat"] = {weights: min(both, key=lambda one: one["first_word_s"]) for weights, both in sides.items()}
    return {**head(options, "first_word", "model", "quick", "rounds"), **found, "load": load_facts([load])}


def _show(facts: Mapping[str, Any]) -> None:
    one = facts["arena"]
    rows = [
        ["arena, models loaded", f"{one['loading']['first_word_s']:.2f}", f"{one['loading']['other_word_s']:.2f}"],
        ["arena", f"{one['first_word_s']:.2f}", f"{one['other_word_s']:.2f}"],
        *([f"chat, {name}", f"{of['first_word_s']:.2f}", ""] for name, of in facts["chat"].items()),
    ]
    print_table(["", "first word s", "of the other answer"], rows)


main = benchmark(
    measure,
    _show,
    *("model", "rounds", "quick"),
    browser={"default": "/usr/bin/chromium", "metavar": "FILE", "help": "Chromium"},
)

if __name__ == "__main__":
    run("first_word")
