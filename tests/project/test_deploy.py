"""The compose file, the Dockerfile and the manifest: options exist, mounts are there, and the image can be built."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
(MANIFEST,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.S)
SERVICES: dict[str, Any] = COMPOSE["services"]
BIN = Path(sys.executable).parent


def help_of(program: str, *subcommand: str) -> str:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [BIN / program, *subcommand, "--help"], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout


def commands() -> list[Any]:
    pod = yaml.safe_load(MANIFEST)["spec"]["template"]["spec"]["containers"]
    ours = {name: shlex.split(service["command"]) for name, service in SERVICES.items() if "command" in service}
    return [*ours.values(), *(container["args"] for container in pod)]


@pytest.mark.parametrize("words", commands(), ids=lambda words: f"{words[0]} {words[1]}")
def test_every_option_of_a_command_exists(words: list[str]) -> None:
    program, *rest = words
    subcommand = [word for word in rest[:1] if not word.startswith("-")]
    known = help_of(program, *subcommand)
    for option in (word for word in rest if word.startswith("--")):
        assert re.search(rf"{option}\b", known), f"{program} has no {option}"


def test_the_run_config_has_options_of_the_app() -> None:
    from fedcohort.cli.flower import app_files

    words = shlex.split(SERVICES["serverapp"]["command"])
    given = shlex.split(words[words.index("--run-config") + 1])
    project = app_files("clinics", "oort")["pyproject.toml"]
    assert given and all(re.search(rf"^{item.partition('=')[0]} = ", project, re.M) for item in given)


def test_mounts_names_and_dependencies_exist() -> None:
    for name, service in SERVICES.items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).is_file(), f"{name} mounts {source}"
        for config in service.get("configs", []):
            assert config["source"] in COMPOSE["configs"]
        for other in service.get("depends_on", {}):
            assert "healthcheck" in SERVICES[other]
        assert ":latest" not in service["image"] and not service.get("privileged")
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), f"{name} is open to the network"
    assert SERVICES["dashboard"]["volumes"] == ["journals:/journals:ro"]
    nodes = {"superlink", "serverapp", *(f"supernode-{i}" for i in range(3))}
    assert nodes | {"dashboard", "prometheus", "grafana"} == set(SERVICES)
    assert all(yaml.safe_load(config["content"]) for config in COMPOSE["configs"].values())


def test_what_the_image_copies_is_sent_to_the_engine() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.M)
    for path in " ".join(copied).split():
        assert (ROOT / path).exists() and any(path == a or path.startswith(f"{a}/") for a in allowed), path
    users = re.findall(r"^USER (\S+)", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert users and users[-1] != "root"


def test_what_has_state_in_kubernetes_has_a_volume_of_its_own() -> None:
    spec = yaml.safe_load(MANIFEST)["spec"]
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    assert spec["replicas"] == 1 and claims == {"state", "journals"}
    for container in spec["template"]["spec"]["containers"]:
        for mount in container["volumeMounts"]:
            assert mount["name"] in claims or mount["readOnly"]


def _engine() -> str | None:
    for name in ("docker", "podman"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


@pytest.mark.slow
@pytest.mark.skipif(_engine() is None, reason="no container engine runs here")
def test_the_image_is_built_and_starts() -> None:
    engine = _engine()
    assert engine is not None
    build = [engine, "build", "-q", "-f", str(DEPLOY / "Dockerfile"), "-t", "fedcohort-test", str(ROOT)]
    subprocess.run(build, check=True, timeout=1800)
    said = subprocess.run(
        [engine, "run", "--rm", "fedcohort-test", "fedcohort", "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip()
