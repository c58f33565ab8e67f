import gzip
import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.core.errors import RewardError
from tunesmith.engine.batch.rollout import Group
from tunesmith.learn.rewards.builtin import arithmetic, final_number, gsm8k
from tunesmith.learn.rewards.scorer import Scorer

INTEGERS = st.integers(-(10**12), 10**12)


def is_right(text: str, answer: object) -> bool:
    (score,) = arithmetic()(completions=[text], answer=[answer])
    assert score in (0.0, 1.0)
    return score == 1.0


def solves(text: str, answer: object) -> bool:
    (score,) = gsm8k()(completions=[text], answer=[answer])
    assert score in (0.0, 1.0)
    return score == 1.0


@pytest.mark.parametrize(
    "text",
    ["47", " 47", " 47\n1 + 1 = 2", "47.", " 47, because", "= 47", "**47**", "(47)", "The sum:47", "+47", " 47\r\n5"],
)
def test_arithmetic_takes_the_first_integer_of_the_first_line(text: str):
    assert is_right(text, 47)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "\n47",
            "470",
            "147",
            "47.5",
            "47.0",
            "-47",
            "\u221247",
            "4 7",
            "47/2",
            "47%",
            "47th",
            "47e3",
            "x47",
        ),
        *(".47", "47,5", "4,7", "1,47", "47:30", "forty-seven", "46 or 47", "\uff14\uff17", "47_000"),
    ],
)
def test_arithmetic_is_strict_about_what_clings_to_the_digits(text: str):
    assert not is_right(text, 47)


def test_arithmetic_reads_thousands_minus_signs_and_messages():
    assert is_right("1,234", 1234) and is_right("1234", "1,234") and is_right("12,345,678.", 12345678)
    assert not is_right("1,23", 123) and not is_right("1,2345", 12345)
    assert is_right("-47", -47) and is_right("\u221247", "-47") and not is_right("47", -47)
    assert is_right("007", 7) and is_right("-0", 0)
    assert is_right([{"role": "assistant", "content": "47\nDone"}], 47)  # type: ignore[arg-type]
    assert is_right("12", 12.0) and is_right("12", " 12 ")


@given(INTEGERS, st.sampled_from(["{}", " {:,}\nnext 5", "= {}.", "{:+}, so"]))
def test_arithmetic_takes_any_integer_and_no_other(number: int, form: str):
    assert is_right(form.format(number), number)
    assert not is_right(form.format(number), number + 1)


@pytest.mark.parametrize("answer", [None, "abc", 47.5, float("nan"), float("inf"), True, [47], "", "4 7"])
def test_arithmetic_refuses_a_row_without_an_integer(answer: object):
    with pytest.raises(RewardError, match=r"the row's `answer` is .*; it must be an integer"):
        is_right("47", answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 apples.\n#### 7", 7),
        ("#### 1,234", 1234),
        ("####18\nQuestion: next\n#### 20", 18),
        ("#### $18.00.", 18),
        ("#### **18**", 18),
        ("#### -5", -5),
        ("#### \u22125", -5),
        ("#### Step 1: add\nThe answer is 18", 18),
        ("#### \\boxed{18}", 18),
        ("The answer is $1,234.50.", Fraction("1234.5")),
        ("That is 50%.", 50),
        ("it costs -$5", -5),
        ("it costs $-5", -5),
        ("10-5", 5),
        ("48/2=24", 24),
        ("half is 1/2", Fraction(1, 2)),
        ("about .5", Fraction(1, 2)),
        ("so \\boxed{18} of 20", 18),
        ("\\boxed{7} no, \\boxed{\\$1{,}018}", 1018),
        ("\\boxed{\\frac{3}{4}}", Fraction(3, 4)),
        ("\\boxed{18\\text{ dollars}}", 18),
        ("\\boxed{} 6", 6),
        ("18kg", 18),
        ("1,00,000", 100000),
        ("so \\boxed{x_{1} = 42}", 42),
        ("\\boxed{1 000}", 1000),
        ("\\boxed{12\\,500}", 12500),
        ("about 1e3", 1000),
        ("about 2.5e-1", Fraction(1, 4)),
        ("the answer is 2 1/2", Fraction(5, 2)),
        ("it fell by -2 1/2", Fraction(-5, 2)),
        ("page 3 of 12", 12),
    ],
)
def test_the_final_number_is_found(text: str, number: object):
    assert final_number(text) == number


