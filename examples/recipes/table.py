"""The models, what is trained, and on which instances; `make.py` writes the files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_2 = {
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BASE_MODEL = (
    "It is a base model, whose tokenizer has no chat template: fine-tune it with `prompt` and `completion`, or take "
    "the instruct model for `messages`."
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the hub.

    Args:
        title: its name in text.
        hub: its name on the hub, from where weights and tokenizer are downloaded.
        config: the sizes that it was published with.
        adapted: layers that LoRA adapts. `peft` does not adapt experts, whose weights are stacked.
        remark: what a user of this model has to know, in Markdown.
    """

    title: str
    hub: str
    config: dict[str, Any]
    adapted: list[str] = field(default_factory=lambda: list(ALL_LINEAR))
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training.

    Args:
        model: key of :data:`MODELS`.
        task: `pretrain` or `lora`.
        instance, instances: type and number of instances; a rank on each core.
        global_batch: samples in an optimizer step, over all ranks.
        accumulation: micro-batches that a rank accumulates.
        tp, pp, ep: tensor, pipeline and expert parallel size.
        microbatches: micro-batches of a pipeline.
        recompute: of how many blocks one is recomputed in the backward pass; 0: no block is.
        chunks: chunks in which the loss is computed; 0: at once.
        tokens: tokens in a sample; 0: those of the task.
        fully_sharded: consecutive data-parallel ranks over which weights, gradients and optimizer state are sharded,
            with replicas of them on the others; 0: ZeRO-1 over all.
        flash: whether attention is computed without a matrix of scores; if not, the scores are recomputed.
        published: what has published this layout, in Markdown.
        theirs: its own strategies, where they are called otherwise.
        layout: ends the name of a published layout.
    """

    model: str
    task: str
    instance: str
    instances: int = 1
    global_batch: int
    accumulation: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    microbatches: int = 1
    recompute: int = 0
    chunks: int = 0
    tokens: int = 0
    fully_sharded: int = 0
    flash: bool = True
    published: str = ""
    theirs: str = ""
    layout: str = ""

    @property
    def name(self) -> str:
        return "-".join([self.task, self.instance, *([self.layout] if self.layout else [])])

    @property
    def sequence(self) -> int:
        return self.tokens or (4096 if self.task == "pretrain" else 2048)

    @property
    def training(self) -> dict[str, Any]:
        """Values of the loop: common choices for such models, not tuned."""
        if self.task == "pretrain":
            return {"steps": 10_000, "warmup_steps": 500, "learning_rate": 3e-4, "weight_decay": 0.1, "save_every": 500}
        return {"steps": 500, "warmup_steps": 20, "learning_rate": 2e-4, "weight_decay": 0.0, "save_every": 100}

    def plugins(self) -> list[str | dict[str, Any]]:
        """The strategies, as in a configuration."""
        found: list[str | dict[str, Any]] = []
        if self.task == "lora":
            adapted = MODELS[self.model].adapted
            found.append({"lora": {"r": 16, "lora_alpha": 32, "target_modules": adapted}})
        if self.ep > 1:
            found.append({"expert_parallel": {"expert_parallel_size": self.ep, "capacity_factor": 2.0}})
        if self.tp > 1 or self.pp > 1:
            sizes = {"tensor_parallel_size": self.tp}
            if self.pp > 1:
                sizes |= {"pipeline_parallel_size": self.pp, "num_microbatches": self.microbatches}
            found.append({"model_parallelism": sizes})
        # Where blocks are recomputed, gathering inputs once more saves nothing.
        sequence: Any = {"sequence_parallel": {"regather": False}} if self.recompute else "sequence_parallel"
        found += [sequence] if self.tp > 1 else []
        hybrid = {"fully_sharded": {"hybrid_shard_size": self.fully_sharded}}
        found.append(
            hybrid if self.fully_sharded and self.instances > 1 else "fully_sharded" if self.fully_sharded else "zero1"
        )
        found.append("flash_attention" if self.flash else {"activation_checkpointing": {"modules": "core_attention"}})
        if self.recompute:
            every = {"activation_checkpointing": {"every": self.recompute}}
            found.append(every if self.recompute > 1 else "activation_checkpointing")
        found += [{"chunked_loss": {"chunks": self.chunks}}] if self.chunks else []
        return found

    def accelerator(self) -> dict[str, Any]:
        """The configuration of the accelerator."""
        accumulation = {"gradient_accumulation_steps": self.accumulation} if self.accumulation > 1 else {}
        return {**accumulation, "plugins": self.plugins()}


MODELS = {
    "llama-3.1-8b": Model(
        title="Llama 3.1 8B",
        hub="meta-llama/Llama-3.1-8B",
        config={
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": LLAMA_ROPE,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        remark="The weights are behind Meta's licence: accept it on the model's page, then `hf auth login`. "
        + BASE_MODEL,
    ),
    "llama-3.1-70b": Model(
        title="Llama 3.1 70B",
        hub="meta-llama/Llama-3.1-70B",
        config={
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": LLAMA_ROPE,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        remark="The weights are behind Meta's licence: accept it on the model's page, then `hf auth login`. "
        + BASE_MODEL,
    ),
    "llama-2-7b": Model(
        title="Llama 2 7B",
        hub="meta-llama/Llama-2-7b-hf",
        config=LLAMA_2
        | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 32},
        remark="The weights are behind Meta's licence: accept it on the model's page, then `hf auth login`.",
    ),
    "llama-2-70b": Model(
        title="Llama 2 70B",
        hub="meta-llama/Llama-2-70b-hf",
        config=LLAMA_2
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
        | {"num_attention_heads": 64, "num_key_value_heads": 8},
        remark="The weights are behind Meta's licence: accept it on the model's page, then `hf auth login`.",
    ),
    "qwen3-8b": Model(
        title="Qwen3 8B",
        hub="Qwen/Qwen3-8B",
        config={
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        },
    ),
    "qwen3-30b-a3b": Model(
        title="Qwen3 30B-A3B",
        hub="Qwen/Qwen3-30B-A3B",
        config={
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        },
        adapted=list(ATTENTION),
        remark="The model has 128 experts; a token uses 8. Experts take at most twice the mean number of "
        "tokens (`capacity_factor: 2.0`), so that shapes are static on a device; the tokens above it skip the expert. "
        "LoRA adapts attention; the experts are frozen.",
    ),
    "gpt-oss-20b": Model(
        title="GPT-OSS 20B",
        hub="openai/gpt-oss-20b",
        config={
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "eos_token_id": 200002,
        },
        adapted=list(ATTENTION),
        remark="The model has 32 experts; a token uses 4. Experts and LoRA are as for Qwen3 30B-A3B. The published "
        "weights of experts are in MXFP4, which cannot be trained. Convert them once to bfloat16: load them with "
        "`Mxfp4Config(dequantize=True)` of transformers, and `save_pretrained` the model.",
    ),
    "moonlight-16b-a3b": Model(
        title="Moonlight 16B-A3B (architecture of DeepSeek-V3)",
        hub="moonshotai/Moonlight-16B-A3B",
        config={
            "model_type": "deepseek_v3",
            "vocab_size": 163840,
            "hidden_size": 2048,
            "intermediate_size": 11264,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.446,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "bos_token_id": 163584,
            "eos_token_id": 163585,
            "pad_token_id": 163838,
        },
        adapted=list(ATTENTION),
        remark="The model has 64 experts, of which a token uses 6, and 2 that all tokens use. Experts take at most "
        "twice the mean number of tokens, as for Qwen3 30B-A3B.",
    ),
    "gemma-3-1b": Model(
        title="Gemma 3 1B",
        hub="google/gemma-3-1b-pt",
        config={
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        remark="It has one key/value head: under tensor parallelism every rank has this head, and a share of the query "
        "heads. The weights are behind Google's licence: accept it on the model's page, then `hf auth login`. "
        + BASE_MODEL,
    ),
}


NXD = "https://github.com/aws-neuron/neuronx-distributed/blob/main/examples/training/llama"
PRACTICES = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/training/best-practices.html"
TITAN = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/training/torchtitan"

RECIPES = [
    Recipe(model="llama-3.1-8b", task="pretrain", instance="trn1.32xlarge", global_batch=256, accumulation=64, tp=8),
    Recipe(model="llama-3.1-8b", task="pretrain", instance="trn2.48xlarge", global_batch=256, accumulation=32, tp=8),
    Recipe(model="llama-3.1-8b", task="lora", instance="trn1.32xlarge", global_batch=64, accumulation=8, tp=4),
    Recipe(model="llama-3.1-8b", task="lora", instance="trn2.48xlarge", global_batch=64, accumulation=4, tp=4),
    Recipe(
        model="llama-3.1-70b",
        task="pretrain",
        instance="trn1.32xlarge",
        instances=16,
        global_batch=512,
        tp=8,
        pp=8,
        microbatches=64,
        recompute=1,
    ),
    Recipe(
        model="llama-3.1-70b",
        task="pretrain",
        instance="trn2.48xlarge",
        instances=4,
        global_batch=512,
        tp=8,
        pp=4,
        microbatches=64,
        recompute=1,
    ),
    Recipe(
        model="llama-3.1-70b",
        task="lora",
        instance="trn1.32xlarge",
        global_batch=64,
        tp=8,
        pp=4,
        microbatches=64,
        recompute=1,
    ),
    Recipe(
        model="llama-3.1-70b",
        task="lora",
        instance="trn2.48xlarge",
        global_batch=64,
        tp=8,
        pp=4,
        microbatches=32,
        recompute=1,
    ),
    Recipe(
        model="qwen3-8b",
        task="pretrain",
        instance="trn1.32xlarge",
        global_batch=256,
        accumulation=64,
        tp=8,
        recompute=2,
    ),
    Recipe(model="qwen3-8b", task="pretrain", instance="trn2.48xlarge", global_batch=256, accumulation=32, tp=8),
    Recipe(model="qwen3-8b", task="lora", instance="trn1.32xlarge", global_batch=64, accumulation=16, tp=8),
    Recipe(model="qwen3-8b", task="lora", instance="trn2.48xlarge", global_batch=64, accumulation=4, tp=4),
    Recipe(
        model="qwen3-30b-a3b",
        task="pretrain",
        instance="trn1.32xlarge",
        instances=4,
        global_batch=256,
        accumulation=8,
        tp=4,
        ep=8,
        recompute=1,
    ),
    Recipe(
        model="qwen3-30b-a3b",
        task="pretrain",
        instance="trn2.48xlarge",
        global_batch=256,
        accumulation=16,
        tp=4,
        ep=16,
        recompute=1,
    ),
    Recipe(
        model="qwen3-30b-a3b",
        task="lora",
        instance="trn1.32xlarge",
        global_batch=64,
        accumulation=8,
        tp=4,
        ep=8,
        recompute=1,
    ),
    Recipe(
        model="qwen3-30b-a3b",
        task="lora",
        instance="trn2.48xlarge",
        global_batch=64,
        accumulation=4,
        tp=4,
        ep=8,
        recompute=1,
    ),
    Recipe(
        model="gpt-oss-20b",
        task="pretrain",
        instance="trn1.32xlarge",
        instances=2,
        global_batch=256,
        accumulation=16,
        tp=4,
        ep=8,
        recompute=1,
    ),
    Recipe(
        model="gpt-oss-20b",
        task="pretrain",
        instance="trn2.48xlarge",
        global_batch=256,
        accumulation=16,
        tp=4,
        ep=8,
        recompute=1,
    ),
    Recipe(
        model="gpt-oss-20b",
        task="lora",
        instance="trn1.32xlarge",
        global_batch=64,
        accumulation=8,
        tp=4,
        ep=8,
        recompute=1,
    ),
    Recipe(
        model="gpt-oss-20b",
        task="lora",
        instance="trn2.48xlarge",
        global_batch=64,
        accumulation=4,
        tp=4,
        ep=8,
        recompute=1,
    ),
    Recipe(
        model="gemma-3-1b",
        task="pretrain",
        instance="trn1.32xlarge",
        global_batch=256,
        accumulation=16,
        tp=2,
        chunks=8,
    ),
    Recipe(
        model="gemma-3-1b",
        task="pretrain",
        instance="trn2.48xlarge",
        global_batch=256,
        accumulation=8,
        tp=2,
        chunks=8,
    ),
    Recipe(model="gemma-3-1b", task="lora", instance="trn1.32xlarge", global_batch=64, accumulation=4, tp=2, chunks=8),
    Recipe(model="gemma-3-1b", task="lora", instance="trn2.48xlarge", global_batch=64, accumulation=2, tp=2, chunks=8),
    Recipe(
        model="llama-2-7b",
        task="pretrain",
        instance="trn1.32xlarge",
        instances=4,
        global_batch=1024,
        accumulation=64,
        tp=8,
        flash=False,
        layout="tp8",
        published=f"[neuronx-distributed]({NXD}/tp_zero1_llama_hf_pretrain/tp_zero1_llama2_7B_hf_pretrain.sh)",
    ),
    Recipe(
        model="llama-3.1-8b",
        task="pretrain",
        instance="trn1.32xlarge",
        instances=4,
        global_batch=1024,
        accumulation=256,
        tp=32,
        tokens=8192,
        layout="tp32",
        published=f"[neuronx-distributed]({NXD}/tp_zero1_llama_hf_pretrain/tp_zero1_llama31_8B_hf_pretrain.sh)",
    ),
    Recipe(
        model="llama-3.1-70b",
        task="pretrain",
        instance="trn1.32xlarge",
        instances=32,
        global_batch=1024,
        tp=32,
        pp=8,
        microbatches=256,
        tokens=8192,
        layout="tp32-pp8",
        published=f"[neuronx-distributed]({NXD}/tp_pp_llama_hf_pretrain/run_llama31_70B_tp_pp.sh)",
        theirs="also recomputes feed-forward",
    ),
    Recipe(
        model="llama-2-70b",
        task="pretrain",
        instance="trn1.32xlarge",
        instances=32,
        global_batch=1024,
        tp=32,
        pp=4,
        microbatches=128,
        flash=False,
        layout="tp32-pp4",
        published=f"[neuronx-distributed]({NXD}/lightning/run_llama_70b_tp_pp_ptl.sh)",
    ),
    Recipe(
        model="qwen3-8b",
        task="pretrain",
        instance="trn2.48xlarge",
        global_batch=256,
        accumulation=16,
        tp=4,
        fully_sharded=16,
        layout="tp4-fsdp16",
        published=f"[TorchTitan Neuron]({TITAN}/tutorials/tutorial-basic-training.html), `qwen3_8b_tp4_fsdp16_sac`",
        theirs="chooses by operation what is recomputed; here it is the scores of attention",
    ),
    Recipe(
        model="llama-3.1-8b",
        task="pretrain",
        instance="trn2.48xlarge",
        global_batch=256,
        accumulation=16,
        tp=4,
        fully_sharded=16,
        layout="tp4-fsdp16",
        published=f"[TorchTitan Neuron]({TITAN}/tutorials/tutorial-simple-fsdp-training.html)",
        theirs="is SimpleFSDP there, compiled",
    ),
    Recipe(
        model="llama-3.1-70b",
        task="pretrain",
        instance="trn2.48xlarge",
        instances=4,
        global_batch=64,
        tp=4,
        fully_sharded=16,
        recompute=1,
        layout="tp4-fsdp16-hybrid",
        published=f"[AWS]({PRACTICES}): TP4 in a chip, FSDP between chips, replicas between instances",
    ),
    Recipe(
        model="moonlight-16b-a3b",
        task="pretrain",
        instance="trn2.48xlarge",
        global_batch=256,
        accumulation=16,
        tp=4,
        ep=16,
        fully_sharded=16,
        recompute=1,
        layout="tp4-ep16",
        published=f"[TorchTitan Neuron]({TITAN}/tutorials/tutorial-simple-fsdp-training.html): DeepSeek-V3",
        theirs="is SimpleFSDP there, compiled",
    ),
]
