"""Tokenizers and chat templates as models bring them: what is sampled, scored and trained on are the same ids."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import KINDS, LOSSY, TEMPLATES
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerBase

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Demonstration, Message, Pair, Prompt, Ranking, Text
from tunesmith.collect.data.answers import AnswerTable, encode_labels, encode_pairs
from tunesmith.collect.data.collate import TokenLimit, encode_preferences
from tunesmith.collect.data.rows import BadRows
from tunesmith.collect.store.records import Candidate, StoredVote
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
from tunesmith.engine.models.heads import MADE_HERE, RewardModel
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.models.tokenizer import (
    Completed,
    decode,
    decode_after,
    decode_marked,
    encode_completed,
    encode_demonstration,
    encode_marked,
    encode_pair_side,
    encode_prompt,
    end_token_id,
    special_token_ids,
    stop_at_ends,
    stop_token_ids,
)
from tunesmith.engine.rollout.engine import Request, make_request
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.sequence import Sequence as DrawnSequence
from tunesmith.engine.rollout.sequence import TextStream
from tunesmith.learn.live.votes import VoteMemory, encode_vote
from tunesmith.learn.rewards.model import ModelReward
from tunesmith.learn.rewards.outcome import samples_of
from tunesmith.learn.trainers.token_check import _shown_learnt, token_facts

Ids = tuple[int, ...]


def raw(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of the ids, special tokens too."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


LIMIT = TokenLimit(10_000)


class Noting(RewardModel):
    """A reward model that notes the ids of the sequence which it is to score."""

    scored: Ids = ()

    def forward(self, ids_BS: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Zeros: the score is not looked at."""
        self.scored = tuple(ids_BS[-1, : int(lengths_B[-1])].tolist())
        return torch.zeros(len(lengths_B))


