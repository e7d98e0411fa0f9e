"""deploy/: what can be checked without Docker, a cluster or SLURM. Flags, paths, names and times are those of the code;
the scripts run as far as the programs that they would start, which are stand-ins here.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import infer.cli
import train.cli
from infer.commands.serve import API_KEY_VARIABLE
from infer.server import run as server_run
from infer.server.guard import OPEN_PATHS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
MANIFESTS = {
    d["kind"]: d for f in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for d in yaml.safe_load_all(f.read_text())
}
SCRIPTS = [DEPLOY / "torchrun.sh", *sorted((DEPLOY / "slurm").glob("*.sbatch"))]


# ---- the image ----


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in lines]


def last(name: str) -> str:
    return [rest for instruction, rest in instructions() if instruction == name][-1]


def entrypoint() -> list[str]:
    words = json.loads(last("ENTRYPOINT"))  # the exec form alone is JSON
    assert words[:2] == ["hispec-infer", "serve"]
    return words[1:]


def test_the_image_serves_as_nobody_special_and_its_flags_are_ours() -> None:
    args = infer.cli._parser().parse_args(entrypoint())
    assert (args.artifact, args.host, str(args.port)) == (last("VOLUME"), "0.0.0.0", last("EXPOSE"))
    user, group = last("USER").split(":")
    assert int(user) > 0 and int(group) > 0
    assert [name for name, _ in instructions()].index("USER") < [name for name, _ in instructions()].index("ENTRYPOINT")


def test_the_image_asks_for_its_health_where_the_server_answers() -> None:
    command = json.loads(last("HEALTHCHECK").partition("CMD")[2])
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", command[-1])
    assert url == (last("EXPOSE"), "/health") and url[1] in OPEN_PATHS
    compile(command[-1], "healthcheck", "exec")


def test_the_versions_of_the_image_are_the_tested_ones() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert f"torch=={pins['torch']} " in (DEPLOY / "Dockerfile").read_text()
    assert set(required()) <= set(pins)


def required() -> list[str]:
    lines = (DEPLOY / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def closure(names: list[str]) -> set[str]:
    """Distributions that pip would install for these."""
    found: set[str] = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            one = Requirement(line)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                names.append(one.name)
    return found


def test_the_server_starts_with_the_packages_of_the_image_alone() -> None:
    """Every other distribution's modules are made impossible to import."""
    (alone,) = re.findall(r"pip install --no-deps (\S+) (\S+) -c", (DEPLOY / "Dockerfile").read_text())
    inside = closure(["torch", *required()]) | set(alone)
    assert not inside & {"lightning", "peft", "datasets", "pandas"}
    modules = importlib.metadata.packages_distributions()
    outside = [
        module
        for module, owners in modules.items()
        if not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} & (inside | {"hispec", "pip", "setuptools"})
    ]
    assert "lightning" in outside and "torch" not in outside
    program = f"""
import sys
sys.modules.update(dict.fromkeys({outside!r}))
import infer.llm, infer.server.run, infer.backends.eager, infer.backends.inductor, transformers, xgrammar
transformers.AutoTokenizer, xgrammar.GrammarCompiler
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["LICENSE", "README.md", "constraints.txt", "pyproject.toml", "deploy/requirements.txt",
             "infer/server/page.html", "train/cli.py", "export/cli.py", "configs/qwen3-8b.yaml"],
)  # fmt: skip
def test_what_the_build_needs_is_in_its_context(name: str) -> None:
    assert (ROOT / name).exists() and in_context(name)


@pytest.mark.parametrize(
    "name", [".git/config", ".venv/x", "artifacts/a/hispec.json", "tests/law.py", "runs/a", "infer/__pycache__/a.pyc"]
)
def test_nothing_else_is_in_the_builds_context(name: str) -> None:
    assert not in_context(name)


def in_context(name: str) -> bool:
    """Docker's rule: the last pattern that fits the path, or a folder above it, decides."""
    decided = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern, above = line.removeprefix("!"), [Path(name), *Path(name).parents]
        paths = [one.name for one in above] if pattern.startswith("**/") else [str(one) for one in above]
        if line and line[0] != "#" and any(fnmatch.fnmatch(one, pattern.removeprefix("**/")) for one in paths):
            decided = line.startswith("!")
    return decided


# ---- Kubernetes ----


def pod() -> dict[str, Any]:
    return MANIFESTS["Deployment"]["spec"]["template"]


