"""The roofline of drawing and learning: what a model must read and compute, whatever does it.

    prefill: 2 W_trunk B P + 2 W_head B + 2 L X B P^2 operations, and every weight read once
    decoding step t: 2 (W_trunk + W_head) B + 4 L X B (P + t) operations; every weight read once, and B (P + t) tokens
        of keys and values read, B written
    update: 6 W_trunk N + 6 W_head M operations

W numbers of weights, B sequences, P tokens of a prompt, L layers, X numbers of a token's queries; N tokens of all rows,
M tokens that are scored. A part takes the longer of its bytes at the bandwidth of a copy and its operations at the rate
of a matrix product, both measured in the same run; the steps of decoding count as one part.
"""

from benchmarks.gpu_records import Floor
from benchmarks.roofline import linear_weights
from tunesmith.models.loaded import PreTrainedModel


def generation_floors(
    model: PreTrainedModel, num_sequences: int, num_prompt_tokens: int, num_new_tokens: int
) -> tuple[Floor, Floor]:
    """(prefill, decoding) of `num_sequences` completions. The first token of each comes from the prefill."""
    config = model.config.get_text_config()
    trunk, head = _weights(model)
    element = model.dtype.itemsize
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries = config.num_hidden_layers * config.num_attention_heads * head_dim
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * element
    rows, prompt, steps = num_sequences, num_prompt_tokens, num_new_tokens - 1
    context = sum(prompt + step for step in range(1, steps + 1))  # tokens that a sequence sees in all of its steps
    prefill = Floor(
        element * (trunk + head) + rows * prompt * token_bytes,
        2 * trunk * rows * prompt + 2 * head * rows + 2 * queries * rows * prompt**2,
    )
    decoding = Floor(
        steps * element * (trunk + head) + rows * (context + steps) * token_bytes,
        2 * (trunk + head) * rows * steps + 4 * queries * rows * context,
    )
    return prefill, decoding


def update_floor(model: PreTrainedModel, num_tokens: int, num_scored: int) -> Floor:
    """Forward and backward pass over `num_tokens`, of which `num_scored` go through the output layer."""
    trunk, head = _weights(model)
    return Floor(3 * model.dtype.itemsize * (trunk + head), 6 * trunk * num_tokens + 6 * head * num_scored)


def _weights(model: PreTrainedModel) -> tuple[int, int]:
    """Numbers of the linear layers' weights, and of the output layer's."""
    trunk, head = linear_weights(model)
    return sum(weight_OI.numel() for weight_OI in trunk), head.numel()
