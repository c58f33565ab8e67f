"""The live loop weighs votes by what is known of their raters."""

from dataclasses import replace
from pathlib import Path

import pytest
from live_rig import given_items, live_recipe, looping, run_updates, voters

from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data.answers import Answer
from tunesmith.collect.store.records import NewItem
from tunesmith.learn.live.votes import VotedPair, weighed


def voted(vote_id: int, *, tie: bool = False) -> VotedPair:
    chosen, rejected = Answer((1,), (2, vote_id)), Answer((1,), (3, vote_id))
    return VotedPair(vote_id, Prompt("p", "The film"), chosen, rejected, tie, False, 0.0, ("a", "b"), ("v1", "v2"))


def test_weights_have_the_mean_one_and_negative_ones_exchange_the_answers() -> None:
    votes = [voted(1), voted(2), voted(3, tie=True), voted(4)]
    first, second, tie, unknown = weighed(votes, {1: 0.9, 2: -0.3, 3: 0.5})
    assert (first.weight, second.weight, tie, unknown) == (pytest.approx(1.5), pytest.approx(0.5), votes[2], votes[3])
    assert first == replace(votes[0], weight=first.weight)
    assert (second.chosen, second.rejected) == (votes[1].rejected, votes[1].chosen)
    assert (second.texts, second.sources) == (("b", "a"), ("v2", "v1"))
    assert weighed(votes, {}) == votes


@pytest.mark.parametrize("update", ["dpo", "grpo"])
def test_votes_of_a_rater_who_fails_the_gold_items_are_learnt_the_other_way(tmp_path: Path, update: str) -> None:
    """Both judge other pairs: only the gold items say that one of them means the opposite."""
    folder = tmp_path / "live"
    cfg = live_recipe(folder, live={"raters": "estimated", "update": update, "update_after_s": 1e9})
    with voters(folder, gold_share=0.5) as one:
        gold = [NewItem(f"{item.prompt} gold", item.candidates, gold=0) for item in given_items(40)]
        one.store.add_items(one.campaign_id, [*given_items(40), *gold])
        other = replace(one, rater_id=one.store.add_rater("other").rater.id)
        with looping(cfg) as loop:
            one.vote(30)
            other.vote(30, lambda shown: "right" if other.verdict(shown) == "left" else "left")
            run_updates(loop, 1)
            loop.read_votes()
            votes = [*loop.memory.fresh.values(), *loop.memory.learnt.values()]
            turned = [vote for vote, new in zip(votes, loop.weigh(votes), strict=True) if vote.chosen != new.chosen]
            rater_of = {vote.vote_id: vote.rater_id for vote in one.store.reader.judged_pairs()}
            assert turned
            assert {rater_of[vote.vote_id] for vote in turned} == {other.rater_id}
            assert len(turned) == sum(rater_of[vote.vote_id] == other.rater_id for vote in votes)
            equal = live_recipe(folder, live={"update": update})
            loop.cfg = equal
            assert loop.weigh(votes) == votes
