"""Plugins with one fault each, which ranks import from this module."""

from __future__ import annotations

import atexit
import copy
import itertools
import os
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuron_accel.contract import (
    API_VERSION,
    BufferBroadcast,
    Claim,
    GradientPart,
    GradientReducer,
    Gradients,
    Phase,
    PluginSpec,
    StrategyPlugin,
)
from neuron_accel.errors import PlanError
from neuron_accel.testing import Trace


def spec(name: str, **more: Any) -> PluginSpec:
    return PluginSpec(**{"name": name, "api_version": API_VERSION, "phase": Phase.MEMORY, **more})


# ---- form ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ByPosition(StrategyPlugin):
    spec = spec("by_position")
    width: int = 1


@dataclass(frozen=True, kw_only=True)
class Misspelt(StrategyPlugin):
    spec = spec("misspelt")

    def transform_optimiser(self, optimizer, run):
        return optimizer


@dataclass(frozen=True, kw_only=True)
class TooFewArguments(StrategyPlugin):
    spec = spec("too_few_arguments")

    def step(self, optimizer):
        pass


@dataclass(frozen=True, kw_only=True)
class UnclaimedDuty(StrategyPlugin):
    spec = spec("unclaimed_duty")

    def gradients(self, run):
        return Gradients(run)


@dataclass(frozen=True, kw_only=True)
class OtherVersion(StrategyPlugin):
    spec = spec("other_version", api_version=99)


# ---- configuration and plans -----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Doubles(StrategyPlugin):
    spec = spec("doubles")
    width: int = 1

    def __post_init__(self):
        object.__setattr__(self, "width", self.width * 2)


@dataclass(frozen=True, kw_only=True)
class TakesAnything(StrategyPlugin):
    spec = spec("takes_anything")
    width: Any = 1


@dataclass(frozen=True, kw_only=True)
class LooksAtItsRank(StrategyPlugin):
    spec = spec("looks_at_its_rank")

    def companions(self):
        return (Healthy(width=int(os.environ.get("RANK", "0")) + 1),)


COUNTER = itertools.count()


@dataclass(frozen=True, kw_only=True)
class CountsPlans(StrategyPlugin):
    spec = spec("counts_plans")

    def companions(self):
        return (Healthy(width=next(COUNTER)),)


@dataclass(frozen=True, kw_only=True)
class SetsVariables(StrategyPlugin):
    spec = spec("sets_variables")

    def validate(self, context):
        os.environ["SET_BY_A_PLUGIN_WHILE_PLANNING"] = "yes"


@dataclass(frozen=True, kw_only=True)
class RefusesZero1(StrategyPlugin):
    spec = spec("refuses_zero1", conflicts=frozenset({"zero1"}))


@dataclass(frozen=True, kw_only=True)
class RefusesAlways(StrategyPlugin):
    spec = spec("refuses_always")

    def validate(self, context):
        raise PlanError("This cannot run.", fix="leave it out")


@dataclass(frozen=True, kw_only=True)
class RefusesWithoutAdvice(StrategyPlugin):
    spec = spec("refuses_without_advice")

    def validate(self, context):
        if "zero1" in context.plugins:
            raise PlanError("This does not go together with zero1.")


# ---- training --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class HalvesGradients(StrategyPlugin):
    spec = spec("halves_gradients")

    def backward_pass(self, loss, run):
        yield loss / 2


@dataclass(frozen=True, kw_only=True)
class DividesTwice(StrategyPlugin):
    """Divides gradients by the number of micro-batches, as the accelerator has done already."""

    spec = spec("divides_twice")

    def backward_pass(self, loss, run):
        yield loss * run.backward_scale()


@dataclass(frozen=True, kw_only=True)
class Unfreezes(StrategyPlugin):
    spec = spec("unfreezes")

    def transform_model(self, model, run):
        model.module = model.module.requires_grad_(True)


@dataclass(frozen=True, kw_only=True)
class Decays(StrategyPlugin):
    """Changes frozen parameters by less than any tolerance."""

    spec = spec("decays")

    def transform_model(self, model, run):
        with torch.no_grad():
            for parameter in model.module.parameters():
                if not parameter.requires_grad:
                    parameter.mul_(1 - 1e-6)


@dataclass(frozen=True, kw_only=True)
class Unties(StrategyPlugin):
    spec = spec("unties")

    def transform_model(self, model, run):
        model.module.lm_head.weight = nn.Parameter(model.module.lm_head.weight.detach().clone())


