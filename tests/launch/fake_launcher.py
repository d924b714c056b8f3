"""A launcher whose workers are those of fake_roles.

    python fake_launcher.py RUN_DIR BEHAVIOUR_JSON CONFIG_JSON MODULE...

Everything but the workers' mains is the real thing. MODULE...: what the fork server imports."""

import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import LaunchError
from stillhouse.launch.processes.local import LocalProcesses
from stillhouse.launch.run import run
from stillhouse.launch.runfolder import RunFolder
from stillhouse.launch.servers.plan import plan_servers
from stillhouse.launch.terminal import lasting_output
from stillhouse.launch.workers.launch_plan import LaunchPlan, MakeBackend
from stillhouse.protocol.context import WorkerRole
from tests.subprocess_backend import SubprocessBackend

ENTRIES: dict[WorkerRole, str] = {
    "buffer": "fake_roles:buffer",
    "learner": "fake_roles:learner",
    "actor": "fake_roles:worker",
    "teacher": "fake_roles:worker",
}
BACKEND = "TEST_BACKEND"
BACKENDS: dict[str, MakeBackend] = {"local": LocalProcesses, "subprocess": SubprocessBackend}


def main() -> int:
    with lasting_output():
        return _main()


def _main() -> int:
    run_dir, behaviour, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    try:
        folder = RunFolder.open(run_dir, resume=False)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 2
    with closing(folder):
        (run_dir / "behaviour.json").write_text(behaviour)
        config = build(RunConfig, settings)
        plan = LaunchPlan(
            config=config,
            began_s=time.monotonic(),
            preload=tuple(sys.argv[4:]),
            entries=ENTRIES,
            servers=tuple(plan_servers(config, (), {})),
        )
        return run(plan, folder, make_backend=BACKENDS[os.environ.get(BACKEND, "local")])


if __name__ == "__main__":
    sys.exit(main())
