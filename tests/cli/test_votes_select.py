"""`tunesmith votes select`: pairs of a campaign in the order of what they say, by real models that are tiny."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tunesmith.apps.cli.main import main
from tunesmith.base.config.algorithms.reward import HeadsSection
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.store.records import CampaignSettings, Candidate, NewItem
from tunesmith.collect.store.votes import VoteStore
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.load import load_policy, load_reward_model, new_reward_model
from tunesmith.learn.evaluation.reward_quality import head_rewards

pytestmark = pytest.mark.usefixtures("own_logging")

Run = Callable[..., tuple[int, str, str]]
NUM_PAIRS, NUM_HELDOUT = 24, 4


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: object) -> tuple[int, str, str]:
        code = main(["votes", "select", *(str(word) for word in words)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def new_items() -> list[NewItem]:
    draw = random.Random(5)
    texts = [" " + "".join(draw.choices("abcdefg !?", k=draw.randint(4, 30))).strip() for _ in range(2 * NUM_PAIRS)]
    return [
        NewItem(f"p{i} is", (Candidate(texts[2 * i]), Candidate(texts[2 * i + 1])), heldout=i < NUM_HELDOUT)
        for i in range(NUM_PAIRS)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 pairs, of which four are held out; and the votes of ann on six others, who likes short answers."""
    folder = tmp_path / "live"
    with VoteStore.open(folder / "votes.db", seed=1) as store:
        campaign, ann = store.set_campaign(CampaignSettings()), store.add_rater("ann").rater.id
        store.add_items(campaign.id, new_items())
        for number in range(6):
            sides = Candidate(f" short {number}"), Candidate(f" this is a longer one {number}")
            store.vote_on_pair(campaign.id, NewItem(f"q{number} is", sides), ann, "left")
    return folder


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model") / "heads", HeadsSection(count=5))


def saved(folder: Path, section: HeadsSection | None) -> Path:
    """A tiny reward model whose heads differ."""
    model = new_reward_model(ModelSection(name="tiny:llama", dtype="float32"), heads=section, seed=1)
    torch.nn.init.normal_(model.model.score.weight, generator=torch.Generator().manual_seed(0))
    return save_final(model, model.tokenizer, folder, ModelCard("tiny:llama", "reward"))


def asked(folder: Path) -> list[tuple[str, str]]:
    """The prompts in the order in which a rater is asked, and the reasons."""
    with VoteStore.open(folder / "votes.db") as store:
        campaign, bob = store.reader.campaigns()[0].id, store.add_rater("bob").rater.id
        order: list[str] = []
        while shown := store.next_presentations(bob, campaign, 20):
            for one in shown:
                order.append(str(one.prompt))
                store.vote(one.token, bob, "left")
        reasons = {str(row.prompt): row.selection for row in store.reader.export() if row.rater == "bob"}
    return [(prompt, reasons[prompt]) for prompt in order]


def widths(model: RewardModel) -> dict[str, float]:
    """What infomax makes of each pair, by its definition: the width of the interval of the probability."""
    found: dict[str, float] = {}
    for item in new_items():
        sides = [model.encode(Prompt("", item.prompt), one.text) for one in item.candidates]
        with torch.no_grad():
            reward_2K = head_rewards(model, sides)
        gap_K = reward_2K[0] - reward_2K[1]
        low, high = (torch.sigmoid(gap_K.mean() + sign * 2 * gap_K.std()) for sign in (-1, 1))
        found[str(item.prompt)] = float(high - low)
    return found


