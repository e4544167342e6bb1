"""Loads this rank's shards into a model that was built without memory for its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from neuron_accel.engine.plan.mesh import Mesh
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.engine.sharding.parameters import ParameterMap
from neuron_accel.errors import ConfigurationError, LayoutError, UsageError
from neuron_accel.lazy.mapped import Reader
from neuron_accel.lazy.recording import Recording, View
from neuron_accel.lazy.replay import replay, tensor_of
from neuron_accel.lazy.slices import Boxes

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.engine.runtime.run import PreparedModel, Run


MARK = "_neuron_accel_recording"
"""Name of the attribute in which a module keeps the recordings of its parameters and buffers, by their names."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """Statistics of loading a model.

    Args:
        bytes_read: number of bytes read from files.
        straight: number of tensors whose slices were read directly from files.
        computed: number of tensors that were first computed in full, one at a time.
    """

    bytes_read: int = 0
    straight: int = 0
    computed: int = 0


@dataclass(frozen=True)
class _Target:
    view: View
    layout: Layout
    coordinates: Mapping[str, int]
    out: torch.Tensor


@dataclass
class Origin:
    """The recordings from which the tensors of a model without memory can be computed.

    Args:
        recordings: the recordings in which the model was built.
        views: the recording and the view of each parameter and buffer, by name.
    """

    recordings: list[Recording] = field(default_factory=list)
    views: dict[str, tuple[Recording, View]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Origin | None:
        """Returns the origin of a model, or None if all its tensors have memory. Must be called before the model is
        rewritten."""
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        lazy = {name: tensor for name, tensor in named if tensor.device.type == "meta"}
        if not lazy:
            return None
        origin = cls()
        for name, tensor in lazy.items():
            owner, _, attribute = name.rpartition(".")
            mark: tuple[Recording, View] | None = vars(model.get_submodule(owner)).get(MARK, {}).get(attribute)
            if mark is None:
                continue
            recording, view = mark
            if recording.knows(tensor):
                view = recording.view(tensor)
            if view.size == tuple(tensor.shape):  # the dtype may have been changed since
                origin.views[name] = (recording, view)
                if not any(recording is known for known in origin.recordings):
                    origin.recordings.append(recording)
        return origin

    def check_degrees(self, mesh: Mesh) -> None:
        """Checks that the mesh has the degrees for which the model was built.

        Raises:
            ConfigurationError: if it has not.
        """
        for recording in self.recordings:
            for kind, degree in recording.degrees.items():
                axes = mesh.names(kind)
                if mesh.size(axes) != degree:
                    along = " x ".join(map(repr, axes)) or f"an axis of kind {kind.value!r}"
                    raise ConfigurationError(
                        f"The model was built for {degree} ranks along {along}, and there are {mesh.size(axes)}.",
                        where="lazy_load_for_parallelism",
                        why="the arguments of lazy_load_for_parallelism differ from those of the plugins",
                        fix="remove the arguments: the layout of a model is computed in `prepare`",
                    )

    def fill(
        self, model: nn.Module, parameters: ParameterMap, coordinates: Mapping[str, int], *, values: bool = True
    ) -> Filled:
        """Allocates all parameters and buffers of ``model`` that have no memory, and loads this rank's shards into
        them.

        Args:
            model: the model, after it was rewritten.
            parameters: the layouts of its parameters; updated to the new tensors.
            coordinates: this rank's position in the mesh.
            values: whether parameters are loaded; False if they are loaded from a checkpoint afterwards.

        Returns:
            Statistics of loading.

        Raises:
            UsageError: for a tensor that was not recorded.
            CheckpointError: if a file cannot be read, or has changed.
        """
        targets: dict[int, tuple[Recording, list[_Target]]] = {id(r): (r, []) for r in self.recordings}

        def fresh(name: str, known: Iterable[str], layout: Layout, at: Mapping[str, int], wanted: bool) -> torch.Tensor:
            dtype = getattr(torch, layout.dtype)
            make = torch.zeros if layout.padded else torch.empty
            out = make(layout.local_shape, dtype=dtype)
            if wanted:
                recording, view = self._found(name, known)
                if view.size != layout.shape:
                    raise LayoutError(f"{name!r} was built with shape {view.size}, and its layout has {layout.shape}.")
                targets[id(recording)][1].append(_Target(view, layout, at, out))
            return out

        for record in parameters:
            current = record.current
            if current is None or current.device.type != "meta":
                continue
            layout = Layout(shape=record.layout.shape, dtype=_dtype(current), cuts=record.layout.cuts)
            filled = nn.Parameter(fresh(record.fqn, record.names, layout, coordinates, values), current.requires_grad)
            for name in _present(model, record.names):
                _put(model, name, filled)
        self._fill_plain(model, fresh)
        parameters.follow(model)
        done = Filled()
        for recording, found in targets.values():
            done = _fill(recording, found, done)
        for module in model.modules():
            vars(module).pop(MARK, None)
        return done

    def _fill_plain(self, model: nn.Module, fresh) -> None:
        """Allocates and loads buffers, and tensors that are plain attributes of modules."""
        done: dict[torch.Tensor, torch.Tensor] = {}
        for name, buffer in list(model.named_buffers(remove_duplicate=False)):
            if buffer.device.type != "meta":
                continue
            if buffer not in done:
                done[buffer] = fresh(name, (name,), Layout.of(buffer), {}, True)
            _put(model, name, done[buffer])
        for prefix, module in model.named_modules():
            for attribute, value in list(vars(module).items()):
                if not isinstance(value, torch.Tensor) or value.device.type != "meta":
                    continue
                if value not in done:
                    name = f"{prefix}.{attribute}"
                    known = next((recording for recording in self.recordings if recording.knows(value)), None)
                    if known is not None:
                        self.views.setdefault(name, (known, known.view(value)))
                    done[value] = fresh(name, (name,), Layout.of(value), {}, True)
                setattr(module, attribute, done[value])

    def _found(self, name: str, known: Iterable[str]) -> tuple[Recording, View]:
        found = next((self.views[alias] for alias in known if alias in self.views), None)
        if found is None:
            raise UsageError(
                f"{name!r} has no memory, and its values are unknown.",
                why="it was not created inside lazy_load_for_parallelism, or was replaced afterwards",
                fix="build the full model inside the context, and change it there or after `prepare`; a model built on "
                "the meta device in another way needs checkpoint_dir",
            )
        return found


def _fill(recording: Recording, targets: list[_Target], before: Filled) -> Filled:
    later: dict[int, list[_Target]] = {}
    with Reader() as reader:
        boxes = Boxes(recording, reader)
        for target in targets:
            if boxes.possible(target.view):
                for piece in target.layout.pieces(target.coordinates):
                    box = tuple((part.start, part.stop) for part in piece.global_slices)
                    boxes.read(target.view, box, target.out[piece.local_slices or ...])
            else:
                later.setdefault(target.view.memory, []).append(target)

        def deliver(memory: int, storage: torch.UntypedStorage) -> None:
            for target in later[memory]:
                full = tensor_of(target.view, storage)
                for piece in target.layout.pieces(target.coordinates):
                    target.out[piece.local_slices or ...] = full[piece.global_slices or ...]

        replay(recording, set(later), deliver, reader)
        computed = sum(len(group) for group in later.values())
        return Filled(
            bytes_read=before.bytes_read + reader.bytes_read,
            straight=before.straight + len(targets) - computed,
            computed=before.computed + computed,
        )


def materialize(model: nn.Module) -> Filled:
    """Loads the full weights of a model that was built inside ``lazy_load_for_parallelism``, in this process.

    Raises:
        UsageError: if the model has tensors without memory that were not created there.
        CheckpointError: if its files cannot be read, or have changed.
    """
    origin = Origin.of(model)
    if origin is None:
        return Filled()
    return origin.fill(model, ParameterMap(model), {})


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _present(model: nn.Module, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        owner, _, attribute = name.rpartition(".")
        try:
            if attribute in model.get_submodule(owner)._parameters:
                yield name
        except AttributeError:  # the module is on another rank
            continue


def _put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, tensor)


# ---- Lazy loading in a run of several ranks --------------------------------------------------------------------------
def origin_of(model: nn.Module, run: Run) -> Origin | None:
    """Returns the origin of a model, or None if all its tensors have memory. Must be called before the model is
    rewritten.

    Raises:
        ConfigurationError: if the model was built for other degrees than those of the mesh.
    """
    origin = Origin.of(model)
    if origin is not None:
        origin.check_degrees(run.mesh)
    return origin


def give_memory(origin: Origin, record: PreparedModel, run: Run) -> Filled:
    """Loads this rank's shards into a rewritten model, or only allocates them if a plugin names a checkpoint that is
    loaded next. Collective over all ranks.

    Returns:
        Statistics of loading.

    Raises:
        UsageError: on every rank, for a tensor that was not recorded.
        CheckpointError: on every rank, if a file cannot be read, or has changed.
    """
    loaded_next = len(run.models) == 1 and any(p.initial_weights() is not None for p in run.plan.plugins)
    _share_states(origin, run)
    return agreed(run, lambda: origin.fill(record.module, record.parameters, run.coordinates, values=not loaded_next))


def _share_states(origin: Origin, run: Run) -> None:
    """Broadcasts the states of rank 0's generator, so that all ranks compute the weights that rank 0 would have."""
    if run.world.size == 1:
        return
    for recording in origin.recordings:
        states = run.backend.broadcast_object([state.numpy().tobytes() for state in recording.states], run.world)
        recording.states[:] = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]
