# SPDX-License-Identifier: Apache-2.0
"""Hyperparameter search on several ranks: the first rank chooses the trials, and all ranks train each."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers.hyperparameter_search import (
    ALL_HYPERPARAMETER_SEARCH_BACKENDS,
    default_hp_search_backend,
)
from transformers.trainer_utils import BestRun, HPSearchBackend, default_compute_objective

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.trainer.accelerator import TrainersAccelerator

_OF_ONE_PROCESS = {
    HPSearchBackend.RAY: "Ray runs each trial in a separate process, which is not connected to the other ranks",
    HPSearchBackend.WANDB: "the W&B agent of each process would run a different trial",
}
_ONE_AT_A_TIME = {
    "n_jobs": "collectives of concurrent trials would be mixed up",
    "catch": "a rank would continue with the next trial while others are still in the failed one",
}


class Searching:
    """The methods of the Trainer for hyperparameter search."""

    accelerator: TrainersAccelerator
    model: Any
    args: Any
    objective: Any

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], Any] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **options: Any,
    ) -> BestRun | list[BestRun]:
        """As in transformers; on several ranks with Optuna only. Collective.

        The first rank has the study. All ranks train each trial, end it early if the study prunes it, and return the
        result.

        Args:
            hp_space: has to suggest every hyperparameter; suggestions in ``model_init`` are made on the first rank
                only.
            options: arguments of ``optuna.create_study``, ``timeout`` (seconds after which no trial begins) and
                ``gc_after_trial``.

        Raises:
            UsageError: on several ranks, for another library, ``n_jobs`` or ``catch``; or if no trial was completed.
            RuntimeError: without ``model_init``, or if the library is not installed.
        """
        if self.accelerator.run.world.size == 1:
            return super().hyperparameter_search(  # type: ignore[misc]
                hp_space, compute_objective, n_trials, direction, backend, hp_name, **options
            )
        library = HPSearchBackend(backend or default_hp_search_backend())
        self._check_search(library, options)
        of_library = ALL_HYPERPARAMETER_SEARCH_BACKENDS[library]()
        of_library.ensure_available()
        if self.model_init is None:  # type: ignore[attr-defined]
            raise RuntimeError("A hyperparameter search needs a model_init, which builds a new model for each trial.")
        self.hp_search_backend, self.hp_name = library, hp_name
        self.hp_space = of_library.default_hp_space if hp_space is None else hp_space
        self.compute_objective = compute_objective or default_compute_objective
        try:
            return self._search(n_trials, direction, **options)
        finally:
            self.hp_search_backend = None

    def _check_search(self, library: HPSearchBackend, options: dict[str, Any]) -> None:
        ranks = self.accelerator.run.world.size
        if library in _OF_ONE_PROCESS:
            raise UsageError(
                f"A hyperparameter search with {library.value!r} is not possible on {ranks} ranks.",
                why=_OF_ONE_PROCESS[library],
                fix="use backend='optuna', or one rank",
            )
        for name, why in _ONE_AT_A_TIME.items():
            if options.pop(name, None) not in (None, 1, ()):
                raise UsageError(f"{name!r} is not possible on {ranks} ranks.", why=why, fix="leave it out")

    def _search(
        self,
        n_trials: int,
        direction: str | list[str],
        timeout: float | None = None,
        gc_after_trial: bool = False,
        **of_study: Any,
    ) -> BestRun | list[BestRun]:
        import optuna

        best: Any = None
        if self.accelerator.run.backend.rank == 0:
            several = {"directions": direction} if isinstance(direction, list) else {"direction": direction}
            study = optuna.create_study(**several, **of_study)
            study.optimize(self._lead, n_trials=n_trials, timeout=timeout, gc_after_trial=gc_after_trial)
            self._from_first(None)
            best = _best(study)
        else:
            while (values := self._from_first(None)) is not None:
                with contextlib.suppress(optuna.TrialPruned):
                    self._try(optuna.trial.FixedTrial(*values))
                if gc_after_trial:
                    gc.collect()
        best = self._from_first(best)
        if best is None:
            raise UsageError(
                "No trial was completed.", why="the time limit was reached, or the study pruned all trials"
            )
        return best

    def _lead(self, trial: Any) -> Any:
        self.hp_space(trial)
        self._from_first((trial.params, trial.number))
        return self._try(trial)

    def _try(self, trial: Any) -> Any:
        """Trains and evaluates with the values of a trial; returns the objective."""
        import optuna

        self.objective = None
        try:
            self.train(trial=trial)  # type: ignore[attr-defined]
            if self.objective is None:  # no evaluation during training
                self.objective = self.compute_objective(self.evaluate())  # type: ignore[attr-defined]
        except optuna.TrialPruned:
            self._release()
            raise
        self._release()
        return self.objective

    def _release(self) -> None:
        self.accelerator.start_over()
        self.model = self.model_wrapped = self.optimizer = self.lr_scheduler = None

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """As in transformers, but a trial that the first rank prunes ends on all ranks."""
        if self.hp_search_backend is None or trial is None or self.accelerator.run.world.size == 1:
            super()._report_to_hp_search(trial, step, metrics)  # type: ignore[misc]
            return
        import optuna

        self.objective, pruned = self.compute_objective(dict(metrics)), False
        if isinstance(trial, optuna.Trial) and len(trial.study.directions) == 1:
            trial.report(self.objective, step)
            pruned = trial.should_prune()
        if self._from_first(pruned):
            self.callback_handler.on_train_end(self.args, self.state, self.control)  # type: ignore[attr-defined]
            raise optuna.TrialPruned

    def _from_first(self, value: Any) -> Any:
        run = self.accelerator.run
        return run.backend.broadcast_object(value, run.world)


def _best(study: Any) -> BestRun | list[BestRun] | None:
    import optuna

    if not study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE]):
        return None
    if len(study.directions) == 1:
        return BestRun(str(study.best_trial.number), study.best_trial.value, study.best_trial.params)
    return [BestRun(str(trial.number), trial.values, trial.params) for trial in study.best_trials]
