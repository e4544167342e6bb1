# SPDX-License-Identifier: Apache-2.0
"""The interface between the engine and a strategy.

A strategy is a frozen, keyword-only dataclass derived from :class:`StrategyPlugin`. Its fields are its options, its
class attribute ``spec`` declares its relation to other plugins, and its hooks, all optional, implement it. It has no
run-time state of its own: that is kept in the objects that its hooks return, or in ``run.state(self)``.

Options are checked when a plugin is created, from a configuration file or in Python: each must have the type of its
annotation, and numbers must be finite, unless the field has ``metadata={"finite": False}``. A ``__post_init__`` may
convert other values to the annotated type; options are checked after it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from neuron_accel.engine.plan import version_3
from neuron_accel.engine.plan.coerce import check_arguments, check_fields
from neuron_accel.engine.plan.mesh import AxisSpec
from neuron_accel.errors import NeuronAccelError, PluginError

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.optim.norms import Gradients
    from neuron_accel.engine.plan.mesh import Mesh
    from neuron_accel.engine.runtime.run import PreparedModel, Run


API_VERSION = 4
"""Version of this contract. A plugin states the one that it was written for."""

ACCEPTED = range(3, API_VERSION + 1)
"""Versions of the contract whose plugins run."""

CHANGES: Mapping[int, str] = MappingProxyType(
    {
        2: "transform_model and explain_model get the PreparedModel; transform_scheduler and config_dict are gone",
        3: "PluginSpec(lazy_load=True) replaces model_init and lazy_load; PluginSpec(before=...) is gone, use after",
        4: "; ".join(f"{name}: {instead}" for name, instead in version_3.INSTEAD.items()),
    }
)
"""What a plugin has to change for a version, by version."""


class Phase(IntEnum):
    """When a strategy acts on a model; smaller phases act first.

    The model is placed on its device between :attr:`PRECISION` and :attr:`GRADIENTS`.
    """

    ADAPTATION = 5
    """Changes what is trained (adapters)."""
    LAYOUT = 10
    """Decides which rank holds which shard of a parameter (tensor parallel)."""
    ACTIVATIONS = 20
    """Decides which rank holds which shard of an activation (sequence or context parallel)."""
    STAGES = 30
    """Decides which rank runs which layers (pipeline)."""
    MEMORY = 40
    """Trades compute for memory (activation checkpointing)."""
    PRECISION = 50
    """Decides dtypes."""
    GRADIENTS = 60
    """Sums gradients over ranks."""
    OPTIMIZER = 70
    """Decides which rank holds which shard of the optimizer."""


class Claim(str, Enum):
    """A responsibility that exactly one plugin owns in a run."""

    BACKWARD = "backward"
    """Its owner computes gradients before the loss is returned."""
    GRADIENT_REDUCTION = "gradient_reduction"
    OPTIMIZER_STATE = "optimizer_state"
    GRADIENT_CLIPPING = GRADIENT_REDUCTION
    """The name that version 3 had for a part of it."""


@dataclass(frozen=True)
class Moment:
    """When a hook is called.

    Args:
        text: shown by ``explain``.
        owner: the responsibility whose owner alone is called; None: every plugin that implements the hook.
    """

    text: str
    owner: Claim | None = None


_Method = TypeVar("_Method", bound=Callable[..., Any])


def hook(text: str, *, owner: Claim | None = None) -> Callable[[_Method], _Method]:
    """Marks a method of :class:`StrategyPlugin` as a hook."""

    def mark(method: _Method) -> _Method:
        method.moment = Moment(text, owner)  # type: ignore[attr-defined]
        return method

    return mark


@dataclass(frozen=True, kw_only=True)
class PluginSpec:
    """Name, phase and relations of a plugin.

    Args:
        name: the name used in configuration files and messages.
        phase: when it acts.
        after: names of plugins of the same phase after which it must act, if they are present.
        requires, conflicts: names of plugins, or capabilities: those of the backend, those in ``provides`` of another
            plugin, or ``"axis:tp"``, which means that an axis named tp has a degree above one.
        provides: capabilities that others may require or conflict with.
        claims: responsibilities that only this plugin owns.
        refines: responsibilities that it takes part in without owning them; each then needs an owner.
        lazy_load: whether each rank keeps a part of the weights, so that models are built without memory for them in
            `accelerator.model_init`, unless every axis that it adds has one rank.
        reads_weights: whether it reads the weights of a model that was built without memory for them itself, when an
            optimizer is prepared together with the model (:meth:`PreparedModel.read_weights`). What it has not read
            then, ``prepare`` reads in full.
        shards: which of ``"weights"``, ``"gradients"`` and ``"optimizer state"`` it shards over ranks that hold the
            same parameters: for estimates, before a layout is counted.
        api_version: the version of this contract that it was written for, as a number. Required.
    """

    name: str
    phase: Phase
    after: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    claims: frozenset[Claim] = frozenset()
    refines: frozenset[Claim] = frozenset()
    lazy_load: bool = False
    reads_weights: bool = False
    shards: frozenset[str] = frozenset()
    api_version: int | None = None

    def __repr__(self) -> str:
        shown = [f"{self.name!r}", f"phase {self.phase.name}"]
        for name in ("after", "requires", "conflicts", "provides", "claims", "refines"):
            names = sorted(each.value if isinstance(each, Claim) else each for each in getattr(self, name))
            shown += [f"{name} {', '.join(names)}"] if names else []
        return f"<{type(self).__name__} {', '.join(shown[:2])}{''.join(f'; {each}' for each in shown[2:])}>"


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """Argument of :meth:`StrategyPlugin.validate`.

    Args:
        mesh: the mesh of ranks.
        plugins: all plugins of the run by name, in the order in which they act.
        capabilities: the capabilities of plugins and backend.
        missing: reasons why the backend lacks a capability, by its name, if it was probed.
    """

    mesh: Mesh
    plugins: dict[str, StrategyPlugin]
    capabilities: frozenset[str]
    missing: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.mesh}; plugins: {', '.join(self.plugins) or 'none'}>"


class _KnownOptionsOnly:
    """A constructor that raises a ConfigurationError with the nearest name for an unknown option, instead of Python's
    TypeError."""

    if not TYPE_CHECKING:  # for a type checker the constructor is the one that dataclass creates

        def __new__(cls, *args: Any, **kwargs: Any) -> _KnownOptionsOnly:
            if args or kwargs:  # copies are created without arguments
                check_arguments(cls, args, kwargs)
            return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class StrategyPlugin(version_3.Hooks, _KnownOptionsOnly):
    """Base class of all strategies. By default hooks do nothing.

    Hooks are called in the order of the plan. One around a moment is a generator: what precedes its ``yield`` runs
    before, what follows it runs after. If the moment fails it is closed at its ``yield``: what must be undone then
    stands in a ``finally``. What is undone when models are released is given to :meth:`Run.undo`.
    """

    spec: ClassVar[PluginSpec]

    removed_options: ClassVar[Mapping[str, str]] = {}
    """What to do instead of giving options that the plugin no longer has, by their names."""

    def __post_init__(self) -> None:
        """Checks the options. The ``__post_init__`` of a subclass runs before, see the module's docstring.

        Raises:
            ConfigurationError: if an option does not have its type, or is not a finite number.
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
            outermost = type(self).__post_init__ is checked  # a subclass may convert options of its base class
            try:
                own(self, *init_only)
            except NeuronAccelError:
                raise
            except Exception as error:  # such as 'a' <= 0: the actual error is that the option is not a number
                if outermost:
                    try:
                        check_fields(self)
                    except NeuronAccelError as refusal:
                        raise refusal from error
                raise
            if outermost:
                check_fields(self)

        cls.__post_init__ = checked  # type: ignore[method-assign]

    # ---- planning: pure, no process group, no tensors ----------------------------------------------------------------
    def axes(self) -> tuple[AxisSpec, ...]:
        """Returns the mesh axes that this plugin adds. The remaining ranks form the ``dp`` axis."""
        return ()

    def companions(self) -> tuple[StrategyPlugin, ...]:
        """Returns further plugins that this one consists of. They act in their own phases, as if the user had given
        them."""
        return ()

    def validate(self, context: PlanContext) -> None:
        """Raises :class:`~neuron_accel.errors.PlanError` if this plugin cannot run in ``context``."""

    # ---- life of a run -----------------------------------------------------------------------------------------------
    @hook("the run begins")
    def setup(self, run: Run) -> None:
        """Called when groups exist, before any model is prepared."""

    @hook("models are prepared")
    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Rewrites ``model.module`` in place, or replaces it by another module. FQNs must be kept; for a parameter
        whose shape changes the plugin sets a :class:`~neuron_accel.contract.Layout` with
        ``model.parameters.set_layout``."""

    @hook("loaders are prepared")
    def transform_dataloader(self, dataloader: Any, run: Run) -> Any:
        """Wraps a loader that is already sharded over data-parallel ranks; returns the loader to use."""
        return dataloader

    @hook("optimizers are prepared")
    def transform_optimizer(self, optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
        """Wraps an optimizer, which already holds the rewritten parameters; returns the optimizer to use."""
        return optimizer

    # ---- a step, in order --------------------------------------------------------------------------------------------
    @hook("gradients are computed")
    def backward_pass(self, loss: torch.Tensor, run: Run) -> Iterator[torch.Tensor | None]:
        """Around the backward pass of a micro-batch, whose loss is 0-dim. Yields once: the loss to differentiate, or
        nothing to leave it as it is. After ``yield``, and before ``accelerator.backward`` returns, the gradients of
        this micro-batch exist."""
        yield loss

    @hook("gradients are reduced", owner=Claim.GRADIENT_REDUCTION)
    def gradients(self, run: Run) -> Gradients:
        """Owner of :attr:`Claim.GRADIENT_REDUCTION`: returns the reduced gradients of this run, wherever they are
        stored. The run averages, clips and reads them through this object (:attr:`Run.gradients`)."""
        raise NotImplementedError  # check_contract refuses an owner without it

    @hook("the optimizer steps")
    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[bool | None]:
        """Around an update of weights. Yields once: False, on every rank, to skip the update, if ``run.may_skip``.
        Hooks are then closed at their ``yield``, those of later plugins are not called, and schedulers do not advance.
        Not called for steps that accumulation skips. ``optimizer`` is the one that :meth:`transform_optimizer`
        returned, below Accelerate's wrapper. What reads values of a step on a lazy device waits for its graph with
        :meth:`Backend.after_step`. Collective."""
        yield None

    # ---- now and then ------------------------------------------------------------------------------------------------
    @hook("a checkpoint is saved")
    def save(self, run: Run) -> dict[str, Any] | None:
        """Called before tensors are read, for a checkpoint or to write weights in full: completes pending work. Returns
        this plugin's state for a checkpoint, other than parameters and optimizers: plain values and tensors, unsharded
        and equal on every rank, so that any mesh can load them. A value may also be a
        :class:`~neuron_accel.contract.ShardedState`, for tensors that are sharded like the parameters, or a
        :class:`~neuron_accel.contract.ReplicaState`, for values that differ between replicas. Collective."""
        return None

    @hook("a checkpoint is loaded")
    def load(self, state: dict[str, Any], run: Run) -> None:
        """Called when everything else was loaded. Restores the state that :meth:`save` returned, in the same form;
        tensors are on the CPU. It is empty if a checkpoint has none for a plugin of this name, or weights only: what
        was derived from earlier weights no longer fits. Collective."""

    @hook("parameters get other shapes")
    def reshape(self, model: PreparedModel, run: Run) -> Iterator[None]:
        """Around a change of the shapes of some parameters of a prepared model, in place. Before ``yield``, raises a
        :class:`~neuron_accel.errors.UsageError` on every rank if that is no longer possible. After it, parameters have
        their new shapes and layouts; their gradients were dropped."""
        yield

    @hook("a model is explained")
    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        """Returns a readable description of what this plugin does in a model that it transformed; empty if there is
        nothing to say.

        Args:
            model: the model.
            run: the run.
            tokens: number of tokens of this rank in a step, for amounts that depend on it; None for amounts per token.
        """
        return ""


HOOKS: Mapping[str, Moment] = MappingProxyType(
    {name: value.moment for name, value in vars(StrategyPlugin).items() if hasattr(value, "moment")}
)
"""Every hook of a run by name, in the order in which they are called."""

_WITHDRAWN = {"transform_scheduler": 1, "config_dict": 1, "model_init": 2, "lazy_load": 2}
"""Methods of plugins that earlier versions had, and the last version that had them."""

_ENTAILS: Mapping[Claim, tuple[frozenset[str], ...]] = {
    Claim.BACKWARD: (frozenset({"backward_pass"}),),
    Claim.GRADIENT_REDUCTION: (
        frozenset({"gradients"}),
        frozenset({"transform_model", "transform_optimizer", "backward_pass", "step"}),
    ),
    Claim.OPTIMIZER_STATE: (frozenset({"transform_optimizer"}),),
}
"""Hooks that an owner must implement: at least one of each set."""


def overrides(plugin: StrategyPlugin | type[StrategyPlugin], name: str) -> bool:
    """Returns whether a plugin implements a hook."""
    cls = plugin if isinstance(plugin, type) else type(plugin)
    return getattr(cls, name) is not getattr(StrategyPlugin, name)


def hooks_of(plugin: StrategyPlugin) -> dict[str, Callable[..., Any]]:
    """Returns the hooks that a plugin implements, bound to it, by name."""
    hooks = {name: getattr(plugin, name) for name in HOOKS if overrides(plugin, name)}
    return version_3.adapted(plugin, hooks) if version_3.is_of(type(plugin)) else hooks


# ---- Checking a plugin class -----------------------------------------------------------------------------------------
def check_contract(cls: object, source: str) -> None:
    """Checks that a plugin class conforms to the contract.

    Args:
        cls: the class, which should be a subclass of :class:`~neuron_accel.engine.plan.plugin.StrategyPlugin`.
        source: the distribution or module that it comes from, for messages.

    Raises:
        PluginError: if it is not a plugin class, was written for another version of the contract, has a method whose
            name is similar to that of a hook, a hook that does not accept its arguments, or claims a responsibility
            without the hooks that it requires.
    """
    if not (isinstance(cls, type) and issubclass(cls, StrategyPlugin)):
        raise PluginError(
            f"{cls!r} is not a plugin class.",
            where=source,
            why="strategies derive from neuron_accel.StrategyPlugin",
            fix="give a subclass of it",
        )
    where = f"class {cls.__qualname__} of {source}"
    spec = getattr(cls, "spec", None)
    if not isinstance(spec, PluginSpec):
        raise PluginError(
            f"{cls.__name__} declares no spec.",
            where=where,
            why="the class attribute 'spec' declares a plugin's name, when it acts and what it owns",
            fix="add 'spec = PluginSpec(name=..., phase=...)' to the class",
        )
    check_version(cls, source, where)
    if problems := [*hook_problems(cls), *claim_problems(cls)]:
        raise PluginError(
            f"{cls.__name__} does not conform to the contract.",
            where=where,
            why="; ".join(problems),
            fix="compare it with the hooks of neuron_accel.contract.StrategyPlugin",
        )
    own = [name for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)]
    if own and "__dataclass_fields__" not in vars(cls):
        raise PluginError(
            f"{cls.__name__} has fields ({', '.join(own)}) but is not a dataclass.",
            where=where,
            why="they would not belong to its configuration",
            fix="put @dataclass(frozen=True, kw_only=True) above the class",
        )


def check_version(cls: type[StrategyPlugin], source: str, where: str) -> None:
    """Checks that a plugin class states a version of the contract, one of :data:`ACCEPTED`.

    Raises:
        PluginError: if it does not.
    """
    version = cls.spec.api_version
    withdrawn = [name for name in _WITHDRAWN if hasattr(cls, name)]
    if version is None and not withdrawn and version_3.may_be(cls):
        return
    if version is None and withdrawn:
        version = _WITHDRAWN[withdrawn[0]]
    if version is None:
        raise PluginError(
            f"Plugin {cls.spec.name!r} does not state the version of the plugin contract that it was written for.",
            where=where,
            why="of another version, its hooks would not be called, or be called with other arguments",
            fix=f"once it was tried with this version, write PluginSpec(..., api_version={API_VERSION}) in it",
        )
    if version not in ACCEPTED:
        older = isinstance(version, int) and version < API_VERSION
        changed = "; ".join(f"{n}: {text}" for n, text in CHANGES.items() if older and n > version)
        raise PluginError(
            f"Plugin {cls.spec.name!r} was written for version {version!r} of the plugin contract, "
            f"this is version {API_VERSION}.",
            where=where,
            why="hooks may have other names, arguments or meanings",
            fix=f"install a newer version of {source if older else 'neuron-accel'}"
            + (f", or change it (version {changed})" if changed else ""),
        )


def hook_problems(cls: type[StrategyPlugin]) -> list[str]:
    """Returns descriptions of methods whose name is similar to that of a hook, and of hooks that do not accept their
    arguments."""
    problems = []
    known = [*HOOKS, "axes", "companions", "validate"]
    former = version_3.INSTEAD
    if version_3.is_of(cls):
        known, former = [*known, *former], {}
    for base in cls.__mro__:
        if base is StrategyPlugin or not issubclass(base, StrategyPlugin):
            continue
        for name, value in vars(base).items():
            if name in HOOKS and not callable(value):
                problems.append(f"{name} is the name of a hook, and not a method")
            if not inspect.isfunction(value) or name.startswith("_"):
                continue
            if name in former:
                problems.append(f"{name} is not a hook any more: {former[name]}")
            elif name in known:
                problems += _signature_problems(name, value)
            elif near := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                problems.append(f"{name} is not a hook and never called; did you mean {near[0]}?")
    return problems


def _signature_problems(name: str, function: Callable[..., Any]) -> list[str]:
    """Checks that a hook accepts its arguments: positional ones under any name, keyword-only ones under their names."""
    expected = list(inspect.signature(getattr(StrategyPlugin, name)).parameters.values())
    keywords = {p.name: object() for p in expected if p.kind is inspect.Parameter.KEYWORD_ONLY}
    positional = [object() for p in expected if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    try:
        inspect.signature(function).bind(*positional, **keywords)
    except TypeError as error:
        wanted = ", ".join(str(p) for p in expected)
        return [f"{name} does not accept its arguments, ({wanted}): {error}"]
    if inspect.isgeneratorfunction(getattr(StrategyPlugin, name)) and not inspect.isgeneratorfunction(function):
        return [f"{name} has no yield, around which it is to act"]
    return []


def claim_problems(cls: type[StrategyPlugin]) -> list[str]:
    """Returns descriptions of responsibilities that are claimed without their hooks, and of hooks of responsibilities
    that are not claimed."""
    claims, problems = cls.spec.claims, []
    for name, moment in HOOKS.items():
        if moment.owner is not None and moment.owner not in claims and overrides(cls, name):
            problems.append(f"{name} is only called on the owner of {moment.owner.value}, which it does not claim")
    for claim in sorted(claims):
        for choice in _ENTAILS[claim]:
            if not version_3.has_instead(cls, choice) and not any(overrides(cls, name) for name in choice):
                problems.append(f"it claims {claim.value} and has no {' or '.join(sorted(choice))}")
    return problems
