# SPDX-License-Identifier: Apache-2.0
"""``PluginConformance``: checks whether a plugin follows the contract.

    class TestStripes(PluginConformance):
        @pytest.fixture
        def plugin(self):
            return Stripes(width=2)

Plugins and functions are sent to ranks as copies and by name: define them in modules, not as closures or lambdas.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeAlias

import pytest
import torch
from torch import nn

from neuron_accel.backends.select import Machine
from neuron_accel.engine.plan.plugin import StrategyPlugin
from neuron_accel.errors import CommunicationError, PlanError, UnsupportedModelError

from . import _cases, _form, _obligations, _opting_out
from ._compositions import COMPOSITIONS, Composition, data_parallel_size
from .parity import Batch, Tolerance, Trace, Training, compare, train_on_rank
from .rank_errors import RanksError
from .ranks import run_ranks

SECONDS = {"gloo": 60.0, "native": 90.0, "native-p2p": 90.0, "cuda": 90.0, "xla": 110.0}
Folders: TypeAlias = pytest.TempPathFactory
_MADE_ONCE: pytest.StashKey[dict[str, Any]] = pytest.StashKey()


class PluginConformance:
    """A pytest class that checks a plugin. Derive a class ``Test...`` with a fixture ``plugin`` from it.

    Attributes:
        beside: further plugins that the plugin always needs.
        ranks: number of ranks on which the plugin is checked by itself; None: the product of the degrees of its axes,
            at least 2.
        tolerance: tolerance of comparisons; the default is that of fp32 rounding.
        conflicts: for each composition that the plugin does not support (``"pp2"``, ``"pp2-gloo"``, or ``"xla"`` for
            all on these ranks), a text that the error message must contain. In it every rank must raise PlanError or
            UnsupportedModelError with a fix; in all other compositions the plugin must work.
        training: the optimizer and the norm to which gradients are clipped, by default 0.5. The gradients that are
            compared are those of the last step after clipping. Checks set accumulation and freezing.
        steps: number of optimizer steps, at least 2; more for an algorithm that acts every few steps.
        backends: kinds of ranks on which the plugin is checked, as in ``run_ranks``. Checks on one kind use the first.
        opt_out: for each check that cannot hold for this plugin (``"test_tied_parameters"``, one case of it as
            ``"test_trains_like_one_process[pp2-gloo]"``, one promise as ``"test_keeps_its_promises[no_sync]"``, or
            ``"[xla]"`` for all on these ranks), the reason, as a sentence. It is printed.
    """

    beside: ClassVar[tuple[StrategyPlugin, ...]] = ()
    ranks: ClassVar[int | None] = None
    tolerance: ClassVar[Tolerance] = Tolerance()
    conflicts: ClassVar[Mapping[str, str]] = {}
    opt_out: ClassVar[Mapping[str, str]] = {}
    backends: ClassVar[tuple[str, ...]] = ("gloo", "xla")
    training: ClassVar[Training] = Training(max_norm=0.5)
    steps: ClassVar[int] = 3

    # ---- what is trained: static methods, which a subclass may override ----------------------------------------------
    model: ClassVar[staticmethod[[], nn.Module]] = staticmethod(_cases.tiny_llama)
    """Builds the model, after seeding."""
    tied_model: ClassVar[staticmethod[[], nn.Module]] = staticmethod(_cases.tiny_tied_llama)
    """Builds a model with tied parameters."""
    batches: ClassVar[staticmethod[[int], list[Batch]]] = staticmethod(_cases.token_batches)
    """``batches(count)`` returns global micro-batches: keyword arguments of the model's forward, equal in every
    call."""
    freeze: ClassVar[staticmethod[[nn.Module], None]] = staticmethod(_cases.freeze_every_second)
    """``freeze(model)`` freezes some parameters of a newly built model."""
    build: ClassVar[staticmethod[..., nn.Module]] = staticmethod(_cases.just_built)
    """``build(model_fn, plugin)`` builds the model that is prepared, as users of the plugin do."""
    reference: ClassVar[staticmethod[..., nn.Module]] = staticmethod(_cases.as_it_is)
    """``reference(model, plugin)`` turns a newly built model into the one that one process trains, with the FQNs and
    values of the parallel run."""
    train_reference: ClassVar[staticmethod[..., Trace]] = staticmethod(_cases.train_alone_with)
    """``train_reference(model_fn, batches, training, *, plugin, reference, data_parallel_size)`` trains in one process
    and returns the :class:`~neuron_accel.testing.Trace` with which the parallel run is compared. Override it for a
    plugin whose algorithm differs from training in one process (for example, steps without synchronisation): it has to
    compute, without this library, the result of ``data_parallel_size`` ranks from the global ``batches`` and
    ``training``. Fields of the trace that it leaves empty, except the weights, are not compared."""

    @pytest.fixture
    def plugin(self) -> StrategyPlugin:
        """The plugin that is checked."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture 'plugin' that returns the plugin to check")

    # ---- contract, configuration and planning ------------------------------------------------------------------------
    def test_is_opted_out_of_with_reasons_only(self) -> None:
        """``opt_out`` and ``conflicts`` are valid, with a reason for each check, and no check is overridden."""
        _none(_opting_out.problems(type(self), PluginConformance, COMPOSITIONS))

    def test_is_found_by_name(self, plugin: StrategyPlugin) -> None:
        """An installed distribution has an entry point with the name of its spec."""
        _none(_form.discovery_problems(plugin))

    def test_keeps_the_form_of_the_contract(self, plugin: StrategyPlugin) -> None:
        """It is a frozen dataclass, its hooks have valid names and arguments, and its claims match its hooks."""
        _none(_form.form_problems(plugin))

    def test_configuration_round_trip(self, plugin: StrategyPlugin) -> None:
        """Writing it to a configuration file and reading that file gives an equal plugin."""
        _none(_form.round_trip_problems((plugin, *self.beside)))

    def test_configuration_is_strict(self, plugin: StrategyPlugin) -> None:
        """Unknown options and values of a wrong type are errors."""
        _none(_form.strictness_problems(plugin))

    def test_plan_is_pure(self, plugin: StrategyPlugin) -> None:
        """The plan depends only on the plugins and the number of ranks, and planning has no side effects."""
        plugins, ranks = self._composed("alone", plugin)
        _none(_form.purity_problems(plugins, ranks))

    def test_plan_is_independent_of_order(self, plugin: StrategyPlugin) -> None:
        """Plugins in any order give the same plan, or the same error."""
        for name in (name for name, what in COMPOSITIONS.items() if what.is_installed):
            plugins, ranks = self._composed(name, plugin)
            plans = {_cases.fingerprint(order, ranks) for order in _orders(plugins)}
            if len(plans) > 1:
                _fail(f"composition {name!r} has {len(plans)} different outcomes, by the order of its plugins: {plans}")

    # ---- comparison with training in one process ---------------------------------------------------------------------
    def test_trains_like_one_process(
        self, plugin: StrategyPlugin, composition: str, backend: str, made_once: dict[str, Any]
    ) -> None:
        """Losses, norms, gradients and weights are those of one process in every composition, or it raises the declared
        conflict."""
        if self._refuses(plugin, backend, composition):
            return
        trace = self._train(plugin, composition, backend, self.training)
        self._compare(plugin, trace, composition, backend, self.training, memory=made_once)

    def test_accumulates_like_one_process(self, plugin: StrategyPlugin, backend: str) -> None:
        """The same with two micro-batches per step."""
        if self._refuses(plugin, backend):
            return
        training = dataclasses.replace(self.training, accumulation=2)
        self._compare(plugin, self._train(plugin, "alone", backend, training), "alone", backend, training)

    def test_frozen_parameters(self, plugin: StrategyPlugin, backend: str) -> None:
        """Frozen parameters do not change at all, and the others train as in one process."""
        if self._refuses(plugin, backend):
            return
        training = dataclasses.replace(self.training, prepare_model=self.freeze)
        reference = functools.partial(self.reference, plugin=plugin)
        frozen = run_ranks(_cases.frozen_names, 1, self.model, training, reference, backend=None)[0]
        if not frozen:
            _fail("'freeze' froze no parameter", "override it, or opt out of this check with a reason")
        trace = self._train(plugin, "alone", backend, training)
        expected = self._compare(plugin, trace, "alone", backend, training)
        changed = [name for name in frozen if not torch.equal(expected.weights[name], trace.weights[name])]
        _none([f"{name} is frozen and has changed" for name in changed])

    def test_tied_parameters(self, plugin: StrategyPlugin, backend: str) -> None:
        """Tied parameters stay tied, and receive the gradients of both uses."""
        if self._refuses(plugin, backend):
            return
        trace = self._train(plugin, "alone", backend, self.training, model=self.tied_model)
        self._compare(plugin, trace, "alone", backend, self.training, model=self.tied_model)

    def test_keeps_its_promises(self, plugin: StrategyPlugin, backend: str) -> None:
        """An owner of gradient reduction keeps each promise of "Owning a responsibility" in docs/writing-a-plugin.md.
        Skipped for a plugin that owns none, or whose algorithm differs from training in one process."""
        prefix = "test_keeps_its_promises["
        left_out = {key.removeprefix(prefix).rstrip("]") for key in self.opt_out if key.startswith(prefix)}
        names = [name for name in _obligations.promised(plugin, backend) if name not in left_out]
        if not names or self.train_reference is not _cases.train_alone_with:
            pytest.skip("the plugin owns no gradient reduction, or not that of one process")
        if self._refuses(plugin, backend):
            return
        plugins = (plugin, *self.beside)
        ranks = 2 * COMPOSITIONS["alone"].fewest(plugins)
        results = run_ranks(
            _obligations.broken, ranks, plugins, names, backend, backend=backend, timeout=SECONDS[backend]
        )
        _none(_obligations.told(results))

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def test_resumes(
        self, plugin: StrategyPlugin, backend: str, made_once: dict[str, Any], tmp_path_factory: Folders
    ) -> None:
        """A run that loads a checkpoint has exactly the saved weights, and then trains as the run that saved it."""
        if self._refuses(plugin, backend):
            return
        plugins, ranks = self._composed("alone", plugin)
        self._check_loading(plugin, plugins, ranks, backend, self._saved(plugin, backend, made_once, tmp_path_factory))

    def test_reshards(
        self, plugin: StrategyPlugin, backend: str, made_once: dict[str, Any], tmp_path_factory: Folders
    ) -> None:
        """A run on another number of ranks loads a checkpoint of the first backend, and then trains as the run that
        saved."""
        if self._refuses(plugin, backend) or self._refuses(plugin, self.backends[0]):
            return
        plugins, ranks = self._composed("alone", plugin)
        fewest = COMPOSITIONS["alone"].fewest(plugins)
        others = ranks // 2 if ranks % 2 == 0 and (ranks // 2) % fewest == 0 else ranks * 2
        self._check_loading(
            plugin, plugins, others, backend, self._saved(plugin, self.backends[0], made_once, tmp_path_factory)
        )

    def test_consolidates(self, plugin: StrategyPlugin, made_once: dict[str, Any], tmp_path_factory: Folders) -> None:
        """``neuron-accel consolidate`` writes the weights of the original model."""
        if self._refuses(plugin, self.backends[0]):
            return
        folder, saved, _ = self._saved(plugin, self.backends[0], made_once, tmp_path_factory)
        _none(_form.consolidation_problems(folder, saved, tmp_path_factory.mktemp("consolidated")))

    # ---- the end of a run --------------------------------------------------------------------------------------------
    def test_unwrap_model_is_the_original(self, plugin: StrategyPlugin, backend: str) -> None:
        """``unwrap_model`` returns the object that was prepared, and its parameters keep their names."""
        if self._refuses(plugin, backend):
            return
        plugins, ranks = self._composed("alone", plugin)
        results = self._run(_cases.identity, ranks, self._case(plugin, plugins, backend))
        for rank, result in enumerate(results):
            if not result["same"]:
                _fail(f"unwrap_model on rank {rank} returned another object: {result['found']}")
            _none([f"the run has no parameter {name!r} any more" for name in result["missing"]])

    def test_leaves_nothing_behind(self, plugin: StrategyPlugin) -> None:
        """A run leaves no hooks, attributes, groups, threads, environment variables or patches behind."""
        from ._leftovers import leftovers

        if self._refuses(plugin, self.backends[0]):
            return
        plugins, ranks = self._composed("alone", plugin)
        case, plain = self._case(plugin, plugins), self._case(plugin, ())
        results = run_ranks(leftovers, ranks, case, plain, backend=case.backend)
        _none([f"rank {rank}: {what}" for rank, found in enumerate(results) for what in found])

    def test_exits_cleanly(self, plugin: StrategyPlugin) -> None:
        """Ranks end without being killed, with exit code 0."""
        if self._refuses(plugin, self.backends[0]):
            return
        plugins, ranks = self._composed("alone", plugin)
        case = self._case(plugin, plugins)
        run_ranks(_cases.train_and_leave, ranks, case, backend=case.backend, full_exit=True)

    # ---- helpers -----------------------------------------------------------------------------------------------------
    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Parametrizes checks with :attr:`backends`, and with the compositions that each backend supports."""
        if "composition" in metafunc.fixturenames:
            cases = [(name, b) for b in cls.backends for name, what in COMPOSITIONS.items() if what.exists_on(b)]
            metafunc.parametrize(("composition", "backend"), cases, ids=[f"{name}-{b}" for name, b in cases])
        elif "backend" in metafunc.fixturenames:
            metafunc.parametrize("backend", cls.backends)

    @pytest.fixture(autouse=True)
    def _opted_out(self, request: pytest.FixtureRequest) -> None:
        _opting_out.act(request, type(self).opt_out)
        backend = getattr(getattr(request.node, "callspec", None), "params", {}).get("backend")
        if backend == "xla" and not Machine().torch_xla:
            pytest.skip("torch_xla is not installed")

    @pytest.fixture
    def made_once(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        """Results that several checks of a class use, by name."""
        return request.node.getparent(pytest.Class).stash.setdefault(_MADE_ONCE, {})

    @staticmethod
    def _once(memory: dict[str, Any], key: str, make: Callable[[], Any]) -> Any:
        if key not in memory:
            memory[key] = make()
        return memory[key]

    def _composed(self, name: str, plugin: StrategyPlugin) -> tuple[tuple[StrategyPlugin, ...], int]:
        """The plugins of a composition and the number of ranks; without the built-in ones if the plugin is one of
        them."""
        composition: Composition = COMPOSITIONS[name]
        own = (plugin, *self.beside)
        plugins = composition.beside(own)
        return plugins or own, composition.ranks(plugins or own, self.ranks)

    def _model(self, plugin: StrategyPlugin, model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return functools.partial(self.build, model, plugin=plugin)

    def _case(
        self, plugin: StrategyPlugin, plugins: tuple[StrategyPlugin, ...], backend: str | None = None
    ) -> _cases.Case:
        return _cases.Case(
            model=self._model(plugin, self.model),
            plugins=plugins,
            batches=self.batches(self.steps),
            training=self.training,
            backend=backend or self.backends[0],
        )

    def _run(self, function: Callable[..., Any], ranks: int, case: _cases.Case, *arguments: Any) -> list[Any]:
        return run_ranks(function, ranks, case, *arguments, backend=case.backend, timeout=SECONDS[case.backend])

    def _compare(
        self,
        plugin: StrategyPlugin,
        trace: Trace,
        composition: str,
        backend: str,
        training: Training,
        *,
        model: Callable[[], nn.Module] | None = None,
        memory: dict[str, Any] | None = None,
    ) -> Trace:
        """Compares a training in a composition with the reference, which it returns.

        Args:
            memory: results of this class, to which the reference is added.
        """
        plugins, ranks = self._composed(composition, plugin)
        size = data_parallel_size(plugins, ranks)

        def make() -> Trace:
            return run_ranks(
                self.train_reference,
                1,
                model or self.model,
                self.batches(self.steps * training.accumulation),
                training,
                plugin=plugin,
                reference=functools.partial(self.reference, plugin=plugin),
                data_parallel_size=size,
                backend=None,
            )[0]

        # The default reference does not depend on the number of ranks.
        key = "reference" if self.train_reference is _cases.train_alone_with else f"reference of {size}"
        expected = make() if memory is None else self._once(memory, key, make)
        if self.train_reference is not _cases.train_alone_with:
            given = {name: getattr(trace, name) for name in ("losses", "norms", "gradients")}
            trace = dataclasses.replace(
                trace, **{name: value if getattr(expected, name) else type(value)() for name, value in given.items()}
            )
        compare(self._readable(expected, backend), trace, self.tolerance)
        return expected

    def _refuses(self, plugin: StrategyPlugin, backend: str, composition: str = "alone") -> bool:
        """Whether a conflict is declared for this composition; if so, checks that the plugin raises it."""
        keys = (composition, f"{composition}-{backend}", backend)
        text = next((self.conflicts[key] for key in keys if key in self.conflicts), None)
        if text is not None:
            self._check_conflict(plugin, composition, backend, text)
        return text is not None

    def _train(
        self,
        plugin: StrategyPlugin,
        name: str,
        backend: str,
        training: Training,
        model: Callable[[], nn.Module] | None = None,
    ) -> Trace:
        if COMPOSITIONS[name].beside((plugin, *self.beside)) is None:
            pytest.skip(f"composition {name!r} already contains this plugin or one that it needs")
        plugins, ranks = self._composed(name, plugin)
        return run_ranks(
            train_on_rank,
            ranks,
            self._model(plugin, model or self.model),
            self.batches(self.steps * training.accumulation),
            {"backend": "xla"} if backend == "xla" else {},
            training,
            plugins,
            gradients=backend != "xla",
            backend=backend,
            timeout=SECONDS[backend],
        )[0]

    def _check_conflict(self, plugin: StrategyPlugin, name: str, backend: str, text: str) -> None:
        try:
            self._train(plugin, name, backend, self.training)
        except RanksError as error:
            refusals = {rank: e for rank, e in error.errors.items() if not isinstance(e, CommunicationError)}
            for rank, found in refusals.items():  # peers of such a rank may raise CommunicationError
                if not isinstance(found, (PlanError, UnsupportedModelError)):
                    _fail(f"composition {name!r}: rank {rank} raised {found!r}, not PlanError or UnsupportedModelError")
                if text not in str(found) or not found.fix:
                    _fail(f"the error in composition {name!r} does not contain {text!r}, or has no fix: {found}")
            if not refusals or len(error.errors) < error.size:
                _fail(f"only {len(error.errors)} of {error.size} ranks raised an error in composition {name!r}")
            return
        _fail(f"composition {name!r} is declared as a conflict, but works", "remove it from 'conflicts'")

    def _saved(
        self, plugin: StrategyPlugin, backend: str, memory: dict[str, Any], factory: Folders
    ) -> tuple[str, dict, dict]:
        """A checkpoint, the weights in it, and the weights of that run at the end."""

        def save() -> tuple[str, dict, dict]:
            folder = str(factory.mktemp("conformance") / "checkpoint")
            plugins, ranks = self._composed("alone", plugin)
            case = self._case(plugin, plugins, backend)
            saved, last = self._run(_cases.train_and_save, ranks, case, folder, self.steps - 1)[0]
            return folder, saved, last

        return self._once(memory, f"saved on {backend}", save)

    def _check_loading(
        self,
        plugin: StrategyPlugin,
        plugins: tuple[StrategyPlugin, ...],
        ranks: int,
        backend: str,
        checkpoint: tuple[str, dict, dict],
    ) -> None:
        folder, saved, last = checkpoint
        loaded, end = self._run(_cases.load_and_finish, ranks, self._case(plugin, plugins, backend), folder)[0]
        _none(
            [
                f"{name} on {ranks} {backend} ranks differs from the checkpoint"
                for name in _cases.differing(saved, loaded)
            ]
        )
        compare(_trace(last), _trace(end), self.tolerance)

    def _readable(self, trace: Trace, backend: str) -> Trace:
        """The reference without gradients on lazy devices, where only their norms and the weights are compared."""
        return trace if backend != "xla" else Trace(trace.losses, trace.norms, {}, trace.weights)


def _orders(plugins: Sequence[StrategyPlugin]) -> list[tuple[StrategyPlugin, ...]]:
    """Orders of plugins: all of up to four, and of more a hundred, the same each time. 7 plugins have 5,040 of them."""
    if len(plugins) <= 4:
        return list(itertools.permutations(plugins))
    draw = random.Random(len(plugins))
    return [tuple(plugins), tuple(reversed(plugins)), *(tuple(draw.sample(plugins, len(plugins))) for _ in range(98))]


def _trace(weights: dict[str, torch.Tensor]) -> Trace:
    return Trace([], [], {}, weights)


def _none(problems: list[str]) -> None:
    if problems:
        _fail("\n  ".join(["the plugin violates the contract:", *problems]))


def _fail(what: str, fix: str | None = None) -> NoReturn:
    raise pytest.fail.Exception(f"{what}\n  fix: {fix}" if fix else what, pytrace=False)
