"""Tiny models of diffusers, and the loss that its training scripts minimize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SAMPLES = 4
Draw = Callable[[torch.Generator], torch.Tensor]


def normal(*shape: int) -> Draw:
    return lambda generator: torch.randn(SAMPLES, *shape, generator=generator)


def integers(below: int, *shape: int) -> Draw:
    return lambda generator: torch.randint(below, (SAMPLES, *shape), generator=generator)


def ones(*shape: int, dtype: torch.dtype = torch.int64) -> Draw:
    return lambda generator: torch.ones(SAMPLES, *shape, dtype=dtype)


def sizes(**given: Any) -> dict[str, Any]:
    return given


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a class is made tiny and what it is called with.

    Args:
        config: its sizes.
        shape: of one sample: noisy for a model that finds noise, clean for an autoencoder.
        inputs: draws what each sample has beside it.
        fixed: further arguments, which are the same for all samples.
        dtype: of weights and samples; float64 where gradients are hardly more than rounding in float32.
        arrange: makes arguments of what was drawn, where they are not a tensor for all samples.
        first: the name of the argument for the samples.
        finds: shape of what is found in a sample; None: that of the sample.
    """

    config: Mapping[str, Any]
    shape: tuple[int, ...]
    inputs: Mapping[str, Draw] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    first: str = "hidden_states"
    finds: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    arrange: Callable[[dict[str, Any]], dict[str, Any]] = dict


