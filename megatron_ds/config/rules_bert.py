"""Rules about BERT: its options do not apply to other models, and some of theirs do not apply to it."""

from collections.abc import Iterator

from .messages import flag, say
from .run import RunConfig, all_options

SHORTEST = 8           # [CLS] A [SEP] B [SEP] with a few tokens in each segment
OF_GPT = ("data.eod_mask_loss", "data.reset_position_ids", "data.reset_attention_mask", "data.fim_data",
          "data.pack_documents")


def only_for_bert(config: RunConfig) -> Iterator[str]:
    if config.model.model == "bert":
        return
    for path, option in all_options().items():
        if (option.section == "bert" or path == "model.bert_binary_head") and config.get(path) != option.default:
            yield (f"{say(config, path)} applies to BERT, but {say(config, 'model.model')}. Remove it, or train a BERT with "
                   "pretrain_bert.py or --model bert.")


def not_for_bert(config: RunConfig) -> Iterator[str]:
    if config.model.model != "bert":
        return
    for path in OF_GPT:
        if config.get(path):
            yield (f"{say(config, path)} applies to samples of several documents; a sample of BERT is from one document. "
                   "Remove it.")
    if config.model.position_embedding_type == "none":
        yield (f"{say(config, 'model.position_embedding_type')}: BERT has no causal mask, so without position embeddings the "
               f"order of tokens would be lost. Use {flag('model.position_embedding_type')} learned_absolute or rope.")
    if config.model.seq_length and config.model.seq_length < SHORTEST:
        yield (f"{say(config, 'model.seq_length')} leaves no room for [CLS] A [SEP] B [SEP]. Use "
               f"{flag('model.seq_length')} {SHORTEST} or more.")


BERT_RULES = (only_for_bert, not_for_bert)
