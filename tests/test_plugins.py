"""Parts are found by name, by entry point or by import path; everything else is refused in one line."""

import pytest

from asyncrl.plugins.import_path import ImportPathError, load
from asyncrl.plugins.registry import Registry, UnknownPart


class Colour:
    def upper(self) -> str: ...


@pytest.fixture
def colours(tmp_path, monkeypatch) -> Registry:
    folder = tmp_path / "colours_of_a_test"
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "red.py").write_text("COLOUR = 'red'\n")
    (folder / "broken.py").write_text("import no_such_module\nCOLOUR: str = 'broken'\n")
    (folder / "base.py").write_text("def paint():\n    COLOUR = 'not one'\n")
    (folder / "deep" / "__init__.py").touch()
    (folder / "deep" / "spec.py").write_text("COLOUR: str = 'deep'\n")
    monkeypatch.syspath_prepend(tmp_path)
    return Registry("colour", "paint.colour", "colours_of_a_test", "COLOUR", "asyncrl.colours", Colour)


def test_a_module_or_folder_that_defines_the_attribute_is_a_part(colours):
    assert colours.names() == ["broken", "deep", "red"]
    assert colours.find("red") == "red"
    assert colours.find("deep") == "deep"
    assert colours.find("colours_of_a_test.red:COLOUR") == "red"


def test_an_installed_package_registers_a_part_by_an_entry_point(colours, tmp_path):
    metadata = tmp_path / "dyes-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dyes\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[asyncrl.colours]\nindigo = colours_of_a_test.deep.spec:COLOUR\n")
    assert "indigo" in colours.names()
    assert colours.find("indigo") == "deep"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blue", r"^paint.colour: expected one of broken, deep, red, or an import path .*; found 'blue'$"),
        ("broken", r"^paint.colour: .*module colours_of_a_test.broken does not import \(ModuleNotFoundError: .*"),
        ("no_such.module:X", r"^paint.colour: no_such.module:X: module no_such.module does not import \("),
        ("colours_of_a_test.red:HUE", r"^paint.colour: colours_of_a_test.red:HUE: module .*red has no HUE$"),
        ("math:pi", r"^paint.colour: math:pi lacks upper, which every colour has$"),
        ("builtins:str", r"^paint.colour: builtins:str is a class; expected an instance, such as COLOUR = str\(\)$"),
    ],
)
def test_an_unknown_or_broken_part_is_refused_in_one_line(colours, name, message):
    with pytest.raises(UnknownPart, match=message) as refused:
        colours.find(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["", "math", "math:", ":pi", "math:pi:tau"])
def test_a_path_needs_both_halves(path):
    with pytest.raises(ImportPathError, match=r"expected an import path such as package\.module:name"):
        load(path)
