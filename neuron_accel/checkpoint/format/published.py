# SPDX-License-Identifier: Apache-2.0
"""Weights in the form in which models are published, where it differs from that in memory.

transformers holds the experts of a mixture stacked, while published files have a weight for each expert. It converts
when it loads and when it saves. Here its conversions are recorded on tensors without memory; a slice of a converted
tensor is then read from slices of the stored ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.ranges import FileRanges, read_box
from neuron_accel.checkpoint.format.source import SourceTensor, words
from neuron_accel.engine.sharding.layout import Layout

if TYPE_CHECKING:
    import numpy as np
    import torch

    from neuron_accel.lazy.mapped import Box
    from neuron_accel.lazy.recording import Recording, View
    from neuron_accel.lazy.slices import Boxes


@dataclass(frozen=True, eq=False)
class StoredSource:
    """A stored tensor as a source of a recording."""

    stored: SourceTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.layout.shape

    @property
    def tensor(self) -> torch.Tensor:
        """A tensor of its shape and dtype, without memory."""
        import torch

        return torch.empty(self.shape, dtype=getattr(torch, self.stored.layout.dtype), device="meta")


@dataclass(frozen=True)
class StoredReader:
    """Reads slices of stored tensors, for :class:`~neuron_accel.lazy.slices.Boxes`."""

    files: FileRanges

    def read(self, source: StoredSource, box: Box, out: torch.Tensor) -> None:
        import numpy as np
        import torch

        stored = source.stored
        full = Layout(shape=stored.layout.shape, dtype=stored.layout.dtype)
        found = np.empty([stop - start for start, stop in box] or [1], dtype=words(stored.item_size))

        def read(start: int, into: np.ndarray) -> None:
            stored.read(self.files, full, {}, into, start, start + into.size)

        read_box(read, source.shape or (1,), [slice(*part) for part in box] or [slice(0, 1)], found)
        values = torch.frombuffer(found, dtype=getattr(torch, stored.layout.dtype))
        out.copy_(values.view(out.shape))


@dataclass(kw_only=True)
class ConvertedTensor(SourceTensor):
    """A tensor that transformers makes of stored ones.

    Args:
        recording: of the conversions.
        view: the tensor in the recording.
        boxes: of the recording.
        mapped: whether the sources of the recording are in mapped files, as those of lazy loading are.
    """

    recording: Recording
    view: View
    boxes: Boxes
    mapped: bool = False

    def check(self) -> None:
        """The stored tensors have been checked."""

    def extents(self) -> None:
        return None

    def read(
        self,
        files: FileRanges,
        layout: Layout,
        at: Mapping[str, int],
        out: np.ndarray,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        import torch

        from neuron_accel.lazy.filling import Target, fill
        from neuron_accel.lazy.mapped import Reader

        if not out.size:
            return
        if layout.padded:
            out[:] = 0
        target = Target(self.view, layout, at, torch.frombuffer(out, dtype=getattr(torch, self.layout.dtype)), start)
        if self.mapped:
            with Reader() as reader:
                fill(self.recording, [target], self.boxes.reading(reader))
        else:
            fill(self.recording, [target], self.boxes.reading(StoredReader(files)))


def as_published(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns weights of a model of transformers as its ``save_pretrained`` would write them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state)


def published(tensors: Sequence[SourceTensor], config: bytes) -> Sequence[SourceTensor]:
    """Returns stored weights as ``save_pretrained`` of their model would write them. Those of another model than that
    of the configuration, as with adapters, stay as they are.

    Args:
        tensors: all weights of the model.
        config: the model's ``config.json``.

    Raises:
        Exception: of transformers, or if it is not installed.
    """
    model = model_of(config, {tensor.name for tensor in tensors})
    if model is None:
        return tensors
    from neuron_accel.lazy.recording import Recorder, Recording
    from neuron_accel.lazy.slices import Boxes

    recording = Recording()
    state, unchanged = {}, {}
    for stored in tensors:
        source: Any = StoredSource(stored)
        tensor = state[stored.name] = recording.add_source(source, source.tensor.dtype)
        unchanged[recording.view(tensor)] = stored
    with Recorder(recording):
        made = as_published(model, state)
    boxes = Boxes(recording, None)
    found: list[SourceTensor] = []
    for name, tensor in made.items():
        view = recording.view(tensor)
        if view in unchanged:
            found.append(dataclasses.replace(unchanged[view], name=name))
        else:
            layout = Layout(shape=view.size, dtype=str(view.dtype).removeprefix("torch."))
            found.append(ConvertedTensor(name=name, layout=layout, recording=recording, view=view, boxes=boxes))
    return sorted(found, key=lambda tensor: tensor.name)


def model_of(config: bytes, names: Set[str]) -> Any:
    """Returns the model of transformers, without memory, that a configuration names; None if it names none, or one that
    has not all weights of these names."""
    values = json.loads(config)
    named = values.get("architectures")
    if not named:
        return None
    import torch
    import transformers

    kind: Any = getattr(transformers, named[0], None)
    if getattr(kind, "config_class", None) is None:
        return None
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(values))
    return model if names <= model.state_dict().keys() else None
