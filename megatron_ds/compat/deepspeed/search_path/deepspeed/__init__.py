"""The module `deepspeed` of programs that have the folder above on PYTHONPATH: importing it installs this package.

`python -m megatron_ds.as_deepspeed` and `megatron-ds launch --as-deepspeed` put it there.
"""

import importlib.util
import sys
from pathlib import Path

# A checkout that is not installed is found where this file is, behind all other places.
if importlib.util.find_spec("megatron_ds") is None:
    sys.path.append(str(Path(__file__).parents[5]))

# The import system returns the module that sys.modules has after this one was executed.
del sys.modules[__name__]
importlib.import_module("megatron_ds").install_as_deepspeed()
