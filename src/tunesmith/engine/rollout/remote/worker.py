"""Loads the trainer's weights inside vLLM: `--worker-extension-cls
tunesmith.engine.rollout.remote.worker.WeightLoader`.

It is imported by vLLM's own processes, often from another virtual environment, so it imports nothing of Tunesmith, and
torch and vLLM only when it is called.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any


class WeightLoader:
    """Methods that vLLM adds to its worker. `tunesmith_weights` names the weights, "" those that vLLM started with."""

    model_runner: Any
    tunesmith_weights = ""

    def tunesmith_load(self, folder: str, version: str) -> str:
        """Replace the weights by those of the safetensors files in `folder`, and name them `version`; their dtype.

        Raises:
            FileNotFoundError: the folder has no such file, or is not on this machine.
        """
        paths = sorted(Path(folder).glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{folder} has no safetensors file on the machine of vLLM")
        self.tunesmith_weights = ""  # whatever fails below leaves weights without a name
        self.model_runner.reload_weights(weights_iterator=_tensors(paths))
        model = self.model_runner.get_model()
        _repack_output_layer(model)
        self.tunesmith_weights = version
        return str(next(model.parameters()).dtype)

    def tunesmith_version(self) -> str:
        """The name of the weights."""
        return self.tunesmith_weights


def _tensors(paths: list[Path]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


def _repack_output_layer(model: Any) -> None:
    """Pack the output layer's weight again on a CPU.

    vLLM's CPU build computes linear layers from a packed copy. `reload_weights` makes a new one of each layer that it
    loads, but none of an output layer that shares the weight of the token embedding: that one would keep the old
    weights, without any error.
    """
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        from vllm.model_executor.layers.utils import (  # pyright: ignore[reportMissingImports]
            dispatch_cpu_unquantized_gemm,
        )

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