@pytest.mark.parametrize("text", ["", "no number", "####", "5/0", "-", "$", ".", ",", "\\boxed{"])
def test_a_text_without_a_number_has_none(text: str):
    assert final_number(text) is None
    assert not solves(text, "#### 5")


def test_gsm8k_compares_exactly():
    assert solves("18.0", "so\n#### 18") and solves("18", 18) and solves("0.5", 0.5) and solves("1,200", "1200")
    assert not solves("18.0000000000000000001", "#### 18")
    assert not solves("0.1", "#### 0.10000000000000001")
    assert not solves("-18", "#### 18") and not solves("180", "#### 18")
    assert solves([{"role": "assistant", "content": "It is 18."}], "#### 18")  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [None, "eighteen", "####", "so 18", True, float("nan"), float("inf"), [18], "5/0"])
def test_gsm8k_refuses_a_row_without_a_number(answer: object):
    with pytest.raises(RewardError, match=r"the row's `answer` is .*; it must be a number, or a text with one after"):
        solves("18", answer)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12), st.data())
def test_gsm8k_reads_a_number_in_any_dress(number, data: st.DataObject):
    plain = f"{number:,}"
    sign, digits = ("-", plain[1:]) if plain.startswith("-") else ("", plain)
    dressed = data.draw(
        st.sampled_from(
            [
                *(plain, f"{number}", f"{sign}${digits}", f"${sign}{digits}", f"{plain}%", f"{plain}.", f"{plain}0"),
                *(plain.replace("-", "\u2212"), f"**{plain}**", f"\\boxed{{{plain}}}"),
            ]
        )
    )
    text = data.draw(st.sampled_from(["{}", "1 and 2 make {}", "#### {}", "12\n#### {}\nnext: 5"])).format(dressed)
    assert final_number(text) == Fraction(number)


@given(st.text(alphabet="0123456789.,-+/$%#\\{}boxedfrac \n\u2212e", max_size=60))
def test_no_text_breaks_the_checkers(text: str):
    solves(text, "#### 5")
    is_right(text, 5)


@pytest.mark.parametrize("piece", ["9", "#", "#### ", "a", "1,", "-", "\\boxed{", "\\frac{1}{", "1/", "$", "."])
def test_a_long_and_odd_completion_is_checked_at_once(piece: str):
    """Linear in its length: a square would take hours."""
    text = piece * (1_000_000 // len(piece))
    solves(text, "#### 5")
    is_right(text, 5)


@pytest.fixture(scope="module")
def gsm8k_answers(data_dir: Path) -> list[str]:
    path = data_dir / "math" / "gsm8k.train.jsonl.gz"
    if not path.is_file():
        pytest.skip("the GSM8K rows are not in the data folder")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["answer"] for line in file]


def test_every_gold_answer_of_gsm8k_is_right_and_every_changed_one_is_wrong(gsm8k_answers: list[str]):
    assert len(gsm8k_answers) > 7000
    numbers = [answer.rpartition("#### ")[2] for answer in gsm8k_answers]
    assert sum(gsm8k()(completions=gsm8k_answers, answer=gsm8k_answers)) == len(gsm8k_answers)
    spoken = [f"So she pays ${number}.00." if "." not in number else f"It is {number}" for number in numbers]
    assert sum(gsm8k()(completions=spoken, answer=gsm8k_answers)) == len(gsm8k_answers)
    for change in ("#### {}1", "#### 1{}", "#### {}.5"):
        wrong = [change.format(number.lstrip("-")) for number in numbers]
        assert sum(gsm8k()(completions=wrong, answer=gsm8k_answers)) == 0
    flipped = [f"#### {number[1:] if number.startswith('-') else '-' + number}" for number in numbers]
    assert sum(gsm8k()(completions=flipped, answer=gsm8k_answers)) == numbers.count("0")


def test_both_are_rewards_by_name_and_need_the_column(make_group):
    group: Group = make_group("2 + 3 =", " 5\n", " 6", columns={"answer": "#### 5"})
    assert Scorer(["gsm8k"]).score([group]).total_PG.tolist() == [[1.0, 0.0]]
    with pytest.raises(RewardError, match=r"reward `arithmetic`: the row's `answer` is '#### 5'; .*completion 0"):
        Scorer(["arithmetic"]).score([group])
    for name in ("arithmetic", "gsm8k"):
        with pytest.raises(RewardError, match=f"reward `{name}` needs `answer`, but the prompts have no such column"):
            Scorer([name]).score([make_group("2 + 3 =", " 5")])
