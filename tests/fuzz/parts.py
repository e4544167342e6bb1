"""What generated programs are put together from: models, data, and loaders' parts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, Sampler

from tests.distributed import models
from tests.distributed.optimizers import SAM, Delegating, Lookahead, ScheduleFree  # noqa: F401
from tests.fuzz.plain import Process

CLASSES, WIDTH, VOCABULARY, LENGTH, IMAGE = 4, 8, 32, 8, 6


# ---- models: forward(x) gives logits, forward(x, y) the loss ---------------------------------------------------------
class Classifier(nn.Module):
    """What all models of our own share."""

    def __init__(self) -> None:
        super().__init__()
        self.recomputes = False

    def run(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """``module(x)``, computed again in the backward pass where activations are checkpointed."""
        if self.recomputes and self.training and torch.is_grad_enabled():
            return checkpoint(module, x, use_reentrant=False)
        return module(x)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.logits(x)
        return logits if y is None else loss_of(logits, y)


def loss_of(logits: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy over the last dim of ``logits``, in at least fp32; labels of -100 do not count."""
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a language model from its logits."""
    return loss_of(logits[:, :-1], labels[:, 1:])


def _norm(kind: str, width: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm1d(width)
    if kind == "group":
        return nn.GroupNorm(2, width)
    return nn.LayerNorm(width) if kind == "layer" else nn.Identity()


class Mlp(Classifier):
    def __init__(self, norm: str = "none", dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 12), _norm(norm, 12), nn.Tanh(), nn.Dropout(dropout))
        self.second = nn.Sequential(nn.Linear(12, 12), _norm(norm, 12), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(12, CLASSES)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.second, self.first(x)))


class Conv(Classifier):
    def __init__(self, norm: str = "none", dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            {"batch": nn.BatchNorm2d, "group": functools.partial(nn.GroupNorm, 2)}.get(norm, nn.Identity)(6),
            nn.Tanh(),
            nn.AvgPool2d(2),
        )
        self.second = nn.Sequential(nn.Conv2d(6, 6, 3, groups=2), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(6, CLASSES)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.second, self.first(x)).flatten(1))


class Shared(Classifier):
    """One layer applied three times and known under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 10)
        self.second = nn.Linear(10, 10)
        self.again = self.second
        self.head = nn.Linear(10, CLASSES)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in (self.second, self.again, self.second):
            x = torch.tanh(self.run(layer, x))
        return self.head(x)


class Recurrent(Classifier):
    def __init__(self, kind: str = "GRU") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.recurrent = getattr(nn, kind)(8, 8, batch_first=True, bidirectional=kind == "LSTM")
        self.head = nn.Linear(16 if kind == "LSTM" else 8, VOCABULARY)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(x))[0])


class TiedLm(Classifier):
    """Head and embedding are one parameter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.second, self.embedding(x)))


class Encoder(Classifier):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.position = nn.Parameter(torch.randn(LENGTH, 8) * 0.1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.run(self.layers, self.embedding(x) + self.position)))


class Sometimes(Classifier):
    """A part that only some rows need: batches, and ranks, without such a row leave it without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 10)
        self.second = nn.Linear(10, CLASSES)
        self.head = nn.Linear(10, CLASSES)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        logits, rare = self.head(hidden), x[:, 0] > 1.0
        if rare.any():
            logits = logits.index_put((rare.nonzero()[:, 0],), self.second(hidden[rare]), accumulate=True)
        return logits


class Counting(Classifier):
    """Buffers that training changes: a persistent one, which the output depends on, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 10)
        self.second = nn.Linear(10, 10)
        self.head = nn.Linear(10, CLASSES)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("level", torch.ones(10))
        self.register_buffer("constant", torch.linspace(0.5, 1.5, 10), persistent=False)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += 1
            self.level.mul_(0.9).add_(0.05)
        x = torch.tanh(self.first(x)) * self.level.to(x.dtype) * self.constant.to(x.dtype)
        return self.head(torch.tanh(self.run(self.second, x)))


class Parametrized(Classifier):
    def __init__(self, kind: str = "weight_norm") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 10)
        self.second = nn.Linear(10, 10)
        self.head = nn.Linear(10, CLASSES)
        if kind == "weight_norm":
            parametrizations.weight_norm(self.second)
        elif kind == "spectral_norm":
            parametrizations.spectral_norm(self.second)
        else:
            prune.l1_unstructured(self.second, "weight", amount=0.3)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Odd(Classifier):
    """Parameters of unusual shapes: none, one and very different numbers of elements, transposed memory, lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.zeros(1))
        self.turned = nn.Parameter((torch.randn(7, 7) * 0.3).t())
        self.second = nn.ParameterList([nn.Parameter(torch.randn(7) * 0.5) for _ in range(3)])
        self.by_name = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(1, 7))})
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(7, CLASSES, bias=False)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x) * self.scale + self.shift) @ self.turned + self.by_name["bias"]
        for weight in self.second:
            x = torch.tanh(x * weight)
        return self.head(x) + self.empty.sum()


