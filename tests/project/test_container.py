"""What the container promises, as far as its files tell; deploying it for real is the stack check's work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def dockerfile(project: Path) -> str:
    return (project / "Dockerfile").read_text().replace("\\\n", " ")


@pytest.fixture
def compose(project: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((project / "docker-compose.yml").read_text()))


def instructions(dockerfile: str, name: str) -> list[str]:
    return re.findall(rf"^{name} +(.*)$", dockerfile, re.MULTILINE)


def test_it_is_built_in_stages_and_runs_as_an_ordinary_user(dockerfile: str) -> None:
    assert instructions(dockerfile, "FROM")[-1] == "base"  # what nobody asks for by name is the one without GPUs
    assert instructions(dockerfile, "USER") == ["lathe"]
    final = dockerfile.rpartition("\nFROM ")[2]
    assert "--from=build " in final and "cuda" not in final


def test_the_one_for_gpus_only_adds_what_they_need(dockerfile: str, compose: dict[str, Any]) -> None:
    stages = dict(re.findall(r"^FROM (\S+) AS (\S+)$", dockerfile, re.MULTILINE))
    assert {"build": "build-cuda", "base": "cuda"}.items() <= stages.items()
    assert "LATHE_DEVICE=cuda" in dockerfile
    service, plain = compose["services"]["lathe-cuda"], compose["services"]["lathe"]
    assert service["build"] == {"context": ".", "target": "cuda"}
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


def test_the_health_check_needs_only_python(dockerfile: str) -> None:
    command = json.loads(instructions(dockerfile, "HEALTHCHECK")[0].split("CMD", 1)[1])
    assert command[:2] == ["python3", "-c"]
    compile(command[2], "healthcheck", "exec")
    assert "/v2/health/ready" in command[2]


def test_everything_copied_is_let_into_the_build(project: Path, dockerfile: str) -> None:
    let_in = {line[1:] for line in (project / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in instructions(dockerfile, "COPY") for word in line.split()[:-1] if word[0] not in "-/"}
    assert copied == let_in
    assert all((project / name).exists() for name in copied)


def test_compose_takes_privileges_away(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name


def test_what_must_be_written_is_a_volume_or_tmpfs(compose: dict[str, Any], dockerfile: str) -> None:
    service = compose["services"]["lathe"]
    assert service["volumes"] == ["lathe-data:/var/lib/lathe"]
    assert service["tmpfs"][0].startswith("/tmp")
    assert instructions(dockerfile, "VOLUME") == ["/var/lib/lathe"]
    for variable in ("LATHE_MODEL_REPO", "LATHE_CACHE_DIR"):
        assert re.search(rf"{variable}=/var/lib/lathe/", dockerfile), variable


def test_other_publishers_images_are_optional(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert "build" in service or service["profiles"], name


def test_compose_gives_the_drain_its_time(compose: dict[str, Any]) -> None:
    from server.settings import Settings

    grace = int(compose["services"]["lathe"]["stop_grace_period"].removesuffix("s"))
    assert grace > Settings.model_fields["drain_timeout"].default


def test_the_metrics_profile_scrapes_the_service(project: Path, compose: dict[str, Any]) -> None:
    config = yaml.safe_load((project / "deploy/prometheus.yml").read_text())
    target = config["scrape_configs"][0]["static_configs"][0]["targets"][0]
    name, port = target.split(":")
    assert name in compose["services"]
    assert any(published.endswith(f":{port}") for published in compose["services"][name]["ports"])
