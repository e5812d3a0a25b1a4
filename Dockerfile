# One file, four images; each has what the ones before it have:
#
#   docker build .                        `serve`: HTTP, gRPC, tokens, traces; compiles and serves models
#   docker build --target pipelines .     decodes images and splits texts into tokens, too
#   docker build --target train .         tables, sweeps and TensorBoard for training jobs, too
#   docker build --target cuda .          GPUs, too: a gigabyte, and no CUDA image, since NVIDIA's runtime brings the driver
#
# Versions and hashes of all packages are in docker/requirements-*.txt (`make lock`); each image has its SBOM.
# The container runs as an ordinary user without capabilities; its root filesystem may be read-only, as long as
# /var/lib/lathe (models and compiled code) and /tmp can be written.
# What all stages are built on; `--build-arg BASE=...` takes another image with Python 3.11, or this one by its digest.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS tools

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv --without-pip /opt/tools && python3 -m venv --without-pip /opt/lathe
WORKDIR /src
COPY docker docker
RUN python3 -m pip --python /opt/tools/bin/python install --no-deps --require-hashes --only-binary :all: \
      --requirement docker/requirements-build.txt
COPY pyproject.toml ./


# Lathe itself, in a layer of its own: an image with changed code shares the packages with the one before.
FROM tools AS lathe

COPY setup.py README.md LICENSE ./
COPY lathe lathe
COPY core core
COPY server server
RUN python3 -m pip --python /opt/tools/bin/python wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && python3 -m pip --python /opt/lathe/bin/python install --no-deps --no-index /wheels/*.whl


FROM tools AS packages-serve

RUN docker/packages.sh serve /opt/lathe /opt/tools


FROM packages-serve AS packages-pipelines

RUN docker/packages.sh pipelines /opt/lathe /opt/tools


FROM packages-pipelines AS packages-train

RUN docker/packages.sh train /opt/lathe /opt/tools


FROM packages-train AS packages-cuda

RUN docker/packages.sh cuda /opt/lathe /opt/tools


FROM ${BASE} AS base

RUN useradd --system --uid 10001 --home-dir /tmp --shell /usr/sbin/nologin lathe
# a new volume starts with the content of its folder in the image: the example models are its seed
COPY --chown=lathe:lathe model_repo /var/lib/lathe/models
RUN install -d -o lathe -g lathe /var/lib/lathe /var/lib/lathe/cache

ENV PATH=/opt/lathe/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    LATHE_HOST=0.0.0.0 \
    LATHE_PORT=8080 \
    LATHE_MODEL_REPO=/var/lib/lathe/models \
    LATHE_CACHE_DIR=/var/lib/lathe/cache

USER lathe
WORKDIR /tmp
VOLUME /var/lib/lathe
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
# `lathe health` asks the server that the container's settings describe, over TLS where they name a certificate. It takes half
# a second of a processor, so it looks seldom; while it starts, engines from version 25 on look every five seconds.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 CMD ["lathe", "health"]
ENTRYPOINT ["lathe"]
CMD ["serve"]


FROM base AS cuda

COPY --from=packages-cuda /opt/lathe /opt/lathe
COPY --from=lathe /opt/lathe /opt/lathe
ENV LATHE_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility


FROM base AS train

COPY --from=packages-train /opt/lathe /opt/lathe
COPY --from=lathe /opt/lathe /opt/lathe


FROM base AS pipelines

COPY --from=packages-pipelines /opt/lathe /opt/lathe
COPY --from=lathe /opt/lathe /opt/lathe


FROM base AS serve

COPY --from=packages-serve /opt/lathe /opt/lathe
COPY --from=lathe /opt/lathe /opt/lathe
