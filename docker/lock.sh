#!/bin/sh
# Resolves the packages of the container images: docker/requirements-*.txt, with exact versions and hashes.
#
# `make lock` runs this with pip-tools on the path. Versions that still fit pyproject.toml stay; `make lock ARGS=--upgrade`
# takes the newest.
set -eu

lock() {
  file=docker/requirements-$1.txt source=$2
  shift 2
  new=$(mktemp)
  # without the options of this machine's pip: other machines may not reach its index
  if [ -f "$file" ]; then cp "$file" "$new"; fi
  pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header --no-emit-options --no-emit-index-url \
    --no-emit-trusted-host --no-emit-find-links "$@" --output-file "$new" "$source"
  { echo "# Made by \`make lock\` for Python 3.11 on Linux: change $source instead."; grep -v '^# Made by' "$new"; } >"$file"
  rm "$new"
}

# The largest image first: the others begin with its versions, so that a package has one version in all of them.
lock cuda pyproject.toml --extra grpc --extra jwt --extra otel --extra text --extra image --extra train --extra cuda "$@"
for target in train pipelines serve; do cp docker/requirements-cuda.txt docker/requirements-$target.txt; done
lock train pyproject.toml --extra grpc --extra jwt --extra otel --extra text --extra image --extra train
lock pipelines pyproject.toml --extra grpc --extra jwt --extra otel --extra text --extra image
lock serve pyproject.toml --extra grpc --extra jwt --extra otel
lock build docker/requirements-build.in "$@"
