"""A process's logs: JSON lines and stderr, levels, libraries."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

SCRIPT = """
import logging, sys
from asyncrl.observability.telemetry.log import LogConfig, configure_logging
configure_logging("trainer/1", LogConfig(sys.argv[1], sys.argv[2]))
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


def logged(folder: Path, level: str) -> tuple[list[dict], str]:
    """Lines of the log file, and stderr."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, folder, level], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "trainer-1.jsonl").read_text().splitlines()], done.stderr


def test_lines_are_structured_and_libraries_log_warnings_only(tmp_path):
    lines, stderr = logged(tmp_path, "info")
    assert [(line["level"], line["logger"], line["message"]) for line in lines] == [
        ("info", "asyncrl.trainer.loop", "step 3"),
        ("warning", "transformers.loading", "odd weights"),
        ("error", "asyncrl.trainer.loop", "it broke"),
    ]
    assert {line["actor"] for line in lines} == {"trainer/1"}
    assert (lines[0]["step"], lines[0]["seconds"]) == (3, 0.5)
    assert "ValueError: lone surrogate" in lines[2]["traceback"]
    assert stderr.startswith("step 3\ntransformers.loading: odd weights\nit broke\nTraceback")


def test_the_level_applies_and_a_restarted_actor_appends(tmp_path):
    assert [line["message"] for line in logged(tmp_path, "debug")[0]] == [
        "details",
        "step 3",
        "odd weights",
        "it broke",
    ]
    assert [line["message"] for line in logged(tmp_path, "error")[0]][4:] == ["odd weights", "it broke"]


def test_messages_go_to_the_current_stderr(tmp_path):
    """A progress line replaces sys.stderr while it is shown."""
    script = (
        "import io, logging, sys\n"
        "from asyncrl.observability.telemetry.log import LogConfig, configure_logging\n"
        "configure_logging('driver', LogConfig(sys.argv[1], 'info'))\n"
        "real, sys.stderr = sys.stderr, io.StringIO()\n"
        "logging.getLogger('asyncrl').info('hidden')\n"
        "real.write('caught ' + sys.stderr.getvalue())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "caught hidden\n"
