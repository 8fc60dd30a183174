# Images of tilerec with its command line, for CPUs and for NVIDIA GPUs.
#
#   docker build --target cpu -t tilerec:cpu .
#   docker build --target cuda -t tilerec:cuda .
#   docker run --rm --shm-size=8g tilerec:cpu doctor
#
# The wheel is built once: it serves every Python and every torch of its platform. TORCH is the version that the tests ran
# with; TORCH_INDEX has its builds for CPUs.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS wheel
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir scikit-build-core cmake ninja \
 && TILEREC_NATIVE_REQUIRED=1 pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

# `tilerec export` and torch.compile compile with g++, Triton compiles its launcher with gcc.
FROM python:${PYTHON}-slim-bookworm AS base
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home tilerec
COPY --from=wheel /wheel /wheel
WORKDIR /home/tilerec

FROM base AS cpu
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" "torch==${TORCH}" \
 && pip install --no-cache-dir "$(ls /wheel/*.whl)[serve]"
USER tilerec
ENTRYPOINT ["tilerec"]
CMD ["--help"]

# The driver comes from the host (--gpus all); CUDA libraries and Triton come with torch.
FROM base AS cuda
ARG TORCH=2.13.0
RUN pip install --no-cache-dir "torch==${TORCH}" \
 && pip install --no-cache-dir "$(ls /wheel/*.whl)[serve]"
USER tilerec
ENTRYPOINT ["tilerec"]
CMD ["--help"]
