"""Another program generates while TRL's `GRPOTrainer` trains.

A server is an object, on the main process, with two functions, around vLLM's engine for example:

- `load_weights(weights)` takes an iterator of names and tensors;
- `generate(prompts, max_tokens)` takes and returns lists of token ids, a completion for each prompt. A completion ends
  with the token that ends texts, or after `max_tokens`.
"""

from __future__ import annotations

import itertools
from typing import Any

from hand_over import stream_weights


class Rollouts:
    """The `rollout_func` of the trainer. The server gets all prompts of a step at once, after the weights of the step.

    Args:
        server: None on ranks that are not the main process.
    """

    def __init__(self, server: Any) -> None:
        self._server, self._step = server, -1

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        accelerator, tokenizer = trainer.accelerator, trainer.processing_class
        run, is_main = accelerator.run, accelerator.is_main_process
        if self._step != trainer.state.global_step:
            self._step, weights = trainer.state.global_step, stream_weights(accelerator, trainer.model_wrapped)
            if is_main:
                self._server.load_weights(weights)
            for _ in weights:  # the other ranks take part in gathering
                pass
        if isinstance(prompts[0], str):
            ids = tokenizer(prompts)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
        of_ranks = run.backend.all_gather_object(ids, run.group(*run.mesh.data_axes))
        made = None
        if is_main:
            every = [*itertools.chain.from_iterable(of_ranks)]
            completions = iter(self._server.generate(every, trainer.args.max_completion_length))
            made = [[list(next(completions)) for _ in each] for each in of_ranks]
        made = run.backend.broadcast_object(made, run.world, 0)
        own = made[run.mesh.position(run.backend.rank, run.mesh.data_axes)]  # tensor-parallel ranks have the same
        return {"prompt_ids": ids, "completion_ids": own, "logprobs": None}
