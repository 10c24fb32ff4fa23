"""`DataConfig`: corpora, tokenizer, order of samples."""

from dataclasses import dataclass

from .option import added_options, option

DEFAULT_SPLIT = "969, 30, 1"
# Names of HuggingFaceTokenizer in Megatron-DeepSpeed, in BigScience's and Huawei's forks, in Zyphra's, and of
# --patch-tokenizer-type, whose tokenizers all are folders of Hugging Face.
HF_TOKENIZERS = (
    "HFTokenizer",
    "PretrainedFromHF",
    "HFAutoTokenizer",
    "LLamaTokenizer",
    "QwenTokenizer",
    "Qwen2Tokenizer",
    "Qwen3Tokenizer",
    "DeepSeekV2Tokenizer",
    "MistralTokenizer",
    "YiTokenizer",
    "FalconTokenizer",
    "TokenizerFromFile",
    "MixtralTokenizer",
    "BloomTokenizerFromHF",
)


@dataclass(frozen=True)
class DataConfig(
    *added_options("data"),  # type: ignore[misc]  # base classes are found at run time
):
    """Options of the data: mock data, --data-path divided by --split, or a path for each split. A file may
    list the paths.
    """

    data_path: tuple[str, ...] = option(
        (),
        per_host=True,
        help="Prefix of the .bin/.idx pair; or several prefixes, all or none of them preceded by a weight. "
        "START:END before a prefix chooses a range of its documents (0:0.6: the first 60 %). @FILE: the "
        "words are in a file.",
    )
    split: str | None = option(
        None,
        strip="'\" ",
        help=f"Proportions of --data-path for training, validation and test. Default: {DEFAULT_SPLIT}.",
    )
    train_data_path: tuple[str, ...] = option(
        (), per_host=True, help="Like --data-path, for training only."
    )
    valid_data_path: tuple[str, ...] = option(
        (), per_host=True, help="Like --data-path, for validation only."
    )
    test_data_path: tuple[str, ...] = option(
        (), per_host=True, help="Like --data-path, for testing only."
    )
    data_args_path: str | None = option(
        None,
        per_host=True,
        help="File with the words of --data-path, separated by spaces or line breaks.",
        avoid="For a few corpora --data-path is simpler.",
    )
    per_split_data_args_path: str | None = option(
        None,
        per_host=True,
        help='JSON file with such words for each split: {"train": [...], "valid": [...], "test": '
        "[...]}.",
    )
    blend_weights: str = option(
        "samples",
        choices=("samples", "epochs"),
        help="Meaning of the weights before prefixes. samples: proportions of the samples. epochs: how "
        "often each corpus is read relative to the others, whatever their sizes (2 a 1 b: a is read "
        "twice as often as b).",
        avoid="With epochs, the proportions of the samples change when a corpus grows.",
    )
    mock_data: bool = option(
        False,
        help="Train on random tokens, to try a layout without a corpus. As a flag it replaces the data "
        "options of a recipe.",
        avoid="The loss has no meaning.",
    )
    data_cache_path: str | None = option(
        None,
        per_host=True,
        help="Directory for the index maps. Default: next to the data.",
        avoid="Only needed if the data are on a read-only disk.",
    )
    tokenizer_type: str | None = option(
        None,
        values=dict.fromkeys(HF_TOKENIZERS, "HuggingFaceTokenizer"),
        help="Name of a registered tokenizer, the one that the corpus was tokenized with.",
    )
    vocab_file: str | None = option(
        None,
        per_host=True,
        help="vocab.json of GPT2BPETokenizer, or vocab.txt of a WordPiece tokenizer.",
    )
    merge_file: str | None = option(
        None,
        per_host=True,
        flags=["--merges-file"],
        help="merges.txt of GPT2BPETokenizer.",
    )
    tokenizer_model: str | None = option(
        None,
        per_host=True,
        help="File or directory of HuggingFaceTokenizer, SentencePieceTokenizer or Llama2Tokenizer.",
    )
    extra_vocab_size: int | None = option(
        None,
        at_least=0,
        help="Rows of the embedding beyond the vocabulary of a HuggingFaceTokenizer, added tokens not "
        "counted, as in Pai-Megatron-Patch: the size is their sum, if that is above --vocab-size.",
        avoid="--padded-vocab-size states the size itself.",
    )
    eod_mask_loss: bool = option(
        False, help="Exclude the end-of-document token from the loss."
    )
    reset_position_ids: bool = option(
        False, help="Count positions from the beginning of each document in a sample."
    )
    reset_attention_mask: bool = option(
        False,
        help="Let tokens attend only to their own document in a sample.",
        avoid="On GPUs it excludes the fastest attention kernel, and saves no work.",
    )
    pack_documents: bool = option(
        False,
        help="Pack whole documents into samples, instead of cutting one stream of documents: positions and "
        "attention stay within each document, and only a document longer than a sample is cut.",
        avoid="The order and number of samples differ from Megatron's, and a few tokens in a thousand are "
        "padding.",
    )
    sft: bool = option(
        False,
        help="Train on the answers of a corpus of conversations (megatron-ds preprocess --chat): its mask has "
        "the tokens that count in the loss. Implies --pack-documents, and --calculate-per-token-loss, since rows "
        "have answers of different lengths.",
        avoid="Conversations longer than a sample lose their end.",
    )
    dataloader_type: str = option(
        "single",
        choices=("single", "cyclic"),
        help="single: the stream of samples once; cyclic: repeatedly, reshuffled each time.",
    )
    data_readers: str = option(
        "all",
        choices=("all", "first"),
        help="Which ranks of a tensor-parallel group read the data: all, or only the first, which sends the "
        "batches to the others.",
        avoid="first takes time; it is for disks that all ranks would overload.",
    )
    num_workers: int = option(
        2,
        per_host=True,
        at_least=0,
        help="Threads that prepare batches ahead; 0: none.",
    )

    @property
    def splits(self) -> str:
        """Proportions of training, validation and test data."""
        return self.split or DEFAULT_SPLIT

    @property
    def has_split_paths(self) -> bool:
        """Whether each split has corpora of its own."""
        return bool(self.train_data_path or self.valid_data_path or self.test_data_path)

    @property
    def is_divided_by_split(self) -> bool:
        """Whether the splits are ranges of the same corpora."""
        return bool(self.data_path or self.data_args_path)
