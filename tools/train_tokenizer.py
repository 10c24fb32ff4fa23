"""`megatron-ds tokenizer`: train a tokenizer on text. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("tokenizer")
