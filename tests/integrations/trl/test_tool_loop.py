"""TRL's tool loop on our engine: its results, what is computed, and what a slow tool holds up."""

import asyncio
import importlib.resources
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from trl.trainer import grpo_trainer  # noqa: E402

from tunesmith.base.core.errors import TrainingError  # noqa: E402
from tunesmith.base.core.trace import trace  # noqa: E402
from tunesmith.engine.rollout.native_engine import NativeEngine  # noqa: E402
from tunesmith.integrations.trl import GRPOTrainer, Options  # noqa: E402

Make = Callable[..., Any]
NUM = 6


def calls_of(ids: Sequence[int]) -> list[dict[str, Any]]:
    """The calls in a turn of a model that cannot write any: two of three turns have one or two."""
    names = [(), ("look",), ("wait", "look")][sum(ids) % 3]
    return [{"type": "function", "function": {"name": name, "arguments": {"place": str(sum(ids))}}} for name in names]


def look(place: str) -> str:
    """Look.

    Args:
        place: Where.
    """
    if int(place) % 5 == 0:
        raise ValueError(f"nothing at {place}")
    return f"at {place}"


async def wait(place: str) -> str:
    """Wait.

    Args:
        place: Where.
    """
    await asyncio.sleep(0)
    return f"waited {place}"


@pytest.fixture
def make(build: Callable[..., Any], folders: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Make:
    """A trainer with tools; its template is one that TRL calls tools with."""

    def parse(tokenizer: Any, ids: Sequence[int], **_: Any) -> dict[str, Any]:
        calls = calls_of(ids)
        return {"role": "assistant", "content": str(list(ids)), **({"tool_calls": calls} if calls else {})}

    monkeypatch.setattr(grpo_trainer, "parse_response", parse)

    def trainer(trainer_class: type = GRPOTrainer, tools: Sequence[Any] = (look, wait), **given: Any) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(folders("llama"))
        template = importlib.resources.files("trl").joinpath("chat_templates/qwen2_5.jinja")
        tokenizer.chat_template = template.read_text()
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in "abc"]
        data = datasets.Dataset.from_list(rows)
        arguments = {
            "processing_class": tokenizer,
            "tools": list(tools),
            "train_dataset": data,
            "eval_dataset": None,
            **given.pop("arguments", {}),
        }
        options = {"options": Options(**given.pop("options"))} if "options" in given else {}
        made, _ = build(
            trainer_class,
            model=AutoModelForCausalLM.from_pretrained(folders("llama"), max_position_embeddings=4096),
            arguments={**arguments, **options},
            **{"max_completion_length": 480, "max_tool_calling_iterations": 3, **given},
        )
        made.model.train()
        made.generation_kwargs["max_new_tokens"] = made.max_completion_length
        made.generation_kwargs["eos_token_id"] = list(range(0, 259, 9))  # short turns
        return made

    return trainer


