# Tunesmith in a container: docs/containers.md. Each step is a command that also runs on plain Debian: .ci/run uses
# `tools/container.sh packages` and `make .venv`, and tools/container_build.sh builds this file without a Docker daemon.
#
#   BASE     Debian or Ubuntu with Python 3.11 or later
#   TORCH    build of torch: cpu; cu126 for GPUs of compute capability 5.0 to 9.0, the V100 (7.0) among them; cu130 for 7.5 and later
#   EXTRAS   extras of pyproject.toml
ARG BASE=debian:bookworm-20250520-slim

FROM ${BASE} AS system
COPY tools/container.sh /opt/tunesmith/tools/
RUN /opt/tunesmith/tools/container.sh packages && /opt/tunesmith/tools/container.sh user && rm -rf /var/lib/apt/lists/*

# Used by .devcontainer: the environment is made from the clone that is open.
FROM system AS development
RUN /opt/tunesmith/tools/container.sh packages development && rm -rf /var/lib/apt/lists/*
USER 10001:10001

FROM system
LABEL org.opencontainers.image.title="Tunesmith" \
      org.opencontainers.image.description="Trains language models from human preferences" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.documentation="https://tunesmith.readthedocs.io"
ARG TORCH=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/${TORCH}
ARG EXTRAS=smollm2,lora,data,trackers,web,postgresql,trl
WORKDIR /opt/tunesmith
# The dependencies are a layer of their own, which a change of the code leaves as it is. The package is installed where it will be,
# and has to exist for that.
COPY Makefile pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir -p src/tunesmith && touch src/tunesmith/__init__.py && \
    PIP_NO_CACHE_DIR=1 make .venv EXTRAS="${EXTRAS}" TORCH_INDEX="${TORCH_INDEX}"
COPY tools/container_health.py tools/
COPY src src
RUN .venv/bin/python -m compileall -q src
ENV PATH=/opt/tunesmith/.venv/bin:$PATH \
    HOME=/data \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /data
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["python", "/opt/tunesmith/tools/container_health.py"]
ENTRYPOINT ["tunesmith"]
CMD ["--help"]
