# SPDX-License-Identifier: Apache-2.0
"""Plugins of version 3 of the contract in a run of version 4, for one release: everything that knows version 3 is here.

To be deleted with the release after, together with the base class of ``StrategyPlugin``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.optim.norms import Gradients

VERSION = 3

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "before_backward": "backward_pass, before its yield, which yields the loss",
        "after_backward": "backward_pass, after its yield",
        "should_step": "step, which yields False, if run.may_skip, to skip it",
        "before_step": "step, before its yield",
        "after_step": "step, after its yield",
        "after_clipping": "run.norm, which step reads",
        "after_boundary": "run.backend.after_step, which step calls",
        "before_save": "save, which also returns the state",
        "checkpoint_state": "save",
        "load_checkpoint_state": "load, whose state is empty if the checkpoint has none",
        "after_load": "load",
        "teardown": "run.undo, beside what is to be undone; the state of plugins is dropped for them",
        "sharded_over_replicas": "PluginSpec(shards=...)",
        "backward": "backward_pass, of the owner as of others",
        "initial_weights": "model.initial_weights, which transform_model sets",
        "before_reshape": "reshape, before its yield",
        "after_reshape": "reshape, after its yield",
        "scale_gradients": "gradients, whose parts the run scales",
        "clip_grad_norm": "gradients, whose parts the run clips",
        "clip_grad_value": "gradients, whose parts the run clips",
        "full_gradient": "gradients, and its method full",
    }
)
"""The hooks of version 3 that version 4 does not have, and what takes their place."""


class Hooks:
    """The hooks of version 3 that version 4 does not have, as others called them or as a plugin calls ``super()``."""

    if not TYPE_CHECKING:

        def before_backward(self, loss: torch.Tensor, run: Any) -> torch.Tensor:
            return loss

        def after_backward(self, run: Any) -> None:
            pass

        def should_step(self, optimizer: torch.optim.Optimizer, run: Any) -> bool:
            return True

        def before_step(self, optimizer: torch.optim.Optimizer, run: Any) -> None:
            pass

        def after_step(self, optimizer: torch.optim.Optimizer, run: Any) -> None:
            pass

        def after_clipping(self, norm: torch.Tensor, run: Any) -> None:
            pass

        def after_boundary(self, run: Any) -> None:
            pass

        def before_save(self, run: Any) -> None:
            pass

        def checkpoint_state(self, run: Any) -> dict[str, Any]:
            return {}

        def load_checkpoint_state(self, state: dict[str, Any], run: Any) -> None:
            pass

        def after_load(self, run: Any) -> None:
            pass

        def initial_weights(self) -> Any:
            return None

        def backward(self, loss: torch.Tensor, run: Any, **kwargs: Any) -> None:
            loss.backward(**kwargs)

        def teardown(self, run: Any) -> None:
            pass

        def sharded_over_replicas(self) -> frozenset[str]:
            return frozenset()

        def before_reshape(self, model: Any, run: Any) -> None:
            pass

        def after_reshape(self, model: Any, run: Any) -> None:
            pass

        def scale_gradients(self, parameters: list[torch.nn.Parameter], factor: torch.Tensor, run: Any) -> None:
            _gradients(self, run).scale(parameters, factor)

        def clip_grad_norm(
            self, parameters: list[torch.nn.Parameter], max_norm: float, norm_type: float, run: Any
        ) -> torch.Tensor:
            return _gradients(self, run).clip_norm(parameters, max_norm, norm_type)

        def clip_grad_value(self, parameters: list[torch.nn.Parameter], clip_value: float, run: Any) -> None:
            _gradients(self, run).clip_value(parameters, clip_value)

        def full_gradient(self, parameter: torch.nn.Parameter, run: Any) -> torch.Tensor | None:
            return _gradients(self, run).full(parameter)


_ELSEWHERE = {
    "neuron_accel.engine.optim.norms": "clip_by_norm clip_by_value",
    "neuron_accel.errors": "ConfigurationError DesyncError LayoutError NeuronAccelError PlanError "
    "UnsupportedModelError UsageError did_you_mean",
    "neuron_accel.contract.families": "Architecture BlockwiseAttention Stack Style install_resize join_fqn "
    "matches_fqn model_without_weights",
    "neuron_accel.contract.events": "Collective Event Events Observer Traffic Transfer",
    "neuron_accel.contract.sharded": "GatheredShard ShardedGradients ShardedOptimizer ShardedWeights Unit "
    "UnitsOfModel WeightShard needs_closure why_not_elementwise",
}
NAMES: Mapping[str, str] = MappingProxyType(
    {name: module for module, names in _ELSEWHERE.items() for name in names.split()}
)
"""The names of version 3 that the first page of the contract no longer has, and where they are."""


def is_of(cls: type[Any]) -> bool:
    """Returns whether a plugin class was written for version 3, or states none, as most of that version do."""
    return cls.spec.api_version in (VERSION, None)


def may_be(cls: type[Any]) -> bool:
    """Returns whether a plugin class that states no version can be of version 3: it has no hook of version 4 only."""
    own = [base for base in cls.__mro__ if "spec" in vars(base)]
    return not any(name in vars(base) for name in _SOURCES for base in own)


def end(plugins: Iterable[Any], run: Any) -> None:
    """Calls ``teardown`` of those of version 3."""
    for plugin in reversed([*plugins]):
        if is_of(type(plugin)):
            plugin.teardown(run)


def has_instead(cls: type[Any], hooks: Iterable[str]) -> bool:
    """Returns whether a plugin class is of version 3, and has no need for any of these hooks of version 4."""
    hooks = set(hooks)
    return is_of(cls) and (
        hooks == {"gradients"}
        or (hooks == {"backward_pass"} and has(cls, "backward"))
        or any(has(cls, f) for name in hooks for f in _SOURCES.get(name, ()))
    )


def has(plugin: object, name: str) -> bool:
    """Returns whether a plugin, or its class, implements a hook of version 3."""
    cls = plugin if isinstance(plugin, type) else type(plugin)
    return getattr(cls, name) is not getattr(Hooks, name)


def _gradients(plugin: Any, run: Any) -> Gradients:
    """Of the base class, for what calls ``super()``, else of the owner."""
    from neuron_accel.engine.optim.norms import Gradients  # needs torch, which planning does not

    return Gradients(run) if is_of(type(plugin)) else plugin.gradients(run)


def warn(cls: type[Any], where: str) -> None:
    """Says that a plugin is of version 3, and what to change."""
    used = [f"{name} is now {instead}" for name, instead in INSTEAD.items() if has(cls, name)]
    warnings.warn(
        f"Plugin {cls.spec.name!r} ({where}) was written for version 3 of the plugin contract, which the next release "
        f"does not run. To change: {'; '.join((*used, 'api_version=4 in its spec'))}.",
        DeprecationWarning,
        stacklevel=2,
    )


def adapted(plugin: Any, same: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Returns the hooks of version 4 of a plugin of version 3, by name; ``same`` are those that have not changed."""
    hooks = {name: hook for name, hook in same.items() if name not in _SOURCES}
    adapter = _Adapter(plugin)
    if has(plugin, "initial_weights"):
        hooks["transform_model"] = adapter.transform_model
    return hooks | {
        name: getattr(adapter, name) for name, former in _SOURCES.items() if any(has(plugin, hook) for hook in former)
    }


_SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "backward_pass": ("before_backward", "after_backward"),
        "step": ("should_step", "before_step", "after_step", "after_clipping", "after_boundary"),
        "save": ("before_save", "checkpoint_state"),
        "load": ("load_checkpoint_state", "after_load"),
        "reshape": ("before_reshape", "after_reshape"),
        "gradients": ("scale_gradients", "clip_grad_norm", "clip_grad_value", "full_gradient"),
    }
)
"""The hooks of version 4 that took the place of others, and these."""


class _Adapter:
    """The hooks of version 4 of a plugin of version 3."""

    def __init__(self, plugin: Any) -> None:
        self._plugin, self.spec = plugin, plugin.spec

    def transform_model(self, model: Any, run: Any) -> None:
        if (folder := self._plugin.initial_weights()) is not None:
            model.initial_weights[self.spec.name] = folder
        self._plugin.transform_model(model, run)

    def backward_pass(self, loss: torch.Tensor, run: Any) -> Iterator[torch.Tensor]:
        yield self._plugin.before_backward(loss, run)
        self._plugin.after_backward(run)

    def step(self, optimizer: torch.optim.Optimizer, run: Any) -> Iterator[bool | None]:
        if run.norm is not None:
            self._plugin.after_clipping(run.norm, run)
        if run.may_skip and not self._plugin.should_step(optimizer, run):
            yield False
            return
        self._plugin.before_step(optimizer, run)
        yield None
        self._plugin.after_step(optimizer, run)
        run.backend.after_step(lambda: self._plugin.after_boundary(run), reads_graph=True)

    def save(self, run: Any) -> dict[str, Any]:
        self._plugin.before_save(run)
        return self._plugin.checkpoint_state(run)

    def load(self, state: dict[str, Any], run: Any) -> None:
        if state:
            self._plugin.load_checkpoint_state(state, run)
        self._plugin.after_load(run)

    def reshape(self, model: Any, run: Any) -> Iterator[None]:
        self._plugin.before_reshape(model, run)
        yield
        self._plugin.after_reshape(model, run)

    def gradients(self, run: Any) -> Gradients:
        from neuron_accel.engine.optim.norms import Gradients

        plugin = self._plugin

        class Former(Gradients):
            def full(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
                return plugin.full_gradient(parameter, run)

            def scale(self, parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor) -> None:
                plugin.scale_gradients(list(parameters), factor, run)

            def norm(self, parameters: Iterable[torch.nn.Parameter], norm_type: float = 2.0) -> torch.Tensor:
                return plugin.clip_grad_norm(list(parameters), float("inf"), norm_type, run)

            def clip_norm(
                self, parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float = 2.0
            ) -> torch.Tensor:
                return plugin.clip_grad_norm(list(parameters), max_norm, norm_type, run)

            def clip_value(self, parameters: Iterable[torch.nn.Parameter], clip_value: float) -> None:
                plugin.clip_grad_value(list(parameters), clip_value, run)

        return Former(run)
