"""Tiny random checkpoints of many architectures, and what transformers itself computes with them whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": 96, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_GQA = {**COMMON, "num_key_value_heads": 4}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MLA: dict[str, Any] = {
    **NO_GQA, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """One architecture: transformers' configuration class, its arguments, and the class with a head."""

    name: str
    config: str
    model: str
    arguments: dict[str, Any] = field(default_factory=lambda: dict(COMMON))

    def __str__(self) -> str:
        return self.name


def _tiny(name: str, stem: str, arguments: dict[str, Any] = COMMON, **more: Any) -> Tiny:
    return Tiny(name, f"{stem}Config", f"{stem}ForCausalLM", {**arguments, **more})


ARCHITECTURES = [
    _tiny("llama", "Llama"),
    _tiny("llama_tied", "Llama", tie_word_embeddings=True),
    _tiny("mistral_window", "Mistral", sliding_window=6),
    _tiny("qwen2", "Qwen2"),
    _tiny("qwen2_window", "Qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=2),
    _tiny("qwen3", "Qwen3", head_dim=8),
    _tiny("gemma", "Gemma", head_dim=8),
    _tiny("gemma2", "Gemma2", head_dim=8, sliding_window=6, layer_types=ALTERNATING),
    _tiny("gemma3_text", "Gemma3Text", head_dim=8, sliding_window=6, layer_types=ALTERNATING),
    _tiny("phi", "Phi"),
    _tiny("phi3", "Phi3"),
    _tiny("gpt2", "GPT2LMHead", GPT2),
    _tiny("gpt_neox", "GPTNeoX", NO_GQA),
    _tiny("gptj", "GPTJ", GPT2, rotary_dim=4),
    _tiny("gpt_bigcode", "GPTBigCode", GPT2),
    _tiny("codegen", "CodeGen", GPT2, rotary_dim=4),
    _tiny("opt", "OPT", NO_GQA, ffn_dim=48, word_embed_proj_dim=32),
    _tiny("opt_projected", "OPT", NO_GQA, ffn_dim=48, word_embed_proj_dim=16),
    _tiny("bloom", "Bloom", {"vocab_size": 96, "hidden_size": 32, "n_layer": 4, "n_head": 4}),
    _tiny("falcon", "Falcon", NO_GQA, multi_query=True, new_decoder_architecture=False, alibi=False),
    _tiny("falcon_alibi", "Falcon", NO_GQA, multi_query=False, alibi=True),
    _tiny("mpt", "Mpt", {"vocab_size": 96, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 128}),
    _tiny("stablelm", "StableLm"),
    _tiny("starcoder2", "Starcoder2"),
    _tiny("olmo", "Olmo"),
    _tiny("olmo2", "Olmo2"),
    _tiny("granite", "Granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5),
    _tiny("cohere", "Cohere", logit_scale=8.0),
    _tiny("cohere2", "Cohere2", logit_scale=8.0, sliding_window=6, layer_types=ALTERNATING),
    _tiny("mixtral", "Mixtral", num_local_experts=4),
    _tiny("qwen3_moe", "Qwen3Moe", **MOE, head_dim=8),
    _tiny("olmoe", "Olmoe", **MOE),
    _tiny("deepseek_v3", "DeepseekV3", MLA),
    _tiny("smollm3", "SmolLM3", no_rope_layers=[1, 1, 0, 1]),
    _tiny("glm", "Glm", head_dim=8),
    _tiny("glm4", "Glm4", head_dim=8),
    _tiny("nemotron", "Nemotron"),
    _tiny("gpt_oss", "GptOss", num_local_experts=4, head_dim=8, sliding_window=6, layer_types=ALTERNATING),
    _tiny("llama4_text", "Llama4", num_local_experts=2, head_dim=8, attention_chunk_size=8,
          intermediate_size_mlp=48, no_rope_layers=[1, 1, 1, 0], interleave_moe_layer_step=2),
    _tiny("exaone4", "Exaone4", sliding_window=6, layer_types=ALTERNATING),
    _tiny("persimmon", "Persimmon", NO_GQA),
    _tiny("gpt_neo", "GPTNeo", {"vocab_size": 96, "hidden_size": 32, "num_layers": 4, "num_heads": 4,
          "max_position_embeddings": 128, "attention_types": [[["global", "local"], 2]], "window_size": 6}),
    _tiny("qwen2_moe", "Qwen2Moe", **MOE, shared_expert_intermediate_size=24),
    _tiny("deepseek_v2", "DeepseekV2", MLA),
    _tiny("olmo3", "Olmo3", sliding_window=6, layer_types=ALTERNATING),
    _tiny("ernie4_5", "Ernie4_5"),
    _tiny("apertus", "Apertus"),
    _tiny("seed_oss", "SeedOss", head_dim=8),
    _tiny("helium", "Helium", head_dim=8),
    _tiny("phimoe", "Phimoe", num_local_experts=4),
    _tiny("xglm", "XGLM", {"vocab_size": 96, "d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 48,
          "max_position_embeddings": 128}),
    _tiny("biogpt", "BioGpt", NO_GQA),
    _tiny("jais2", "Jais2"),
    _tiny("arcee", "Arcee"),
    _tiny("hunyuan", "HunYuanDenseV1", head_dim=8),
    _tiny("ministral", "Ministral", head_dim=8, sliding_window=6, layer_types=ALTERNATING),
    _tiny("minicpm3", "MiniCPM3", MLA),
]  # fmt: skip


def build(tiny: Tiny, path: Path, *, seed: int = 0) -> Any:
    """Write a tiny checkpoint, and return the whole model as transformers loads it back, in float32."""
    config_name = {"GPT2LMHeadConfig": "GPT2Config", "Llama4Config": "Llama4TextConfig"}.get(tiny.config, tiny.config)
    model_name = {"GPT2LMHeadForCausalLM": "GPT2LMHeadModel", "Gemma3TextForCausalLM": "Gemma3ForCausalLM"}.get(
        tiny.model, tiny.model
    )
    config = getattr(transformers, config_name)(**tiny.arguments)
    model_class = getattr(transformers, model_name)
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # the default deviation of 0.02 would hide mistakes
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(8.0)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return model_class.from_pretrained(path, dtype=torch.float32).eval()
