"""What a process logs: whose lines they are, what becomes of their fields, and what of libraries."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

SPEAKER = """
import logging, sys
from asyncrl.telemetry.log import LogTo, start_log
start_log("trainer/1", LogTo(sys.argv[1], sys.argv[2]))
ours, theirs = logging.getLogger("asyncrl.trainer.loop"), logging.getLogger("transformers.loading")
ours.debug("details")
ours.info("step %d", 3, extra={"step": 3, "seconds": 0.5})
theirs.info("noise")
theirs.warning("odd weights")
try:
    raise ValueError("lone surrogate \\ud83d")
except ValueError:
    ours.exception("it broke")
"""


def spoken(folder: Path, level: str) -> tuple[list[dict], str]:
    """The lines of the file, and what went to stderr."""
    done = subprocess.run([sys.executable, "-c", SPEAKER, folder, level], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "trainer-1.jsonl").read_text().splitlines()], done.stderr


def test_lines_are_tagged_and_structured_and_libraries_are_heard_from_warnings_on(tmp_path):
    lines, told = spoken(tmp_path, "info")
    assert [(line["level"], line["logger"], line["message"]) for line in lines] == [
        ("info", "asyncrl.trainer.loop", "step 3"),
        ("warning", "transformers.loading", "odd weights"),
        ("error", "asyncrl.trainer.loop", "it broke"),
    ]
    assert {line["actor"] for line in lines} == {"trainer/1"}
    assert (lines[0]["step"], lines[0]["seconds"]) == (3, 0.5)
    assert "ValueError: lone surrogate" in lines[2]["traceback"]
    assert told.startswith("step 3\ntransformers.loading: odd weights\nit broke\nTraceback")


def test_the_level_decides_what_is_kept_and_a_restarted_actor_goes_on_in_its_file(tmp_path):
    assert [line["message"] for line in spoken(tmp_path, "debug")[0]] == [
        "details",
        "step 3",
        "odd weights",
        "it broke",
    ]
    assert [line["message"] for line in spoken(tmp_path, "error")[0]][4:] == ["odd weights", "it broke"]
