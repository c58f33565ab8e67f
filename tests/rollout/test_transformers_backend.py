"""The plain engine returns what was sampled, with the log-probs it was sampled by."""

import math
import signal
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from tunesmith.base.core.errors import InputError, TrainingError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.pack import pack
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.sample import torch_impl
from tunesmith.engine.kernels.sample.torch_impl import SampleSettings, Seen
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.tiny import FAMILIES, tiny_model
from tunesmith.engine.rollout.engine import GenerationInterrupted
from tunesmith.engine.rollout.transformers_backend import TransformersEngine

PROMPTS = [Prompt("a", "The film"), Prompt("b", "x"), Prompt("c", ({"role": "user", "content": "Hello?"},))]


def _engine(family: str = "llama", **kwargs: object) -> TransformersEngine:
    loaded = tiny_model(family)
    return TransformersEngine(loaded.model, loaded.tokenizer, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_training_forward(family: str) -> None:
    loaded = tiny_model(family)
    groups = TransformersEngine(loaded.model, loaded.tokenizer).generate(
        PROMPTS, 3, SamplingParams(max_new_tokens=7, temperature=0.7, seed=1)
    )
    batch = pack(groups, pad_id=0)
    with torch.no_grad():
        scores = token_logps(
            loaded.model, batch.ids_BS, batch.lengths_B, prompt_lengths_B=batch.prompt_lengths_B, temperature=0.7
        )
    for engine_BT in (batch.sampled_logp_BT, batch.raw_logp_BT):
        torch.testing.assert_close(scores.logp_BT[batch.mask_BT], engine_BT[batch.mask_BT], atol=2e-5, rtol=0)


def test_same_seed_gives_the_same_completions_and_another_seed_others() -> None:
    engine, sampling = _engine(), SamplingParams(max_new_tokens=8, seed=3)
    first, again = engine.generate(PROMPTS, 2, sampling), engine.generate(PROMPTS, 2, sampling)
    assert first == again
    assert engine.generate(PROMPTS, 2, replace(sampling, seed=4)) != first


def test_settings_of_the_model_itself_change_nothing() -> None:
    loaded, sampling = tiny_model("llama"), SamplingParams(max_new_tokens=8, seed=3)
    engine = TransformersEngine(loaded.model, loaded.tokenizer)
    expected = engine.generate(PROMPTS, 2, sampling)
    own = GenerationConfig(min_p=0.9, typical_p=0.2, no_repeat_ngram_size=1, suppress_tokens=list(range(200)))
    loaded.model.generation_config = own
    assert engine.generate(PROMPTS, 2, sampling) == expected
    assert loaded.model.generation_config is own


def test_generation_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    _engine().generate(PROMPTS, 1, SamplingParams(max_new_tokens=4, seed=9))
    assert torch.equal(torch.rand(1), expected)


def test_groups_keep_the_order_of_prompts_across_batches() -> None:
    groups = _engine(batch_size=2).generate(PROMPTS, 3, SamplingParams(max_new_tokens=4, seed=0))
    assert [group.prompt.id for group in groups] == ["a", "b", "c"]
    assert [len(group.completions) for group in groups] == [3, 3, 3]


def test_greedy_ignores_the_seed_and_equals_generate() -> None:
    loaded = tiny_model("qwen2")
    engine = TransformersEngine(loaded.model, loaded.tokenizer)
    greedy = SamplingParams(max_new_tokens=10, temperature=0.0, seed=1)
    (group,) = engine.generate([Prompt("a", "The film")], 1, greedy)
    assert engine.generate([Prompt("a", "The film")], 1, replace(greedy, seed=2)) == [group]
    ids = torch.tensor([group.prompt_token_ids])
    expected = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10)
    assert group.completions[0].token_ids == tuple(expected[0, ids.shape[1] :].tolist())


