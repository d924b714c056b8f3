"""What a server says of itself that can do all that is asked of one."""

from __future__ import annotations

from typing import Final

from stillhouse.engines.sglang.features import Features

CAPABLE: Final = Features(
    version="0.5.23",
    weights_label="default",
    max_context=1024,
    max_prompt=1017,
    max_running=128,
    device="cpu",
    tp_size=1,
    update_sessions=True,
    pausing=True,
    labels_settable=True,
    checksums=True,
    version_spans=True,
    incremental_stream=True,
    stream_interval=True,
    logprob_temperature="as_sampled",
    greedy_logprobs_at_one=True,
    sampling_mask=True,
)
