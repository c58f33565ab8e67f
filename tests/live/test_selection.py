"""The choice of pairs: the model of the votes against exact ones, the methods against brute force, and in the loop."""

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from jobs import forked
from live_rig import given_items, learn, live_recipe, looping, run_updates, voters
from torch.utils._python_dispatch import TorchDispatchMode

from tunesmith.base.config.algorithms.live import LiveSelectionSection
from tunesmith.collect.data.answers import Answer
from tunesmith.learn.live.selection import Beliefs, HeadBeliefs, Preferences, choose_pairs

METHODS = ("infomax", "drts", "delta_ucb", "d_optimal")
WRITTEN = Answer((1, 2), (3, 4))


def votes_of(theta_F: torch.Tensor, num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Differences of features, the chosen answer first, as a rater with `theta_F` votes; of ten votes one is a tie."""
    generator = torch.Generator().manual_seed(seed)
    difference_NF = torch.randn(num, len(theta_F), generator=generator, dtype=torch.float64)
    is_first_N = torch.rand(num, generator=generator, dtype=torch.float64) < torch.sigmoid(difference_NF @ theta_F)
    return difference_NF * torch.where(is_first_N, 1.0, -1.0)[:, None], torch.arange(num) % 10 == 9


def log_posterior(theta_F: torch.Tensor, difference_NF: torch.Tensor, tie_N: torch.Tensor) -> torch.Tensor:
    logit_N = difference_NF @ theta_F
    first_N, second_N = torch.nn.functional.logsigmoid(logit_N), torch.nn.functional.logsigmoid(-logit_N)
    likelihood = torch.where(tie_N, (first_N + second_N) / 2, first_N).sum()
    return likelihood - len(theta_F) * theta_F.square().sum() / 2


@pytest.mark.parametrize("num", [0, 1, 40, 400])
@pytest.mark.parametrize("scale", [0.3, 30.0])
def test_the_posterior_is_the_normal_one_at_the_mode(num: int, scale: float):
    difference_NF, tie_N = votes_of(torch.linspace(-1, 1, 6, dtype=torch.float64) * scale, num)
    found = Preferences(difference_NF, tie_N)
    mode_F = found.mode_F.requires_grad_()
    (gradient_F,) = torch.autograd.grad(log_posterior(mode_F, difference_NF, tie_N), mode_F)
    assert gradient_F.abs().max() < 1e-6
    hessian_FF = torch.autograd.functional.hessian(lambda t: -log_posterior(t, difference_NF, tie_N), mode_F.detach())
    torch.testing.assert_close(found.factor_FF @ found.factor_FF.T, hessian_FF, rtol=1e-6, atol=1e-6)
    pairs_MF = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z_MF = found.whitened(pairs_MF)
    torch.testing.assert_close(z_MF @ z_MF.T, pairs_MF @ hessian_FF.inverse() @ pairs_MF.T)


def test_draws_have_the_posterior_s_mean_and_covariance():
    found = Preferences(*votes_of(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), 50))
    generator = torch.Generator().manual_seed(3)
    draws_DF = torch.stack([found.sample(generator) for _ in range(20_000)])
    covariance_FF = torch.cholesky_inverse(found.factor_FF)
    torch.testing.assert_close(draws_DF.mean(0), found.mode_F, atol=0.02, rtol=0)
    torch.testing.assert_close(draws_DF.T.cov(), covariance_FF, atol=0.02, rtol=0)


def test_it_learns_what_raters_like():
    theta_F = torch.tensor([3.0, -2.0, 0.0, 0.0], dtype=torch.float64)
    found = Preferences(*votes_of(theta_F, 2000))
    assert torch.nn.functional.cosine_similarity(found.mode_F, theta_F, dim=0) > 0.99


def everything(sizes: list[int]) -> list[set[tuple[int, int]]]:
    return [set(itertools.combinations(range(size), 2)) for size in sizes]


def features(sizes: list[int], num_features: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, num_features, generator=generator, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("method", METHODS)
def test_each_answer_is_asked_about_once_and_the_best_pair_first(method):
    groups, allowed = features([4, 5, 2, 1]), everything([4, 5, 2, 1])
    allowed[0] -= {(0, 1), (0, 2), (0, 3)}  # the first answer has no other text than the rest
    beliefs = Preferences(*votes_of(torch.ones(5, dtype=torch.float64), 60))
    section = LiveSelectionSection(method=method)
    chosen = choose_pairs(groups, allowed, beliefs, section, seed=1)
    assert all(one.pair in allowed[one.prompt] and one.method == method for one in chosen)
    used = Counter((one.prompt, answer) for one in chosen for answer in one.pair)
    assert set(used.values()) == {1}
    # No further pair is left: 1 of the first prompt's three, 2 of five, 1 of two, 0 of one.
    assert Counter(one.prompt for one in chosen) == {0: 1, 1: 2, 2: 1}
    assert [one.value for one in chosen] == sorted((one.value for one in chosen), reverse=True)
    assert chosen == choose_pairs(groups, allowed, beliefs, section, seed=1)


def value_by_definition(method: str, x_F: torch.Tensor, y_F: torch.Tensor, beliefs: Preferences) -> float:
    difference_F = x_F - y_F
    mean = float(difference_F @ beliefs.mode_F)
    variance = float(difference_F @ torch.cholesky_inverse(beliefs.factor_FF) @ difference_F)
    sigmoid = lambda logit: 1 / (1 + math.exp(-logit))  # noqa: E731
    if method == "infomax":
        return sigmoid(mean + 2 * math.sqrt(variance)) - sigmoid(mean - 2 * math.sqrt(variance))
    if method == "delta_ucb":
        return abs(mean) + 2 * math.sqrt(variance)
    before_FF = beliefs.factor_FF @ beliefs.factor_FF.T
    p = sigmoid(mean)
    after_FF = before_FF + p * (1 - p) * torch.outer(difference_F, difference_F)
    return float(torch.logdet(after_FF) - torch.logdet(before_FF)) / 2


@pytest.mark.parametrize("method", ["infomax", "delta_ucb", "d_optimal"])
def test_the_first_pair_has_the_largest_value_of_all(method):
    groups, allowed = features([4, 4]), everything([4, 4])
    beliefs = Preferences(*votes_of(torch.ones(5, dtype=torch.float64), 60))
    first = choose_pairs(groups, allowed, beliefs, LiveSelectionSection(method=method), seed=0)[0]
    values = {
        (prompt, pair): value_by_definition(method, groups[prompt][pair[0]], groups[prompt][pair[1]], beliefs)
        for prompt, pairs in enumerate(allowed)
        for pair in pairs
    }
    assert (first.prompt, first.pair) == max(values, key=lambda key: values[key])
    assert first.value == pytest.approx(max(values.values()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("beliefs", [Preferences(*votes_of(torch.ones(5, dtype=torch.float64), 60)), HeadBeliefs(5)])
def test_the_first_so_many_pairs_are_those_of_the_whole_order(method: str, beliefs: Beliefs):
    groups, allowed = features([2] * 12), everything([2] * 12)
    section = LiveSelectionSection(method=method)
    whole = choose_pairs(groups, allowed, beliefs, section, seed=1)
    assert len(whole) == 12 and choose_pairs(groups, allowed, beliefs, section, 1, 5) == whole[:5]


def test_heads_are_draws_whose_mean_and_covariance_the_beliefs_have():
    beliefs = HeadBeliefs(4)
    (rewards_AK,) = features([6], 4)
    difference_MK = rewards_AK[:3] - rewards_AK[3:]
    torch.testing.assert_close(difference_MK @ beliefs.mode_F, difference_MK.mean(1))
    z_MK = beliefs.whitened(difference_MK)
    torch.testing.assert_close(z_MK @ z_MK.T, difference_MK.cov())
    generator = torch.Generator().manual_seed(0)
    drawn = Counter(tuple(beliefs.sample(generator).tolist()) for _ in range(400))
    assert len(drawn) == 4 and all(sorted(one) == [0, 0, 0, 1] for one in drawn) and min(drawn.values()) > 60


class Largest(TorchDispatchMode):
    """`numel` is that of the largest tensor that was made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, made.numel() if isinstance(made, torch.Tensor) else 0)
        return made


