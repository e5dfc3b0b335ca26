"""The lists of `benchmarks.house` match the source: forms of a sample's tokens, and calls that carry them."""

import ast

from benchmarks import house

PARSED = {name: ast.parse(file.read_text()) for name, file in house.modules(house.ROOT).items()}
#: internals of one engine or backend
PRIVATE = ("asyncrl.rollouter.engines.native.", "asyncrl.trainer.backends.megatron.")


def test_every_class_that_holds_sampled_tokens_is_a_listed_form():
    found = set()
    for module, tree in PARSED.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not module.startswith(PRIVATE):
                fields = {
                    f.target.id for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
                }
                if "tokens" in fields and fields & {"logprobs", "targets"}:
                    found.add(f"{module}:{node.name}")
    assert found == set(house.FORMS)


def test_every_actor_call_that_carries_sampled_tokens_is_a_listed_crossing():
    found = set()
    for module, tree in PARSED.items():
        for cls in ast.walk(tree):
            if isinstance(cls, ast.ClassDef) and any(ast.unparse(d) == "ray.remote" for d in cls.decorator_list):
                for call in cls.body:
                    if isinstance(call, ast.AsyncFunctionDef):
                        annotated = [a.annotation for a in call.args.args] + [call.returns]
                        types = " ".join(ast.unparse(a) for a in annotated if a is not None)
                        if any(carrier in types for carrier in ("bytes", "EventBatch", "Snapshot")):
                            found.add(f"{module}:{cls.name}.{call.name}")
    assert found == {*house.CROSSINGS, *house.ASIDE}


def test_modules_that_import_each_other_are_one_cycle():
    assert house.cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e2"}, "e2": {"e"}}) == [
        ["a", "b", "c"],
        ["e", "e2"],
    ]


def test_naming_a_part_outside_its_folder_is_found_in_code_only():
    code = ast.parse('"""vllm."""\n# sglang\nname = "the sglang engine"\nc.trainer.megatron.x\n')
    assert house.names_outside("run/x.py", "asyncrl.run.x", code, set()) == ["rollouter/engines/sglang/"]
    assert house.names_outside("rollouter/engines/sglang/x.py", "asyncrl.rollouter.engines.sglang.x", code, set()) == []
    outside = {"asyncrl.rollouter.engines.native.core", "asyncrl.rollouter.engines.base"}
    found = house.names_outside("run/x.py", "asyncrl.run.x", ast.parse(""), outside)
    assert found == ["rollouter/engines/native/"]
