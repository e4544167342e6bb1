"""A search over hyperparameters on several ranks: one of them asks for the next trial, and all train it."""

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
    HPSearchBackend.RAY: "Ray starts each trial in a process of its own, which no other rank is connected to",
    HPSearchBackend.WANDB: "each process has an agent of W&B, which would ask for a trial of its own",
}
_ONE_AT_A_TIME = {
    "n_jobs": "trials that run at the same time would exchange values with each other",
    "catch": "a rank that goes on to the next trial would leave the others in the one that failed",
}


class Searching:
    """The methods of the Trainer for hyperparameter searches."""

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
        """As in transformers. On several ranks with Optuna: the first rank keeps the study, all train each trial, leave
        it early where the study prunes it, and get the result. Every process calls it.

        Args:
            hp_space: suggests every hyperparameter; one that ``model_init`` suggests would be known to one rank only.
            options: of ``optuna.create_study``, and ``timeout`` (seconds after which no trial begins) and
                ``gc_after_trial``.

        Raises:
            UsageError: on several ranks, for another library, for ``n_jobs`` and for ``catch``.
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
            raise RuntimeError("A search over hyperparameters needs a model_init, which builds a new model for each.")
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
                f"A search over hyperparameters by {library.value!r} is not possible on {ranks} ranks.",
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
            raise UsageError("No trial was completed.", why="time was up before, or the study pruned all of them")
        return best

    def _lead(self, trial: Any) -> Any:
        self.hp_space(trial)
        self._from_first((trial.params, trial.number))
        return self._try(trial)

    def _try(self, trial: Any) -> Any:
        """Trains and evaluates with a trial's values; returns what that reached."""
        import optuna

        self.objective = None
        try:
            self.train(trial=trial)  # type: ignore[attr-defined]
            if self.objective is None:  # nothing was evaluated in between
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
        """As in transformers, but a trial that the first rank prunes ends on all of them."""
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
