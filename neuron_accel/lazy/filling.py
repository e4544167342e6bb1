# SPDX-License-Identifier: Apache-2.0
"""Loads this rank's shards into a model that was built without memory for its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from neuron_accel.engine.plan.mesh import Mesh
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.engine.sharding.parameters import ParameterMap, ParameterRecord
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
class Target:
    """Elements of this rank's shard of a tensor: the range of the flattened shard that begins at ``start`` and is as
    long as ``out``, 1-D, which gets them."""

    view: View
    layout: Layout
    coordinates: Mapping[str, int]
    out: torch.Tensor
    start: int = 0

    def pieces(self) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """The boxes of the unsharded tensor that it consists of, each with its part of ``out``."""
        for box, begin in flat_boxes(self.layout.local_shape, self.start, self.start + self.out.numel()):
            sizes = [part.stop - part.start for part in box]
            out = self.out.narrow(0, begin - self.start, math.prod(sizes)).view(sizes)
            for piece in self.layout.pieces(self.coordinates):
                common = [
                    slice(max(a.start, b.start), min(a.stop, b.stop))
                    for a, b in zip(box, piece.local_slices, strict=True)
                ]
                if any(part.start >= part.stop for part in common):
                    continue
                moved = [g.start - p.start for g, p in zip(piece.global_slices, piece.local_slices, strict=True)]
                place = tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(common, box, strict=True))
                yield (
                    tuple(slice(c.start + by, c.stop + by) for c, by in zip(common, moved, strict=True)),
                    out[place or ...],
                )


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Yields the boxes of a tensor of ``shape`` that the elements ``start`` to ``stop`` of it, flattened, consist of,
    at most two for each dim and one more, each with the position of its first element."""
    if start >= stop:
        return
    inner = math.prod(shape[1:])
    if not shape or (start % inner == 0 and stop % inner == 0):
        first = (slice(start // inner, stop // inner),) if shape else ()
        yield (*first, *(slice(0, size) for size in shape[1:])), start
        return
    rows = -(-start // inner), stop // inner
    if rows[0] > rows[1]:  # within one row
        yield from _in_row(shape, rows[1], start, stop)
        return
    yield from _in_row(shape, rows[0] - 1, start, rows[0] * inner)
    yield from flat_boxes(shape, rows[0] * inner, rows[1] * inner)
    yield from _in_row(shape, rows[1], rows[1] * inner, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[tuple[slice, ...], int]]:
    begin = row * math.prod(shape[1:])
    for box, position in flat_boxes(shape[1:], start - begin, stop - begin):
        yield (slice(row, row + 1), *box), position + begin


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
        self,
        model: nn.Module,
        parameters: ParameterMap,
        coordinates: Mapping[str, int],
        *,
        values: bool = True,
        placeholder: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Filled:
        """Allocates all parameters and buffers of ``model`` that have no memory, and loads this rank's shards into
        them.

        Args:
            model: the model, after it was rewritten.
            parameters: the layouts of its parameters; updated to the new tensors.
            coordinates: this rank's position in the mesh.
            values: whether parameters are loaded; False if they are loaded from a checkpoint afterwards.
            placeholder: returns what parameters of floating-point numbers are until :meth:`read`, of the shape and
                dtype of its argument on the meta device; None: they are loaded now.

        Returns:
            Statistics of loading.

        Raises:
            UsageError: for a tensor that was not recorded.
            CheckpointError: if a file cannot be read, or has changed.
        """
        targets: dict[int, tuple[Recording, list[Target]]] = {id(r): (r, []) for r in self.recordings}

        def fresh(name: str, known: Iterable[str], layout: Layout, at: Mapping[str, int], wanted: bool) -> torch.Tensor:
            dtype = getattr(torch, layout.dtype)
            make = torch.zeros if layout.padded else torch.empty
            out = make(layout.local_shape, dtype=dtype)
            if wanted:
                recording, view = self._found(name, known)
                if view.size != layout.shape:
                    raise LayoutError(f"{name!r} was built with shape {view.size}, and its layout has {layout.shape}.")
                targets[id(recording)][1].append(Target(view, layout, at, out.view(-1)))
            return out

        for record in parameters:
            current = record.current
            if current is None or current.device.type != "meta":
                continue
            layout = _layout(record)
            if placeholder is not None and current.is_floating_point():
                self._found(record.fqn, record.names)
                record.is_unread, value = True, placeholder(current)
            else:
                value = fresh(record.fqn, record.names, layout, coordinates, values)
            filled = nn.Parameter(value, current.requires_grad)
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

    def read(
        self, parameters: ParameterMap, coordinates: Mapping[str, int], wanted: Mapping[str, tuple[int, torch.Tensor]]
    ) -> Filled:
        """Reads elements of parameters that :meth:`fill` has left without values; for arguments and errors see
        :meth:`PreparedModel.read_weights`.

        Returns:
            Statistics of loading.
        """
        targets: dict[int, tuple[Recording, list[Target]]] = {id(r): (r, []) for r in self.recordings}
        for name, (start, out) in wanted.items():
            record = parameters[name]
            recording, view = self._found(record.fqn, record.names)
            if out.numel():
                targets[id(recording)][1].append(Target(view, _layout(record), coordinates, out, start))
        done = Filled()
        for recording, found in targets.values():
            done = _fill(recording, found, done)
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


def _fill(recording: Recording, targets: list[Target], before: Filled) -> Filled:
    with Reader() as reader:
        computed = fill(recording, targets, Boxes(recording, reader))
        return Filled(
            bytes_read=before.bytes_read + reader.bytes_read,
            straight=before.straight + len(targets) - computed,
            computed=before.computed + computed,
        )


def fill(recording: Recording, targets: Sequence[Target], boxes: Boxes) -> int:
    """Reads the elements of ``targets``; returns how many of them consist of more than slices of what is stored, so
    that the full tensor was built temporarily."""
    later: dict[int, list[Target]] = {}
    for target in targets:
        if boxes.possible(target.view):
            for box, out in target.pieces():
                boxes.read(target.view, tuple((part.start, part.stop) for part in box), out)
        else:
            later.setdefault(target.view.memory, []).append(target)

    def deliver(memory: int, storage: torch.UntypedStorage) -> None:
        for target in later[memory]:
            full = tensor_of(target.view, storage)
            for box, out in target.pieces():
                out.copy_(full[box or ...])

    replay(recording, set(later), deliver, boxes.reader)
    return sum(len(group) for group in later.values())


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


def _layout(record: ParameterRecord) -> Layout:
    """The layout of a parameter in the dtype that it has now."""
    assert record.current is not None  # this rank holds a shard of it
    return Layout(shape=record.layout.shape, dtype=_dtype(record.current), cuts=record.layout.cuts)


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


def give_memory(origin: Origin, record: PreparedModel, run: Run, *, later: bool = False) -> Filled:
    """Loads this rank's shards into a rewritten model, or only allocates them if a plugin names a checkpoint that is
    loaded next. Collective over all ranks.

    Args:
        origin: of the model.
        record: of the model.
        run: the run.
        later: whether parameters stay without memory until :meth:`PreparedModel.read_weights` and :func:`read_rest`.

    Returns:
        Statistics of loading.

    Raises:
        UsageError: on every rank, for a tensor that was not recorded.
        CheckpointError: on every rank, if a file cannot be read, or has changed.
    """
    loaded_next = len(run.models) == 1 and bool(record.initial_weights)
    _share_states(origin, run)
    placeholder = partial(_placeholder, run=run) if later and not loaded_next else None

    def fill() -> Filled:
        return origin.fill(
            record.module, record.parameters, run.coordinates, values=not loaded_next, placeholder=placeholder
        )

    filled = agreed(run, fill)
    if placeholder is not None:

        def read(wanted: Mapping[str, tuple[int, torch.Tensor]]) -> None:
            agreed(run, lambda: origin.read(record.parameters, run.coordinates, wanted))

        record.reader = read
    return filled


def _placeholder(like: torch.Tensor, run: Run) -> torch.Tensor:
    """A tensor on the run's device without memory for values; where the device has none, NaN."""
    if run.backend.is_lazy:
        return run.backend.placeholder(like)
    return torch.full((), float("nan"), dtype=like.dtype, device=run.device).expand(like.shape)


def read_rest(record: PreparedModel, run: Run) -> None:
    """Loads the parameters of a model that :meth:`PreparedModel.read_weights` was not called for. Collective over all
    ranks.

    Raises:
        CheckpointError: on every rank, if a file cannot be read, or has changed.
    """
    if record.reader is None:
        return
    unread = [each for each in record.parameters if each.is_unread and each.current is not None]
    values = {}
    for each in unread:
        make = torch.zeros if each.layout.padded else torch.empty
        values[each.fqn] = make(each.layout.local_shape, dtype=each.current.dtype)  # type: ignore[union-attr]
    record.read_weights({name: (0, value.view(-1)) for name, value in values.items()})
    for each in unread:
        each.current.data = values.pop(each.fqn).to(each.current.device)  # type: ignore[union-attr]
    record.reader = None


def _share_states(origin: Origin, run: Run) -> None:
    """Broadcasts the states of rank 0's generator, so that all ranks compute the weights that rank 0 would have."""
    if run.world.size == 1:
        return
    for recording in origin.recordings:
        states = run.backend.broadcast_object([state.numpy().tobytes() for state in recording.states], run.world)
        recording.states[:] = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]
