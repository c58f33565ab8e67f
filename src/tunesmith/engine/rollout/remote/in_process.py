"""vLLM inside this process, where it can be imported."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.base.core.errors import MissingDependencyError
from tunesmith.engine.models.loaded import PreTrainedModel
from tunesmith.engine.rollout.remote.connection import Drawn, Job, TransientError, checked


class InProcess:
    """The `Connection` to a `vllm.LLM`, which starts with the first weights that are pushed.

    `options` are its keywords, such as `gpu_memory_utilization` and `max_model_len`.
    """

    name = "vLLM in this process"

    def __init__(self, model: PreTrainedModel, options: Mapping[str, object]) -> None:
        self.dtype: str | None = None
        self._options = {"dtype": str(model.dtype).removeprefix("torch."), **options}
        if model.device.type == "cpu":
            self._options.setdefault("enforce_eager", True)  # compiling takes minutes
        self._llm: Any = None

    def push(self, folder: Path, version: str) -> None:
        """See `Connection.push`."""
        if self._llm is None:
            self._llm = vllm_library().LLM(
                model=str(folder),
                skip_tokenizer_init=True,
                logprobs_mode="processed_logprobs",
                worker_extension_cls="tunesmith.engine.rollout.remote.worker.WeightLoader",
                **self._options,
            )
        self.dtype = self._llm.collective_rpc("tunesmith_load", args=(str(folder), version))[0]
        self._llm.reset_prefix_cache()

    def version(self) -> str | None:
        """See `Connection.version`."""
        names = set(self._llm.collective_rpc("tunesmith_version"))
        return str(names.pop()) if len(names) == 1 else ""

    def complete(self, jobs: Mapping[int, Job]) -> tuple[dict[int, list[Drawn]], TransientError | None]:
        """See `Connection.complete`."""
        answers = self._generate([job.prompt_ids for job in jobs.values()], [job.settings for job in jobs.values()])
        done = {
            key: checked(job, [_drawn(one) for one in sorted(answer.outputs, key=lambda one: one.index)])
            for (key, job), answer in zip(jobs.items(), answers, strict=True)
        }
        return done, None

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Connection.score`."""
        settings = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        (answer,) = self._generate([token_ids], [settings])
        pairs = zip(token_ids[1:], answer.prompt_logprobs[1:], strict=True)
        return [float(logps[token].logprob) for token, logps in pairs]

    def _generate(self, prompts: Sequence[Sequence[int]], settings: Sequence[Mapping[str, object]]) -> list[Any]:
        sampling = [vllm_library().SamplingParams(detokenize=False, **one) for one in settings]
        return self._llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], sampling, use_tqdm=False)


def _drawn(output: Any) -> Drawn:
    ids = list(output.token_ids)
    return Drawn(ids, [logps[token].logprob for token, logps in zip(ids, output.logprobs, strict=True)])


def vllm_library() -> Any:
    """The module vllm. Raises MissingDependencyError if it cannot be imported."""
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependencyError(
            f"rollout.backend is vllm without a rollout.server_url, and vLLM cannot be imported ({error}); install it "
            "beside Tunesmith, or start a vLLM server and name it in rollout.server_url (docs/engines.md)"
        ) from error
    return vllm
