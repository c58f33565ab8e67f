"""The engines of all ranks as one: each draws the completions of its share of the prompts, and all get all."""

from collections.abc import Callable, Sequence
from typing import Unpack

from tunesmith.base.core.errors import InputError
from tunesmith.base.core.turns import Turns
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.distributed.ranks import gathered, in_group, share_of, stages
from tunesmith.engine.rollout.engine import Dialogue, Engine, Functions


class DividedEngine:
    """The engine of this rank, `inner`, together with those of the others. All ranks call it with the same prompts.

    A prompt's completions do not depend on the others, so they are those of one engine that draws all. `refresh` brings
    the weights that `inner` draws from up to date, where ranks divide the trained ones. Pipeline stages draw together.
    """

    def __init__(self, inner: Engine, refresh: Callable[[], None] | None = None) -> None:
        self.inner = inner
        self.name = inner.name
        self._refresh = refresh
        self._turns = Turns("engine")

    @property
    def is_exact(self) -> bool:
        """See `Engine.is_exact`."""
        return not in_group() and self.inner.is_exact  # an engine of several ranks cannot be asked by one alone

    def unload(self) -> None:
        """Free cache and packed weights of this rank; the next `generate` rebuilds them."""
        self.inner.unload()

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, **functions: Unpack[Functions]
    ) -> list[Group]:
        """See `Engine.generate`; on every rank the groups of all prompts. Callbacks cannot be used."""
        if any(functions.values()):
            raise InputError("callbacks of an engine work in one process alone; train without --scale.ranks")
        with self._turns.next():  # ranks exchange what they drew call by call
            if self._refresh is not None:
                self._refresh()
            own = _share(prompts)
            drawn = self.inner.generate([prompts[place] for place in own], n, sampling) if own else []
            found = dict(gathered(list(zip(own, drawn, strict=True)), "completions", all_ranks=stages() is None))
        return [found[place] for place in range(len(prompts))]

    def converse(self, prompts: Sequence[Prompt], sampling: SamplingParams, dialogue: Dialogue) -> int:
        """See `Engine.converse`. All ranks call it, each with its own prompts, or none: only it can reply to them."""
        if stages() is not None:
            raise InputError("with an environment each rank draws alone, which a pipeline's cannot; set scale.tensor")
        with self._turns.next():
            if self._refresh is not None:
                self._refresh()
            return self.inner.converse(prompts, sampling, dialogue) if prompts else 0


def _share(prompts: Sequence[Prompt]) -> list[int]:
    """Places of the prompts that this rank draws for. Equal prompts stay together: the noise of the second one depends
    on how many came before it.
    """
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(repr((prompt.content, prompt.token_ids)), []).append(place)
    return [place for together in share_of(list(places.values()), all_ranks=stages() is None) for place in together]