class Complex(Classifier):
    """Complex parameters between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 10)
        self.second = nn.Linear(10, 10, dtype=torch.complex64)
        self.head = nn.Linear(10, CLASSES)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.tanh(self.first(x)).to(torch.complex64))
        return self.head(torch.tanh(hidden.real) + hidden.imag)


class Block(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2, dropout: float = 0.0, inside: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.inner_dropout = nn.Dropout(dropout if inside else 0.0)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.down(self.inner_dropout(F.gelu(self.up(self.norm2(x))))))


class Blocks(Classifier):
    """A model of our own that can be sharded and cut into stages."""

    PLAN: ClassVar[dict[str, str]] = {
        "blocks.*.q": "colwise",
        "blocks.*.k": "colwise",
        "blocks.*.v": "colwise",
        "blocks.*.heads": "per_rank",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self, tied: bool = False, dropout: float = 0.0, inside: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block(dropout=dropout, inside=inside) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))


TINY = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}


def llama(*, tied: bool = False, dropout: float = 0.0, inside: bool = True, kv_heads: int = 2) -> nn.Module:
    """A tiny Llama. The only dropout it has is that of attention weights."""
    from transformers import LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": kv_heads, "max_position_embeddings": 32}
    sizes["attention_dropout"] = dropout if inside else 0.0
    return LlamaForCausalLM(models.llama_config(**TINY, **sizes, tie_word_embeddings=tied))


def gpt2(*, tied: bool = True, dropout: float = 0.0, inside: bool = False) -> nn.Module:
    from transformers import GPT2LMHeadModel

    sizes = {"n_positions": 32, "n_embd": 16, "resid_pdrop": dropout, "embd_pdrop": dropout}
    sizes["attn_pdrop"] = dropout if inside else 0.0
    return GPT2LMHeadModel(models.gpt2_config(**TINY, **sizes, tie_word_embeddings=tied))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 10), nn.Linear(10, WIDTH)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(z)))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 10), nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


# ---- steps that would make a program long ----------------------------------------------------------------------------
def set_trained(model: nn.Module, words: tuple[str, ...], trained: bool) -> None:
    """Freezes or unfreezes the parameters whose name contains one of ``words``."""
    for name, parameter in model.named_parameters():
        if any(word in name for word in words):
            parameter.requires_grad_(trained)


def groups(model: nn.Module, *, frozen: bool = True) -> list[dict[str, Any]]:
    """Parameters, or those that train, by number of dims, with options of their own, as weight decay is usually
    given."""
    named = [p for p in model.parameters() if p.requires_grad or frozen]
    split = [[p for p in named if p.ndim > 1], [p for p in named if p.ndim <= 1]]
    options = ({"weight_decay": 0.02}, {"weight_decay": 0.0, "lr": 0.02})
    return [{"params": params, **more} for params, more in zip(split, options, strict=True) if params]


def gradients(optimizer: Any) -> list[torch.Tensor]:
    """Those of the parameters that an optimizer shows."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def as_vector(model: nn.Module, factor: float) -> None:
    """Scales weights as one vector, of which each is a part afterwards."""
    parameters = list(model.parameters())
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters) * factor, parameters)


def scaled(state: dict[str, Any], factor: float) -> dict[str, Any]:
    return {name: value * factor if value.is_floating_point() else value for name, value in state.items()}


def clip_by_hand(model: nn.Module, most: float) -> None:
    """Clips with a norm that the loop adds up."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()
    for gradient in gradients:
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0).to(gradient.dtype))


def observed(model: nn.Module) -> list[torch.Tensor]:
    """A list to which a forward hook adds the output of the model's last layer but one, or its last."""
    inner = getattr(model, "model", getattr(model, "transformer", model))  # of transformers, without the head
    layer = getattr(inner, "norm", getattr(inner, "ln_f", None)) or list(inner.children())[-1]
    seen: list[torch.Tensor] = []

    def look(_: nn.Module, __: Any, output: Any) -> None:
        seen[:] = [output]

    layer.register_forward_hook(look)
    return seen


def seed(accelerator: Any, step: int, how: str) -> None:
    """Seeds this rank as users do, and draws something. Nothing of the training depends on it."""
    rank = 0 if isinstance(accelerator, Process) else accelerator.process_index
    if how == "rank" or isinstance(accelerator, Process):
        torch.manual_seed(1000 * step + rank)
    else:
        from accelerate.utils import set_seed

        set_seed(1000 * step, device_specific=True)
    torch.rand(3)


# ---- data ------------------------------------------------------------------------------------------------------------
class Rows(Dataset):
    """``count`` samples as dicts, drawn from ``seed``.

    Args:
        kind: ``"vector"`` (x, y), ``"image"`` (x, y), ``"tokens"`` (x, y: sequences of the same length),
            ``"text"`` (input_ids, labels), ``"noise"`` (x, z).
        masked: every sequence has a random number of labels that count.
    """

    def __init__(self, kind: str, count: int, seed: int, dtype: torch.dtype = torch.float32, masked: bool = False):
        draw = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(count):
            if kind in ("tokens", "text"):
                ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=draw)
                labels = ids.flip(0) if kind == "tokens" else ids.clone()
                if masked:
                    labels[int(torch.randint(2, LENGTH, (), generator=draw)) :] = -100
                self.rows.append({"x": ids, "y": labels} if kind == "tokens" else {"input_ids": ids, "labels": labels})
                continue
            x = torch.randn(*((3, IMAGE, IMAGE) if kind == "image" else (WIDTH,)), generator=draw).to(dtype)
            if kind == "noise":
                self.rows.append({"x": x, "z": torch.randn(4, generator=draw).to(dtype)})
            else:
                self.rows.append({"x": x, "y": torch.randint(CLASSES, (), generator=draw)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from self.rows.rows


class Backwards(Sampler):
    """A sampler of a user's own."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.rows) - 1, -1, -1))


def as_lists(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """A ``collate_fn`` that also gives something that is no tensor."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def compiled(model: nn.Module, accelerator: Any) -> nn.Module:
    """A prepared model compiled by ``torch.compile`` with a backend that leaves graphs as they are. One process, which
    ranks are compared with, trains it as it is."""
    return model if isinstance(accelerator, Process) else torch.compile(model, backend="eager")


def quiet() -> None:
    """Silences what libraries say about programs like these."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
