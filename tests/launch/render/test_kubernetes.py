"""Rendered manifests: they fit the schemas of Kubernetes, and their containers, started as a kubelet would start them,
make a whole run whose record is audited."""

from __future__ import annotations

import shutil
import socket
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from stillhouse.launch.render.command import main as render_command
from stillhouse.tools.audit.run import audit
from tests.launch.render.kubernetes_server import ApiServer
from tests.launch.render.pods import Manifest
from tests.launch.render.test_slurm import render, steps_made
from tests.patience import RUN_PATIENCE_S, eventually

STEPS = 40
TOPOLOGY = """\
steps = 40
actors = 3
teachers = 1
learner = { lr = 3e-4, eval_every = 0, checkpoint_every = 5, record = "/runs/record" }
weights = { allow_plain_network = true }
buffer = { batch_rollouts = 16, encrypt = "on" }
actor = { engine = "torch" }
teacher = { engine = "torch" }
cluster = { port = PORT, image = "registry/stillhouse:1", actors = { each = 2, gpus = 4 }, teachers = { each = 1 } }
"""


class Rendered:
    def __init__(self, folder: Path, *arguments: str, port: int = 5555) -> None:
        file, self.private = folder / "topology.toml", folder / "private"
        file.write_text(TOPOLOGY.replace("PORT", str(port)))
        words = ("k8s", "--name", "big", "--private", str(self.private))
        text = render(*words, "--config", str(file), *arguments)
        self.manifests: list[Manifest] = list(yaml.safe_load_all(text))
        self.secrets: list[Manifest] = list(yaml.safe_load_all((self.private / "secrets.yaml").read_text()))

    def named(self, kind: str, name: str) -> Manifest:
        every = [*self.manifests, *self.secrets]
        return next(one for one in every if one["kind"] == kind and one["metadata"]["name"] == name)


