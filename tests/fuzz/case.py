"""A case: a training program and a composition, as data. Drawn from a seed, written as Python."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.guests import guards

TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}
GUARDS = guards({"desync_guard": {"timeout_s": 60.0}}, "recompile_guard", {"replica_check": {"every": 1}})


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Ranks and what they are configured with.

    Args:
        ranks: number of processes.
        plugins: as in a configuration.
        holders: ranks that hold one copy of the model together.
    """

    ranks: int
    plugins: tuple[Any, ...] = ()
    holders: int = 1

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.holders


COMPOSITIONS = {
    "one": Composition(ranks=1),
    "dp2": Composition(ranks=2),
    "dp3": Composition(ranks=3),
    "dp4": Composition(ranks=4),
    "dp2, small buckets": Composition(ranks=2, plugins=({"data_parallel": {"bucket_cap_mb": 0.0005}},)),
    "dp2 + guards": Composition(ranks=2, plugins=tuple(GUARDS)),
    "zero1 x 1": Composition(ranks=1, plugins=("zero1",)),
    "zero1 x 2": Composition(ranks=2, plugins=("zero1",)),
    "zero1 x 3": Composition(ranks=3, plugins=("zero1",)),
    "zero1 x 4": Composition(ranks=4, plugins=("zero1",)),
    "zero1 x 2, small buckets": Composition(ranks=2, plugins=({"zero1": {"bucket_cap_mb": 0.0005}},)),
    "zero1 x 2, accumulating shards": Composition(ranks=2, plugins=({"zero1": {"use_grad_acc_hook": True}},)),
    "zero1 x 2, parameters": Composition(ranks=2, plugins=({"zero1": {"partition": "parameters"}},)),
    "zero1 x 3, parameters": Composition(ranks=3, plugins=({"zero1": {"partition": "parameters"}},)),
    "zero1 x 2 + guards": Composition(ranks=2, plugins=("zero1", *GUARDS)),
    "tp2": Composition(ranks=2, plugins=({"model_parallelism": TP2},), holders=2),
    "tp2 + sp": Composition(ranks=2, plugins=({"model_parallelism": TP2}, "sequence_parallel"), holders=2),
    "tp2 + sp, overlapping gathers": Composition(
        ranks=2, plugins=({"model_parallelism": TP2}, {"sequence_parallel": {"overlap_gather": True}}), holders=2
    ),
    "tp2 x dp2": Composition(ranks=4, plugins=({"model_parallelism": TP2},), holders=2),
    "tp2 x dp2 + zero1": Composition(ranks=4, plugins=({"model_parallelism": TP2}, "zero1"), holders=2),
    "tp2 x dp2 + sp + zero1": Composition(
        ranks=4, plugins=({"model_parallelism": TP2}, "sequence_parallel", "zero1"), holders=2
    ),
    "pp2": Composition(ranks=2, plugins=({"model_parallelism": PP2},), holders=2),
    "pp2 x dp2 + zero1": Composition(ranks=4, plugins=({"model_parallelism": PP2}, "zero1"), holders=2),
    "tp2 x pp2": Composition(ranks=4, plugins=({"model_parallelism": {**TP2, **PP2}},), holders=4),
}
FULLY = {
    "zero1 x 2": Composition(ranks=2, plugins=("fully_sharded",)),
    "zero1 x 3": Composition(ranks=3, plugins=("fully_sharded",)),
    "tp2 x dp2 + zero1": Composition(ranks=4, plugins=({"model_parallelism": TP2}, "fully_sharded"), holders=2),
    "pp2 x dp2 + zero1": Composition(ranks=4, plugins=({"model_parallelism": PP2}, "fully_sharded"), holders=2),
}
"""What is drawn in place of some compositions, since it came later."""
DRAWN = tuple(COMPOSITIONS)
COMPOSITIONS |= {name.replace("zero1", "fully sharded"): composition for name, composition in FULLY.items()}
ON_XLA = ("dp2", "zero1 x 2", "tp2", "tp2 + sp", "tp2 x dp2 + zero1", "pp2")
WEIGHTS = {"one": 0.3, "zero1 x 1": 0.4, "dp4": 0.5, "dp3": 0.7, "zero1 x 2": 2, "dp2": 2, "tp2 x pp2": 0.5}

