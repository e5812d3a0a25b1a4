"""What the container images install: locked versions with hashes, their SBOM, and errors for what an image lacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TARGETS = ("serve", "pipelines", "train", "cuda")  # each has what the one before has
HASH = re.compile(r"sha256:[0-9a-f]{64}")

needs_packages = pytest.mark.skipif(
    "LATHE_IMAGE_PACKAGES" not in os.environ, reason="`make test-image` installs the packages of the serving image"
)


def locked(project: Path, target: str) -> dict[str, tuple[str, list[str]]]:
    """Maps each package of a lock file to its version and hashes."""
    text = (project / f"docker/requirements-{target}.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement, *hashes = line.split(" --hash=")
            match = re.fullmatch(r"([\w.-]+)==(\S+)", requirement.strip())
            assert match, f"{target}: {requirement}"
            found[str(canonicalize_name(match[1]))] = (match[2], [given.strip() for given in hashes])
    return found


def extras(project: Path) -> dict[str, set[str]]:
    """The extras of each image."""
    lines = re.findall(r"^lock (\w+) pyproject\.toml (.*)$", (project / "docker/lock.sh").read_text(), re.MULTILINE)
    return {target: set(re.findall(r"--extra (\w+)", options)) for target, options in lines}


def declared(project: Path) -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """What pyproject.toml asks for: always, and for each extra."""
    table: dict[str, Any] = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    optional = {name: list(map(Requirement, lines)) for name, lines in table["optional-dependencies"].items()}
    return list(map(Requirement, table["dependencies"])), optional


@pytest.mark.parametrize("target", TARGETS)
def test_the_lock_fits_pyproject_toml(project: Path, target: str) -> None:
    always, optional = declared(project)
    versions = locked(project, target)
    for requirement in [*always, *(each for extra in extras(project)[target] for each in optional[extra])]:
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{name}: run `make lock`"
        assert requirement.specifier.contains(versions[name][0]), f"{requirement}: run `make lock`"


def test_the_lock_of_what_builds_the_images_fits_its_source(project: Path) -> None:
    source = (project / "docker/requirements-build.in").read_text().splitlines()
    versions = locked(project, "build")
    for requirement in (Requirement(line) for line in source if not line.startswith("#")):
        assert requirement.specifier.contains(versions[requirement.name][0]), f"{requirement}: run `make lock`"


@pytest.mark.parametrize("target", [*TARGETS, "build"])
def test_every_locked_package_has_hashes(project: Path, target: str) -> None:
    packages = locked(project, target)
    assert len(packages) > 20
    assert [name for name, (_, hashes) in packages.items() if not hashes or not all(map(HASH.fullmatch, hashes))] == []


def test_each_image_has_the_packages_of_the_smaller_one_and_more(project: Path) -> None:
    for small, large in pairwise(TARGETS):
        assert locked(project, small).items() < locked(project, large).items(), "run `make lock`"
        assert extras(project)[small] < extras(project)[large]


def test_an_image_has_no_package_of_an_extra_that_it_lacks(project: Path) -> None:
    always, optional = declared(project)
    product = extras(project)["cuda"]
    for target, own in extras(project).items():
        wanted = {requirement.name for requirement in [*always, *(each for extra in own for each in optional[extra])]}
        lacking = {requirement.name for extra in product - own for requirement in optional[extra]} - wanted
        assert not {str(canonicalize_name(name)) for name in lacking} & locked(project, target).keys()


def test_no_lock_names_an_index(project: Path) -> None:
    """Whoever builds an image takes the packages from the index of their own configuration; the hashes decide."""
    for path in (project / "docker").iterdir():
        options = path.read_text() if path.suffix == ".txt" else ""
        assert not re.search(r"://|--(index|extra-index|find-links|trusted-host)|^-[if] ", options, re.MULTILINE), path


def test_the_dockerfile_installs_locked_packages_then_lathe_alone(project: Path) -> None:
    dockerfile = (project / "Dockerfile").read_text().replace("\\\n", " ")
    script = (project / "docker/packages.sh").read_text()
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", dockerfile, re.MULTILINE | re.DOTALL))
    for target in TARGETS:
        assert f"RUN docker/packages.sh {target} /opt/lathe /opt/tools\n" in stages[f"packages-{target}"]
        assert f"COPY --from=packages-{target} /opt/lathe /opt/lathe\n" in stages[target]
    assert "lock=docker/requirements-$1.txt" in script
    installs = re.findall(r"-m pip --python \S+ (?:install|wheel) [^\n&]*", dockerfile + script)
    assert len(installs) == 4
    for command in installs:
        assert "--no-deps" in command
        assert "--require-hashes" in command or "--no-index" in command or "--no-build-isolation" in command


def test_the_documentation_has_the_extras_of_each_image(project: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (`.*`) \| [\d,]+ MB \|$", (project / "docs/operations.md").read_text(), re.M)
    assert [target for target, _ in rows] == list(TARGETS)
    known: set[str] = set()
    for target, cell in rows:
        known |= set(re.findall(r"`(\w+)`", cell))
        assert known == extras(project)[target]


# -- the packages of the serving image, installed ----------------------------------------------------------------------


@pytest.fixture
def packages() -> Path:
    return Path(os.environ["LATHE_IMAGE_PACKAGES"]).absolute()


def run(packages: Path, project: Path, script: str) -> str:
    """Run a script with the image's packages and the checkout's Lathe."""
    done = subprocess.run([packages / "bin/python", "-c", script], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_packages
def test_the_serving_image_is_small(packages: Path) -> None:
    """450 MB are allowed beyond the base image; Lathe itself has 16 of them."""
    files = [path for path in packages.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < 430e6


@needs_packages
def test_the_sbom_lists_what_is_installed_and_locked(packages: Path, project: Path) -> None:
    sbom = json.loads((packages / "share/doc/lathe/sbom.cdx.json").read_text())
    assert (sbom["bomFormat"], sbom["metadata"]["component"]["name"]) == ("CycloneDX", "lathe-server")
    listed = {str(canonicalize_name(part["name"])): part["version"] for part in sbom["components"]}
    assert listed == {name: version for name, (version, _) in locked(project, "serve").items()}
    (site,) = packages.glob("lib/python*/site-packages")
    assert listed == {str(canonicalize_name(each.name)): each.version for each in distributions(path=[str(site)])}
    assert all(part["purl"].startswith("pkg:pypi/") for part in sbom["components"])


@needs_packages
def test_the_serving_image_compiles_and_serves(packages: Path, project: Path) -> None:
    script = """