def test_the_pairs_that_heads_disagree_about_are_asked_first(run: Run, folder: Path, heads: Path):
    words = ("--dir", folder, "--reward-model", heads, "--selection", "infomax", "--random-share", 0, "--num", 12)
    code, out, err = run(*words, "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["num_waiting"], facts["num_placed"], facts["num_random"], facts["num_votes"]) == (24, 12, 2, 0)
    order = asked(folder)
    first, rest = order[:12], order[12:]
    expected = widths(load_reward_model(str(heads)))
    heldout = {f"p{number} is" for number in range(NUM_HELDOUT)}
    chosen = [prompt for prompt, reason in first if reason.startswith("infomax ")]
    can_be_chosen = sorted(expected.keys() - heldout, key=lambda prompt: -expected[prompt])
    assert chosen == can_be_chosen[:10]
    assert [float(reason.split()[1]) for _, reason in first if reason != "random"] == pytest.approx(
        [expected[prompt] for prompt in chosen], rel=0.01
    )
    assert {prompt for prompt, reason in first if reason == "random"} < heldout
    assert {reason for _, reason in rest} == {""}


def test_statistics_tell_chosen_pairs_from_random_ones(
    run: Run, folder: Path, heads: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("--dir", folder, "--reward-model", heads, "--selection", "drts", "--num", 12)[0] == 0
    order = asked(folder)
    assert main(["votes", "stats", "--dir", str(folder)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("asked by")]
    num_random = sum(reason == "random" for _, reason in order)
    assert any(f"random, {num_random} votes: alpha " in line and "; longer " in line for line in told)
    assert any(f"drts, {12 - num_random} votes: " in line for line in told)
    assert any("no choice, " in line for line in told)


def test_a_language_model_chooses_by_the_votes_and_a_server_stores_the_order(run: Run, folder: Path):
    with VoteStore.open(folder / "votes.db"):
        code, out, err = run("--dir", folder, "--model", "tiny:llama", "--selection", "d_optimal")
    assert code == 0 and "in use; its process is asked to do it" in err
    assert "in order       24 of 24 pairs, " in out and "votes          6 known" in out
    order = asked(folder)
    values = [float(reason.split()[1]) for _, reason in order if reason != "random"]
    assert len(order) == 24 and values == sorted(values, reverse=True) and len(values) >= 10


def test_random_needs_no_model_and_is_no_order_of_a_file(run: Run, folder: Path):
    assert run("--dir", folder, "--selection", "random")[0] == 0
    order = asked(folder)
    prompts = [prompt for prompt, _ in order]
    assert {reason for _, reason in order} == {"random"} and sorted(prompts) != prompts


def test_the_reason_is_in_exports_and_comes_back_with_an_import(run: Run, folder: Path, heads: Path, tmp_path: Path):
    assert run("--dir", folder, "--reward-model", heads, "--num", 12)[0] == 0
    asked(folder)
    rows: list[list[dict[str, object]]] = []
    for place in (folder, tmp_path / "other"):
        out = tmp_path / f"{place.name}.jsonl"
        assert main(["votes", "export", str(out), "--dir", str(place)]) == 0
        rows.append([json.loads(line) for line in out.read_text().splitlines()])
        assert main(["votes", "import", str(out), "--labels", "votes", "--dir", str(tmp_path / "other")]) == 0
    reasons = [[(row["prompt"], row["selection"]) for row in of] for of in rows]
    assert reasons[0] == reasons[1] and {str(reason).split(" ")[0] for _, reason in reasons[0]} == {
        "",
        "random",
        "drts",
    }


def test_pairs_that_the_model_cannot_read_come_last(run: Run, folder: Path):
    too_long = NewItem("an essay is", (Candidate(" short"), Candidate(" long" * 2000)))
    with VoteStore.open(folder / "votes.db") as store:
        store.add_items(store.reader.campaigns()[0].id, [too_long])
    code, out, err = run("--dir", folder, "--model", "tiny:llama", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["num_waiting"], facts["num_placed"], facts["num_unread"]) == (25, 24, 1)
    assert asked(folder)[-1] == ("an essay is", "")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "no model is named"),
        (("--model", "tiny:llama", "--reward-model", "x"), "two models are named"),
        (("--selection", "random", "--model", "tiny:llama"), "needs no model"),
        (("--model", "tiny:llama", "--campaign", "spring"), "there are default"),
        (("--model", "tiny:llama", "--num", 0), "num"),
        (("--model", "tiny:llama", "--random-share", 1.5), "random-share"),
        (("--model", "tiny:llama", "--dir", "nowhere"), "does not exist"),
    ],
)
def test_what_cannot_be_done_is_explained(run: Run, folder: Path, words: tuple[object, ...], part: str):
    code, _, err = run("--dir", folder, *words)
    assert code == 2 and part in err


@pytest.mark.parametrize("selection", ["drts", "d_optimal"])
def test_weights_that_are_not_finite_are_told_and_the_order_stays(
    run: Run, folder: Path, tmp_path: Path, selection: str
):
    loaded = load_policy("tiny:llama")
    with torch.no_grad():
        next(loaded.model.parameters())[:] = float("nan")
    loaded.model.save_pretrained(tmp_path / "nan")
    loaded.tokenizer.save_pretrained(tmp_path / "nan")
    assert run("--dir", folder, "--selection", "random")[0] == 0
    code, _, err = run("--dir", folder, "--model", tmp_path / "nan", "--selection", selection)
    assert code == 2 and "hidden states that are not finite" in err
    assert {reason for _, reason in asked(folder)} == {"random"}


def test_one_head_and_a_campaign_without_pairs_are_refused(run: Run, folder: Path, tmp_path: Path):
    one = saved(tmp_path / "one", None)
    code, _, err = run("--dir", folder, "--reward-model", one)
    assert code == 2 and "has one head" in err and "reward_model.heads" in err
    asked(folder)
    code, _, err = run("--dir", folder, "--model", "tiny:llama")
    assert code == 2 and "no given pair waits" in err
