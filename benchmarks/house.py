"""Measures the code's structure: module sizes, import cycles, names of engines and frameworks outside their folders.

    python -m benchmarks.house [--tree DIR]

Parses the source of ``asyncrl/`` without running it. ``cycles``: groups of modules that import each other, including
imports inside functions. ``root_files``: modules at the package's root. ``named_outside``: files whose code (without
comments and docstrings) names an engine, a training framework or a transport outside its own folder; `asyncrl.cpu`
belongs to all of them, and options with a framework's name may be read. ``forms`` and ``crossings``: representations of
a sample's tokens, and process boundaries that they cross, between the engine that samples them and the loss;
`tests/test_house.py` checks both lists.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: representations of a sample's tokens, in order
FORMS = (
    "asyncrl.rollouter.engines.events:Event",  # of one request, in the engine's process
    "asyncrl.rollouter.engines.base:EventBatch",  # columns of many requests
    "asyncrl.rollouter.partial:GeneratedTokens",  # grows over aborts and syncs
    "asyncrl.rollouter.agents.base:Completion",  # returned to an agent loop
    "asyncrl.rollouter.endpoint.calls:Answer",  # sent to an agent over HTTP
    "asyncrl.types.samples:TokenSequence",
    "asyncrl.types.groups:Group",  # its bytes are spooled, leased and sent to ranks
    "asyncrl.trainer.backends.base:TrainBatch",  # a rank's packed sequences
    "asyncrl.trainer.backends.packing:MicroBatch",  # on the device
)
#: calls that carry a sample's tokens to another process, in order
CROSSINGS = (
    "asyncrl.rollouter.actors:EngineReplicaActor.events",  # replica → rollouter
    "asyncrl.sample_queue.actor:SampleQueueActor.put_and_issue",  # rollouter → queue
    "asyncrl.sample_queue.actor:SampleQueueActor.lease",  # queue → object store, by the driver
    "asyncrl.trainer.actors:TrainerRankActor.train",  # object store → ranks
)
#: calls that carry copies outside that path: for a restart of the rollouter, and for the report
ASIDE = (
    "asyncrl.sample_queue.actor:SampleQueueActor.snapshot",
    "asyncrl.trainer.actors:TrainerRankActor.drawn_groups",
)

#: folder of a part → words that name it; parts in folders of their own are also found by imports of them
NAMED = {
    "rollouter/engines/vllm/": r"vllm",
    "rollouter/engines/sglang/": r"sglang",
    "trainer/backends/megatron/": r"megatron|mbridge",
    "param_sync/transports/shared_memory": r"shared_memory",
    "param_sync/transports/cuda_ipc": r"cuda_ipc",
}
#: packages whose sub-packages are parts
SEAMS = ("asyncrl.rollouter.engines", "asyncrl.trainer.backends")
#: option sections named after a framework, see `asyncrl.config.schema`
OPTIONS = re.compile(r"MegatronConfig|(trainer\.)?megatron")


def modules(tree: Path) -> dict[str, Path]:
    """Dotted name → file, for all modules of asyncrl."""
    files = sorted((tree / "asyncrl").rglob("*.py"))
    return {".".join(f.relative_to(tree).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def imported(module: ast.Module, known: set[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(module):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in whole]
        found.update(name for name in names if name in known)
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components with more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def words(module: ast.Module) -> Iterator[str]:
    """Identifiers and strings in the code, without docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg | ast.keyword | ast.alias):
            yield (node.name if isinstance(node, ast.alias) else node.arg) or ""


def names_outside(place: str, name: str, module: ast.Module, imports: set[str]) -> list[str]:
    """Parts that this file names from outside their folders. ``place``: the file's path below asyncrl/."""
    if place.startswith("cpu/"):
        return []
    text = "\n".join(word for word in words(module) if not OPTIONS.fullmatch(word))
    found = {f for f, word in NAMED.items() if not place.startswith(f) and re.search(word, text, re.IGNORECASE)}
    for seam in SEAMS:
        for other in imports:
            if other.startswith(f"{seam}.") and other.count(".") > seam.count(".") + 1:  # in a part's sub-package
                part = ".".join(other.split(".")[: seam.count(".") + 2])
                if not name.startswith(part):
                    found.add(part.removeprefix("asyncrl.").replace(".", "/") + "/")
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout of asyncrl (default: this one)")
    tree = parser.parse_args().tree
    files = modules(tree)
    parsed = {name: ast.parse(file.read_text()) for name, file in files.items()}
    length = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    graph = {name: imported(module, set(files)) - {name} for name, module in parsed.items()}
    place = {name: str(file.relative_to(tree / "asyncrl")) for name, file in files.items()}
    outside = {name: names_outside(place[name], name, parsed[name], graph[name]) for name in files}
    outside = {name: named for name, named in outside.items() if named}
    import_cycles = cycles(graph)
    root = [p for p in place.values() if "/" not in p and p != "__init__.py"]
    lines, cpu = sum(length.values()), sum(n for name, n in length.items() if place[name].startswith("cpu/"))

    print(f"{'folder':<16}{'modules':>8}{'lines':>8}{'largest':>9}")
    for folder in sorted({p.split("/")[0] for p in place.values()}):
        sizes = [n for name, n in length.items() if place[name].split("/")[0] == folder]
        print(f"{folder:<16}{len(sizes):>8}{sum(sizes):>8}{max(sizes):>9}")
    for name in sorted(length, key=length.__getitem__, reverse=True)[:5]:
        print(f"large: {place[name]}, {length[name]} lines")
    for import_cycle in import_cycles:
        print(f"import cycle: {' ↔ '.join(import_cycle)}")
    for name, named in outside.items():
        print(f"named outside: {place[name]} names {', '.join(named)}")
    figures = {
        "lines": lines,
        "lines_without_cpu": lines - cpu,
        "cycles": len(import_cycles),
        "largest": max(length.values()),
        "root_files": len(root),
        "crossings": len(CROSSINGS),
        "forms": len(FORMS),
        "named_outside": len(outside),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