@dataclass
class Model:
    """A tokenizer of `name` with a tiny policy and reward model of its vocabulary, and counts of what was compared."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        size = len(self.tokenizer)
        self.policy = tiny_model("llama", vocab_size=size, max_position_embeddings=20_000).model
        config = LlamaConfig(
            vocab_size=size,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=1,
            pad_token_id=0,
            max_position_embeddings=20_000,
        )
        setattr(config, MADE_HERE, True)
        self._classifier = Noting(LlamaForSequenceClassification(config), self.tokenizer)

    def set_template(self, template: str) -> None:
        """Load the model again with another chat template."""
        self.tokenizer.chat_template = template
        self.policy.generation_config.eos_token_id = None
        stop_at_ends(self.policy, self.tokenizer)
        self.reward = ModelReward(self._classifier, policy_tokenizer=self.tokenizer)

    def request(self, prompt: Prompt) -> Request:
        """What an engine makes of the prompt."""
        return make_request(self.policy, self.tokenizer, [prompt], 1, SamplingParams(max_new_tokens=64), 1, 0)

    def score(self, prompt: Prompt, prompt_ids: Ids, ids: Ids, text: str, finish: str) -> Ids:
        """The ids from which the reward model scores a completion."""
        completion = Completion(ids, (), (), text, finish)  # type: ignore[arg-type]
        self.reward.score(samples_of([Group(prompt, prompt_ids, (completion,), 0)]))
        return self._classifier.scored

    def same(self, what: str, found: object, expected: object, case: object) -> None:
        """Count a comparison; AssertionError if the two differ."""
        assert found == expected, f"{self.name}, {what}: {found!r} is not {expected!r}, for {case!r}"
        self.counts[what] += 1


@dataclass(frozen=True)
class Case:
    """A prompt, a completion of it, and ids that an engine may have drawn instead."""

    prompt: Text
    completion: str
    drawn: tuple[float, ...]


def check(model: Model, case: Case) -> None:
    """Compare what the engine, all trainers, the votes and the reward model make of `case`."""
    tokenizer, prompt = model.tokenizer, Prompt("1", case.prompt)
    try:
        request = model.request(prompt)
        done = encode_completed(tokenizer, prompt, case.completion)
    except DataError:
        model.counts["refused"] += 1
        return
    prompt_ids = request.prompt_ids[0]
    model.same("prompt of the engine and of the trainers", done.prompt_ids, prompt_ids, case)
    model.same("a trained end is a place where generation stops", done.ids[-1] in request.limits.stop_ids, True, case)
    check_trainers(model, case, prompt, done)
    check_texts(model, case, prompt, done)
    stop_ids = request.limits.stop_ids
    usual = [index for index in range(len(tokenizer)) if index not in stop_ids]
    drawn = tuple(usual[int(place * len(usual))] for place in case.drawn)
    check_drawn(model, case, prompt, request, drawn)


def check_trainers(model: Model, case: Case, prompt: Prompt, done: Completed) -> None:
    """SFT, DPO, KTO and reward models train on the ids of the prompt and of the completion."""
    tokenizer, other = model.tokenizer, "Quite another answer, 1 2 3."
    for loss_on in ("assistant", "last", "all"):
        learnt = encode_demonstration(tokenizer, Demonstration(prompt, case.completion), loss_on)  # type: ignore[arg-type]
        model.same("ids of SFT", learnt.ids, done.ids, case)
        first = 1 if loss_on == "all" else len(done.prompt_ids)
        model.same("learnt tokens of SFT", learnt.spans, (range(first, len(done.ids)),), case)
    table, labelled = AnswerTable(), AnswerTable()
    (pair,) = encode_pairs([Pair(prompt, case.completion, other)], tokenizer, LIMIT, table, BadRows())
    answer = table.answers[pair.chosen]
    model.same("ids of DPO", (answer.prompt_ids, answer.completion_ids), (done.prompt_ids, done.completion_ids), case)
    labels = encode_labels([Pair(prompt, case.completion, other)], tokenizer, LIMIT, labelled, BadRows())
    answer = labelled.answers[labels[0].answer]
    model.same("ids of KTO", (answer.prompt_ids, answer.completion_ids), (done.prompt_ids, done.completion_ids), case)
    (encoded,) = encode_preferences([Pair(prompt, case.completion, other)], tokenizer, 10_000)
    model.same("ids of a reward model", encoded.sequences[0], done.ids, case)
    model.same("one prompt of both sides", encoded.sequences[1][: len(done.prompt_ids)], done.prompt_ids, case)


def check_texts(model: Model, case: Case, prompt: Prompt, done: Completed) -> None:
    """A completion that is drawn as it was trained has the text of the data, is scored as it was trained, and gives the
    same ids again.
    """
    tokenizer, own = model.tokenizer, done.completion_ids[:-1]
    text = decode_after(tokenizer, done.prompt_ids, own)
    scored = model.score(prompt, done.prompt_ids, done.completion_ids, text, "stop")
    model.same("ids scored are those trained", scored, done.ids, case)
    scored = model.score(prompt, done.prompt_ids, own, text, "length") if own else done.ids
    model.same("ids scored are those trained, cut off by the length", scored, done.ids, case)
    if model.name in LOSSY or set(own) & special_token_ids(tokenizer):
        return
    if isinstance(prompt.content, str):
        model.same("text of the completion", text, case.completion, case)
    if not case.completion.endswith(text):  # the template has changed it
        return
    model.same("ids of a completion's text", encode_completed(tokenizer, prompt, text).ids, done.ids, case)
    stored = vote(prompt, Candidate(text), Candidate("no"))
    answer = encode_vote(stored, tokenizer, 10_000).chosen
    model.same(
        "votes on text", (answer.prompt_ids, answer.completion_ids), (done.prompt_ids, done.completion_ids), case
    )


def check_drawn(model: Model, case: Case, prompt: Prompt, request: Request, drawn: Ids) -> None:
    """Ids that an engine drew are scored and voted on as they are; their text is that of all less that of the prompt,
    also piece by piece.
    """
    tokenizer, prompt_ids = model.tokenizer, request.prompt_ids[0]
    sequence = DrawnSequence(0, 0, prompt_ids, request.limits, request.decode)
    stream = TextStream(request.decode, sequence.context)
    pieces = []
    for token in drawn:
        sequence.append(token, 0.0, 0.0)
        pieces.append(stream.push(sequence.token_ids))
    sequence.finish_reason = "length"
    before, whole = decode(tokenizer, prompt_ids), decode(tokenizer, (*prompt_ids, *drawn))
    if whole.startswith(before):
        model.same("text of drawn ids", sequence.text, whole[len(before) :], case)
    model.same("text of drawn ids, piece by piece", "".join(pieces) + stream.finish(sequence.text), sequence.text, case)
    scored = model.score(prompt, prompt_ids, drawn, sequence.text, "length")
    model.same("drawn ids are scored", scored[: len(prompt_ids) + len(drawn)], (*prompt_ids, *drawn), case)
    stored = vote(prompt, Candidate(sequence.text, drawn), Candidate("no", (1,)))
    answer = encode_vote(stored, tokenizer, 10_000).chosen
    model.same(
        "drawn ids are what votes train on", (answer.prompt_ids, answer.completion_ids), (prompt_ids, drawn), case
    )


def vote(prompt: Prompt, chosen: Candidate, rejected: Candidate) -> StoredVote:
    """A vote for `chosen`."""
    numbers = {"id": 1, "presentation_id": 1, "item_id": 1, "campaign_id": 1, "rater_id": 1}
    return StoredVote(
        **numbers,
        rater="ann",
        prompt=prompt.content,
        heldout=False,
        created_at=0.0,
        verdict="left",
        chosen=chosen,
        rejected=rejected,
        margin=1.0,
        is_gold=False,
        offer_id=None,
    )


WORDS = (
    "The cat",
    "was",
    "happy",
    ".",
    "s",
    "'s",
    "Once",
    "n't",
    "42",
    "a",
    "user",
    "\u00e9",
    "e\u0301",
    "\U0001f642",
    "\u65e5\u672c",
)
SPACES = ("", "", "", " ", " ", " ", "  ", "\n", "\n\n", "\n\n\n", " \n", "\t")


def text_of(draw: Callable[[Sequence[str]], str], num_words: int) -> str:
    """A text of some words, with white space before, between and after them."""
    return "".join(draw(SPACES) + draw(WORDS) for _ in range(num_words)) + draw(SPACES)


def case_of(draw: Callable[[Sequence[str]], str], number: Callable[[int], int]) -> Case:
    """A case; `draw` picks one of some texts, `number` a number below another."""
    drawn = tuple(number(10_000) / 10_000 for _ in range(1 + number(12)))
    completion = text_of(draw, 1 + number(4))
    if number(2):
        return Case(text_of(draw, 1 + number(4)), completion, drawn)
    roles = ["user", *(["assistant", "user"] * number(2)), *(["assistant"] * number(2))]
    messages: list[Message] = [{"role": role, "content": text_of(draw, 1 + number(3))} for role in roles]
    if number(4) == 0:
        messages.insert(0, {"role": "system", "content": text_of(draw, 1)})
    thought = number(4)
    if thought < 2:
        opening = draw(("<think>", "<think>\n")) if thought else ""
        completion = f"{opening}{text_of(draw, 2)}</think>{completion}"
    return Case(tuple(messages), completion, drawn)


MADE: dict[str, Model] = {}


def model_of(kind: str) -> Model:
    """The model of a kind, made once."""
    if kind not in MADE:
        MADE[kind] = Model(kind, KINDS[kind]())
    return MADE[kind]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_sampled_scored_and_trained_are_the_same_ids(kind: str, data: st.DataObject) -> None:
    """People train Llama 2, Mistral, Gemma, BERT-like and GPT-like tokenizers with every sort of template.
    Reported: issue 45.1, 45.2, 45.3.
    """
    model = model_of(kind)
    model.set_template(data.draw(st.sampled_from(list(TEMPLATES.values())), label="template"))
    case = case_of(lambda some: data.draw(st.sampled_from(some)), lambda below: data.draw(st.integers(0, below - 1)))
    check(model, case)


ASK: tuple[Message, ...] = ({"role": "user", "content": "Two plus two?"},)


def with_template(template: str, kind: str = "byte-level") -> PreTrainedTokenizerBase:
    """A new tokenizer with one of the templates."""
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def saved(folder: Path, tokenizer: PreTrainedTokenizerBase) -> ModelSection:
    """A tiny model with this tokenizer, in a folder as people download it."""
    model = tiny_model("llama", vocab_size=len(tokenizer)).model
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelSection(name=str(folder))


def test_generation_stops_at_the_token_that_closes_a_turn(tmp_path: Path) -> None:
    """A template closes turns by a token that the generation config does not name: generation ran to the limit, and
    GRPO trained on the rest. Reported: issue 45.3.
    """
    tokenizer = with_template("own end")
    loaded = load_policy(saved(tmp_path, tokenizer))
    end_id = tokenizer.convert_tokens_to_ids("<|end|>")
    learnt = encode_demonstration(loaded.tokenizer, Demonstration(Prompt("1", ASK), "Four."), "assistant")
    assert learnt.ids[-1] == end_id in stop_token_ids(loaded.model, loaded.tokenizer)
    assert end_id in loaded.model.generation_config.eos_token_id  # type: ignore[operator, union-attr]
    bias = {end_id: 100.0}
    sampling = SamplingParams(max_new_tokens=8, logit_bias=bias, seed=0)
    for model in (loaded.model, tiny_model("llama", vocab_size=len(tokenizer)).model):  # as loaded, and one's own
        (group,) = open_engine(model, loaded.tokenizer).generate([Prompt("1", ASK)], 1, sampling)
        (completion,) = group.completions
        assert (completion.token_ids, completion.text, completion.finish_reason) == ((end_id,), "", "stop")


@pytest.mark.parametrize(
    ("template", "chosen", "rejected"),
    [
        ("drops thinking", "<think>\n4\n</think>\nFour.", "<think>\nblah\n</think>\nFour."),
        ("trims", "Four.", "  Four. \n"),
    ],
)
def test_completions_that_a_template_makes_equal_are_bad_rows(template: str, chosen: str, rejected: str) -> None:
    """Pairs differ in their reasoning, or in white space, and the template drops it: a loss of 0.6931, for ever.
    Reported: issue 45.3.
    """
    tokenizer, prompt = with_template(template), Prompt("1", ASK)
    items = [
        Pair(prompt, chosen, rejected),
        Pair(prompt, chosen, "Five."),
        Pair(prompt, chosen, rejected, tie=True),
        Ranking(prompt, (chosen, "Five.", rejected), (1, 2, 3)),
        Ranking(prompt, (chosen, rejected, "Five."), (1, 1, 2)),
    ]
    for encode in (
        lambda bad: encode_preferences(items, tokenizer, 1000, bad),
        lambda bad: encode_pairs(items, tokenizer, LIMIT, AnswerTable(), bad),
        lambda bad: encode_labels(items, tokenizer, LIMIT, AnswerTable(), bad),
    ):
        bad = BadRows(skip=True)
        bad.opened("pairs", len(items))
        encode(bad)
        reasons = bad.finish().reasons
        assert reasons == {"same completions": 2}
    said = r"are the same to the model, because the chat template, the tokenizer or `pairs\.truncate` drops"
    with pytest.raises(DataError, match=said):
        encode_preferences(items, tokenizer, 1000)


@pytest.mark.parametrize("template", ["opens thinking", "opens and drops thinking"])
@pytest.mark.parametrize(
    ("completion", "learnt"), [("Four.", "Four."), ("<think>\nIt is 4.\n</think>\nFour.", "It is 4.\n</think>\nFour.")]
)
def test_behind_a_prompt_that_opens_thinking_an_answer_is_as_a_model_samples_it(
    template: str, completion: str, learnt: str
) -> None:
    """DPO refused such templates, SFT's advice led to the same refusal, and reward models saw `<think>` in PPO alone.
    Reported: issue 45.3.
    """
    tokenizer, prompt = with_template(template), Prompt("1", ASK)
    done = encode_completed(tokenizer, prompt, completion)
    assert raw(tokenizer, done.prompt_ids).endswith("assistant\n<think>\n")
    assert raw(tokenizer, done.completion_ids) == f"{learnt}<|im_end|>"
    talk = (*ASK, {"role": "assistant", "content": "4"}, *ASK, {"role": "assistant", "content": completion})
    with pytest.raises(DataError, match="loss_on: last"):
        encode_demonstration(tokenizer, Demonstration(Prompt("1", ""), talk), "assistant")
    for loss_on in ("last", "all"):
        ids = encode_demonstration(tokenizer, Demonstration(Prompt("1", ""), talk), loss_on).ids  # type: ignore[arg-type]
        assert ids == encode_completed(tokenizer, Prompt("1", talk[:3]), completion).ids
    assert encode_pair_side(tokenizer, prompt, talk[1:]) == ids  # a reward model takes several turns too


@pytest.mark.parametrize("kind", ["byte-level", "Llama 2", "Metaspace, never"])
def test_each_turn_of_a_conversation_is_learnt_from_what_an_engine_would_see(kind: str) -> None:
    """Answers begin with empty lines or spaces, which merge with the template's own: left out of SFT's loss.
    Reported: issue 45.2.
    """
    tokenizer = with_template("ChatML", kind)
    answers = ("\n\nOnce", "  two", "user\n")
    talk = [turn for answer in answers for turn in (*ASK, {"role": "assistant", "content": answer})]
    found = encode_demonstration(tokenizer, Demonstration(Prompt("1", ""), tuple(talk)), "assistant")
    learnt = [raw(tokenizer, found.ids[span.start : span.stop]) for span in found.spans]
    assert [text.lstrip(" ") for text in learnt] == [f"{answer}<|im_end|>".lstrip(" ") for answer in answers]
    first = found.spans[0].start
    assert found.ids[:first] == encode_prompt(tokenizer, Prompt("1", ASK))
    assert raw(tokenizer, found.ids) == raw(
        tokenizer, tokenizer(raw_text(tokenizer, talk), add_special_tokens=False)["input_ids"]
    )


def raw_text(tokenizer: PreTrainedTokenizerBase, talk: Sequence[Message]) -> str:
    """The template's text, up to the last end of a turn."""
    return str(tokenizer.apply_chat_template(list(talk), tokenize=False)).rstrip("\n")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Llama 2", "Metaspace, first", "Metaspace, never", "byte-level", "WordPiece"])
