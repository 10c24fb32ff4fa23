"""`DataConfig`: the corpus, its tokenizer, and the order in which it is read."""

from dataclasses import dataclass

from .option import option

DEFAULT_SPLIT = "969, 30, 1"


@dataclass(frozen=True)
class DataConfig:
    """One of: mock data; --data-path, split by --split; or one path for each split. Both may be words in a file."""

    data_path: tuple[str, ...] = option(
        (), help="Prefix of the .bin/.idx pair, or several of them, each preceded by its weight or none.")
    split: str | None = option(None, help=f"Parts for training, validation and test of --data-path. Default: {DEFAULT_SPLIT}.")
    train_data_path: tuple[str, ...] = option((), help="Like --data-path, for training only.")
    valid_data_path: tuple[str, ...] = option((), help="Like --data-path, for validation only.")
    test_data_path: tuple[str, ...] = option((), help="Like --data-path, for the test only.")
    data_args_path: str | None = option(
        None, help="File with the words of --data-path, on any number of lines.",
        avoid="For a few corpora --data-path is plainer.")
    per_split_data_args_path: str | None = option(
        None, help="JSON file with such words for each part: {\"train\": [...], \"valid\": [...], \"test\": [...]}.")
    blend_weights: str = option(
        "samples", choices=("samples", "epochs"),
        help="What the numbers before prefixes say: a proportion of the samples, or how often to read the corpus relative to "
             "the others, whatever their sizes (2 a 1 b: a twice for each time that b is read).",
        avoid="epochs: where proportions were tuned; they change when a corpus grows.")
    mock_data: bool = option(False, help="Made-up tokens, to try a layout without a corpus.",
                             avoid="Its loss says nothing about the model.")
    data_cache_path: str | None = option(None, help="Directory for the index maps. Default: beside the data.",
                                         avoid="Needed when the data lie on a read-only disk.")
    tokenizer_type: str | None = option(None, values={"HFTokenizer": "HuggingFaceTokenizer"},
                                        help="Name of a registered tokenizer, the one the corpus was made with.")
    vocab_file: str | None = option(None, help="vocab.json of GPT2BPETokenizer.")
    merge_file: str | None = option(None, flags=["--merges-file"], help="merges.txt of GPT2BPETokenizer.")
    tokenizer_model: str | None = option(None, help="File or directory of HuggingFaceTokenizer or SentencePieceTokenizer.")
    eod_mask_loss: bool = option(False, help="Leave the end-of-document token out of the loss.")
    reset_position_ids: bool = option(False, help="Count positions from the beginning of each document of a sample.")
    reset_attention_mask: bool = option(
        False, help="Let tokens attend to their own document only, of those in a sample.",
        avoid="On GPUs it rules out the fastest attention kernel, and saves none of the work.")
    pack_documents: bool = option(
        False, help="Put whole documents together into samples, instead of cutting one stream of them: positions and "
        "attention keep to each document, and one is cut only where it is longer than a sample.",
        avoid="Orders and numbers of samples are no longer Megatron's, and some parts in a thousand are padding.")
    fim_data: bool = option(
        False, help="Fill in the middle: move the middle of documents to their end, behind marks, so that the model learns to "
        "write between two texts.", avoid="It is for models that complete code; a sample loses as many tokens at its end as "
        "marks come in.")
    fim_rate: float = option(0.5, at_least=0, at_most=1, help="Part of the documents that are rearranged.")
    fim_spm_rate: float = option(0.5, at_least=0, at_most=1, help="Part of those in which the suffix comes first.")
    fim_split_sample: str | None = option(
        None, help="Token at which a document is cut into fragments, such as files, each rearranged by itself.")
    fim_fragment_rate: float | None = option(None, at_least=0, at_most=1,
                                             help="Part of the fragments that are rearranged. Default: --fim-rate.")
    fim_no_prefix: str | None = option(None, help="Leave texts that begin so as they are.")
    fim_prefix_token: str = option("<fim_prefix>", help="Mark before the prefix: a token, or its number.")
    fim_middle_token: str = option("<fim_middle>", help="Mark before the middle.")
    fim_suffix_token: str = option("<fim_suffix>", help="Mark before the suffix.")
    dataloader_type: str = option("single", choices=("single", "cyclic"),
                                  help="single: the stream of samples once; cyclic: over and over, shuffled anew.")
    data_readers: str = option(
        "all", choices=("all", "first"), help="Ranks of a tensor-parallel group that read the data: all, each for itself, or "
        "the first, which sends the others their batches.", avoid="first takes time; it is for disks that all would overload.")
    num_workers: int = option(2, at_least=0, help="Threads that prepare batches ahead; 0 for none.")

    @property
    def splits(self) -> str:
        return self.split or DEFAULT_SPLIT

    @property
    def has_split_paths(self) -> bool:
        return bool(self.train_data_path or self.valid_data_path or self.test_data_path)

    @property
    def is_divided_by_split(self) -> bool:
        """Whether the parts are ranges of the same corpora."""
        return bool(self.data_path or self.data_args_path)
