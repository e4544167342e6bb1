"""A tiny model of every family of transformers, from nothing but its configuration class, and of families of
diffusers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.sweeps import diffusion

VOCABULARY = 101

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "n_embd": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "ffn_hidden_size": 48,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "initializer_range": 0.1,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rotary_dim": 8,
    "multi_query": False,
    "new_decoder_architecture": True,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "attention_heads": 4,
    "embedding_size": 32,
    "decoder_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "encoder_layers": 2,
    "encoder_ffn_dim": 48,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    # mixtures of experts
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # state spaces
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 16,
    "attn_layer_indices": [1],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    # latent and linear attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
IMAGE = VOCABULARY - 11
"""Token in the place of an image's features; none above it is drawn."""

_OTHER_SIZES: dict[str, Any] = {
    # images with text
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index"), IMAGE + 1),
    **dict.fromkeys(("boi_token_index", "boi_token_id", "vision_start_token_id", "image_start_token_id"), IMAGE + 2),
    **dict.fromkeys(("eoi_token_index", "eoi_token_id", "vision_end_token_id", "image_end_token_id"), IMAGE + 3),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), IMAGE + 4),
    "mm_tokens_per_image": 4,
    "vision_use_head": False,
    "depth": 2,
    "out_hidden_size": 32,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
    "mm_posemb_size": 16,
    "mm_embed_dim": 32,
    "output_proj_dims": 32,
    "projection_dim": 32,
    # images
    "image_size": 32,
    "patch_size": 8,
    "window_size": 2,
    "num_labels": 3,
    "embed_dim": 16,
    "depths": 1,
    "hidden_sizes": 32,
    "embedding_size": 32,
    "encoder_hidden_size": 32,
    # speech
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 16,
    "input_feat_per_channel": 8,
    "conv_channels": 16,
    "conv_dim": (8, 8, 8),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (5, 4, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "ctc_loss_reduction": "mean",
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "decoder_start_token_id": 1,
    # encoders and decoders
    "d_kv": 8,
    "d_ff": 48,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_heads": 4,
}
_NO_NOISE = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout",
               "residual_dropout", "embedding_dropout", "activation_dropout", "layerdrop", "resid_dropout",
               "decoder_layerdrop", "attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout",
               "router_jitter_noise", "input_jitter_noise", "drop_path_rate", "dropout_rate", "drop_rate",
               "dropout_prob", "attention_dropout_rate", "classifier_dropout_prob", "mask_time_prob",
               "mask_feature_prob", "feat_proj_dropout", "final_dropout", "encoder_layerdrop",
               "positional_dropout", "conformer_conv_dropout", "speech_encoder_prenet_dropout",
               "speech_decoder_prenet_dropout")  # fmt: skip

