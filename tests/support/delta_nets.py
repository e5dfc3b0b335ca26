"""Small models with Gated DeltaNet layers in transformers' format."""

import torch
import transformers

LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
#: prefix of the names of transformers' classes (before Config and ForCausalLM), and whether the family has experts
DELTA_NETS = {"qwen3_next": ("Qwen3Next", True), "qwen3_5": ("Qwen3_5", False), "qwen3_5_moe": ("Qwen3_5Moe", True)}
EYES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def make_delta_net(folder, family, mtp=False, sees=False, std=0.05, **options):
    """Saves and returns a small transformers model with linear and full attention.

    With ``mtp`` it has an MTP layer as in published checkpoints, built from transformers' modules in the attribute
    ``mtp``. With ``sees`` it is a whole Qwen3.5 with a vision tower around the text model."""
    name, has_experts = DELTA_NETS[family]
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 67,
        "hidden_size": 64,
        "max_position_embeddings": 256,
        "num_hidden_layers": 4,
        "head_dim": 32,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    inner = EXPERTS if has_experts else {"intermediate_size": 96}
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**{**sizes, **heads, **inner, **LINEAR, **options})
    if sees:
        whole = transformers.Qwen3_5Config(text_config=config.to_dict(), vision_config=EYES, **options)
        model = transformers.Qwen3_5ForConditionalGeneration(whole).float().eval()
        decoder = model.model.language_model
    else:
        model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
        decoder = model.model
    if mtp:
        of_norm = type(decoder.norm)
        model.mtp = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([type(decoder.layers[1])(config, 1)])})
        for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            model.mtp[norm] = of_norm(config.hidden_size, eps=config.rms_norm_eps)
        model.mtp["fc"] = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        model.mtp.float().eval()
    means = {"linear_attn.norm.weight": 1.0, "A_log": -2.0}  # A_log = -2 keeps state for about ten tokens
    for parameter_name, p in model.named_parameters():
        # at std 0.1, transformers' own float32 logits are 2e-5 from its float64 ones
        torch.nn.init.normal_(p, next((m for end, m in means.items() if parameter_name.endswith(end)), 0.0), std)
    model.save_pretrained(folder)
    return model
