"""Which torch and which NCCL an interpreter has, read from its installed files; nothing is imported, no GPU is needed.

This file uses only the standard library, and no syntax that an older Python lacks: for the interpreters of SGLang
servers its text is run by `python -c` with names of modules to look for, and prints JSON.

Wheels of torch for CUDA load libnccl.so.2 from the wheel nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever fits their
CUDA. Both install it at the same path (site-packages/nvidia/nccl/lib), so the one installed last overwrites the other.
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
"""CUDA's major version -> wheel."""


class TorchBuild(NamedTuple):
    """The torch of one interpreter."""

    version: str = ""
    """Empty when there is no torch."""
    cuda: str | None = None
    """CUDA version that torch was built for, e.g. 12.8; None if it was built without."""
    hip: str | None = None
    """The same for ROCm."""
    nccl: tuple[tuple[str, str], ...] = ()
    """(wheel, version) of the installed NCCL wheels."""

    @property
    def has_gpu_code(self) -> bool:
        """Whether this torch can use a GPU."""
        return self.cuda is not None or self.hip is not None

    @property
    def wheel(self) -> str | None:
        """The NCCL wheel that fits this torch; None for another CUDA, for ROCm and for CPU builds."""
        major = (self.cuda or "").partition(".")[0]
        return NCCL_WHEELS.get(int(major)) if major.isdecimal() else None

    @property
    def nccl_version(self) -> str | None:
        """Version of the NCCL that it loads; None when no wheel says it (a custom build, conda, a container)."""
        return dict(self.nccl).get(self.wheel or "")

    def wrong_wheel(self) -> str | None:
        """Error text about an installed NCCL wheel for another CUDA than torch's; None when there is none."""
        wrong = [name for name, _ in self.nccl if self.wheel is not None and name != self.wheel]
        if not wrong:
            return None
        return (
            f"has {wrong[0]} installed, but torch {self.version} is built for CUDA {self.cuda} and needs {self.wheel}; "
            f"both wheels write the same libnccl.so.2: pip uninstall {wrong[0]}, then "
            f"pip install --force-reinstall --no-deps {self.wheel}"
        )


def own_build() -> TorchBuild:
    """Build of the torch in the running interpreter."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild()
    file = Path(spec.origin).with_name("version.py")
    found = constants(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return TorchBuild(
        version=found.get("__version__") or "unknown", cuda=found.get("cuda"), hip=found.get("hip"), nccl=nccl_wheels()
    )


def constants(source: str) -> dict[str, str | None]:
    """Strings and None that are assigned to names at the top level of a module."""
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


def installed(name: str) -> bool:
    """`package`, or `package/file`: a file of it whose name begins so."""
    package, _, file = name.partition("/")
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return spec is not None and (not file or any(True for folder in folders for _ in Path(folder).rglob(f"{file}*")))


def main() -> None:
    missing = [name for name in sys.argv[1:] if not installed(name)]
    print(json.dumps({"missing": missing, "torch": own_build()}))


if __name__ == "__main__":
    main()
