"""The optimizer: masters, accumulation, clipping, refusal, state."""

import copy
import gc
import math
import weakref

import pytest
import torch
from oracles import tiny_classifier
from safetensors.torch import load, save

from tunesmith.base.config.sections import OptimizerSection
from tunesmith.base.core.errors import CheckpointError, TrainingError
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.heads import Critic, RewardModel, ScalarHead
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.lora import frozen_copy
from tunesmith.engine.models.optimizer import MasterAdamW, OptimizerState, parameter_groups, schedule_factor
from tunesmith.engine.models.tiny import tiny_model

PLAIN = OptimizerSection(learning_rate=1e-3, max_grad_norm=1e9)


class Weights(torch.nn.Module):
    """A matrix and a vector of one dtype."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = torch.nn.Parameter(torch.randn(6, 5, generator=generator).to(dtype))
        self.vector = torch.nn.Parameter(torch.randn(5, generator=generator).to(dtype))

    def loss(self, step, scale=1.0):
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(step)).to(self.matrix.dtype)
        return ((inputs @ self.matrix + self.vector).float().square().mean()) * scale


def put(optimizer, name, gradient):
    """Make `gradient` (float32) the gradient of a parameter, past its dtype."""
    slot = next(slot for slot in optimizer._slots if slot.name == name)
    if slot.has_master:
        slot._held = gradient
    else:
        slot.parameter.grad = gradient


def snapshot(module, optimizer):
    tensors = [parameter.detach().clone() for parameter in module.parameters()]
    return tensors + [tensor.clone() for tensor in optimizer.state_dict().tensors.values()]


def test_the_trajectory_in_float32_is_that_of_torchs_adamw():
    section = OptimizerSection(
        learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=3, schedule="cosine"
    )
    ours, theirs = Weights(), Weights()
    optimizer = MasterAdamW(ours, section, total_steps=20)
    groups = [{"params": [theirs.matrix], "weight_decay": 0.1}, {"params": [theirs.vector], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, betas=section.betas, eps=section.eps, foreach=False, fused=False)
    for step in range(20):
        ours.loss(step).backward()
        report = optimizer.step()
        for group in plain.param_groups:
            group["lr"] = section.learning_rate * schedule_factor(section, step, 20)
        plain.zero_grad()
        theirs.loss(step).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        plain.step()
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert report.learning_rate == pytest.approx(plain.param_groups[0]["lr"])
    torch.testing.assert_close(ours.matrix, theirs.matrix, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.vector, theirs.vector, atol=1e-6, rtol=1e-5)


def test_a_thousand_updates_of_relative_size_1e_5_are_not_lost_in_bfloat16():
    weights = Weights(torch.bfloat16)
    with torch.no_grad():
        weights.matrix.fill_(1.0)
    # With a constant gradient AdamW moves each weight by the learning rate: 1e-5 of a weight of 1.
    optimizer = MasterAdamW(weights, OptimizerSection(learning_rate=1e-5), total_steps=1000)
    rounded = torch.ones(6, 5, dtype=torch.bfloat16)
    for _ in range(1000):
        weights.matrix.float().sum().backward()
        optimizer.step()
        rounded -= 1e-5
    torch.testing.assert_close(weights.matrix.float(), torch.full((6, 5), 0.99), atol=2e-3, rtol=0)
    master = optimizer.state_dict().tensors["master/matrix"]
    torch.testing.assert_close(master, torch.full((6, 5), 0.99), atol=5e-5, rtol=0)
    assert (rounded == 1.0).all(), "without a master every one of these updates rounds away"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_gradients_accumulated_over_micro_batches_equal_the_gradient_of_the_batch(dtype, tolerance):
    model = tiny_model("llama", dtype=dtype).model
    optimizer = MasterAdamW(model, PLAIN, total_steps=1)
    ids_BS = torch.randint(0, 259, (8, 12), generator=torch.Generator().manual_seed(5))
    lengths_B, prompts_B = torch.tensor([12, 5, 9, 12, 4, 7, 12, 10]), torch.tensor([3, 2, 4, 1, 2, 3, 5, 1])
    num_tokens = (lengths_B - prompts_B).sum()

    def accumulated(size):
        for start in range(0, 8, size):
            rows = slice(start, start + size)
            scores = token_logps(model, ids_BS[rows], lengths_B[rows], prompt_lengths_B=prompts_B[rows])
            (scores.logp_BT.sum() / num_tokens).backward()
        gradients = [slot.gradient.float().flatten() for slot in optimizer._slots]
        optimizer.zero_grad()
        return torch.cat(gradients)

    whole = accumulated(8)
    assert whole.dtype == torch.float32
    for size in (1, 2, 4):
        assert (accumulated(size) - whole).norm() <= tolerance * whole.norm()


def test_small_gradients_are_not_lost_when_summed_in_bfloat16():
    weights, plain = Weights(torch.bfloat16), Weights(torch.bfloat16)
    optimizer = MasterAdamW(weights, PLAIN, total_steps=1)
    for scale in [1.0] + [1e-3] * 1000:
        (weights.vector * scale).sum().backward()
        (plain.vector * scale).sum().backward()
    exact = 1.0 + 1000 * torch.tensor(1e-3, dtype=torch.bfloat16).item()
    slot = next(slot for slot in optimizer._slots if slot.name == "vector")
    torch.testing.assert_close(slot.gradient, torch.full((5,), exact), rtol=1e-5, atol=0)
    assert weights.vector.grad is None
    assert (plain.vector.grad == 1.0).all(), "`.grad` in bfloat16 stays at 1: each addition of 1e-3 rounds away"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(dtype, bad):
    weights = Weights(dtype)
    optimizer = MasterAdamW(weights, PLAIN, total_steps=9)
    weights.loss(0).backward()
    optimizer.step()
    before = snapshot(weights, optimizer)
    version = optimizer.weight_version
    for expected in (1, 2):
        (weights.loss(1) + weights.vector[2] * bad).backward()
        report = optimizer.step()
        assert (report.refused, report.bad_parameter, report.num_refused_in_row) == (True, "vector", expected)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(weights, optimizer), strict=True))
    assert optimizer.weight_version == version
    assert all(slot.gradient is None for slot in optimizer._slots)
    weights.loss(1).backward()
    report = optimizer.step()
    assert (report.refused, report.bad_parameter, report.num_refused_in_row) == (False, None, 0)
    assert (optimizer.weight_version, optimizer.num_refused) == (version + 1, 2)


def test_a_loss_that_is_not_finite_is_refused_though_its_gradient_is_finite():
    module = torch.nn.Linear(2, 1)
    optimizer = MasterAdamW(module, OptimizerSection(), total_steps=3)
    before = module.weight.detach().clone()
    module(torch.ones(1, 2)).sum().backward()
    report = optimizer.step(loss=math.nan)
    assert (report.refused, report.bad_parameter) == (True, "the loss")
    assert torch.equal(module.weight, before)


def test_finite_gradients_whose_squares_overflow_are_clipped_not_refused():
    weights = Weights()
    optimizer = MasterAdamW(weights, PLAIN, total_steps=1)
    (weights.matrix * 1e25).sum().backward()
    report = optimizer.step(1.0)
    assert not report.refused
    assert report.grad_norm == pytest.approx(1e25 * 30**0.5, rel=1e-5)


def test_a_step_without_gradients_and_a_frozen_model_are_errors():
    weights = Weights()
    with pytest.raises(TrainingError, match="call backward"):
        MasterAdamW(weights, PLAIN, total_steps=1).step()
    with pytest.raises(TrainingError, match="nothing to train"):
        MasterAdamW(weights.requires_grad_(False), PLAIN, total_steps=1)


@pytest.mark.parametrize("state", ["float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_run_resumed_from_its_state_goes_on_bit_for_bit(dtype, state):
    section = OptimizerSection(
        learning_rate=1e-2,
        warmup_steps=4,
        schedule="linear",
        weight_decay=0.01,
        state=state,
        loss_scale=512,
        loss_scale_window=3,
    )
    weights = Weights(dtype)
    optimizer = MasterAdamW(weights, section, total_steps=10)

    def advance(module, used, steps):
        for step in steps:
            used.scaled(module.loss(step)).backward()
            used.step()

    advance(weights, optimizer, range(5))
    state = optimizer.state_dict()
    stored, scalars = save(dict(state.tensors)), dict(state.scalars)
    resumed = copy.deepcopy(weights)
    advance(weights, optimizer, range(5, 10))

    other = MasterAdamW(resumed, section, total_steps=10)
    other.load_state_dict(OptimizerState(load(stored), scalars))
    assert (other.num_steps, other.weight_version) == (5, 5)
    assert other.state_dict().scalars == scalars
    advance(resumed, other, range(5, 10))
    assert other.state_dict().scalars == optimizer.state_dict().scalars
    pairs = zip(snapshot(weights, optimizer), snapshot(resumed, other), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_weight_version_moves_on_with_every_load():
    weights = Weights()
    optimizer = MasterAdamW(weights, PLAIN, total_steps=9)
    state = optimizer.state_dict()
    for step in range(3):
        weights.loss(step).backward()
        optimizer.step()
    seen = optimizer.weight_version
    optimizer.load_state_dict(state)
    assert optimizer.weight_version > seen


def test_the_state_of_another_model_is_refused_with_nothing_changed():
    weights, other = Weights(torch.bfloat16), torch.nn.Linear(3, 3)
    source = MasterAdamW(other, PLAIN, total_steps=1)
    other(torch.ones(1, 3)).sum().backward()
    source.step()
    optimizer = MasterAdamW(weights, PLAIN, total_steps=1)
    before = snapshot(weights, optimizer)
    with pytest.raises(CheckpointError, match=r"another model or dtype.*master/matrix"):
        optimizer.load_state_dict(source.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(weights, optimizer), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_torchs_adamw_wrote_is_taken_over(dtype):
    """Checkpoints of releases in which torch's AdamW did the work; one parameter never had a gradient."""
    weights = Weights(dtype)
    weights.idle = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    masters = {name: parameter.detach().float().clone() for name, parameter in weights.named_parameters()}
    leaves = {name: master.requires_grad_() for name, master in masters.items()}
    theirs = torch.optim.AdamW(leaves.values(), lr=1e-3, betas=PLAIN.betas, weight_decay=0.0, fused=True)

    def gradients(step):
        generator = torch.Generator().manual_seed(step)
        return {
            name: torch.randn(weights.get_parameter(name).shape, generator=generator) for name in ("matrix", "vector")
        }

    def their_step(step):
        for name, gradient in gradients(step).items():
            leaves[name].grad = gradient
        theirs.step()

    for step in range(3):
        their_step(step)
    tensors = {f"master/{name}": leaf.detach().clone() for name, leaf in leaves.items() if dtype != torch.float32}
    for name in ("matrix", "vector"):
        moments = theirs.state[leaves[name]]
        for ours, key in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), ("num_updates", "step")):
            tensors[f"{ours}/{name}"] = moments[key].clone()
    with torch.no_grad():
        for name, parameter in weights.named_parameters():
            parameter.copy_(leaves[name])
    optimizer = MasterAdamW(weights, PLAIN, total_steps=9)
    counts = {"num_steps": 3, "weight_version": 3, "num_refused": 0, "num_refused_in_row": 0}
    optimizer.load_state_dict(OptimizerState(tensors, counts))
    for step in range(3, 6):
        their_step(step)
        for name, gradient in gradients(step).items():
            put(optimizer, name, gradient)
        optimizer.step()
    found = {slot.name: slot.master for slot in optimizer._slots}
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name].detach(), leaf.detach(), atol=1e-6, rtol=1e-6)


