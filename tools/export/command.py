"""The command line of `stillhouse export`: finds a checkpoint and makes a folder of it that can be given away."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from stillhouse.launch.errors import LaunchError, refuse
from stillhouse.launch.runfolder import find_run
from stillhouse.launch.stages.state import read_state
from stillhouse.learner.checkpoints.files import CHECKPOINTS, MANIFEST, CheckpointError, latest, read_manifest
from stillhouse.learner.config import ADAPTER_CONFIG
from stillhouse.tools.export.card import model_card
from stillhouse.tools.export.hub import HUB, check_name, push

ABOUT: Final = """\
Leave with the student of a run: a folder with weights, tokenizer, chat template, generation config and a model card.
AutoModelForCausalLM, SGLang and vLLM load it. Of a run with adapters it has the merged weights, and the adapters alone
in adapter/.
"""


class Source(NamedTuple):
    checkpoint: Path
    run: Path | None
    """The folder that has the run's configuration and figures; None for a checkpoint that lies elsewhere."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="stillhouse export", description=ABOUT)
    parser.add_argument("run", metavar="RUN", help="a run's folder or name in runs/; a step_... folder")
    parser.add_argument("--to", required=True, metavar="FOLDER|hub:NAME", help="a new folder, or a hub's repository")
    parser.add_argument("--step", type=int, help="the checkpoint of this step [the newest one that is intact]")
    parser.add_argument("--base", help="the student, if it is no longer where a run with adapters found it")
    given = parser.parse_args(arguments)
    try:
        print(export(given.run, given.to, step=given.step, base=given.base))
    except (LaunchError, ValueError, OSError) as error:
        return refuse(error if isinstance(error, LaunchError) else LaunchError(f"export: {error}"))
    return 0


def export(run: str, to: str, *, step: int | None = None, base: str | None = None) -> str:
    """Returns a line that says where the student is. Raises ValueError, LaunchError, OSError; then nothing is left."""
    repository = to.removeprefix(HUB) if to.startswith(HUB) else None
    if repository is not None:
        check_name(repository)
        parent, out = None, Path(repository)
    else:
        out = Path(to).expanduser()
        if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
            raise LaunchError(f"export: {out} exists already; name a new folder")
        parent = out.parent
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-export-", dir=parent) as folder:
        made = write_folder(find(run, step), Path(folder) / "student", name=out.absolute().name, base=base)
        if repository is not None:
            return f"student  {push(made, repository)}"
        made.rename(out)
        return f"student  {out}"


def find(run: str, step: int | None) -> Source:
    """The checkpoint that was asked for. Raises CheckpointError, LaunchError, OSError."""
    given = Path(run).expanduser()
    if (given / MANIFEST).is_file():
        if step not in (None, read_manifest(given).version.step):
            raise CheckpointError(f"{given} is not of step {step}; leave --step out, or name the run's folder")
        above = given.resolve().parent
        return Source(given, above.parent if above.name == CHECKPOINTS else None)
    folder = _last_stage(find_run(run, "export"))
    if step is not None:
        return Source(_of_step(folder / CHECKPOINTS, step), folder)
    found = latest(folder / CHECKPOINTS)
    for skipped in found.damaged:
        print(f"stillhouse: {skipped}", file=sys.stderr)
    if found.path is None:
        raise CheckpointError(f"{folder / CHECKPOINTS} has no intact checkpoint; expected one of a run")
    return Source(found.path, folder)


def _last_stage(folder: Path) -> Path:
    """The folder of the newest stage that is done, of a run with stages; else `folder` itself."""
    state = read_state(folder)
    done = [one.folder for one in state.stages if one.done] if state is not None else []
    return folder / done[-1] if done else folder


def _of_step(root: Path, step: int) -> Path:
    """The newest of several branches."""
    versions = {read_manifest(path.parent).version: path.parent for path in root.glob(f"step_*/{MANIFEST}")}
    wanted = [version for version in versions if version.step == step]
    if not wanted:
        steps = ", ".join(str(n) for n in sorted({version.step for version in versions}))
        raise CheckpointError(f"--step {step}: {root} has checkpoints of steps {steps or '(none)'}")
    return versions[max(wanted)]


def write_folder(source: Source, out: Path, *, name: str, base: str | None = None) -> Path:
    """Write the new folder `out`; `name` is the title of its card. Returns it."""
    # Imported here because it imports torch, which mistakes of the command line need not wait for.
    from stillhouse.learner.export import copy_student, from_checkpoint

    if (source.checkpoint / ADAPTER_CONFIG).is_file():
        parts = from_checkpoint(source.checkpoint, out.with_name("parts"), base)
        parts.merged.rename(out)
        _forget_paths(parts.adapter)
        parts.adapter.rename(out / "adapter")
    else:
        out.mkdir()
        copy_student(source.checkpoint, out)
    (out / "README.md").write_text(model_card(source.checkpoint, source.run, name), encoding="utf-8")
    return out


def _forget_paths(adapter: Path) -> None:
    """Peft writes the student's folder into adapter_config.json; its name says enough to others."""
    settings = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = None
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
    (adapter / "base.json").unlink()  # for going on with a run
