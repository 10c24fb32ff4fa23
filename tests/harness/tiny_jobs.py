"""The small jobs that layouts train: their flags, their sizes, and how much their numbers may differ."""

from .layout_comparison import Difference

STYLES = {
    "gpt2": "--position-embedding-type learned_absolute --normalization LayerNorm".split(),
    "llama": (
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
        "--group-query-attention --num-query-groups 2"
    ).split(),
    "bert": ["--model", "bert"],
}
DTYPES = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp16": ["--fp16", "--initial-loss-scale", "65536"],
}
DOCUMENTS = {"joined": [], "apart": ["--reset-position-ids", "--reset-attention-mask"]}
# The path made_up does not exist: all samples are mock samples.
SAMPLES = {
    "cut": ["--mock-data"],
    "packed": ["--data-path", "made_up", "--pack-documents"],
    "fim": (
        "--data-path made_up --fim-data --fim-rate 0.9 --fim-prefix-token 1 --fim-middle-token 2 "
        "--fim-suffix-token 3"
    ).split(),
}
# Tolerances. fp32: only the order of summation differs. In 16 bits each order rounds differently, and twenty
# Adam steps amplify this; the figures are the effect of rounding with a margin.
TOLERANCE = {
    "fp32": Difference(loss=1e-6, grad_norm=1e-6, weights=1e-5),
    "bf16": Difference(loss=2e-4, grad_norm=1e-2, weights=5e-2),
    "fp16": Difference(loss=5e-5, grad_norm=2e-3, weights=1e-2),
}
VOCAB, SEQ_LENGTH = 131, 24


def tiny_job(
    style: str,
    dtype: str,
    untie: bool,
    dropout: float,
    layers: int,
    global_batch_size: int,
    steps: int,
    documents: str = "joined",
    samples: str = "cut",
    readers: str = "all",
) -> list[str]:
    """Flags of the job that every layout trains.

    documents  of a sample: "joined", or "apart"
    samples    "cut" out of the stream of documents, "packed" of whole ones, or "fim": with documents' middles
               filled in
    readers    ranks of a tensor-parallel group that read the samples
    """
    return [
        *(
            f"--num-layers {layers} --hidden-size 32 --num-attention-heads 4 --seq-length {SEQ_LENGTH} "
            f"--max-position-embeddings {SEQ_LENGTH} --vocab-size {VOCAB} "
            f"--make-vocab-size-divisible-by 8 --global-batch-size {global_batch_size} "
            f"--train-iters {steps} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine"
        ).split(),
        "--lr-warmup-iters",
        str(min(2, steps - 1)),
        *(
            f"--weight-decay 0.1 --clip-grad 1.0 --hidden-dropout {dropout} "
            f"--attention-dropout {dropout} --num-workers 0"
        ).split(),
        "--data-readers",
        readers,
        *SAMPLES[samples],
        "--tokenizer-type",
        "NullTokenizer",
        *(["--untie-embeddings-and-output-weights"] if untie else []),
        *([] if style == "bert" else ["--eod-mask-loss"]),
        *STYLES[style],
        *DTYPES[dtype],
        *DOCUMENTS[documents],
    ]
