"""What is in `cluster/` is what Ray, Kubernetes, bash and `disagg` themselves would accept."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config as kuberay
from ray.autoscaler._private.util import prepare_config, validate_config

from disagg import serve_app
from disagg.cli.shutdown import RAY_STOP_S
from disagg.config import Config, load_config, replace_keys
from disagg.errors import ConfigError

REPO = Path(__file__).parents[2]
FOLDER = REPO / "cluster"
KUBERNETES = "1.37"
RAY_UP = ("local.yaml", "aws.yaml", "gcp.yaml")
ROLES, NODES = {"prefill", "decode"}, ("head", "worker")
COMMANDS = ["initialization_commands", "setup_commands"]
COMMANDS += [
    f"{role}_{what}_commands" for what in ("setup", "start_ray") for role in NODES
]


def closed(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has these properties and no other."""
    whole = {"type": "object", "required": list(required), "properties": properties}
    return whole | {"additionalProperties": False}


# The part of the definition of a RayCluster that is used here (ray.io/v1, KubeRay 1.5.1); what is
# in a pod is checked by the schema of Kubernetes.
STRING = {"type": "string"}
PARAMS = {"type": "object", "additionalProperties": STRING}
GROUP: dict[str, Any] = {"rayStartParams": PARAMS, "template": {"type": "object"}}
COUNTS = {
    name: {"type": "integer"} for name in ("replicas", "minReplicas", "maxReplicas")
}
POOL = closed("groupName", *[*COUNTS][1:], *GROUP, groupName=STRING, **COUNTS, **GROUP)
RAY_CLUSTER = closed(
    "headGroupSpec",
    rayVersion=STRING,
    authOptions=closed(mode={"enum": ["disabled", "token"]}),
    headGroupSpec=closed(*GROUP, **GROUP),
    workerGroupSpecs={"type": "array", "items": POOL},
)
PARTS = {"serveConfigV2": STRING, "rayClusterConfig": RAY_CLUSTER}
RAY_SERVICE = closed(*PARTS, **PARTS)


def ray_up(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / name).read_text()))


def commands(name: str) -> list[str]:
    config = ray_up(name)
    return [command for key in COMMANDS for command in config.get(key, [])]


def kubernetes() -> dict[str, dict[str, Any]]:
    """kind -> the manifest; one of each."""
    documents = yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text())
    return {document["kind"]: document for document in documents}


