"""Rules about BERT: its options mean nothing to other models, and some of theirs nothing to it."""

from collections.abc import Iterator

from .run import RunConfig, all_options
from .say import flag, say

SHORTEST = 8           # [CLS] A [SEP] B [SEP] with a few tokens in each segment
OF_GPT = ("data.eod_mask_loss", "data.reset_position_ids", "data.reset_attention_mask", "data.fim_data",
          "data.pack_documents")


def only_for_bert(config: RunConfig) -> Iterator[str]:
    if config.model.model == "bert":
        return
    for path, option in all_options().items():
        if (option.section == "bert" or path == "model.bert_binary_head") and config.get(path) != option.default:
            yield (f"{say(config, path)} is about BERT's samples, but {say(config, 'model.model')}. Remove it, or train a "
                   "BERT: pretrain_bert.py, which means --model bert.")


def not_for_bert(config: RunConfig) -> Iterator[str]:
    if config.model.model != "bert":
        return
    for path in OF_GPT:
        if config.get(path):
            yield (f"{say(config, path)} is about documents that lie end to end in a sample; a sample of BERT is of one "
                   "document, with [SEP] between its segments. Remove it.")
    if config.model.position_embedding_type == "none":
        yield (f"{say(config, 'model.position_embedding_type')}: a BERT sees all tokens at once, and without positions their "
               f"order would be lost. Use {flag('model.position_embedding_type')} learned_absolute or rope.")
    if config.model.seq_length and config.model.seq_length < SHORTEST:
        yield (f"{say(config, 'model.seq_length')} leaves no room for [CLS] A [SEP] B [SEP]. Use "
               f"{flag('model.seq_length')} {SHORTEST} or more.")


BERT_RULES = (only_for_bert, not_for_bert)
