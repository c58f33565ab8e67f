"""Quality of a reward model on pairs that it was not trained on: accuracy, calibration, length bias, and simple
baselines on the same pairs.

Shape legend: N pairs, K heads, M sequences.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from tunesmith.base.core.errors import DataError
from tunesmith.base.core.trace import span
from tunesmith.collect.data.collate import EncodedPreference, TokenIds, lengths_behind_common, pad_right
from tunesmith.collect.statistics.intervals import mcnemar, proportion_interval
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase, decode_after
from tunesmith.learn.evaluation.tfidf import TextBradleyTerry, TextPair

NUM_BINS = 10


@dataclass(frozen=True, slots=True)
class DecidedPair:
    """Two sequences of one prompt, the preferred one first. Those of one prompt are no independent evidence. `source`
    is the name of where the pair is from, empty where there is one source. `lengths` are the tokens of the two answers.
    """

    prompt: str
    better_ids: TokenIds
    worse_ids: TokenIds
    source: str = ""
    lengths: tuple[int, ...] = ()

    @property
    def answer_lengths(self) -> tuple[int, ...]:
        """Tokens of both answers; where they were not measured, those behind what the sequences begin with."""
        return self.lengths or lengths_behind_common((self.better_ids, self.worse_ids))


@dataclass(frozen=True, slots=True)
class Bin:
    """Pairs with a confidence in [low, high): their number, mean confidence and accuracy.

    Means are None in an empty bin.
    """

    low: float
    high: float
    num_pairs: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class HeadsQuality:
    """What several heads add: `margin_spread` is the mean standard deviation of their margins of a pair; pairs on which
    all heads prefer the same side are agreed, the others are split.
    """

    num_heads: int
    margin_spread: float
    num_agreed: int
    accuracy_agreed: float | None
    num_split: int
    accuracy_split: float | None


@dataclass(frozen=True, slots=True)
class Uncorrected:
    """Figures of a model whose rewards are corrected for length, without that, on the same pairs. `slope` is the reward
    that an answer of twice the tokens has more then. Other fields as in `RewardQuality`.
    """

    slope: float
    accuracy: float
    length_correlation: float | None
    accuracy_longer: float | None
    accuracy_shorter: float | None


@dataclass(frozen=True, slots=True)
class SourceQuality:
    """Accuracy on the pairs of one source, beside the baselines on the same pairs, and where the longer answer lost.

    `is_trained` is True for held-out pairs of a source whose other pairs were trained on. Fields as in `RewardQuality`;
    `shorter_low` and `shorter_high` are the 95 % interval of `accuracy_shorter`, over prompts; None without such pairs.
    """

    name: str
    is_trained: bool
    num_pairs: int
    num_prompts: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    longer_wins: float
    tfidf: float | None
    num_shorter: int
    accuracy_shorter: float | None
    shorter_low: float | None
    shorter_high: float | None


@dataclass(frozen=True, slots=True)
class RewardQuality:
    """Result of `judge`. Margins are reward of the better minus reward of the worse one; a margin of 0 is half right.

    `accuracy_low` and `accuracy_high` are the 95 % interval, over prompts. The model's probability of a pair is the
    sigmoid of its margin, with several heads the mean of theirs: `brier` is the mean of its square distance from 1,
    `log_loss` that of -ln. Confidence is the larger of p and 1 - p; `ece` is the mean distance of confidence and
    accuracy over the bins, weighed by their pairs (Naeini et al. 2015). `length_correlation` is Pearson's, of margin
    and difference in tokens; None if either does not vary. `longer_wins` is the accuracy of the rule "the longer one",
    `tfidf` that of a Bradley-Terry model on TF-IDF and length fitted on `num_tfidf_pairs` other pairs; `p_value_tfidf`
    is McNemar's, of model against that model.
    """

    num_pairs: int
    num_prompts: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    mean_margin: float
    brier: float
    log_loss: float
    ece: float
    bins: tuple[Bin, ...]
    length_correlation: float | None
    num_longer: int
    accuracy_longer: float | None
    num_shorter: int
    accuracy_shorter: float | None
    longer_wins: float
    tfidf: float | None
    num_tfidf_pairs: int
    p_value_tfidf: float | None
    heads: HeadsQuality | None = None
    sources: tuple[SourceQuality, ...] = ()
    uncorrected: Uncorrected | None = None

    def to_json(self) -> dict[str, object]:
        """All fields as JSON types; `heads` and `sources` where there are several, `uncorrected` if there is one."""
        some = ("heads", "sources", "uncorrected")
        return {name: value for name, value in asdict(self).items() if name not in some or value}


def decided_pairs(
    items: Sequence[EncodedPreference], prompt_of: Mapping[str, str], source: str = ""
) -> list[DecidedPair]:
    """The decided pairs of `items`, of one source; `prompt_of` says which prompt a row, by its id, is about, and may
    lack some.
    """
    return [
        DecidedPair(prompt_of.get(pair.prompt_id, pair.prompt_id), *_sides_of(pair), source, pair.answer_lengths)
        for item in items
        for pair in item.pairs()
        if not pair.is_tie
    ]


@torch.no_grad()
def head_rewards(model: RewardModel, sequences: Sequence[TokenIds], *, micro_batch_size: int = 16) -> torch.Tensor:
    """The reward that each head gives to each sequence, float64 of shape [N, K] on the CPU."""
    device = next(model.parameters()).device
    found: list[torch.Tensor] = []
    for some in chunks(sequences, micro_batch_size):
        ids_BT, lengths_B = pad_right(some, 0)
        found.append(model.heads(ids_BT.to(device), lengths_B.to(device)).double().cpu())
    return torch.cat(found)


def margins(model: RewardModel, pairs: Sequence[DecidedPair], *, micro_batch_size: int = 16) -> np.ndarray:
    """Reward of the better minus reward of the worse sequence by each head, float64 of shape [N, K], without a
    correction for length. Each sequence is scored once.
    """
    distinct = sorted({ids for pair in pairs for ids in (pair.better_ids, pair.worse_ids)}, key=lambda ids: len(ids))
    place_of = {ids: place for place, ids in enumerate(distinct)}
    reward_MK = head_rewards(model, distinct, micro_batch_size=micro_batch_size).numpy()
    better_N, worse_N = ([place_of[ids] for ids in side] for side in zip(*map(_sides, pairs), strict=True))
    return np.asarray(reward_MK[better_N] - reward_MK[worse_N])


def judge(
    model: RewardModel,
    heldout: Sequence[DecidedPair],
    train: Sequence[DecidedPair] = (),
    elsewhere: Sequence[DecidedPair] = (),
    *,
    micro_batch_size: int = 16,
    num_bins: int = NUM_BINS,
) -> RewardQuality:
    """The quality of `model` on `heldout`. The TF-IDF model is fitted on `train`; without it there is none.

    If there are several sources, each has a row of its own; those of `elsewhere`, which were not trained on, count
    nowhere else. Rewards are less the `length_trend` of the model, if it has one.

    Raises DataError if there are no decided pairs to judge by, or a margin is not finite.
    """
    if not heldout:
        raise DataError("no decided pairs are left to judge by; give pairs that are no ties, or hold more of them out")
    pairs = [*heldout, *elsewhere]
    with span("judge/rewards"):
        margin_NK = margins(model, pairs, micro_batch_size=micro_batch_size)
    if not np.isfinite(margin_NK).all():
        raise DataError(f"{np.count_nonzero(~np.isfinite(margin_NK))} margins are not finite; look at the model")
    with span("judge/tfidf"):
        tfidf_N = tfidf_margins(model.tokenizer, train, pairs) if train else None
    own = slice(len(heldout))
    of_own = None if tfidf_N is None else tfidf_N[own]
    uncorrected = None
    if (trend := model.length_trend) is not None:
        uncorrected = _uncorrected(trend.slope, quality(margin_NK[own], heldout))
        tokens_2N = zip(*(pair.answer_lengths for pair in pairs), strict=True)
        better_N, worse_N = (trend.at(tokens_N) for tokens_N in tokens_2N)
        margin_NK = margin_NK - (better_N - worse_N)[:, None]
    found = quality(margin_NK[own], heldout, of_own, num_tfidf_pairs=len(train), num_bins=num_bins)
    found = replace(found, uncorrected=uncorrected)
    if len({pair.source for pair in pairs}) == 1:
        return found
    return replace(found, sources=by_source(margin_NK.mean(axis=1), pairs, tfidf_N, len(heldout)))


def by_source(
    margin_N: np.ndarray, pairs: Sequence[DecidedPair], tfidf_N: np.ndarray | None, num_heldout: int
) -> tuple[SourceQuality, ...]:
    """The quality on each source of `pairs`, in their order, from the margins of the model and of TF-IDF. The first
    `num_heldout` pairs are of sources that were trained on.
    """
    places: dict[tuple[bool, str], list[int]] = {}
    for place, pair in enumerate(pairs):
        places.setdefault((place < num_heldout, pair.source), []).append(place)
    found: list[SourceQuality] = []
    for (is_trained, name), own in places.items():
        of_source = [pairs[place] for place in own]
        q = quality(margin_N[own], of_source, None if tfidf_N is None else tfidf_N[own])
        lost = [place for place in own if len(pairs[place].better_ids) < len(pairs[place].worse_ids)]
        prompts = [pairs[place].prompt for place in lost]
        low, high = proportion_interval(_hits(margin_N[lost]).tolist(), prompts) if lost else (None, None)
        found.append(
            SourceQuality(
                name=name or "held out",
                is_trained=is_trained,
                num_pairs=q.num_pairs,
                num_prompts=q.num_prompts,
                accuracy=q.accuracy,
                accuracy_low=q.accuracy_low,
                accuracy_high=q.accuracy_high,
                longer_wins=q.longer_wins,
                tfidf=q.tfidf,
                num_shorter=q.num_shorter,
                accuracy_shorter=q.accuracy_shorter,
                shorter_low=low,
                shorter_high=high,
            )
        )
    return tuple(found)


def tfidf_margins(
    tokenizer: PreTrainedTokenizerBase, train: Sequence[DecidedPair], heldout: Sequence[DecidedPair]
) -> np.ndarray:
    """Margins on `heldout` of a TF-IDF Bradley-Terry model fitted on `train`, shape [N].

    It reads the same ids as the reward model, from where the two sequences of a pair part.
    """
    model = TextBradleyTerry.fitted([_as_text(tokenizer, pair) for pair in train])
    return model.margins([_as_text(tokenizer, pair) for pair in heldout])


def quality(
    margin_NK: np.ndarray,
    pairs: Sequence[DecidedPair],
    tfidf_N: np.ndarray | None = None,
    *,
    num_tfidf_pairs: int = 0,
    num_bins: int = NUM_BINS,
) -> RewardQuality:
    """Every figure, from the margins of the model, of shape [N] or, with several heads, [N, K], and, where there are
    any, those of the TF-IDF model.
    """
    margin_NK = margin_NK.reshape(len(pairs), -1)
    margin_N = margin_NK.mean(axis=1)
    longer_N = np.array([len(pair.better_ids) - len(pair.worse_ids) for pair in pairs], dtype=np.float64)
    hit_N, prompts = _hits(margin_N), [pair.prompt for pair in pairs]
    low, high = proportion_interval(hit_N.tolist(), prompts)
    probability_N = np.exp(-np.logaddexp(0, -margin_NK)).mean(axis=1)
    num_heads = margin_NK.shape[1]
    confidence_N = np.maximum(probability_N, 1 - probability_N)
    bins = reliability(confidence_N, hit_N, num_bins)
    is_longer_N, is_shorter_N = longer_N > 0, longer_N < 0
    tfidf = p_value = None
    if tfidf_N is not None:
        other_N = _hits(tfidf_N)
        tfidf = float(other_N.mean())
        p_value = mcnemar(int((hit_N > other_N).sum()), int((hit_N < other_N).sum()))
    return RewardQuality(
        num_pairs=len(pairs),
        num_prompts=len(set(prompts)),
        accuracy=float(hit_N.mean()),
        accuracy_low=low,
        accuracy_high=high,
        mean_margin=float(margin_N.mean()),
        brier=float(np.square(1 - probability_N).mean()),
        log_loss=float(np.mean(np.log(num_heads) - np.logaddexp.reduce(-np.logaddexp(0, -margin_NK), axis=1))),
        ece=expected_calibration_error(bins),
        bins=bins,
        length_correlation=_correlation(margin_N, longer_N),
        num_longer=int(is_longer_N.sum()),
        accuracy_longer=_mean(hit_N[is_longer_N]),
        num_shorter=int(is_shorter_N.sum()),
        accuracy_shorter=_mean(hit_N[is_shorter_N]),
        longer_wins=float(_hits(longer_N).mean()),
        tfidf=tfidf,
        num_tfidf_pairs=num_tfidf_pairs,
        p_value_tfidf=p_value,
        heads=_heads(margin_NK, hit_N) if num_heads > 1 else None,
    )


def reliability(confidence_N: np.ndarray, hit_N: np.ndarray, num_bins: int = NUM_BINS) -> tuple[Bin, ...]:
    """Bins of equal width from 0.5 to 1, the range of the confidence in a choice between two."""
    edges = np.linspace(0.5, 1.0, num_bins + 1)
    place_N = np.clip(((confidence_N - 0.5) * 2 * num_bins).astype(np.int64), 0, num_bins - 1)
    bins: list[Bin] = []
    for index, (low, high) in enumerate(itertools.pairwise(edges.tolist())):
        inside_N = place_N == index
        bins.append(Bin(low, high, int(inside_N.sum()), _mean(confidence_N[inside_N]), _mean(hit_N[inside_N])))
    return tuple(bins)


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """The mean distance between confidence and accuracy, weighed by the pairs of each bin."""
    gaps = [
        one.num_pairs * abs(one.confidence - one.accuracy)
        for one in bins
        if one.confidence is not None and one.accuracy is not None
    ]
    return sum(gaps) / sum(one.num_pairs for one in bins)


def _heads(margin_NK: np.ndarray, hit_N: np.ndarray) -> HeadsQuality:
    agreed_N = (margin_NK > 0).all(axis=1) | (margin_NK < 0).all(axis=1)
    return HeadsQuality(
        num_heads=margin_NK.shape[1],
        margin_spread=float(margin_NK.std(axis=1, ddof=1).mean()),
        num_agreed=int(agreed_N.sum()),
        accuracy_agreed=_mean(hit_N[agreed_N]),
        num_split=int((~agreed_N).sum()),
        accuracy_split=_mean(hit_N[~agreed_N]),
    )


def _uncorrected(slope: float, plain: RewardQuality) -> Uncorrected:
    return Uncorrected(slope, plain.accuracy, plain.length_correlation, plain.accuracy_longer, plain.accuracy_shorter)


def _sides_of(pair: EncodedPreference) -> tuple[TokenIds, TokenIds]:
    better_ids, worse_ids = pair.sequences
    return better_ids, worse_ids


def _sides(pair: DecidedPair) -> tuple[TokenIds, TokenIds]:
    return pair.better_ids, pair.worse_ids


def _hits(margin_N: np.ndarray) -> np.ndarray:
    """1 where the better one is ahead, 0 where the worse one is, 0.5 where neither is."""
    return (np.sign(margin_N) + 1) / 2


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _correlation(first_N: np.ndarray, second_N: np.ndarray) -> float | None:
    if first_N.std() == 0 or second_N.std() == 0:
        return None
    return float(np.corrcoef(first_N, second_N)[0, 1])


def _as_text(tokenizer: PreTrainedTokenizerBase, pair: DecidedPair) -> TextPair:
    """The text after the common prefix of both sides, which carries no information about the preference."""
    both = zip(pair.better_ids, pair.worse_ids, strict=False)
    start = sum(1 for _ in itertools.takewhile(lambda ids: ids[0] == ids[1], both))
    both_ids = pair.better_ids, pair.worse_ids
    return TextPair(*(decode_after(tokenizer, ids[:start], ids[start:]) for ids in both_ids))
