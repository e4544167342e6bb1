"""Tiny models and data for training scripts, made on the spot, in the folders and formats that the scripts read.

Models have no dropout, which tensor-parallel ranks do not draw as one process does, and no bias whose gradient is zero
but for rounding, which Adam would follow at full length.
"""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = [f"w{number}" for number in range(24)]
VOCABULARY = {"<pad>": 0, "</s>": 1, "<unk>": 2, "<s>": 3} | {word: number for number, word in enumerate(WORDS, 4)}
CLASSES = ("cat", "dog")
ROWS = 14
"""Samples to train on: with two ranks of batches of two, the last batch is uneven."""


# ---- data ------------------------------------------------------------------------------------------------------------
def pictures(folder: Path) -> None:
    """Of two classes, in folders of their names."""
    drawn = np.random.default_rng(0)
    for split, rows in (("train", ROWS), ("validation", 6)):
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True)
        for number in range(rows):
            picture(drawn).save(folder / split / CLASSES[number % 2] / f"{number}.png")


def captioned(folder: Path) -> None:
    """Pictures and a file of texts."""
    drawn = np.random.default_rng(0)
    with open(folder / "metadata.jsonl", "w") as file:
        for number in range(ROWS):
            picture(drawn).save(folder / f"{number}.png")
            file.write(json.dumps({"file_name": f"{number}.png", "text": sentence(drawn, 4)}) + "\n")


def pets(folder: Path) -> None:
    """Pictures whose names begin with their class, as those of the Oxford-IIIT Pet Dataset."""
    drawn = np.random.default_rng(0)
    for number in range(ROWS):
        picture(drawn).save(folder / f"{CLASSES[number % 2]}_{number}.jpg")


def picture(drawn: np.random.Generator) -> Any:
    from PIL import Image

    return Image.fromarray(drawn.integers(0, 255, (16, 16, 3), dtype=np.uint8))


def sentence(drawn: np.random.Generator, length: int) -> str:
    return " ".join(WORDS[index] for index in drawn.integers(0, len(WORDS), length))


def pairs(folder: Path) -> None:
    """Sentences in two languages, a row for each."""
    drawn = np.random.default_rng(1)
    for split, rows in (("train", ROWS), ("validation", 6)):
        with open(folder / f"{split}.json", "w") as file:
            for number in range(rows):
                pair = {"en": sentence(drawn, 4 + number % 3), "de": sentence(drawn, 3 + number % 4)}
                file.write(json.dumps({"translation": pair}) + "\n")


def recordings(folder: Path) -> None:
    """Files of a tenth of a second, with what is said in them."""
    drawn = np.random.default_rng(2)
    for split, rows in (("train", ROWS), ("validation", 6)):
        (folder / split).mkdir(parents=True)
        with open(folder / split / "metadata.jsonl", "w") as texts:
            for number in range(rows):
                with wave.open(str(folder / split / f"{number}.wav"), "wb") as file:
                    file.setparams((1, 2, 16000, 0, "NONE", ""))
                    file.writeframes(drawn.integers(-9999, 9999, 1600, dtype=np.int16).tobytes())
                texts.write(json.dumps({"file_name": f"{number}.wav", "text": sentence(drawn, 3 + number % 3)}) + "\n")


# ---- tokenizers ------------------------------------------------------------------------------------------------------
def words(folder: Path) -> None:
    """A tokenizer that knows a word for each id, and ends a text as T5's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def clips(folder: Path) -> None:
    """CLIP's tokenizer without merges: a token for each letter and digit."""
    from transformers import CLIPTokenizer

    symbols = "w0123456789"
    tokens = ["<|startoftext|>", "<|endoftext|>", *symbols, *(f"{symbol}</w>" for symbol in symbols)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16).save_pretrained(folder)


# ---- models ----------------------------------------------------------------------------------------------------------
def vit(folder: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    image = {"image_size": 16, "patch_size": 8, "num_labels": 2, "qkv_bias": False, "initializer_range": 0.1}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ViTForImageClassification(ViTConfig(**sizes, **image, **off)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)


def t5(folder: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    ids = {"vocab_size": 32, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    T5ForConditionalGeneration(T5Config(**sizes, **ids)).save_pretrained(folder)
    words(folder)


def whisper(folder: Path) -> None:
    """Windows of a tenth of a second: ten frames of 80 values, of which its convolutions make five."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 80, "dropout": 0.0}
    lengths = {"max_source_positions": 5, "max_target_positions": 16, "vocab_size": 32}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3, "decoder_start_token_id": 3}
    config = WhisperConfig(**sizes, **heads, **lengths, **ids, suppress_tokens=None, begin_suppress_tokens=None)
    model = WhisperForConditionalGeneration(config)
    model.generation_config.begin_suppress_tokens = model.generation_config.suppress_tokens = None
    model.save_pretrained(folder)
    words(folder)
    WhisperFeatureExtractor(chunk_length=0.1, n_fft=400).save_pretrained(folder)


def unet(folder: Path) -> None:
    from diffusers import UNet2DModel

    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4}
    UNet2DModel(sample_size=16, **kinds, **sizes).save_config(folder)


def stable_diffusion(folder: Path) -> None:
    """A pipeline of Stable Diffusion: texts, latents and a UNet conditioned on texts."""
    from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

    kinds = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    kinds["up_block_types"] = ("CrossAttnUpBlock2D", "UpBlock2D")
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4}
    clips(folder / "tokenizer")
    pipeline = StableDiffusionPipeline(
        vae=_autoencoder(4),
        text_encoder=CLIPTextModel(_text_of_clip()),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        unet=UNet2DConditionModel(sample_size=8, cross_attention_dim=32, **kinds, **sizes),
        scheduler=DDPMScheduler(num_train_timesteps=100),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)


def flux(folder: Path) -> None:
    """A pipeline of Flux: texts of CLIP and of T5, latents and a diffusion transformer."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

    sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    inputs = {"in_channels": 4, "patch_size": 1, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    texts = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 32}
    clips(folder / "tokenizer")
    pieces = [(piece, -1.0) for piece in ("<pad>", "</s>", "<unk>", "\u2581", *"w0123456789")]
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_autoencoder(1, shift_factor=0.1),
        text_encoder=CLIPTextModel(_text_of_clip()),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder_2=T5EncoderModel(T5Config(**texts, dropout_rate=0.0)),
        tokenizer_2=T5Tokenizer(vocab=pieces, extra_ids=0),
        transformer=FluxTransformer2DModel(**sizes, **inputs, axes_dims_rope=(4, 4, 8)),
    )
    pipeline.save_pretrained(folder)


def _autoencoder(channels: int, **options: Any):
    from diffusers import AutoencoderKL

    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(
        block_out_channels=(4, 8), norm_num_groups=2, latent_channels=channels, shift_factor=0.1, **kinds
    )


def _text_of_clip():
    from transformers import CLIPTextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 24, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return CLIPTextConfig(**sizes, **ids, max_position_embeddings=77, projection_dim=32)


MADE = {
    "pictures": pictures,
    "captioned": captioned,
    "pets": pets,
    "pairs": pairs,
    "recordings": recordings,
    "vit": vit,
    "t5": t5,
    "whisper": whisper,
    "unet": unet,
    "stable_diffusion": stable_diffusion,
    "flux": flux,
}


def make(folder: Path) -> None:
    """Everything above, each in a folder of its name."""
    torch.manual_seed(0)
    for name, maker in MADE.items():
        (folder / name).mkdir(parents=True)
        maker(folder / name)
