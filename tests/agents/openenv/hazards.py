"""An OpenEnv server for one session at a time, which does as the policy says, once."""

import os
import subprocess
from pathlib import Path

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Word(Action):
    word: str
    loud: bool = False


class Heard(Observation):
    heard: str


class Hazards(Environment[Word, Heard, State]):
    def reset(self, seed=None, episode_id=None, folder=None, **options) -> Heard:
        self._folder = Path(folder)
        (self._folder / "pid").write_text(str(os.getpid()))
        return Heard(heard="Say a word.")

    def step(self, action, timeout_s=None, **options) -> Heard:
        if action.word == "die":
            os._exit(3)
        if action.word == "die once" and not (self._folder / "died").exists():
            (self._folder / "died").touch()
            subprocess.Popen(["sleep", "60"])  # lives on, and holds the server's stderr
            os._exit(3)
        if action.word == "raise":
            raise ValueError("a bug in the environment")
        return Heard(heard=action.word, reward=0.5 if action.loud else 0.25, done=action.word == "stop")

    @property
    def state(self) -> State:
        return State()


app = create_app(Hazards, Word, Heard)
