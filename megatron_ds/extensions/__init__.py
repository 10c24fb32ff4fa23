"""Optimizers and features of data and attention that hang on interfaces of the core, which never imports them.

    bert/              BERT
    chat/              conversations, templates, the tokens of the answers
    corpora/           from text to a corpus: the tools that prepare data
    data_efficiency/   curricula over lengths and over samples, random-LTD
    distillation/      a student that learns from a frozen teacher
    dry_run/           what --dry-run prints, and the longest sequence that fits a device
    kernels/           implementations of operations in C++ and CUDA
    launch/            starts the ranks of a training, on one machine or many; reports what a machine offers
    onebit/            optimizers whose data-parallel ranks exchange one bit for each element
    report/            pages and drawings of runs, schedules and layouts
    preference/        training on pairs of answers
    services/          metrics for Weights & Biases, Comet, MLflow and OpenTelemetry
    upcycling/         a checkpoint with experts from a dense one
    sparse_layouts/    DeepSpeed's layouts of sparse attention

Each has a `feature.py`, which declares what the core takes from it (`features.py`). A module of this wing may be
the first one that a program imports: the configuration is loaded here before it, since it has these options.
"""

from .. import config  # noqa: F401