@pytest.mark.parametrize("more", [(), ("--learner.ranks=4", "--learner.hosts=2")])
def test_manifests_fit_the_schemas(tmp_path: Path, more: tuple[str, ...]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    rendered = Rendered(tmp_path, *more)
    for manifest in [*rendered.manifests, *rendered.secrets]:
        validate.validate(manifest, "1.31", strict=True)
    broken = rendered.named("Job", "big-actors")
    broken["spec"]["template"]["spec"]["containers"][0]["imag"] = "x"
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.31", strict=True)


def test_each_pool_has_a_job_of_its_own(tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    pools = ("--pools.math.count=3", "--pools.style.count=1", "--learner.tasks.routes={math: [], style: []}")
    rendered = Rendered(tmp_path, *pools, "--teachers=4", "--cluster.teachers.each=2")
    for manifest in [*rendered.manifests, *rendered.secrets]:
        validate.validate(manifest, "1.31", strict=True)
    for pool, hosts in (("math", 2), ("style", 1)):
        spec = rendered.named("Job", f"big-teachers-{pool}")["spec"]
        assert spec["completions"] == hosts
        (container,) = spec["template"]["spec"]["containers"]
        assert f"--pool {pool} --teachers" in container["command"][-1]
        assert f"--name-prefix teachers-{pool}-$JOB" in container["command"][-1]
    assert len({one["metadata"]["name"] for one in rendered.manifests if one["kind"] == "Job"}) == 4
    run = rendered.named("Job", "big-run")["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    assert "--pools.math.count 0 --pools.style.count 0" in run


def test_each_group_gets_its_own_keys_and_no_others(tmp_path: Path) -> None:
    rendered = Rendered(tmp_path)
    of = {one["metadata"]["name"]: set(one["data"]) for one in rendered.secrets}
    assert "learner.key_secret" in of["big-keys-run"]
    assert of["big-keys-actors"] == {"server.key", "learner.key", "joiner.key_secret", "actor.key_secret"}
    assert of["big-keys-teachers"] == {"server.key", "learner.key", "joiner.key_secret", "teacher.key_secret"}
    assert (rendered.private / "secrets.yaml").stat().st_mode & 0o777 == 0o600
    public = yaml.safe_dump_all(rendered.manifests)
    for key in (rendered.private / "keys").glob("*.key_secret"):
        assert "secret-key" in key.read_text()
        secret = key.read_text().split('secret-key = "')[1].split('"')[0]
        assert secret not in public, "a secret is in the manifests that others may read"
    again = Rendered(tmp_path)
    assert again.secrets == rendered.secrets, "the keys of a run that is there are kept"


def test_ranks_on_further_hosts_share_the_volume(tmp_path: Path) -> None:
    rendered = Rendered(tmp_path, "--learner.ranks=4", "--learner.hosts=2")
    claim = rendered.named("PersistentVolumeClaim", "big-runs")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    mounts = rendered.named("Job", "big-ranks")["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert "/runs" in [mount["mountPath"] for mount in mounts]


def test_the_pods_that_join_know_that_links_are_encrypted(tmp_path: Path) -> None:
    """By the address in the configuration that they get; that of the run's pod is known only when it starts."""
    rendered = Rendered(tmp_path, "--buffer.encrypt=auto")
    config = yaml.safe_load(rendered.named("ConfigMap", "big-config")["data"]["config.yaml"])
    assert config["buffer"]["bind"] == "tcp://big:5555" and config["weights"]["host"] == "big"


def test_engines_must_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"actor\.engine: got auto"):
        Rendered(tmp_path, "--actor.engine", "auto")


@pytest.mark.parametrize(("engine", "refused"), [("auto", True), ("torch", False)])
def test_the_engine_of_each_pool_counts(tmp_path: Path, engine: str, refused: bool) -> None:
    pools = ("--pools.math.count=1", "--pools.style.count=1", "--learner.tasks.routes={math: [], style: []}")
    words = (*pools, "--teachers=2", "--teacher.engine=auto", "--pools.math.engine=torch")
    with pytest.raises(AssertionError, match=r"pools\.style\.engine: got auto") if refused else nullcontext():
        Rendered(tmp_path, *words, f"--pools.style.engine={engine}")


def test_what_cannot_be_rendered_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["k8s", "--private", str(tmp_path / "private")]
    for more, message in (
        (["--name=big"], "expected a container image"),
        (["--name=Big"], "expected up to 40 lower-case letters"),
        ([], "--name: got none"),
    ):
        assert render_command([*words, *more]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "private").exists()


def missing() -> str:
    return "" if shutil.which("kubectl") else "no kubectl here (package kubernetes-client of Debian)"


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_run_that_is_submitted_is_stopped_and_resumed(tmp_path: Path) -> None:
    """With the real kubectl, by the commands of docs/cluster.md. Its containers run as processes."""
    validate = pytest.importorskip("kubernetes_validate")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    file, private, pods = tmp_path / "topology.toml", tmp_path / "big-private", tmp_path / "cluster"
    file.write_text(TOPOLOGY.replace("PORT", str(port)))
    pods.mkdir()
    (tmp_path / "big.yaml").write_text(render("k8s", "--name", "big", "--private", str(private), "--config", str(file)))
    files = ("-f", str(private / "secrets.yaml"), "-f", str(tmp_path / "big.yaml"))
    with ApiServer(pods, lambda one: validate.validate(one, "1.31", strict=True)) as server:

        def kubectl(*words: str) -> str:
            return called("kubectl", *server.options.split(), *words)

        kubectl("apply", *files)
        log = lambda: kubectl("logs", "job/big-run")  # noqa: E731
        volume = pods / "volume" / "big"
        eventually(lambda: steps_made(volume) >= 4, lambda: f"4 steps; the log:\n{log()}", RUN_PATIENCE_S)
        assert "job.batch/big-run unchanged" in kubectl("apply", *files), "the run goes on, and no second one starts"
        assert "job.batch" in kubectl("delete", "job", "big-run", "--cascade=foreground")
        stopped_at = steps_made(volume)
        assert stopped_at < STEPS
        kubectl("delete", "jobs", "--selector", "app=big")
        kubectl("apply", *files)
        ended = lambda: server.phases("run") == ["Succeeded"]  # noqa: E731
        eventually(ended, lambda: f"the end of the run; the log:\n{log()}", RUN_PATIENCE_S)
        assert "resuming run" in log()
        eventually(lambda: set(server.phases()) == {"Succeeded"}, lambda: f"the end of all pods: {server.phases()}")
        kubectl("delete", "all,configmaps,secrets,persistentvolumeclaims", "--selector", "app=big")
        assert not server.objects, "nothing is left on the cluster"
    assert steps_made(volume) == STEPS
    report = audit(volume)
    assert report.clean, str(report)


def called(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout
