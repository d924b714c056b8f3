"""An environment as one writes it for SkyRL, used by skyrl_gym.toml: a sum, asked again after a wrong answer."""

import re

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.gsm8k.utils import compute_score
from skyrl_gym.envs.registration import register


class Sums(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.max_turns = env_config.tries
        self.truth = extras["reward_spec"]["ground_truth"]

    def init(self, prompt):
        self.question = prompt
        return prompt, {}

    def step(self, action):
        self.turns += 1
        # The built-in student writes #42 where GSM8k writes #### 42.
        score = compute_score(re.sub(r"#\s*", "#### ", action), self.truth)
        done = score > 0 or self.turns >= self.max_turns
        observations = [] if done else self.question
        return BaseTextEnvStepOutput(observations=observations, reward=score, done=done, metadata={})

    def get_metrics(self):
        return {"tries": self.turns}


register("sums", Sums)
