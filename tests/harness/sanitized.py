"""Emulated kernels under the sanitizers of g++, in a child process that has their library loaded.

    report = run_sanitized("thread", "norm.cu")       # "" or what the sanitizer printed

"thread" finds accesses to one address without a barrier between them, in a block or of two blocks. "address"
finds accesses outside of tensors and arrays, misaligned packets and undefined arithmetic.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = {"thread": ("-fsanitize=thread", "-g"),
         "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")}
LIBRARIES = {"thread": ("libtsan.so",), "address": ("libasan.so", "libubsan.so")}
# Leaks are Python's and torch's. A report ends the process with a code of its own.
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_signal_unsafe=0",
           "ASAN_OPTIONS": "detect_leaks=0:exitcode=66", "UBSAN_OPTIONS": "print_stacktrace=1"}
SECONDS = 240


def missing(kind: str) -> str:
    """"" if this machine can run the sanitizer, else the reason why not."""
    absent = [name for name in LIBRARIES[kind] if not Path(_path(name)).is_file()]
    if absent:
        return f"g++ has no {' or '.join(absent)}"
    # ThreadSanitizer needs the address space as it expects it.
    if kind == "thread" and (not shutil.which("setarch")
                             or subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode):
        return "setarch cannot turn off address space randomization"
    return ""


def run_sanitized(kind: str, code: str) -> str:
    """Run Python code in a child process with the sanitizer; it has `gpu_flags`, the flags for emulated_gpu.

    Returns what the child printed, "" after a run without findings.
    """
    words = [sys.executable, "-c", f"gpu_flags = {FLAGS[kind]!r}\n{code}"]
    environment = dict(os.environ, LD_PRELOAD=" ".join(map(_path, LIBRARIES[kind])), OMP_NUM_THREADS="1",
                       **OPTIONS)
    done = subprocess.run(["setarch", "-R", *words] if kind == "thread" else words, env=environment, cwd=ROOT,
                          capture_output=True, text=True, timeout=SECONDS)
    text = done.stdout + done.stderr
    return text if text or not done.returncode else f"exit code {done.returncode}"


def _path(library: str) -> str:
    """The library's path; its name alone where g++ has none."""
    return subprocess.run(["g++", f"-print-file-name={library}"], capture_output=True, text=True,
                          check=True).stdout.strip()
