"""Preferences are learnt directly: every loss learns, micro-batches and references agree, a resumed run is exact."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import DPO_VARIANTS, forked, go_on, outcome, the_run, train
from recipes import PROMPTS, Started, dpo_recipe, pairs, training
from transformers import AutoModelForCausalLM

from tunesmith.base.core.errors import DataError, RunError
from tunesmith.base.schema.records import Judgement, Message, Pair, Prompt
from tunesmith.collect.data.answers import AnswerLabel, AnswerPair
from tunesmith.engine.models.tiny import byte_tokenizer
from tunesmith.learn.trainers import dpo

LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "conservative": {"label_smoothing": 0.1},
    "ipo": {"loss": "ipo"},
    "hinge": {"loss": "hinge"},
    "robust": {"loss": "robust", "label_smoothing": 0.1},
    **{loss: {"loss": loss} for loss in ("sigmoid_norm", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")},
    "discopop": {"loss": "discopop"},
    "exo_pair": {"loss": "exo_pair", "label_smoothing": 0.1},
    "simpo": {"loss": "simpo", "beta": 2.0},
    "orpo": {"loss": "orpo"},
    "kto": {"loss": "kto"},
    "rao_kupper": {"ties": "rao_kupper"},
}
KILLED = -9


def ready(cfg: Any, rows: Any = None) -> Started:
    """A state whose reference is filled in."""
    state = Started(cfg, pairs=pairs() if rows is None else rows)
    return state


def with_ties(count: int = 48) -> list[Pair]:
    """Pairs of which every fourth is a tie."""
    return [
        Pair(pair.prompt, pair.chosen, pair.rejected, tie=index % 4 == 0) for index, pair in enumerate(pairs(count))
    ]


def judgements(count: int = 32) -> list[dict[str, object]]:
    """Completions one by one: those with exclamation marks were wanted."""
    texts = {True: "wow!!! so good!", False: "meh, not this."}
    return [
        {"prompt": f"{PROMPTS[i % 4]} {i}", "completion": texts[i % 3 == 0], "label": i % 3 == 0} for i in range(count)
    ]


def weights(state: Started) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in state.policy.module.parameters()])


def gradient(state: Started, count: int = 8) -> torch.Tensor:
    """The gradient that a step hands to the optimizer."""
    found: list[torch.Tensor] = []

    def keep(**_: object) -> None:
        parameters = state.policy.module.parameters()
        found.extend(p.grad.flatten().clone() for p in parameters if p.grad is not None)
        raise StopIteration

    state.learner.optimizer = copy.copy(state.optimizer)
    state.optimizer.step = keep  # type: ignore[method-assign, assignment]
    with pytest.raises(StopIteration):
        state.step(state.data.train[:count])
    return torch.cat(found)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_learns_what_was_preferred_on_prompts_it_has_not_seen(name: str, tmp_path: Path) -> None:
    cfg = dpo_recipe(tmp_path, pairs={"heldout_fraction": 0.25}, dpo={**LOSSES[name], "pairs_per_step": 12})
    result = training(cfg, pairs=with_ties())
    assert result.summary["eval/rewards/accuracies"] == 1.0
    assert float(str(result.summary["eval/rewards/margins"])) > 0
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]
    assert all(math.isfinite(value) for row in result.metrics for value in row.values())
    assert (result.run_dir / "report.html").exists()


def test_before_the_first_step_nothing_is_preferred_and_the_loss_is_that_of_a_coin(tmp_path: Path) -> None:
    metrics = ready(dpo_recipe(tmp_path)).step(ready(dpo_recipe(tmp_path)).data.train[:8]).metrics
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert metrics["rewards/margins"] == pytest.approx(0, abs=1e-3)
    assert metrics["entropy"] > 0


def test_log_probs_and_rewards_are_those_of_plain_transformers(tmp_path: Path) -> None:
    state = ready(dpo_recipe(tmp_path, dpo={"micro_batch_size": 8}))
    plain, unit = copy.deepcopy(state.policy.module), state.data.train[0]
    assert isinstance(unit, AnswerPair)
    expected = []
    for place in unit.answers:
        answer = state.data.answers[place]
        ids = torch.tensor([(*answer.prompt_ids, *answer.completion_ids)])
        with torch.no_grad():
            logp_SV = plain(ids).logits[0].log_softmax(-1)
        start = len(answer.prompt_ids)
        expected.append(sum(logp_SV[i - 1, ids[0, i]].item() for i in range(start, ids.shape[1])))
    assert state.reference_A is not None
    assert state.reference_A[list(unit.answers)].tolist() == pytest.approx(expected, abs=1e-4)
    metrics = state.step([unit]).metrics
    assert metrics["logps/chosen"] == pytest.approx(expected[0], abs=1e-4)
    assert metrics["logps/rejected"] == pytest.approx(expected[1], abs=1e-4)
    assert metrics["num_tokens"] == sum(len(state.data.answers[place].completion_ids) for place in unit.answers)


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_do_not_change_the_gradient(name: str, tmp_path: Path) -> None:
    def of_size(size: int) -> torch.Tensor:
        cfg = dpo_recipe(tmp_path, dpo={**LOSSES[name], "micro_batch_size": size})
        return gradient(ready(cfg, with_ties()))

    one, other = of_size(3), of_size(8)
    assert (one - other).norm() <= 1e-4 * other.norm()


def test_a_live_reference_gives_the_gradient_of_a_precomputed_one(tmp_path: Path) -> None:
    for loss in ("sigmoid", "kto"):
        states = [
            ready(dpo_recipe(tmp_path, dpo={"loss": loss, "reference": kind})) for kind in ("live", "precomputed")
        ]
        assert (states[0].reference is None, states[1].reference is None) == (False, True)
        for state in states:  # away from the start, where policy and reference differ
            state.step(state.data.train[8:16])
        live, precomputed = map(gradient, states)
        assert (live - precomputed).norm() <= 1e-3 * precomputed.norm()


def test_losses_without_a_reference_load_and_compute_none(tmp_path: Path) -> None:
    state = ready(dpo_recipe(tmp_path, dpo={"loss": "simpo", "reference": "live"}))
    assert state.reference is None and state.reference_A is None
    assert "the log-probs of the reference" not in state.identity


def test_a_completion_that_stands_in_several_pairs_is_computed_once(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completions": ["aa", "bb", "cc", "dd"]}, {"prompt": "q", "chosen": "aa", "rejected": "bb"}]
    state = ready(dpo_recipe(tmp_path, pairs={"heldout_fraction": 0}, dpo={"micro_batch_size": 8}), rows)
    assert len(state.data.train) == 7
    metrics = state.step(state.data.train).metrics
    assert metrics["num_tokens"] == sum(len(answer.completion_ids) for answer in state.data.answers)
    assert len(state.data.answers) == 6


@pytest.mark.parametrize(("ties", "num_left"), [("drop", 36), ("half", 48), ("rao_kupper", 48)])
def test_ties_are_dropped_or_kept_and_counted(ties: str, num_left: int, tmp_path: Path) -> None:
    state = Started(dpo_recipe(tmp_path, pairs={"heldout_fraction": 0}, dpo={"ties": ties}), pairs=with_ties())
    assert (len(state.data.train), state.data.num_ties) == (num_left, 12)


@pytest.mark.parametrize("ties", ["half", "rao_kupper"])
def test_ties_pull_the_two_sides_together(ties: str, tmp_path: Path) -> None:
    """After a policy prefers one side, pairs that are said to be ties bring the rewards nearer to each other."""
    rows = [Pair(Prompt(str(i), f"{PROMPTS[i % 4]}"), "good", "bad", tie=i > 0) for i in range(8)]
    cfg = dpo_recipe(tmp_path, pairs={"heldout_fraction": 0}, dpo={"ties": ties, "beta": 1.0})
    state = ready(cfg, rows)
    for _ in range(3):
        state.step(state.data.train[:1])

    def gap() -> float:
        reference_A = state.reference_A
        assert reference_A is not None
        ratio_A = state.learner.answer_logps(state.policy, range(len(state.data.answers))) - reference_A
        return sum((ratio_A[one.chosen] - ratio_A[one.rejected]).abs().item() for one in pairs_of(state))

    before = gap()
    for _ in range(2):
        state.step(state.data.train[1:])
    assert gap() < before


def pairs_of(state: Started) -> list[AnswerPair]:
    return [unit for unit in state.data.train if isinstance(unit, AnswerPair)]


def test_kto_learns_labelled_rows_and_reports_its_kl(tmp_path: Path) -> None:
    cfg = dpo_recipe(tmp_path, pairs={"heldout_fraction": 0.25}, dpo={"loss": "kto", "beta": 0.5, "num_epochs": 6})
    result = training(cfg, pairs=judgements())
    assert result.summary["eval/rewards/accuracies"] == 1.0
    assert result.metrics[0]["kl"] == pytest.approx(0, abs=1e-3)
    assert result.metrics[-1]["kl"] >= 0
    assert result.metrics[-1]["rewards/chosen"] > result.metrics[-1]["rewards/rejected"]


def test_the_kl_of_kto_is_that_of_mismatched_completions_of_the_whole_step(tmp_path: Path) -> None:
    state = ready(dpo_recipe(tmp_path, dpo={"loss": "kto"}))
    state.step(state.data.train[8:16])
    units = [unit for unit in state.data.train[:8] if isinstance(unit, AnswerLabel)]
    answers = state.data.answers
    assert all(answers[one.mismatched].prompt_ids == answers[one.answer].prompt_ids for one in units)
    assert all(answers[one.mismatched].completion_ids != () for one in units)
    places = [one.mismatched for one in units]
    assert state.reference_A is not None
    ratio = (state.learner.answer_logps(state.policy, places) - state.reference_A)[places].mean().item()
    assert state.step(units).metrics["kl"] == pytest.approx(max(0.0, ratio), abs=1e-5)


def test_kto_on_one_prompt_is_refused_and_unequal_weights_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "p", "completion": text, "label": True} for text in ("a", "b")]
    with pytest.raises(DataError, match="rows of two prompts or more"):
        Started(dpo_recipe(tmp_path, dpo={"loss": "kto"}), pairs=rows)
    cfg = dpo_recipe(tmp_path, dpo={"loss": "kto", "desirable_weight": 1.4}, pairs={"heldout_fraction": 0})
    Started(cfg, pairs=judgements(30))
    assert "wanted and unwanted completions weigh 14 and 20" in caplog.text
    caplog.clear()
    cfg = dpo_recipe(tmp_path, dpo={"loss": "kto", "desirable_weight": 2.0}, pairs={"heldout_fraction": 0})
    Started(cfg, pairs=judgements(30))
    assert "weigh" not in caplog.text


def test_single_judgements_are_refused_by_losses_of_pairs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column `chosen`"):
        Started(dpo_recipe(tmp_path), pairs=judgements())
    with pytest.raises(DataError, match="single judgements are for the loss kto"):
        Started(dpo_recipe(tmp_path), pairs=[Judgement(Prompt("0", "p"), "a", True)])
    with pytest.raises(DataError, match="no pairs are left"):
        training(dpo_recipe(tmp_path), pairs=[])
    assert not (tmp_path / "runs").exists()


def test_the_replies_between_the_turns_of_a_completion_have_no_share_in_its_log_prob(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "Go."}],
            "chosen": [
                {"role": "assistant", "content": f"up {i}"},
                {"role": "user", "content": "A door."},
                {"role": "assistant", "content": "open"},
            ],
            "rejected": [{"role": "assistant", "content": f"down {i}"}],
        }
        for i in range(2)
    ]
    state = ready(dpo_recipe(tmp_path, pairs={"heldout_fraction": 0}), rows)
    model = copy.deepcopy(state.policy.module).double()
    for place, answer in enumerate(state.data.answers):
        ids = [*answer.prompt_ids, *answer.completion_ids]
        with torch.no_grad():
            logp_SV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        logp_T = [logp_SV[at - 1, ids[at]].item() for at in range(len(answer.prompt_ids), len(ids))]
        said = [logp for at, logp in enumerate(logp_T) if not any(at in part for part in answer.between)]
        assert state.reference_A[place].item() == pytest.approx(math.fsum(said), abs=1e-3)
        assert state.length_A[place].item() == len(said) and (len(said) < len(logp_T)) == (answer.between != ())
    assert {len(answer.between) for answer in state.data.answers} == {0, 1}
    num_said = sum(answer.num_said for answer in state.data.answers)
    assert state.step(state.data.train).metrics["num_tokens"] == num_said


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_answers_may_be_cut_behind_any_token(loss: str, tmp_path: Path) -> None:
    """Several turns, cut behind the token that opens one: the run was refused, as if answers ended with that token."""

    def turns(text: str) -> tuple[Message, ...]:
        said: Message = {"role": "assistant", "content": text}
        return said, {"role": "user", "content": "more"}, {"role": "assistant", "content": "y" * 60}

    questions: list[Message] = [{"role": "user", "content": "a question " * 9 + str(i)} for i in range(40)]
    rows = [
        Pair(Prompt(f"p{i}", (question,)), turns("A" + "x" * i), turns("B" + "x" * i))
        for i, question in enumerate(questions)
    ]
    limit = {"max_tokens": 100, "truncate": "both", "heldout_fraction": 0.0}
    cfg = dpo_recipe(tmp_path, pairs=limit, dpo={"loss": loss}, run={"steps": 1})
    ends = {one.ids[-1] for one in Started(cfg, pairs=rows).data.learnt}
    assert byte_tokenizer().convert_tokens_to_ids("<|im_start|>") in ends
    assert math.isfinite(training(cfg, pairs=rows).metrics[-1]["loss"])


def test_conversations_are_learnt_behind_the_opening_of_the_assistants_turn(tmp_path: Path) -> None:
    question = [{"role": "user", "content": "How was it?"}]
    rows = [
        {
            "prompt": question,
            "chosen": [{"role": "assistant", "content": f"good {i}"}],
            "rejected": [{"role": "assistant", "content": f"bad {i}"}],
        }
        for i in range(4)
    ]
    state = ready(dpo_recipe(tmp_path, pairs={"heldout_fraction": 0}), rows)
    assert len({answer.prompt_ids for answer in state.data.answers}) == 1
    (row, *_) = state.learner.batch_rows(state.data.train)
    assert str(row["chosen"]).startswith("good 0") and str(row["prompt"]).strip().endswith("assistant")
    assert math.isfinite(state.step(state.data.train).metrics["loss"])


def test_the_final_folder_is_read_by_transformers_with_the_trained_weights(tmp_path: Path) -> None:
    result = training(dpo_recipe(tmp_path, run={"steps": 2}), pairs=pairs())
    plain = AutoModelForCausalLM.from_pretrained(result.run_dir / "final", dtype=torch.float32)
    start = Started(dpo_recipe(tmp_path), pairs=pairs()).policy.module
    change = sum((a - b).abs().sum().item() for a, b in zip(plain.parameters(), start.parameters(), strict=True))
    assert change > 0
    assert result.generate("The film", max_new_tokens=4)


def test_a_refused_step_shows_the_pairs(tmp_path: Path) -> None:
    state = ready(dpo_recipe(tmp_path))
    (row,) = state.learner.batch_rows(state.data.train[:1])
    assert set(row) == {"id", "prompt", "chosen", "rejected", "tie"}
    assert json.dumps(row)


@pytest.mark.parametrize("variant", DPO_VARIANTS)
def test_variants_that_are_killed_and_resumed_end_the_same(variant: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert forked(train, variant, whole) == 0
    assert forked(train, variant, killed, fault="update/backward:kill:8") == KILLED
    assert forked(go_on, the_run(killed)) == 0
    assert outcome(the_run(killed)) == outcome(the_run(whole))


def test_other_log_probs_of_the_reference_are_refused_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = train("dpo", tmp_path, steps=2)
    true_logps = dpo.DPO.answer_logps
    monkeypatch.setattr(dpo.DPO, "answer_logps", lambda *arguments: true_logps(*arguments) + 1e-3)
    with pytest.raises(RunError, match="the log-probs of the reference"):
        go_on(run_dir, **{"run.steps": 4})