_OF_CLASS: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16, "hidden_size": 32},
    "donut-swin": {"image_size": 64, "patch_size": 4},
    "swin": {"image_size": 64, "patch_size": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    # an image of two tiles
    **{name: {"image_grid_pinpoints": [[32, 64]]} for name in ("llava_next", "llava_next_video", "llava_onevision")},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "mllama_vision_model": {
        "vision_output_dim": 64,
        "num_global_layers": 1,
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2]],
        "intermediate_layers_indices": [1],
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "qwen2_5_vl_vision": {"window_size": 32},
    "gemma4_vision": {"num_key_value_heads": 4},
    "llama4_vision_model": {
        "intermediate_size": 128,
        **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
    },
    **{
        f"{name}_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm_ocr")
    },
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2, "is_decoder": True, "is_encoder_decoder": False},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (8, 8),
        "feed_forward_size": 48,
        "attention_head_size": 8,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "roc_bert": {"is_decoder": True, "pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "xmod": {"is_decoder": True, "languages": ("en_XX",), "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""What some classes want beside."""
_WITHOUT = {"prophetnet": ("num_hidden_layers",), "xlnet": ("max_position_embeddings",)}
"""What some classes refuse to be given."""


@dataclass(frozen=True)
class Kind:
    """What models of transformers of a kind are for.

    Args:
        mapping: name of transformers' mapping of ``model_type`` to classes.
        auto: name of its class that makes a model from a configuration.
        batch: makes a batch of four samples for a model, drawn from a generator.
    """

    mapping: str
    auto: str
    batch: Callable[[Any, torch.Generator], dict[str, torch.Tensor]]

    def families(self) -> list[str]:
        """Every ``model_type`` with a class of this kind."""
        return sorted(self.classes())

    def classes(self) -> dict[str, Any]:
        """Names of the classes, by ``model_type``."""
        from transformers.models.auto import modeling_auto

        return dict(getattr(modeling_auto, self.mapping))

    def build(self, model_type: str, kind: str, **options: Any) -> nn.Module:
        import transformers

        config = tiny_config(model_type, kind, **options)
        named = self.classes().get(model_type)
        if isinstance(named, tuple):  # of several classes, that of the model's name is taken
            config.architectures = [named[0]]
        return getattr(transformers, self.auto).from_config(config)  # type: ignore[no-any-return]

    def blocks(self, model: nn.Module) -> list[str]:
        """Patterns of the blocks; none: the library marks them."""
        return []


class Diffusion:
    """The same for models of diffusers: each class is a family."""

    batch = staticmethod(diffusion.draw)
    blocks = staticmethod(diffusion.blocks)

    def families(self) -> list[str]:
        return sorted(diffusion.FAMILIES)

    def build(self, model_type: str, kind: str) -> nn.Module:
        return diffusion.build(model_type)


def _tokens(generator: torch.Generator, length: int = 11) -> torch.Tensor:
    """Four sequences; no degree divides the default length."""
    return torch.randint(3, VOCABULARY, (4, length), generator=generator)


def _text(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = _tokens(generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _images(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    size, channels = getattr(model.config, "image_size", 32), getattr(model.config, "num_channels", 3)
    height, width = (size, size) if isinstance(size, int) else size
    labels = torch.randint(3, (4,), generator=generator)
    return {"pixel_values": torch.randn(4, channels, height, width, generator=generator), "labels": labels}


def _sequences(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def _speech(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Waves, or spectra: time last, as Whisper has them, or first."""
    config, shape = model.config, (1600,)
    if model.main_input_name == "input_features":
        bins = getattr(config, "num_mel_bins", 8)
        shape = (bins, 20)
        for name in ("input_feat_per_channel", "feature_projection_input_dim"):
            shape = (20, getattr(config, name)) if hasattr(config, name) else shape
    drawn = torch.randn(4, *shape, generator=generator)
    return {model.main_input_name: drawn, "labels": _tokens(generator, 5)}


def _images_with_text(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Images, of each of which as many tokens stand for the features as the model makes: of its own size, or of 4 x 4
    patches in a row, of which 2 x 2 are a token. No token stands for those that layers attend to beside the text."""
    import inspect

    vision = getattr(model.config, "vision_config", model.config)
    sides, channels = getattr(vision, "image_size", 32), getattr(vision, "num_channels", 3)
    height, width = (sides, sides) if isinstance(sides, int) else sides
    known = inspect.signature(model.forward).parameters
    places, count, given = torch.cartesian_prod(torch.arange(4), torch.arange(4)), 4, {}
    if "image_position_ids" in known:  # patches, of which some models merge 2 x 2
        size = 3 * getattr(vision, "model_patch_size", vision.patch_size) ** 2
        images, given = torch.randn(4, 16, size, generator=generator), {"image_position_ids": places.repeat(4, 1, 1)}
        count = 16 if hasattr(vision, "model_patch_size") else 4
    elif "image_grid_thw" in known:
        size = getattr(vision, "in_channels", 3) * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        images = torch.randn(4, 16, size, generator=generator)
        given = {"image_grid_thw": torch.tensor([[1, 4, 4]] * 4)}
    elif "aspect_ratio_ids" in known:  # one image of two tiles, which some layers attend to
        images, count = torch.randn(4, 1, 2, channels, height, width, generator=generator), 0
        given = {"aspect_ratio_ids": torch.full((4, 1), 2), "aspect_ratio_mask": torch.ones(4, 1, 2, dtype=torch.long)}
        given["cross_attention_mask"] = torch.ones(4, 7, 1, 2, dtype=torch.long)
    else:
        tiles = getattr(model.config, "image_grid_pinpoints", None)
        images = torch.randn(4, channels, height, width, generator=generator)
        if tiles:  # of the first of the sizes that an image may have, and the image once more
            tall, wide = tiles[0]
            images = torch.randn(4, 1 + tall * wide // height // width, channels, height, width, generator=generator)
            given = {"image_sizes": torch.tensor([[tall, wide]] * 4)}
        elif "pixel_attention_mask" in known:  # several images in each row
            images = images.unsqueeze(1)
        if "image_sizes" in known and getattr(vision, "model_type", "") == "pixtral":
            given = {"image_sizes": torch.tensor([[height, width]] * 4)}
        count = _tokens_of_an_image(model, images, given)
    ids = torch.randint(3, IMAGE, (4, count + 7), generator=generator)
    ids[:, 2 : 2 + count] = IMAGE
    kinds = {name: (ids == IMAGE).long() for name in ("token_type_ids", "mm_token_type_ids") if name in known}
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "pixel_values": images} | given | kinds


def _tokens_of_an_image(model: Any, images: torch.Tensor, given: dict[str, torch.Tensor]) -> int:
    """How many tokens a model makes of each of four images; none if it does not put them among those of the text."""
    if model.device.type == "meta":
        model = tiny_model(model.config.model_type, "images with text")
    owner = next((each for each in (model, getattr(model, "model", None)) if hasattr(each, "get_image_features")), None)
    if owner is None:
        return 0
    with torch.no_grad():
        found = owner.get_image_features(pixel_values=images, **given)
    if isinstance(found, dict):
        found = next(found[name] for name in ("pooler_output", "last_hidden_state") if name in found)
    found = torch.cat(list(found)) if isinstance(found, list | tuple) else found
    return int(found.numel() // found.shape[-1] // 4)


KINDS: dict[str, Any] = {
    "text": Kind("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM", _text),
    "images": Kind("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification", _images),
    "images with text": Kind(
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "AutoModelForImageTextToText", _images_with_text
    ),
    "sequences to sequences": Kind("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM", _sequences),
    "speech to text": Kind("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "AutoModelForSpeechSeq2Seq", _speech),
    "speech, aligned": Kind("MODEL_FOR_CTC_MAPPING_NAMES", "AutoModelForCTC", _speech),
    "diffusion": Diffusion(),
}


def tiny_config(model_type: str, kind: str = "text", **options: Any) -> Any:
    """The configuration of a tiny model: two layers, 32 features, 4 heads, no dropout or noise."""
    from transformers import CONFIG_MAPPING

    return _tiny(CONFIG_MAPPING[model_type], kind, **options)


def _tiny(cls: Any, kind: str, **options: Any) -> Any:
    """The tiny configuration of a class, whose parts, for text and images say, are tiny, too."""
    model_type, default = cls.model_type, cls(**_OF_CLASS.get(cls.model_type, {}))
    sizes = _SIZES | dict.fromkeys(_NO_NOISE, 0.0)
    known = {name: value for name, value in sizes.items() if _has(default, name)}
    if kind != "text":
        others = sizes | _OTHER_SIZES | dict.fromkeys(_NO_NOISE, 0)
        known = {name: _alike(value, default, name) for name, value in others.items() if _has(default, name)}
    if hasattr(default, "kv_lora_rank"):  # every head has a key of its own
        known["num_key_value_heads"] = known["num_attention_heads"]
    if model_type == "codegen":  # lays heads out in four groups, each of which is sharded
        known |= {"n_embd": 64, "hidden_size": 64, "n_head": 16, "num_attention_heads": 16, "rotary_dim": 4}
    if model_type == "gpt_neo":
        known |= {"num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4}
    if model_type == "diffllama":  # each half of its heads is sharded
        known |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    if model_type == "longcat_flash":  # a layer holds two; experts without weights beside those with
        known |= {"num_hidden_layers": 4, "zero_expert_num": 2}
    if model_type in ("gemma4_text", "gemma4_unified_text"):  # heads of other layers are larger
        known["global_head_dim"] = 16
    if model_type == "granitemoehybrid":
        known["layer_types"] = ["linear_attention", "full_attention"]
    elif model_type == "nemotron_h":
        known["layer_types"] = ["linear_attention", "moe", "full_attention", "mlp"]
        known |= {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16}
        known["moe_shared_expert_intermediate_size"] = 16
    elif model_type == "lfm2_moe":
        known |= {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    elif getattr(default, "layer_types", None) and _settable(cls, "layer_types"):
        kinds = list(dict.fromkeys(default.layer_types))
        known["layer_types"] = [kinds[0], kinds[-1]]
    known = {name: value for name, value in known.items() if _settable(cls, name)}
    for name in _WITHOUT.get(model_type, ()):
        known.pop(name, None)
    if getattr(default, "sliding_window", None) is None:
        known.pop("sliding_window", None)
    for name in cls.sub_configs:
        part = getattr(default, name, None)
        if part is None and name == "vision_config" and kind == "images with text":
            part = cls.sub_configs[name]()
        if part is not None and type(part).model_type:
            known[name] = _tiny(type(part), kind)
    config = cls(**known | _OF_CLASS.get(model_type, {}) | options)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def _alike(value: Any, config: Any, name: str) -> Any:
    """A size, or as many of it as a configuration has: one for each stage of a model."""
    try:
        given = getattr(config, name)
    except Exception:  # see _has
        return value
    if isinstance(given, list | tuple) and isinstance(value, int):
        return type(given)(_alike_one(value, each) for each in given)
    return _alike_one(value, given)


def _alike_one(value: Any, given: Any) -> Any:
    return float(value) if isinstance(given, float) and isinstance(value, int) else value


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception as error:  # of an attribute whose value differs between layers
        if "per-layer" not in str(error):
            raise
        return True


def _settable(cls: type, name: str) -> bool:
    attribute = getattr(cls, getattr(cls, "attribute_map", {}).get(name, name), None)
    return not isinstance(attribute, property) or attribute.fset is not None


def tiny_model(model_type: str, kind: str = "text", **options: Any) -> nn.Module:
    """A model of a family, every parameter of which is away from values under which a mistake would not show."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same weights whatever ran before in this process
        model: nn.Module = KINDS[kind].build(model_type, kind, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model
