"""Tiny models beyond causal text, made on the spot, each with its data, its loss and the loop of its library's scripts:
Accelerate's examples for vision and speech, diffusers' `examples/unconditional_image_generation`, which also keeps a
moving average of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

ROWS, BATCH = 12, 4
VOCABULARY = 96


@dataclass(frozen=True)
class Task:
    """What is trained on what.

    Args:
        build: makes the model.
        row: the sample of a number, drawn from a generator.
        loss: of the model and a batch.
        collate: makes a batch of samples; None: stacks them.
        averaged: whether the loop keeps a moving average of the weights, by diffusers' class.
        blocks: patterns of the blocks that are gathered together, for a model whose library does not mark them.
    """

    build: Callable[[], Any]
    row: Callable[[torch.Generator], dict[str, torch.Tensor]]
    loss: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor] = lambda model, batch: model(**batch).loss
    collate: Callable[[list[dict[str, torch.Tensor]]], dict[str, torch.Tensor]] | None = None
    averaged: bool = False
    blocks: tuple[str, ...] = ()


HEADS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = HEADS | {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "initializer_range": 0.1}


# ---- images ----------------------------------------------------------------------------------------------------------
def vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3, "initializer_range": 0.1}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**HEADS, **sizes, **off))


def picture(generator):
    return {
        "pixel_values": torch.randn(1, 8, 8, generator=generator),
        "labels": torch.randint(3, (), generator=generator),
    }


# ---- speech ----------------------------------------------------------------------------------------------------------
def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "init_std": 0.1}
    lengths = {"max_source_positions": 10, "max_target_positions": 16, "vocab_size": VOCABULARY}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(**sizes, **heads, **lengths, **special, suppress_tokens=None, begin_suppress_tokens=None)
    return WhisperForConditionalGeneration(config)


def recording(generator):
    return {
        "input_features": torch.randn(8, 20, generator=generator),
        "labels": torch.randint(3, VOCABULARY, (7,), generator=generator),
    }


# ---- sequences to sequences ------------------------------------------------------------------------------------------
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def translation(generator):
    return {
        "input_ids": torch.randint(3, VOCABULARY, (9,), generator=generator),
        "labels": torch.randint(3, VOCABULARY, (7,), generator=generator),
    }


# ---- images and text -------------------------------------------------------------------------------------------------
IMAGE = 90
"""Token in the place of an image's features."""


def qwen2_5_vl():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    patches = {
        "in_channels": 1,
        "patch_size": 2,
        "temporal_patch_size": 1,
        "window_size": 8,
        "fullatt_block_indexes": [1],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    special = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    text = TEXT | {"rope_parameters": rope, "max_position_embeddings": 64}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision | patches, **special)
    return Qwen2_5_VLForConditionalGeneration(config)


def seen_by_qwen(generator):
    """An image of 4 x 4 patches, of which each 2 x 2 are one token."""
    ids = torch.randint(3, 90, (10,), generator=generator)
    ids[1], ids[2:6], ids[6] = 92, IMAGE, 93
    return {
        "input_ids": ids,
        "labels": ids.masked_fill((ids >= IMAGE), -100),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(16, 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def in_a_row(rows):
    """Patches of all images one after the other, as its processor makes them."""
    joined = ("pixel_values", "image_grid_thw")
    return {n: (torch.cat if n in joined else torch.stack)([row[n] for row in rows]) for n in rows[0]}


def gemma3():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = HEADS | {"image_size": 8, "patch_size": 2, "num_channels": 1, "vision_use_head": False}
    text = TEXT | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "max_position_embeddings": 64}
    special = {"image_token_index": IMAGE, "boi_token_index": 92, "eoi_token_index": 93, "mm_tokens_per_image": 4}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **special))
    with torch.no_grad():  # is zero in a new model
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.1)
    return model


def seen_by_gemma(generator):
    ids = torch.randint(3, 90, (10,), generator=generator)
    ids[1], ids[2:6], ids[6] = 92, IMAGE, 93
    return {
        "input_ids": ids,
        "labels": ids.masked_fill((ids >= IMAGE), -100),
        "token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(1, 8, 8, generator=generator),
    }


