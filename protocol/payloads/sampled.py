"""Nothing beside the log-prob of the sampled token, for divergences of sampled tokens (k1, k2, k3)."""

from __future__ import annotations

from typing import ClassVar

from stillhouse.protocol.payloads.kind import PayloadKind, PayloadOptions


class SampledOnly(PayloadKind):
    payload: ClassVar[str] = "top_k"
    what: ClassVar[str] = "log-probs of sampled tokens"
    distributions: ClassVar[bool] = False

    @classmethod
    def chosen_by(cls, options: PayloadOptions) -> bool:
        return options.payload == cls.payload and not options.top_k

    def setting(self, key: str) -> tuple[str, object]:
        return f"{key}.top_k", 0
