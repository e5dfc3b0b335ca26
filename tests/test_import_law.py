"""The import law of docs/architecture.md, read from the source: who may import whom, and who may import Ray."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asyncrl"
FILES = sorted(PACKAGE.rglob("*.py"))

LEAVES = {"config", "sample", "telemetry", "tasks", "priority"}
#: room → the rooms it may import, beside itself
MAY_IMPORT = {
    "config": set(),
    "sample": set(),
    "telemetry": set(),
    "tasks": set(),
    "priority": set(),
    "sample_queue": LEAVES | {"ray_client"},
    "param_sync": LEAVES,
    "models": LEAVES,
    "data": LEAVES,
    "reporting": LEAVES | {"sample_queue"},
    "trainer": LEAVES | {"sample_queue", "param_sync", "models", "data", "ray_client"},
    "rollouter": LEAVES | {"sample_queue", "param_sync", "models", "data", "ray_client"},
    "ray_client": {"telemetry"},
}
#: the files that define Ray actors or launch them
RAY_FILES = {"ray_client.py", "cluster.py", "sample_queue/actor.py", "trainer/actors.py", "rollouter/actors.py"}
#: packages that only one folder may import
OWNED = {
    "vllm": "rollouter/engines/vllm",
    "sglang": "rollouter/engines/sglang",
    "megatron": "trainer/backends/megatron",
    "mbridge": "trainer/backends/megatron",
    "wandb": "reporting",
}
#: too heavy for a package's __init__
HEAVY = {"torch", "ray", "transformers", "wandb", "vllm", "sglang", "megatron", "mbridge", "plotly", "pyarrow"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_each_file_keeps_the_import_law(path):
    here, name = room(path), str(path.relative_to(PACKAGE))
    found = imports(path)
    rooms = {i.split(".")[1] for i in found if i.startswith("asyncrl.")} - {here, "__version__"}
    if here in MAY_IMPORT:
        assert rooms <= MAY_IMPORT[here], f"{name} imports {sorted(rooms - MAY_IMPORT[here])}"
    packages = {i.split(".")[0] for i in found}
    assert "ray" not in packages or name in RAY_FILES, f"{name} imports ray; only {sorted(RAY_FILES)} may"
    for package, owner in OWNED.items():
        assert package not in packages or name.startswith(owner), f"{name} imports {package}, which belongs to {owner}"
    if path.name == "__init__.py":
        assert not packages & HEAVY, f"{name} imports {sorted(packages & HEAVY)}"


def test_every_room_is_under_the_law():
    """A new folder must be given its place in MAY_IMPORT."""
    folders = {room(p) for p in FILES if len(p.relative_to(PACKAGE).parts) > 1}
    assert folders <= set(MAY_IMPORT)
