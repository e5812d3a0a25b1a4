"""The container's properties that its files show; the stack check deploys it for real."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lathe.server.environment import unknown_variables


@pytest.fixture
def dockerfile(project: Path) -> str:
    return (project / "Dockerfile").read_text().replace("\\\n", " ")


@pytest.fixture
def compose(project: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((project / "docker-compose.yml").read_text()))


def instructions(dockerfile: str, name: str) -> list[str]:
    return re.findall(rf"^{name} +(.*)$", dockerfile, re.MULTILINE)


def test_the_image_is_built_in_stages_and_runs_as_an_ordinary_user(dockerfile: str) -> None:
    # without a target name, docker builds the last stage: the smallest image
    assert instructions(dockerfile, "FROM")[-1] == "base AS serve"
    assert instructions(dockerfile, "USER") == ["lathe"]


def test_compose_builds_the_image_with_everything_for_training_unless_told_otherwise(compose: dict[str, Any]) -> None:
    service = compose["services"]["lathe"]
    assert service["build"]["target"] == "${LATHE_IMAGE:-train}"
    assert service["image"] == "lathe:${LATHE_IMAGE:-train}"


def test_the_gpu_service_only_adds_what_gpus_need(dockerfile: str, compose: dict[str, Any]) -> None:
    assert "LATHE_DEVICE=cuda" in dockerfile.partition("FROM base AS cuda")[2].partition("\nFROM ")[0]
    service, plain = compose["services"]["lathe-cuda"], compose["services"]["lathe"]
    assert service["build"] == {**plain["build"], "target": "cuda"}
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    own = {"build", "image", "profiles", "deploy", "networks"}
    assert {key: value for key, value in service.items() if key not in own} == {
        key: value for key, value in plain.items() if key not in own
    }


def test_signals_reach_the_server(dockerfile: str) -> None:
    """Exec form: a shell as process 1 would swallow SIGTERM."""
    assert json.loads(instructions(dockerfile, "ENTRYPOINT")[0]) == ["lathe"]
    assert json.loads(instructions(dockerfile, "CMD")[-1]) == ["serve"]


def test_the_health_check_uses_the_settings(dockerfile: str, compose: dict[str, Any]) -> None:
    """`lathe health` uses TLS where the settings name a certificate; a URL written in the file would not."""
    command = json.loads(instructions(dockerfile, "HEALTHCHECK")[0].split("CMD", 1)[1])
    assert command == ["lathe", "health"]
    assert compose["services"]["lathe"]["healthcheck"]["test"] == ["CMD", *command]
    for url in ("http://", "https://"):
        assert not any(url in line for line in dockerfile.splitlines() if "CMD" in line or "HEALTHCHECK" in line)


def test_both_health_checks_wait_equally_long(dockerfile: str, compose: dict[str, Any]) -> None:
    options = dict(re.findall(r"--([a-z-]+)=(\S+)", instructions(dockerfile, "HEALTHCHECK")[0]))
    written = {
        name.replace("_", "-"): str(value) for name, value in compose["services"]["lathe"]["healthcheck"].items()
    }
    assert {name: value for name, value in written.items() if name != "test"} == options


def test_the_base_image_is_one_argument(dockerfile: str, compose: dict[str, Any]) -> None:
    (default,) = re.findall(r"^ARG BASE=(\S+)$", dockerfile, re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    images = {image for image in re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) if image not in stages}
    assert images == {"${BASE}"}
    for name in ("lathe", "lathe-cuda"):
        assert compose["services"][name]["build"]["args"] == {"BASE": f"${{LATHE_BASE:-{default}}}"}


def test_every_container_has_limits(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert {"mem_limit", "cpus", "pids_limit"} <= service.keys(), name
        assert service["ulimits"]["nofile"] >= 4096, name
        assert all(",size=" in mount for mount in service.get("tmpfs", ())), name
        assert service["logging"]["driver"] == "json-file", name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name


def test_the_server_may_open_a_file_for_each_connection(compose: dict[str, Any]) -> None:
    from lathe.server.settings import Settings

    assert compose["services"]["lathe"]["ulimits"]["nofile"] > 2 * Settings.model_fields["max_connections"].default


def test_ports_and_management_are_closed_by_default(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name in ("lathe", "lathe-cuda"):
        assert services[name]["environment"]["LATHE_OPEN_MANAGEMENT"] == "${LATHE_OPEN_MANAGEMENT:-false}", name
    assert not any("ANONYMOUS" in variable for variable in services["grafana"]["environment"])
    for name, service in services.items():
        for published in service["ports"]:
            assert published.startswith(("127.0.0.1:", "${LATHE_BIND:-127.0.0.1}:")), name
    assert "default" not in services["grafana"]["networks"]  # the network of the server


def test_the_server_accepts_the_variables_of_the_compose_file(project: Path) -> None:
    """They are in the same shell, or in the same `.env`, as the server's settings."""
    named = set(re.findall(r"\$\{(LATHE_\w+)", (project / "docker-compose.yml").read_text()))
    assert len(named) >= 5
    assert unknown_variables(dict.fromkeys(named, "1")) == []


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md"])
def test_the_documentation_says_how_to_open_management(project: Path, page: str) -> None:
    assert "LATHE_OPEN_MANAGEMENT=true docker compose up" in (project / page).read_text()


def test_the_build_context_includes_every_copied_file(project: Path, dockerfile: str) -> None:
    let_in = {line[1:] for line in (project / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in instructions(dockerfile, "COPY") for word in line.split()[:-1] if word[0] not in "-/"}
    assert copied == let_in
    assert all((project / name).exists() for name in copied)


def test_compose_drops_privileges(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name


def test_writable_paths_are_volumes_or_tmpfs(compose: dict[str, Any], dockerfile: str) -> None:
    service = compose["services"]["lathe"]
    assert service["volumes"] == ["lathe-data:/var/lib/lathe"]
    assert service["tmpfs"][0].startswith("/tmp")
    assert instructions(dockerfile, "VOLUME") == ["/var/lib/lathe"]
    for variable in ("LATHE_MODEL_REPO", "LATHE_CACHE_DIR"):
        assert re.search(rf"{variable}=/var/lib/lathe/", dockerfile), variable


def test_other_publishers_images_are_optional(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert "build" in service or service["profiles"], name


def test_compose_waits_longer_than_the_drain_timeout(compose: dict[str, Any]) -> None:
    from lathe.server.settings import Settings

    grace = int(compose["services"]["lathe"]["stop_grace_period"].removesuffix("s"))
    assert grace > Settings.model_fields["drain_timeout"].default


def test_the_metrics_profile_scrapes_the_service(project: Path, compose: dict[str, Any]) -> None:
    config = yaml.safe_load((project / "deploy/prometheus.yml").read_text())
    target = config["scrape_configs"][0]["static_configs"][0]["targets"][0]
    name, port = target.split(":")
    assert name in compose["services"]
    assert any(published.endswith(f":{port}") for published in compose["services"][name]["ports"])
