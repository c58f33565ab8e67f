"""Pairs longer than the limit, under tokenizers and chat templates as models bring them: what a reward model and DPO
read of them is what the pages say.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import KINDS, TEMPLATES
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tunesmith.base.schema.records import Message, Pair, Prompt
from tunesmith.collect.data.answers import Answer, AnswerTable, encode_pairs
from tunesmith.collect.data.collate import EncodedPreference, TokenIds, TokenLimit, encode_preferences
from tunesmith.collect.data.rows import BadRows
from tunesmith.engine.models.tokenizer import special_token_ids

LIMITS = (2, 7, 24, 61, 150, 400, 3000)
NUM_CASES = 14
"""Pairs for each tokenizer and template, each within one of the limits, in turn."""

FAMILY = "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{BOY}"
ACCENTS = "e\N{COMBINING ACUTE ACCENT}\N{COMBINING CIRCUMFLEX ACCENT}"
PIECES = ("The cat was happy. ", FAMILY, ACCENTS, "\n\n", "  two  ", "naïve café ", "日本語", "isn't it? ", "a", "4; ")
"""Words, and characters of several tokens, within which a limit cuts."""


def said(draw: random.Random, most: int) -> str:
    """A text of up to `most` pieces."""
    return "".join(draw.choice(PIECES) for _ in range(draw.randint(1, most)))


def pair_of(draw: random.Random) -> Pair:
    """A pair on a text or on a conversation of several turns, perhaps with a system turn; answers begin differently."""
    answers = f"Yes, {said(draw, 20)}", f"No. {said(draw, 20)}"
    if draw.random() < 0.25:
        return Pair(Prompt("1", f"Q{said(draw, 20)}"), *answers)
    turns: list[Message] = [{"role": "system", "content": said(draw, 3)}] if draw.random() < 0.4 else []
    for _ in range(draw.randint(0, 3)):
        turns += [{"role": "user", "content": said(draw, 5)}, {"role": "assistant", "content": said(draw, 5)}]
    return Pair(Prompt("1", (*turns, {"role": "user", "content": said(draw, 5)})), *answers)


def prompt_ids_of(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> TokenIds:
    """The ids of the prompt, by transformers alone."""
    if isinstance(prompt.content, str):
        return tuple(tokenizer(prompt.content)["input_ids"])  # type: ignore[arg-type]
    messages: Any = [dict(message) for message in prompt.content]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(str(text), add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]


def slowly_cut(prompt: TokenIds, answers: list[TokenIds], limit: int) -> tuple[TokenIds, list[TokenIds]]:
    """Prompt and answers, of which one token is dropped at a time: the first of the prompt while the pair is too long
    and the prompt has more than half of the limit, then the last of each answer that is still too long.
    """
    left = list(prompt)
    while len(left) + max(map(len, answers)) > limit and 2 * len(left) > limit + 1:
        left.pop(0)
    cut = [list(answer) for answer in answers]
    for answer in cut:
        while len(left) + len(answer) > limit:
            answer.pop()
    return tuple(left), [tuple(answer) for answer in cut]


def read_by_reward_model(tokenizer: PreTrainedTokenizerBase, pair: Pair, limit: int | None) -> EncodedPreference | None:
    """What a reward model reads of `pair`, None if the row is bad."""
    bad = BadRows(skip=True)
    bad.opened("pairs", 1)
    found = encode_preferences([pair], tokenizer, limit or 10_000, bad, truncate="both" if limit else "none")
    return found[0] if found else None


def read_by_dpo(tokenizer: PreTrainedTokenizerBase, pair: Pair, limit: int) -> list[Answer]:
    """The answers that DPO learns from, none if the row is bad."""
    bad, table = BadRows(skip=True), AnswerTable()
    bad.opened("pairs", 1)
    found = encode_pairs([pair], tokenizer, TokenLimit(limit, "both"), table, bad)
    return [table.answers[place] for one in found for place in one.answers]


def check(tokenizer: PreTrainedTokenizerBase, pair: Pair, limit: int, case: str, counts: Counter[str]) -> None:
    """Compare what is read of `pair` within `limit` with what `slowly_cut` leaves of the whole."""
    whole = read_by_reward_model(tokenizer, pair, None)
    if whole is None:  # a tokenizer without letter case, or a template, may refuse it
        counts["refused"] += 1
        return
    prompt = prompt_ids_of(tokenizer, pair.prompt)
    assert all(ids[: len(prompt)] == prompt for ids in whole.sequences), case
    answers = [ids[len(prompt) :] for ids in whole.sequences]
    assert whole.answer_lengths == tuple(map(len, answers)), case
    assert all(ids[-1] in special_token_ids(tokenizer) for ids in answers), case

    num_alike = next(place for place, ids in enumerate(zip(*answers, strict=False)) if len(set(ids)) > 1)
    shared, rests = prompt + answers[0][:num_alike], [answer[num_alike:] for answer in answers]
    kept, cut = slowly_cut(shared, rests, limit)
    found = read_by_reward_model(tokenizer, pair, limit)
    assert found is not None, case
    assert list(found.sequences) == [kept + answer for answer in cut], case
    num_kept_alike = min(num_alike, len(kept))  # of what both answers begin with, beyond the prompt
    assert found.answer_lengths == tuple(num_kept_alike + len(answer) for answer in cut), case
    for ids, answer, rest in zip(found.sequences, cut, rests, strict=True):
        assert len(ids) <= limit, case
        assert (rest[-1] in answer) == (answer == rest), f"{case}: an answer that was cut has no end"
    counts["cut" if list(found.sequences) != list(whole.sequences) else "whole"] += 1

    kept, cut = slowly_cut(prompt, answers, limit)
    learnt = read_by_dpo(tokenizer, pair, limit)
    if cut[0] == cut[1]:
        assert not learnt, case
        counts["alike for DPO"] += 1
    else:
        assert [(one.prompt_ids, one.completion_ids) for one in learnt] == [(kept, answer) for answer in cut], case


def check_all(name: str, tokenizer: PreTrainedTokenizerBase, templates: dict[str, str]) -> None:
    """`check` some pairs under each template, most of which are cut, and some read as they are."""
    counts: Counter[str] = Counter()
    for template_name, template in templates.items():
        tokenizer.chat_template = template
        for index in range(NUM_CASES):
            draw = random.Random(f"{template_name} {index}")
            limit = LIMITS[index % len(LIMITS)]
            pair = pair_of(draw)
            check(tokenizer, pair, limit, f"{name}, {template_name}, case {index}, limit {limit}", counts)
    assert counts["cut"] > 10 * counts["refused"] and counts["whole"], counts


@pytest.mark.parametrize("name", KINDS)
def test_long_pairs_keep_the_end_of_the_question_and_how_each_answer_begins(name: str) -> None:
    """People train on conversations longer than a small model reads, whose question a cut on the left lost.
    Reported: a reward model of RMB, benchmarks/reward_mix.json.
    """
    check_all(name, KINDS[name](), TEMPLATES)


def test_long_pairs_of_a_small_model_with_the_tokenizer_of_its_folder(data_dir: Path) -> None:
    """The same with a tokenizer that was trained elsewhere. Reported: a reward model of RMB."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(data_dir / "models" / "stories260K")
    check_all("stories260K", tokenizer, {"plain": TEMPLATES["plain"], "Llama 2": TEMPLATES["Llama 2"]})