def test_the_text_of_a_completion_continues_that_of_its_prompt(kind: str) -> None:
    """`generate` printed `Onceupon`, rewards saw `The sun wasshining`, and people voted on it. Reported: issue 45.1."""
    tokenizer = KINDS[kind]()
    model = tiny_model("llama", vocab_size=len(tokenizer)).model
    pieces: dict[tuple[int, int], str] = {}

    def on_text(prompt: int, sample: int, text: str) -> None:
        pieces[prompt, sample] = pieces.get((prompt, sample), "") + text

    prompts = [Prompt("1", "The cat"), Prompt("2", ASK), Prompt("3", "The cat\n\n")]
    groups = open_engine(model, tokenizer).generate(prompts, 8, SamplingParams(seed=0), on_text=on_text)
    for index, group in enumerate(groups):
        before = decode(tokenizer, group.prompt_token_ids)
        for sample, one in enumerate(group.completions):
            shown = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
            whole = decode(tokenizer, (*group.prompt_token_ids, *shown))
            assert not whole.startswith(before) or before + one.text == whole
            assert pieces.get((index, sample), "") == one.text


def test_votes_on_prompts_cut_by_tokens_are_learnt_behind_the_ids_that_were_sampled_from() -> None:
    """`prompts.prefix_tokens` cuts a prompt within a word, whose text has other ids. Reported: issue 45.1."""
    tokenizer = KINDS["byte-level"]()
    cut = encode_prompt(tokenizer, Prompt("1", "The cat was happy"))[:1]
    text = decode(tokenizer, cut)
    memory = VoteMemory(tokenizer, 100, prompt_ids={text: (*cut[:1],)})
    memory.add([vote(Prompt("1", text), Candidate("x", (5, 6)), Candidate("y", (7,)))])
    (pair,) = memory.fresh.values()
    assert (pair.chosen.prompt_ids, pair.chosen.completion_ids) == (cut, (5, 6))


