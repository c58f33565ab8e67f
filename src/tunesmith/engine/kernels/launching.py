"""The plan of a Triton launch, and the integer arithmetic it is computed with. Does not import Triton."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Compile-time sizes of a launch, and its grid of programs.

    A program handles tiles of `block_rows` x `block` numbers; `tiles` is their number along a row (or, where a program
    loops over rows, along the rows of a program).
    """

    block: int
    tiles: int
    num_warps: int
    block_rows: int = 1
    grid: tuple[int, ...] = (1,)


def ceil_div(number: int, divisor: int) -> int:
    """`number / divisor`, rounded up."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, and at least 1."""
    return 1 << max(0, number - 1).bit_length()
