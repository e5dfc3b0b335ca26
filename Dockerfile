# Environments for GPUs; the driver and its libraries come from the container runtime. See docs/install.md.
#   docker build --target trainer|vllm|sglang|megatron -t asyncrl .
FROM python:3.11-bookworm AS trainer
# bubblewrap: sandboxes for code of the policy; a C compiler, which this image has: triton compiles its launchers with it
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap make && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/asyncrl
COPY . .
ENV PIP_NO_CACHE_DIR=1 PATH=/opt/asyncrl/.venv/bin:$PATH
RUN make venv
ENTRYPOINT []
CMD ["python", "-m", "asyncrl.cli.main", "--help"]

FROM trainer AS vllm
RUN make venv-vllm-gpu
ENV ASYNCRL_VLLM_PYTHON=/opt/asyncrl/.venv-vllm-gpu/bin/python

FROM trainer AS sglang
RUN make venv-sglang-gpu
ENV ASYNCRL_SGLANG_PYTHON=/opt/asyncrl/.venv-sglang-gpu/bin/python

FROM trainer AS megatron
RUN make venv-megatron
ENV ASYNCRL_MEGATRON_PYTHON=/opt/asyncrl/.venv-megatron/bin/python