def test_an_end_of_sequence_token_ends_a_completion_and_is_kept_in_the_ids() -> None:
    loaded = tiny_model("llama")
    engine = TransformersEngine(loaded.model, loaded.tokenizer)
    sampling = SamplingParams(max_new_tokens=200, temperature=3.0, seed=0)
    completions = engine.generate([Prompt("a", "x")], 8, sampling)[0].completions
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped, "with 259 near-uniform tokens and 200 draws some completion must end"
    eos = loaded.tokenizer.eos_token_id
    for completion in stopped:
        assert completion.token_ids[-1] == eos
        assert eos not in completion.token_ids[:-1]
        assert len(completion.logps) == len(completion.token_ids)


def test_stop_token_ids_and_min_new_tokens_are_obeyed() -> None:
    loaded = tiny_model("llama")
    engine = TransformersEngine(loaded.model, loaded.tokenizer)
    stops = tuple(range(3, 259))
    (group,) = engine.generate([Prompt("a", "x")], 4, SamplingParams(max_new_tokens=6, stop_token_ids=stops, seed=0))
    assert all(len(completion.token_ids) == 1 for completion in group.completions)
    (group,) = engine.generate([Prompt("a", "x")], 4, SamplingParams(max_new_tokens=6, min_new_tokens=6, seed=0))
    assert all(len(completion.token_ids) == 6 for completion in group.completions)


def test_top_k_of_one_is_greedy_and_its_log_prob_is_zero() -> None:
    engine = _engine()
    (greedy,) = engine.generate([PROMPTS[0]], 1, SamplingParams(max_new_tokens=5, temperature=0.0))
    (top_one,) = engine.generate([PROMPTS[0]], 1, SamplingParams(max_new_tokens=5, top_k=1, seed=5))
    assert top_one.completions[0].token_ids == greedy.completions[0].token_ids
    assert top_one.completions[0].logps == (0.0,) * 5


def test_prompt_token_ids_are_taken_as_they_are() -> None:
    prompt = Prompt("cut", "text that would encode differently", token_ids=(40, 41))
    (group,) = _engine().generate([prompt], 1, SamplingParams(max_new_tokens=2, seed=0))
    assert group.prompt_token_ids == (40, 41)


def test_groups_carry_the_weight_version_and_the_model_returns_to_its_mode() -> None:
    loaded = tiny_model("llama")
    loaded.model.train()
    engine = TransformersEngine(loaded.model, loaded.tokenizer, weight_version=lambda: 5)
    (group,) = engine.generate([PROMPTS[0]], 1, SamplingParams(max_new_tokens=2, seed=0))
    assert group.weight_version == 5
    assert loaded.model.training


def test_no_prompts_no_completions_and_foreign_ids_are_refused() -> None:
    engine, sampling = _engine(), SamplingParams(max_new_tokens=2)
    with pytest.raises(InputError, match="no prompts"):
        engine.generate([], 1, sampling)
    with pytest.raises(InputError, match="n is 0"):
        engine.generate(PROMPTS, 0, sampling)
    with pytest.raises(InputError, match="token id 999"):
        engine.generate([Prompt("e", "x", token_ids=(999,))], 1, sampling)


SHAPED = {
    "everything": {
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "logit_bias": {5: 2.0, 9: -math.inf},
    },
    "bias": {"logit_bias": {5: 2.0, 9: -math.inf}},
    "penalty": {"repetition_penalty": 1.3},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {7: 1.0}, "top_k": 3},
}


