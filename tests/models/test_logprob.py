"""Log-probs against plain log-softmax of a plain forward pass: values, gradients, padding, dtypes.

Dimension letters: B sequences, T completion positions, S positions of the whole sequence, N rows, V vocabulary.
"""

from functools import partial

import pytest
import torch
from oracles import plain_token_logps

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.kernels.logprob.api import chosen_logp_entropy
from tunesmith.engine.kernels.logprob.torch_impl import chosen_logp_entropy as plain_logp_entropy
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models import logprob
from tunesmith.engine.models.heads import Critic, ScalarHead
from tunesmith.engine.models.language_model import FullForward, LanguageModel
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.tiny import FAMILIES, tiny_model

LENGTHS = torch.tensor([20, 9, 15, 12, 21])
PROMPTS = torch.tensor([3, 2, 15, 4, 1])


def batch(pad_id=2, num_columns=23, seed=0):
    """Five right-padded rows whose real ids hold the padding id too; one completion is empty."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(0, 259, (5, num_columns), generator=generator)
    ids_BS[:, 1::4] = pad_id
    ids_BS[torch.arange(num_columns) >= LENGTHS[:, None]] = pad_id
    return ids_BS


def gradient(model, scores):
    model.zero_grad()
    weight_BT = torch.linspace(-1, 2, scores.logp_BT.numel()).view_as(scores.logp_BT)
    (scores.logp_BT * weight_BT + 0.3 * scores.entropy_BT).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_equal_log_softmax_of_the_full_forward(family, temperature):
    model = tiny_model(family).model
    ours = token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS, temperature=temperature)
    plain = plain_token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS, temperature=temperature)
    torch.testing.assert_close(ours.logp_BT, plain.logp_BT, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.entropy_BT, plain.entropy_BT, atol=1e-5, rtol=1e-5)
    expected = gradient(model, plain)
    torch.testing.assert_close(gradient(model, ours), expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("is_textbook", [False, True])
def test_a_textbook_makes_the_logits_of_all_positions_and_the_same_scores(is_textbook):
    module = tiny_model("llama").model
    model = LanguageModel(module, FullForward(is_textbook=is_textbook), Kernels())
    shapes = []
    hook = module.get_output_embeddings().register_forward_hook(lambda *call: shapes.append(call[2].shape[:-1].numel()))
    ours = token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS)
    hook.remove()
    assert shapes == [5 * 21 if is_textbook else int((LENGTHS - PROMPTS).sum())]
    plain = plain_token_logps(module, batch(), LENGTHS, prompt_lengths_B=PROMPTS, temperature=1.0)
    torch.testing.assert_close(ours.logp_BT, plain.logp_BT, atol=1e-5, rtol=1e-5)
    expected = gradient(module, plain)
    torch.testing.assert_close(gradient(module, ours), expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("backend", [None, FullForward()])
def test_completions_may_all_be_empty(backend):
    model = tiny_model("llama").model
    with torch.no_grad():
        given = model if backend is None else LanguageModel(model, backend, Kernels())
        scores = token_logps(given, batch(), LENGTHS, prompt_lengths_B=LENGTHS)
    assert scores.logp_BT.shape == (5, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(family):
    model = tiny_model(family).model
    narrow = token_logps(model, batch()[:, :21], LENGTHS, prompt_lengths_B=PROMPTS)
    for pad_id, num_columns in ((2, 30), (77, 30)):
        ids_BS = torch.full((5, num_columns), pad_id)
        ids_BS[:, :21] = torch.where(torch.arange(21) < LENGTHS[:, None], batch()[:, :21], pad_id)
        wide = token_logps(model, ids_BS, LENGTHS, prompt_lengths_B=PROMPTS)
        torch.testing.assert_close(wide.logp_BT, narrow.logp_BT, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(wide.entropy_BT, narrow.entropy_BT, atol=1e-5, rtol=1e-5)


def test_padding_columns_are_zero():
    scores = token_logps(
        tiny_model("llama").model, batch(), LENGTHS, prompt_lengths_B=PROMPTS, value_head=ones_head(32)
    )
    padding_BT = torch.arange(20) >= (LENGTHS - PROMPTS)[:, None]
    assert scores.logp_BT.shape == (5, 20)
    for tensor in (scores.logp_BT, scores.entropy_BT, scores.value_BT):
        assert (tensor[padding_BT] == 0).all()
        assert (tensor[~padding_BT] != 0).all()


def test_soft_capping_of_logits_is_honoured():
    capped = tiny_model("gemma2", final_logit_softcapping=2.0).model
    uncapped = tiny_model("gemma2", final_logit_softcapping=None).model
    uncapped.load_state_dict(capped.state_dict())
    first, second = (token_logps(m, batch(), LENGTHS, prompt_lengths_B=PROMPTS) for m in (capped, uncapped))
    assert (first.logp_BT - second.logp_BT).abs().max() > 0.1


def test_only_positions_that_predict_a_completion_token_get_logits():
    model = tiny_model("llama").model
    widths = []
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: widths.append(output.shape))
    token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS)
    handle.remove()
    assert widths == [(1, int((LENGTHS - PROMPTS).sum()), 259)]
    assert not model.lm_head._forward_pre_hooks


def test_chunks_without_gradient_give_the_same_scores(monkeypatch):
    model = tiny_model("qwen2").model
    whole = token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS, value_head=ones_head(32))
    monkeypatch.setattr(logprob, "_LOGITS_BYTES", 2 * 20 * 259 * 4)
    with torch.no_grad():
        assert logprob._rows_per_chunk(model, LENGTHS - PROMPTS) == 2
        parts = token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS, value_head=ones_head(32))
    for name in ("logp_BT", "entropy_BT", "value_BT"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("use_logp", "use_entropy"), [(True, True), (True, False), (False, True)])
def test_the_custom_function_equals_plain_autograd(temperature, use_logp, use_entropy):
    generator = torch.Generator().manual_seed(1)
    base_NV = torch.randn(37, 50, generator=generator) * 4
    ids_N = torch.randint(0, 50, (37,), generator=generator)
    weight_N = torch.randn(37, generator=generator)
    results = []
    for function in (partial(chosen_logp_entropy, kernels=Kernels("torch")), plain_logp_entropy):
        logits_NV = base_NV.clone().requires_grad_()
        logp_N, entropy_N = function(logits_NV, ids_N, temperature)
        loss = (logp_N * weight_N).sum() * use_logp + (entropy_N * weight_N.square()).sum() * use_entropy
        loss.backward()
        results.append((logp_N, entropy_N, logits_NV.grad))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=2e-6, rtol=1e-5)


def test_the_custom_function_leaves_out_what_no_loss_uses():
    logits_NV = torch.randn(5, 9, requires_grad=True)
    logp_N, _ = chosen_logp_entropy(logits_NV, torch.arange(5), 1.0, kernels=Kernels("torch"))
    logp_N.sum().backward()
    expected = torch.nn.functional.one_hot(torch.arange(5), 9) - logits_NV.detach().softmax(-1)
    torch.testing.assert_close(logits_NV.grad, expected)


def test_log_softmax_is_in_float32_for_bfloat16_weights():
    model = tiny_model("llama", dtype=torch.bfloat16).model
    scores = token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS)
    assert scores.logp_BT.dtype == scores.entropy_BT.dtype == torch.float32
    logits_NV = torch.randn(8, 259).bfloat16()
    logp_N, _ = chosen_logp_entropy(logits_NV, torch.arange(8), 1.0, kernels=Kernels("torch"))
    torch.testing.assert_close(logp_N, logits_NV.float().log_softmax(-1)[torch.arange(8), torch.arange(8)])


def ones_head(width):
    head = ScalarHead(width)
    torch.nn.init.ones_(head.weight)
    return head


def test_values_are_those_of_the_state_before_each_token():
    model, head = tiny_model("llama").model, ones_head(32)
    scores = token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS, value_head=head)
    hidden_SH = model.base_model(batch()[:1, :20]).last_hidden_state[0]
    expected_T = head(hidden_SH[2:19])
    torch.testing.assert_close(scores.value_BT[0, :17], expected_T, atol=1e-5, rtol=1e-5)


def test_a_separate_critic_has_the_same_layout_and_storage_of_its_own():
    model = tiny_model("llama").model
    critic = Critic.from_policy(model)
    torch.nn.init.ones_(critic.value_head.weight)
    shared = token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS, value_head=ones_head(32)).value_BT
    separate = critic(batch(), LENGTHS, PROMPTS)
    torch.testing.assert_close(separate, shared, atol=1e-5, rtol=1e-5)
    assert not {p.data_ptr() for p in critic.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert all(p.requires_grad for p in critic.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0"),
        ({"prompt_lengths_B": torch.tensor([3, 0, 15, 4, 1])}, "empty prompt"),
        ({"prompt_lengths_B": torch.tensor([3, 10, 15, 4, 1])}, "lengths do not fit"),
    ],
)
def test_impossible_requests_are_refused(change, message):
    arguments = {"prompt_lengths_B": PROMPTS, **change}
    with pytest.raises(ModelError, match=message):
        token_logps(tiny_model("llama").model, batch(), LENGTHS, **arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_gives_the_same_gradient(family):
    model = tiny_model(family).model
    expected = gradient(model, token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    assert model.is_gradient_checkpointing
    again = gradient(model, token_logps(model, batch(), LENGTHS, prompt_lengths_B=PROMPTS))
    torch.testing.assert_close(again, expected, atol=1e-6, rtol=1e-5)