def test_a_reward_model_with_another_tokenizer_reads_the_text_of_a_prompt_that_was_cut() -> None:
    """Prompts cut by tokens carry the policy's ids, which mean something else to the reward model.
    Reported: issue 45.1.
    """
    model = model_of("Llama 2")
    reward = ModelReward(model._classifier, policy_tokenizer=KINDS["bytes"]())
    prompt = Prompt("1", "The cat", token_ids=(87, 71))
    reward.score(samples_of([Group(prompt, (87, 71), (Completion((5,), (), (), " was", "length"),), 0)]))
    assert model._classifier.scored == encode_pair_side(model.tokenizer, Prompt("1", "The cat"), " was")


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_begins_with_bos_gets_no_second_one(kind: str) -> None:
    """Prompts that a chat template wrote elsewhere begin with the token that the tokenizer puts first, and may end with
    the one that it puts last. Reported: huggingface/trl#3520, unslothai/unsloth-zoo#832, issue 45.6.
    """
    tokenizer = KINDS[kind]()
    begin, end = str(tokenizer.bos_token), str(tokenizer.eos_token)
    as_is = tokenizer(f"{begin}The cat", add_special_tokens=False)["input_ids"]
    ids = encode_prompt(tokenizer, Prompt("1", f"{begin}The cat"))
    assert ids == tuple(as_is)  # type: ignore[arg-type]  # as others encode what a template wrote
    assert ids.count(tokenizer.bos_token_id) == 1  # type: ignore[arg-type]
    assert ids[0] == tokenizer.bos_token_id
    assert encode_completed(tokenizer, Prompt("1", f"{begin}The cat"), " was").prompt_ids == ids
    assert encode_pair_side(tokenizer, Prompt("1", ""), f"{begin}The cat{end}").count(tokenizer.eos_token_id) == 1  # type: ignore[arg-type]
    twice = encode_prompt(tokenizer, Prompt("1", f"{begin}{begin}The cat"))
    assert twice.count(tokenizer.bos_token_id) == 2  # type: ignore[arg-type]  # as typed


