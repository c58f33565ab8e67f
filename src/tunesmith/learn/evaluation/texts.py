"""Texts behind prompts, drawn by an engine and kept as they come."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tunesmith.base.core.seeds import derive
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.rollout.engine import Engine
from tunesmith.learn.evaluation.kept import KeptAnswers

_TOGETHER = 512
"""Prompts of a call of an engine whose bits may depend on what else it draws."""


def kept_texts(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    kept: KeptAnswers,
    *,
    on_progress: Callable[[int], object] = lambda _: None,
) -> list[str]:
    """One text for each of `prompts`, which have `token_ids`, in their order; those that are `kept` are not drawn.

    A text is the same whichever others are kept: an exact engine draws what is missing in one call, and of a prompt
    that is there several times, whose noise depends on their number, all or none. Another engine draws parts of a fixed
    size, each with its seed, and a part is kept or drawn as a whole. `on_progress` is called with how many are there.

    Raises:
        As `Engine.generate`.
    """
    if engine.is_exact:
        return _by_prompt(engine, prompts, sampling, kept, on_progress)
    texts: list[str] = []
    for begin in range(0, len(prompts), _TOGETHER):
        part, own = prompts[begin : begin + _TOGETHER], sampling
        if begin and sampling.seed is not None:
            own = replace(sampling, seed=derive(sampling.seed, "part", begin))
        key = kept.key("texts", own, [prompt.token_ids for prompt in part])
        if (answers := kept.get(key, len(part))) is None:
            groups = engine.generate(part, 1, own, on_progress=_behind(begin, on_progress))
            answers = [group.completions[0].text for group in groups]
            kept.add(key, answers)
        texts += map(str, answers)
        on_progress(len(texts))
    return texts


def _by_prompt(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    kept: KeptAnswers,
    on_progress: Callable[[int], object],
) -> list[str]:
    places: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(tuple(prompt.token_ids or ()), []).append(place)
    texts: dict[int, str] = {}
    keys = {ids: kept.key("text", sampling, ids, len(equal)) for ids, equal in places.items()}
    for ids, equal in places.items():
        if (answers := kept.get(keys[ids], len(equal))) is not None:
            texts.update(zip(equal, map(str, answers), strict=True))
    missing = [place for place in range(len(prompts)) if place not in texts]
    num_known = len(texts)

    def keep(index: int, group: Group) -> None:
        texts[missing[index]] = group.completions[0].text
        ids = tuple(prompts[missing[index]].token_ids or ())
        if all(place in texts for place in places[ids]):
            kept.add(keys[ids], [texts[place] for place in places[ids]])

    on_progress(num_known)
    if missing:
        asked = [prompts[place] for place in missing]
        engine.generate(asked, 1, sampling, on_group=keep, on_progress=_behind(num_known, on_progress))
    return [texts[place] for place in range(len(prompts))]


def _behind(num_before: int, on_progress: Callable[[int], object]) -> Callable[[int, int], None]:
    """`on_progress` for an engine that draws behind `num_before` others."""

    def update(num_done: int, _: int) -> None:
        on_progress(num_before + num_done)

    return update
