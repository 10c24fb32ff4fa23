"""GPU kernels: one Python file for each source in csrc/gpu, with the limits of its kernels and their
launches; the compiler (NVRTC) and the launcher (the driver's C interface).

Importing the package registers the check of GPU kernels against torch's operations (self_check.py).
"""

from . import self_check as self_check
