"""vLLM as a contender of `benchmarks.rollout`, in a Python of its own: it imports no trainer, for which that one has no
packages.
"""

import os
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmarks.process import Contender
from benchmarks.workloads import Drawn, Workload, checked
from tunesmith.base.core.errors import InputError

VARIABLES = MappingProxyType(
    {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
)
"""Two GiB for keys and values, threads on any core, one process, no reports to anybody."""

_MOST_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """Folder of the model, dtype, and tokens of its longest sequence."""

    folder: str
    dtype: str
    max_tokens: int


def vllm_python() -> str:
    """The Python that has vLLM, from the environment. Raises InputError if none is named."""
    python = os.environ.get("TUNESMITH_VLLM_PYTHON")
    if not python:
        raise InputError("TUNESMITH_VLLM_PYTHON is not set; name a Python that has vLLM, see docs/engines.md")
    return python


class VLLM(Contender):
    """vLLM's own engine, which compiles the model, with prefix caching.

    The cache of prefixes is emptied before each draw: in training the weights are new.
    """

    def __init__(self, settings: VLLMSettings) -> None:
        from vllm import LLM  # type: ignore[import-not-found]  # only in a Python that has it

        self._llm: Any = LLM(
            model=settings.folder,
            dtype=settings.dtype,
            max_model_len=settings.max_tokens,
            max_num_seqs=_MOST_SEQUENCES,
            enable_prefix_caching=True,
            seed=0,
        )

    def draw(self, work: Workload, seed: int, *, setting: object = None) -> Drawn:
        """The completions of `work`, without log-probs or text, which would take it time."""
        from vllm import SamplingParams  # type: ignore[import-not-found]

        given = work.sampling
        sampling = SamplingParams(
            n=work.num_completions,
            max_tokens=given.max_new_tokens,
            temperature=given.temperature,
            top_p=given.top_p,
            repetition_penalty=given.repetition_penalty,
            ignore_eos=work.is_exact_length,
            detokenize=False,
        )
        self._llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": list(ids)} for ids in work.prompt_ids]
        start_s = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        return checked(work, seconds, [item.token_ids for output in outputs for item in output.outputs], False)
