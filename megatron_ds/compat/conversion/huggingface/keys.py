"""Settings of `config.json` that a run does not follow, each in a sentence for the start of the run.

A setting of a folder is one of four things:

    followed     it is an entry of the family's table, or one of the rules of `settings` reads it
    refused      its value is computed neither by the table nor by these rules
    no effect    WITHOUT_EFFECT: transformers computes the same for all its values
    listed       all others: here those that training with transformers follows, and those that are unknown
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....errors import CheckpointError
from ..settings_table import Fixed, SettingRule
from .experts import AUX_LOSS, aux_loss_scale
from .rotary import THETA, rope_table
from .rules import EmbeddingDropout

Settings = Mapping[str, Any]
# Names, files, kernels, generation, heads for other tasks, and what transformers 4 wrote and 5 ignores.
WITHOUT_EFFECT = frozenset(
    """
    architectures model_type transformers_version converted_by name_or_path _name_or_path _commit_hash
    auto_map dtype torch_dtype use_cache attn_implementation _attn_implementation _attn_implementation_autoset
    experts_implementation _experts_implementation pretraining_tp gradient_checkpointing
    return_dict is_decoder output_hidden_states output_attentions is_encoder_decoder tie_encoder_decoder
    torchscript use_bfloat16 chunk_size_feed_forward reorder_and_upcast_attn tie_last_hidden_states
    bos_token_id eos_token_id decoder_start_token_id sep_token_id tokenizer_class prefix n_ctx
    id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    slow_but_exact attention_softmax_in_fp32 masked_softmax_fusion skip_bias_add skip_bias_add_qkv
    init_device norm_type learned_pos_emb attn_impl embedding_fraction emb_pdrop init_config verbose
    bias_dropout_fusion offset_alibi unk_token_id tokenizer_name cache_implementation _sliding_window_pattern
    inference_runner validate_runner_input pre_allocate_kv_cache pad_key_length max_batch_size
    max_sequence_length scale_attention_softmax_in_fp32
    begin_suppress_tokens epsilon_cutoff eta_cutoff encoder_repetition_penalty
    """.split()
)
ROTARY_KEYS = frozenset(
    """
    rope_parameters rope_scaling rope_theta partial_rotary_factor rotary_emb_base rotary_pct
    original_max_position_embeddings""".split()
)
WINDOW_KEYS = frozenset(
    "sliding_window use_sliding_window max_window_layers layer_types".split()
)
# Of tables of rotary settings, all types together.
ROPE_KEYS = frozenset(
    """
    rope_type type rope_theta partial_rotary_factor factor attention_factor beta_fast beta_slow
    mscale mscale_all_dim truncate low_freq_factor high_freq_factor
    original_max_position_embeddings mrope_section mrope_interleaved""".split()
)
# Settings that make another model whatever the family → the reason.
REFUSED_KEYS = {
    "per_layer_config": "layers of other sizes than the rest are not computed",
    "pruned_heads": "heads that were removed from some layers are not computed",
}


def check_keys(settings: Settings) -> None:
    """Raises CheckpointError for a setting of REFUSED_KEYS."""
    for name, why in REFUSED_KEYS.items():
        if settings.get(name):
            raise CheckpointError(f"{name} is {settings[name]!r}: {why}")


def notes_of(
    table: Sequence[SettingRule], extra: frozenset[str], settings: Settings
) -> list[str]:
    """Return the sentences on the settings that a run does not follow.

    extra: settings that rules of the family read beside its table
    """
    known = (
        {entry.theirs for entry in table if not isinstance(entry, Fixed)}
        | extra
        | WITHOUT_EFFECT
    )
    notes = [note for rule in RULES if (note := rule(known, settings))]
    for entry in table:
        if isinstance(entry, EmbeddingDropout) and (note := entry.note_of(settings)):
            notes.append(note)
    # Other sentences, or refusals, are about these.
    explained = {
        "pad_token_id",
        "layerdrop",
        "router_jitter_noise",
        *REFUSED_KEYS,
        "quantization_config",
    }
    unknown = [
        f"{name} {_short(value)}"
        for name, value in settings.items()
        if name not in known and name not in explained and value is not None
    ]
    if unknown:
        notes.append(
            f"not known for this model_type, and not used: {', '.join(sorted(unknown))}"
        )
    return notes


def _short(value: object, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def _padding(known: set[str], settings: Settings) -> str:
    pad = settings.get("pad_token_id")
    if type(pad) is not int or pad < 0:
        return ""
    return (
        f"pad_token_id {pad}: transformers gives the row of this token in the input embedding no "
        "gradient; here it is trained as other rows are, where the text has the token"
    )


# A setting of the families that leave out layers in training.
WITH_LAYER_DROP = {"enable_bias", "scale_embedding"}


def _layer_drop(known: set[str], settings: Settings) -> str:
    rate = settings.get("layerdrop") if known & WITH_LAYER_DROP else None
    return (
        f"layerdrop {rate}: transformers leaves out whole layers at random in training; here all layers "
        "are computed"
        if rate
        else ""
    )


def _jitter(known: set[str], settings: Settings) -> str:
    noise = (
        settings.get("router_jitter_noise") if "num_local_experts" in known else None
    )
    return (
        f"router_jitter_noise {noise}: transformers multiplies the inputs of router and experts by noise "
        "in training; here they have none"
        if noise
        else ""
    )


# Families whose embeddings have no dropout: one of their settings → that of the residuals, where absent 0.1.
BARE_EMBEDDINGS = {
    "enable_bias": ("dropout", "OPT"),
    "attention_out_bias": ("residual_dropout", "Seed-OSS"),
}


def _dropout_of_embeddings(known: set[str], settings: Settings) -> str:
    for name in BARE_EMBEDDINGS.keys() & known:
        setting, family = BARE_EMBEDDINGS[name]
        if rate := settings.get(setting, 0.1):
            return (
                f"{setting} {rate} is --hidden-dropout, which is applied to the embeddings too; in {family} of "
                "transformers it is not"
            )
    return ""


def _rope(known: set[str], settings: Settings) -> str:
    """Return a sentence on the values of the rotary tables that are not used; "" if all are."""
    if "rope_scaling" not in known or "rope_local_base_freq" in known:
        return ""
    name, rope = rope_table(settings)
    parts = [
        f"{key} of {name} is not known: {_short(value)}"
        for key, value in rope.items()
        if key not in ROPE_KEYS
    ]
    other = settings.get("rope_parameters") if name == "rope_scaling" else None
    if other and _without_theta(other) != _without_theta(rope):
        parts.append(
            f"rope_parameters {_short(other)} is not used, because rope_scaling is there too, which "
            "transformers 5 prefers"
        )
    return "; ".join(parts)


def _without_theta(rope: object) -> object:
    return (
        {key: value for key, value in rope.items() if key != THETA}
        if isinstance(rope, Mapping)
        else rope
    )


def _aux_loss(known: set[str], settings: Settings) -> str:
    """Return the loss that balances experts: whether transformers has it, and how ours differs."""
    is_on = bool(settings.get("output_router_logits"))
    given = settings.get("router_aux_loss_coef", AUX_LOSS if is_on else 0.0)
    if "router_aux_loss_coef" not in known or not given:
        return ""
    if not is_on:
        return (
            f"router_aux_loss_coef {given}: --moe-aux-loss-coeff is 0 unless it is given, because "
            "output_router_logits is not true, and transformers then trains without this loss"
        )
    layers, topk = aux_loss_scale(settings)
    return (
        f"router_aux_loss_coef {given}: transformers has one loss over {layers} layers together, {topk} "
        "at an even load; here each layer has its own, 1 at an even load. --moe-aux-loss-coeff is "
        f"{given * topk / layers:.6g} = {given} × {topk} / {layers} unless it is given: the same term "
        "only where all layers have the same load"
    )


def _predicted_tokens(known: set[str], settings: Settings) -> str:
    names = "num_nextn_predict_layers", "num_mtp_layers"
    number = next((settings[name] for name in names if settings.get(name)), 0)
    if not number or not known & {*names}:
        return ""
    return (
        f"{names[0]} {number}: layers that predict later tokens are read and trained with --mtp-num-layers {number}, "
        "and left out without it"
    )


def _expert_bias(known: set[str], settings: Settings) -> str:
    if "n_routed_experts" not in known or settings.get("model_type") == "deepseek_v2":
        return ""
    return (
        "e_score_correction_bias: transformers does not move it in training, and --moe-router-bias-update-rate "
        "is 0 unless it is given"
    )


RULES: tuple[Callable[[set[str], Settings], str], ...] = (
    _aux_loss,
    _predicted_tokens,
    _expert_bias,
    _rope,
    _dropout_of_embeddings,
    _layer_drop,
    _jitter,
    _padding,
)
