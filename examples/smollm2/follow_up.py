"""Two turns: the question of the row, and a follow-up that is the same for all. An agent (docs/agents/coroutine.md).

With `learner.tasks.privileged` the teacher's instruction stands before the first question only. So the second answer
shows whether what was distilled lasts for a turn. No reward: only the teacher judges.
"""

from __future__ import annotations

from stillhouse.actors.agent import Context
from stillhouse.actors.envs.base import EnvTask


async def rollout(ctx: Context, task: EnvTask, *, ask: str = "Why?", tokens_per_turn: int = 16) -> None:
    """Ask twice; each answer has at most `tokens_per_turn` tokens."""
    first = await ctx.generate(max_new_tokens=tokens_per_turn)
    ctx.observe(ask)
    second = await ctx.generate(max_new_tokens=tokens_per_turn)
    ctx.note(tokens_first=float(len(first.token_ids)), tokens_second=float(len(second.token_ids)))