def test_a_classifier_of_texts_gets_no_second_mark() -> None:
    """The same for an encoder, whose tokenizer puts one token before a text and one behind it. Reported: issue 45.6."""
    tokenizer = KINDS["WordPiece"]()
    names = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    backend: Any = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=names)
    expected = tuple(tokenizer("the cat")["input_ids"])  # type: ignore[arg-type]
    for text in ("the cat", "<s>the cat", "the cat</s>", "<s>the cat</s>"):
        assert encode_marked(tokenizer, text) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_no_template_that_trains_what_is_sampled_is_refused(kind: str) -> None:
    """The check before a run lets all kinds through that `check` finds equal. Reported: issue 45.30."""
    tokenizer, model = KINDS[kind](), tiny_model("llama").model
    for template in TEMPLATES.values():
        tokenizer.chat_template = template
        stop_at_ends(model, tokenizer)
        learnt = [encode_demonstration(tokenizer, Demonstration(Prompt("1", ASK), "Four."), "assistant")]
        classifier = model_of(kind)._classifier
        classifier.tokenizer.chat_template = TEMPLATES["ChatML"]
        reward = ModelReward(classifier)
        prompts = [Prompt("1", ASK), Prompt("2", "The cat was")]
        assert token_facts(model, tokenizer, prompts, learnt, {"r": reward}).problems == []


