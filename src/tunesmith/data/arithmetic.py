"""Sums of two small numbers behind three solved ones: a task with a right answer, for verifiable rewards.

Every prompt is the same fixed text and one open sum:

    2 + 3 = 5
    14 + 7 = 21
    30 + 12 = 42
    18 + 36 =
"""

from tunesmith.schema.records import Prompt

LIMIT = 50
"""Both numbers lie in [0, LIMIT)."""

SHOTS = "2 + 3 = 5\n14 + 7 = 21\n30 + 12 = 42\n"
"""The solved sums: of one-digit numbers, of one and two digits with a carry, and of two-digit numbers."""

SHOWN = frozenset({(2, 3), (7, 14), (12, 30)})
"""The unordered pairs inside `SHOTS`: their answers can be copied, so they are no prompts."""


def arithmetic_prompts() -> list[Prompt]:
    """Every ordered pair of numbers as a prompt, with columns `answer` (text) and `pair` (`a,b` with a <= b).

    `a + b` and `b + a` have one `pair`: split by it, so that no held-out sum was trained on the other way round.
    """
    return [
        Prompt(
            id=f"arithmetic:{a}+{b}",
            content=f"{SHOTS}{a} + {b} =",
            columns={"answer": str(a + b), "pair": f"{min(a, b)},{max(a, b)}"},
        )
        for a in range(LIMIT)
        for b in range(LIMIT)
        if (min(a, b), max(a, b)) not in SHOWN
    ]
