"""Models, and one process with plain peft, for the tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from neuron_accel import NeuronAccelerator

STEPS = 5


def gpt2(vocab: int = 97, tied: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab,
        n_embd=32,
        n_head=4,
        n_layer=2,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    return GPT2LMHeadModel(config)


def llama(vocab: int = 97, heads: int = 4, groups: int = 2, features: int = 64) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=8 * heads,
        intermediate_size=features,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama}


def batches(vocab: int = 97, count: int = STEPS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, vocab, (4, 16), generator=generator) for _ in range(count)]
    return [{"input_ids": i, "labels": i.clone()} for i in ids]


def alone(model: nn.Module, options: dict, data: list, adapter: str | None = None) -> dict:
    """Plain peft in one process: the model, losses, norms and the adapter's weights."""
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict

    if adapter is not None:
        trained = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    else:
        torch.manual_seed(7)
        trained = get_peft_model(model, LoraConfig(**options))
    trained.train()
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-2, eps=1e-6)
    losses, norms = [], []
    for batch in data:
        loss = trained(**batch).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(trained.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {k: v.clone() for k, v in get_peft_model_state_dict(trained).items()}
    count = sum(p.numel() for p in trained.parameters() if p.requires_grad)
    return {"losses": losses, "norms": norms, "weights": weights, "model": trained, "count": count}


def on_rank(build: Callable[[], nn.Module], plugins: list, data: list, folder: str) -> dict:
    """The same through NeuronAccelerator; the adapter is written to ``folder``."""
    from neuron_accel_lora import save_adapter

    accelerator = NeuronAccelerator(plugins=plugins)
    with accelerator.main_process_first():  # ranks that are threads share a random generator
        model = build()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    model.train()
    accelerator.wait_for_everyone()
    torch.manual_seed(7)
    accelerator.wait_for_everyone()
    model, optimizer = accelerator.prepare(model, optimizer)
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    losses, found = [], []
    for batch in data:
        share = {name: value.chunk(size)[rank].to(accelerator.device) for name, value in batch.items()}
        with accelerator.run.backend.record() as traffic:
            loss = model(**share).loss
            accelerator.backward(loss)
            mean = accelerator.reduce(loss.detach(), "mean")
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(float(mean))
            found.append(float(norm))
        optimizer.zero_grad()
    save_adapter(accelerator, model, folder)
    after = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "norms": found,
        "changed": [name for name, value in before.items() if after and not torch.equal(after[name], value)],
        "held": sum(p.numel() for group in optimizer.param_groups for p in group["params"]),
        "data_bytes": sum(traffic.sent(group=name) for name in ("dp", "dp x tp")),
        "explain": accelerator.explain(model),
    }


def close(expected: torch.Tensor, found: torch.Tensor, limit: float = 2e-4) -> bool:
    """Whether two tensors are equal up to ``limit`` of the largest entry."""
    return expected.shape == found.shape and bool(
        (expected - found).abs().max() <= limit * expected.abs().max().clamp(min=1e-6)
    )


def assert_alike(reference: dict, ranks: list[dict], folder: str) -> None:
    """Losses, norms and the saved adapter are those of one process."""
    from safetensors.torch import load_file

    for result in ranks:
        assert torch.allclose(torch.tensor(result["losses"]), torch.tensor(reference["losses"]), rtol=1e-5)
        assert torch.allclose(torch.tensor(result["norms"]), torch.tensor(reference["norms"]), rtol=1e-4)
    weights = load_file(f"{folder}/adapter_model.safetensors")
    assert set(weights) == {k for k in reference["weights"] if not k.endswith("base_layer.weight")}
    off = [k for k, v in weights.items() if not close(reference["weights"][k], v)]
    assert not off, off