def real(name: str, data_dir: Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that people use."""
    if name == "SmolLM2":
        from tunesmith.engine.models.assets import resolve

        return AutoTokenizer.from_pretrained(resolve())
    assert data_dir is not None
    return AutoTokenizer.from_pretrained(data_dir / "models" / name)


NUM_CASES = 10_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["stories260K", "SmolLM2", "byte-level", "Metaspace, never", "Unigram", "WordPiece"])
def test_ten_thousand_random_cases(name: str, data_dir: Path) -> None:
    """Texts, conversations, prefill and thinking templates, for all trainers, votes and rewards.
    Reported: issue 45.1, 45.2, 45.3.
    """
    model = Model(name, KINDS[name]() if name in KINDS else real(name, data_dir))
    for index in range(NUM_CASES):
        generator = random.Random(index)
        model.set_template(list(TEMPLATES.values())[index % len(TEMPLATES)])
        check(model, case_of(generator.choice, generator.randrange))
    print(f"\n{name}: {NUM_CASES} cases")
    for what, count in model.counts.items():
        print(f"  {what}: {count}")
    assert model.counts["refused"] < NUM_CASES / 50


def _closed_by(template_end: str, *added: str) -> PreTrainedTokenizerBase:
    """A tokenizer with added tokens that are not special; its template writes `template_end` behind an answer."""
    tokenizer = tiny_model("llama").tokenizer
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    tokenizer.chat_template = (
        "{% for m in messages %}### {{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'assistant' %}" + template_end + "{% else %}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### assistant\n{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("template_end", [".\n{{ eos_token }}", ".\n\n", "{{ eos_token }}\n"])
def test_an_added_token_that_is_text_closes_no_turn(template_end: str) -> None:
    """People train models with line breaks as added tokens: one became the end of every answer. Reported: a tester."""
    tokenizer = _closed_by(template_end, "\n", "\n\n", "</answer>")
    prompt, eos = Prompt("x", ({"role": "user", "content": "Hi"},)), str(tokenizer.eos_token)
    written = template_end.replace("{{ eos_token }}", eos).partition(eos)[0]
    for answer in ("one\ntwo", "one\n\ntwo", "<answer>4</answer>"):
        completed = encode_completed(tokenizer, prompt, answer)
        assert completed.completion_ids[-1] == tokenizer.eos_token_id, answer
        text = decode_marked(tokenizer, completed.completion_ids)
        assert text == answer + written + eos
        asked = Demonstration(prompt, ({"role": "assistant", "content": answer},))
        learnt = encode_demonstration(tokenizer, asked, "assistant")
        assert learnt.ids[-1] == tokenizer.eos_token_id and learnt.spans[-1].stop == len(learnt.ids)
    assert end_token_id(tokenizer, is_conversational=True) == tokenizer.eos_token_id


@pytest.mark.parametrize("answer", ["is 4", " is 4"])
def test_a_prefill_that_the_template_trims_keeps_its_words_apart(answer: str) -> None:
    """People begin the answer and end with a space, which the template trims: words were joined. Reported: a tester."""
    tokenizer = tiny_model("llama").tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}<{{m.role}}>{{ m.content|trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    before = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "The answer "})
    completed = encode_completed(tokenizer, Prompt("x", before), answer)
    assert decode_marked(tokenizer, completed.ids).endswith("<assistant>The answer is 4<|im_end|>")


def test_what_is_learnt_is_shown_with_its_first_space() -> None:
    """People look in the dry run at spaces; SentencePiece decodes a first one away. Reported: a tester."""
    tokenizer = KINDS["Llama 2"]()
    learnt = encode_demonstration(tokenizer, Demonstration(Prompt("x", "The film was"), " a joy"), "assistant")
    shown = dict(_shown_learnt(tokenizer, learnt, "loss on"))["loss on"]
    assert "' a joy" in shown