@dataclass(frozen=True, kw_only=True)
class PairsNeighbours(StrategyPlugin):
    """Treats the next rank as a data-parallel rank, which is wrong with tensor parallelism."""

    spec = spec("pairs_neighbours")

    def step(self, optimizer, run):
        if run.data_parallel_size == 1:
            return
        pairs = run.state(self).get("pairs")
        if pairs is None:
            ranks = range(run.world.size)
            pairs = run.state(self)["pairs"] = run.backend.new_group([[r, r + 1] for r in ranks[::2]], "pairs")
        for record in run.models[0].parameters:
            gradient = record.current.grad
            if gradient is None:
                continue
            gradient.copy_(run.backend.all_reduce(gradient.clone(), pairs) / 2)
        yield


class LocalGradients(Gradients):
    """Of this rank."""

    def clip_norm(self, parameters, max_norm, norm_type=2.0):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


@dataclass(frozen=True, kw_only=True)
class LocalSteps(StrategyPlugin):
    """Ranks step by themselves and average their weights after every second step (local SGD)."""

    spec = spec("local_steps", claims=frozenset({Claim.GRADIENT_REDUCTION}))
    every: int = 2

    def gradients(self, run):
        return LocalGradients(run)

    def step(self, optimizer, run):
        yield
        state, group = run.state(self), run.group(*run.mesh.data_axes)
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] % self.every == 0:
            with torch.no_grad():
                for record in run.models[0].parameters:
                    mean = run.backend.all_reduce(record.current.detach().clone(), group) / group.size
                    record.current.copy_(mean)


class LocalStepsTooRarely(LocalSteps):
    """The same with a fault."""

    def step(self, optimizer, run):
        yield from LocalSteps(every=2 * self.every).step(optimizer, run)


