"""The options of `megatron-ds preprocess`: flag → arguments of `argparse`."""

from collections.abc import Mapping
from typing import Any

from ...data.tokenizers import TOKENIZERS
from ..tokenizers.backend import BACKENDS
from .plain_text import WHERE
from .sentences import ABBREVIATIONS, TRAINING_BYTES
from .text_files import INPUT_HELP

# Flags that choose what a document is.
TEXT: dict[str, dict[str, Any]] = {
    "--input": {
        "nargs": "+",
        "required": True,
        "metavar": "PATH",
        "help": INPUT_HELP,
    },
    "--text-documents": {
        "choices": WHERE,
        "default": "file",
        "help": (
            "what one document is in plain text: the file (default), a paragraph between blank lines, or a "
            "line. Do not use paragraph or line if consecutive ones belong together, as in a novel: "
            "training shuffles documents. Other inputs are not affected"
        ),
    },
    "--text-separator": {
        "metavar": "LINE",
        "help": (
            "in plain text, documents are separated by lines that are equal to this, such as "
            "'<|endoftext|>'. Do not use it if such a line may be part of a document"
        ),
    },
    "--json-keys": {
        "nargs": "+",
        "default": ["text"],
        "metavar": "KEY",
        "help": (
            "keys of JSON lines, or columns of tables, whose text to tokenize (default: text); each makes a "
            "corpus"
        ),
    },
    "--skip-bad-lines": {
        "action": "store_true",
        "help": (
            "leave out lines that are not valid JSON or UTF-8 or lack a key, rows without text, and "
            "documents of plain text that are not UTF-8, and report how many; without it the first one is "
            "an error. Look at the corpus first: a wrong key leaves out everything"
        ),
    },
    "--split-sentences": {
        "action": "store_true",
        "help": (
            "store each sentence of a document as a sequence of its own, for BERT; abbreviations are "
            f"learned from the first {TRAINING_BYTES >> 20} MB of the text. Not for GPT, whose documents "
            "are one sequence"
        ),
    },
    "--keep-newlines": {
        "action": "store_true",
        "help": "keep the white space between two sentences with the first of them",
    },
    "--lang": {
        "choices": ABBREVIATIONS,
        "help": "language whose common abbreviations are given in advance (default english)",
    },
}

# Flags for records of messages in place of texts.
CONVERSATIONS = {
    "--chat": {
        "action": "store_true",
        "help": (
            "each JSON line, or row of Parquet, is a conversation: messages (OpenAI), conversations (ShareGPT), "
            "instruction and output (Alpaca), prompt and completion, or question and answer. Writes "
            "PREFIX_chat_document, with a mask of the answers in PREFIX_chat_document.mask.bin, for training with "
            "--sft"
        ),
    },
    "--preference": {
        "action": "store_true",
        "help": (
            "each JSON line is a pair of answers: prompt, chosen and rejected, texts or lists of messages; or chosen "
            "and rejected alone, two conversations that begin alike. Writes PREFIX_preference_document with masks, for "
            "training with --dpo"
        ),
    },
    "--chat-template": {
        "metavar": "FILE",
        "help": "Jinja template that makes a conversation a text; default: that of --tokenizer-model",
    },
    "--chat-template-kwargs": {
        "metavar": "JSON",
        "help": """values that the template takes, such as '{"enable_thinking": false}'""",
    },
}

# Flags that choose the tokens.
TOKENIZER: dict[str, dict[str, Any]] = {
    "--tokenizer-type": {
        "required": True,
        "help": f"one of {', '.join(TOKENIZERS)}",
    },
    "--tokenizer-model": {
        "metavar": "PATH",
        "help": "tokenizer.json, its folder, or a sentencepiece .model",
    },
    "--vocab-file": {
        "metavar": "FILE",
        "help": "vocab.json of GPT2BPETokenizer, vocab.txt of BertWordPiece…",
    },
    "--merge-file": {
        "metavar": "FILE",
        "help": "merges.txt of GPT2BPETokenizer",
    },
    "--vocab-size": {
        "type": int,
        "metavar": "N",
        "help": "number of ids, for NullTokenizer only",
    },
    "--tokenizer-backend": {
        "default": "auto",
        "choices": BACKENDS,
        "help": (
            "which encoder to use; the ids are the same. auto takes the compiled encoder if it supports the "
            "tokenizer. gigatoken needs the package of that name, and is not faster where native works"
        ),
    },
    "--append-eod": {
        "action": "store_true",
        "help": (
            "end each document with the end-of-document token; almost always right: without it a model "
            "cannot learn where a document ends"
        ),
    },
}

# Flags that name the output.
OUTPUT = {
    "--output-prefix": {
        "required": True,
        "metavar": "PREFIX",
        "help": "files are named {prefix}_{key}_document.bin and .idx",
    },
}

# Flags that divide the work over processes and machines.
WORK: dict[str, dict[str, Any]] = {
    "--workers": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": (
            "number of processes that tokenize, over all partitions (default 1); the output does not depend "
            "on it"
        ),
    },
    "--partitions": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": (
            "make N shards at the same time and merge them; useful above about 16 workers, the most that "
            "one process can feed"
        ),
    },
    "--num-shards": {
        "type": int,
        "metavar": "N",
        "help": "cut the input into N shards; this command makes one of them",
    },
    "--shard-index": {
        "type": int,
        "metavar": "I",
        "help": "the shard to make, from 0; default: SLURM_ARRAY_TASK_ID minus SLURM_ARRAY_TASK_MIN, or RANK",
    },
    "--ray": {
        "nargs": "?",
        "const": "auto",
        "metavar": "ADDRESS",
        "help": (
            "make the --num-shards shards as tasks of a Ray cluster and merge them; all machines must share "
            "the disk"
        ),
    },
    "--log-interval": {
        "type": int,
        "default": 1000,
        "metavar": "N",
        "help": "without a terminal for a progress bar: documents between two log lines (default 1000)",
    },
}

# Title of a group in --help → its options.
GROUPS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "text": TEXT,
    "conversations": CONVERSATIONS,
    "tokenizer": TOKENIZER,
    "output": OUTPUT,
    "work": WORK,
}
