"""A tokenizer of bytes, as transformers saves one."""

BEGIN, END = 256, 257  # after the 256 bytes


def save_tokenizer(folder):
    """Bytes; a text begins with a token of its own, as in Llama 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", BEGIN)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>"
    )
    wrapped.save_pretrained(folder)
