"""What the parts of a run measure of themselves for its profile, see `asyncrl.observability.run_profile`."""

from __future__ import annotations

from asyncrl.observability.telemetry.linear_fit import LinearFit
from asyncrl.observability.telemetry.recorder import Recorder

#: seconds between two reports of a busy engine, by its decode steps, the tokens that they sampled, the tokens of
#: context that these read, and the prompt tokens whose KV was computed: together, like the rows of a batch. An engine
#: that was always full shows little of their cost, which without the bound would be whatever else is not explained.
ENGINE = LinearFit(
    "profile/engine",
    ("step_s", "row_s", "context_token_s", "prefill_token_s"),
    at_most=("prefill_token_s", "row_s"),
)
#: seconds in which the ranks train a part: 1 for the last part of a step, 1 for any but the first, and its tokens
TRAINER = LinearFit("profile/trainer", ("step_s", "part_s", "token_s"))

REPORTS, REWARDS, STAGES = "profile/reports", "profile/rewards", "profile/stages"


def note(recorder: Recorder, name: str, seconds: float) -> None:
    """Count one of what `REPORTS`, `REWARDS` and `STAGES` are, and its seconds."""
    recorder.count(f"{name}/s", seconds)
    recorder.count(f"{name}/count")
