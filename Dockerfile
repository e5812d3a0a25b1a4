# One stage installs into a virtual environment, the last takes only that and the example models. `--target cuda` does the
# same with what GPUs need besides: a gigabyte, and no CUDA image, since NVIDIA's container runtime brings the driver.
# The container runs as an ordinary user without capabilities; its root filesystem may be read-only, as long as
# /var/lib/lathe (models and compiled code) and /tmp can be written.
# What all stages are built on; `--build-arg BASE=...` takes another image with Python 3.11, or this one by its digest.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv --without-pip /opt/lathe
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY lathe lathe
COPY core core
COPY server server
# what brings gRPC, tokens, traces, tokenizers, and tables, images and sweeps for training; none with --build-arg EXTRAS=
ARG EXTRAS=grpc,jwt,otel,text,train
RUN python3 -m pip --python /opt/lathe/bin/python install ".${EXTRAS:+[$EXTRAS]}"


FROM build AS build-cuda

RUN python3 -m pip --python /opt/lathe/bin/python install ".[cuda]"


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

COPY --from=build-cuda /opt/lathe /opt/lathe
ENV LATHE_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility


FROM base

COPY --from=build /opt/lathe /opt/lathe
