"""An environment of OpenEnv: a number to guess."""

import random

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options) -> Hint:
        self._number = random.Random(seed).randint(1, 9)
        self._state = State(episode_id=episode_id)
        return Hint(hint='Guess my number from 1 to 9. Answer with JSON, such as {"number": 5}.')

    def step(self, action, timeout_s=None, **options) -> Hint:
        self._state.step_count += 1
        if action.number == self._number:
            return Hint(hint="Right.", reward=1.0, done=True)
        return Hint(hint="It is larger." if self._number > action.number else "It is smaller.", reward=0.0)

    @property
    def state(self) -> State:
        return self._state


app = create_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=256)