TOKENS = ("gru", "lstm", "tied-lm", "encoder", "blocks", "blocks-tied")
TEXT = ("llama", "llama-tied", "gpt2", "gpt2-untied")
VECTORS = ("mlp", "mlp-layer", "mlp-batch", "shared", "sometimes", "counting", "odd", "complex")
PARAMETRIZED = ("weight_norm", "spectral_norm", "pruned")
IMAGES = ("conv", "conv-batch", "conv-group")
OWN = (*VECTORS[:-1], *PARAMETRIZED, *IMAGES, *TOKENS)  # complex parameters are drawn at the end
SHARDED = ("blocks", "blocks-tied", *TEXT)
RECOMPUTING = ("mlp", "mlp-layer", "conv", "conv-group", "shared", "tied-lm", "encoder", "blocks", *TEXT)
DROPPING = ("mlp", "mlp-layer", "mlp-batch", "conv", "conv-group", "tied-lm", "encoder")

OPTIMIZERS = {
    "SGD": "lr=0.1",
    "SGD momentum": "lr=0.05, momentum=0.9",
    "SGD nesterov": "lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01",
    "SGD maximize": "lr=0.01, maximize=True",
    "AdamW": "lr=0.01, eps=1e-3",
    "AdamW amsgrad": "lr=0.01, eps=1e-3, amsgrad=True",
    "Adam": "lr=0.01, eps=1e-3, weight_decay=0.01",
    "AdamW fused": "lr=0.01, eps=1e-3, fused=True",
    "SGD foreach": "lr=0.05, momentum=0.9, foreach=True",
    "AdamW tensor": "lr=torch.tensor(0.01), eps=1e-3",
    "NAdam": "lr=0.01, eps=1e-3",
    "RAdam": "lr=0.01, eps=1e-3",
    "Adamax": "lr=0.01, eps=1e-3",
    "Adagrad": "lr=0.05, eps=1e-3",
    "Adadelta": "lr=0.5, eps=1e-3",
    "RMSprop": "lr=0.01, eps=1e-3, momentum=0.5",
    "ASGD": "lr=0.05",
    "Rprop": "lr=0.01",
    "Adafactor": "lr=0.05",
}
COMMON = ("SGD", "SGD momentum", "AdamW", "Adam", "AdamW")
SCHEDULERS = {
    "LambdaLR": "LambdaLR({o}, lambda n: 1 / (1 + 0.1 * n))",
    "MultiplicativeLR": "MultiplicativeLR({o}, lambda n: 0.95)",
    "StepLR": "StepLR({o}, 2, 0.7)",
    "MultiStepLR": "MultiStepLR({o}, [1, 3, 6], 0.6)",
    "ConstantLR": "ConstantLR({o}, 0.5, 3)",
    "LinearLR": "LinearLR({o}, 0.2, 1.0, 6)",
    "ExponentialLR": "ExponentialLR({o}, 0.9)",
    "PolynomialLR": "PolynomialLR({o}, 60)",
    "CosineAnnealingLR": "CosineAnnealingLR({o}, 20)",
    "CosineAnnealingWarmRestarts": "CosineAnnealingWarmRestarts({o}, 5)",
    "CyclicLR": "CyclicLR({o}, 0.005, 0.02, 3, cycle_momentum=False)",
    "OneCycleLR": "OneCycleLR({o}, 0.02, total_steps=400, cycle_momentum=False)",
    "OneCycleLR momentum": "OneCycleLR({o}, 0.02, total_steps=400)",
    "SWALR": "torch.optim.swa_utils.SWALR({o}, swa_lr=0.005, anneal_epochs=4)",
    "SequentialLR": "SequentialLR({o}, [LinearLR({o}, 0.2, 1.0, 3), ExponentialLR({o}, 0.9)], [3])",
    "ChainedScheduler": "ChainedScheduler([ConstantLR({o}, 0.5, 4), ExponentialLR({o}, 0.9)], {o})",
    "ReduceLROnPlateau": "ReduceLROnPlateau({o}, patience=0, threshold=0.5, factor=0.7)",
}
NEEDS_MOMENTUM = ("OneCycleLR momentum",)
LOADERS = ("map", "map", "shuffled", "sampler", "batch sampler", "stream", "tensors", "collate", "dispatched", "split")