def train_in_local_steps(model_fn, batches, training, *, plugin, reference, data_parallel_size):
    """The expected result of :class:`LocalSteps`, computed in one process with one model per rank."""
    models = []
    for _ in range(data_parallel_size):
        torch.manual_seed(0)
        model = model_fn()
        if training.prepare_model:
            training.prepare_model(model)
        models.append(reference(model))
    optimizers = [training.optimizer(model.parameters()) for model in models]
    losses = []
    for step, batch in enumerate(batches, start=1):
        mine = []
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            rows = {name: value.chunk(data_parallel_size)[index] for name, value in batch.items()}
            loss = model(**rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mine.append(loss.item())
        losses.append(sum(mine) / len(mine))
        if step % plugin.every == 0:
            with torch.no_grad():
                for copies in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack([copy.detach() for copy in copies]).mean(0)
                    for parameter in copies:
                        parameter.copy_(mean)
    return Trace(losses, [], {}, models[0].state_dict())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


# ---- files -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class ForgetsItsCount(StrategyPlugin):
    """Gradients shrink with the number of steps of this run, which no checkpoint has."""

    spec = spec("forgets_its_count")

    def step(self, optimizer, run):
        state = run.state(self)
        state["steps"] = state.get("steps", 0) + 1
        for record in run.models[0].parameters:
            if record.current.grad is not None:
                record.current.grad.div_(state["steps"])
        yield


@dataclass(frozen=True, kw_only=True)
class RemembersItsCount(ForgetsItsCount):
    """The same without the fault."""

    spec = spec("remembers_its_count")

    def save(self, run):
        return {"steps": run.state(self)["steps"], "as a tensor": torch.tensor(run.state(self)["steps"])}

    def load(self, state, run):
        if state:
            assert state["as a tensor"].item() == state["steps"]
            run.state(self)["steps"] = state["steps"]


@dataclass(frozen=True, kw_only=True)
class DependsOnTheNumberOfRanks(StrategyPlugin):
    spec = spec("depends_on_the_number_of_ranks")

    def step(self, optimizer, run):
        optimizer.param_groups[0]["lr"] = 1e-3 * run.world.size
        yield


@dataclass(frozen=True, kw_only=True)
class ShowsOtherWeights(StrategyPlugin):
    """The state dict has other weights than those that are saved."""

    spec = spec("shows_other_weights")

    def transform_model(self, model, run):
        def double(module, state, prefix, metadata):
            state["model.norm.weight"] = state["model.norm.weight"] * 2

        model.module.register_state_dict_post_hook(double)


# ---- leaving ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class TrainsACopy(StrategyPlugin):
    spec = spec("trains_a_copy")

    def transform_model(self, model, run):
        model.module = copy.deepcopy(model.module)


SEEN: list[str] = []
FOREVER = threading.Event()


@dataclass(frozen=True, kw_only=True)
class Litters(StrategyPlugin):
    """Leaves hooks, attributes, threads, variables and patches behind."""

    spec = spec("litters")

    def setup(self, run):
        threading.Thread(target=FOREVER.wait, name="litter", daemon=True).start()
        torch.distributed.new_group([0])
        os.environ["SET_BY_A_PLUGIN"] = "yes"
        SEEN.append("a run")
        original = nn.functional.silu
        nn.functional.silu = lambda *args, **kwargs: original(*args, **kwargs)

    def transform_model(self, model, run):
        model.module.litter = True
        model.module.lm_head.register_forward_hook(lambda *_: None)
        model.module.lm_head.weight.register_hook(lambda gradient: gradient)


@dataclass(frozen=True, kw_only=True)
class EndsBadly(StrategyPlugin):
    spec = spec("ends_badly")

    def setup(self, run):
        atexit.register(os._exit, 3)


@dataclass(frozen=True, kw_only=True)
class Healthy(StrategyPlugin):
    """A plugin without a fault."""

    spec = spec("healthy")
    width: int = 1


# ---- owning a responsibility: an owner that keeps its promises, and one for each promise that does not ---------------
@dataclass(frozen=True, kw_only=True)
class Owner(StrategyPlugin):
    """Averages gradients and clips them; without a fault. Like the one in docs/writing-a-plugin.md."""

    spec = PluginSpec(
        name="owner",
        api_version=4,
        phase=Phase.GRADIENTS,
        claims=frozenset({Claim.GRADIENT_REDUCTION}),
    )

    def transform_model(self, model, run):
        state = run.state(self)
        state.setdefault("models", []).append(model)
        state.setdefault("reducers", []).append(GradientReducer(model, run, 0.0001))
        state.setdefault("buffers", []).append(BufferBroadcast(model, run))

    def backward_pass(self, loss, run):
        for reducer in run.state(self)["reducers"]:
            reducer.begin_backward()
        yield
        for reducer in run.state(self)["reducers"]:
            reducer.end_backward()

    def step(self, optimizer, run):
        self.before_update(run)
        yield
        self.after_update(run)

    def before_update(self, run):
        self.finish(run)

    def after_update(self, run):
        for buffers in run.state(self)["buffers"]:
            buffers.after_step()

    def gradients(self, run):
        return Gradients(run, lambda: self.finish(run), lambda: self.flush(run))

    def flush(self, run):
        for reducer in run.state(self)["reducers"]:
            reducer.flush()

    def reshape(self, model, run):
        yield
        for reducer in run.state(self)["reducers"]:
            reducer.restart()

    def finish(self, run):
        for reducer in run.state(self)["reducers"]:
            reducer.before_step()

    def records(self, run):
        return [record for model in run.state(self)["models"] for record in model.parameters]


class SumsShards(Owner):
    """Divides by the ranks over which it has summed, instead of all ranks with other samples."""

    def backward_pass(self, loss, run):
        yield from super().backward_pass(loss, run)
        for record in self.records(run):
            if record.layout.axes and record.current.grad is not None:
                record.current.grad.mul_(run.data_parallel_size)


class ReducesKeptAgain(Owner):
    def backward_pass(self, loss, run):
        yield
        for reducer in run.state(self)["reducers"]:
            reducer.end_backward()


class IgnoresNoSync(Owner):
    def backward_pass(self, loss, run):
        for model in run.state(self)["models"]:
            model.synchronises = True
        yield from super().backward_pass(loss, run)


class UsesUnreduced(Owner):
    """Does not complete the reduction before gradients are clipped or scaled."""

    def gradients(self, run):
        return Gradients(run, flush=lambda: self.flush(run))


class ClipsValuesTooEarly(Owner):
    def gradients(self, run):
        given = super().gradients(run)
        given.clip_value = Gradients(run).clip_value
        return given


class ScalesTooEarly(Owner):
    """Keeps gradients elsewhere until they are reduced, and scales those that are not there."""

    def backward_pass(self, loss, run):
        yield from super().backward_pass(loss, run)
        kept = run.state(self).setdefault("kept", {})
        for record in self.records(run):
            if record.current.grad is not None:
                before, record.current.grad = record.current.grad.clone(), None
                kept[record.fqn] = kept[record.fqn] + before if record.fqn in kept else before

    def finish(self, run):
        kept = run.state(self).pop("kept", {})
        for record in self.records(run):
            if record.fqn in kept:
                record.current.grad = kept[record.fqn]
        super().finish(run)

    def gradients(self, run):
        given = super().gradients(run)
        given.scale = Gradients(run).scale
        return given


class ClipsOnlyTheEuclideanNorm(Owner):
    def gradients(self, run):
        given = super().gradients(run)
        clip_norm = given.clip_norm
        given.clip_norm = lambda parameters, max_norm, norm_type=2.0: clip_norm(parameters, max_norm)
        return given


class ShowsUnreduced(Owner):
    def gradients(self, run):
        return Gradients(run, lambda: self.finish(run), flush=lambda: None)


class StepsUnreduced(Owner):
    def before_update(self, run):
        pass


class StepsTogether(Owner):
    """Reduces gradients also for a step inside `no_sync`."""

    def before_update(self, run):
        for model in run.state(self)["models"]:
            before, model.sync_enabled = model.sync_enabled, True
            self.finish(run)
            model.sync_enabled = before


class IgnoresReduceDtype(Owner):
    def transform_model(self, model, run):
        for record in model.parameters:
            record.reduce_dtype = None
        super().transform_model(model, run)


class LeavesOutUnused(Owner):
    """Lets a parameter without a gradient on this rank have none."""

    def transform_model(self, model, run):
        super().transform_model(model, run)
        used = run.state(self)["used"] = set()
        for record in model.parameters:
            record.current.register_post_accumulate_grad_hook(lambda _, name=record.fqn: used.add(name))

    def before_update(self, run):
        super().before_update(run)
        for record in self.records(run):
            if record.fqn not in run.state(self)["used"]:
                record.current.grad = None
        run.state(self)["used"].clear()


class FillsUnused(Owner):
    """Gives a parameter that no rank has used a gradient of zeros."""

    def before_update(self, run):
        super().before_update(run)
        for record in self.records(run):
            if record.current.requires_grad and record.current.grad is None:
                record.current.grad = torch.zeros_like(record.current)


class DividesByRanksWithData(Owner):
    def backward_pass(self, loss, run):
        yield from super().backward_pass(loss, run)
        if run.join.has_parted and run.join.is_uneven:
            for record in self.records(run):
                if record.current.grad is not None:
                    record.current.grad.mul_(run.data_parallel_size)


class DoesNotJoin(Owner):
    """Ranks without data take no part in its sums."""

    def transform_model(self, model, run):
        register, run.join.register = run.join.register, _never_announced
        super().transform_model(model, run)
        run.join.register = register


class _Silent:
    announced = False

    def __call__(self, *arguments):
        pass


def _never_announced(name, perform, **options):
    return _Silent()


class ScalesNothing(Owner):
    def gradients(self, run):
        given = super().gradients(run)
        given.scale = lambda parameters, factor: None
        return given


class KeepsBuffersApart(Owner):
    def after_update(self, run):
        pass


class RemembersNaN(Owner):
    """Adds a part of the last gradient to the next one, as error feedback does; here a part of zero."""

    def backward_pass(self, loss, run):
        yield from super().backward_pass(loss, run)
        memory = run.state(self).setdefault("memory", {})
        for record in self.records(run):
            if record.current.grad is not None:
                record.current.grad = record.current.grad + memory.get(record.fqn, 0)
                memory[record.fqn] = record.current.grad * 0


class ForgetsNewShapes(Owner):
    def reshape(self, model, run):
        yield


class CountsTwice(Owner):
    """Its norm counts the elements that several ranks hold as often as there are such ranks."""

    def gradients(self, run):
        given = super().gradients(run)
        parts = given.parts
        given.parts = lambda parameters: [GradientPart(part.tensor, part.axes) for part in parts(parameters)]
        return given


BREAKS = {
    SumsShards: "sharded_over_samples",
    ReducesKeptAgain: "kept",
    IgnoresNoSync: "no_sync",
    UsesUnreduced: "reduced_before_clipping",
    ClipsValuesTooEarly: "reduced_before_clipping_values",
    ScalesTooEarly: "reduced_before_scaling",
    ClipsOnlyTheEuclideanNorm: "reduced_before_clipping_inf",
    ShowsUnreduced: "reduced_before_reading",
    StepsUnreduced: "reduced_before_the_step",
    StepsTogether: "step_inside_no_sync",
    IgnoresReduceDtype: "reduce_dtype",
    LeavesOutUnused: "missing",
    FillsUnused: "missing",
    DividesByRanksWithData: "uneven_averages",
    ScalesNothing: "items",
    KeepsBuffersApart: "buffers",
    RemembersNaN: "not_finite",
    ForgetsNewShapes: "reshaped",
    CountsTwice: "held_twice",
}
"""Which promise each of them breaks."""