TIME = {"timestep": integers(10)}
TEXT = {"encoder_hidden_states": normal(5, 16)}
POOLED = {"pooled_projections": normal(12)}
SEEN = {"encoder_attention_mask": ones(5)}
HEADS = sizes(num_attention_heads=4, attention_head_dim=8)
IMAGE, VIDEO, TOKENS = (4, 8, 8), (4, 3, 8, 8), (16, 4)
FRAMES_FIRST = (3, 4, 8, 8)
PLACES = {
    "img_ids": torch.cat([torch.zeros(16, 1), torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))], 1),
    "txt_ids": torch.zeros(5, 3),
}
JOINT = sizes(joint_attention_dim=16, pooled_projection_dim=12)
ROPE = sizes(axes_dims_rope=(4, 2, 2))
UNET = sizes(block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4)
CROSS = sizes(cross_attention_dim=16, attention_head_dim=4)
CODER = (
    sizes(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
    | UNET
    | sizes(latent_channels=4)
)
WAN = sizes(num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16) | sizes(
    freq_dim=16, ffn_dim=48, num_layers=2, rope_max_seq_len=32
)

FAMILIES: dict[str, Family] = {
    # UNets
    "UNet1DModel": Family(
        config=sizes(sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 32))
        | sizes(extra_in_channels=64, down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"))
        | sizes(up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip")),
        shape=(4, 16),
        inputs=TIME,
        first="sample",
    ),
    "UNet2DModel": Family(
        config=sizes(sample_size=8, in_channels=4, out_channels=4, attention_head_dim=4)
        | UNET
        | sizes(down_block_types=("DownBlock2D", "AttnDownBlock2D"))
        | sizes(up_block_types=("AttnUpBlock2D", "UpBlock2D")),
        shape=IMAGE,
        inputs=TIME,
        first="sample",
    ),
    "UNet2DConditionModel": Family(
        config=sizes(sample_size=8)
        | UNET
        | CROSS
        | sizes(use_linear_projection=True, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"))
        | sizes(up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), addition_embed_type="text_time")
        | sizes(addition_time_embed_dim=8, projection_class_embeddings_input_dim=12 + 6 * 8),
        shape=IMAGE,
        inputs=TIME | TEXT | {"text_embeds": normal(12), "time_ids": integers(8, 6)},
        arrange=lambda given: {"added_cond_kwargs": {n: given.pop(n) for n in ("text_embeds", "time_ids")}} | given,
        first="sample",
    ),
    "UNet3DConditionModel": Family(
        config=sizes(sample_size=8)
        | UNET
        | sizes(cross_attention_dim=16, attention_head_dim=4)
        | sizes(down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"))
        | sizes(up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
        shape=VIDEO,
        inputs=TIME | TEXT,
        first="sample",
    ),
    "UNetMotionModel": Family(
        config=sizes(sample_size=8)
        | UNET
        | sizes(cross_attention_dim=16, num_attention_heads=2, motion_num_attention_heads=2)
        | sizes(down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"))
        | sizes(up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion")),
        shape=VIDEO,
        inputs=TIME | {"encoder_hidden_states": normal(3, 5, 16)},
        arrange=lambda given: given | {"encoder_hidden_states": given["encoder_hidden_states"].flatten(0, 1)},
        first="sample",
    ),
    "UNetSpatioTemporalConditionModel": Family(
        config=sizes(sample_size=8, in_channels=4, block_out_channels=(32, 64), layers_per_block=1)
        | sizes(cross_attention_dim=16, num_attention_heads=2, num_frames=3, addition_time_embed_dim=8)
        | sizes(projection_class_embeddings_input_dim=24)
        | sizes(down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"))
        | sizes(up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")),
        shape=FRAMES_FIRST,
        inputs=TIME | {"encoder_hidden_states": normal(1, 16), "added_time_ids": integers(8, 3)},
        first="sample",
    ),
    "I2VGenXLUNet": Family(
        config=sizes(sample_size=8)
        | UNET
        | CROSS
        | sizes(down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"))
        | sizes(up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
        shape=VIDEO,
        inputs=TIME | TEXT | {"fps": integers(8), "image_latents": normal(*VIDEO), "image_embeddings": normal(16)},
        first="sample",
    ),
    "Kandinsky3UNet": Family(
        config=sizes(time_embedding_dim=16, groups=2, attention_head_dim=4, layers_per_block=3)
        | sizes(block_out_channels=(8, 8, 16, 16), cross_attention_dim=16, encoder_hid_dim=16),
        shape=IMAGE,
        inputs=TIME | TEXT | SEEN,
        first="sample",
        dtype=torch.float64,
    ),
    "StableCascadeUNet": Family(
        config=sizes(in_channels=4, out_channels=4, timestep_ratio_embedding_dim=8, conditioning_dim=16)
        | sizes(block_out_channels=(16, 16), num_attention_heads=(2, 2), down_num_layers_per_block=(1, 1))
        | sizes(up_num_layers_per_block=(1, 1), dropout=(0.0, 0.0), clip_text_pooled_in_channels=12),
        shape=IMAGE,
        inputs={"timestep_ratio": lambda g: torch.rand(SAMPLES, generator=g), "clip_text_pooled": normal(1, 12)},
        first="sample",
    ),
    # transformers of images
    "DiTTransformer2DModel": Family(
        config=HEADS | sizes(num_layers=2, sample_size=8, num_embeds_ada_norm=10, norm_num_groups=4),
        shape=IMAGE,
        inputs=TIME | {"class_labels": integers(3)},
    ),
    "Transformer2DModel": Family(
        config=HEADS | sizes(num_layers=2, in_channels=4, norm_num_groups=2, cross_attention_dim=16),
        shape=IMAGE,
        inputs=TEXT,
    ),
    "PixArtTransformer2DModel": Family(
        config=HEADS
        | sizes(num_layers=2, sample_size=8, out_channels=4, cross_attention_dim=32, caption_channels=16)
        | sizes(use_additional_conditions=False),
        shape=IMAGE,
        inputs=TIME | TEXT | SEEN,
        fixed={"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "SD3Transformer2DModel": Family(
        config=HEADS
        | JOINT
        | sizes(num_layers=2, sample_size=8, in_channels=4, out_channels=4, caption_projection_dim=32)
        | sizes(pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm"),
        shape=IMAGE,
        inputs=TIME | TEXT | POOLED,
    ),
    "FluxTransformer2DModel": Family(
        config=HEADS | JOINT | ROPE | sizes(num_layers=2, num_single_layers=2, in_channels=4, guidance_embeds=True),
        shape=TOKENS,
        inputs=TIME | TEXT | POOLED | {"guidance": ones(dtype=torch.float32)},
        fixed=PLACES,
    ),
    "Flux2Transformer2DModel": Family(
        config=HEADS
        | sizes(joint_attention_dim=16, num_layers=2, num_single_layers=2, in_channels=4)
        | sizes(axes_dims_rope=(2, 2, 2, 2), timestep_guidance_channels=16),
        shape=TOKENS,
        inputs=TIME | TEXT | {"guidance": ones(dtype=torch.float32)},
        fixed={name: F.pad(value, (0, 1)) for name, value in PLACES.items()},
    ),
    "ChromaTransformer2DModel": Family(
        config=HEADS
        | ROPE
        | sizes(joint_attention_dim=16, num_layers=2, num_single_layers=2, in_channels=4)
        | sizes(approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1),
        shape=TOKENS,
        inputs=TIME | TEXT,
        fixed=PLACES,
    ),
    "BriaTransformer2DModel": Family(
        config=HEADS | ROPE | sizes(joint_attention_dim=16, num_layers=2, num_single_layers=2, in_channels=4),
        shape=TOKENS,
        inputs=TIME | TEXT,
        fixed=PLACES,
    ),
    "AuraFlowTransformer2DModel": Family(
        config=HEADS
        | sizes(sample_size=8, num_mmdit_layers=2, num_single_dit_layers=2, pos_embed_max_size=64)
        | sizes(joint_attention_dim=16, caption_projection_dim=32),
        shape=IMAGE,
        inputs=TIME | TEXT,
    ),
    "HunyuanDiT2DModel": Family(
        config=HEADS
        | sizes(in_channels=4, patch_size=2, sample_size=8, hidden_size=32, num_layers=2)
        | sizes(learn_sigma=False, cross_attention_dim=16, cross_attention_dim_t5=24, text_len=5)
        | sizes(pooled_projection_dim=16, text_len_t5=6, use_style_cond_and_image_meta_size=False),
        shape=IMAGE,
        inputs=TEXT
        | {
            "timestep": lambda generator: torch.rand(SAMPLES, generator=generator),
            "text_embedding_mask": ones(5),
            "encoder_hidden_states_t5": normal(6, 24),
            "text_embedding_mask_t5": ones(6),
        },
        fixed={
            "image_rotary_emb": (
                torch.linspace(-1, 1, 128).view(16, 8).cos(),
                torch.linspace(-1, 1, 128).view(16, 8).sin(),
            )
        },
    ),
    "Lumina2Transformer2DModel": Family(
        config=sizes(sample_size=8, in_channels=4, hidden_size=32, num_layers=2, num_refiner_layers=1)
        | sizes(num_attention_heads=4, num_kv_heads=2, multiple_of=8, axes_dim_rope=(4, 2, 2))
        | sizes(axes_lens=(32, 8, 8), cap_feat_dim=16),
        shape=IMAGE,
        inputs=TIME | TEXT | {"encoder_attention_mask": ones(5, dtype=torch.bool)},
    ),
    "LuminaNextDiT2DModel": Family(
        config=sizes(sample_size=8, hidden_size=32, num_layers=2, num_attention_heads=4, num_kv_heads=2)
        | sizes(multiple_of=8, learn_sigma=False, cross_attention_dim=16),
        shape=IMAGE,
        inputs=TIME | TEXT | {"encoder_mask": ones(5)},
        fixed={
            "image_rotary_emb": torch.polar(torch.ones(8, 8, 4), torch.linspace(-1, 1, 256).view(8, 8, 4)),
            "cross_attention_kwargs": {},
        },
    ),
    "SanaTransformer2DModel": Family(
        config=HEADS
        | sizes(in_channels=4, out_channels=4, num_layers=2, num_cross_attention_heads=4)
        | sizes(cross_attention_head_dim=8, cross_attention_dim=32, caption_channels=16, sample_size=8),
        shape=IMAGE,
        inputs=TIME | TEXT | SEEN,
    ),
    "CogView3PlusTransformer2DModel": Family(
        config=HEADS
        | sizes(in_channels=4, out_channels=4, num_layers=2, text_embed_dim=16, time_embed_dim=16)
        | sizes(condition_dim=8, pos_embed_max_size=8, sample_size=8),
        shape=IMAGE,
        inputs=TIME | TEXT | {n: integers(8, 2) for n in ("original_size", "target_size", "crop_coords")},
    ),
    "CogView4Transformer2DModel": Family(
        config=HEADS
        | sizes(in_channels=4, out_channels=4, num_layers=2, text_embed_dim=16, time_embed_dim=16)
        | sizes(condition_dim=8, pos_embed_max_size=8, sample_size=8, rope_axes_dim=(8, 8)),
        shape=IMAGE,
        inputs=TIME | TEXT | {n: integers(8, 2) for n in ("original_size", "target_size", "crop_coords")},
    ),
    "QwenImageTransformer2DModel": Family(
        config=HEADS | ROPE | sizes(in_channels=4, out_channels=1, num_layers=2, joint_attention_dim=16),
        shape=TOKENS,
        inputs=TIME | TEXT | {"encoder_hidden_states_mask": ones(5)},
        arrange=lambda given: given | {"img_shapes": [[(1, 4, 4)]] * len(given["hidden_states"])},
    ),
    "OmniGenTransformer2DModel": Family(
        config=sizes(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48)
        | sizes(num_layers=2, pad_token_id=0, vocab_size=40, max_position_embeddings=64)
        | sizes(original_max_position_embeddings=64, pos_embed_max_size=8, time_step_dim=16)
        | sizes(rope_scaling={"long_factor": [1.0] * 4, "short_factor": [1.0] * 4}),
        shape=IMAGE,
        inputs=TIME
        | {
            "input_ids": integers(40, 5),
            "attention_mask": ones(22, 22),
            "position_ids": lambda g: torch.arange(22).repeat(SAMPLES, 1),
        },
        fixed={"input_img_latents": [], "input_image_sizes": {}},
    ),
    "HiDreamImageTransformer2DModel": Family(
        config=HEADS
        | sizes(patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1)
        | sizes(caption_channels=[16, 16], text_emb_dim=12, axes_dims_rope=(4, 2, 2))
        | sizes(max_resolution=(8, 8), llama_layers=[0, 1]),
        shape=IMAGE,
        finds=(4, 16, 4),  # patches, in training
        inputs={
            "timesteps": integers(10),
            "encoder_hidden_states_t5": normal(5, 16),
            "pooled_embeds": normal(12),
            "encoder_hidden_states_llama3": normal(2, 5, 16),
        },
        arrange=lambda given: (
            given | {"encoder_hidden_states_llama3": given["encoder_hidden_states_llama3"].transpose(0, 1)}
        ),
    ),
    "PRXTransformer2DModel": Family(
        config=sizes(in_channels=4, context_in_dim=16, hidden_size=32, num_heads=4, depth=2, axes_dim=(4, 4)),
        shape=IMAGE,
        inputs=TIME | TEXT,
    ),
    "PriorTransformer": Family(
        config=HEADS | sizes(num_layers=2, embedding_dim=16, num_embeddings=5, additional_embeddings=4),
        shape=(16,),
        inputs=TIME | TEXT | {"proj_embedding": normal(16), "attention_mask": ones(5, dtype=torch.bool)},
    ),
    # transformers of videos and sounds
    "CogVideoXTransformer3DModel": Family(
        config=HEADS
        | sizes(in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=16, num_layers=2)
        | sizes(sample_width=8, sample_height=8, sample_frames=9, max_text_seq_length=5),
        shape=FRAMES_FIRST,
        inputs=TIME | TEXT,
    ),
    "LTXVideoTransformer3DModel": Family(
        config=HEADS | sizes(in_channels=4, out_channels=4, cross_attention_dim=32, num_layers=2, caption_channels=16),
        shape=(48, 4),
        inputs=TIME | TEXT | SEEN,
        fixed={"num_frames": 3, "height": 4, "width": 4},
    ),
    "WanTransformer3DModel": Family(config=WAN, shape=VIDEO, inputs=TIME | TEXT),
    "WanVACETransformer3DModel": Family(
        config=WAN | sizes(vace_layers=[0], vace_in_channels=6),
        shape=VIDEO,
        inputs=TIME | TEXT | {"control_hidden_states": normal(6, 3, 8, 8)},
    ),
    "SkyReelsV2Transformer3DModel": Family(config=WAN, shape=VIDEO, inputs=TIME | TEXT),
    "HunyuanVideoTransformer3DModel": Family(
        config=sizes(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1)
        | sizes(num_single_layers=1, num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=12)
        | sizes(rope_axes_dim=(4, 4, 4)),
        shape=VIDEO,
        inputs=TIME | TEXT | POOLED | SEEN | {"guidance": ones(dtype=torch.float32)},
    ),
    "MochiTransformer3DModel": Family(
        config=HEADS
        | sizes(num_layers=2, pooled_projection_dim=16, in_channels=4, text_embed_dim=16)
        | sizes(time_embed_dim=8, max_sequence_length=8, activation_fn="swiglu"),
        shape=VIDEO,
        inputs=TIME | TEXT | {"encoder_attention_mask": ones(5, dtype=torch.bool)},
    ),
    "AllegroTransformer3DModel": Family(
        config=sizes(num_attention_heads=4, attention_head_dim=12, num_layers=2, cross_attention_dim=48)
        | sizes(sample_height=8, sample_width=8, sample_frames=3, caption_channels=16),
        shape=VIDEO,
        inputs=TIME | TEXT | SEEN | {"attention_mask": ones(3, 8, 8)},
    ),
    "LatteTransformer3DModel": Family(
        config=HEADS
        | sizes(in_channels=4, out_channels=4, num_layers=2, cross_attention_dim=32, sample_size=8)
        | sizes(patch_size=2, num_embeds_ada_norm=10, norm_type="ada_norm_single", caption_channels=16)
        | sizes(video_length=3, norm_elementwise_affine=False, attention_bias=True),
        shape=VIDEO,
        inputs=TIME | TEXT,
    ),
    "EasyAnimateTransformer3DModel": Family(
        config=sizes(num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, patch_size=2)
        | sizes(num_layers=2, mmdit_layers=1, time_embed_dim=8, text_embed_dim=16, sample_width=8)
        | sizes(sample_height=8),
        shape=VIDEO,
        inputs=TIME | TEXT,
    ),
    "CosmosTransformer3DModel": Family(
        config=sizes(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2)
        | sizes(text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 8, 8), concat_padding_mask=False),
        shape=VIDEO,
        inputs=TIME | TEXT,
    ),
    "Kandinsky5Transformer3DModel": Family(
        config=sizes(in_text_dim=16, in_text_dim2=12, time_dim=8, model_dim=32, ff_dim=48, num_text_blocks=1)
        | sizes(num_visual_blocks=2, axes_dims=(4, 2, 2)),
        shape=(3, 8, 8, 4),
        inputs=TIME | TEXT | POOLED,
        fixed={
            "visual_rope_pos": [torch.arange(3), torch.arange(4), torch.arange(4)],
            "text_rope_pos": torch.arange(5),
        },
    ),
    "StableAudioDiTModel": Family(
        config=sizes(sample_size=8, in_channels=4, out_channels=4, num_layers=2)
        | HEADS
        | sizes(time_proj_dim=16, num_key_value_attention_heads=2, cross_attention_dim=16)
        | sizes(cross_attention_input_dim=16, global_states_input_dim=12),
        shape=(4, 8),
        inputs=TIME | TEXT | {"global_hidden_states": normal(1, 12)},
        fixed={
            "rotary_embedding": (torch.linspace(-1, 1, 36).view(9, 4).cos(), torch.linspace(-1, 1, 36).view(9, 4).sin())
        },
    ),
    # autoencoders
    "AutoencoderKL": Family(config=CODER, shape=(3, 8, 8), first="sample"),
    "AsymmetricAutoencoderKL": Family(
        config=sizes(down_block_types=CODER["down_block_types"], up_block_types=CODER["up_block_types"])
        | sizes(down_block_out_channels=(8, 16), up_block_out_channels=(8, 16), norm_num_groups=4),
        shape=(3, 8, 8),
        inputs={"mask": lambda generator: integers(2, 1, 8, 8)(generator).float()},
        first="sample",
    ),
    "AutoencoderTiny": Family(
        config=sizes(encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16))
        | sizes(num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)),
        shape=(3, 8, 8),
        first="sample",
    ),
    "AutoencoderDC": Family(
        config=sizes(latent_channels=4, attention_head_dim=4, encoder_block_out_channels=(8, 16))
        | sizes(encoder_block_types=("ResBlock", "EfficientViTBlock"))
        | sizes(decoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_out_channels=(8, 16))
        | sizes(encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1))
        | sizes(encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,))),
        shape=(3, 8, 8),
        first="sample",
    ),
    "AutoencoderKLTemporalDecoder": Family(
        config=sizes(down_block_types=CODER["down_block_types"], block_out_channels=(32, 32))
        | sizes(layers_per_block=1),
        shape=(3, 8, 8),
        first="sample",
        fixed={"num_frames": 1},
    ),
    "AutoencoderKLCogVideoX": Family(
        config=sizes(down_block_types=("CogVideoXDownBlock3D",) * 2)
        | sizes(up_block_types=("CogVideoXUpBlock3D",) * 2)
        | UNET
        | sizes(latent_channels=4, sample_height=8, sample_width=8),
        shape=(3, 1, 8, 8),
        first="sample",
    ),
    "AutoencoderKLWan": Family(
        config=sizes(base_dim=4, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False])
        | sizes(latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        shape=(3, 1, 8, 8),
        first="sample",
    ),
    "AutoencoderKLQwenImage": Family(
        config=sizes(base_dim=4, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False])
        | sizes(latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        shape=(3, 1, 8, 8),
        first="sample",
    ),
    "AutoencoderKLLTXVideo": Family(
        config=sizes(latent_channels=4, block_out_channels=(8, 8), decoder_block_out_channels=(8, 8))
        | sizes(patch_size=1, layers_per_block=(1, 1, 1), decoder_layers_per_block=(1, 1, 1))
        | sizes(spatio_temporal_scaling=(True, False), decoder_spatio_temporal_scaling=(True, False))
        | sizes(decoder_inject_noise=(False, False, False), downsample_type=("conv", "conv"))
        | sizes(upsample_residual=(False, False), upsample_factor=(1, 1))
        | sizes(down_block_types=("LTXVideoDownBlock3D",) * 2),
        shape=(3, 3, 8, 8),
        first="sample",
    ),
    "AutoencoderKLHunyuanVideo": Family(
        config=sizes(down_block_types=("HunyuanVideoDownBlock3D",) * 4)
        | sizes(up_block_types=("HunyuanVideoUpBlock3D",) * 4)
        | UNET
        | sizes(block_out_channels=(8, 8, 8, 8), norm_num_groups=2, latent_channels=4),
        shape=(3, 5, 32, 32),
        first="sample",
    ),
    "AutoencoderKLMochi": Family(
        config=sizes(latent_channels=4, encoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1,) * 5)
        | sizes(decoder_block_out_channels=(32, 32, 32, 32), latents_mean=(0.0,) * 4)
        | sizes(latents_std=(1.0,) * 4),
        shape=(3, 7, 16, 16),
        first="sample",
        dtype=torch.float64,
    ),
    "AutoencoderOobleck": Family(
        config=sizes(encoder_hidden_size=8, downsampling_ratios=[2, 4], channel_multiples=[1, 2])
        | sizes(decoder_channels=8, decoder_input_channels=4),
        shape=(2, 32),
        first="sample",
    ),
}


def build(name: str) -> nn.Module:
    """A tiny model of a class, which is called with a batch of :func:`draw` and returns the loss."""
    import diffusers

    family = FAMILIES[name]
    model = getattr(diffusers, name)(**family.config).to(family.dtype)
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # labels that are left out at random
            module.dropout_prob = 0.0
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    forward = model.forward

    def loss(target: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        """The squared error of what the model finds."""
        return F.mse_loss(forward(**family.fixed, **family.arrange(given), return_dict=False)[0], target)

    model.forward = loss
    return model  # type: ignore[no-any-return]


def draw(model: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Samples with noise, which the model has to find; of an autoencoder, without."""
    family = FAMILIES[type(model).__name__]
    clean = torch.randn(SAMPLES, *family.shape, generator=generator)
    given = {name: each(generator) for name, each in family.inputs.items()}
    noise = torch.randn(SAMPLES, *family.shape, generator=generator)
    if hasattr(model, "decoder"):
        drawn = {family.first: clean, "target": clean}
    else:
        drawn = {family.first: clean + noise, "target": noise.view(SAMPLES, *(family.finds or family.shape))}
    return {n: x.to(family.dtype) if x.is_floating_point() else x for n, x in (drawn | given).items()}


def blocks(model: nn.Module) -> list[str]:
    """Patterns of the blocks of a model, which diffusers does not mark: the members of its outermost lists, if any."""
    lists = [
        n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and any(each is not None for each in m)
    ]
    outermost = [f"{name}.*" for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return outermost or [name for name, _ in model.named_children()]
