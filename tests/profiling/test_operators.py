"""Uses of stages and operators, from events whose times are known."""

import pytest

from tunesmith.observe.profiling.chrome import OPERATOR, STAGE, STEP, build
from tunesmith.observe.profiling.operators import OTHER, analyse

MAIN, WORKER, AUTOGRAD = 10, 11, 12
SHIFT = 2**22  # stages have tracks of their own


def event(cat: str, name: str, ts: float, dur: float, thread: int = MAIN, **args: object) -> dict:
    tid = thread + SHIFT if cat in (STAGE, STEP) else thread
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


EVENTS = [
    event(STEP, "step 2", 0, 100),
    event(STAGE, "rollout", 0, 60),
    event(STAGE, "rollout/decode", 10, 20),
    event(OPERATOR, "aten::linear", 12, 10),
    event(OPERATOR, "aten::mm", 14, 6),
    event(STAGE, "length", 20, 30, WORKER),
    event(OPERATOR, "aten::add", 25, 5, WORKER),
    event(OPERATOR, "aten::mm", 40, 10),
    event(STAGE, "update/backward", 60, 30),
    event("cuda_runtime", "cudaLaunchKernel", 62, 1, AUTOGRAD, correlation=7),
    event(OPERATOR, "aten::mm", 64, 20, AUTOGRAD),
    event("cuda_runtime", "cudaLaunchKernel", 70, 1, AUTOGRAD, correlation=8),
    event("kernel", "gemm", 75, 30, 0, correlation=8),
]


def test_time_of_inner_stages_and_operators_is_counted_once():
    uses = analyse(EVENTS, MAIN)
    stages = {stage.stage: stage for stage in uses.stages}
    assert [stage for stage in stages if stage != "length"] == ["rollout", "rollout/decode", "update/backward", OTHER]
    own = {name: round(1e6 * stage.self_s) for name, stage in stages.items()}
    assert own == {"rollout": 40, "rollout/decode": 20, "update/backward": 30, "length": 30, OTHER: 10}
    assert sum(stage.self_s for stage in uses.stages if stage.is_main) == pytest.approx(100e-6)
    assert not stages["length"].is_main
    decode = stages["rollout/decode"]
    assert (decode.dispatches, round(1e6 * decode.operator_s), round(1e6 * decode.gap_s)) == (1, 10, 10)


def test_an_operator_has_the_time_outside_of_those_it_calls():
    uses = {(use.stage, use.operator): use for use in analyse(EVENTS, MAIN).operators}
    linear = uses["rollout/decode", "aten::linear"]
    assert (round(1e6 * linear.total_s), round(1e6 * linear.self_s)) == (10, 4)
    assert round(1e6 * uses["rollout/decode", "aten::mm"].self_s) == 6
    assert round(1e6 * uses["rollout", "aten::mm"].self_s) == 10
    assert uses["length", "aten::add"].calls == 1


def test_a_thread_without_stages_works_for_that_of_the_main_thread():
    uses = analyse(EVENTS, MAIN)
    stage = next(stage for stage in uses.stages if stage.stage == "update/backward")
    operator = next(use for use in uses.operators if use.stage == "update/backward")
    assert (stage.launches, stage.dispatches, stage.operator_s) == (2, 1, 0)  # it covers nothing of the main thread
    assert round(1e6 * stage.gap_s) == 30
    assert (operator.launches, round(1e6 * operator.kernel_s)) == (1, 30)


def test_an_operator_that_calls_itself_counts_its_time_once():
    events = [event(STEP, "step 2", 0, 10), event(OPERATOR, "f", 0, 8), event(OPERATOR, "f", 2, 4)]
    (use,) = analyse(events, MAIN).operators
    assert (use.calls, round(1e6 * use.total_s), round(1e6 * use.self_s)) == (2, 8, 8)


def test_gaps_are_the_times_of_the_main_thread_without_operators_longest_first():
    gaps = analyse(EVENTS, MAIN).gaps
    found = [(gap.stage, round(1e6 * gap.start_s), round(1e6 * gap.duration_s)) for gap in gaps]
    assert found == [("update/backward", 50, 50), ("rollout", 22, 18), ("rollout", 0, 12)]


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match="no step"):
        build({"traceEvents": []}, {"process": 1, "steps": ["step 2"]})
