import pytest
import torch
from transformers import AutoConfig

from compress.engines import choose, matching
from compress.errors import UserError
from compress.given import ENGINES
from compress.qtensor import QuantSpec
from compress.sizes import saved_bytes
from compress.support import refuse_unsupported

W8A8 = QuantSpec(8, activation_bits=8)
W8A16 = QuantSpec(8)
W4A16 = QuantSpec(4)
W4A16_G128 = QuantSpec(4, group_size=128)


def llama(hidden: int, intermediate: int, kv: int, blocks: int = 2) -> dict[str, tuple[int, int]]:
    """Names and shapes of a Llama's linears, in the order of its modules."""
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    return {
        f"model.layers.{i}.{name}": shape for i in range(blocks) for name, shape in block.items()
    }


SMOL = llama(576, 1536, 192)
SEVEN_B = llama(4096, 14336, 1024)


def last(names: list[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "native"])
def test_int8_keeps_qkv_for_every_engine_that_fuses(engine):
    chosen = choose(SMOL, W8A8, engine)
    assert last(chosen.quantize) == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert last(chosen.ignore) == {"q_proj", "k_proj", "v_proj", "lm_head"}
    assert chosen.ignore[0] == "model.layers.0.self_attn.q_proj"
    assert chosen.ignore[-1] == "lm_head"
    assert set(chosen.quantize) | set(chosen.ignore) == {*SMOL, "lm_head"}
    assert chosen.spec == W8A8


def test_native_quantizes_v_and_never_q_or_k():
    chosen = choose(SMOL, W8A8, "native")
    assert "v_proj" in last(chosen.quantize)
    assert last(chosen.ignore) == {"q_proj", "k_proj", "lm_head"}


def test_notes_tell_the_cost_of_what_is_kept():
    # v: 2 layers of 192 x 576, a byte less each, two bytes more a row of scales.
    assert 2 * saved_bytes((192, 576), W8A8) == 2 * (192 * 576 - 2 * 192) == 220_416
    (note,) = (n for n in choose(SMOL, W8A8, "vllm").notes if "v_proj" in n)
    assert note.startswith("16 bit: 2 × v_proj")
    assert "engine=native" in note
    assert note.endswith("220 kB more")


@pytest.mark.parametrize(
    ("shape", "spec", "saved"),
    [
        ((4, 64), W8A8, 4 * 64 - 4 * 2),
        ((4, 64), W8A16, 4 * 64 - 4 * 2 - 16),
        ((4, 64), W4A16, 4 * 64 * 2 - 4 * 32 - 4 * 2 - 16),
        ((4, 64), QuantSpec(4, 32), 4 * 64 * 2 - 4 * 32 - 4 * 2 * 2 - 16),
        # 63 values of 4 bits fill 8 words, as 64 do.
        ((4, 63), W4A16, 4 * 63 * 2 - 4 * 32 - 4 * 2 - 16),
    ],
)
def test_saved_bytes(shape, spec, saved):
    assert saved_bytes(shape, spec) == saved


@pytest.mark.parametrize("fused", ["qkv_proj", "query_key_value", "c_attn", "Wqkv"])
@pytest.mark.parametrize("engine", ["any", "native"])
def test_one_fused_qkv_is_kept_whole(fused, engine):
    linears = {f"h.0.attn.{fused}": (384, 128), "h.0.mlp.dense": (128, 128)}
    chosen = choose(linears, W8A8, engine)
    assert chosen.quantize == ["h.0.mlp.dense"]
    assert chosen.ignore == [f"h.0.attn.{fused}", "lm_head"]


def test_the_head_has_the_names_it_is_given():
    linears = {"gpt_neox.layers.0.mlp.dense_4h_to_h": (128, 512)}
    chosen = choose(linears, W8A8, "any", heads=["lm_head", "embed_out"])
    assert chosen.ignore == ["lm_head", "embed_out"]


@pytest.mark.parametrize(
    ("engine", "kept"), [("any", {"gate_proj", "up_proj"}), ("native", {"gate_proj"})]
)
def test_gate_and_up_are_decided_together_unless_native(engine, kept):
    chosen = choose(SMOL, W8A8, engine, ["*.0.mlp.gate_proj"])
    mlp = [name for name in chosen.ignore if ".mlp." in name]
    assert {name.partition("mlp.")[0] for name in mlp} == {"model.layers.0."}
    assert last(mlp) == kept
    assert "model.layers.1.mlp.gate_proj" in chosen.quantize


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("model.layers.1.mlp.down_proj", ["model.layers.1.mlp.down_proj"]),
        ("*.down_proj", ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]),
        ("re:model.layers.[1-9].mlp.d", ["model.layers.1.mlp.down_proj"]),
    ],
)
def test_keep_takes_names_wildcards_and_patterns(pattern, found):
    assert matching(list(SMOL), [pattern]) == found
    assert set(found) <= set(choose(SMOL, W8A8, "any", [pattern]).ignore)


