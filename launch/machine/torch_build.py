"""Which torch and which NCCL an interpreter has, read from what is installed; neither is imported, no GPU is needed.

Standard library only, and no syntax that an older Python lacks: for the interpreters of SGLang's servers this file's
text is run by `python -c` with the names of modules to look for, and prints JSON.

Wheels of torch for CUDA load libnccl.so.2 from the wheel nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever fits their
CUDA. Both put it at the same place (site-packages/nvidia/nccl/lib), so the one installed last overwrites the other's.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import NamedTuple

NCCL_WHEELS = {12: "nvidia-nccl-cu12", 13: "nvidia-nccl-cu13"}
"""By CUDA's major version."""


class TorchBuild(NamedTuple):
    """Of one interpreter."""

    version: str = ""
    """Empty: it has no torch."""
    cuda: str | None = None
    """Version of CUDA that torch was built for, e.g. 12.8; None: for none."""
    hip: str | None = None
    """The same of ROCm."""
    nccl: tuple[tuple[str, str], ...] = ()
    """(wheel, version) of the NCCL wheels that are installed."""

    @property
    def has_gpu_code(self) -> bool:
        """Whether this torch can use a GPU."""
        return self.cuda is not None or self.hip is not None

    @property
    def wheel(self) -> str | None:
        """Name of the NCCL wheel that fits; None where there is none by that name (another CUDA, ROCm, no GPU)."""
        major = (self.cuda or "").partition(".")[0]
        return NCCL_WHEELS.get(int(major)) if major.isdecimal() else None

    @property
    def nccl_version(self) -> str | None:
        """Of the NCCL that it loads; None where no wheel says it (a build of somebody's own, conda, a container)."""
        return dict(self.nccl).get(self.wheel or "")

    def wrong_wheel(self) -> str | None:
        """An installed NCCL wheel that is made for another CUDA than torch, in words; None: there is none."""
        wrong = [name for name, _ in self.nccl if self.wheel is not None and name != self.wheel]
        if not wrong:
            return None
        return (
            f"has {wrong[0]} installed, but torch {self.version} is built for CUDA {self.cuda} and needs {self.wheel}; "
            f"both wheels write the same libnccl.so.2: pip uninstall {wrong[0]}, then "
            f"pip install --force-reinstall --no-deps {self.wheel}"
        )


def own_build() -> TorchBuild:
    """Of the interpreter that runs this."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild()
    file = Path(spec.origin).with_name("version.py")
    told = constants(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return TorchBuild(
        version=told.get("__version__") or "unknown", cuda=told.get("cuda"), hip=told.get("hip"), nccl=nccl_wheels()
    )


def constants(source: str) -> dict[str, str | None]:
    """Texts and None that are assigned to names at the top of a module."""
    found: dict[str, str | None] = {}
    for line in ast.parse(source).body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        value = getattr(line, "value", None)
        if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, str)):
            found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return found


def nccl_wheels() -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for name in NCCL_WHEELS.values():
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def main() -> None:
    missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
    print(json.dumps({"missing": missing, "torch": own_build()}))


if __name__ == "__main__":
    main()