# ---- diffusion -------------------------------------------------------------------------------------------------------
def unet():
    from diffusers import UNet2DModel

    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4}
    return UNet2DModel(sample_size=8, in_channels=1, out_channels=1, **blocks, **sizes)


def dit():
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
    model = DiTTransformer2DModel(in_channels=1, out_channels=1, num_embeds_ada_norm=10, **sizes)
    model.transformer_blocks[0].norm1.emb.class_embedder.dropout_prob = 0.0
    model.transformer_blocks[1].norm1.emb.class_embedder.dropout_prob = 0.0
    return model


UNET_BLOCKS = ("down_blocks.*", "mid_block", "up_blocks.*")


def noisy_picture(generator):
    return {
        "clean": torch.randn(1, 8, 8, generator=generator),
        "noise": torch.randn(1, 8, 8, generator=generator),
        "timesteps": torch.randint(10, (), generator=generator),
        "labels": torch.randint(3, (), generator=generator),
    }


def of_the_noise(model, batch, **labels):
    """What diffusers' scripts minimize: the squared error of the noise that the model finds."""
    from diffusers import DDPMScheduler

    noisy = DDPMScheduler(num_train_timesteps=10).add_noise(batch["clean"], batch["noise"], batch["timesteps"])
    return F.mse_loss(model(noisy, batch["timesteps"], **labels).sample, batch["noise"])


def of_the_noise_of_a_class(model, batch):
    return of_the_noise(model, batch, class_labels=batch["labels"])


TASKS = {
    "vit": Task(vit, picture, averaged=True),
    "whisper": Task(whisper, recording),
    "t5": Task(t5, translation),
    "qwen2_5_vl": Task(qwen2_5_vl, seen_by_qwen, collate=in_a_row),
    "gemma3": Task(gemma3, seen_by_gemma),
    "unet": Task(
        unet, noisy_picture, of_the_noise, averaged=True, blocks=("down_blocks.*", "mid_block", "up_blocks.*")
    ),
    "dit": Task(dit, noisy_picture, of_the_noise_of_a_class, averaged=True, blocks=("transformer_blocks.*",)),
}


# ---- the loop --------------------------------------------------------------------------------------------------------
def train(task: str, plugins: list[Any] | None = None) -> tuple[list[float], dict[str, dict[str, torch.Tensor]]]:
    """Losses of the loop, its weights and perhaps their average, with Accelerate's class if ``plugins`` is None."""
    if plugins is None:
        from accelerate import Accelerator

        accelerator: Any = Accelerator(cpu=True)
    else:
        from neuron_accel import NeuronAccelerator

        accelerator = NeuronAccelerator(config={"plugins": plugins})
    full_weights = getattr(accelerator, "full_weights", contextlib.nullcontext)
    chosen, generator = TASKS[task], torch.Generator().manual_seed(1)
    rows = [chosen.row(generator) for _ in range(ROWS)]
    size = BATCH // accelerator.num_processes
    torch.manual_seed(0)
    model = chosen.build()
    generator.manual_seed(2)
    with torch.no_grad():  # away from zeros and ones, under which a mistake would not show
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    loader = torch.utils.data.DataLoader(rows, batch_size=size, collate_fn=chosen.collate)  # type: ignore[arg-type]
    processes = accelerator.num_processes  # a prepared scheduler advances once for each
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / processes))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    average = None
    if chosen.averaged:
        from diffusers.training_utils import EMAModel

        with full_weights(model):
            average = EMAModel(model.parameters(), use_ema_warmup=True)
    model.train()
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = chosen.loss(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if average is not None and accelerator.sync_gradients:
            with full_weights(model):
                average.step(model.parameters())
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weights = {"trained": copied(accelerator.get_state_dict(model))}
    if average is not None:
        with full_weights(model):
            average.copy_to(model.parameters())
        weights["averaged"] = copied(accelerator.get_state_dict(model))
    # Before the process group is destroyed: a DistributedDataParallel that is the last to hold it waits for gloo's
    # threads in its destructor, and they may wait for the interpreter that it holds (PyTorch issue 56297).
    model, optimizer, loader, scheduler = accelerator.free_memory(model, optimizer, loader, scheduler)
    accelerator.end_training()
    return losses, weights


def copied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in weights.items()}