import numpy, lathe, lathe.server.app, lathe.server.access.tokens, lathe.server.api.grpc.endpoint
import lathe.server.telemetry.tracing
session = lathe.compile("model_repo/digits/2/model.onnx", tune="off")
print(session.run({"image": numpy.zeros((1, 1, 8, 8), "float32")})["probabilities"].shape)
"""
    assert run(packages, project, script) == "(1, 10)"


@needs_packages
@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("from lathe.core.train.data.optional_packages import arrow; arrow()", ".[train]"),
        ("from lathe.core.train.data.optional_packages import pillow; pillow()", ".[train]"),
        ("from lathe.core.train.run.search import _new_study; _new_study(None, None)", ".[train]"),
        ("from lathe.core.train.report import tensorboard; tensorboard.write_tensorboard(None, None)", ".[train]"),
        ("from lathe.server.pipelines.builtins.registry import find_maker; find_maker('decode_image')", "'image'"),
        ("from lathe.server.pipelines.builtins.registry import find_maker; find_maker('tokenize')", "'text'"),
        ("from lathe.core.runtime.device.devices import find_device; find_device('cuda')", "'cuda'"),
    ],
)
def test_what_the_serving_image_lacks_is_named(packages: Path, project: Path, code: str, extra: str) -> None:
    script = f"try: exec({code!r})\nexcept Exception as error: print(type(error).__name__, error)"
    said = run(packages, project, script)
    assert extra in said
    assert not said.startswith("ModuleNotFoundError")
