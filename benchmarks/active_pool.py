"""Labels of a fixed pool of pairs: how right a reward model becomes with each choice of the pairs that are asked about.

This is `python -m benchmarks.active --pool NAME`. The pool are the labelled pairs of a source of `reward_mix`, part of
whose prompts is held out to judge by. A selection asks for labels in rounds, by the code that orders the pairs of a
campaign (`learn/live/pool.py`), a fifth of them at random; it sees labels of the pairs that were asked, and no other.

The trunk is frozen: the features of an answer are the means of the last states of a language model's lowest layers over
its tokens, computed once. After every so many labels a reward model is learnt on them: linear heads on those features,
by the losses, bootstrap samples and random beginnings of `reward_model.heads`, and its accuracy is that of the mean of
the heads on the held-out pairs. So it measures which labels say more about what such features hold. A reward model
whose trunk learns too is right more often, and may be told other things by the same labels. Labels are what the source
says, with its errors; each counts as one vote.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from benchmarks.common import Say
from benchmarks.reward_mix import HEADLINES, HH, read
from tunesmith.base.config.algorithms.live import LiveSelectionSection
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.seeds import derive
from tunesmith.base.schema.records import Pair, plain_text
from tunesmith.collect.data.answers import encode_answer, fitting
from tunesmith.collect.data.collate import TokenLimit
from tunesmith.collect.data.rows import RowError
from tunesmith.collect.data.split import prompt_key, split_by_prompt
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import keep_lower_layers
from tunesmith.learn.algorithms.preference_loss import bootstrap_weights, bradley_terry, heads_loss
from tunesmith.learn.live.pool import Waiting, asking_order
from tunesmith.learn.live.selection import Beliefs, HeadBeliefs, Preferences, Selection

POOLS = (HH, "rmb", HEADLINES)

_HELDOUT = 0.3
_PORTION = 200


@dataclass(frozen=True, slots=True)
class Pool:
    """Labelled pairs with the features of their answers, float64, those of the better answer first."""

    pairs: Sequence[Pair]
    x_N2F: torch.Tensor
    num_long: int
    """Pairs of the source that are left out: an answer is too long by itself."""

    def split(self, seed: int) -> tuple[list[int], list[int]]:
        """(Places of the pairs that may be asked about, of those to judge by), by their prompts."""
        heldout = {prompt_key(pair) for pair in split_by_prompt(self.pairs, _HELDOUT, seed).heldout}
        is_judged = [prompt_key(pair) in heldout for pair in self.pairs]
        return [i for i, yes in enumerate(is_judged) if not yes], [i for i, yes in enumerate(is_judged) if yes]

    def longer_wins(self, places: Sequence[int]) -> float:
        """How often the longer text is the better one, equal lengths half."""
        sizes = [[len(plain_text(one)) for one in (self.pairs[i].chosen, self.pairs[i].rejected)] for i in places]
        return fmean(0.5 if better == worse else float(better > worse) for better, worse in sizes)


def read_pool(name: str, options: Namespace, say: Say) -> Pool:
    """The pairs of a source with features. Raises DataError without the source."""
    given = read(name, 40 if options.quick else options.pool_pairs, options.seed)
    size = ModelSection(name="tiny:llama", dtype="float32") if options.quick else ModelSection(name=options.model)
    loaded = load_policy(size)
    keep_lower_layers(loaded.model, None if options.quick else options.layers)
    selection = Selection(LiveSelectionSection(), language_model(loaded.model))
    limit = TokenLimit(options.tokens, "left")
    kept, sides = list[Pair](), []
    for pair in given:
        both = [encode_answer(loaded.tokenizer, pair.prompt, text) for text in (pair.chosen, pair.rejected)]
        try:
            sides.append(fitting(both, ("chosen", "rejected"), limit))
        except RowError:
            continue
        kept.append(pair)
    for start in range(0, len(sides), _PORTION):
        fresh = dict.fromkeys(one for pair in sides[start : start + _PORTION] for one in pair)
        selection.compute([one for one in fresh if one not in selection.features])
        say(f"{name}: features of {min(start + _PORTION, len(sides))} of {len(sides)} pairs")
    table_AF = selection.table([one for pair in sides for one in pair])
    return Pool(kept, table_AF.reshape(len(sides), 2, -1), len(given) - len(kept))


def trained_heads(x_N2F: torch.Tensor, keys: Sequence[str], num_heads: int, seed: int) -> torch.Tensor:
    """weight_KF, float64: the heads of a reward model on frozen features of N labelled pairs, the better answer first.

    Each learns its own bootstrap sample, from a random part of its own, with the normal prior of `Preferences` around
    that part. Without pairs these parts are all there is.
    """
    num_pairs, _, num_features = x_N2F.shape
    generator = torch.Generator().manual_seed(derive(seed, "heads"))
    prior_KF = torch.randn(num_heads, num_features, generator=generator, dtype=torch.float64) / num_features**0.5
    prior_KF = prior_KF - prior_KF.mean(0)
    if num_pairs == 0:
        return prior_KF
    weight_KF = prior_KF.clone().requires_grad_()
    sample_NK = bootstrap_weights(keys, num_heads, seed).double()
    rank_N2 = torch.tensor([[1, 2]]).expand(num_pairs, 2)
    optimizer = torch.optim.LBFGS([weight_KF], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found, _ = heads_loss(
            x_N2F @ weight_KF.T,
            rank_N2,
            sample_NK,
            lambda reward_N2, weight_N: bradley_terry(
                reward_N2[:, 0], reward_N2[:, 1], num_pairs=num_pairs, weight_B=weight_N
            ),
        )
        apart = num_features / 2 * (weight_KF - prior_KF).square().sum(1).mean() / num_pairs
        total = found + apart
        total.backward()
        return total

    optimizer.step(loss)
    return weight_KF.detach()


def pool_curve(pool: Pool, method: str, seed: int, options: Namespace) -> list[tuple[int, float]]:
    """Labels, and the accuracy on held-out pairs of the reward model that has learnt them."""
    section = LiveSelectionSection.model_validate({"method": method})
    places, judged = pool.split(seed)
    keys = {place: prompt_key(pool.pairs[place]) for place in places}
    left = dict.fromkeys(places)
    asked: list[int] = []
    found: list[tuple[int, float]] = []
    gap_MF = pool.x_N2F[judged, 0] - pool.x_N2F[judged, 1]

    def heads() -> torch.Tensor:
        return trained_heads(pool.x_N2F[asked], [keys[place] for place in asked], options.heads, seed)

    def beliefs() -> tuple[torch.Tensor, Beliefs]:
        """(The features that the choice sees of all pairs, what is believed of them)."""
        if options.beliefs == "heads":
            return pool.x_N2F @ heads().T, HeadBeliefs(options.heads)
        difference_NF = pool.x_N2F[asked, 0] - pool.x_N2F[asked, 1]
        return pool.x_N2F, Preferences(difference_NF, torch.zeros(len(asked), dtype=torch.bool))

    while left and len(asked) < options.votes:
        seen_N2F, believed = (pool.x_N2F, None) if method == "random" else beliefs()
        waiting = [Waiting(place, keys[place], seen_N2F[place]) for place in left]
        until_measured = options.every - len(asked) % options.every
        most = min(options.round, until_measured, options.votes - len(asked))
        order = asking_order(waiting, believed, section, most=most, seed=seed)
        for one in order:
            del left[one.id]
            asked.append(one.id)
        if len(asked) % options.every == 0:
            margin_M = gap_MF @ heads().mean(0)
            found.append((len(asked), float((margin_M > 0).double().mean())))
    return found


def pool_curves(
    name: str, methods: Sequence[str], seeds: Sequence[int], options: Namespace, say: Say
) -> tuple[dict[str, object], Mapping[str, list[list[tuple[int, float]]]]]:
    """(Facts of a pool, the curves of each selection)."""
    pool = read_pool(name, options, say)
    curves: dict[str, list[list[tuple[int, float]]]] = {}
    for method in methods:
        curves[method] = []
        for seed in seeds:
            curves[method].append(pool_curve(pool, method, seed, options))
            say(f"{name}, {method}, seed {seed}: {curves[method][-1]}")
    judged = [pool.split(seed)[1] for seed in seeds]
    facts = {
        "num_pairs": len(pool.pairs),
        "num_long": pool.num_long,
        "num_judged": [len(one) for one in judged],
        "longer_wins": fmean(pool.longer_wins(one) for one in judged),
    }
    return facts, curves
