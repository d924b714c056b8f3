"""An agent that knows nothing of Stillhouse: plain OpenAI SDK, a base URL and a key. It asks again if the answer has no
number behind a `#`."""

from __future__ import annotations

import re
from typing import Any

from openai import OpenAI

SHARED = OpenAI(base_url="http://127.0.0.1", api_key="-", timeout=60.0)
"""Its connections serve all episodes: making a client takes longer than a short answer."""


def agent(row: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    client = SHARED.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=48)
        text = reply.choices[0].message.content or ""
        answers = re.findall(r"#(-?\d+)", text)
        if answers:
            return float(answers[-1] == row["ground_truth"])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": row["prompt"]}]
    return 0.0
