#!/bin/sh
# Installs the packages that an image has besides Lathe into a virtual environment, and writes their SBOM.
#
#   docker/packages.sh TARGET ENVIRONMENT TOOLS      e.g. docker/packages.sh serve /opt/lathe /opt/tools
#
# TOOLS is an environment with the packages of requirements-build.txt. The Dockerfile calls this in the project's folder;
# `make test-image` does the same without Docker.
set -eu
lock=docker/requirements-$1.txt environment=$2 tools=$3 python=${PYTHON:-python3}

# only wheels: installing one runs no code of its package
"$python" -m pip --python "$environment/bin/python" install --no-deps --require-hashes --only-binary :all: --requirement "$lock"
"$python" -m pip --python "$environment/bin/python" check

# the packages' own tests: 31 MB of the serving image, most of it NumPy's and onnx's
find "$environment/lib" -type d \( -name tests -o -path '*/onnx/backend/test' \) -prune -exec rm -r {} +

mkdir -p "$environment/share/doc/lathe"
"$tools/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible \
  --output-file "$environment/share/doc/lathe/sbom.cdx.json" "$environment/bin/python"
