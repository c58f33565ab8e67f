import importlib
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import grad
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.logprob.head import OutputLayer
from tunesmith.learn.algorithms.divergence import Divergence, Predictions, divergence_loss
from tunesmith.learn.algorithms.sums import merged

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
ROWS, SIZE = 11, 37
SMALL = 3 * SIZE * 8 * 2
"""Bytes that the logits of 3 rows of two models take in float64: blocks of 2 and 3 rows for 11."""


def model(seed, width=6, size=SIZE, softcap=None, bias=False, dtype=torch.float64, weight=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden_NH = torch.randn(ROWS, width, generator=generator, dtype=torch.float64).to(dtype)
    weight_VH = torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype)
    bias_V = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) if bias else None
    return Predictions(hidden_NH, OutputLayer(weight_VH, bias_V, softcap), weight)


def student(seed=1, **options):
    """A model whose tensors take gradients, and these."""
    made = model(seed, **options)
    leaves = [made.hidden_NH, made.layer.weight_VH, made.layer.bias_V]
    return made, [leaf.requires_grad_() for leaf in leaves if leaf is not None]


def rows_of(predictions, chosen_N):
    """Some rows of a model's predictions."""
    return Predictions(predictions.hidden_NH[chosen_N], predictions.layer, predictions.weight)


def log_probs(predictions, temperature, size=SIZE):
    """Log-probs of all rows at once."""
    layer = predictions.layer
    logits_NV = linear(predictions.hidden_NH, layer.weight_VH, layer.bias_V)[:, :size]
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if layer.softcap is not None:
        logits_NV = layer.softcap * torch.tanh(logits_NV / layer.softcap)
    return (logits_NV / temperature).log_softmax(-1)


def kl(p_NV, q_NV):
    return (p_NV * (p_NV / q_NV).log()).sum(-1)


def twin(learner, teachers, beta, temperature=1.0, size=SIZE):
    """Divergence of each row from its definition, through probabilities, with plain autograd."""
    p_NV = log_probs(learner, temperature, size).exp()
    weights, summed_N = sum(one.weight for one in teachers), 0.0
    for one in teachers:
        q_NV = log_probs(one, temperature, size).exp().detach()
        mixture_NV = beta * q_NV + (1 - beta) * p_NV
        if beta in (0.0, 1.0):
            divergence_N = kl(p_NV, q_NV) if beta else kl(q_NV, p_NV)
        else:
            divergence_N = beta * kl(q_NV, mixture_NV) + (1 - beta) * kl(p_NV, mixture_NV)
        summed_N = summed_N + one.weight / weights * divergence_N
    return summed_N


def assert_same(ours, theirs, leaves, **close):
    torch.testing.assert_close(ours, theirs, **close)
    for mine, other in zip(grad(ours, leaves), grad(theirs, leaves), strict=True):
        torch.testing.assert_close(mine, other, **close)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("chunk_bytes", [1, SMALL, 2**20], ids=["two rows", "uneven blocks", "one block"])
