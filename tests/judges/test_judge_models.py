"""Judges that are real models: our own engine, and our own server; and judges as rewards and in comparisons."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from judge_server import JudgeServer
from server_parts import Server
from tunesmith import train
from tunesmith.apps.cli.main import main
from tunesmith.base.config.judge import JudgeSettings
from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.errors import InputError, RewardError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion, Group
from tunesmith.engine.models.tiny import byte_tokenizer
from tunesmith.learn.judges.answers import PeopleAgreement
from tunesmith.learn.judges.judge import AnswerText, Grade, Judge, PairText, PairVerdict, Unjudged, open_judge
from tunesmith.learn.rewards.judged import JudgeReward
from tunesmith.learn.rewards.scorer import Scorer

JudgeMaker = Callable[..., Judge]

PAIRS = [PairText(f"prompt {i}", f"one {i}", f"other {i}") for i in range(6)]
MEASURED = PeopleAgreement(0.7, 0.6, 0.8, 100, 90, 0.1, "pairs.jsonl")
A, B, C = (byte_tokenizer()(letter)["input_ids"][0] for letter in "ABC")


def own(tmp_path: Path, **settings: object) -> Judge:
    given = {"model": "scratch", "answers": str(tmp_path / "own.db"), "explain": False, **settings}
    return open_judge(JudgeSettings.model_validate(given))


def test_our_engine_draws_a_verdict_of_one_token(tmp_path: Path):
    judge = own(tmp_path)
    found = judge.pairs(PAIRS)
    assert all(isinstance(one, PairVerdict) for one in found)
    costs = judge.answers.costs
    assert costs.num_requests == 12
    # What was written down before is what it did cost: our own tokenizer counts.
    assert 0 < costs.num_tokens < 12 * 2000
    again = own(tmp_path)
    assert again.pairs(PAIRS) == found and again.answers.costs == costs
    other = own(tmp_path, rubric="Other.")
    assert other.identity != judge.identity
    grades = own(tmp_path, mode="graded", scale=(0, 9)).grades([AnswerText(one.prompt, one.a) for one in PAIRS])
    assert all(isinstance(one, Grade) and 0 <= one.value <= 1 for one in grades)
    (long,) = judge.pairs([PairText("p", "x" * 5000, "y")])
    assert isinstance(long, Unjudged) and long.kind == "refused"


def test_our_engine_within_a_limit(tmp_path: Path):
    judge = own(tmp_path, most_requests=5)
    found = judge.pairs(PAIRS)
    assert [getattr(one, "kind", "judged") for one in found] == ["judged", "judged", "limit", "limit", "limit", "limit"]
    assert judge.answers.costs.num_requests == 5
    assert own(tmp_path).pairs(PAIRS)[:2] == found[:2]


def test_what_our_engine_cannot_do_is_said(tmp_path: Path):
    with pytest.raises(InputError, match="have reasoning_effort, which our own engine does not know"):
        own(tmp_path, options={"reasoning_effort": "low"})
    with pytest.raises(InputError, match="writes the verdict 10 with several tokens"):
        own(tmp_path, mode="graded", scale=(1, 10))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("judge"), ("--openai", "scratch")).start()
    yield server
    if server.process is not None and server.process.is_alive():
        server.kill()


def asking(served: Server, tmp_path: Path, letters: dict[int, float], **settings: object) -> Judge:
    """A judge that our server is, which can say some letters alone."""
    options = {"logit_bias": {str(token): bias for token, bias in letters.items()}}
    given = {"model": served.url, "answers": str(tmp_path / "served.db"), "answer_tokens": 1, "options": options}
    return open_judge(JudgeSettings.model_validate({**given, "explain": False, **settings}))


def test_our_server_is_a_judge(served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (refused,) = asking(served, tmp_path, {}).pairs(PAIRS[:1])
    assert isinstance(refused, Unjudged) and "OPENAI_API_KEY" in refused.message
    monkeypatch.setenv("OPENAI_API_KEY", served.facts["key"])
    always = asking(served, tmp_path, {A: 100})
    found = always.pairs(PAIRS)
    assert all(isinstance(one, PairVerdict) and one.preference == "tie" and one.order_decided for one in found)
    some = asking(served, tmp_path, {A: 60, B: 60, C: 60}, temperature=1.0)
    found = some.pairs(PAIRS)
    assert all(isinstance(one, PairVerdict) for one in found)
    costs = some.answers.costs
    assert costs.num_requests == 24
    assert asking(served, tmp_path, {A: 60, B: 60, C: 60}, temperature=1.0).pairs(PAIRS) == found
    assert some.answers.costs == costs


def test_our_server_dies_and_comes_back(served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", served.facts["key"])
    judge = asking(served, tmp_path, {A: 60, B: 60, C: 60}, served_model="scratch", patience_s=1, most_requests=16)
    before = judge.pairs(PAIRS[:3])
    served.kill()
    during = judge.pairs(PAIRS)
    assert during[:3] == before and {one.kind for one in during[3:] if isinstance(one, Unjudged)} == {"away"}
    served.start()
    after = judge.pairs(PAIRS)
    assert after[:3] == before and all(isinstance(one, PairVerdict) for one in after)
    # Requests to a server that is not there were not sent.
    assert judge.answers.costs.num_requests == 12


def group(prompt: Prompt, *texts: str) -> Group:
    completions = tuple(Completion((1,), (-1.0,), (-1.0,), text, "stop") for text in texts)
    return Group(prompt, (1,), completions, weight_version=0)


def test_a_reward_is_the_share_of_comparisons_that_are_won(judge_of: JudgeMaker, server: JudgeServer):
    judge = judge_of()
    judge.set_agreement(MEASURED)
    scorer = Scorer([JudgeReward(judge)])
    groups = [group(Prompt("a", "p"), "xxx", "x", "xx"), group(Prompt("b", "q"), "same", "size", "longest")]
    scores = scorer.score(groups)
    assert scores.total_PG.tolist() == [[1.0, 0.0, 0.5], [0.25, 0.25, 1.0]]
    metrics = scores.metrics()
    assert (metrics["rewards/judge/agreement"], metrics["rewards/judge/agreement_low"]) == (0.7, 0.6)
    assert metrics["rewards/judge/order_decided"] == 0 and scorer.is_relative
    assert server.num_requests == 12
    assert scorer.score(groups).total_PG.tolist() == scores.total_PG.tolist() and server.num_requests == 12
    few = Scorer([JudgeReward(judge_of(opponents=1, rubric="Few."))])
    five = few.score([group(Prompt("a", "p"), "x", "xx", "xxx", "xxxx", "xxxxx")])
    assert five.total_PG.tolist() == [[0.0, 0.5, 0.5, 0.5, 1.0]] and server.num_requests == 12 + 10
    with pytest.raises(RewardError, match="is alone; draw two or more of each"):
        scorer.score([group(Prompt("a", "p"), "xxx")])


def test_a_reward_against_a_reference_and_by_grades(judge_of: JudgeMaker, server: JudgeServer):
    scorer = Scorer([JudgeReward(judge_of(reference="best"))])
    assert not scorer.is_relative
    prompt = Prompt("a", "p", {"best": "four"})
    assert scorer.score([group(prompt, "longer"), group(prompt, "x")]).total_PG.tolist() == [[1.0], [0.0]]
    with pytest.raises(RewardError, match="compares with the column `best`, but the prompts have no such column"):
        scorer.check_columns(["answer"])
    server.grade = lambda text: min(5, len(text))
    graded = Scorer([JudgeReward(judge_of(mode="graded"))])
    scores = graded.score([group(prompt, "x", "xxx"), group(prompt, "xxxxx", "xxxxxxx")])
    assert scores.total_PG.tolist() == [[0.0, 0.5], [1.0, 1.0]]
    assert (
        scores.columns["judge_reasons"]
        == ["Because of its length. [[1]]", "Because of its length. [[3]]"] + ["Because of its length. [[5]]"] * 2
    )


def test_a_reward_at_its_limit_follows_its_policy(judge_of: JudgeMaker, server: JudgeServer, tmp_path: Path):
    settings = tmp_path / "short.yaml"
    settings.write_text(f"model: {server.url}\nmost_requests: 3\nanswers: {tmp_path}/a.db\n")
    groups = [group(Prompt("a", "p"), "xxx", "x"), group(Prompt("b", "q"), "x", "xx")]
    with pytest.raises(RewardError, match=r"reward `short` has no verdict on .*3 of 3 requests"):
        Scorer([f"judge:{settings}"]).score(groups)
    assert server.num_requests <= 3
    scores = Scorer([RewardSource(source=f"judge:{settings}", on_error="zero")]).score(groups)
    assert scores.metrics()["rewards/num_failed"] == 2 and server.num_requests <= 3
    with pytest.raises(RewardError, match="is a judge, which takes no label and no pessimism and no workers"):
        Scorer([RewardSource(source=f"judge:{settings}", label=1, workers=2, pessimism=1.0)])


def test_a_password_in_an_address_comes_into_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    source = "judge:http://me:very-secret@127.0.0.1:1"
    training = ["train", "grpo", "--model", "tiny:llama", "--reward", source, "--prompts", "films", "--steps", "1"]
    comparing = ["compare", "--before", "tiny:llama", "--after", "tiny:llama", "--scorer", source, "--prompts", "films"]
    for words in ([*training, "--run.dir", str(tmp_path / "runs")], comparing):
        assert main(words) == 2
        told = "".join(capsys.readouterr())
        assert "an address with a user or a password" in told and "secret" not in told
    assert not (tmp_path / "runs").exists()


def test_training_by_a_judge_goes_on_without_asking_again(server: JudgeServer, tmp_path: Path):
    settings = tmp_path / "long.yaml"
    settings.write_text(f"model: {server.url}\nanswers: {tmp_path}/a.db\n")
    options: dict[str, Any] = {"rollout.max_new_tokens": 6, "rollout.prompts_per_step": 2, "run.num_threads": 1}

    def run(name: str, **more: object) -> list[float]:
        result = train.grpo(
            model="tiny:llama",
            prompts=["The film", "A story", "In the end"],
            reward=f"judge:{settings}",
            steps=2,
            **{**options, "run.dir": str(tmp_path / name), "rollout.completions_per_prompt": 3, **more},
        )
        lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert not any("eval/reward" in row for row in rows), "a mean of comparisons with each other says nothing"
        return [row["loss"] for row in rows if "loss" in row]

    first = run("first")
    num_requests = server.num_requests
    assert num_requests > 0 and run("second") == first and server.num_requests == num_requests
    assert run("third", **{"rollout.score_while_drawing": True}) == first and server.num_requests == num_requests


@pytest.mark.parametrize("mode", ["pairwise", "graded"])
def test_two_models_are_compared_by_a_judge(
    mode: str, server: JudgeServer, judge_of: JudgeMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    server.grade = lambda text: 1 + len(text) % 5
    settings, prompts = tmp_path / "judge.yaml", tmp_path / "prompts.jsonl"
    settings.write_text(f"model: {server.url}\nmode: {mode}\nanswers: {tmp_path}/answers.db\n")
    prompts.write_text("".join(json.dumps({"prompt": f"The film {i}"}) + "\n" for i in range(3)))
    judge_of(mode=mode).set_agreement(MEASURED)
    words = ["compare", "--before", "tiny:llama", "--after", "tiny:qwen2", "--prompts", str(prompts), "-n", "2"]
    words += ["--max-new-tokens", "8", "--scorer", f"judge:{settings}"]
    page = tmp_path / "page.html"
    assert main([*words, "--json", "--html", str(page)]) == 0
    facts = json.loads(capsys.readouterr().out)
    judge = facts["judge"]
    assert (judge["model"], judge["mode"], judge["agreement"]["share"]) == ("rater-1", mode, 0.7)
    scores = [(one["score_before"], one["score_after"]) for one in facts["samples"]]
    assert len(scores) == 6
    if mode == "pairwise":
        lengths = [(len(one["text_before"].strip()), len(one["text_after"].strip())) for one in facts["samples"]]
        assert scores == [(float(a > b) + (a == b) / 2, float(b > a) + (a == b) / 2) for a, b in lengths]
    assert "agrees with people on 70" in page.read_text()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "agrees with people on 70% of their votes" in " ".join(out.split())


def test_a_comparison_at_the_limit_says_what_it_left_out(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    settings, prompts = tmp_path / "judge.yaml", tmp_path / "prompts.jsonl"
    settings.write_text(f"model: {server.url}\nmost_requests: 4\nconcurrency: 1\nanswers: {tmp_path}/a.db\n")
    prompts.write_text("".join(json.dumps({"prompt": f"The film {i}"}) + "\n" for i in range(4)))
    words = ["compare", "--before", "tiny:llama", "--after", "tiny:qwen2", "--prompts", str(prompts), "-n", "1"]
    assert main([*words, "--max-new-tokens", "8", "--scorer", f"judge:{settings}", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_left_out"], len(facts["samples"]), server.num_requests) == (2, 2, 4)
    assert "2 of 4 were not judged (2 limit: 4 of 4 requests" in facts["judge"]["unjudged"]
    assert facts["judge"]["agreement"] is None