def test_a_state_of_another_precision_of_moments_is_refused():
    weights = Weights()
    for written, read in (("float32", "int8"), ("int8", "float32")):
        source = MasterAdamW(weights, PLAIN.model_copy(update={"state": written}), total_steps=1)
        weights.loss(0).backward()
        source.step()
        with pytest.raises(CheckpointError, match="exp_avg"):
            MasterAdamW(weights, PLAIN.model_copy(update={"state": read}), total_steps=1).load_state_dict(
                source.state_dict()
            )


def test_the_gradient_of_a_single_pass_is_held_as_it_came():
    weights = Weights(torch.bfloat16)
    optimizer = MasterAdamW(weights, PLAIN, total_steps=1)
    weights.loss(0).backward()
    assert {slot.gradient.dtype for slot in optimizer._slots} == {torch.bfloat16}
    first = [slot.gradient.clone() for slot in optimizer._slots]
    weights.loss(0).backward()
    assert all(torch.equal(slot.gradient, 2 * g.float()) for slot, g in zip(optimizer._slots, first, strict=True))
    assert all(parameter.grad is None for parameter in weights.parameters())


@pytest.mark.parametrize("state", ["float32", "int8"])
def test_the_bytes_of_the_moments_are_known_before_the_first_step(state):
    module = torch.nn.Linear(64, 64)
    optimizer = MasterAdamW(module, PLAIN.model_copy(update={"state": state}), total_steps=1)
    known = optimizer.moment_bytes
    module(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    moments = [t for key, t in optimizer.state_dict().tensors.items() if key.startswith("exp_avg")]
    assert known == pytest.approx(sum(tensor.nbytes for tensor in moments), abs=16)
    assert optimizer.moment_bytes == known


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_training_with_8_bit_moments_converges_as_with_32(choice):
    """A tiny model learns a text by heart; the loss on the way and at the end is that of float32 moments."""
    ids_BS = torch.randint(0, 259, (4, 24), generator=torch.Generator().manual_seed(1))
    lengths_B, prompts_B = torch.full((4,), 24), torch.ones(4, dtype=torch.int64)
    losses = {}
    for state in ("float32", "int8"):
        model = tiny_model("llama").model
        section = OptimizerSection(learning_rate=3e-3, state=state)
        optimizer = MasterAdamW(model, section, total_steps=100, kernels=Kernels(choice))
        losses[state] = []
        for _ in range(60):
            loss = -token_logps(model, ids_BS, lengths_B, prompt_lengths_B=prompts_B).logp_BT.mean()
            loss.backward()
            optimizer.step(loss=loss.item())
            losses[state].append(loss.item())
    assert losses["float32"][-1] < 0.1 * losses["float32"][0]
    for ours, theirs in zip(losses["int8"][::10], losses["float32"][::10], strict=True):
        assert ours == pytest.approx(theirs, rel=0.1, abs=0.05)


def test_groups_give_heads_their_rate_and_spare_vectors_the_decay():
    section = OptimizerSection(learning_rate=1e-5, head_learning_rate=1e-3, weight_decay=0.1)
    modules = [tiny_model("llama").model, ScalarHead(32)]
    by_name = {n: g for g in parameter_groups(modules, section) for n, _ in g.parameters}
    head = by_name["ScalarHead.weight"]
    assert (head.learning_rate, head.weight_decay) == (1e-3, 0.1)
    assert by_name["LlamaForCausalLM.model.norm.weight"].weight_decay == 0.0
    assert by_name["LlamaForCausalLM.model.embed_tokens.weight"].learning_rate == 1e-5
    assert "LlamaForCausalLM.lm_head.weight" not in by_name, "tied weights count once"
    loaded = tiny_classifier("llama")
    rewards = parameter_groups([RewardModel(loaded.model, loaded.tokenizer)], section)
    assert {n for g in rewards if g.learning_rate == 1e-3 for n, _ in g.parameters} == {"model.score.weight"}


def test_two_modules_keep_their_names_apart():
    model = tiny_model("llama").model
    groups = parameter_groups([model, Critic.from_policy(model)], PLAIN)
    names = [name for group in groups for name, _ in group.parameters]
    assert len(set(names)) == len(names)
    assert {"LlamaForCausalLM.model.norm.weight", "Critic.value_head.weight"} <= set(names)


def test_a_copy_made_after_the_optimizer_has_no_part_in_it():
    model = tiny_model("llama", dtype=torch.bfloat16).model
    optimizer = MasterAdamW(model, PLAIN, total_steps=3)
    reference = frozen_copy(model)
    before = [parameter.clone() for parameter in reference.parameters()]
    ids_BS = torch.arange(12).view(2, 6)
    token_logps(model, ids_BS, torch.tensor([6, 6]), prompt_lengths_B=torch.tensor([1, 1])).logp_BT.sum().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, reference.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.close()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_model_and_its_optimizer_are_freed_once_nothing_uses_them():
    """Torch's hooks on parameters are invisible to the garbage collector, so a cycle through one leaks the model."""
    model = tiny_model("llama", dtype=torch.bfloat16).model
    optimizer = MasterAdamW(model, PLAIN, total_steps=1)
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, optimizer
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)
