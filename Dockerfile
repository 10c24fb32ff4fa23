# syntax=docker/dockerfile:1
# The package with torch for CPUs, or for CUDA:
#
#     docker build --build-arg DEVICE=cuda --tag megatron_ds .
#     docker run --gpus all --ipc host --volume "$PWD:/work" megatron_ds train --config tiny.yaml
ARG PYTHON=3.12
ARG DEVICE=cpu

# A wheel needs a compiler, and the image does not.
FROM python:${PYTHON}-slim-bookworm AS wheel
RUN apt-get update && apt-get install --yes --no-install-recommends g++
RUN python -m pip install --no-cache-dir "build>=1.3,<2"
COPY . /source
RUN python -m build --wheel --outdir /wheels /source

FROM python:${PYTHON}-slim-bookworm AS cpu
RUN python -m pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "torch>=2.11,<2.14"

# CUDA itself comes with torch. The libraries of InfiniBand, which NCCL looks for, do not, nor does the C compiler by
# which Triton builds the launchers of its kernels.
FROM python:${PYTHON}-slim-bookworm AS cuda
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev ibverbs-providers librdmacm1 && rm -rf /var/lib/apt/lists/*
RUN python -m pip install --no-cache-dir "torch>=2.11,<2.14"

FROM ${DEVICE}
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels python -m pip install --no-cache-dir "$(echo /wheels/*.whl)[report,hf,serve,data]"
RUN useradd --create-home --uid 1000 trainer
USER trainer
WORKDIR /work
ENTRYPOINT ["megatron-ds"]
CMD ["--help"]
