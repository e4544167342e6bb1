"""A case as the text of a Python program, which is what runs: on ranks, in one process, and when it is printed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tests.fuzz.case import (
    AVERAGES,
    EDITS,
    IMAGES,
    OPTIMIZERS,
    PARAMETRIZED,
    SCHEDULERS,
    SHARDED,
    TEXT,
    TOKENS,
    WRITES,
    Case,
    words_of,
)

HEAD = '''"""{describe}

python {{this file}} compares it with one process.
"""

import copy

import torch
import torch.nn.functional as F
from accelerate.utils import GradScalerKwargs
from torch import nn
from torch.optim.lr_scheduler import *
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.fuzz import parts

RANKS, PLUGINS, BACKEND = {ranks}, {plugins!r}, {backend!r}
OPTIONS = {options!r}
ARGUMENTS = {arguments}

'''
TAIL = """

if __name__ == "__main__":
    from tests.fuzz.judge import check_file

    check_file(__file__)
"""


class Lines:
    """Lines of a program at their depth."""

    def __init__(self) -> None:
        self.depth, self.lines = 0, []

    def __call__(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    @contextmanager
    def under(self, line: str) -> Iterator[None]:
        self(line)
        self.depth += 1
        yield
        self.depth -= 1


def render(case: Case) -> str:
    """The program: ``train(accelerator, record)``, and what it is prepared for."""
    out = Lines()
    with out.under("def train(accelerator, record):"):
        out("parts.quiet()")
        {"gan": _gan, "two models": _two_models, "closure": _closure}.get(case.loop, _plain)(case, out)
    head = HEAD.format(
        describe=case.describe(),
        ranks=case.mesh.ranks,
        plugins=case.plugins,
        backend=case.backend,
        options=case.options,
        arguments=case.arguments,
    )
    return head + "\n" + "\n".join(out.lines) + "\n" + TAIL


# ---- what programs have in common ------------------------------------------------------------------------------------
def _model(case: Case) -> str:
    name, _, variant = case.model.partition("-")
    arguments = []
    if name in ("mlp", "conv") and variant:
        arguments.append(f"norm={variant!r}")
    if case.dropout or case.own_masks:
        arguments.append("dropout=0.2")
    if case.own_masks and case.model in SHARDED:
        arguments.append("inside=True")
    if name in ("gru", "lstm"):
        arguments.append(repr(name.upper()))
    if case.model in PARAMETRIZED:
        name, arguments = "parametrized", [repr(case.model)]
    if name == "tied":
        name, variant = "tiedLm", ""
    if variant == "tied":
        arguments.append("tied=True")
    if variant == "untied":
        arguments.append("tied=False")
    if case.kv_heads:
        arguments.append(f"kv_heads={case.kv_heads}")
    text = case.model in TEXT
    name = {"gru": "Recurrent", "lstm": "Recurrent"}.get(name, name if text else name[0].upper() + name[1:])
    cast = "" if case.dtype == "float32" else f".to(torch.{case.dtype})"
    return f"parts.{name}({', '.join(arguments)}){cast}"


def _data(case: Case) -> str:
    if case.loop == "gan":
        return "noise"
    if case.model in TEXT:
        return "text"
    return "tokens" if case.model in TOKENS else "image" if case.model in IMAGES else "vector"


def _loader(case: Case, out: Lines) -> None:
    more = "" if case.dtype == "float32" else f", dtype=torch.{case.dtype}"
    more += ", masked=True" if case.masked else ""
    out(f"rows = parts.Rows({_data(case)!r}, {case.samples}, {case.seed}{more})")
    options = [f"batch_size={case.size}"]
    data = "rows"
    if case.loader == "batch sampler":
        order = f"BatchSampler(parts.Backwards(rows), {case.size}, drop_last={case.drop_last})"
        options = [f"batch_sampler={order}"]
    elif case.drop_last:
        options.append("drop_last=True")
    if case.loader == "shuffled":
        options += ["shuffle=True", f"generator=torch.Generator().manual_seed({case.seed})"]
    elif case.loader == "sampler":
        options.append("sampler=parts.Backwards(rows)")
    elif case.loader == "stream":
        data = "parts.Stream(rows)"
    elif case.loader == "tensors":
        data = 'TensorDataset(*(torch.stack([row[name] for row in rows.rows]) for name in ("x", "y")))'
    elif case.loader == "collate":
        options.append("collate_fn=parts.as_lists")
    if case.workers:
        options.append(f"num_workers={case.workers}")
    out(f"loader = DataLoader({data}, {', '.join(options)})")


def _optimizer(case: Case, parameters: str, name: str | None = None) -> str:
    name = name or case.optimizer
    if name == "LBFGS":
        return f"torch.optim.LBFGS({parameters}, lr=0.2, max_iter=3)"
    return f"torch.optim.{name.split()[0]}({parameters}, {OPTIMIZERS[name]})"


def _scheduler(case: Case, out: Lines) -> None:
    if case.scheduler:
        out(f"scheduler = {SCHEDULERS[case.scheduler].format(o='optimizer')}")


def _prepare(case: Case, out: Lines, *names: str) -> None:
    if case.prepare_apart:
        for name in names:
            out(f"{name} = accelerator.prepare({name})")
    else:
        out(f"{', '.join(names)} = accelerator.prepare({', '.join(names)})")


def _clip(case: Case, out: Lines, model: str = "model") -> None:
    if case.clip_by:
        most = 0.5 if case.mesh.holders == 1 else 0.01  # what ranks notice is that they have clipped differently
        with out.under("if accelerator.sync_gradients:"):
            if case.clip_by == "torch":
                out(f"nn.utils.clip_grad_norm_({model}.parameters(), {most})")
            else:
                out(f"parts.clip_by_hand({model}, {most})")
    norm = {"norm": "0.5", "inf": "0.1, float('inf')"}.get(case.clip)
    if norm:
        clipped = f"accelerator.clip_grad_norm_({model}.parameters(), {norm})"
        with out.under("if accelerator.sync_gradients:"):
            out(clipped if case.uneven else f'record.value("norm", {clipped})')
    elif case.clip == "value":
        out(f"accelerator.clip_grad_value_({model}.parameters(), 0.02)")
    elif case.clip == "plugin":
        out(f"record.clip_as_plugin(accelerator, {model}, 0.5)")


def _gradients(case: Case, out: Lines, model: str = "model") -> None:
    if case.backend == "gloo" and not case.uneven:
        with out.under("if accelerator.sync_gradients:"):
            out(f"record.gradients(accelerator, {model})")


def _building(case: Case, out: Lines) -> AbstractContextManager[None]:
    """Ranks that are threads share the generator that weights are drawn from."""
    block = out.under("with one_at_a_time():") if case.backend == "xla" else nullcontext()
    return _seeded(case, out, block)


@contextmanager
def _seeded(case: Case, out: Lines, block: AbstractContextManager[None]) -> Iterator[None]:
    with block:
        out(f"torch.manual_seed({case.seed})")
        yield


def _set_up(case: Case, out: Lines) -> None:
    with _building(case, out):
        _model_and_optimizer(case, out)
        if case.second:
            out(f"second = {_model(case)}.requires_grad_(False).eval()")
    _scheduler(case, out)
    _loader(case, out)
    _prepare_all(case, out)


def _model_and_optimizer(case: Case, out: Lines) -> None:
    out(f"model = {_model(case)}", "model.train()")
    if case.unused:
        out("model.unused = nn.Linear(3, 3)" + ("" if case.dtype == "float32" else f".to(torch.{case.dtype})"))
    if case.recompute:
        if case.model in TEXT:
            out('model.gradient_checkpointing_enable({"use_reentrant": False})')
        else:
            out("model.recomputes = True")
    if case.frozen:
        out(f"parts.set_trained(model, {case.frozen!r}, False)")
    parameters = "model.parameters()"
    if case.grouped:
        parameters = "parts.groups(model, frozen=False)" if case.add_group else "parts.groups(model)"
    elif case.add_group:
        parameters = "[p for p in model.parameters() if p.requires_grad]"
    if case.loop == "two optimizers":
        out("first = [p for p in model.parameters() if p.ndim < 2]")
        out(f"optimizer = {_optimizer(case, '[p for p in model.parameters() if p.ndim >= 2]')}")
        out(f"other = {_optimizer(case, 'first', 'SGD momentum')}")
    else:
        wrapped = {
            "lookahead": f"parts.Lookahead({_optimizer(case, parameters)})",
            "average": f"parts.Delegating({_optimizer(case, parameters)})",
            "schedule-free": f"parts.ScheduleFree({parameters}, lr=0.05)",
        }
        sam = f"parts.SAM({parameters}, torch.optim.SGD, lr=0.1, momentum=0.9)"
        out(f"optimizer = {wrapped.get(case.wraps, sam) if case.wraps else _optimizer(case, parameters)}")


def _prepare_all(case: Case, out: Lines) -> None:
    if case.second:
        out("second = accelerator.prepare(second)")
    if case.auxiliary:
        out("seen = parts.observed(model)")
    if case.evaluate:
        dtype = "" if case.dtype == "float32" else f", dtype=torch.{case.dtype}"
        out(f"held_out = DataLoader(parts.Rows({_data(case)!r}, 11, 5{dtype}), batch_size={2 * case.mesh.data_ranks})")
    if case.loop == "teacher":
        device = ".to(accelerator.device)" if case.backend == "xla" else ""
        out(f"teacher = copy.deepcopy(model).requires_grad_(False).eval(){device}")
        if case.prepare_apart:
            out("teacher = accelerator.prepare_model(teacher, evaluation_mode=True)")
    names = ["model", "optimizer", "loader"]
    names += ["other"] if case.loop == "two optimizers" else []
    names += ["scheduler"] if case.scheduler and not case.scheduler_unprepared else []
    names += ["held_out"] if case.evaluate else []
    _prepare(case, out, *names)
    if case.compiled == "after":
        out("model = parts.compiled(model, accelerator)")
    if case.average == "averaged":
        out("average = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(model))")
    elif case.average:
        out("average = copy.deepcopy(accelerator.unwrap_model(model)).requires_grad_(False)")
    if case.wraps == "schedule-free":
        out("optimizer.optimizer.train()")
    if case.ema:
        with out.under(_writing(case)):
            out("means = [p.clone() for p in model.parameters()]")
    if case.hook:
        out("next(p for p in model.parameters() if p.requires_grad).register_hook(lambda gradient: gradient * 0.5)")


def _logits(case: Case, model: str = "model", batch: str = "batch") -> str:
    if case.model in TEXT:
        return f'{model}(input_ids={batch}["input_ids"]).logits'
    return f'{model}({batch}["x"])'


def _loss(case: Case, out: Lines) -> None:
    text = case.model in TEXT
    if case.seeds:
        out(f"parts.seed(accelerator, micro, {case.seeds!r})")
    if case.dropout or (case.own_masks and case.backend == "gloo"):
        out("torch.manual_seed(1000 + micro)")
    if case.loss_inside and case.loop != "teacher":
        out("loss = model(**batch).loss" if text else 'loss = model(batch["x"], batch["y"])')
    else:
        out(f"logits = {_logits(case)}")
        out('loss = parts.shifted(logits, batch["labels"])' if text else 'loss = parts.loss_of(logits, batch["y"])')
    if case.loop == "teacher":
        with out.under("with torch.no_grad():"):
            out(f"aim = {_logits(case, 'teacher')}")
        out("loss = loss + 0.1 * F.mse_loss(logits.float(), aim.float())")
    if case.auxiliary:
        out("loss = loss + 0.1 * seen.pop().float().square().mean()")
    if case.second:
        with out.under("with torch.no_grad():"):
            out("offset = second(**batch).loss" if text else 'offset = second(batch["x"], batch["y"])')
        out("loss = loss + offset")
    if case.penalty:
        out("loss = loss + 0.01 * sum(p.float().square().sum() for p in model.parameters() if p.requires_grad)")


def _backward(case: Case, out: Lines) -> None:
    if case.masked:
        out(
            'items = (batch["labels"][:, 1:] != -100).sum()'
            if case.model in TEXT
            else 'items = (batch["y"] != -100).sum()'
        )
        out("accelerator.backward(loss, num_items=items)")
        if case.uneven:
            return
        out('total = accelerator.reduce(items.float(), "sum")')
        out('record.value("loss", accelerator.reduce(loss.detach().float() * items, "sum") / total)')
        return
    scaled = f"loss / {case.accumulation}" if case.by_hand else "loss"
    if case.two_backwards:
        out(f"accelerator.backward({scaled}, retain_graph=True)", f"accelerator.backward(0.5 * {scaled})")
    else:
        out(f"accelerator.backward({scaled})")
    if not case.uneven:
        out('record.value("loss", accelerator.reduce(loss.detach(), "mean"))')


def _by_road(out: Lines, road: str, condition: str = "") -> None:
    """Does something to each parameter, or to all of them."""
    if "model" in road or "optimizer" in road:
        out(road)
        return
    with out.under("for p in model.parameters():"), out.under(condition) if condition else nullcontext():
        out(road)


def _writing(case: Case) -> str:
    return f"with {'accelerator.full_weights(model), ' if case.fully else ''}torch.no_grad():"


def _write(case: Case, out: Lines) -> None:
    with out.under(_writing(case)):
        _by_road(out, WRITES[case.write_by])


def _edit(case: Case, out: Lines) -> None:
    """What some loops do to gradients."""
    if case.edit_by:
        with nullcontext() if case.edit_micro else out.under("if accelerator.sync_gradients:"):
            _by_road(out, EDITS[case.edit_by], "if p.grad is not None:")
    change = {
        "scale": "p.grad.mul_(0.5)",
        "drop": "p.grad = None",
        "noise": "p.grad = p.grad + 0.001",
    }.get(case.edits)
    if change:
        with (
            out.under("if accelerator.sync_gradients:"),
            out.under("for p in list(model.parameters())[:2]:"),
            out.under("if p.grad is not None:"),
        ):
            out(change)


def _update(case: Case, out: Lines) -> None:
    if case.write_early:
        with out.under("if accelerator.sync_gradients and step == 1:"):
            _write(case, out)
    if case.wraps.startswith("sam"):
        _step_twice(case, out)
    else:
        out("optimizer.step()")
    if case.loop == "two optimizers":
        out("other.step()")
    if case.edits == "clamp weights":
        with (
            out.under("if accelerator.sync_gradients:"),
            out.under("with torch.no_grad():"),
            out.under("for p in model.parameters():"),
        ):
            out("p.clamp_(-0.3, 0.3)")
    if case.scheduler and not case.scheduler_by_epoch:
        metric = 'accelerator.reduce(loss.detach(), "mean")' if case.scheduler == "ReduceLROnPlateau" else ""
        if case.scheduler_unprepared:
            with out.under("if accelerator.sync_gradients:"):
                out(f"scheduler.step({metric})")
        else:
            out(f"scheduler.step({metric})")
    if not case.zero_first:
        _zero(case, out)
    if not case.uneven:
        out("record.rates(optimizer)")


def _step_twice(case: Case, out: Lines) -> None:
    """SAM, by its methods or with a closure."""
    if case.wraps == "sam":
        out("optimizer.optimizer.first_step(zero_grad=True)")
        _loss(case, out)
        _backward(case, out)
        out("optimizer.optimizer.second_step(zero_grad=True)")
        return
    with out.under("def closure():"):
        out("optimizer.zero_grad()")
        _loss(case, out)
        _backward(case, out)
    out("optimizer.step(closure)")


def _switch(case: Case, out: Lines, method: str) -> None:
    """Changes the weights for an evaluation, and back to those that are trained."""
    if case.wraps in AVERAGES:
        out(f"optimizer.optimizer.{method}()")


def _zero(case: Case, out: Lines) -> None:
    how = "set_to_none=False" if case.keep_zeros else ""
    out(f"optimizer.zero_grad({how})")
    if case.loop == "two optimizers":
        out(f"other.zero_grad({how})")


def _step_body(case: Case, out: Lines) -> None:
    if case.zero_first and case.accumulation == 1:
        _zero(case, out)
    _loss(case, out)
    _backward(case, out)
    if case.masked or not (case.unread or case.edit_by):
        _gradients(case, out)
    _edit(case, out)
    if case.edit_by and not case.unread:
        _gradients(case, out)
    _clip(case, out)
    _update(case, out)
    if case.zero_first and case.accumulation > 1:
        _zero(case, out)


def _plain(case: Case, out: Lines) -> None:
    _set_up(case, out)
    out("step = micro = 0")
    if case.save_at:
        out("saved = False")
    with out.under(f"for epoch in range({case.epochs}):"):
        joined = "with accelerator.join_uneven_inputs([model], even_batches=False):"
        with out.under(joined) if case.uneven else nullcontext(), out.under("for batch in loader:"):
            if case.loader == "tensors":
                out('batch = dict(zip(("x", "y"), batch, strict=True))')
            out("micro += 1")
            if case.by_hand:
                with out.under(f"if micro % {case.accumulation}:"):
                    with out.under("with accelerator.no_sync(model):"):
                        _loss(case, out)
                        _backward(case, out)
                    out("continue")
                _step_body(case, out)
            elif case.accumulation > 1:
                with out.under("with accelerator.accumulate(model):"):
                    _step_body(case, out)
                with out.under("if not accelerator.sync_gradients:"):
                    out("continue")
            else:
                _step_body(case, out)
                if case.uneven:  # one process sees the batches of ranks one after another
                    with out.under("if not accelerator.sync_gradients:"):
                        out("continue")
            out("step += 1")
            _events(case, out)
        if case.scheduler and case.scheduler_by_epoch:
            metric = "float(epoch)" if case.scheduler == "ReduceLROnPlateau" else ""
            out(f"scheduler.step({metric})", "record.rates(optimizer)")
        if case.uneven:
            out("record.rates(optimizer)")
        if case.save_at:
            with out.under("if epoch == 0 and saved:"):
                out("accelerator.load_state(record.folder)")
                out('record.weights("loaded", accelerator, model)')
        if case.evaluate:
            out("model.eval()")
            _switch(case, out, "eval")
            with out.under("with torch.no_grad(), accelerator.autocast():"), out.under("for batch in held_out:"):
                out(f'record.value("evaluation", accelerator.gather_for_metrics({_logits(case)}.float()))')
            out("model.train()")
            _switch(case, out, "train")
    _switch(case, out, "eval")
    out('record.weights("weights", accelerator, model)')
    if case.average:
        out('record.tensors("average", average.state_dict())')


def _events(case: Case, out: Lines) -> None:
    if case.unfreeze_at:
        with out.under(f"if step == {case.unfreeze_at}:"):
            out(f"parts.set_trained(model, {case.frozen!r}, True)")
            if case.add_group:
                out(f"joining = [p for n, p in model.named_parameters() if any(w in n for w in {case.frozen!r})]")
                out('optimizer.add_param_group({"params": joining, "lr": 0.01})')
    if case.freeze_at:
        with out.under(f"if step == {case.freeze_at}:"):
            out(f"parts.set_trained(model, {words_of(case.model)[:1]!r}, False)")
    if case.lr_by_hand:
        with out.under("for group in optimizer.param_groups:"):
            out('group["lr"] = group["lr"] * 0.9')
    if case.average == "averaged":
        out("average.update_parameters(accelerator.unwrap_model(model))")
    elif case.average:
        with (
            out.under("with torch.no_grad():"),
            out.under("for mean, now in zip(average.parameters(), model.parameters(), strict=True):"),
        ):
            out("mean.lerp_(now, 0.1)")
    if case.ema:
        with out.under(_writing(case)), out.under("for mean, p in zip(means, model.parameters(), strict=True):"):
            out("mean.lerp_(p, 0.5)")
            with out.under("if step == 2:") if case.ema == "copy" else nullcontext():
                if case.ema == "copy":
                    out("p.copy_(mean)")
        if case.ema == "load":
            with out.under("if step == 2:"), out.under(_writing(case)):
                out("names = [name for name, _ in model.named_parameters()]")
                out("model.load_state_dict({**model.state_dict(), **dict(zip(names, means, strict=True))})")
    if case.write_by and not case.write_early:
        with out.under("if step == 2:"):
            _write(case, out)
    if case.by_hand_at:
        # without a schedule of its own the model's and the optimizer's are what there is
        scheduler = ", scheduler" if case.scheduler else ""
        with out.under(f"if step == {case.by_hand_at}:"):
            out(f"kept = [copy.deepcopy(x.state_dict()) for x in (model, optimizer{scheduler})]")
        with out.under(f"if step == {case.by_hand_at + 1}:"):
            with out.under(f"for x, state in zip((model, optimizer{scheduler}), kept, strict=True):"):
                out("x.load_state_dict(state)")
            out("record.rates(optimizer)")
    if case.save_at:
        with out.under(f"if step == {case.save_at}:"):
            out("accelerator.save_state(record.folder)", "saved = True")


def _closure(case: Case, out: Lines) -> None:
    _set_up(case, out)
    with out.under(f"for epoch in range({case.epochs}):"), out.under("for micro, batch in enumerate(loader):"):
        with out.under("def closure():"):
            out("optimizer.zero_grad()")
            _loss(case, out)
            out("accelerator.backward(loss)", 'return accelerator.reduce(loss.detach(), "mean")')
        out("optimizer.step(closure)")
        if case.scheduler and not case.scheduler_by_epoch:
            out("scheduler.step(1.0)" if case.scheduler == "ReduceLROnPlateau" else "scheduler.step()")
        out("record.rates(optimizer)", "optimizer.zero_grad()")
    out('record.weights("weights", accelerator, model)')


def _two_models(case: Case, out: Lines) -> None:
    cast = "" if case.dtype == "float32" else f".to(torch.{case.dtype})"
    with _building(case, out):
        out(f"trunk, head = parts.Trunk(){cast}, nn.Linear(10, 4){cast}")
        out(f"optimizer = {_optimizer(case, '[*trunk.parameters(), *head.parameters()]')}")
    _scheduler(case, out)
    _loader(case, out)
    _prepare(case, out, "trunk", "head", "optimizer", "loader", *(["scheduler"] if case.scheduler else []))
    with (
        out.under(f"for epoch in range({case.epochs}):"),
        out.under("for batch in loader:"),
        out.under("with accelerator.accumulate(trunk, head):"),
    ):
        out('loss = parts.loss_of(head(trunk(batch["x"])), batch["y"])')
        out("accelerator.backward(loss)", 'record.value("loss", accelerator.reduce(loss.detach(), "mean"))')
        _gradients(case, out, "trunk")
        _gradients(case, out, "head")
        out("optimizer.step()")
        if case.scheduler and not case.scheduler_by_epoch:
            out("scheduler.step(1.0)" if case.scheduler == "ReduceLROnPlateau" else "scheduler.step()")
        out("optimizer.zero_grad()", "record.rates(optimizer)")
    out('record.weights("trunk", accelerator, trunk)', 'record.weights("head", accelerator, head)')


def _gan(case: Case, out: Lines) -> None:
    cast = "" if case.dtype == "float32" else f".to(torch.{case.dtype})"
    with _building(case, out):
        out(f"maker, critic = parts.Generator(){cast}, parts.Critic(){cast}")
        out(f"optimizer = {_optimizer(case, 'critic.parameters()')}")
        out(f"other = {_optimizer(case, 'maker.parameters()', 'AdamW')}")
    _scheduler(case, out)
    _loader(case, out)
    names = ["maker", "critic", "optimizer", "other", "loader", *(["scheduler"] if case.scheduler else [])]
    _prepare(case, out, *names)
    with out.under(f"for epoch in range({case.epochs}):"), out.under("for batch in loader:"):
        out('fake = maker(batch["z"])')
        out('loss = F.softplus(-critic(batch["x"])).mean() + F.softplus(critic(fake.detach())).mean()')
        if case.keep_zeros:  # as with a gradient penalty
            out('seen = batch["x"].clone().requires_grad_(True)')
            out("slope = torch.autograd.grad(critic(seen).sum(), seen, create_graph=True)[0]")
            out("loss = loss + 0.1 * (slope.norm(dim=1) - 1).square().mean()")
        out("optimizer.zero_grad()", "accelerator.backward(loss)")
        _gradients(case, out, "critic")
        _clip(case, out, "critic")
        out("optimizer.step()")
        if case.zero_first:
            out("critic.requires_grad_(False)")
        out("loss = F.softplus(-critic(fake)).mean()", "other.zero_grad()", "accelerator.backward(loss)")
        _gradients(case, out, "maker")
        out("other.step()")
        if case.zero_first:
            out("critic.requires_grad_(True)")
        out('record.value("loss", accelerator.reduce(loss.detach(), "mean"))')
        if case.scheduler and not case.scheduler_by_epoch:
            out("scheduler.step(1.0)" if case.scheduler == "ReduceLROnPlateau" else "scheduler.step()")
        out("record.rates(optimizer)")
    out('record.weights("maker", accelerator, maker)', 'record.weights("critic", accelerator, critic)')