@pytest.mark.parametrize("pattern", ["down_proj", "*.down_porj", "re:.*down_porj", "down_proj.*"])
def test_a_pattern_that_matches_nothing_names_what_is_near(pattern):
    with pytest.raises(UserError, match=r"matches no linear.*model\.layers\.0\.mlp\.down_proj"):
        choose(SMOL, W8A8, "any", ["*.0.mlp.up_proj", pattern])


def test_a_broken_pattern_is_told():
    with pytest.raises(UserError, match="no regular expression"):
        choose(SMOL, W8A8, "any", ["re:("])


def test_keeping_the_head_says_nothing_new():
    assert choose(SMOL, W8A8, "any", ["lm_head"]) == choose(SMOL, W8A8, "any")


def test_group_size_falls_to_the_largest_that_divides_every_layer():
    chosen = choose(SMOL, W4A16_G128, "vllm")
    assert chosen.spec == QuantSpec(4, group_size=64)
    (note,) = (n for n in chosen.notes if n.startswith("groups of"))
    # Scales of 2 bytes: rows x K x (1/64 - 1/128), over o, gate, up and down of two blocks.
    weights = 2 * (576 * 576 + 3 * 576 * 1536)
    assert 2 * weights / 128 == 93_312
    assert note == "groups of 64, not 128, which does not divide K = 576: 93.3 kB more of scales"


@pytest.mark.parametrize("engine", ["any", "sglang"])
def test_float32_is_refused_where_no_kernel_takes_it(engine):
    with pytest.raises(UserError, match=r"model\.dtype is float32, and sglang's kernels take bf"):
        choose(SMOL, W8A8, engine, dtype=torch.float32)


@pytest.mark.parametrize(
    ("engine", "dtype", "note"),
    [
        ("vllm", torch.float32, "float32 in vLLM runs on CPU only"),
        ("native", torch.float16, "float16 runs as bfloat16 on CPU"),
        ("vllm", torch.float16, None),
        ("any", torch.bfloat16, None),
    ],
)
def test_what_an_engine_does_with_a_dtype_is_told(engine, dtype, note):
    plain = choose(SMOL, W8A8, engine).notes
    found = [n for n in choose(SMOL, W8A8, engine, dtype=dtype).notes if n not in plain]
    assert len(found) == (note is not None)
    assert all(n.startswith(str(note)) for n in found)


def test_guarded_layers_stay_with_their_partner_reason_and_cost():
    gate, up = "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"
    chosen = choose(SMOL, W8A8, "any", guarded={gate: "its scales underflow"})
    assert {gate, up} <= set(chosen.ignore)
    assert chosen.reasons[gate] == "its scales underflow"
    assert "fuse gate and up" in chosen.reasons[up]
    # A byte less a weight, two bytes more a row of scales: 1536 x 576 - 2 x 1536.
    assert saved_bytes((1536, 576), W8A8) == 881_664
    (note,) = (n for n in chosen.notes if "underflow" in n)
    assert note == "16 bit: 1 × gate_proj (its scales underflow), 882 kB more"


def test_group_size_that_divides_stays():
    chosen = choose(SEVEN_B, W4A16_G128, "any")
    assert chosen.spec == W4A16_G128
    assert last(chosen.quantize) == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert not [note for note in chosen.notes if "groups" in note]


def test_a_layer_that_no_group_divides_is_kept():
    linears = llama(128, 200, 64)
    chosen = choose(linears, W4A16_G128, "native")
    assert chosen.spec.group_size == 128  # K = 200 of down_proj does not lower it for the others
    assert "down_proj" in last(chosen.ignore)
    assert any("no group size of 128, 64, 32 divides K" in note for note in chosen.notes)


@pytest.mark.parametrize(
    ("size", "engine", "wanted"),
    [
        (100, "any", "64, 32, null"),
        (100, "native", "64, 32, null"),
        (48, "vllm", "64, 32, null"),
        (256, "sglang", "128, 64, 32, null"),
        (0, "native", "64, 32, null"),
    ],
)
def test_a_group_size_that_cannot_be_names_those_that_can(size, engine, wanted):
    linears = SEVEN_B if engine == "sglang" else SMOL
    with pytest.raises(UserError, match=f"group size {size} cannot be .* would do: {wanted}"):
        choose(linears, QuantSpec(4, group_size=size), engine)


def test_a_group_size_of_its_own_is_served_natively_where_it_divides():
    assert choose(SMOL, QuantSpec(4, group_size=48), "native").spec.group_size == 48


