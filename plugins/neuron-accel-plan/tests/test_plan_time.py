"""The time of a step: by hand for small traces, and that what a dry run records is what a rank does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from neuron_accel_plan.calibration import Constant, Level, Machine, interpolate, machine_of
from neuron_accel_plan.step import StepCount
from neuron_accel_plan.time import collective_seconds, kernel_seconds, predict_time
from neuron_accel_plan.trace import Event, Kernel, Message, Trace, Work, kind_of

from neuron_accel import find_instance
from neuron_accel.errors import ConfigurationError, UsageError


def constant(value: float) -> Constant:
    return Constant.of(value, "calibrated (a test)", best=1.0, worst=1.0)


def machine(**changes) -> Machine:
    """100 operations and 10 bytes per second, one second for a kernel, collectives of 8 seconds."""
    plain = Machine(
        name="test",
        kernels={"product": {"": constant(100.0)}, "element-wise": {"": constant(10.0)}},
        fixed={"": constant(1.0), "backward": constant(0.5)},
        fuses=False,
        overlap=constant(1.0),
        collectives={"all_reduce": {2: Constant(points=((1000.0, 8.0),), source="calibrated (a test)")}},
    )
    return replace(plain, **changes)


PRODUCT = Kernel("product", "float32", operations=1000, moved=20)  # 10 seconds
SUM = Kernel("element-wise", "float32", operations=0, moved=30)  # 3 seconds
MESSAGE = Message("all_reduce", "dp", (0, 1), 100, "float32")


def counted(*events, messages=(MESSAGE,), factor=1.0) -> StepCount:
    return StepCount(peaks=(), flows=(), operations=0, weights=0, traces=((factor, Trace(events, messages)),))


def work(*kernels, phase="forward", fused=0) -> Work:
    return Work(phase, tuple((kernel, 1) for kernel in kernels), fused)


def test_a_kernel_takes_the_longer_of_its_operations_and_its_bytes():
    assert kernel_seconds(machine(), PRODUCT) == pytest.approx(10)
    assert kernel_seconds(machine(), replace(PRODUCT, moved=200)) == pytest.approx(20)
    assert kernel_seconds(machine(), SUM) == pytest.approx(3)


def test_a_step_is_its_kernels_and_what_it_waits_for():
    start, wait = Event("start", 0), Event("wait", 0)
    hidden = predict_time(counted(start, work(PRODUCT), wait), machine())
    assert hidden.seconds == pytest.approx(11)
    assert hidden.parts == pytest.approx({"fixed cost of kernels": 1, "matrix products": 10})
    short = predict_time(counted(start, work(SUM, phase="backward"), wait), machine())
    assert short.parts == pytest.approx(
        {"fixed cost of kernels": 0.5, "other kernels": 3, "exposed communication, dp": 4.5}
    )
    assert short.seconds == short.low == short.high == pytest.approx(8)
    assert [(span.lane, span.start, span.end) for span in short.spans] == [
        ("communication", 0, 8),
        ("compute", 0, 3.5),
    ]
    half = predict_time(counted(start, work(PRODUCT), wait), machine(overlap=constant(0.5)))
    assert half.seconds == pytest.approx(11 + 4)
    second = [start, Event("start", 1), Event("wait", 1), wait]  # one after another
    assert predict_time(counted(*second, messages=(MESSAGE, MESSAGE)), machine()).seconds == pytest.approx(16)
    update = work(SUM, phase="optimizer step")
    stage = predict_time(counted(work(PRODUCT), update), machine(), bubble=0.2)
    assert (stage.seconds, stage.parts["bubble"]) == pytest.approx((11 / 0.8 + 4, 11 / 4))


def test_kernels_of_a_phase_take_longer_in_training_than_alone():
    slower = machine(in_training={"backward": constant(2.0)})
    both = predict_time(counted(work(PRODUCT), work(SUM, phase="backward")), slower)
    assert both.parts == pytest.approx({"fixed cost of kernels": 1.5, "matrix products": 10, "other kernels": 6})
    assert slower.sources()["kernels in training, backward"] == "calibrated (a test)"


def test_fused_kernels_move_their_bytes_once():
    fusing = machine(fuses=True, fixed={"": constant(0.0)})
    assert predict_time(counted(work(SUM, SUM, PRODUCT, fused=40)), fusing).seconds == pytest.approx(14)


def test_constants_bound_the_interval_and_depths_are_extrapolated():
    loose = Constant.of(100.0, "assumed (a test)", best=2.0, worst=0.5)
    bounded = machine(kernels={"product": {"": loose}, "element-wise": {"": constant(10.0)}}, fixed={"": constant(0.0)})
    predicted = predict_time(counted(work(PRODUCT), factor=3.0), bounded)
    assert (predicted.low, predicted.seconds, predicted.high) == pytest.approx((15, 30, 60))
    assert predicted.sources["product kernels"] == "assumed (a test)"


def test_constants_are_linear_between_points_on_logarithmic_scales():
    points = [(1.0, 10.0), (100.0, 1000.0)]
    assert [interpolate(points, size) for size in (0.5, 1, 10, 100, 1e6)] == pytest.approx([10, 10, 100, 1000, 1000])


def test_measured_collectives_grow_with_bytes_and_ranks():
    times = Constant(points=((100.0, 1.0), (1000.0, 10.0)), source="calibrated (a test)")
    measured = machine(collectives={"all_reduce": {2: times}})
    assert collective_seconds(measured, replace(MESSAGE, sent=4000)) == pytest.approx(40)
    assert collective_seconds(measured, replace(MESSAGE, sent=1)) == pytest.approx(1)
    assert collective_seconds(measured, replace(MESSAGE, sent=1, ranks=(0, 1, 2, 3))) == pytest.approx(3)


def test_the_slowest_level_of_the_network_decides():
    levels = (
        Level(name="memory", ranks=1, bandwidth=constant(1000.0), latency=constant(0.0)),
        Level(name="links", ranks=2, bandwidth=constant(100.0), latency=constant(0.1)),
        Level(name="network", ranks=8, bandwidth=constant(20.0), latency=constant(1.0)),
    )
    wired = machine(collectives={}, levels=levels)
    for ranks, expected in (
        ((0, 1), 0.1),  # on a chip
        (tuple(range(8)), 1.0 + 2 * 3 * 0.1),  # one ring through four chips
        ((0, 2, 4, 6), 2.0 + 2 * 3 * 0.1),  # that another one shares the links with
        ((0, 8), 8 * 5 + 2 * 1.0),  # eight rings out of each machine
        (tuple(range(32)), 5.0 + 2 * 3 * 0.1 + 2 * 2 * 1.0),  # one ring through four machines
    ):
        assert collective_seconds(wired, replace(MESSAGE, ranks=ranks)) == pytest.approx(expected), ranks


@pytest.mark.parametrize(
    "name",
    [
        *("trn1.2xlarge", "trn1.32xlarge", "trn1n.32xlarge", "trn2.3xlarge", "trn2.48xlarge", "trn2u.48xlarge"),
        *("trn2u-ultraserver", "trn3.48xlarge", "trn3-gen1-ultraserver", "trn3-gen2-ultraserver"),
    ],
)
def test_every_instance_has_constants_with_a_source(name):
    found = machine_of(find_instance(name))
    for what, source in found.sources().items():
        assert source.startswith(("public (", "assumed (")), (what, source)
    predicted = predict_time(counted(work(replace(PRODUCT, dtype="bfloat16"))), name)
    assert 0 < predicted.low < predicted.seconds < predicted.high


def test_kinds_of_operations():
    for names, kind in (
        ("mm addmm convolution linear", "product"),
        ("bmm baddbmm _grouped_mm", "batched product"),
        ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("add mul_ copy_ where clone cat", "element-wise"),
        ("_softmax silu silu_backward pow rsqrt div addcdiv_ sqrt cos", "special functions"),
        ("sum mean amax linalg_vector_norm", "reduction"),
        ("embedding embedding_dense_backward index_put_ gather nll_loss_forward", "indexed"),
    ):
        for name in names.split():
            assert kind_of(name) == kind, name


def test_what_cannot_be_predicted_is_refused():
    with pytest.raises(UsageError, match="counted on a real rank"):
        predict_time(StepCount(peaks=(), flows=(), operations=0, weights=0), machine())
    with pytest.raises(ConfigurationError, match="trn1"):
        predict_time(counted(work(SUM)), "trn1.31xlarge")


def test_a_dry_run_records_what_a_rank_does_in_order():
    from neuron_accel_plan import plan
    from transformers import LlamaConfig

    from neuron_accel import TensorParallelPlugin, Zero1Plugin

    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    llama = LlamaConfig(num_hidden_layers=2, vocab_size=256, max_position_embeddings=128, **size)
    step = plan(
        llama,
        world_size=4,
        global_batch=4,
        sequence=32,
        dtype="float32",
        plugins=[TensorParallelPlugin(tensor_parallel_size=2), Zero1Plugin()],
    ).step
    ((factor, trace),) = step.traces
    works = [event for event in trace.events if isinstance(event, Work)]
    assert factor == 1
    assert sum(number * kernel.operations for each in works for kernel, number in each.kernels) == step.operations
    events = [event for event in trace.events if isinstance(event, Event)]
    assert sorted(event.message for event in events if event.what == "start") == list(range(len(trace.messages)))
    assert all(
        Event("start", event.message) in events[: events.index(event)] for event in events if event.what == "wait"
    )
    assert {(message.axis, message.ranks) for message in trace.messages} >= {("tp", (0, 1)), ("dp", (0, 2))}
    # AdamW reads and writes masters and two states of float32, and reads gradients: 7 passes of this rank's half.
    update = sum(each.fused for each in works if each.phase == "optimizer step")
    assert update == pytest.approx(7 * step.weights / 2, rel=0.15)
    moved = sum(number * kernel.moved for each in works for kernel, number in each.kernels)
    assert update < sum(each.fused for each in works) < moved
