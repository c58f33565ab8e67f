"""Equality before speed: the greedy tokens of our engine against those of `model.generate`, in float32.

In bfloat16 two correct programs part within some tens of tokens, wherever the best two logits are closer than the
precision; float32 moves that to near-ties, which are counted apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.contenders import Draw, Margins, Setting
from benchmarks.process import Process
from benchmarks.workloads import Workload
from tunesmith.batch.rollout import SamplingParams

NEAR_TIE = 1e-4
"""Two best logits of the reference that are closer than this are a near-tie: rounding decides."""

_MOST_COMPLETIONS = 4


@dataclass(frozen=True, slots=True)
class Equality:
    """Sequences compared; how many are equal, part at a near-tie, or differ; the largest margin of those that differ.

    A sequence counts once: behind the first different token the two no longer continue the same text.
    """

    num_sequences: int
    num_near_ties: int
    num_different: int
    largest_margin: float

    @property
    def is_equal(self) -> bool:
        """True if no sequence differs where the reference is sure."""
        return self.num_different == 0


def greedy(work: Workload) -> Workload:
    """`work` drawn greedily, ending where the model ends; a few completions of each prompt, which must all be equal."""
    return replace(
        work,
        num_completions=min(work.num_completions, _MOST_COMPLETIONS),
        sampling=SamplingParams(work.sampling.max_new_tokens, temperature=0.0),
        is_exact_length=False,
    )


def compare_greedy(ours: Process, reference: Process, work: Workload) -> Equality:
    """Both contenders, with weights in float32, draw the prompts of `work` greedily."""
    asked = greedy(work)
    single = replace(asked, num_completions=1)
    setting = Setting("sdpa", batch_size=len(single.rows))
    expected = reference.ask(Draw(single, seed=0, keeps_tokens=True, setting=setting)).tokens
    found = ours.ask(Draw(asked, seed=0, keeps_tokens=True)).tokens
    wanted = [tokens for tokens in expected for _ in range(asked.num_completions)]
    return judge(found, wanted, lambda row: reference.ask(Margins(asked.rows[row], wanted[row])))


def judge(
    found: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]],
    margins: Callable[[int], Sequence[float]],
) -> Equality:
    """`found` against `wanted`; `margins(row)` is by how much the reference's best logit leads at each token."""
    num_near_ties, different = 0, [0.0]
    num_different = 0
    for row, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if tuple(ours) == tuple(theirs):
            continue
        place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        margin = float("inf") if place is None else margins(row)[place]  # one is the beginning of the other
        if margin < NEAR_TIE:
            num_near_ties += 1
        else:
            num_different += 1
            different.append(margin)
    return Equality(len(wanted), num_near_ties, num_different, max(different))
