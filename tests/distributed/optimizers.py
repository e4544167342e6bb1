"""Optimizers of the kinds that users bring: one that holds another, one that averages, one that evaluates elsewhere."""

from __future__ import annotations

from collections import defaultdict

import torch


class ScheduleFree(torch.optim.Optimizer):
    """SGD that evaluates at an average of its iterates (Defazio et al. 2024), in the form of its authors' package: it
    starts in eval mode, and refuses to step in it."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, training, weight):
        for group in self.param_groups:
            if group["train_mode"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=weight(group["beta"]))
                group["train_mode"] = training

    def train(self):
        self._move(True, lambda beta: 1 - beta)

    def eval(self):
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self, closure=None):
        if not self.param_groups[0]["train_mode"]:
            raise Exception("Optimizer was not in train mode when step is called.")
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(end=z, weight=1 - 1 / group["beta"])
                    z.sub_(p.grad, alpha=group["lr"])
                    p.lerp_(end=z, weight=1 / group["k"])
                    p.lerp_(end=z, weight=1 - group["beta"])


class SAM(torch.optim.Optimizer):
    """Foret et al. 2021, in the usual form: the base optimizer shares the groups."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.detach().clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "SAM requires a closure"
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()


class Lookahead(torch.optim.Optimizer):
    """Zhang et al. 2019, in the form that shares the groups and refers to the state of the base optimizer."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.k, self.alpha, self.steps = optimizer, k, alpha, 0
        self.param_groups = optimizer.param_groups
        self.fast_state = optimizer.state
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def sync(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            assert p.grad is None or self.fast_state[p] is not None
            p.lerp_(self.state[p]["slow"], 1 - self.alpha)
            self.state[p]["slow"].copy_(p)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.steps += 1
        if self.steps % self.k == 0:
            self.sync()
        return loss


class Curvature(torch.optim.Optimizer):
    """Sophia's form (Liu et al. 2023): a method of its own reads gradients, into the state."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def update_curvature(self, decay=0.9):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            mean = self.state[p].setdefault("curvature", torch.zeros_like(p))
            mean.mul_(decay).addcmul_(p.grad, p.grad, value=1 - decay)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (self.state[p].get("curvature", 0.0) + 0.1), alpha=group["lr"])

    def rates(self):
        return [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def normalize(self):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.norm() for p in params]).norm()
        for p in params:
            p.div_(norm)


class Delegating(torch.optim.Optimizer):
    """An average of the weights around another optimizer, whose groups and state are properties."""

    def __init__(self, base):
        self.base, self.averages = base, defaultdict(dict)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)
    defaults = property(lambda self: self.base.defaults)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p, 0.3)

    @torch.no_grad()
    def eval(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            if "average" in self.state[p]:
                self.state[p]["kept"] = p.clone()
                p.copy_(self.state[p]["average"])

    @torch.no_grad()
    def train(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            if "kept" in self.state[p]:
                p.copy_(self.state[p].pop("kept"))
