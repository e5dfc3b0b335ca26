# Newcomers need `make quickstart` and `make test`; both create the environment first.
PYTHON ?= python3
VENV ?= .venv
# worker processes of the tiers in the default environment
TEST_WORKERS ?= 2
BIN = $(VENV)/bin
export OMP_NUM_THREADS = 1

CHECKPOINT = checkpoints/arith-mimo
DATA = data/arithmetic
AGENT_CHECKPOINT = checkpoints/guess-mimo
AGENT_DATA = data/guess
CODE_CHECKPOINT = checkpoints/code-mimo
CODE_DATA = data/programs

.PHONY: venv venv-gym venv-trl quickstart quickstart-agent quickstart-agent-inputs code-inputs lint format clean
.PHONY: test test-install test-install-short torture torture-short test-faults test-resume test-slow test-vllm test-vllm-short test-sglang test-sglang-short test-megatron test-megatron-short test-megatron-newest
.PHONY: test-agents test-agents-short

venv:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/make_venv.sh

# layered over the default environment
venv-gym venv-trl: venv-%: venv
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/make_venv.sh $*

venv-%:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/make_venv.sh $*

quickstart: venv $(CHECKPOINT)/model.safetensors $(DATA)/train.jsonl
	$(BIN)/python -m asyncrl.fully_async_main --config configs/quickstart.yaml

$(CHECKPOINT)/model.safetensors: | venv
	$(BIN)/python -m asyncrl.models.make_checkpoint --out $(CHECKPOINT) --seed 1

$(DATA)/train.jsonl: | venv
	$(BIN)/python -m asyncrl.data.arithmetic --out $(DATA)

# an agent of the openai client, which has an environment of its own
quickstart-agent: quickstart-agent-inputs
	$(BIN)/python -m asyncrl.fully_async_main --config configs/quickstart_agent.yaml \
		rollout.agent.python=$(VENV)-agent-openai/bin/python

quickstart-agent-inputs: venv venv-agent-openai $(AGENT_CHECKPOINT)/model.safetensors $(AGENT_DATA)/train.jsonl

$(AGENT_CHECKPOINT)/model.safetensors: | venv
	$(BIN)/python -m asyncrl.models.make_checkpoint --out $(AGENT_CHECKPOINT) --seed 1 --warm-start-steps 700 \
		--demonstrations asyncrl.data.guess:demonstrations --tokens asyncrl.data.guess:TOKENS

$(AGENT_DATA)/train.jsonl: | venv
	$(BIN)/python -m asyncrl.data.guess --out $(AGENT_DATA)

# what configs/code_cpu.yaml trains on
code-inputs: venv $(CODE_CHECKPOINT)/model.safetensors $(CODE_DATA)/train.jsonl

$(CODE_CHECKPOINT)/model.safetensors: | venv
	$(BIN)/python -m asyncrl.models.make_checkpoint --out $(CODE_CHECKPOINT) --seed 1 --warm-start-steps 400 \
		--demonstrations asyncrl.data.programs:demonstrations

$(CODE_DATA)/train.jsonl: | venv
	$(BIN)/python -m asyncrl.data.programs --out $(CODE_DATA)

test: venv
	$(BIN)/python -m pytest -q --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# that pip finds the packages of the environments for GPUs, without installing them
test-install: venv
	$(BIN)/python -m pytest -q -m install

test-install-short: venv
	$(BIN)/python -m pytest -q -m "install and not slow"

test-faults: venv $(CHECKPOINT)/model.safetensors $(DATA)/train.jsonl
	$(BIN)/python -m pytest -q -m "faults and not slow" -o timeout=900 --numprocesses $(TEST_WORKERS) --dist worksteal

test-resume: venv $(CHECKPOINT)/model.safetensors $(DATA)/train.jsonl
	$(BIN)/python -m pytest -q -m resume -o timeout=900 --numprocesses $(TEST_WORKERS) --dist worksteal

# storms of faults, without Ray and over whole runs, and of options; everything is drawn from SEED
SEED ?= 1
torture: venv
	$(BIN)/python -m tests.torture.fast $(SEED)
	$(BIN)/python -m tests.torture.storm $(SEED)
	$(BIN)/python -m tests.torture.storm $(SEED) --machines 2
	$(BIN)/python -m tests.torture.options $(SEED)

torture-short: venv
	$(BIN)/python -m tests.torture.fast 1 --faults 60
	$(BIN)/python -m tests.torture.storm 1 --faults 6 --steps 20
	$(BIN)/python -m tests.torture.storm 2 --faults 4 --steps 20 --machines 2
	$(BIN)/python -m tests.torture.options 1 --runs 1
	$(BIN)/python -m pytest -q -m resume tests/test_resume.py -k bit_for_bit -o timeout=900

# markers whose full forms have the slow tests of their environments
OTHER_TIERS = vllm or sglang or megatron or agents or gym or install

test-slow: venv $(CHECKPOINT)/model.safetensors $(DATA)/train.jsonl
	$(BIN)/python -m pytest -q -m "slow and not ($(OTHER_TIERS))" -o timeout=1500 --numprocesses $(TEST_WORKERS) --dist worksteal

# Each backend's tests run in its own environment; drivers and torch trainers run in the default one.
test-vllm: venv venv-vllm $(CHECKPOINT)/model.safetensors $(DATA)/train.jsonl
	ASYNCRL_PYTHON=$(BIN)/python $(VENV)-vllm/bin/python -m pytest -q -m vllm

test-vllm-short: venv venv-vllm
	ASYNCRL_PYTHON=$(BIN)/python $(VENV)-vllm/bin/python -m pytest -q -m "vllm and not slow"

test-sglang: venv venv-sglang $(CHECKPOINT)/model.safetensors $(DATA)/train.jsonl
	ASYNCRL_PYTHON=$(BIN)/python $(VENV)-sglang/bin/python -m pytest -q -m sglang

test-sglang-short: venv venv-sglang
	ASYNCRL_PYTHON=$(BIN)/python $(VENV)-sglang/bin/python -m pytest -q -m "sglang and not slow"

test-megatron: venv-megatron
	$(VENV)-megatron/bin/python -m pytest -q -m megatron

test-megatron-short: venv-megatron
	$(VENV)-megatron/bin/python -m pytest -q -m "megatron and not slow"

# newest releases, on CPython 3.12
test-megatron-newest: venv-megatron-newest
	$(VENV)-megatron-newest/bin/python -m pytest -q -m "megatron and not slow"

# unmodified clients as agents, each in an environment of its own, with the native engine and, in the full form, vLLM;
# and tasks of reasoning-gym
AGENTS = $(patsubst tests/agents/%/constraints.txt,venv-agent-%,$(wildcard tests/agents/*/constraints.txt))

test-agents: venv venv-vllm venv-gym $(AGENTS)
	$(BIN)/python -m pytest -q -m agents
	$(VENV)-gym/bin/python -m pytest -q -m gym

test-agents-short: venv venv-gym $(AGENTS)
	$(BIN)/python -m pytest -q -m "agents and not slow"
	$(VENV)-gym/bin/python -m pytest -q -m "gym and not slow"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy asyncrl

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf runs checkpoints data
