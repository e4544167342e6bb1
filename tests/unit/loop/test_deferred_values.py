"""Deferred values are read when the step is complete, with the values that they had at the call."""

from __future__ import annotations

import torch

from neuron_accel.backends.base import Backend
from neuron_accel.loop.deferred_values import call_after_step, progress_bar


class Lazy:
    """A lazy device, which collects operations until the step is complete."""

    def __init__(self):
        self.later = []

    def collects(self, tensors):
        return any(t.dim() == 0 for t in tensors)

    def after_step(self, action, *, reads_graph):
        self.later.append(action) if reads_graph or self.later else action()

    def step(self):
        later, self.later = self.later, []
        for action in later:
            action()


class Eager:
    collects, after_step = Backend.collects, Backend.after_step


def test_eager_devices_act_at_once():
    seen = []
    call_after_step({"loss": torch.tensor(2.0, requires_grad=True), "epoch": 1}, Eager(), seen.append)
    (values,) = seen
    assert (values["loss"].item(), values["loss"].requires_grad, values["epoch"]) == (2.0, False, 1)


def test_lazy_devices_act_after_the_step_in_order_and_see_what_was_there():
    device, seen, total = Lazy(), [], torch.tensor(1.0)
    call_after_step("before", device, seen.append)
    call_after_step(total, device, seen.append)
    total += 1
    call_after_step("after", device, seen.append)
    call_after_step("elsewhere", device, seen.append, here=False)
    assert seen == ["before"]
    device.step()
    assert [v if isinstance(v, str) else v.item() for v in seen] == ["before", 1.0, "after"]


def test_progress_bars_take_tensors(capsys):
    device = Lazy()
    bar = progress_bar(device, True, None, {"total": 3})
    bar.set_postfix(loss=torch.tensor(0.25))
    assert "0.25" not in (bar.postfix or "")
    device.step()
    assert bar.postfix == "loss=0.25"
    bar.close()
    hidden = progress_bar(device, False, range(2), {})
    assert list(hidden) == [0, 1]
    assert "0.25" in capsys.readouterr().err