@pytest.mark.parametrize("options", SHAPED.values(), ids=SHAPED)
def test_both_log_probs_are_those_of_the_definition(options: dict[str, object]) -> None:
    loaded = tiny_model("llama")
    sampling = SamplingParams(**{"max_new_tokens": 6, "temperature": 0.7, "seed": 2, **options})  # type: ignore[arg-type]
    groups = TransformersEngine(loaded.model, loaded.tokenizer).generate(PROMPTS, 2, sampling)
    for group in groups:
        for completion in group.completions:
            ids = (*group.prompt_token_ids, *completion.token_ids)
            with torch.no_grad():
                logits_TV = loaded.model(torch.tensor([ids])).logits[0, len(group.prompt_token_ids) - 1 : -1]
            for t, token in enumerate(completion.token_ids):
                settings = SampleSettings.same(
                    1,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    min_p=sampling.min_p,
                    repetition_penalty=sampling.repetition_penalty,
                    bias=sampling.logit_bias,
                )
                seen = Seen.of([ids[: len(group.prompt_token_ids) + t]], logits_TV.shape[1])
                expected_BV = torch_impl.distribution(logits_TV[t : t + 1], settings, seen=seen)
                raw_BV = (logits_TV[t] / (sampling.temperature or 1)).double().log_softmax(-1)
                assert completion.logps[t] == pytest.approx(float(expected_BV[0, token]), abs=2e-5)
                assert completion.raw_logps[t] == pytest.approx(float(raw_BV[token]), abs=2e-5)


def test_raw_log_probs_are_the_log_probs_where_nothing_shapes_the_draw() -> None:
    for completion in _engine().generate(PROMPTS, 2, SamplingParams(max_new_tokens=5, temperature=0.7))[0].completions:
        assert completion.raw_logps == completion.logps


def test_padding_is_not_punished_by_the_repetition_penalty() -> None:
    engine, greedy = _engine(), SamplingParams(max_new_tokens=8, temperature=0.0, repetition_penalty=3.0)
    greedy = replace(greedy, logit_bias={0: 0.6})  # the id that stands for padding, near the top
    together = engine.generate(PROMPTS, 1, greedy)
    assert any(0 in group.completions[0].token_ids for group in together)
    for prompt, group in zip(PROMPTS, together, strict=True):
        (alone,) = engine.generate([prompt], 1, greedy)
        assert group.completions[0].token_ids == alone.completions[0].token_ids


def test_sampled_frequencies_follow_the_log_probs_that_are_reported() -> None:
    sampling = SamplingParams(max_new_tokens=1, top_k=4, logit_bias={5: 1.0}, repetition_penalty=1.2, seed=0)
    (group,) = _engine(batch_size=500).generate([PROMPTS[0]], 2000, sampling)
    counts = Counter(completion.token_ids[0] for completion in group.completions)
    shares = {completion.token_ids[0]: math.exp(completion.logps[0]) for completion in group.completions}
    assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
    chi_square = sum((counts[token] - 2000 * share) ** 2 / (2000 * share) for token, share in shares.items())
    assert chi_square < 16.3  # three degrees of freedom, p = 0.001


def test_a_stop_string_ends_a_completion_and_is_cut_from_its_text_alone() -> None:
    engine, sampling = _engine(), SamplingParams(max_new_tokens=12, temperature=0.0, logit_bias=_letters("xyz"))
    (group,) = engine.generate([PROMPTS[0]], 1, replace(sampling, repetition_penalty=1.5))
    text = group.completions[0].text
    assert len(text) == 12 and len(set(text)) > 1
    stop = text[3:5]
    (stopped,) = engine.generate([PROMPTS[0]], 1, replace(sampling, repetition_penalty=1.5, stop_strings=("Q", stop)))
    completion = stopped.completions[0]
    end = text.index(stop)
    assert (completion.text, completion.finish_reason) == (text[:end], "stop")
    assert completion.token_ids == group.completions[0].token_ids[: end + 2]
    assert len(completion.logps) == len(completion.raw_logps) == end + 2


def _letters(letters: str) -> dict[int, float]:
    """A bias that leaves nothing but `letters`."""
    tokenizer = tiny_model("llama").tokenizer
    allowed = {tokenizer(letter)["input_ids"][0] for letter in letters}
    return {token: -math.inf for token in range(len(tokenizer)) if token not in allowed}


