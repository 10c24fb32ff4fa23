"""Write questions about functions of Python, answered by the first sentence of their documentation.

python examples/python_chats.py --output chats.jsonl
"""

import argparse
import builtins
import collections
import itertools
import json
import math
import os
import random
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

MODULES = (builtins, collections, itertools, json, math, os, random, shutil, statistics)
LONGEST = 120  # characters of an answer


def answers() -> Iterator[tuple[str, str]]:
    """Names of functions, and what each does."""
    for module in MODULES:
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or not callable(value) or not value.__doc__:
                continue
            paragraph = value.__doc__.strip().partition("\n\n")[0]
            sentence = " ".join(paragraph.split()).partition(". ")[0].rstrip(".")
            # Signatures and long descriptions are no answers.
            if "(" not in sentence and 10 < len(sentence) < LONGEST:
                full = name if module is builtins else f"{module.__name__}.{name}"
                yield full, f"{sentence}."


def main() -> None:
    """Write a JSON line for each function."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    lines = [
        json.dumps({"prompt": f"What does {name} do?", "completion": answer})
        for name, answer in answers()
    ]
    parser.parse_args().output.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