@pytest.mark.parametrize("method", METHODS)
def test_no_number_is_kept_for_each_two_pairs(method):
    """Of 16 answers to each of 128 prompts they would take 1.9 GB."""
    sizes = [8] * 12
    groups, allowed = features(sizes), everything(sizes)
    beliefs = Preferences(*votes_of(torch.ones(5, dtype=torch.float64), 20))
    with Largest() as largest:
        choose_pairs(groups, allowed, beliefs, LiveSelectionSection(method=method), seed=0)
    assert largest.numel <= 12 * 28 * 5


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_share_of_few_prompts_is_random_too(num_prompts, tmp_path: Path):
    changes = {"live": {"selection": {"method": "drts", "random_share": 0.3}}}
    with looping(live_recipe(tmp_path, **changes)) as loop:
        groups = loop.offers.draw("a round").train[:num_prompts]
        reasons = [
            {group.prompt.id: reason for group, _, reason in loop.offers.train_pairs(groups, 0, [], seed)}
            for seed in range(60)
        ]
    num_random = [sum(reason == "random" for reason in one.values()) for one in reasons]
    assert set(num_random) <= {math.floor(0.3 * num_prompts), math.ceil(0.3 * num_prompts)}
    assert sum(num_random) / (60 * num_prompts) == pytest.approx(0.3, abs=0.12)