EDITS = {
    "in place": "p.grad.mul_(0.5)",
    "view": "p.grad.view(-1)[: p.numel() // 2] = 0.0",
    "rows": "p.grad[:1] = 0.0",
    "data": "p.grad.data.clamp_(-0.01, 0.01)",
    "detached": "p.grad.detach().mul_(0.5)",
    "numpy": "p.grad.numpy()[...] *= 0.5",
    "out": "torch.mul(p.grad, 0.5, out=p.grad)",
    "assigned": "p.grad = p.grad * 0.5",
    "assigned data": "p.grad.data = p.grad.data * 0.5",
    "copied": "p.grad.copy_(p.grad * 0.5)",
    "dropped": "p.grad = None if p.ndim < 2 else p.grad",
    "foreach": "torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)",
    "groups": "torch._foreach_mul_(parts.gradients(optimizer), 0.5)",
}
"""What loops do to the gradient of a parameter ``p``, or to those of a ``model`` or an ``optimizer``."""
WRITES = {
    "in place": "p.mul_(0.9)",
    "view": "p.view(-1)[: p.numel() // 2] = 0.0",
    "rows": "p[:1] = 0.0",
    "data": "p.data.mul_(0.9)",
    "assigned data": "p.data = p.data * 0.9",
    "detached": "p.detach().clamp_(-0.05, 0.05)",
    "numpy": "p.detach().numpy()[...] *= 0.9",
    "out": "torch.mul(p, 0.9, out=p)",
    "copied": "p.copy_(p * 0.9)",
    "init": "nn.init.constant_(p, 0.05) if p.ndim < 2 else None",
    "foreach": "torch._foreach_mul_(list(model.parameters()), 0.9)",
    "vector": "parts.as_vector(model, 0.9)",
    "groups": "torch._foreach_mul_([p for group in optimizer.param_groups for p in group['params']], 0.9)",
    "load": "model.load_state_dict(parts.scaled(model.state_dict(), 0.9))",
}
"""What loops do to a parameter ``p``, or to those of a ``model`` or an ``optimizer``."""
BY_PLACE = ("view", "rows")
"""Of these, those that ranks with a shard of a parameter do to other elements than one process does."""
ON_HOST = ("numpy",)
"""Those that need memory on the host."""
LINEAR = tuple(road for road in EDITS if road not in ("data", "dropped"))
"""Edits that mean the same for the gradients of one rank and for their mean."""
WRAPPERS = ("lookahead", "average", "schedule-free", "sam", "sam closure")
AVERAGES = ("average", "schedule-free")
"""Optimizers that are switched to other weights for an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training program under a composition. Every default is the simplest there is, which is where shrinking goes.

    Args:
        seed: of the draw, of the weights and of the data.
        composition: one of ``COMPOSITIONS``.
        backend: ``"gloo"`` or ``"xla"``.
        loop: ``"plain"``, ``"closure"``, ``"gan"``, ``"two models"``, ``"two optimizers"`` or ``"teacher"``.
        accumulation: micro-batches for each step; ``by_hand`` with ``no_sync`` instead of ``accumulate``.
        loss_inside: whether the model computes its loss; ``masked``: as a mean over tokens, given with their number.
        frozen: words in the names of parameters that are frozen when the program begins. They are unfrozen after step
            ``unfreeze_at`` and frozen after step ``freeze_at``; 0: never.
        grouped: parameters in groups; ``add_group``: what is frozen at first joins the optimizer when unfrozen.
        by_hand_at: after this step state dicts are taken, and loaded after the next one.
        save_at: after this step the state is saved, and loaded when the epoch is over.
        samples: in the data; ``size``: of a batch.
        half: mixed precision in fp16. On the CPU it has no effect, as in Accelerate.
        uneven: ranks have different numbers of batches, in ``join_uneven_inputs``. Only what holds after the loop is
            recorded: ranks without data record nothing.
        compiled: with ``"after"`` the prepared model is compiled by ``torch.compile``, with ``"prepare"`` ``prepare``
            compiles it.
        dropout: of which ranks draw the masks that one process draws: data-parallel ranks, and tensor-parallel ones
            outside the layers that are sharded.
        own_masks: dropout that one process cannot draw: inside tensor-parallel layers, with sequence and pipeline
            parallelism (a stage, and a part of a sequence, has random numbers of its own), and on XLA devices. There is
            no reference for it. What is checked: nothing raises, ranks agree about values and replicated weights, and
            everything has the right shape and is finite.
        edit_by: how the loop edits gradients before each step: one of ``EDITS``; ``edit_micro``: after each backward.
        write_by: how it writes weights: one of ``WRITES``; after the second step, or with ``write_early`` before it,
            when there are gradients.
        unread: gradients are not read before a step.
        clip_by: ``"torch"`` clips with ``torch.nn.utils.clip_grad_norm_``, ``"hand"`` with norms that the loop adds up.
        seeds: the loop seeds by ``"rank"`` (``process_index``) or with ``"set_seed"`` (Accelerate's, with
            ``device_specific=True``) before each forward pass, and draws a number.
        auxiliary: a forward hook of the model adds a term to the loss.
        second: another model is prepared, for evaluation, and its outputs are a part of the loss.
        kv_heads: heads of keys and values of ``"llama"`` with four heads; 0: two.
        ema: the loop keeps an average of the weights and after the second step ``"copy"`` puts it into the model by
            ``copy_``, ``"load"`` by ``load_state_dict``.
        wraps: one of ``WRAPPERS``: an optimizer that holds ``optimizer``, or is of another kind than torch's.
    """

    seed: int = 0
    composition: str = "dp2"
    backend: str = "gloo"
    loop: str = "plain"
    model: str = "mlp"
    dtype: str = "float32"
    optimizer: str = "SGD"
    scheduler: str = ""
    scheduler_by_epoch: bool = False
    scheduler_unprepared: bool = False
    accumulation: int = 1
    by_hand: bool = False
    loss_inside: bool = True
    masked: bool = False
    frozen: tuple[str, ...] = ()
    unfreeze_at: int = 0
    freeze_at: int = 0
    unused: bool = False
    grouped: bool = False
    add_group: bool = False
    clip: str = ""
    recompute: bool = False
    dropout: bool = False
    autocast: bool = False
    average: str = ""
    by_hand_at: int = 0
    save_at: int = 0
    loader: str = "map"
    workers: int = 0
    drop_last: bool = False
    samples: int = 24
    size: int = 4
    epochs: int = 1
    prepare_apart: bool = False
    keep_zeros: bool = False
    zero_first: bool = False
    penalty: bool = False
    two_backwards: bool = False
    evaluate: bool = False
    edits: str = ""
    hook: bool = False
    lr_by_hand: bool = False
    half: bool = False
    uneven: bool = False
    compiled: str = ""
    own_masks: bool = False
    edit_by: str = ""
    edit_micro: bool = False
    write_by: str = ""
    write_early: bool = False
    unread: bool = False
    clip_by: str = ""
    seeds: str = ""
    auxiliary: bool = False
    second: bool = False
    kv_heads: int = 0
    ema: str = ""
    wraps: str = ""
    fault: str = ""

    @property
    def mesh(self) -> Composition:
        return COMPOSITIONS[self.composition]

    @property
    def fully(self) -> bool:
        return "fully_sharded" in str(self.mesh)

    @property
    def plugins(self) -> list[Any]:
        """What is configured, with what this model needs and what the program asks of plugins."""
        plugins: list[Any] = []
        for plugin in self.mesh.plugins:
            name, options = (plugin, {}) if isinstance(plugin, str) else next(iter(plugin.items()))
            options = dict(options)
            if name == "model_parallelism" and self.model in ("blocks", "blocks-tied"):
                from tests.fuzz.parts import Blocks

                if options.get("tensor_parallel_size"):
                    options["tensor_parallel_plan"] = dict(Blocks.PLAN)
                if options.get("pipeline_parallel_size"):
                    options["stage_cuts"] = ["blocks.1"]
            if name == "fully_sharded" and self.model.startswith("blocks"):
                options["modules"] = "blocks.*"
            if name == "zero1" and self.clip == "plugin":
                options["max_norm"] = 0.5
            plugins.append({name: options} if options else name)
        if self.own_masks and "replica_check" not in str(plugins):
            plugins.append({"replica_check": {"every": 1}})
        return plugins + ([self.fault] if self.fault else [])

    @property
    def options(self) -> dict[str, Any]:
        """Of the accelerator."""
        options: dict[str, Any] = {}
        if self.accumulation > 1 and not self.by_hand:
            options["gradient_accumulation_steps"] = self.accumulation
        if self.autocast:
            options["mixed_precision"] = "bf16"
        if self.half:
            options["mixed_precision"] = "fp16"
        if self.scheduler_by_epoch:
            options["step_scheduler_with_optimizer"] = False
        loader = {"dispatched": {"dispatch_batches": True}, "split": {"split_batches": True}}.get(self.loader)
        if loader:
            options["dataloader"] = loader
        return options

    @property
    def arguments(self) -> str:
        """Of the accelerator, beside the configuration; as text."""
        if self.half:
            return "{'kwargs_handlers': [GradScalerKwargs(init_scale=1024.0)]}"  # so that no step is skipped
        return "{'dynamo_backend': 'eager'}" if self.compiled == "prepare" else "{}"

    @property
    def precision(self) -> str:
        """The dtype whose rounding is to be expected."""
        if self.autocast or (self.half and self.backend != "gloo"):
            return "bfloat16" if self.autocast else "float16"
        return self.dtype

    def describe(self) -> str:
        """Everything in which the case differs from the simplest one."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name == "seed" or getattr(self, field.name) != field.default
        }
        return "Case(" + ", ".join(f"{name}={value!r}" for name, value in changed.items()) + ")"


def words_of(model: str) -> tuple[str, ...]:
    """Parts of names that a program may freeze."""
    if model in TEXT:
        return ("h.0", "wte") if model.startswith("gpt2") else ("layers.0", "embed_tokens")
    if model in ("blocks", "blocks-tied"):
        return ("blocks.0", "embedding")
    if model in ("gru", "lstm", "encoder"):
        return ("embedding", "head")
    return ("embedding", "second") if model == "tied-lm" else ("first", "second")


def draw(seed: int, *, composition: str | None = None, backend: str = "gloo") -> Case:
    """The case of a seed."""
    r = random.Random(seed)

    def sometimes(p: float) -> bool:
        return r.random() < p

    names = ON_XLA if backend == "xla" else DRAWN
    drawn = r.choices(names, [WEIGHTS.get(name, 1) for name in names])[0]
    name = composition or drawn
    mesh = COMPOSITIONS[name]
    sharded, staged, zero = mesh.holders > 1, "pp2" in name, "zero1" in name
    whole = not sharded
    loops = ["plain"] * 12 + ["two optimizers"]
    if not staged:
        loops += ["closure"]
    if whole:
        loops += ["gan", "gan", "two models", "teacher", "closure"]
    loop = r.choice(loops)
    if loop in ("gan", "two models"):
        model = "mlp"
    else:
        model = r.choice(SHARDED if sharded and not sometimes(0.03) else OWN + TEXT)
        if loop == "teacher" and model == "pruned":
            model = "mlp"  # torch cannot copy it
    if staged and model not in SHARDED:
        model = "blocks"
    if "sp" in name and model in TOKENS and not sometimes(0.1):
        model = r.choice(TEXT)
    data = "text" if model in TEXT else "tokens" if model in TOKENS else "other"
    plain = loop == "plain"
    fields: dict[str, Any] = {
        "seed": seed,
        "composition": name,
        "backend": backend,
        "loop": loop,
        "model": model,
        "optimizer": r.choice(tuple(OPTIMIZERS) if sometimes(0.5) else COMMON),
        "scheduler": "",
        "size": r.choice((2, 4)) if staged else r.choice((1, 2, 3, 4)),
        "samples": r.randint(7, 30),
        "epochs": r.choice((1, 2, 2)),
        "drop_last": staged or sometimes(0.2),
        "prepare_apart": sometimes(0.2),
        "keep_zeros": sometimes(0.15),
        "zero_first": sometimes(0.2),
        "loss_inside": staged or sometimes(0.5),
    }
    if "batch" in model:
        fields["size"] = r.choice((3, 4))  # statistics of one row are none
    if loop == "closure" and model != "odd" and sometimes(0.4):  # LBFGS takes no transposed memory
        fields["optimizer"] = "LBFGS"
    exact = fields["optimizer"] in ("Rprop", "LBFGS", "Adafactor", "ASGD")
    if fields["optimizer"] == "LBFGS" and not (whole and backend == "gloo" and model not in TEXT):
        fields["optimizer"] = "SGD"  # in float32 the last bit of a weight decides whether LBFGS diverges
    elif exact and whole and backend == "gloo" and model not in TEXT:
        fields["dtype"] = "float64"
    elif sometimes(0.1) and model not in TEXT and backend == "gloo":
        fields["dtype"] = r.choice(("float64", "bfloat16") if loop == "plain" and whole else ("float64",))
    if plain or loop == "two optimizers":
        fields["accumulation"] = r.choice((1, 1, 2, 3))
        fields["by_hand"] = fields["accumulation"] > 1 and not staged and sometimes(0.2)
    if sometimes(0.55):
        fields["scheduler"] = r.choice(tuple(SCHEDULERS))
        momentum = "beta" in fields["optimizer"] or fields["optimizer"].split()[0] in ("SGD", "AdamW", "Adam")
        if fields["scheduler"] in NEEDS_MOMENTUM and (fields["optimizer"] == "SGD" or not momentum):
            fields["scheduler"] = "OneCycleLR"
        fields["scheduler_by_epoch"] = sometimes(0.15)
        fields["scheduler_unprepared"] = sometimes(0.1)
    if loop == "two optimizers" or fields["optimizer"] == "LBFGS":
        fields["scheduler"] = ""
    if plain:
        fields["frozen"] = (r.choice(words_of(model)),) if sometimes(0.3) else ()
        if fields["frozen"]:
            fields["unfreeze_at"] = r.choice((0, 0, 1, 2))
            fields["add_group"] = bool(fields["unfreeze_at"]) and not fields["scheduler"] and sometimes(0.4)
        elif sometimes(0.12):
            fields["frozen"], fields["freeze_at"] = (), r.choice((1, 2))
        fields["unused"] = sometimes(0.12) and whole
        fields["grouped"] = sometimes(0.25) and fields["optimizer"] not in ("Rprop", "Adafactor", "ASGD")
        fields["masked"] = data != "other" and not staged and sometimes(0.25)
        fields["average"] = (
            r.choice(("averaged", "deepcopy")) if whole and model != "pruned" and sometimes(0.15) else ""
        )
        fields["two_backwards"] = whole and not fields["masked"] and sometimes(0.08)
        fields["edits"] = r.choice(("scale", "drop", "noise", "clamp weights")) if whole and sometimes(0.12) else ""
        fields["hook"] = whole and sometimes(0.06)
        fields["lr_by_hand"] = not fields["scheduler"] and sometimes(0.1)
        fields["penalty"] = whole and not fields["masked"] and sometimes(0.08)
    if sometimes(0.4) and loop in ("plain", "two optimizers", "teacher", "gan"):
        fields["clip"] = r.choice(
            (
                "norm",
                "norm",
                "norm" if model == "odd" else "inf",
                "value",
                "plugin" if zero and loop == "plain" else "norm",
            )
        )
    if model in RECOMPUTING and sometimes(0.15) and not staged:
        fields["recompute"] = True
    if model in DROPPING and whole and backend == "gloo" and loop != "teacher" and sometimes(0.2):
        fields["dropout"] = True
    if sometimes(0.1) and fields.get("dtype", "float32") == "float32" and loop in ("plain", "two optimizers"):
        fields["autocast"] = True
    if plain and sometimes(0.15):
        fields["by_hand_at"] = r.choice((1, 2))
    elif plain and sometimes(0.2) and not fields["by_hand"]:
        fields["save_at"] = r.choice((1, 2))
        fields["epochs"] = 2
    if fields.get("unfreeze_at", 0) > (fields.get("by_hand_at") or fields.get("save_at") or 99):
        fields["add_group"] = False  # what was kept before has a group less, and no optimizer loads it
    if loop in ("plain", "two optimizers", "teacher"):
        loaders = [name for name in LOADERS if not (name in ("tensors", "collate") and data == "text")]
        if fields.get("add_group"):
            loaders = ["map"]
        fields["loader"] = r.choice(loaders)
        if fields["loader"] not in ("stream", "dispatched") and sometimes(0.1):
            fields["workers"] = r.choice((1, 2))
    if fields.get("loader") == "split":
        fields["size"] = fields["size"] * mesh.data_ranks
    if "batch" in model and fields.get("loader") in ("stream", "dispatched"):
        fields["drop_last"] = True  # else a rank may get a single row at the end
    if fields["drop_last"]:
        fields["samples"] += fields["size"] * mesh.data_ranks  # one batch at least
    if plain or loop == "teacher":
        # What micro-batches after the last step have changed stays on each rank; torch_xla keeps biased variances.
        fields["evaluate"] = sometimes(0.15 if "batch" not in model else 0.5)
        if "batch" in model and (backend == "xla" or fields.get("by_hand")):
            fields["evaluate"] = False
    if backend == "gloo" and plain and sometimes(0.3):
        _with_complex(fields, mesh)
    _draw_later(fields, mesh, random.Random(f"{seed}, later"))
    _draw_between(fields, mesh)
    if backend == "gloo" and composition is None and name in FULLY and random.Random(f"{seed}, fully").random() < 0.4:
        _shard_fully(fields)
    if backend == "xla":
        fields.update(_for_xla(fields, mesh))
    return Case(**fields)


def _with_complex(fields: dict[str, Any], mesh: Composition) -> None:
    """Complex parameters, where a case has nothing that does not go with them."""
    name = fields["optimizer"].split()[0]
    treats_them = name in ("SGD", "Adam", "AdamW") and "fused" not in fields["optimizer"]
    without = not any(fields.get(other) for other in ("autocast", "edits", "penalty", "recompute", "dropout"))
    if fields["model"] == "mlp" and mesh.holders == 1 and fields.get("dtype", "float32") == "float32":
        fields["model"] = "complex" if treats_them and without else "mlp"


def _draw_later(fields: dict[str, Any], mesh: Composition, r: random.Random) -> None:
    """Features that were added later, from random numbers of their own: seeds that draw none of them mean what they
    meant before."""
    xla, whole = fields["backend"] == "xla", mesh.holders == 1
    model, staged = fields["model"], "pp2" in fields["composition"]
    draws = {name: r.random() for name in ("half", "uneven", "compiled", "masks")}
    plain = fields["loop"] == "plain"
    if draws["half"] < 0.03 and not fields.get("autocast") and fields.get("dtype", "float32") == "float32":
        fields["half"] = True
    if draws["uneven"] < 0.08 and plain and not xla and mesh.data_ranks > 1:
        _make_uneven(fields, mesh, r)
    if (
        draws["compiled"] < 0.06
        and not fields.get("half")
        and not xla
        and whole
        and fields["loop"] in ("plain", "two optimizers", "teacher")
    ):
        fields["compiled"] = r.choice(("after", "after", "prepare"))
    if fields.get("compiled"):
        fields["average"] = ""  # its copy has the names of the compiled model
    if draws["masks"] < 0.15 and fields["loop"] in ("plain", "closure", "two optimizers") and not fields.get("uneven"):
        masked = model in DROPPING or model in ("blocks", "blocks-tied", *TEXT)
        exact = not xla and not staged and "sp" not in fields["composition"] and model in ("blocks", "blocks-tied")
        if (xla or not whole) and masked:
            fields["dropout" if exact and r.random() < 0.75 else "own_masks"] = True


def _draw_between(fields: dict[str, Any], mesh: Composition) -> None:
    """What users do between the calls of a step, each from random numbers of its own, since all of it came later."""

    def one_of(name: str, chance: float, values: Sequence[Any]) -> None:
        r = random.Random(f"{fields['seed']}, {name}")
        if r.random() < chance:
            fields[name] = r.choice(values)

    if fields["model"].startswith("llama"):
        one_of("kv_heads", 0.5, (1, 2, 4))
    others = any(fields.get(name) for name in ("uneven", "compiled", "half", "own_masks"))
    if fields["loop"] != "plain" or others:
        return
    if fields["model"] in ("complex", "odd", *PARAMETRIZED):
        return
    sliced, staged, zero = ("tp2" in fields["composition"], "pp2" in fields["composition"], "zero1" in str(mesh))
    simple = not fields.get("masked") and not fields.get("two_backwards")

    def roads(table: Iterable[str]) -> list[str]:
        left_out = (*(BY_PLACE if sliced else ()), *(ON_HOST if fields["backend"] == "xla" else ()))
        return [road for road in table if road not in left_out]

    one_of("wraps", 0.3, WRAPPERS)
    if fields.get("wraps"):
        _make_wrapped(fields, simple)
    if mesh.holders == 1 and fields["model"] not in TEXT and fields.get("dtype", "float32") == "float32" and zero:
        one_of("dtype", 0.2 if not fields.get("autocast") else 0, ("bfloat16",))
    one_of("edit_by", 0.35, roads(EDITS))
    if fields.get("wraps", "").startswith("sam"):  # it remembers the weights of what had a gradient at its first step
        fields["edit_by"] = fields.get("edit_by", "").replace("dropped", "")
        fields["edits"] = fields.get("edits", "").replace("drop", "")
    if fields.get("edit_by") in LINEAR and not fields.get("unused"):
        one_of("edit_micro", 0.4, (True,))
    frozen = fields.get("wraps") and (fields["frozen"] or fields["unused"])  # left alone, though the optimizer has it
    one_of("write_by", 0.35 if not frozen else 0, roads(WRITES))
    if fields.get("write_by"):
        one_of("write_early", 0.3, (True,))
    if fields.get("dtype") == "bfloat16" and "numpy" in (fields.get("edit_by"), fields.get("write_by")):
        fields["edit_by"] = fields["write_by"] = ""
    one_of("unread", 0.3, (True,))
    if fields.get("clip", "") == "" and not staged:  # a stage clips its own gradients, as the guide says
        one_of("clip_by", 0.3, ("torch", "hand"))
    if not fields.get("dropout"):
        one_of("seeds", 0.15, ("rank", "set_seed"))
    if simple and not staged:
        one_of("auxiliary", 0.15 if not fields.get("unused") else 0, (True,))
        one_of("second", 0.15, (True,))
    if not fields.get("average") and not frozen:
        one_of("ema", 0.15, ("copy", "load"))


def _shard_fully(fields: dict[str, Any]) -> None:
    """Fully sharded instead of ZeRO-1, with a model of blocks, without what reads weights outside of its context."""
    fields["composition"] = fields["composition"].replace("zero1", "fully sharded")
    if fields["model"] not in SHARDED:
        fields["model"] = "blocks"
        fields["frozen"] = words_of("blocks")[:1] if fields.get("frozen") else ()
    for name in ("average", "edits", "penalty", "compiled", "uneven", "half"):
        fields.pop(name, None)
    if fields["loop"] in ("gan", "two models", "teacher") or fields.get("clip") == "plugin":
        fields["loop"], fields["clip"] = "plain", ""


def _make_wrapped(fields: dict[str, Any], simple: bool) -> None:
    """Without what such an optimizer does not do in one process either."""
    wraps = fields["wraps"]
    twice = wraps.startswith("sam") and not (simple and fields["accumulation"] == 1)
    late = fields["frozen"] or fields["unused"] or fields["model"] == "sometimes"  # state of what torch has not stepped
    if twice or (wraps == "average" and late):
        fields["wraps"] = "lookahead"
    for name in ("add_group", "by_hand_at", "save_at", "scheduler", "scheduler_by_epoch", "scheduler_unprepared"):
        fields.pop(name, None)


def _make_uneven(fields: dict[str, Any], mesh: Composition, r: random.Random) -> None:
    """A loop that ranks may leave at different times: without what counts steps or reads values in the loop, and
    without buffers that change with every micro-batch."""
    if "batch" in fields["model"] or fields["model"] in ("counting", "spectral_norm", "sometimes"):
        fields["model"] = "mlp"
        fields["frozen"] = ()
    without = ("unfreeze_at", "freeze_at", "by_hand_at", "save_at", "by_hand", "dropout", "edits", "average")
    for name in (*without, "add_group", "lr_by_hand", "scheduler_unprepared"):
        fields[name] = type(fields.get(name, False))()
    if fields["scheduler"] == "ReduceLROnPlateau":
        fields["scheduler"] = "StepLR"
    if fields.get("loader") in ("stream", "dispatched"):
        fields["loader"] = "map"
    fields["uneven"], fields["drop_last"] = True, False
    size, ranks = fields["size"], mesh.data_ranks
    if fields.get("loader") == "split":
        fields["samples"] = size * r.randint(1, 4) + r.randint(1, max(size // ranks, 1))
        return
    batches = ranks * r.randint(0, 3) + r.randint(1, ranks - 1)
    ragged = 0 if "pp2" in fields["composition"] else r.randint(0, size - 1)
    fields["samples"] = size * batches - ragged


def _for_xla(fields: dict[str, Any], mesh: Composition) -> dict[str, Any]:
    """What keeps a case within what can be compared on lazy ranks: every batch of one size, and few graphs."""
    loader = fields.get("loader", "map")
    return {
        "epochs": 1 if not fields.get("save_at") else 2,
        "drop_last": True,
        "samples": fields["size"] * mesh.data_ranks * max(fields.get("accumulation", 1), 2) * 2,
        "loader": loader if loader in ("map", "sampler", "tensors", "collate") else "map",
        "workers": 0,
        "recompute": False,  # torch.utils.checkpoint knows no XLA devices
        # torch_xla's GRU is traced by torch.fx, which ranks that are threads cannot do at the same time
        "model": {"sometimes": "mlp", "spectral_norm": "mlp", "gru": "lstm"}.get(fields["model"], fields["model"]),
        "optimizer": "AdamW" if fields["optimizer"] == "AdamW fused" else fields["optimizer"],  # not for XLA devices
        # torch_xla loses what AveragedModel copies (docs/xla.md).
        "average": "" if fields.get("frozen") or fields.get("freeze_at") else fields.get("average", ""),
    }


def simpler(case: Case) -> list[Case]:
    """Cases with one feature less, those that take most away first."""
    default = Case(seed=case.seed, composition=case.composition, backend=case.backend, fault=case.fault)
    candidates = []
    fixed = ("seed", "composition", "backend", "fault")
    for field in dataclasses.fields(case):
        if field.name not in fixed and getattr(case, field.name) != getattr(default, field.name):
            candidates.append(dataclasses.replace(case, **{field.name: getattr(default, field.name)}))
    if case.composition in SIMPLER:
        candidates.insert(0, dataclasses.replace(case, composition=SIMPLER[case.composition]))
    if case.model.startswith(("gpt2", "llama")):
        candidates.insert(0, dataclasses.replace(case, model="blocks"))
    for samples in (case.size * case.mesh.data_ranks * max(case.accumulation, 1), case.samples // 2):
        if 0 < samples < case.samples:
            candidates.append(dataclasses.replace(case, samples=samples))
    if case.size > 1:
        candidates.append(dataclasses.replace(case, size=case.size // 2))
    return candidates


SIMPLER = {
    "fully sharded x 3": "fully sharded x 2",
    "tp2 x dp2 + fully sharded": "fully sharded x 2",
    "pp2 x dp2 + fully sharded": "fully sharded x 2",
    "dp3": "dp2",
    "dp4": "dp2",
    "dp2, small buckets": "dp2",
    "dp2 + guards": "dp2",
    "zero1 x 2": "zero1 x 1",
    "zero1 x 3": "zero1 x 2",
    "zero1 x 4": "zero1 x 2",
    "zero1 x 2, small buckets": "zero1 x 2",
    "zero1 x 2, accumulating shards": "zero1 x 2",
    "zero1 x 2 + guards": "zero1 x 2",
    "zero1 x 3, parameters": "zero1 x 2, parameters",
    "tp2 + sp": "tp2",
    "tp2 x dp2": "tp2",
    "tp2 x dp2 + zero1": "tp2 x dp2",
    "tp2 x dp2 + sp + zero1": "tp2 x dp2 + zero1",
    "pp2 x dp2 + zero1": "pp2",
    "tp2 x pp2": "pp2",
}
