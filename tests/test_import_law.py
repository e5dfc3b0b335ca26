"""The import rules of docs/architecture.md, checked in the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asyncrl"
FILES = sorted(PACKAGE.rglob("*.py"))

LEAVES = {"config", "config.section", "config.fields", "algorithms", "types", "plugins", "processes", "cpu", "disk"}
LEAVES |= {"observability.telemetry"}
#: folder → the folders that it may import besides itself; a nested folder that is listed counts on its own
MAY_IMPORT = {
    "config": {"config.section", "config.fields", "algorithms"},
    "config.section": set(),
    "config.fields": set(),
    "algorithms": {"config.section", "config.fields", "plugins"},
    "types": set(),
    "plugins": set(),
    "disk": set(),
    "observability.telemetry": set(),
    "processes": {"observability.telemetry"},
    "cpu": {"observability.telemetry"},
    "sandbox": LEAVES,
    "tools": LEAVES | {"sandbox", "rollouter"},
    "sample_queue": LEAVES,
    "param_sync": LEAVES,
    "models": LEAVES,
    "data": LEAVES,
    "observability": LEAVES | {"sample_queue"},
    "trainer": LEAVES | {"sample_queue", "param_sync", "models", "data"},
    "rollouter": LEAVES | {"sample_queue", "param_sync", "models", "data", "sandbox"},
    "run": LEAVES
    | {"sample_queue", "param_sync", "models", "data", "observability", "trainer", "rollouter", "sandbox"},
    "simulation": LEAVES
    | {"sample_queue", "param_sync", "models", "data", "observability", "trainer", "rollouter", "run"},
    "evaluation": LEAVES | {"models", "data", "trainer", "rollouter", "run"},
    "cli": LEAVES | {"sample_queue", "observability", "data", "sandbox", "evaluation", "simulation", "run"},
}
#: the files that define Ray actors or launch them
RAY_FILES = {
    "processes/actor_client.py",
    "run/cluster.py",
    "run/placement.py",
    "sample_queue/actor.py",
    "trainer/actors.py",
    "rollouter/actors.py",
}
#: packages that only these files may import
OWNED = {
    "vllm": ("rollouter/engines/vllm/", "cpu/vllm.py"),
    "sglang": ("rollouter/engines/sglang/", "cpu/sglang.py"),
    "megatron": ("trainer/backends/megatron/", "cpu/megatron.py"),
    "mbridge": ("trainer/backends/megatron/",),
    "wandb": ("observability/sinks/",),
}
#: too heavy for a package's __init__
HEAVY = {"torch", "ray", "transformers", "wandb", "vllm", "sglang", "megatron", "mbridge", "plotly", "pyarrow"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports, which show what imports what"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def folder_of(module: str) -> str:
    """Folder in `MAY_IMPORT` to which ``module`` (dotted, below ``asyncrl``) belongs; else its first part."""
    return max((r for r in MAY_IMPORT if f"{module}.".startswith(f"{r}.")), key=len, default=module.split(".")[0])


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_each_file_obeys_the_import_rules(path):
    here, name = folder_of(module_of(path)), str(path.relative_to(PACKAGE))
    found = imports(path)
    used = {folder_of(i.removeprefix("asyncrl.")) for i in found if i.startswith("asyncrl.")} - {here, "__version__"}
    if here in MAY_IMPORT:
        assert used <= MAY_IMPORT[here], f"{name} imports {sorted(used - MAY_IMPORT[here])}"
    packages = {i.split(".")[0] for i in found}
    assert "ray" not in packages or name in RAY_FILES, f"{name} imports ray; only {sorted(RAY_FILES)} may"
    for package, owners in OWNED.items():
        assert package not in packages or name.startswith(owners), f"{name} imports {package}; only {owners} may"
    if path.name == "__init__.py":
        assert not packages & HEAVY, f"{name} imports {sorted(packages & HEAVY)}"


def test_every_folder_has_import_rules():
    """A new folder needs an entry in MAY_IMPORT."""
    folders = {folder_of(module_of(p)) for p in FILES if len(p.relative_to(PACKAGE).parts) > 1}
    assert folders <= set(MAY_IMPORT)


def test_the_wall_clock_decides_nothing():
    """It may be set at any time; only what people read shows it."""
    reads = [
        p for p in FILES if any(clock in p.read_text() for clock in ("time.time(", "time.time_ns(", ".now(", "unix_s("))
    ]
    display = ("observability/sinks/", "observability/report/")
    # the name of a folder, the date of an answer
    display += ("trainer/checkpoints.py", "rollouter/endpoint/session.py")
    display += ("observability/telemetry/clock.py",)
    assert [n for p in reads if not (n := str(p.relative_to(PACKAGE))).startswith(display)] == []
