"""Whole numbers that launches of kernels are planned with: plain ones, whatever version of Triton there is."""


def ceil_div(number: int, divisor: int) -> int:
    """How many parts of at most `divisor` make up `number`."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, and at least 1."""
    return 1 << max(0, number - 1).bit_length()
