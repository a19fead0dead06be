# docker build -t draftloop .
# docker run --gpus all -p 8000:8000 -v draftloop-cache:/cache draftloop smollm2-135m
#
# On a machine without a GPU: --build-arg TORCH="torch==2.13.0+cpu", where pip is set to an index with CPU builds.
# Another base, such as one with NVIDIA's tools: --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
# torch's CUDA builds bring CUDA's libraries along, so that the base needs none; triton and the CPU kernels need a C
# compiler at run time.
ARG BASE=ubuntu:24.04

FROM ${BASE} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
ARG TORCH="torch>=2.11"
ARG EXTRAS=serve,grammar
RUN python3 -m venv /opt/draftloop
ENV PATH=/opt/draftloop/bin:$PATH
# Alone in its layer: draftloop's own changes do not download it again.
RUN pip install --no-cache-dir "${TORCH}"
COPY . /src
RUN pip install --no-cache-dir "/src[${EXTRAS}]"

FROM base
COPY --from=build /opt/draftloop /opt/draftloop
RUN useradd --create-home --uid 10001 draftloop && install --directory --owner=draftloop /cache
USER draftloop
WORKDIR /home/draftloop
# Models of the hub, converted models, compiled kernels: kept in the volume.
ENV PATH=/opt/draftloop/bin:$PATH \
    HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONUNBUFFERED=1
VOLUME /cache
EXPOSE 8000
# The first start fetches the model and compiles kernels.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["draftloop", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["smollm2-135m"]