@pytest.mark.parametrize("stops", [(), ("xy", "zzz")])
def test_texts_come_while_tokens_are_drawn_and_joined_they_are_the_completions(stops: tuple[str, ...]) -> None:
    texts: dict[tuple[int, int], str] = {}
    progress: list[tuple[int, int]] = []

    def on_text(prompt: int, sample: int, text: str) -> None:
        texts[prompt, sample] = texts.get((prompt, sample), "") + text

    sampling = SamplingParams(max_new_tokens=20, seed=1, logit_bias=_letters("xyz"), stop_strings=stops)
    groups = _engine(batch_size=4).generate(
        PROMPTS, 3, sampling, on_progress=lambda *counts: progress.append(counts), on_text=on_text
    )
    assert {key: text for key, text in texts.items() if text} == {
        (index, sample): completion.text
        for index, group in enumerate(groups)
        for sample, completion in enumerate(group.completions)
        if completion.text
    }
    assert progress == [(done, 9) for done in range(1, 10)]


def test_ctrl_c_returns_the_completions_that_are_finished_and_leaves_all_as_it_was() -> None:
    loaded = tiny_model("llama")
    loaded.model.train()
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    engine = TransformersEngine(loaded.model, loaded.tokenizer, batch_size=4, weight_version=lambda: 3)
    sampling = SamplingParams(max_new_tokens=6, seed=1)
    whole = engine.generate(PROMPTS, 2, sampling)

    def press(done: int, _: int) -> None:
        if done == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(GenerationInterrupted) as caught:
        engine.generate(PROMPTS, 2, sampling, on_progress=press)
    groups = caught.value.groups
    assert [group.prompt.id for group in groups] == ["a", "b", "c"]
    assert [len(group.completions) for group in groups] == [2, 2, 1]
    assert groups[:2] == tuple(whole[:2]) and groups[2].completions == whole[2].completions[:1]
    assert loaded.model.training and torch.equal(torch.random.get_rng_state(), state)


def test_ctrl_c_before_anything_is_finished_returns_nothing() -> None:
    def press(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(GenerationInterrupted) as caught:
        _engine().generate(PROMPTS, 1, SamplingParams(max_new_tokens=50, logit_bias=_letters("x")), on_text=press)
    assert caught.value.groups == ()


def test_damaged_weights_are_an_error_that_says_what_to_do() -> None:
    loaded = tiny_model("llama")
    with torch.no_grad():
        loaded.model.get_output_embeddings().weight[3] = float("nan")  # type: ignore[union-attr]
    with pytest.raises(
        TrainingError, match=r"token 0 of completion 0 of prompt 0 .*logits are not finite.*model\.dtype"
    ):
        TransformersEngine(loaded.model, loaded.tokenizer).generate(PROMPTS, 1, SamplingParams())


def test_settings_that_leave_no_token_are_an_error_of_their_own() -> None:
    bias = _letters("x")
    stop = next(iter({*range(259)} - set(bias)))
    with pytest.raises(TrainingError, match="logit_bias, repetition_penalty and min_new_tokens together"):
        _engine().generate(
            PROMPTS, 1, SamplingParams(logit_bias=bias, stop_token_ids=(stop,), min_new_tokens=2, max_new_tokens=3)
        )


def test_requests_beyond_the_model_are_refused() -> None:
    for sampling, message in (
        (SamplingParams(max_new_tokens=10**7), "context holds"),
        (SamplingParams(stop_token_ids=(9999,)), r"stop_token_ids names token id 9999; ids must lie in \[0, 259\)"),
        (SamplingParams(logit_bias={259: 1.0}), "logit_bias names token id 259"),
        (SamplingParams(logit_bias=dict.fromkeys(range(259), -math.inf)), "forbids all 259 tokens"),
    ):
        with pytest.raises(InputError, match=message):
            _engine().generate([PROMPTS[0]], 1, sampling)


def test_it_says_that_it_is_not_exact_and_unloading_changes_nothing() -> None:
    engine, sampling = _engine(), SamplingParams(max_new_tokens=3, seed=1)
    groups = engine.generate(PROMPTS, 1, sampling)
    engine.unload()
    assert not engine.is_exact
    assert engine.generate(PROMPTS, 1, sampling) == groups
