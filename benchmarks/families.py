"""Model families that the torch backend trains through transformers, held against references. The last line is JSON.

Of each family a tiny random checkpoint in float32, whose weights make windows, caps and sinks matter:

- logprobs of sequences scored together equal those of transformers for each alone, with eager attention (≤ 1e-5);
- after a training step and a sync into a vLLM replica, whose digests are compared, vLLM's logprobs of the tokens that
  it samples equal those of the exported checkpoint (≤ 1e-4).

A family of which vLLM's CPU build is no reference has a reason in `tests.support.families`.

Needs vLLM's environment; nine minutes. `--write` puts the table into docs/engines_and_backends.md.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.families [--only "Gemma 2" ...] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.trainer.rank import TrainerRank
from tests.support.engine_replica import request
from tests.support.families import FAMILIES, Family, difference, plain_logprobs, sequences, write
from tests.support.trainer import make_config, make_groups

WITH_VLLM = 1e-4  # nats, in float32
PAGE = Path(__file__).parent.parent / "docs" / "engines_and_backends.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"


@dataclass
class Row:
    name: str
    kind: str
    attention: str = "–"
    alone: float | None = None
    vllm: float | None = None
    note: str = ""

    @property
    def exact(self) -> bool:
        return self.alone is not None and self.alone <= FAMILIES[self.name].exact

    @property
    def with_vllm(self) -> bool:
        return self.vllm is not None and self.vllm <= WITH_VLLM

    def cells(self) -> list[str]:
        figure = lambda value: "fails" if value is None else f"{value:.0e}"
        return [self.name, f"`{self.kind}`", self.attention, figure(self.alone), figure(self.vllm), self.note]


HEADS = ["family", "model_type", "attention on CPUs", "transformers", "vLLM", ""]


async def vllm_difference(family: Family, folder: Path) -> tuple[float, bool]:
    """Largest difference (nats) between vLLM's logprobs of its samples and those of the trained checkpoint; and whether
    vLLM runs transformers' code of the family, which makes it no independent reference. Raises what training, sync or
    vLLM raise."""
    from vllm.model_executor.models.registry import _TRANSFORMERS_SUPPORTED_MODELS

    from tests.support.vllm_replica import Replica, replica_config

    write(family, folder)
    trainer = TrainerRank(
        make_config(str(folder), implementation="transformers", lr=1e-2), 0, 1, None, Recorder("trainer/0")
    )
    try:
        trainer.train(0, make_groups())
        trainer.export_hf(folder / "trained")
        replica = await Replica.start(replica_config(folder, slots=4, max_context_tokens=128))
        try:
            replica.rank.tied = tuple(spec for spec in trainer.manifest() if spec.tied_to)
            await replica.sync(dict(trainer.export()))
            prompts = {str(i): tokens.tolist() for i, tokens in enumerate(sequences())}
            answers = await replica.generate([request(i, tokens, 24) for i, tokens in prompts.items()])
        finally:
            await replica.close()
    finally:
        trainer.close()
    model = AutoModelForCausalLM.from_pretrained(folder / "trained", attn_implementation="eager", dtype=torch.float32)
    largest = 0.0
    with torch.no_grad():
        for i, prompt in prompts.items():
            expected = plain_logprobs(model, torch.tensor(prompt + answers[i].tokens))[len(prompt) - 1 :]
            largest = max(largest, float((expected - torch.tensor(answers[i].logprobs)).abs().max()))
    return largest, type(model).__name__ in _TRANSFORMERS_SUPPORTED_MODELS


def measure(name: str) -> Row:
    """Errors go into the row's note."""
    family = FAMILIES[name]
    row = Row(name, family.kind)
    try:
        row.attention, row.alone = difference(family)
        with tempfile.TemporaryDirectory() as folder:
            row.vllm, runs_transformers = asyncio.run(vllm_difference(family, Path(folder)))
        if runs_transformers:
            row.note = "vLLM runs transformers' code"
    except Exception as e:
        row.note = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
    if not row.with_vllm:
        row.note = family.vllm or row.note
    return row


def markdown(rows: list[Row]) -> str:
    lines = [HEADS, ["---"] * len(HEADS), *(row.cells() for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.only:
        rows.append(measure(name))
        print("  ".join(f"{cell:<16}" for cell in rows[-1].cells()), flush=True)
    if options.write:
        page = PAGE.read_text()
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        PAGE.write_text(before + BEGIN + markdown(rows) + END + after)
    figures = {
        "families": len(rows),
        "exact": sum(row.exact for row in rows),
        "with_vllm": sum(row.with_vllm for row in rows),
        "failed": [row.name for row in rows if not (row.exact and row.with_vllm)],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
