#!/usr/bin/env bash
# Makes the environment $VENV from pyproject.toml and constraints.txt, unless one of the same lock is there already.
# With ASYNCRL_ENV_CACHE set, the environment lives there under the lock's hash and $VENV is a link to it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case "$version" in
  3.1[1-9]) ;;
  *) echo "asyncrl needs CPython 3.11 or newer; $python is $version. Set PYTHON=python3.11, say." >&2; exit 1 ;;
esac
lock=$(cat pyproject.toml constraints.txt <(echo "$version") | sha256sum | cut -c1-16)

if [ "$(cat "$venv/.lock" 2>/dev/null)" = "$lock" ]; then exit 0; fi
target=$venv
if [ -n "${ASYNCRL_ENV_CACHE:-}" ]; then
  mkdir -p "$ASYNCRL_ENV_CACHE"
  target=$ASYNCRL_ENV_CACHE/$lock
  # one maker at a time: who comes second waits, and then finds the environment made (the lock ends with this process)
  exec 9> "$target.flock"
  flock 9
  rm -rf "$venv" && ln -s "$target" "$venv"
  if [ "$(cat "$target/.lock" 2>/dev/null)" = "$lock" ]; then exit 0; fi
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  echo "$python cannot make environments with pip: its ensurepip module is missing (package python$version-venv or" \
    "python3-venv; on Debian and Ubuntu: apt-get install python3-venv)." >&2
  exit 1
fi
echo "making the environment $target (once; a few minutes)"
rm -rf "$target"
"$python" -m venv "$target"
# torch first and by its exact version: where a CPU build is offered it is taken, on a GPU machine the CUDA one
"$target/bin/pip" install --quiet --constraint constraints.txt torch==2.13.0
"$target/bin/pip" install --quiet --constraint constraints.txt --editable '.[test,dev]'
echo "$lock" > "$target/.lock"