def container() -> dict[str, Any]:
    (one,) = pod()["spec"]["containers"]
    return one


def test_what_refers_to_each_other_does() -> None:
    labels = pod()["metadata"]["labels"]
    assert (
        MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels == MANIFESTS["Service"]["spec"]["selector"]
    )
    target = MANIFESTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    deployment = MANIFESTS["Deployment"]
    assert target == {k: deployment[k] for k in ("apiVersion", "kind")} | {"name": deployment["metadata"]["name"]}
    assert "replicas" not in deployment["spec"], "would undo the autoscaler at every apply"
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert {port["targetPort"] for port in MANIFESTS["Service"]["spec"]["ports"]} <= set(ports)
    assert str(ports["http"]) == last("EXPOSE")
    volumes = {volume["name"] for volume in pod()["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert set(mounts) == volumes and mounts["artifact"] == last("VOLUME")
    (env,) = container()["env"]
    key, secret = env["valueFrom"]["secretKeyRef"], MANIFESTS["Secret"]
    assert env["name"] == API_KEY_VARIABLE and key["optional"] is True
    assert key["name"] == secret["metadata"]["name"] and key["key"] in secret["stringData"]


def test_the_arguments_are_those_of_the_server() -> None:
    args = infer.cli._parser().parse_args([*entrypoint(), *container()["args"]])
    _, sleep = container()["lifecycle"]["preStop"]["exec"]["command"]
    drain = args.drain_timeout + server_run._CLOSING_SECONDS + server_run._ENGINE_SECONDS
    assert int(sleep) + drain <= pod()["spec"]["terminationGracePeriodSeconds"]
    assert "command" not in container(), "the image's entrypoint"


def test_the_probes_ask_what_the_server_answers_without_a_key() -> None:
    probes = {name: container()[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert set(paths.values()) <= set(OPEN_PATHS)
    source = (ROOT / "infer" / "server" / "app.py").read_text()
    for path in paths.values():
        assert f'@app.get("{path}")' in source
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"http"}
    startup = probes["startup"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600, "loading takes minutes"


def test_the_pod_may_do_nothing_that_it_need_not() -> None:
    context, own = pod()["spec"]["securityContext"], container()["securityContext"]
    assert context["runAsNonRoot"] is True and f"{context['runAsUser']}:{context['runAsGroup']}" == last("USER")
    assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert {"cpu", "memory"} <= set(container()["resources"]["requests"])
    (artifact,) = [mount for mount in container()["volumeMounts"] if mount["name"] == "artifact"]
    assert artifact["readOnly"] is True


def test_the_metric_that_is_named_exists() -> None:
    (name,) = re.findall(r"`hispec:(\w+)`", (DEPLOY / "kubernetes" / "autoscaler.yaml").read_text())
    assert f'"{name}"' in (ROOT / "infer" / "server" / "metrics.py").read_text()


@pytest.mark.parametrize("kind", sorted(MANIFESTS))
def test_kubernetes_own_schema_takes_it(kind: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="22 MB of schemas: pip install kubernetes-validate")
    validate.validate(MANIFESTS[kind], "1.31", strict=True)


# ---- training on clusters ----


def launched(script: Path, tmp_path: Path, arguments: list[str], code: int = 0, **environment: str) -> list[list[str]]:
    """The commands that a script runs, with stand-ins for those programs; the last of them ends with `code`."""
    tools, log = tmp_path / "tools", tmp_path / "commands"
    tools.mkdir(exist_ok=True)
    for name in ("srun", "torchrun", "scontrol", "nvidia-smi"):
        (tools / name).write_text(
            f'#!/bin/bash\nprintf "%s\\0" {name} "$@" >> {log}; echo >> {log}\n'
            f'[ {name} != nvidia-smi ] || printf "GPU 0\\nGPU 1\\n"\n[ {name} != srun ] || exit {code}\n'
        )
        (tools / name).chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(script), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": path, **environment},
    )
    assert done.returncode == code, done.stderr
    return [line.split("\0")[:-1] for line in log.read_text().split("\n") if line]


def fit_arguments(command: list[str]) -> list[str]:
    start = command.index("-m")
    assert command[start : start + 3] == ["-m", "train", "fit"]
    return command[start + 2 :]


def config_of(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(ROOT)
    assert train.cli.main([*arguments, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)["trainer"]


SHARDS = {"data_parallel_size": 16, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
SLURM = {"SLURM_NNODES": "2", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "77"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


@pytest.mark.parametrize(("mode", "config"), [("ddp", "configs/qwen3-8b.yaml"), ("fsdp2", "configs/llama2-70b.yaml")])
def test_slurm_trains_on_all_its_processes(
    mode: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = DEPLOY / "slurm" / f"train-{mode}.sbatch"
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), flags=re.MULTILINE))
    assert asked["nodes"] == "2" and asked["ntasks-per-node"] == asked["gpus-per-node"] == "8"
    (command,) = launched(script, tmp_path, [config, "runs/new", "--trainer.max_epochs", "7"], **SLURM)
    assert command[0] == "srun"
    trainer = config_of(fit_arguments(command), capsys, monkeypatch)
    assert (trainer["num_nodes"], str(trainer["devices"]), trainer["max_epochs"]) == (2, "8", 7)
    assert trainer["default_root_dir"] == "runs/new"
    expected = "ddp" if mode == "ddp" else "lightning.pytorch.strategies.ModelParallelStrategy"
    strategy = trainer["strategy"]
    assert (strategy if mode == "ddp" else strategy["class_path"]) == expected
    if mode == "fsdp2":
        assert strategy["init_args"].items() >= SHARDS.items()


def test_a_job_that_ran_out_of_time_queues_itself_and_goes_on(tmp_path: Path) -> None:
    script, arguments = DEPLOY / "slurm" / "train-ddp.sbatch", ["c.yaml", "run"]
    assert [c[0] for c in launched(script, tmp_path, arguments, code=143, **SLURM)] == ["srun"], "nothing to go on from"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "interrupted.ckpt").touch()
    (tmp_path / "commands").unlink()
    again, requeue = launched(script, tmp_path, arguments, code=143, **SLURM)
    assert again[-2:] == ["--ckpt_path", "run/interrupted.ckpt"] and requeue == ["scontrol", "requeue", "77"]
    (tmp_path / "commands").unlink()
    assert [c[0] for c in launched(script, tmp_path, arguments, code=1, **SLURM)] == ["srun"], "a fault is no reason"


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_torchrun_trains_on_all_its_processes(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [mode, "configs/qwen3-8b.yaml", "--trainer.max_epochs", "7"]
    script = DEPLOY / "torchrun.sh"
    *_, command = launched(script, tmp_path, arguments, NODES="2", GPUS="8", MASTER="10.0.0.1:29500")
    launch = "torchrun --nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 -m train fit"
    assert " ".join(command).startswith(launch)
    trainer = config_of(fit_arguments(command), capsys, monkeypatch)
    assert (trainer["num_nodes"], trainer["max_epochs"]) == (2, 7)
    if mode == "fsdp2":
        assert trainer["strategy"]["init_args"].items() >= SHARDS.items()
    else:
        assert trainer["strategy"] == "ddp"


def test_torchrun_takes_the_gpus_that_are_there(tmp_path: Path) -> None:
    asked, command = launched(DEPLOY / "torchrun.sh", tmp_path, ["ddp", "c.yaml"])
    assert asked == ["nvidia-smi", "-L"]
    assert " ".join(command).startswith("torchrun --nproc-per-node 2 --nnodes 1 --standalone -m train fit")
    assert command[command.index("--trainer.devices") + 1] == "2"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_torchrun_really_trains_on_two_processes(mode: str, tmp_path: Path, tiny_model: Any) -> None:
    """On CPUs, by the script itself."""
    from tests.train.conftest import save_base

    save_base(tmp_path / "base", tiny_model, "llama")
    rows = [{"prompt": f"The {n}", "response": "now " * (1 + n)} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(tmp_path / "rows.jsonl")
    config = {
        "model": {"base": str(tmp_path / "base"), "exits": [{"name": "draft", "layer": 2, "head": "layer"}]},
        "data": {"train_files": file, "val_files": file, "batch_size": 2},
        "trainer": {"max_epochs": 1, "logger": False, "enable_progress_bar": False},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = ["bash", str(DEPLOY / "torchrun.sh"), mode, str(tmp_path / "config.yaml")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "GPUS": "2", "ACCELERATOR": "cpu"}
    root = ["--trainer.default_root_dir", str(tmp_path / "run")]
    done = subprocess.run([*command, *root], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "heads" / "heads.safetensors").exists()