def test_d_optimal_values_each_pair_given_those_before():
    groups, allowed = features([2, 2, 2, 2]), everything([2, 2, 2, 2])
    groups[1] = groups[0] + 1e-3  # a prompt whose answers differ as those of the first do
    beliefs = Preferences(torch.zeros(0, 5, dtype=torch.float64), torch.zeros(0, dtype=torch.bool))
    chosen = choose_pairs(groups, allowed, beliefs, LiveSelectionSection(method="d_optimal"), seed=0)
    differences = torch.stack([groups[one.prompt][0] - groups[one.prompt][1] for one in chosen])
    precision_FF = beliefs.factor_FF @ beliefs.factor_FF.T
    for one, difference_F in zip(chosen, differences, strict=True):
        before, precision_FF = precision_FF, precision_FF + torch.outer(difference_F, difference_F) / 4
        assert one.value == pytest.approx(float(torch.logdet(precision_FF) - torch.logdet(before)) / 2)


@pytest.mark.parametrize("method", METHODS)
def test_the_loop_offers_the_chosen_pairs_first_and_says_why(method, tmp_path: Path):
    recipe = live_recipe(tmp_path, live={"selection": {"method": method, "random_share": 0.34}})
    with looping(recipe) as loop, voters(tmp_path) as people:
        learn(loop, people)
        learn(loop, people)
        offers = people.runs.offers_after(0, 1000)
    trained = [one for one in offers if not one.heldout and one.version == 2]
    reasons = Counter(one.selection.split()[0] for one in trained)
    assert set(reasons) == {method, "random"} and reasons[method] > reasons["random"]
    assert {one.selection for one in offers if one.heldout} == {"random"}
    values = [float(one.selection.split()[1]) for one in trained if one.selection != "random"]
    assert values == sorted(values)  # raters are asked about the newest offer first


def selecting(folder: Path, num_updates: int) -> None:
    """A trainer that selects pairs, on votes that were given before."""
    with looping(live_recipe(folder, live={"selection": {"method": "drts", "random_share": 0.3}})) as loop:
        run_updates(loop, num_updates)


@pytest.mark.parametrize("fault", ["update/forward:kill:3", "live/saved:kill:2"])
def test_a_killed_trainer_asks_about_the_same_pairs_as_one_that_was_not(fault: str, tmp_path: Path) -> None:
    offers: list[list[object]] = []
    for name, faults in (("whole", None), ("killed", fault)):
        folder = tmp_path / name
        with voters(folder) as people:
            people.store.add_items(people.campaign_id, given_items(32, heldout=8))
            people.vote(32)
        if faults is not None:
            assert forked(selecting, folder, 3, fault=faults) == -9
        selecting(folder, 3)
        with voters(folder) as people:
            found = [one for one in people.runs.offers_after(0, 1000) if one.version == 3]
        offers.append([(one.prompt, [each.text for each in one.candidates], one.selection) for one in found])
    assert offers[0] == offers[1]
    assert {str(row[2]).split()[0] for row in offers[0]} == {"drts", "random"}  # type: ignore[index]


def test_features_are_the_means_of_the_states_of_an_answer(tmp_path: Path):
    with looping(live_recipe(tmp_path, live={"selection": {"method": "drts"}})) as loop:
        selection = loop.offers.selection
        assert selection is not None
        answers = [WRITTEN, Answer((5, 6, 7), (8, 9, 10, 11)), Answer((1, 2), (3,))]
        selection.compute(answers)
        module = loop.learner.reference.module
        for answer in answers:
            ids = torch.tensor([[*answer.prompt_ids, *answer.completion_ids]])
            states_SH = module.base_model(input_ids=ids).last_hidden_state[0]
            expected_H = states_SH[len(answer.prompt_ids) :].mean(0)
            torch.testing.assert_close(selection.features[answer], expected_H, atol=1e-4, rtol=1e-4)
        selection.keep([WRITTEN])
        assert list(selection.features) == [WRITTEN]


@pytest.mark.parametrize("method", ["drts", "delta_ucb"])
def test_answers_that_raters_judge_far_apart_are_asked_about_first(method):
    theta_F = torch.linspace(-2, 2, 5, dtype=torch.float64)
    beliefs = Preferences(*votes_of(theta_F, 300))
    sizes = [8] * 20
    groups = features(sizes)
    chosen = choose_pairs(groups, everything(sizes), beliefs, LiveSelectionSection(method=method), seed=0)
    gaps = [
        float(((groups[one.prompt][one.pair[0]] - groups[one.prompt][one.pair[1]]) @ theta_F).abs()) for one in chosen
    ]
    at_random = [float(((x_AF[0] - x_AF[1]) @ theta_F).abs()) for x_AF in groups]
    assert sum(gaps[:20]) / 20 > 1.5 * sum(at_random) / 20
    assert sum(gaps[:20]) > 1.5 * sum(gaps[-20:])


def test_without_answers_there_is_nothing_to_choose(tmp_path: Path):
    section = {"selection": {"method": "drts", "random_share": 1.0}}
    with looping(live_recipe(tmp_path, live=section)) as loop:
        loop.refill()
        assert loop.offers.open
