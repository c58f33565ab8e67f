"""A reward for the compatibility tests: the share of a completion's characters that are ASCII letters."""


def share(completions: list[str], **columns: object) -> list[float]:
    return [sum(char.isascii() and char.isalpha() for char in text) / max(1, len(text)) for text in completions]
