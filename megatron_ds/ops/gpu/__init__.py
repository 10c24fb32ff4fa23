"""GPU kernels: one Python file for each source in csrc/gpu, with the limits of its kernels and their
launches; the compiler (NVRTC) and the launcher (the driver's C interface).
"""
