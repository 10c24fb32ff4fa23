"""Optimizers and features of data and attention that hang on interfaces of the core, which never imports them.

    data_efficiency/   curricula over lengths and over samples, random-LTD
    distillation/      a student that learns from a frozen teacher
    onebit/            optimizers whose data-parallel ranks exchange one bit for each element
    preference/        training on pairs of answers
    sparse_layouts/    DeepSpeed's layouts of sparse attention

The core asks for their options, rules and registrations by name (`plugins.py`). A module of this wing may be
the first one that a program imports: the configuration is loaded here before it, since it has these options.
"""

from .. import config  # noqa: F401
