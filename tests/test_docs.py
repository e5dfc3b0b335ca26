"""The documentation is correct: commands and links are valid, generated pages are current, examples run."""

import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncrl.algorithms import reference as algorithms
from asyncrl.config import reference as options
from asyncrl.config.load import load_config
from asyncrl.config.options import known_keys
from asyncrl.observability import reference as charts
from tests.support.families import FAMILIES
from tests.support.tiny import make_inputs, overrides

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MAIN = "asyncrl.fully_async_main"


def commands(page: Path) -> list[list[str]]:
    """Words of each command in a page's shell blocks, without comments."""
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [shlex.split(line) for line in lines if re.match(r"(make|python|ray|\.venv\S*/python) ", line)]


ALL = [(page.name, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{page}: {' '.join(c)[:60]}" for page, c in ALL])
def test_each_documented_command_is_valid(page, command, monkeypatch):
    if "--" in command:  # after it comes the job's own command
        assert (ROOT / command[command.index("--runtime-env") + 1]).is_file()
        command = command[command.index("--") + 1 :]
    if command[0] == "make":
        assert re.search(rf"^{re.sub('venv-.*', 'venv-%', command[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif command[0] != "ray":
        assert command[1] == "-m"
        assert importlib.util.find_spec(command[2]) is not None
    if command[2:3] == [MAIN]:
        monkeypatch.setenv("ASYNCRL_VLLM_PYTHON", "python")
        given = [word for word in command[3:] if "=" in word]
        assert load_config(ROOT / command[command.index("--config") + 1], given)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_options_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    roots = {key.split(".")[0] for key in known_keys() if "." in key}
    theirs = r"^\| .*?\| " if page.name == "from_verl.md" else None  # verl's keys in the first column
    if theirs:
        text = re.sub(theirs, "| ", text, flags=re.MULTILINE)
    for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[=:][^`]*)?`", text):
        known = key in known_keys() or re.match(r"(rollout\.engine|rollout\.agent|reward|algorithm)\.args\.", key)
        assert known or key.split(".")[0] not in roots or key.endswith((".py", ".yaml", ".md")), f"{page.name}: {key}"


def test_the_generated_pages_are_current():
    pages = {"configuration.md": options, "charts.md": charts, "algorithms.md": algorithms}
    for name, page in ((name, generator.reference()) for name, generator in pages.items()):
        assert (ROOT / "docs" / name).read_text() == page, f"docs/{name} is outdated, see its first lines"


def test_every_option_is_in_the_reference():
    page = options.reference()
    leaves = [key for key, kind in known_keys().items() if not dataclasses.is_dataclass(kind)]
    assert [key for key in leaves if f"| `{key}` |" not in page] == []


def test_the_reference_shows_the_limits_of_each_option():
    rows = dict(re.findall(r"^\| `(\S+)` \| (.*?) \| ", options.reference(), re.MULTILINE))
    assert rows["rollout.n"] == "integer, at least 1"
    assert rows["validation.top_p"] == "number, more than 0 and at most 1"
    assert rows["supervision.window_s"] == "seconds, more than 0"
    assert rows["rollout.engine.dtype"] == "`auto`, `float32`, `bfloat16`"


@pytest.mark.slow
def test_the_quickstart_page_s_commands_run(tmp_path):
    """With a tiny run instead of the quickstart."""
    inputs, run_dir = make_inputs(tmp_path), tmp_path / "run"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as ray_dir:
        tiny = overrides(inputs, run_dir, f"ray.temp_dir={ray_dir}")
        for command in commands(ROOT / "docs/quickstart.md"):
            if command[0] != "python":
                continue
            words = [str(run_dir) if word == "runs/quickstart" else word for word in command[1:]]
            more = tiny if command[2] == MAIN else []
            done = subprocess.run(
                [sys.executable, *words, *more], cwd=ROOT, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stdout + done.stderr
    assert (run_dir / "trace.json.gz").is_file()


def test_the_table_of_families_has_all_that_are_tested():
    page = (ROOT / "docs/engines_and_backends.md").read_text()
    table = page.partition("<!-- families: begin -->\n")[2].partition("<!-- families: end -->")[0]
    assert re.findall(r"^\| ([^|`]+) \| `", table, re.MULTILINE) == list(FAMILIES)
    assert (
        f"[{len(FAMILIES)} families](docs/engines_and_backends.md#any-checkpoint)" in (ROOT / "README.md").read_text()
    )