def test_loss_and_gradients_are_those_of_all_logits_at_once(beta, chunk_bytes):
    learner, leaves = student(softcap=3.0, bias=True)
    teachers = [model(2, width=9, softcap=5.0)]
    ours, stats = divergence_loss(learner, teachers, Divergence(beta, 1.7), num_tokens=40, chunk_bytes=chunk_bytes)
    expected_N = twin(learner, teachers, beta, 1.7)
    assert_same(ours, expected_N.sum() / 40, leaves, atol=1e-12, rtol=1e-10)
    assert stats.metrics()["loss"] == pytest.approx(expected_N.mean().item(), rel=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_several_teachers_count_by_their_weights(beta):
    learner, leaves = student()
    teachers = [model(2, weight=3.0), model(3, width=4, weight=0.5), model(4, bias=True, weight=2.0)]
    ours, stats = divergence_loss(learner, teachers, Divergence(beta), num_tokens=ROWS, chunk_bytes=SMALL)
    assert_same(ours, twin(learner, teachers, beta).mean(), leaves, atol=1e-12, rtol=1e-10)
    singles = [divergence_loss(learner, [one], Divergence(beta), num_tokens=ROWS)[1].metrics() for one in teachers]
    for name in ("loss", "teacher_agreement"):
        mean = sum(one.weight / 5.5 * single[name] for one, single in zip(teachers, singles, strict=True))
        assert stats.metrics()[name] == pytest.approx(mean)


def test_the_forward_kl_of_teachers_has_the_gradient_of_that_to_their_mixture():
    learner, leaves = student()
    teachers = [model(2, weight=3.0), model(3, weight=1.0)]
    ours, _ = divergence_loss(learner, teachers, Divergence(beta=0.0), num_tokens=1)
    mixture_NV = 0.75 * log_probs(teachers[0], 1.0).exp() + 0.25 * log_probs(teachers[1], 1.0).exp()
    expected = kl(mixture_NV, log_probs(learner, 1.0).exp()).sum()
    for mine, other in zip(grad(ours, leaves), grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, other)


def test_micro_batches_add_up_and_a_part_without_tokens_gives_zeros():
    learner, leaves = student(bias=True)
    teacher, divergence = model(2), Divergence(0.3)
    whole, stats = divergence_loss(learner, [teacher], divergence, num_tokens=ROWS)
    losses, records = [], []
    for part in (slice(4), slice(4, None), slice(0)):
        models = rows_of(learner, part), [rows_of(teacher, part)]
        loss, record = divergence_loss(*models, divergence, num_tokens=ROWS)
        losses.append(loss)
        records.append(record)
    assert_same(sum(losses[:2]), whole, leaves)
    assert merged(records).floats() == pytest.approx(stats.floats())
    assert records[-1].metrics() == {}
    assert losses[-1].item() == 0
    assert not any(one.any() for one in grad(losses[-1], leaves))


@pytest.mark.parametrize("beta", BETAS)
def test_equal_distributions_have_no_divergence_and_no_gradient(beta):
    learner, leaves = student(softcap=4.0)
    teacher = Predictions(learner.hidden_NH, learner.layer)
    loss, stats = divergence_loss(learner, [teacher], Divergence(beta), num_tokens=1)
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    assert all(one.abs().max() < 1e-12 for one in grad(loss, leaves))
    assert stats.metrics()["teacher_agreement"] == 1


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_logits_may_take_the_place_of_layers(beta):
    learner, leaves = student()
    teacher = model(2)
    logits_NV = linear(learner.hidden_NH, learner.layer.weight_VH)
    by_logits = Predictions(linear(teacher.hidden_NH, teacher.layer.weight_VH), None)
    empty = [Predictions(by_logits.hidden_NH[:0], None)]
    assert divergence_loss(Predictions(logits_NV[:0], None), empty, Divergence(beta), num_tokens=3)[0] == 0
    ours, _ = divergence_loss(
        Predictions(logits_NV, None), [by_logits], Divergence(beta), num_tokens=3, chunk_bytes=SMALL
    )
    assert_same(ours, twin(learner, [teacher], beta).sum() / 3, leaves, atol=1e-12, rtol=1e-10)


def test_layers_padded_to_different_sizes_are_cut_to_the_smallest():
    learner, leaves = student(size=SIZE + 5, bias=True)
    teachers = [model(2, size=SIZE), model(3, size=SIZE + 9)]
    ours, _ = divergence_loss(learner, teachers, Divergence(0.5), num_tokens=1, vocabulary=SIZE - 1, chunk_bytes=SMALL)
    assert_same(ours, twin(learner, teachers, 0.5).sum(), leaves, atol=1e-12, rtol=1e-10)
    for vocabulary in (None, SIZE + 1):
        with pytest.raises(InputError, match=r"\[42, 37, 46\] logits"):
            divergence_loss(learner, teachers, Divergence(0.5), num_tokens=1, vocabulary=vocabulary)


@pytest.mark.parametrize("beta", BETAS)
def test_16_bit_weights_have_their_softmax_in_float32_and_one_sum_of_the_weights_gradient(beta):
    learner, leaves = student(dtype=torch.bfloat16, width=32)
    teachers = [model(2, dtype=torch.bfloat16, width=16)]
    loss, _ = divergence_loss(learner, teachers, Divergence(beta), num_tokens=ROWS, chunk_bytes=1)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, twin(learner, teachers, beta).mean(), atol=0, rtol=1e-4)
    for mine, other, leaf in zip(
        grad(loss, leaves), grad(twin(learner, teachers, beta).mean(), leaves), leaves, strict=True
    ):
        assert mine.dtype == leaf.dtype
        assert (mine.float() - other.float()).norm() < 0.01 * other.float().norm()


