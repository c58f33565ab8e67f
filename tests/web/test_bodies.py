import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.collect.web.guard import is_deeper

VALUES = st.recursive(
    st.none() | st.text(alphabet='[]{}"\\a\n') | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='[]{}"\\a'), inner, max_size=3),
    max_leaves=12,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_depth_is_that_of_the_value(value):
    body = json.dumps(value).encode()
    assert depth(value) == 0 or is_deeper(body, depth(value) - 1)
    assert not is_deeper(body, depth(value))


@settings(max_examples=100, deadline=None)
@given(st.binary())
def test_any_bytes_are_read_to_their_end(body):
    assert is_deeper(body, len(body)) is False


def test_hostile_bodies_are_read_once():
    # Each of these takes a backtracking reader quadratic time, minutes at this length.
    for body in (b'"' + b"\\" * 2_000_000, b'"a' * 1_000_000, b'\\"' * 1_000_000, b'"' + b'\\"' * 1_000_000):
        assert not is_deeper(body, 0)
    assert is_deeper(b"[" * 2_000_000, 32)