def generated(trainer: Any, num: int = NUM) -> Any:
    """What the trainer generates for `num` prompts."""
    trainer._sync_tool_dicts = [{one.__name__: one for one in trainer.tools if one is not wait} for _ in range(num)]
    trainer._async_tool_dicts = [{one.__name__: one for one in trainer.tools if one is wait} for _ in range(num)]
    return trainer._generate([[{"role": "user", "content": "ab"[index // 3]}] for index in range(num)])


def test_log_probs_and_masks_are_those_of_the_whole_sequence(make: Make) -> None:
    trainer = make()
    prompt_ids, completion_ids, mask, completions, logps, *_ = generated(trainer)
    assert max(map(len, completions)) > 3
    for front, ids, drawn, known in zip(prompt_ids, completion_ids, mask, logps, strict=True):
        whole = torch.tensor([[*front, *ids]])
        found, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, whole, torch.ones_like(whole), len(ids), batch_size=1
        )
        assert len(ids) == len(drawn) == len(known)
        assert (torch.tensor(known) == found[0] * torch.tensor(drawn)).all()
    metrics = trainer._metrics["train"]
    assert metrics["tools/call_frequency"][0] > 1
    assert 0 < metrics["tools/failure_frequency"][0] < 1


def test_tools_at_the_same_time_have_the_results_of_rounds(make: Make) -> None:
    rounds, at_once = make(), make(options={"concurrent_tools": True})
    assert generated(rounds) == generated(at_once)
    assert rounds._metrics["train"] == at_once._metrics["train"]
    assert generated(rounds, 3) == generated(at_once, 3)


class Places:
    """Notes where it was looked."""

    def reset(self, **row: object) -> None:
        self.seen: list[str] = []

    def look(self, place: str) -> str:
        """Look.

        Args:
            place: Where.
        """
        self.seen.append(place)
        return f"at {place}"


@pytest.mark.parametrize("at_once", [False, True])
def test_reward_functions_are_given_the_environment_of_each_completion(make: Make, at_once: bool) -> None:
    looked: list[int] = []

    def score(completions: Sequence[Any], environments: Sequence[Places], **_: object) -> list[float]:
        assert len({id(one) for one in environments}) == 8
        for messages, environment in zip(completions, environments, strict=True):
            found = [one["content"] for one in messages if one["role"] == "tool" and one["name"] == "look"]
            assert found == [f"at {place}" for place in environment.seen]
            looked.append(len(found))
        return [float(len(one.seen)) for one in environments]

    trainer = make(tools=(), arguments={"environment_factory": Places}, options={"concurrent_tools": at_once})
    trainer.reward_funcs[0] = score
    for _ in range(2):  # instances are used again
        rows = [{"prompt": [{"role": "user", "content": "ab"[index // 4]}]} for index in range(8)]
        trainer._generate_and_score_completions(rows)
    assert len(looked) == 16 and sum(looked) > 2


@pytest.mark.parametrize("limit", [24, 64, 120])
@pytest.mark.parametrize("at_once", [False, True])
def test_limits_are_those_of_trl(make: Make, limit: int, at_once: bool) -> None:
    trainer = make(max_completion_length=limit, options={"concurrent_tools": at_once})
    _, completion_ids, mask, completions, logps, *_ = generated(trainer)
    for ids, drawn, known, messages in zip(completion_ids, mask, logps, completions, strict=True):
        assert len(ids) == len(drawn) == len(known) <= limit
        assert drawn[0] == drawn[-1] == 1 or len(ids) == limit
        turns = [message["content"] for message in messages if message["role"] == "assistant"]
        assert sum(drawn) == sum(len(json.loads(one)) for one in turns)
        assert len(turns) <= 4


def test_later_turns_compute_no_token_again(make: Make) -> None:
    trainer = make()
    with trace() as record:
        prompt_ids, _, mask, completions, *_ = generated(trainer)
    computed = sum(value for name, value in record.metrics().items() if name.endswith("prefill_tokens"))
    replied = sum(drawn.count(0) for drawn in mask)
    num_replies = sum(1 for one in completions for message in one[1:] if message["role"] == "assistant")
    assert replied > 0
    assert computed <= sum(map(len, prompt_ids)) + replied + num_replies


def test_a_tool_that_waits_does_not_hold_up_the_others(make: Make) -> None:
    """The first call waits for one in the second turn of another completion: in rounds it would wait in vain."""
    lock, second, seen = threading.Lock(), threading.Event(), dict[int, int]()

    def look(place: str) -> str:
        """Look.

        Args:
            place: Where.
        """
        with lock:
            seen[threading.get_ident()] = seen.get(threading.get_ident(), 0) + 1
            is_first, is_second = len(seen) == 1, seen[threading.get_ident()] > 1
        if is_second:
            second.set()
        elif is_first:
            assert second.wait(60)
        return f"at {place}"

    trainer = make(tools=[look], options={"concurrent_tools": True})
    generated(trainer)
    assert second.is_set()
    assert trainer._metrics["train"]["tools/failure_frequency"][0] < 1


def test_an_error_of_the_engine_in_a_later_turn_ends_the_conversations(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    converse = NativeEngine.converse

    def breaks(self: Any, prompts: Any, sampling: Any, dialogue: Any) -> int:
        seen: list[int] = []

        def on_turn(index: int, turn: Any) -> Any:
            seen.append(index)
            if len(seen) > len(prompts) + 1:
                raise TrainingError("logits are not finite")
            return dialogue.on_turn(index, turn)

        return converse(self, prompts, sampling, replace(dialogue, on_turn=on_turn))

    monkeypatch.setattr(NativeEngine, "converse", breaks)
    trainer = make()
    _, _, mask, completions, *_ = generated(trainer)
    assert max(map(len, completions)) > 3, "the rest is drawn by other calls"
    assert any(0 in drawn for drawn in mask)
    assert trainer._turns is None
    assert not [one for one in threading.enumerate() if one.name == "tunesmith-turns"]


def test_a_training_with_tools(make: Make) -> None:
    trainer = make(options={"concurrent_tools": True}, max_completion_length=60)
    assert trainer.train().global_step == 1
