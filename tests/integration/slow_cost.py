"""A cost of sampled tokens as k1, which sleeps: a learner that needs time and no processor."""

from __future__ import annotations

import os
import time

from torch import Tensor

PASS_S = "SLOW_COST_PASS_S"
"""Environment variable: seconds each time that costs are computed."""


def k1_after_a_sleep(student: Tensor, teacher: Tensor) -> Tensor:
    time.sleep(float(os.environ[PASS_S]))
    return student - teacher
