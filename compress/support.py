"""Which models this project can compress, told from their configuration."""

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from compress.errors import UserError


def refuse_unsupported(config: PretrainedConfig, where: str) -> None:
    """Raise UserError for what is not a dense, unquantized causal language model.

    where: what the user gave, with which the refusal begins.
    """
    kind = config.model_type
    architectures = list(config.architectures or [])
    shown = f"{where}: {architectures[0] if architectures else kind}"
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{shown} is an encoder-decoder; wanted a decoder-only language model")
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    head = ("CausalLM", "LMHeadModel")
    if not causal or not all(name.endswith(head) for name in architectures):
        raise UserError(
            f"{shown} is not a causal language model; wanted one whose architecture ends in "
            "ForCausalLM, such as LlamaForCausalLM"
        )
    experts = _experts(config)
    if experts > 1:
        raise UserError(
            f"{shown} is a mixture of {experts} experts: not supported yet; wanted a dense model"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{shown} is already quantized; wanted the original model in 16 or 32 bit")


def _experts(config: PretrainedConfig) -> int:
    """Experts of a layer, as any of transformers' mixtures names them; 0 where there are none."""
    text = config.get_text_config()
    sections = (text, getattr(text, "ffn_config", None))  # the latter in DBRX
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return max(getattr(section, name, None) or 0 for section in sections for name in names)
