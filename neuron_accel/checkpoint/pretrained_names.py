"""Names in folders of transformers that differ from the model's.

The folder of a model without a head lacks the prefix that its parameters have inside one with a head, and the other way
round; and older folders hold tables that models now compute. transformers settles both when it loads; so do we.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from neuron_accel.checkpoint.index import Index, model_collection

if TYPE_CHECKING:
    from neuron_accel.engine.run import PreparedModel


_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.attn\.masked_bias$")
"""Tables that every family computes now, declared or not."""


def named_as(index: Index, model: PreparedModel) -> Index:
    """The tensors of a folder under the names of ``model``, without those that its class declares it has no use for."""
    module = model.original
    known = {name for record in model.parameters for name in record.names} | set(module.state_dict(keep_vars=True))
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    declared = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = [re.compile(pattern) for pattern in (*declared, *_COMPUTED)]
    tensors = {}
    for name, tensor in index.collections[model_collection(0)].items():
        candidates = (name, prefix + name, name.removeprefix(prefix))
        found = next((candidate for candidate in candidates if candidate in known), None)
        if found is not None:
            tensor.name = found
            tensors[found] = tensor
        elif not any(pattern.search(name) for pattern in ignored):
            tensors[name] = tensor
    return Index({model_collection(0): tensors})
