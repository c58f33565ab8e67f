"""Feedback as other tools write it: `FOREIGN` has a reader for each of them, which turns a row into votes and feedback.

Who said what is named `<tool>:<their id>`, so nobody gets a login by an import. Verdicts of models, and rows that
judge nothing, bring nothing. Answers that stand in other rows than what is said of them are looked up in `Found`.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from tunesmith.base.schema.records import Message, Text
from tunesmith.collect.data.foreign_values import (
    PROMPT_FIELDS,
    Facts,
    Format,
    Found,
    Said,
    answer_of,
    compared,
    id_of,
    last_turns,
    loaded,
    moment,
    number_of,
    objects,
    prompt_of,
    rater_at,
    walked,
)
from tunesmith.collect.data.rows import Row, RowError, kind_of
from tunesmith.collect.data.vote_values import UNKNOWN_RATER, mapping_of, text_of
from tunesmith.collect.store.content import MAX_NAME
from tunesmith.collect.store.records import EDITED, Given, PreferenceName

# Open WebUI: `backend/open_webui/models/feedbacks.py`, and the browser's `ResponseMessage.svelte`.

_REASONING = re.compile(r'<details type="reasoning".*?</details>\s*', re.DOTALL)


def _open_webui(row: Row, _: Found) -> Iterator[Given]:
    data, meta = mapping_of(row.columns.get("data"), "data"), mapping_of(row.columns.get("meta"), "meta")
    rating = str(data.get("rating"))
    if rating not in ("1", "-1"):
        raise RowError(f"`data.rating` is {rating[:40]}; Open WebUI writes 1 or -1")
    messages = _history(row.columns.get("snapshot"))
    answer_id = str(meta.get("message_id"))
    if answer_id not in messages:
        raise RowError(f"the snapshot has no message {answer_id[:60]!r}, which `meta.message_id` names")
    node = messages[answer_id]
    prompt = walked(messages.get, node.get("parentId"), "parentId", lambda one: (one.get("role"), _content(one)))
    rater, at = (
        rater_at("open-webui", row.columns.get("user_id")),
        moment(row.columns.get("updated_at", row.columns.get("created_at")), "updated_at"),
    )
    reason, comment = text_of(data.get("reason"), "reason"), text_of(data.get("comment"), "comment")
    text, model = answer_of(_content(node), "content"), _model(node)
    others = [
        one
        for key, one in messages.items()
        if meta.get("arena") and key != answer_id and one.get("parentId") == node.get("parentId")
    ]
    said = Said("open-webui", answer_id, prompt, text, rater, model, at)
    given_id = id_of(row.columns, "id")
    if not others:
        yield said.label(given_id, rating == "1", reason=reason)
        yield from said.comments(given_id, comment)
    for one in others:
        sides = ((text, model), (answer_of(_content(one), "content"), _model(one)))
        why = comment or reason
        yield compared("open-webui", prompt, sides, ("better", int(rating == "-1")), rater, at, reason=why)


def _history(snapshot: object) -> Mapping[str, Facts]:
    chat = mapping_of(mapping_of(snapshot, "snapshot").get("chat"), "snapshot.chat")
    chat = mapping_of(chat.get("chat"), "snapshot.chat.chat") or chat
    messages = mapping_of(mapping_of(chat.get("history"), "history").get("messages"), "history.messages")
    if not messages:
        raise RowError("no `snapshot` with the conversation; export it under Admin, Evaluations", "missing column")
    return {key: mapping_of(one, "history.messages") for key, one in messages.items()}


def _content(node: Facts) -> object:
    """The text of a message without its reasoning, which is HTML in it, or is among the items of `output`, from which a
    text may have to be put together.
    """
    items = objects(node.get("output"), "output")
    if any(item.get("type") not in ("message", "reasoning") for item in items):
        raise RowError("`output` has calls of tools, which cannot be put to raters")
    content = node.get("content")
    content = _REASONING.sub("", content) if isinstance(content, str) else content
    texts = [_parts_text(item) for item in items if item.get("type") == "message"]
    return content or "\n".join(text for text in texts if text.strip())


def _parts_text(item: Facts) -> str:
    return "".join(text_of(part.get("text"), "output.content.text") for part in objects(item.get("content"), "output"))


def _model(node: Facts) -> str:
    return str(node.get("selectedModelId") or node.get("model") or "")


# FastChat and LMArena: `fastchat/serve/gradio_block_arena_anony.py`, `fastchat/serve/monitor/clean_battle_data.py`.

_FASTCHAT_VOTES: Mapping[str, tuple[PreferenceName, int]] = {
    "leftvote": ("better", 0),
    "rightvote": ("better", 1),
    "tievote": ("tie", 0),
    "bothbad_vote": ("both_bad", 0),
}
_NO_ANSWERS = (
    "NETWORK ERROR DUE TO HIGH TRAFFIC",
    "$MODERATION$",
    "API REQUEST ERROR",
    "\u258c",
    '<span class="cursor">',
)
"""Texts that are no answers but errors, or not finished."""


def _fastchat(row: Row, found: Found) -> Iterator[Given]:
    columns, kind = row.columns, row.columns.get("type")
    if kind not in (*_FASTCHAT_VOTES, "upvote", "downvote"):
        return
    at = moment(columns.get("tstamp"), "tstamp")
    # An address is a person's, and opaque enough as a hash: nobody is named by it.
    address = columns.get("ip")
    user = hashlib.sha256(str(address).encode()).hexdigest()[:16] if address else UNKNOWN_RATER
    rater = rater_at("fastchat", user)
    if kind not in _FASTCHAT_VOTES:
        said = _fastchat_turns(mapping_of(columns.get("state"), "state"))
        (prompt, (text, _)), model = last_turns((said, said)), str(columns.get("model") or "")
        id_ = id_of(columns)
        yield Said("fastchat", id_, prompt, text, rater, model, at).label(id_, kind == "upvote")
        return
    states = objects(columns.get("states"), "states")
    models = columns.get("models")
    if len(states) != 2 or not isinstance(models, list | tuple) or len(cast(Sequence[object], models)) != 2:
        raise RowError("`states` and `models` must have two entries each")
    prompt, texts = last_turns([_fastchat_turns(state) for state in states])
    named = [str(state.get("model_name") or name or "") for state, name in zip(states, models, strict=True)]
    answers = list(zip(texts, named, strict=True))
    yield compared("fastchat", prompt, answers, _FASTCHAT_VOTES[str(kind)], rater, at, left=0)


def _fastchat_turns(state: Facts) -> tuple[Message, ...]:
    given, offset = state.get("messages"), state.get("offset", 0)
    if not isinstance(given, list | tuple) or not isinstance(offset, int):
        raise RowError("`state.messages` is no list of [role, text]", "wrong type")
    turns: list[Facts] = []
    for place, turn in enumerate(cast(Sequence[object], given)[offset:]):
        if not isinstance(turn, list | tuple) or len(cast(Sequence[object], turn)) != 2:
            raise RowError("`state.messages` is no list of [role, text]", "wrong type")
        text = cast(Sequence[object], turn)[1]
        if not isinstance(text, str):
            raise RowError(f"turn {place + 1} is {kind_of(text)}; only texts can be judged", "wrong type")
        if any(sign in text for sign in _NO_ANSWERS):
            raise RowError("an answer is an error message, or not finished")
        turns.append({"role": ("user", "assistant")[place % 2], "content": text})
    return prompt_of(turns, "state.messages")


_WINNERS: Mapping[object, tuple[PreferenceName, int]] = {
    "model_a": ("better", 0),
    "model_b": ("better", 1),
    "tie": ("tie", 0),
    "tie (bothbad)": ("both_bad", 0),
    "both_bad": ("both_bad", 0),
}


def _battle(row: Row, _: Found) -> Iterator[Given]:
    columns = row.columns
    verdict = _WINNERS.get(columns.get("winner"))
    if verdict is None:
        raise RowError(f"`winner` is {columns.get('winner')!r}; give one of {', '.join(map(str, _WINNERS))}")
    names = ("conversation_a", "conversation_b")
    prompt, texts = last_turns([prompt_of(columns.get(name), name) for name in names])
    answers = list(zip(texts, (str(columns.get(name) or "") for name in ("model_a", "model_b")), strict=True))
    rater = rater_at("lmarena", columns.get("judge", columns.get("evaluation_session_id")))
    yield compared("lmarena", prompt, answers, verdict, rater, moment(columns.get("tstamp"), "tstamp"), left=0)


def _kaggle(row: Row, _: Found) -> Iterator[Given]:
    columns = row.columns
    sides = ("winner_model_a", "winner_model_b", "winner_tie")
    won = [name for name in sides if number_of(columns.get(name, 0), name) == 1]
    if len(won) != 1:
        raise RowError(f"{len(won)} of {', '.join(sides)} are 1; one must be")
    turns = [_texts(columns.get(name), name) for name in ("prompt", "response_a", "response_b")]
    if len({len(texts) for texts in turns}) != 1:
        raise RowError("`prompt`, `response_a` and `response_b` have different numbers of turns")
    sides_ = [prompt_of(_alternating(turns[0], answers), "prompt") for answers in turns[1:]]
    prompt, texts = last_turns(sides_)
    answers = list(zip(texts, (str(columns.get(name) or "") for name in ("model_a", "model_b")), strict=True))
    verdict: tuple[PreferenceName, int] = ("tie", 0) if won[0] == "winner_tie" else ("better", sides.index(won[0]))
    yield compared("lmarena", prompt, answers, verdict, rater_at("lmarena", None), left=0)


def _texts(value: object, name: str) -> list[object]:
    given = loaded(value)
    return cast(list[object], given) if isinstance(given, list) else [given]


def _alternating(asked: Sequence[object], answered: Sequence[object]) -> list[Facts]:
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for turn in zip(asked, answered, strict=True)
        for role, text in zip(roles, turn, strict=True)
    ]


# OpenAI's fine-tuning files: preferences (DPO), and conversations.


def _openai_preference(row: Row, _: Found) -> Iterator[Given]:
    columns = row.columns
    for name in ("input", "preferred_output", "non_preferred_output"):
        if columns.get(name) is None:
            raise RowError(f"no `{name}`", "missing column")
    prompt = prompt_of(mapping_of(columns["input"], "input").get("messages"), "input.messages")
    sides: list[tuple[str, str]] = []
    for name in ("preferred_output", "non_preferred_output"):
        outputs = objects(columns[name], name)
        if len(outputs) != 1:
            raise RowError(f"`{name}` has {len(outputs)} messages; give one")
        sides.append((answer_of(outputs[0], name), ""))
    yield compared("openai", prompt, sides, ("better", 0), rater_at("openai", None))


def _openai_chat(row: Row, _: Found) -> Iterator[Given]:
    given = objects(row.columns.get("messages"), "messages")
    if not given or given[-1].get("role") != "assistant":
        raise RowError("`messages` does not end with the assistant, so there is nothing to learn", "empty")
    if given[-1].get("weight") == 0:
        raise RowError("the last answer has `weight` 0, so it is not to be learnt")
    if len(given) == 1:
        raise RowError("`messages` holds one answer and nothing that it answers", "empty")
    text, prompt = answer_of(given[-1], "messages"), prompt_of(given[:-1], "messages")
    id_ = id_of(row.columns)
    yield from Said("openai", id_, prompt, text, rater_at("openai", None)).corrected(id_, text)


# Langfuse: objects of its public API (`langfuse/api/commons/types` of its Python package): scores, traces with their
# scores, observations.


def _langfuse_scan(row: Row, found: Found) -> None:
    columns = row.columns
    if columns.get("output") is not None and isinstance(columns.get("id"), str):
        facts = {name: columns.get(name) for name in ("input", "output", "model", "userId")}
        found.keep(f"langfuse {columns['id']}", facts)


def _langfuse(row: Row, found: Found) -> Iterator[Given]:
    columns = row.columns
    embedded = columns.get("scores")
    if isinstance(embedded, list | tuple) and all(isinstance(one, Mapping) for one in cast(Sequence[object], embedded)):
        for score in cast(Sequence[Facts], embedded):
            yield from _langfuse_score(score, str(score.get("traceId") or columns.get("id")), found)
    elif "value" in columns or "stringValue" in columns:
        subject = mapping_of(columns.get("subject"), "subject")
        target = columns.get("observationId") or columns.get("traceId") or subject.get("id")
        yield from _langfuse_score(columns, str(target), found)


def _langfuse_score(score: Facts, target: str, found: Found) -> Iterator[Given]:
    if score.get("source") == "EVAL":
        return  # a model's judgement
    about = found.get(f"langfuse {score.get('observationId') or target}") or found.get(f"langfuse {target}")
    if about is None:
        raise RowError(f"no trace or observation {target[:60]!r} with an output; give its file beside the scores")
    name, kind = str(score.get("name") or "score")[:MAX_NAME], score.get("dataType", "NUMERIC")
    said = Said(
        "langfuse",
        target,
        prompt_of(about.get("input"), "input"),
        answer_of(about.get("output"), "output"),
        rater_at("langfuse", score.get("authorUserId") or about.get("userId")),
        str(about.get("model") or ""),
        moment(score.get("timestamp") or score.get("createdAt"), "timestamp"),
    )
    id_ = id_of(score, "id")
    words = text_of(score.get("stringValue"), "stringValue") or score.get("value")
    if kind == "CORRECTION":
        yield from said.corrected(id_, answer_of(words, "value"))
    elif kind == "TEXT":
        yield from said.comments(id_, text_of(words, "value"))
    else:
        value = number_of(score.get("value"), "value")
        # A category's number is its place in a list that the file does not have.
        reason = str(words) if kind == "CATEGORICAL" else ""
        yield said.label(id_, bool(value) if kind == "BOOLEAN" else value, name, reason)
    yield from said.comments(id_, text_of(score.get("comment"), "comment"))


# MLflow 3: `Trace.to_dict` and `search_traces`, with the assessments in them.


def _mlflow_trace(columns: Facts) -> Facts:
    held = loaded(columns.get("trace"))
    return cast(Facts, held) if isinstance(held, Mapping) else columns


def _mlflow(row: Row, _: Found) -> Iterator[Given]:
    trace = _mlflow_trace(row.columns)
    info = mapping_of(trace.get("info"), "info") or trace
    spans = objects(mapping_of(trace.get("data"), "data").get("spans"), "data.spans")
    root = next((span for span in spans if not span.get("parent_span_id")), {})
    attributes = mapping_of(root.get("attributes"), "attributes")
    asked = attributes.get("mlflow.spanInputs", trace.get("request"))
    answered = attributes.get("mlflow.spanOutputs", trace.get("response"))
    for one in objects(info.get("assessments"), "assessments"):
        source = mapping_of(one.get("source"), "source")
        if source.get("source_type") != "HUMAN" or one.get("valid") is False:
            continue  # of a model or of code, or taken back
        said = Said(
            "mlflow",
            str(info.get("trace_id") or id_of(trace)),
            prompt_of(asked, "inputs"),
            answer_of(answered, "outputs"),
            rater_at("mlflow", source.get("source_id")),
            at=moment(one.get("create_time"), "create_time"),
        )
        id_ = id_of(one, "assessment_id")
        if one.get("expectation") is not None:
            wanted = mapping_of(one["expectation"], "expectation").get("value")
            if not isinstance(wanted, str) or not wanted.strip():
                raise RowError("`expectation.value` is no text; an expectation is the wanted answer", "wrong type")
            yield from said.corrected(id_, wanted)
        else:
            value = number_of(mapping_of(one.get("feedback"), "feedback").get("value"), "feedback.value")
            yield said.label(id_, value, str(one.get("assessment_name") or "feedback")[:MAX_NAME])
        yield from said.comments(id_, text_of(one.get("rationale"), "rationale"))


# LibreChat: `packages/data-schemas/src/schema/message.ts`, one message a row, or conversations with their `messages`.


def _librechat_messages(columns: Facts) -> list[Facts]:
    given = objects(columns["messages"], "messages") if "messages" in columns else [columns]
    held = [
        child for one in given if one.get("children") for child in _librechat_messages({"messages": one["children"]})
    ]
    return [*given, *held]


def _librechat_scan(row: Row, found: Found) -> None:
    for one in _librechat_messages(row.columns):
        facts = {name: one.get(name) for name in ("parentMessageId", "isCreatedByUser", "text", "content")}
        found.keep(f"librechat {one.get('messageId')}", facts)


def _librechat(row: Row, found: Found) -> Iterator[Given]:
    for one in _librechat_messages(row.columns):
        feedback = mapping_of(one.get("feedback"), "feedback")
        if not feedback:
            continue
        rating = feedback.get("rating")
        if rating not in ("thumbsUp", "thumbsDown"):
            raise RowError(f"`feedback.rating` is {str(rating)[:40]!r}; LibreChat writes thumbsUp or thumbsDown")
        prompt = walked(
            lambda id_: found.get(f"librechat {id_}"), one.get("parentMessageId"), "parentMessageId", _librechat_turn
        )
        said = Said(
            "librechat",
            str(one.get("messageId")),
            prompt,
            answer_of(_librechat_turn(one)[1], "text"),
            rater_at("librechat", one.get("user")),
            str(one.get("model") or ""),
            moment(one.get("updatedAt", one.get("createdAt")), "updatedAt"),
        )
        tag = feedback.get("tag")
        reason = cast(Facts, tag).get("key") if isinstance(tag, Mapping) else tag
        yield said.label(said.id, rating == "thumbsUp", reason=str(reason or ""))
        yield from said.comments(said.id, text_of(feedback.get("text"), "feedback.text"))


def _librechat_turn(message: Facts) -> tuple[object, object]:
    role = "user" if message.get("isCreatedByUser") else "assistant"
    return role, message.get("text") or message.get("content")


# TensorZero: rows of its tables (`ChatInference`, `BooleanMetricFeedback` and others), or the bodies of its requests.


def _tensorzero_scan(row: Row, found: Found) -> None:
    columns = row.columns
    if "function_name" in columns:
        facts = {name: columns.get(name) for name in ("input", "output", "variant_name", "tags", "timestamp")}
        found.keep(f"tensorzero {columns.get('inference_id', columns.get('id'))}", facts)


def _tensorzero(row: Row, found: Found) -> Iterator[Given]:
    columns = row.columns
    is_answer = "function_name" in columns
    target = columns.get("inference_id") or columns.get("target_id") or (columns.get("id") if is_answer else None)
    about = columns if is_answer else found.get(f"tensorzero {target}")
    if about is None:
        if columns.get("episode_id") or columns.get("target_type") == "episode":
            raise RowError("feedback on an episode, not on one answer, is not imported")
        raise RowError(f"no inference {str(target)[:60]!r}; give the file of inferences beside the feedback")
    user = mapping_of(columns.get("tags"), "tags").get("user_id") or mapping_of(about.get("tags"), "tags").get(
        "user_id"
    )
    said = Said(
        "tensorzero",
        str(target),
        prompt_of(about.get("input"), "input"),
        answer_of(about.get("output"), "output"),
        rater_at("tensorzero", user),
        str(about.get("variant_name") or ""),
        moment(columns.get("timestamp"), "timestamp"),
    )
    if is_answer:
        # A demonstration in place of the output, with what was drawn beside it.
        for worse in cast(Sequence[object], columns.get("dispreferred_outputs") or ()):
            sides = ((said.answer, EDITED), (answer_of(worse, "dispreferred_outputs"), said.model))
            yield compared("tensorzero", said.prompt, sides, ("better", 0), said.rater, said.at)
        return
    id_, value = id_of(columns, "id"), columns.get("value")
    metric = columns.get("metric_name", "comment" if "target_type" in columns else "demonstration")
    if metric == "comment":
        yield from said.comments(id_, text_of(value, "value"))
    elif metric == "demonstration":
        yield from said.corrected(id_, answer_of(value, "value"))
    else:
        yield said.label(id_, number_of(value, "value"), str(metric)[:MAX_NAME])


# Portkey: `POST /v1/feedback`, and the logs with request and response.


def _portkey_scan(row: Row, found: Found) -> None:
    columns = row.columns
    if "response" in columns:
        facts = {name: columns.get(name) for name in ("request", "response", "ai_model", "metadata")}
        found.keep(f"portkey {columns.get('trace_id')}", facts)


def _portkey(row: Row, found: Found) -> Iterator[Given]:
    columns = row.columns
    if "value" not in columns:
        return
    trace = str(columns.get("trace_id"))
    value = number_of(columns["value"], "value")
    if not -10 <= value <= 10:
        raise RowError(f"`value` is {value}; Portkey's are from -10 to 10")
    about = found.get(f"portkey {trace}")
    if about is None:
        raise RowError(f"no log with `trace_id` {trace[:60]!r}; give the file of logs beside the feedback")
    metadata = mapping_of(loaded(columns.get("metadata")), "metadata")
    prompt, answer = prompt_of(about.get("request"), "request"), answer_of(about.get("response"), "response")
    rater, model = rater_at("portkey", metadata.get("_user")), str(about.get("ai_model") or "")
    id_ = id_of(columns, "id")
    said = Said("portkey", trace, prompt, answer, rater, model, moment(columns.get("created_at"), "created_at"))
    # Their examples write a thumb as 1, and -1 or 0.
    yield said.label(id_, value > 0) if abs(value) <= 1 else said.label(id_, value, "score")


# Label Studio: tasks with annotations by the tag `Pairwise`.


def _label_studio(row: Row, _: Found) -> Iterator[Given]:
    data = mapping_of(row.columns.get("data"), "data")
    raters = mapping_of(data.get("raters"), "data.raters")
    for annotation in objects(row.columns.get("annotations"), "annotations"):
        if annotation.get("was_cancelled"):
            continue
        by = annotation.get("completed_by")
        by = cast(Facts, by).get("id") if isinstance(by, Mapping) else by
        for result in objects(annotation.get("result"), "result"):
            if result.get("type") != "pairwise":
                continue
            selected = mapping_of(result.get("value"), "value").get("selected")
            if selected not in ("left", "right", "none"):
                raise RowError(f"`value.selected` is {str(selected)[:40]!r}; Label Studio writes left or right")
            prompt, texts = _label_studio_task(data, result.get("to_name"))
            verdict: tuple[PreferenceName, int] = ("better", int(selected == "right"))
            sides = [(text, "") for text in texts]
            rater = str(raters.get(str(by)) or rater_at("label-studio", by))
            at = moment(annotation.get("created_at"), "created_at")
            if selected != "none":
                yield compared("label-studio", prompt, sides, verdict, rater, at, left=0)


def _label_studio_task(data: Facts, to_name: object) -> tuple[Text, tuple[str, str]]:
    """The prompt of a task and its two texts: those that `to_name` names, else the two that are no prompt."""
    listed = to_name if isinstance(to_name, list | tuple) else str(to_name or "").split(",")
    names = [str(one).strip() for one in cast(Sequence[object], listed)]
    if len(names) != 2 or not all(isinstance(data.get(name), str) for name in names):
        names = [name for name, value in data.items() if isinstance(value, str) and name not in PROMPT_FIELDS]
    if len(names) != 2:
        raise RowError(f"`data` has {len(names)} texts ({', '.join(names)}) beside the prompt; two are compared")
    asked = [data[name] for name in PROMPT_FIELDS if data.get(name) and name not in names]
    if not asked:
        raise RowError(f"`data` has no prompt; name it one of {', '.join(PROMPT_FIELDS)}", "missing column")
    texts = [one for one in asked if isinstance(one, str)]
    if len(texts) < len(asked) > 1:
        raise RowError("the prompt is a conversation beside other fields; write one field")
    prompt = "\n\n".join(texts) or prompt_of(asked[0], "data")
    return prompt, (answer_of(data[names[0]], names[0]), answer_of(data[names[1]], names[1]))


def _has(*names: str) -> Callable[[Facts], bool]:
    return lambda columns: set(names) <= columns.keys()


def _is_open_webui(columns: Facts) -> bool:
    data = columns.get("data")
    return isinstance(data, Mapping) and "rating" in data and ("meta" in columns or "snapshot" in columns)


def _is_langfuse(columns: Facts) -> bool:
    is_score = "dataType" in columns and bool({"traceId", "subject", "observationId"} & columns.keys())
    is_answer = {"id", "input", "output"} <= columns.keys() and bool(
        {"scores", "traceId", "sessionId", "projectId", "userId"} & columns.keys()
    )
    return is_score or is_answer or {"traceId", "name", "value"} <= columns.keys()


def _is_mlflow(columns: Facts) -> bool:
    trace = _mlflow_trace(columns)
    return (isinstance(trace.get("info"), Mapping) and isinstance(trace.get("data"), Mapping)) or (
        {"trace_id", "assessments"} <= columns.keys()
    )


def _is_librechat(columns: Facts) -> bool:
    given = columns.get("messages")
    first = cast(Sequence[object], given)[0] if isinstance(given, list | tuple) and given else columns
    return isinstance(first, Mapping) and {"messageId", "isCreatedByUser"} <= cast(Facts, first).keys()


def _is_tensorzero(columns: Facts) -> bool:
    names = columns.keys()
    is_feedback = bool({"metric_name", "value"} <= names and names & {"inference_id", "target_id", "episode_id"})
    is_table = {"id", "value"} <= names and bool(names & {"target_id", "inference_id"})
    return is_feedback or is_table or {"function_name", "variant_name"} <= names


def _is_portkey(columns: Facts) -> bool:
    return "trace_id" in columns and ("value" in columns or {"request", "response"} <= columns.keys())


def _is_openai_preference(columns: Facts) -> bool:
    return bool({"preferred_output", "non_preferred_output"} & columns.keys())


def _is_openai_chat(columns: Facts) -> bool:
    return isinstance(columns.get("messages"), list | tuple) and not columns.keys() & {
        "chosen",
        "rejected",
        "completion",
        "completions",
    }


FOREIGN = (
    Format("open-webui", "feedback of Open WebUI", _is_open_webui, _open_webui),
    Format("fastchat", "logs of FastChat and LMArena", _has("tstamp", "type"), _fastchat),
    Format("lmarena", "battles of LMArena", _has("conversation_a", "conversation_b"), _battle),
    Format("lmarena-flat", "battles of LMArena, as on Kaggle", _has("response_a", "response_b"), _kaggle),
    Format("openai-preference", "OpenAI's preference fine-tuning", _is_openai_preference, _openai_preference),
    Format("label-studio", "tasks of Label Studio", _has("data", "annotations"), _label_studio),
    Format("mlflow", "traces of MLflow", _is_mlflow, _mlflow),
    Format("librechat", "messages of LibreChat", _is_librechat, _librechat, _librechat_scan),
    Format("tensorzero", "inferences and feedback of TensorZero", _is_tensorzero, _tensorzero, _tensorzero_scan),
    Format("langfuse", "scores and traces of Langfuse", _is_langfuse, _langfuse, _langfuse_scan),
    Format("portkey", "logs and feedback of Portkey", _is_portkey, _portkey, _portkey_scan),
    Format("openai-chat", "OpenAI's chat fine-tuning", _is_openai_chat, _openai_chat),
)
"""The formats in the order in which they are tried: what two might read is the first one's."""
