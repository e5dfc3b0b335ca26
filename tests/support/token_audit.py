"""Compares what a run trained with what its engines sampled, token by token."""

from __future__ import annotations

import math
import sqlite3
import tempfile
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree

import numpy as np
import xxhash

from asyncrl.sample_queue.spool import Spool
from asyncrl.types.groups import Group
from tests.support.logged_engine import Sampled, read_log

Name = tuple[str, int]  # of a sample: its group, and its index
Place = tuple[Name, int, int]  # sample, digest of all tokens before, and the token
Entry = tuple[int, str, tuple[int, int]]  # bits of the logprob, replica, version


@dataclass
class TokenAudit:
    """``exact`` of the ``trained`` tokens are in the engines' log of the sample, after the same tokens, with the same
    logprob, version and replica. ``why``: the other tokens of the log, by reason; ``unexplained`` among them."""

    samples: int = 0
    sequences: int = 0
    trained: int = 0
    exact: int = 0
    sampled: int = 0
    why: Counter[str] = field(default_factory=Counter)

    @property
    def unexplained(self) -> int:
        return self.why["unexplained"]


def audit_tokens(run: Path, died_s: float = math.inf) -> TokenAudit:
    """Of a run with `tests.support.logged_engine` that has ended. ``died_s``: between the death of its rollouter, if it
    died, and the first request of the next one, in seconds of the machine's clock."""
    audit = TokenAudit()
    log = list(read_log(run))
    requests = [_Request.of(sampled, sampled.at_s > died_s) for sampled in log]
    entries: Counter[tuple[Place, Entry]] = Counter()
    for request, sampled in zip(requests, log, strict=True):
        entries.update(zip(_places(request.sample, sampled.context, sampled.tokens), _entries(sampled)))
    groups = _trained_groups(run)
    used: Counter[tuple[Place, Entry]] = Counter()
    for group in groups.values():
        audit.samples += len(group.sample_index)
        for q in range(len(group.sequence_sample)):
            audit.sequences += 1
            rows = slice(group.offsets[q], group.offsets[q + 1])
            prompt = group.prompt_tokens[: group.prefix[q]]
            samplers = _samplers(group, q)
            name = group.uid, int(group.sample_index[group.sequence_sample[q]])
            bits = group.logprobs[rows].view(np.int32).tolist()
            for i, place in enumerate(_places(name, prompt, group.tokens[rows])):
                if not group.loss_mask[rows][i]:
                    continue
                audit.trained += 1
                entry = (bits[i], *samplers[i])
                if used[place, entry] < entries[place, entry]:
                    used[place, entry] += 1
                    audit.exact += 1
    last_attempt: dict[tuple[str, ...], int] = defaultdict(int)
    last_loop: dict[Name, str] = {}
    pairs = sorted(zip(requests, log, strict=True), key=lambda pair: pair[1].at_s)
    context: dict[tuple[str, ...], int] = {}  # of each call, as it began
    for request, sampled in pairs:
        context.setdefault(request.call, _digest(sampled.context))
    calls = Counter((request.sample, context[request.call]) for request in {r.call: r for r in requests}.values())
    for request, _ in pairs:
        last_attempt[request.call] = max(last_attempt[request.call], request.attempt)
        last_loop[request.sample] = request.loop
    for request, sampled in reversed(pairs):  # what continues an interrupted request may have sampled the same
        audit.sampled += len(sampled.tokens)
        group, missing = groups.get(request.sample[0]), 0
        for known in zip(_places(request.sample, sampled.context, sampled.tokens), _entries(sampled)):
            if used[known]:
                used[known] -= 1
            else:
                missing += 1
        audit.why["trained"] += len(sampled.tokens) - missing
        if group is None:
            reason = "group not trained"
        elif request.sample[1] not in group.sample_index:
            reason = "sample failed"
        elif request.attempt < last_attempt[request.call]:
            reason = "lost with a replica, or in an abort"
        elif request.loop != last_loop[request.sample]:
            reason = "lost with the rollouter"
        elif calls[request.sample, context[request.call]] > 1:
            reason = "of several equal calls"
        else:
            reason = "unexplained"
        audit.why[reason] += missing
    return audit


@dataclass(frozen=True)
class _Request:
    """``sample``: group and index. ``loop`` names the rollout loop that had the sample, ``attempt`` counts the replicas
    that had the ``call``."""

    sample: Name
    loop: str
    call: tuple[str, ...]
    attempt: int

    @classmethod
    def of(cls, sampled: Sampled, second: bool) -> _Request:
        """``second``: of the second rollouter, which counts from the beginning."""
        call, attempt = sampled.request.split("#")
        *uid, loop, index, _ = call.split("/")
        rollouter = "second" if second else "first"
        return cls(("/".join(uid), int(index)), f"{rollouter}/{loop}", (rollouter, call), int(attempt))


def _digest(tokens: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int32).data)


def _entries(sampled: Sampled) -> list[Entry]:
    bits = np.ascontiguousarray(sampled.logprobs, np.float32).view(np.int32).tolist()
    return [(b, sampled.replica, tuple(version)) for b, version in zip(bits, sampled.versions, strict=True)]


def _places(name: Name, context: np.ndarray, tokens: np.ndarray) -> list[Place]:
    digest = xxhash.xxh3_64(np.ascontiguousarray(context, np.int32).data)
    places = []
    for token in np.ascontiguousarray(tokens, np.int32):
        places.append((name, digest.intdigest(), int(token)))
        digest.update(token.tobytes())
    return places


def _samplers(group: Group, q: int) -> list[tuple[str, tuple[int, int]]]:
    """Replica and version of each token of a sequence."""
    spans = slice(group.span_offsets[q], group.span_offsets[q + 1])
    starts = group.span_start[spans]
    count = group.offsets[q + 1] - group.offsets[q]
    of = np.searchsorted(starts, np.arange(count), "right") - 1
    first = group.span_offsets[q]
    return [
        (
            group.replicas[group.span_replica[first + s]],
            (int(group.span_lineage[first + s]), int(group.span_number[first + s])),
        )
        for s in of
    ]


def _trained_groups(run: Path) -> dict[str, Group]:
    with closing(sqlite3.connect(f"{(run / 'ledger.sqlite').as_uri()}?mode=ro", uri=True)) as db:
        trained = {uid for (uid,) in db.execute("SELECT uid FROM groups WHERE state = 'trained'")}
    with tempfile.TemporaryDirectory() as folder:
        copytree(run / "spool", Path(folder) / "spool")  # opening one writes to it
        spool = Spool(Path(folder) / "spool")
        groups = [Group.from_buffer(payload) for _, payload in spool.records()]
        spool.close()
    return {group.uid: group for group in groups if group.uid in trained}