def test_a_group_size_that_divides_nothing():
    linears = {"model.layers.0.mlp.down_proj": (64, 100)}
    with pytest.raises(UserError, match=r"group size 128 divides none of K = 100.* do: null"):
        choose(linears, W4A16_G128, "native")


def test_layers_without_a_kernel_stay_in_16_bit():
    linears = llama(128, 200, 64)
    chosen = choose(linears, W4A16, "vllm")
    # 200 is no multiple of 32, but gate and up are one matrix of 400 rows: no multiple either.
    assert last(chosen.quantize) == {"o_proj"}
    (note,) = (n for n in chosen.notes if "kernels" in n)
    assert note.startswith("16 bit: 6 × down_proj, gate_proj, up_proj")
    assert "multiples of 32 and 32" in note
    assert "engine=transformers, engine=native" in note


def test_gate_and_up_are_judged_as_the_one_matrix_they_become():
    linears = llama(128, 176, 64)
    chosen = choose(linears, W4A16, "vllm")
    assert "gate_proj" in last(chosen.quantize)  # 2 x 176 = 11 x 32
    assert "down_proj" in last(chosen.ignore)  # K = 176


def test_any_is_what_every_engine_takes():
    # SGLang's Marlin has no tile for 576 x 576; vLLM's pads.
    assert last(choose(SMOL, W4A16, "vllm").ignore) == {"q_proj", "k_proj", "v_proj", "lm_head"}
    for engine in ("sglang", "any"):
        assert "o_proj" in last(choose(SMOL, W4A16, engine).ignore)
        assert "o_proj" in last(choose(SMOL, W8A8, engine).quantize)


def test_int8_weights_alone_are_told_to_have_no_cpu_kernel_in_vllm():
    told = [any("CUDA only" in n for n in choose(SMOL, W8A16, e).notes) for e in ENGINES]
    assert dict(zip(ENGINES, told, strict=True)) == {
        "any": True,
        "vllm": True,
        "sglang": False,
        "transformers": False,
        "native": False,
    }


@pytest.mark.parametrize(
    ("spec", "engine", "match"),
    [
        (QuantSpec(5), "any", "bits is 5; wanted 4 or 8"),
        (QuantSpec(4, activation_bits=8), "any", "W4A8 is not supported"),
        (QuantSpec(8, activation_bits=4), "any", "W8A4 is not supported"),
        (QuantSpec(8, group_size=64, activation_bits=8), "any", "group size is 64 for W8A8"),
        (W8A8, "tensorrt", "engine is 'tensorrt'; wanted one of any, vllm"),
    ],
)
def test_what_cannot_be_is_refused(spec, engine, match):
    with pytest.raises(UserError, match=match):
        choose(SMOL, spec, engine)


def test_nothing_left_to_quantize():
    with pytest.raises(UserError, match=r"leaves no linear to quantize.*asked for by keep"):
        choose(SMOL, W8A8, "any", ["*.mlp.*", "*.o_proj"])
    with pytest.raises(UserError, match=r"no nn\.Linear"):
        choose({}, W8A8, "any")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"])
def test_dense_causal_models_pass(model_type):
    config = AutoConfig.for_model(model_type)
    refuse_unsupported(config, "a/folder")
    config.architectures = ["LlamaForCausalLM"]
    refuse_unsupported(config, "a/folder")


@pytest.mark.parametrize(
    ("model_type", "experts"),
    [
        ("mixtral", 8),
        ("qwen2_moe", 60),
        ("qwen3_moe", 128),
        ("deepseek_v2", 64),
        ("deepseek_v3", 256),
        ("olmoe", 64),
        ("granitemoe", 8),
        ("gpt_oss", 128),
        ("dbrx", 4),
        ("llama4", 16),
        ("phimoe", 16),
    ],
)
def test_a_mixture_of_experts_is_refused(model_type, experts):
    with pytest.raises(UserError, match=f"mixture of {experts} experts: not supported yet"):
        refuse_unsupported(AutoConfig.for_model(model_type), "a/folder")


def test_other_kinds_of_model_are_refused():
    with pytest.raises(UserError, match="encoder-decoder"):
        refuse_unsupported(AutoConfig.for_model("t5"), "a/folder")
    with pytest.raises(UserError, match="a/folder: vit is not a causal language model"):
        refuse_unsupported(AutoConfig.for_model("vit"), "a/folder")
    classifier = AutoConfig.for_model("llama")
    classifier.architectures = ["LlamaForSequenceClassification"]
    with pytest.raises(UserError, match="LlamaForSequenceClassification is not a causal"):
        refuse_unsupported(classifier, "a/folder")


def test_a_quantized_model_is_refused():
    config = AutoConfig.for_model("llama")
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UserError, match="already quantized"):
        refuse_unsupported(config, "a/folder")
