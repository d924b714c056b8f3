"""LoRA adapters for an SGLang server: each version is a file of a few megabytes, with a name RUN/EPOCH.STEP of its own.

    take     fetch the file by wire | POST /load_lora_adapter | canary under the new name | new
             requests name it
    after    POST /unload_lora_adapter for older ones that no request has used for a version; nobody waits for it

    <folder>/<epoch>.<step>/model.safetensors, adapter_config.json      until it is unloaded

The server computes on all the while, and its own weights stay those of the student that the run started from. Nothing
that a request uses changes, so a version that cannot be loaded, or fails its check, leaves everything as it was. A name
that was used is never given to another file, because a server may read its file again at any time; so each server has
copies of its own, which outlive the learner's. An unload waits for the requests of its adapter and, while it does, the
server loads no other one; hence only unused ones are unloaded.

No torch.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from stillhouse.engines.http.link import RequestRefused, ServerUnavailable
from stillhouse.engines.http.weights import STUDENT, fetch_file
from stillhouse.engines.sglang.engine import SGLangEngine
from stillhouse.engines.sglang.features import ListedModels
from stillhouse.engines.sglang.weights import ServerWeights
from stillhouse.protocol.messages import WeightPlan, WeightVersion
from stillhouse.weights.control_messages import Agreed, Round
from stillhouse.weights.errors import Interrupted, WeightsRefused
from stillhouse.weights.sink import Receipt
from stillhouse.weights.snapshot_format import FILE_NAME
from stillhouse.weights.wire import WireMember

log = logging.getLogger(__name__)

ADAPTER_CONFIG: Final = "adapter_config.json"
_UNLOAD_TIMEOUT_S: Final = 60.0
"""After it nobody looks for the answer any more; the server goes on."""


class ServerAdapters(ServerWeights):
    """A WeightSink (weights.sink) that gives its server adapters instead of whole weights."""

    def __init__(self, engine: SGLangEngine, *, student: str, folder: Path) -> None:
        """`folder`: for the copies, of this server alone, which sees it under the same path; the same one when the
        actor is started again."""
        super().__init__(engine, student=student, ours=False)
        self._folder = folder.resolve()
        self._loaded: list[str] = []
        self._counts = {
            "adapters_loaded_total": 0.0,
            "adapters_unloaded_total": 0.0,
            "adapter_unloads_failed_total": 0.0,
        }

    @property
    def stats(self) -> dict[str, float]:
        return {**super().stats, **self._counts}

    def prepare(self) -> None:
        """Adapters belong to the student that the run started from. Also drops what a former actor of this server
        loaded, and copies that the server has not loaded. Raises SnapshotRefused."""
        if self._engine.version != STUDENT:
            self._known = False
        super().prepare()
        try:
            left = [name for name in self._on_server() if self._engine.labels.parse(name) is not None]
        except (RequestRefused, ServerUnavailable, ValueError) as error:
            log.warning("%s: its adapters are not known: %s", self._server.url, error)
            return
        self._loaded += left
        for copy in self._folder.glob("*"):
            if str(copy) not in map(self._copy_of, left):
                shutil.rmtree(copy, ignore_errors=True)

    def check(self, plan: WeightPlan) -> None:
        if plan.kind != "adapters":
            raise ValueError(
                f"weight plan {plan.group_epoch} is for {plan.kind}; this actor's server is given adapters"
            )

    def take(self, header: Round, agreed: Agreed, interrupted: Interrupted, wire: WireMember | None = None) -> Receipt:
        deadline_s = time.monotonic() + header.timeout_s
        name, began_s = self._engine.labels.of(header.version), time.monotonic()
        with self._faults():
            copy = self._copy(header, agreed, interrupted, wire)
            self._load(name, str(copy), deadline_s, interrupted)
            loaded_s = time.monotonic()
            if header.check is not None and header.check.canary is not None:
                self._engine.take_again()  # its forward pass writes into the KV cache

                def ask(path: str, body: dict[str, Any]) -> bytes:
                    return self._ask(path, body | {"lora_path": name}, deadline_s, interrupted)

                self._verify.check_canary(header.check.canary, header.version, ask)
            self._switch(header.version, name)
        n_bytes = sum(spec.n_bytes for spec in agreed.manifest.tensors)
        return Receipt(n_bytes=n_bytes, receive_s=loaded_s - began_s, stage_s=time.monotonic() - loaded_s)

    def _copy(self, header: Round, agreed: Agreed, interrupted: Interrupted, wire: WireMember | None) -> Path:
        """The folder of this version, whole. Raises WeightsRefused, GroupBroken, GroupInterrupted."""
        copy = self._folder / str(header.version)
        draft = copy.with_name(f".tmp-{copy.name}")
        if copy.is_dir():
            return copy
        if wire is None:
            raise WeightsRefused(f"version {header.version} came as a broadcast; adapters are loaded from files")
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            (draft / ADAPTER_CONFIG).write_bytes(agreed.adapter_config)
            fetch_file(draft / FILE_NAME, header, agreed, interrupted, wire)
            return draft.rename(copy)
        except OSError as error:
            raise WeightsRefused(f"{copy}: {error}") from error

    def _copy_of(self, name: str) -> str:
        return str(self._folder / str(self._engine.labels.parse(name)))

    def _load(self, name: str, folder: str, deadline_s: float, interrupted: Interrupted) -> None:
        """A former actor of this server may have loaded it."""
        if (root := self._on_server().get(name)) is None:
            body = {"lora_name": name, "lora_path": folder}
            self._ask("/load_lora_adapter", body, deadline_s, interrupted)
            self._counts["adapters_loaded_total"] += 1
        elif root != folder:
            raise WeightsRefused(f"the server has an adapter {name} from {root}, expected it from {folder}")
        if name not in self._loaded:
            self._loaded.append(name)

    def _switch(self, version: WeightVersion, name: str) -> None:
        limit_s = self._engine.config.control_timeout_s
        self._engine.switch_adapter(version, name, limit_s)
        for unused in self._engine.unused_adapters(self._loaded, limit_s):
            self._loaded.remove(unused)
            self._server.spawn(self._unload(unused))

    async def _unload(self, name: str) -> None:
        try:
            await self._server.post("/unload_lora_adapter", {"lora_name": name}, timeout_s=_UNLOAD_TIMEOUT_S)
            self._counts["adapters_unloaded_total"] += 1
            shutil.rmtree(self._copy_of(name), ignore_errors=True)
        except (RequestRefused, ServerUnavailable) as error:
            self._counts["adapter_unloads_failed_total"] += 1
            log.warning("adapter %s was not unloaded: %s", name, error)

    def _on_server(self) -> dict[str, str]:
        text = self._server.run(self._server.get("/v1/models"), timeout_s=self._engine.config.control_timeout_s)
        return {model.id: model.root for model in msgspec.json.decode(text, type=ListedModels).data}
