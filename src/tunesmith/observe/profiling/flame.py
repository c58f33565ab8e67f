"""Stacks of Python, sampled, as collapsed lines and as the nodes of a flame graph."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

Stack = tuple[str, ...]
"""Functions, outermost first."""


@dataclass(frozen=True, slots=True)
class Node:
    """A function as called by the functions of `stack[:-1]`: the share of all samples in it, and its own."""

    stack: Stack
    share: float
    self_share: float


def counted(looks: Iterable[Sequence[str]]) -> Counter[Stack]:
    """The number of looks that saw each stack, without the frames that all of them begin with: the command line's."""
    counts = Counter(tuple(stack) for stack in looks if stack)
    common = _common_length(list(counts))
    trimmed: Counter[Stack] = Counter()
    for stack, count in counts.items():
        trimmed[stack[common:]] += count
    return trimmed


def _common_length(stacks: Sequence[Stack]) -> int:
    """Frames that all stacks share, but for the last one."""
    shared = takewhile(lambda level: len(set(level)) == 1, zip(*stacks, strict=False))
    return max(0, len(list(shared)) - 1)


def collapsed(counts: Mapping[Stack, int]) -> str:
    """A line `outer;inner 12` for each stack: the form that flamegraph.pl and speedscope read."""
    return "".join(f"{';'.join(stack)} {count}\n" for stack, count in sorted(counts.items()))


def parse(text: str) -> Counter[Stack]:
    """The counts in collapsed lines."""
    rows = (line.rpartition(" ") for line in text.splitlines() if line)
    return Counter({tuple(stack.split(";")): int(count) for stack, _, count in rows})


def nodes(counts: Mapping[Stack, int], least_share: float = 0.0) -> list[Node]:
    """The nodes with at least `least_share` of the samples, callers before those they call."""
    total = sum(counts.values())
    inside: Counter[Stack] = Counter()
    for stack, count in counts.items():
        for depth in range(1, len(stack) + 1):
            inside[stack[:depth]] += count
    kept = sorted(stack for stack, count in inside.items() if count >= least_share * total)
    return [Node(stack, inside[stack] / total, counts.get(stack, 0) / total) for stack in kept]


def functions(counts: Mapping[Stack, int]) -> list[tuple[str, float, float]]:
    """(function, share of samples in which it itself ran, share in which it was on the stack), largest first."""
    total = sum(counts.values())  # the loop is empty where this is 0
    own: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for stack, count in counts.items():
        own[stack[-1]] += count
        for name in set(stack):
            inside[name] += count
    rows = [(name, own[name] / total, count / total) for name, count in inside.items()]
    return sorted(rows, key=lambda row: (-row[1], -row[2], row[0]))
