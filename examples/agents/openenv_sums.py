"""A server of OpenEnv, used by openenv.toml: a sum that is asked again after a wrong answer.

make openenv
.venv-openenv/bin/uvicorn --app-dir examples/agents openenv_sums:app --port 8765
"""

import random
import re

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Answer(Action):
    message: str


class Question(Observation):
    prompt: str


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, tries=2, **kwargs):
        draw = random.Random(seed)
        self.left, self.right, self.tries = draw.randint(10, 99), draw.randint(10, 99), tries
        self._state = State(episode_id=episode_id, step_count=0)
        return Question(prompt=f"{self.left}+{self.right}=")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        right = re.findall(r"#\s*(-?\d+)", action.message)[-1:] == [str(self.left + self.right)]
        done = right or self._state.step_count >= self.tries
        return Question(prompt=f"{self.left}+{self.right}=", reward=float(right), done=done)

    @property
    def state(self):
        return self._state


app = create_app(Sums, Answer, Question, env_name="sums", max_concurrent_envs=256)
