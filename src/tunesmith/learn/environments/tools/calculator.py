"""A calculator for a model: arithmetic without Python's `eval`, whose work is bounded."""

import ast
import math
import operator
from collections.abc import Callable, Sequence

_MAX_CHARS = 500
_MAX_BITS = 4096
_MAX_PLACES = 100

Number = int | float


def calculator(expression: str) -> str:
    """
    Compute an arithmetic expression. It may use + - * / // % ** and parentheses, the functions sqrt, abs, round, min,
    max, floor, ceil, log, exp, sin, cos and tan, and the constants pi and e. Whole numbers are exact.

    Args:
        expression: The expression, for example "(3 + 4) * sqrt(16) / 2".

    Returns:
        The result as text, or a line that begins with "Error:".
    """
    if len(expression) > _MAX_CHARS:
        return f"Error: the expression has {len(expression):,} characters; at most {_MAX_CHARS} are allowed"
    try:
        return _shown(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "Error: division by zero"
    except OverflowError:
        return "Error: a result is too large"
    except SyntaxError as error:
        return f"Error: this is no arithmetic expression ({error.msg})"
    except (RecursionError, MemoryError):
        return "Error: the expression is nested too deeply"
    except (ValueError, TypeError) as error:
        return f"Error: {error}"


def _shown(value: Number) -> str:
    """A whole number with all its digits, others with 12 significant ones."""
    if isinstance(value, int):
        return str(value)
    rounded = float(f"{value:.12g}")
    return str(int(rounded)) if rounded.is_integer() and abs(rounded) < 1e15 else repr(rounded)


def _checked(value: object) -> Number:
    """`value`, which is a number that a calculator can go on with.

    Raises:
        ValueError: It is no real number.
        OverflowError: It has too many digits, or is infinite.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > _MAX_BITS:
            raise OverflowError
        return value
    if isinstance(value, float) and not math.isnan(value):
        if math.isinf(value):
            raise OverflowError
        return value
    raise ValueError(f"{str(value)[:40]!r} is not a real number")


def _value(node: ast.expr) -> Number:
    """The value of a part of the expression, of which each step has a bounded cost."""
    match node:
        case ast.Constant(value=value):
            return _checked(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
            return _SIGNS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _checked(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _checked(_called(name, [_value(argument) for argument in arguments]))
    raise ValueError(_refusal(node))


def _refusal(node: ast.expr) -> str:
    allowed = f"use + - * / // % **, {', '.join(_FUNCTIONS)}, pi and e"
    match node:
        case ast.BinOp(op=ast.BitXor()):
            return "^ is not allowed; write ** for a power"
        case ast.Tuple():
            return "a comma separates only the arguments of a function; write 1000 for 1,000"
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            return f"{name[:40]!r} is not known here, or not in this form; {allowed}"
        case _:
            return f"only arithmetic is allowed: {allowed}"


def _power(base: Number, exponent: Number) -> object:
    bits = base.bit_length() if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 else 0
    if bits * exponent > 2 * _MAX_BITS:
        raise OverflowError
    return base**exponent


def _quotient(dividend: Number, divisor: Number) -> Number:
    """Exact if the result is a whole number."""
    if isinstance(dividend, int) and isinstance(divisor, int) and dividend % divisor == 0:
        return dividend // divisor
    return dividend / divisor


def _root(value: Number) -> Number:
    if value < 0:
        raise ValueError(f"sqrt of {_shown(value)}, which is negative")
    whole = math.isqrt(value) if isinstance(value, int) else 0
    return whole if whole * whole == value else math.sqrt(value)


def _rounded(value: Number, places: Number = 0) -> Number:
    if not isinstance(places, int) or abs(places) > _MAX_PLACES:
        raise ValueError(f"round to {_shown(places)} places; a whole number up to {_MAX_PLACES} is allowed")
    return round(value, places) if places else round(value)


def _called(name: str, arguments: Sequence[Number]) -> Number:
    """The value of a function.

    Raises:
        ValueError: It has no value for these arguments, or takes another number of them.
    """
    function, least, most = _FUNCTIONS[name]
    if not least <= len(arguments) <= most:
        many = "any number of" if most == _MAX_CHARS else f"at most {most}"
        raise ValueError(f"{name} has {len(arguments)} arguments; it takes at least {least} and {many}")
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


_CONSTANTS = {"pi": math.pi, "e": math.e}
_SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, tuple[Callable[..., Number], int, int]] = {
    "sqrt": (_root, 1, 1),
    "abs": (lambda value: abs(value), 1, 1),
    "round": (_rounded, 1, 2),
    "min": (lambda *values: min(values), 1, _MAX_CHARS),
    "max": (lambda *values: max(values), 1, _MAX_CHARS),
    "floor": (math.floor, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "log": (math.log, 1, 2),
    "exp": (math.exp, 1, 1),
    "sin": (math.sin, 1, 1),
    "cos": (math.cos, 1, 1),
    "tan": (math.tan, 1, 1),
}
