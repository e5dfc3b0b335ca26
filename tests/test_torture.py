"""Short storms of `tests.torture`; `make torture` has long ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.options import known_keys
from tests.torture.options import CHOICES

ROOT = Path(__file__).parent.parent


def storm(*arguments: str) -> None:
    command = [sys.executable, "-m", "tests.torture.fast", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow  # `make torture-short` has more
def test_no_fault_of_disks_and_processes_loses_or_repeats_anything():
    storm("0", "--faults", "10")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "seed",
    [
        1001,  # a power cut took a folder that was never synced
        2010,  # a damaged file of a driver's epoch
        4026,  # a death between the end of payloads and the deletion of their segments
        6046,  # a full disk before the run had begun left a folder that looked like a run
    ],
)
def test_storms_that_once_found_something(seed):
    storm("--storm", str(seed), "--faults", "12")


def test_the_options_of_the_storm_exist():
    drawn = {option.partition("=")[0] for choice in CHOICES for options in choice for option in options.split()}
    assert drawn <= known_keys().keys()
