"""Serves an environment of verifiers by the package's own env server, or prints tasks of its taskset as rows.

make verifiers
.venv-verifiers/bin/python examples/agents/verifiers_server.py verifiers_sums --rows 800 > rows.jsonl
.venv-verifiers/bin/python examples/agents/verifiers_server.py verifiers_sums --address tcp://127.0.0.1:8766
"""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path

from verifiers.v1.serve import serve_env
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("taskset", help="a bundled or installed taskset, or a module beside this file")
    parser.add_argument("--env", type=json.loads, default={}, help="what else verifiers' [env] table has, as JSON")
    parser.add_argument("--address", default="tcp://127.0.0.1:8766")
    parser.add_argument("--workers", type=int, default=1, help="processes that play episodes")
    parser.add_argument("--rows", type=int, help="print this many tasks instead")
    given = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # its harnesses look for uv there
    config = resolve_env_config(given.env | {"taskset": {"id": given.taskset} | given.env.get("taskset", {})})
    if given.rows is None:
        serve_env(config=config, address=given.address, max_workers=given.workers, elastic=False)
        return
    for task in itertools.islice(load_taskset(config.taskset), given.rows):
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        print(json.dumps({"prompt": task.data.prompt_text, "task": data}))


if __name__ == "__main__":
    main()
