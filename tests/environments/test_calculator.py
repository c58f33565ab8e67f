import pytest
from transformers.utils import get_json_schema

from tunesmith.learn.environments.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("-2 ** 2", "-4"),
        ("+5 - -3", "8"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("6 / 2", "3"),
        ("1 / 3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("10 ** 30 / 10 ** 10", "100000000000000000000"),
        ("2 ** -2", "0.25"),
        ("sqrt(16)", "4"),
        ("sqrt(10 ** 40)", "100000000000000000000"),
        ("sqrt(2)", "1.41421356237"),
        ("round(2.567, 1)", "2.6"),
        ("round(1234, -2)", "1200"),
        ("min(3, 1, 2) + max(4, 5)", "6"),
        ("floor(2.7) + ceil(2.1)", "5"),
        ("log(e)", "1"),
        ("log(8, 2)", "3"),
        ("exp(0)", "1"),
        ("sin(0) + cos(0) + tan(0)", "1"),
        ("abs(-3.5)", "3.5"),
        ("cos(pi)", "-1"),
        ("1e20", "1e+20"),
        ("1e300 * 10", "1e+301"),
        ("  1_000 * 3 ", "3000"),
    ],
)
def test_it_computes(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("1 +", "no arithmetic expression"),
        ("", "no arithmetic expression"),
        ("a = 1", "no arithmetic expression"),
        ("2 ^ 3", "write ** for a power"),
        ("1,000", "write 1000"),
        ("x + 1", "'x' is not known"),
        ("factorial(5)", "'factorial' is not known"),
        ("__import__('os').system('true')", "only arithmetic"),
        ("().__class__", "only arithmetic"),
        ("[1 for _ in range(9)]", "only arithmetic"),
        ("'a' * 3", "'a' is not a real number"),
        ("True + 1", "'True' is not a real number"),
        ("3j", "not a real number"),
        ("(-8) ** 0.5", "not a real number"),
        ("sqrt(-1)", "which is negative"),
        ("log(0)", "log: "),
        ("log(8, 1)", "division by zero"),
        ("sqrt()", "0 arguments"),
        ("sqrt(1, 2)", "2 arguments"),
        ("min(1, key=2)", "not in this form"),
        ("min(*1)", "only arithmetic"),
        ("round(5, 10 ** 9)", "a whole number up to 100"),
        ("round(5, -10 ** 9)", "a whole number up to 100"),
        ("9 ** 9 ** 9", "too large"),
        ("10.0 ** 400", "too large"),
        ("1e999", "too large"),
        ("exp(1000)", "too large"),
        ("sqrt(10 ** 1000 + 1)", "too large"),
        ("floor(1e300) * floor(1e300) ** 9", "too large"),
        ("1\0", "null"),
        ("1" * 501, "501 characters"),
        ("\ud800", "Error"),
    ],
)
def test_it_returns_what_is_wrong(expression: str, says: str) -> None:
    answer = calculator(expression)
    assert answer.startswith("Error: ")
    assert says in answer
    assert len(answer) < 300


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 250 + "1" + ")" * 250,
        "-" * 499 + "1",
        "9**" * 160 + "9",
        "*".join(["9"] * 250),
        "9" * 500,
        "(" + "**9" * 5 + ")",
        "(9**999)" + "*(9**999)" * 40,
        "2**4000%7**4000//3",
        "abs(" * 100 + "1" + ")" * 100,
        "1+" * 249 + "1",
    ],
)
def test_no_expression_takes_much_work(expression: str) -> None:
    assert len(calculator(expression)) < 1300  # unbounded, some of them would take hours or all memory


def test_its_docstring_makes_a_schema() -> None:
    function = get_json_schema(calculator)["function"]
    assert function["name"] == "calculator"
    assert function["parameters"]["required"] == ["expression"]
    assert function["parameters"]["properties"]["expression"]["type"] == "string"
    assert "exact" in function["description"]
