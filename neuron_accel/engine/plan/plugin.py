"""The contract between the engine and a strategy.

A strategy is a frozen, keyword-only dataclass derived from :class:`StrategyPlugin`. Its fields are its configuration,
its class attribute ``spec`` declares how it relates to others, and its hooks, all optional, do the work. It keeps no
run-time state in itself: what it needs later lives in the objects it returns or in ``run.state(self)``.

Options are checked when a plugin is made, whether a configuration file or Python names them: each has the type that its
annotation says, and numbers are finite, unless the field says otherwise with ``metadata={"finite": False}``. A
``__post_init__`` may turn what users like to give into what the annotation says; it is checked afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from neuron_accel.engine.plan.coerce import check_fields
from neuron_accel.engine.plan.mesh import AxisSpec
from neuron_accel.errors import NeuronAccelError, PluginError

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.plan.mesh import Mesh
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterMap


API_VERSION = 1
"""Version of this contract. A plugin that declares another one is refused by name."""


class Phase(IntEnum):
    """When a strategy acts on a model; smaller acts first.

    The model is placed on its device between :attr:`PRECISION` and :attr:`GRADIENTS`.
    """

    ADAPTATION = 5
    """Changes what is trained (adapters)."""
    LAYOUT = 10
    """Decides which rank holds which part of a parameter (tensor parallel)."""
    ACTIVATIONS = 20
    """Decides which rank holds which part of an activation (sequence or context parallel)."""
    STAGES = 30
    """Decides which rank runs which layers (pipeline)."""
    MEMORY = 40
    """Trades compute for memory (activation checkpointing)."""
    PRECISION = 50
    """Decides dtypes."""
    GRADIENTS = 60
    """Sums gradients over ranks."""
    OPTIMIZER = 70
    """Decides which rank holds which part of the optimizer."""


class Claim(str, Enum):
    """A duty that exactly one plugin owns in a run."""

    BACKWARD = "backward"
    GRADIENT_REDUCTION = "gradient_reduction"
    GRADIENT_CLIPPING = "gradient_clipping"
    OPTIMIZER_STATE = "optimizer_state"


@dataclass(frozen=True, kw_only=True)
class PluginSpec:
    """What a plugin declares about itself.

    Args:
        name: the name used in configuration files and messages.
        phase: when it acts.
        after, before: names of plugins of the same phase that it must follow or precede, where they are present.
        requires, conflicts: names of plugins, or capabilities: ``"axis:tp"`` stands for "an axis named tp has a degree
            above one"; anything in another plugin's ``provides`` works too.
        provides: capabilities that others may require or conflict with.
        claims: duties that only this plugin performs.
        refines: duties that it takes part in without owning them; each then needs an owner.
        api_version: the version of this contract it was written for.
    """

    name: str
    phase: Phase
    after: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    claims: frozenset[Claim] = frozenset()
    refines: frozenset[Claim] = frozenset()
    api_version: int = API_VERSION


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """What a plugin may look at when it is asked whether it can run.

    Args:
        mesh: the mesh of ranks.
        plugins: every plugin of the run by name, in the order in which they will act.
        capabilities: what plugins and backend offer.
    """

    mesh: Mesh
    plugins: dict[str, StrategyPlugin]
    capabilities: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class StrategyPlugin:
    """Base class of every strategy. All hooks default to doing nothing.

    Hooks are called in the order of the plan, ``teardown`` in reverse.
    """

    spec: ClassVar[PluginSpec]

    def __post_init__(self) -> None:
        """Checks the options. One of a class's own comes before that: see the module's description.

        Raises:
            ConfigurationError: if an option is not of its type, or not a finite number.
        """
        if type(self).__post_init__ is StrategyPlugin.__post_init__:  # else: what surrounds the class's own checks them
            check_fields(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls).get("__post_init__")
        if own is None:
            return

        @functools.wraps(own)
        def checked(self: StrategyPlugin, *init_only: Any) -> None:
            outermost = type(self).__post_init__ is checked  # a class further up may leave options for one below
            try:
                own(self, *init_only)
            except NeuronAccelError:
                raise
            except Exception as error:  # 'a' <= 0: what is wrong is that it was no number
                if outermost:
                    try:
                        check_fields(self)
                    except NeuronAccelError as refusal:
                        raise refusal from error
                raise
            if outermost:
                check_fields(self)

        cls.__post_init__ = checked  # type: ignore[method-assign]

    # ---- planning: pure, no process group, no tensors --------------------------------------------------------------
    def axes(self) -> tuple[AxisSpec, ...]:
        """Mesh axes that this plugin brings. The rest of the ranks becomes the ``dp`` axis."""
        return ()

    def companions(self) -> tuple[StrategyPlugin, ...]:
        """Further strategies that this one consists of, which act in phases of their own. They take part in the plan as
        if they had been given beside it."""
        return ()

    def validate(self, context: PlanContext) -> None:
        """Raises :class:`~neuron_accel.errors.PlanError` if this plugin cannot run in ``context``."""

    def config_dict(self) -> dict[str, Any]:
        """This plugin's configuration as plain data, the same on every rank; it becomes part of the plan's hash."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.init and f.metadata.get("in_plan", True)
        }

    # ---- life of a run ---------------------------------------------------------------------------------------------
    def setup(self, run: Run) -> None:
        """Groups exist, no model has been seen."""

    def model_init(self, run: Run) -> AbstractContextManager[Any]:
        """A context in which users build models."""
        return nullcontext()

    def initial_weights(self) -> str | os.PathLike[str] | None:
        """A checkpoint, or a folder of transformers, whose weights the first model that is prepared takes once it is
        divided; None: it keeps those it has. Asked at planning, too: one plugin of a run may name a folder, several are
        a :class:`~neuron_accel.errors.PlanError`."""
        return None

    def transform_model(self, model: torch.nn.Module, run: Run, parameters: ParameterMap) -> torch.nn.Module:
        """Rewrites ``model`` in place, or returns a new one. FQNs keep their meaning; a parameter whose shape changes
        gets its :class:`~neuron_accel.engine.sharding.layout.Layout` through ``parameters.set_layout``."""
        return model

    def transform_optimizer(self, optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
        """``optimizer`` already holds the rewritten parameters."""
        return optimizer

    def transform_dataloader(self, dataloader: Any, run: Run) -> Any:
        return dataloader

    def transform_scheduler(self, scheduler: Any, run: Run) -> Any:
        return scheduler

    def before_backward(self, loss: torch.Tensor, run: Run) -> torch.Tensor:
        return loss

    def after_backward(self, run: Run) -> None:
        """``accelerator.backward`` has returned; gradients of this micro-batch exist."""

    def should_step(self, optimizer: torch.optim.Optimizer, run: Run) -> bool:
        """Whether an optimizer may update weights now; False, on every rank alike, skips the step: ``before_step`` and
        ``after_step`` are not called then, and schedulers stay where they are. Every plugin is asked. Not called for
        steps that accumulation skips or that get a closure, nor where a gradient scaler decides. Collective."""
        return True

    def before_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        """Just before an optimizer updates weights. Not called for steps that accumulation skips."""

    def after_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        """Just after an optimizer updated weights."""

    def checkpoint_state(self, run: Run) -> dict[str, Any]:
        """What a checkpoint keeps of this plugin beside parameters and optimizers, which it has anyway: plain values
        and tensors, whole and alike on every rank, so that any mesh can load them. Collective."""
        return {}

    def load_checkpoint_state(self, state: dict[str, Any], run: Run) -> None:
        """Takes back what :meth:`checkpoint_state` gave; tensors are on the CPU. Called where a checkpoint has some for
        a plugin of this name, after everything else was loaded. Collective."""

    def after_boundary(self, run: Run) -> None:
        """What a step, or a micro-batch before the last, has asked for was handed to the device: the place to look at
        what a lazy device made of it."""

    def before_reshape(self, model: PreparedModel | None, run: Run) -> None:
        """Some parameters of a prepared model are about to get other shapes, and stay the objects that they are: raises
        a :class:`~neuron_accel.errors.UsageError` on every rank if that is not possible any more."""

    def after_reshape(self, model: PreparedModel | None, run: Run) -> None:
        """They have got them, and layouts to match; their gradients are gone."""

    def explain_model(self, model: torch.nn.Module, run: Run, *, tokens: int | None = None) -> str:
        """What this plugin does in a model that it transformed, as text for people; empty for nothing.

        Args:
            tokens: how many tokens this rank has in a step, for amounts that depend on it; None: they are for each
                token.
        """
        return ""

    def teardown(self, run: Run) -> None:
        """The run ends; called in reverse order."""

    # ---- duties: called only on the owner of the claim -------------------------------------------------------------
    def backward(self, loss: torch.Tensor, run: Run, **kwargs: Any) -> None:
        """Owner of :attr:`Claim.BACKWARD`."""
        loss.backward(**kwargs)

    def clip_grad_norm(
        self, parameters: list[torch.nn.Parameter], max_norm: float, norm_type: float, run: Run
    ) -> torch.Tensor:
        """Owner of :attr:`Claim.GRADIENT_CLIPPING`: scales gradients so that their global norm is at most ``max_norm``.

        Returns:
            The norm before clipping over every element of the original parameters, each counted once; 0-dim, fp32.
        """
        raise NotImplementedError(f"{type(self).__name__} claims gradient clipping without doing it")

    def clip_grad_value(self, parameters: list[torch.nn.Parameter], clip_value: float, run: Run) -> None:
        """Owner of :attr:`Claim.GRADIENT_CLIPPING`: clamps every gradient element to ``[-clip_value, clip_value]``."""
        raise NotImplementedError(f"{type(self).__name__} claims gradient clipping without doing it")

    def scale_gradients(self, parameters: list[torch.nn.Parameter], factor: torch.Tensor, run: Run) -> None:
        """Owner of :attr:`Claim.GRADIENT_REDUCTION`: multiplies the gradients of local parameters, wherever they lie,
        by ``factor`` (0-dim, fp32)."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def full_gradient(self, parameter: torch.nn.Parameter, run: Run) -> torch.Tensor | None:
        """Owner of :attr:`Claim.GRADIENT_REDUCTION`: the reduced gradient of a local parameter, in its local shape, or
        None if it has none. Collective: every rank of the parameter's group calls it in the same order."""
        return parameter.grad


# ---- Whether a class keeps the form of the plugin contract -----------------------------------------------------------
def check_contract(cls: object, source: str) -> None:
    """Checks the form of a plugin class.

    Args:
        cls: what ought to be a subclass of :class:`~neuron_accel.engine.plan.plugin.StrategyPlugin`.
        source: the distribution or module it comes from, for messages.

    Raises:
        PluginError: if it is no plugin class, or was written for another version of the contract.
    """
    if not (isinstance(cls, type) and issubclass(cls, StrategyPlugin)):
        raise PluginError(
            f"{cls!r} is no plugin class.",
            where=source,
            why="strategies derive from neuron_accel.StrategyPlugin",
            fix="name a subclass of it",
        )
    where = f"class {cls.__qualname__} of {source}"
    spec = getattr(cls, "spec", None)
    if not isinstance(spec, PluginSpec):
        raise PluginError(
            f"{cls.__name__} declares no spec.",
            where=where,
            why="the class attribute 'spec' says what a plugin is called, when it acts and what it owns",
            fix="add 'spec = PluginSpec(name=..., phase=...)' to the class",
        )
    if spec.api_version != API_VERSION:
        older = isinstance(spec.api_version, int) and spec.api_version < API_VERSION
        raise PluginError(
            f"Plugin {spec.name!r} was written for version {spec.api_version!r} of the plugin contract, "
            f"this is version {API_VERSION}.",
            where=where,
            why="hooks may have other names, arguments or meanings",
            fix=f"install a newer version of {source if older else 'neuron-accel'}",
        )
    own = [name for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)]
    if own and "__dataclass_fields__" not in vars(cls):
        raise PluginError(
            f"{cls.__name__} has fields ({', '.join(own)}) but is no dataclass.",
            where=where,
            why="they would be no part of its configuration",
            fix="put @dataclass(frozen=True, kw_only=True) above the class",
        )