def groups() -> list[dict[str, Any]]:
    spec = kubernetes()["RayService"]["spec"]["rayClusterConfig"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def container(group: dict[str, Any]) -> dict[str, Any]:
    return dict(group["template"]["spec"]["containers"][0])


def application() -> dict[str, Any]:
    (application,) = yaml.safe_load(
        kubernetes()["RayService"]["spec"]["serveConfigV2"]
    )["applications"]
    return dict(application)


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_accepts_the_cluster(name):
    validate_config(prepare_config(ray_up(name)))


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_a_cloud_has_a_node_type_for_each_role_and_a_bare_head(name):
    types = ray_up(name)["available_node_types"]
    pools = {role: ROLES & set(node["resources"]) for role, node in types.items()}

    assert pools == {"head": set(), "prefill": {"prefill"}, "decode": {"decode"}}


@pytest.mark.parametrize("name", RAY_UP)
def test_every_command_is_shell(name):
    for command in commands(name):
        subprocess.run(["bash", "-n", "-c", command], check=True)


@pytest.mark.parametrize("name", RAY_UP)
def test_files_that_are_copied_to_hosts_exist_or_are_built(name):
    config = ray_up(name)

    assert {"cluster", "build/wheel"} == set(config["file_mounts"].values())

    text = " ".join([*commands(name), (FOLDER / "env.sh").read_text()])
    for path in re.findall(r"~/\.disagg/cluster/(\S+?\.\w+)\b", text):
        assert (FOLDER / path).exists()


@pytest.mark.parametrize("name", RAY_UP)
def test_the_service_knows_every_setting_that_it_is_given(name):
    lines = [
        line
        for line in ray_up(name)["head_start_ray_commands"]
        if "disagg serve" in line
    ]
    flags = dict(re.findall(r"--set ([\w.]+)=(\S+)", lines[0]))

    assert "cluster.address" in flags

    config = load_config(FOLDER / "service.yaml", flags)

    assert config.cluster.pools
    assert config.security.plane == "tls"


def test_the_service_knows_every_setting_in_comments():
    text = (FOLDER / "service.yaml").read_text()
    everything = re.sub(r"^( *)# (?=[a-z]+:)", r"\1", text, flags=re.M)

    assert everything != text

    replace_keys(Config(), yaml.safe_load(everything))


def test_the_application_on_kubernetes_knows_its_settings(monkeypatch):
    assert (
        application()["import_path"]
        == f"{serve_app.__name__}:{serve_app.build_app.__name__}"
    )

    cluster = serve_app.config_of(application()["args"]).cluster

    assert (cluster.address, cluster.prefill, cluster.decode) == ("auto", 1, 1)
    assert cluster.pools
    with pytest.raises(ConfigError, match=r"cluster\.prefill is 'many'"):
        serve_app.build_app({"prefill": "many"})

    monkeypatch.setitem(sys.modules, "ray.serve", None)

    with pytest.raises(ConfigError, match=r"disagg\[serve\]"):
        serve_app.build_app({})


def test_pods_live_long_enough_for_requests_and_workers_to_end():
    config = serve_app.config_of(application()["args"])
    needed_s = config.server.drain_s + 2 * config.cluster.grace_s + RAY_STOP_S

    periods = {x["template"]["spec"]["terminationGracePeriodSeconds"] for x in groups()}

    assert all(seconds > needed_s for seconds in periods)


def test_kubernetes_accepts_the_network_policy_and_all_pods():
    kubernetes_validate.validate(kubernetes()["NetworkPolicy"], KUBERNETES, strict=True)
    for group in groups():
        pods = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "template": group["template"],
        }
        kubernetes_validate.validate(pods, KUBERNETES, strict=True)


def test_the_operator_and_ray_understand_the_ray_cluster():
    service = kubernetes()["RayService"]

    assert service["apiVersion"] == "ray.io/v1"

    jsonschema.validate(service["spec"], RAY_SERVICE)
    names = {"name": "disagg-any", "namespace": "any"}
    cluster = {"metadata": names, "spec": service["spec"]["rayClusterConfig"]}
    types = kuberay._derive_autoscaling_config_from_ray_cr(cluster)[
        "available_node_types"
    ]
    resources = {name: x["resources"].items() for name, x in types.items()}
    roles = {
        name: {k: v for k, v in items if k in ROLES}
        for name, items in resources.items()
    }

    assert roles == {
        "headgroup": {},
        "prefill": {"prefill": 1},
        "decode": {"decode": 1},
    }


def test_parts_of_the_kubernetes_manifests_name_each_other():
    policy = kubernetes()["NetworkPolicy"]["spec"]
    for group in groups():
        assert (
            group["template"]["metadata"]["labels"]
            == policy["podSelector"]["matchLabels"]
        )
        ports = {port["name"] for port in container(group)["ports"]} | {6380}
        for probe in ("readinessProbe", "livenessProbe"):
            ((_, action),) = (
                x for x in container(group)[probe].items() if isinstance(x[1], dict)
            )
            assert action["port"] in ports


def test_the_image_has_our_torch_and_copies_existing_files():
    text = (FOLDER / "Dockerfile").read_text()
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]

    (torch,) = (need for need in project["dependencies"] if need.startswith("torch"))

    assert set(re.findall(r'"(torch\S+)"', text)) == {torch}

    copied = [
        word
        for line in re.findall(r"^COPY (.*) \S+$", text, re.M)
        for word in line.split()
    ]
    allowed = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    for path in copied:
        assert (REPO / path).exists()
        assert f"!{path}" in allowed