def test_under_autocast_logits_come_in_its_dtype_and_gradients_in_those_of_the_leaves():
    learner, leaves = student(dtype=torch.float32, width=32)
    teachers = [model(2, dtype=torch.float32)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = divergence_loss(learner, teachers, Divergence(0.5), num_tokens=ROWS)
    low = [
        Predictions(one.hidden_NH.bfloat16(), OutputLayer(one.layer.weight_VH.bfloat16()))
        for one in (learner, *teachers)
    ]
    expected, _ = divergence_loss(low[0], low[1:], Divergence(0.5), num_tokens=ROWS)
    torch.testing.assert_close(loss, expected, atol=0, rtol=0)
    assert [one.dtype for one in grad(loss, leaves)] == [torch.float32] * 2


def test_only_what_needs_a_gradient_gets_one():
    learner, (hidden_NH, weight_VH) = student()
    teachers = [student(2)[0]]
    weight_VH.requires_grad_(False)
    loss, _ = divergence_loss(learner, teachers, Divergence(), num_tokens=1)
    loss.backward()
    assert hidden_NH.grad is not None and weight_VH.grad is None
    assert teachers[0].hidden_NH.grad is None and teachers[0].layer.weight_VH.grad is None
    with torch.no_grad():
        assert not divergence_loss(learner, teachers, Divergence(), num_tokens=1)[0].requires_grad


def test_a_second_backward_pass_is_refused():
    learner, _ = student()
    loss, _ = divergence_loss(learner, [model(2)], Divergence(), num_tokens=1)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


class Largest(TorchDispatchMode):
    """Largest number of rows of any tensor that has a column for each token of the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor) and one.dim() == 2 and one.shape[1] == SIZE:
                self.rows = max(self.rows, len(one))
        return result


@pytest.mark.parametrize("needs_weight", [True, False])
def test_logits_of_more_rows_than_a_block_never_exist(needs_weight):
    learner, (_, weight_VH) = student(width=2)  # narrower than a block, as a weight's transpose has V columns too
    teacher = model(2, width=2)
    weight_VH.requires_grad_(needs_weight)
    saved = []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss, _ = divergence_loss(learner, [teacher], Divergence(0.5), num_tokens=1, chunk_bytes=SMALL)
        loss.backward()
    assert largest.rows == 3
    assert not any(SIZE in one.shape[1:] for one in saved)
    with Largest() as largest:
        divergence_loss(learner, [teacher], Divergence(0.5), num_tokens=1)
    assert largest.rows == ROWS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 0}, "num_tokens"),
        ({"teachers": [Predictions(torch.randn(ROWS + 1, 6), model(2).layer)]}, "as many rows as of the student"),
        ({"teachers": [Predictions(torch.randn(ROWS, 5), model(2).layer)]}, r"their output layer \(37, 6\)"),
        ({"teachers": [model(2, size=SIZE + 1)]}, "student's tokenizer"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    given = {"student": model(1), "teachers": [model(2)], "divergence": Divergence(), "num_tokens": 1, **options}
    with pytest.raises(InputError, match=message):
        divergence_loss(**given)


def predictions_of(weights):
    """TRL's view of a model: its hidden states and its output layer."""
    layer = weights.layer
    head = SimpleNamespace(weight=layer.weight_VH, bias=layer.bias_V)
    config = SimpleNamespace(final_logit_softcapping=layer.softcap)
    return SimpleNamespace(
        hidden=weights.hidden_NH[None],
        get_output_embeddings=lambda: head,
        config=SimpleNamespace(get_text_config=lambda: config),
        eval=lambda: None,
    )


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_gradients_equal_the_distillation_trainer(trl, beta, temperature):
    learner, leaves = student(dtype=torch.float32, softcap=4.0, bias=True)
    teacher = model(2, width=9, dtype=torch.float32)
    mask_N = torch.arange(ROWS) < 8
    state = SimpleNamespace(
        _forward_redirection=lambda _, unwrapped, call, *args, **named: call(*args, **named),
        _get_last_hidden_state=lambda unwrapped, *_, **__: unwrapped.hidden,
        accelerator=SimpleNamespace(unwrap_model=lambda one: one),
        beta=beta,
        teacher_model=predictions_of(teacher),
        temperature=temperature,
    )
    ids_1N = torch.ones(1, ROWS, dtype=torch.long)
    inputs = {
        "prompt_ids": ids_1N[:, :1],
        "prompt_mask": ids_1N[:, :1],
        "completion_ids": ids_1N,
        "completion_mask": mask_N[None].long(),
    }
    theirs, entropy, num_tokens = trl.DistillationTrainer._compute_loss(state, predictions_of(learner), inputs, 23)
    ours, stats = divergence_loss(
        rows_of(learner, mask_N),
        [rows_of(teacher, mask_N)],
        Divergence(beta, temperature),
        num_tokens=23,
        chunk_bytes=SMALL,
    )
    assert_same(ours, theirs, leaves, atol=1e-6, rtol=1e-5)
    assert stats.floats() == pytest.approx(
        {**stats.floats(), "tokens": num_tokens.item(), "entropy": entropy.item()}, rel=1e-5
    )


@pytest.mark.parametrize("beta", BETAS)
def test_loss_and_gradients_equal_the_gkd_trainer(trl, beta):
    gkd = importlib.import_module("trl.experimental.gkd").GKDTrainer
    learner, leaves = student()
    teacher = model(2)
    mask_N = torch.arange(ROWS) % 4 != 0
    logits = [linear(one.hidden_NH, one.layer.weight_VH)[None] for one in (learner, teacher)]
    labels = torch.where(mask_N, 0, -100)[None]
    theirs = gkd.generalized_jsd_loss(*logits, labels, beta=beta, temperature=1.3, num_items_in_batch=17)
    models = rows_of(learner, mask_N), [rows_of(teacher, mask_N)]
    ours, _ = divergence_loss(*models, Divergence(beta, 1.3), num_tokens=17)
    assert_same(ours, theirs, leaves, atol=1e-8, rtol=1e-7)
