"""Plans: what fits, what is fastest, what is advised, and how far they are from published steps."""

from dataclasses import replace
from pathlib import Path

import pytest

from tunesmith.base.core.errors import InputError
from tunesmith.observe.planning.calibration import PUBLISHED, calibration_for, published_factor, published_step
from tunesmith.observe.planning.hardware import HARDWARE, read_hardware
from tunesmith.observe.planning.memory import Layout, memory_gb, peak_gb
from tunesmith.observe.planning.planner import USABLE, Planner, layouts
from tunesmith.observe.planning.shape import read_shape
from tunesmith.observe.planning.step_time import Cluster, StepModel
from tunesmith.observe.planning.workload import Workload

H100 = HARDWARE["h100"]
WORK = Workload(True, 64, 8, 256, 1024, 512.0, micro_batch_size=4, has_reference=True)
PLANNER = Planner(read_shape("llama-3-8b"))


def test_the_plan_is_the_fastest_layout_that_fits():
    plan = PLANNER.best(WORK, Cluster(H100, 1, 8))
    steps = {}
    for layout in layouts(PLANNER.shape, plan.cluster, draws=True):
        size_gb = peak_gb(memory_gb(PLANNER.shape, WORK, layout))
        steps[layout] = StepModel(PLANNER.shape, WORK, plan.cluster, layout).step().total_s
        assert size_gb > USABLE * H100.memory_gb or steps[layout] >= plan.time.total_s * (1 - 1e-9)
    assert plan.time.total_s == steps[plan.layout]
    assert len(steps) > 20


def test_layouts_use_all_ranks_and_cut_heads_and_layers_evenly():
    shape = read_shape("qwen2.5-7b")  # 28 heads, 28 layers
    found = list(layouts(shape, Cluster(H100, 2, 8), draws=True))
    assert all(layout.num_ranks == 16 for layout in found)
    assert {layout.tensor for layout in found} == {1, 2, 4}
    assert {layout.pipeline for layout in found} == {1, 2, 4}


def test_what_does_not_fit_is_made_smaller_and_said():
    plan = Planner(read_shape("llama-2-70b")).best(replace(WORK, micro_batch_size=64), Cluster(H100, 8, 8))
    assert plan.work.micro_batch_size < 64
    assert peak_gb(plan.memory) <= USABLE * H100.memory_gb
    with pytest.raises(InputError, match=r"nothing fits: a rank needs at least \d+"):
        Planner(read_shape("llama-3.1-405b")).best(WORK, Cluster(H100, 1, 8))


def test_data_parallel_ranks_hold_whole_weights_and_share_optimizer_states():
    plan = Planner(read_shape("smollm2"), data_parallel=True).best(WORK, Cluster(H100, 1, 8))
    assert plan.layout == Layout(data=8)
    assert plan.memory["update"]["weights"] == pytest.approx(134_515_008 * 2 / 1e9)
    assert plan.memory["update"]["moments"] == pytest.approx(134_515_008 / 1e9)
    with pytest.raises(InputError, match="nothing fits"):
        Planner(read_shape("llama-2-70b"), data_parallel=True).best(WORK, Cluster(H100, 8, 8))


def test_advice_is_ranked_by_the_step_that_it_leads_to():
    plan = PLANNER.best(WORK, Cluster(H100, 2, 8))
    changes = PLANNER.changes(plan)
    assert [c.step_s for c in changes] == sorted(c.step_s for c in changes)
    assert all(c.step_s < plan.time.total_s for c in changes)
    doubled = next(c for c in changes if c.what.startswith("4 nodes"))
    assert doubled.num_accelerators == 32
    assert plan.time.total_s / 2 < doubled.step_s
    assert any("no reference" in c.what for c in changes)
    assert not any(
        "no reference" in c.what for c in PLANNER.changes(replace(plan, work=replace(WORK, has_reference=False)))
    )


def test_a_published_step_is_predicted_from_another_row():
    """Each within 10 %, and the two ratios within 5 %."""
    for other in PUBLISHED:
        factor = published_factor(other)
        steps = {nodes: published_step(nodes, factor).total_s for nodes in PUBLISHED}
        assert steps[other] == pytest.approx(PUBLISHED[other])
        assert steps == pytest.approx(dict(PUBLISHED), rel=0.10)
        assert steps[8] / steps[16] == pytest.approx(1.77, rel=0.05)
        assert steps[8] / steps[32] == pytest.approx(3.13, rel=0.05)
    error = calibration_for("h100").error
    assert error is not None and 0 < error < 0.10
    assert calibration_for("a100").error is None


def test_time_follows_the_work():
    cluster, layout = Cluster(H100, 1, 8), Layout(data=8)
    base = StepModel(PLANNER.shape, WORK, cluster, layout).step().stages
    twice = StepModel(PLANNER.shape, replace(WORK, num_epochs=2), cluster, layout).step().stages
    assert twice["update"] == pytest.approx(2 * base["update"], rel=0.05)
    assert twice["rollout"] == base["rollout"]
    longer = StepModel(PLANNER.shape, replace(WORK, mean_new_tokens=1000.0), cluster, layout).step().stages
    assert longer["rollout"] > base["rollout"]
    bubbles = StepModel(PLANNER.shape, WORK, cluster, Layout(pipeline=8)).pass_s()
    assert bubbles == pytest.approx(StepModel(PLANNER.shape, WORK, cluster, layout).pass_s() * (1 + 7 / 128), rel=1e-6)


def test_a_price_makes_a_cost():
    plan = PLANNER.best(WORK, Cluster(replace(H100, price_per_hour=2.0), 2, 8))
    assert plan.cost_per_step == pytest.approx(16 * 2.0 * plan.time.total_s / 3600)
    assert PLANNER.best(WORK, Cluster(H100, 2, 8)).cost_per_step is None


def test_hardware_is_read_from_a_file(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("base: a100\nmemory_gb: 40\nprice_per_hour: 1.5\n")
    mine = read_hardware(str(tmp_path / "mine.yaml"))
    assert mine == replace(HARDWARE["a100"], name="mine", memory_gb=40.0, price_per_hour=1.5)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("memory: 3", "there is no field memory"),
        ("memory_gb: -1", "memory_gb is -1"),
        ("memory_gb: .inf", "memory_gb is inf"),
        ("matmul_reach: 1.5", "at most 1"),
        ("base: tpu", "base is tpu"),
        ("- 1", "holds no fields"),
    ],
)
def test_a_file_with_wrong_fields_is_refused(text: str, named: str, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(InputError, match=named):
        read_hardware(str(tmp_path / "mine.yaml"))
